"""Attention within documents: nothing passes from one to another, on any back-end."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from stability_lab.build import build_model, build_stabilizers, document_mark, fill_seams
from stability_lab.config import ConfigError
from stability_lab.model import flex
from stability_lab.model.attention import choose_backend, explicit_attention, logit_stats
from stability_lab.model.documents import DocumentMark, documents_of
from stability_lab.model.init import initialise
from stability_lab.model.transformer import GPT
from stability_lab.seams import Seams
from stability_lab.stabilizers.softcap import SoftCap

END = 256
ENDS, BEGINS = DocumentMark(END, False), DocumentMark(END, True)
TOKENS = torch.tensor([[1, 2, END, 3, 4, 5, END, END, 6], [END, 1, 2, 3, 4, 5, 6, 7, END]])


def test_numbers_of_documents() -> None:
    ends = documents_of(TOKENS, ENDS, "explicit")
    assert ends.number_BT.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1]]
    begins = documents_of(TOKENS, BEGINS, "explicit")
    assert begins.number_BT.tolist() == [[0, 0, 1, 1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1, 2]]
    assert ends.mask is None


def test_the_mask_of_sdpa_is_causal_within_documents() -> None:
    documents = documents_of(TOKENS, ENDS, "sdpa")
    assert isinstance(documents.mask, Tensor)
    for b, numbers in enumerate(documents.number_BT.tolist()):
        expected = [[k <= q and numbers[k] == numbers[q] for k in range(9)] for q in range(9)]
        assert documents.mask[b, 0].tolist() == expected


def build(config, device_type: str = "cpu", mark: DocumentMark | None = ENDS) -> GPT:
    model = dataclasses.replace(config.model, vocab_size=257)
    gpt = GPT(model, fill_seams(build_stabilizers(config)), device_type, mark=mark)
    initialise(gpt, 0)
    return gpt.eval()


def some_tokens(T: int, ends: list[int]) -> Tensor:
    tokens = torch.randint(256, (1, T), generator=torch.Generator().manual_seed(1))
    tokens[0, ends] = END
    return tokens


OPTIONS = {
    "sdpa": (),
    "explicit": ("model.attention=explicit",),
    "softcap": ("+stabilizer=softcap",),
    "grouped": ("model.n_kv_heads=2",),
    "no positions": ("model.positions=none", "model.attention=explicit"),
}


@pytest.mark.parametrize("mark", [ENDS, BEGINS])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_document_gives_what_it_gives_alone(tiny_config, options: tuple[str, ...], mark: DocumentMark) -> None:
    """RoPE sees differences of positions only. 300 tokens are more than one block of queries."""
    model = build(tiny_config("model.seq_len=300", *options), mark=mark)
    tokens, ends = some_tokens(300, [37, 140, 270]), [37, 140, 270, 299]
    with torch.no_grad():
        whole = model(tokens).logits_BTV[0]
        start = 0
        for end in ends:
            stop = end + 1 if mark is ENDS or end == 299 else end
            alone = model(tokens[:, start:stop]).logits_BTV[0]
            torch.testing.assert_close(whole[start:stop], alone, rtol=1e-4, atol=1e-5)
            start = stop


@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_no_gradient_passes_between_documents(tiny_config, backend: str) -> None:
    model = build(tiny_config(f"model.attention={backend}", "model.seq_len=300"))
    tokens = some_tokens(300, [100])
    embedded: list[Tensor] = []
    model.embed.register_forward_hook(lambda *args: embedded.append(args[-1].detach().requires_grad_()) or embedded[-1])
    model(tokens).logits_BTV[0, 200].sum().backward()
    assert embedded[0].grad is not None
    size_T = embedded[0].grad[0].abs().sum(-1)
    assert (size_T[:101] == 0).all()
    assert (size_T[101:201] > 0).all()
    assert (size_T[201:] == 0).all()


def test_without_a_mark_documents_see_each_other(tiny_config) -> None:
    tokens = some_tokens(16, [7])
    with torch.no_grad():
        masked, open_ = (build(tiny_config(), mark=mark)(tokens).logits_BTV[0] for mark in (ENDS, None))
    torch.testing.assert_close(masked[:8], open_[:8])
    assert (masked[8:] - open_[8:]).abs().amax(-1).min() > 1e-4


@torch.no_grad()
def test_flex_equals_the_explicit_path(monkeypatch) -> None:
    """The forward pass without a kernel, as in test_flex; its backward pass needs CUDA."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, **{**options, "backend": "eager"}))
    flex._compiled.cache_clear()
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.randn(2, 4, 200, 16, generator=generator) for _ in range(3))
    tokens = torch.cat([some_tokens(200, [30, 131]), some_tokens(200, [])])
    score_mod = SoftCap(2.0)
    documents = documents_of(tokens, ENDS, "flex")
    assert not isinstance(documents.mask, Tensor)
    got = flex.flex_attention(q, k, v, flex.on_scores(score_mod), False, documents.mask)
    expected = explicit_attention(q, k, v, 16**-0.5, score_mod=score_mod, documents_BT=documents.number_BT)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    flex._compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize("cap", [None, 1.0])
def test_statistics_are_of_what_is_seen(cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 300, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    numbers = torch.stack([(torch.arange(300) > 120).long(), torch.zeros(300, dtype=torch.int64)])
    stats = logit_stats(q, k, 0.5, score_mod=None if cap is None else SoftCap(cap), documents_BT=numbers)
    logits = 0.5 * q @ k.transpose(-1, -2)
    seen = (torch.ones(300, 300).tril() > 0) & (numbers[:, :, None] == numbers[:, None])
    scores = logits if cap is None else cap * torch.tanh(logits / cap)
    for head in range(3):
        values = logits[:, head][seen]
        assert stats.max_logit_H[head].item() == pytest.approx(values.max().item(), rel=1e-5)
        assert stats.max_abs_logit_H[head].item() == pytest.approx(values.abs().max().item(), rel=1e-5)
        entropies = []
        for b in range(2):
            for query in range(300):
                p = scores[b, head, query][seen[b, query]].softmax(0)
                if len(p) > 1:
                    entropies.append(-(p * p.log()).sum().item() / math.log(len(p)))
        assert len(entropies) == 300 - 2 + 300 - 1
        assert stats.entropy_H[head].item() == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)


def test_back_ends() -> None:
    choose = choose_backend
    assert choose("auto", Seams(), "cuda", documents=True).name == "flex"
    assert "mask_documents" in choose("auto", Seams(), "cuda", documents=True).reason
    assert choose("auto", Seams(), "cuda", head_dim=8, documents=True).name == "sdpa"
    assert choose("auto", Seams(), "cuda", dropout=0.1, documents=True).name == "sdpa"
    assert choose("auto", Seams(), "cpu", documents=True).name == "sdpa"
    assert choose("sdpa", Seams(), "cuda", documents=True).name == "sdpa"


def test_the_mark_comes_from_the_data(tiny_config, tiny_run, tmp_path) -> None:
    run = tiny_run("sampling.mask_documents=true")
    assert run.model.mark == ENDS
    assert tiny_run().model.mark is None
    assert tiny_run("data=synthetic_copy", "sampling.mask_documents=true").model.mark == DocumentMark(64, True)
    (tmp_path / "ids.bin").write_bytes(bytes(range(200)) * 8)
    words = (
        "data=tokens",
        f"data.path={tmp_path / 'ids.bin'}",
        "data.vocab_size=60000",
        "sampling.mask_documents=true",
    )
    with pytest.raises(ConfigError, match=r"sampling\.mask_documents=true: .*set data\.eos_id"):
        tiny_run(*words)
    assert tiny_run(*words, "data.eos_id=5").model.mark == DocumentMark(5, False)


def test_build_model_takes_the_mark(tiny_config) -> None:
    config = tiny_config("sampling.mask_documents=true")

    class Data:
        vocab_size, eos_id, eos_first = 257, 9, True

    model = build_model(config, 257, Seams(), document_mark(config, Data()))  # pyright: ignore[reportArgumentType]
    assert model.mark == DocumentMark(9, True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["block", "full"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")
def test_it_compiles_in_one_graph(tiny_run, train_steps, mode: str) -> None:
    words = ("sampling.mask_documents=true", "model.n_layers=1", "trainer.max_steps=2")
    torch.compiler.reset()
    compiled = train_steps(tiny_run(f"trainer.compile={mode}", *words), 2)
    eager = train_steps(tiny_run(*words), 2)
    torch.compiler.reset()
    for one, other in zip(compiled, eager, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
