"""What a query sees: the past, a window, its document; the same on any back-end."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from stability_lab.build import build_model, build_stabilizers, document_mark, fill_seams
from stability_lab.config import ConfigError
from stability_lab.model import flex
from stability_lab.model.attention import explicit_attention, logit_stats
from stability_lab.model.backend import choose_backend
from stability_lab.model.init import initialise
from stability_lab.model.mask import DocumentMark, Mask, document_numbers, layer_windows
from stability_lab.model.transformer import GPT
from stability_lab.seams import Seams
from stability_lab.stabilizers.softcap import SoftCap

END = 256
ENDS, BEGINS = DocumentMark(END, False), DocumentMark(END, True)
TOKENS = torch.tensor([[1, 2, END, 3, 4, 5, END, END, 6], [END, 1, 2, 3, 4, 5, 6, 7, END]])


def test_numbers_of_documents() -> None:
    ends = document_numbers(TOKENS, ENDS)
    assert ends.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1]]
    begins = document_numbers(TOKENS, BEGINS)
    assert begins.tolist() == [[0, 0, 1, 1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1, 2]]


def visible(q: int, k: int, causal: bool, window: int | None, numbers: list[int] | None) -> bool:
    """The definition, pair by pair."""
    in_reach = window is None or abs(q - k) < window
    return (k <= q or not causal) and in_reach and (numbers is None or numbers[q] == numbers[k])


MASKS = list(itertools.product([True, False], [None, 1, 3, 9], [False, True]))


@pytest.mark.parametrize(("causal", "window", "documents"), MASKS)
def test_the_three_renderings_hide_the_same_pairs(causal: bool, window: int | None, documents: bool) -> None:
    numbers = document_numbers(TOKENS, ENDS) if documents else None
    mask, device = Mask(causal, window, numbers), torch.device("cpu")
    rows = numbers.tolist() if documents and numbers is not None else [None, None]
    expected = torch.tensor([[[visible(q, k, causal, window, n) for k in range(9)] for q in range(9)] for n in rows])
    for start, stop in ((0, 9), (2, 5), (8, 9)):
        first, last = mask.keys(start, stop, 9)
        assert not expected[:, start:stop, :first].any()
        assert not expected[:, start:stop, last:].any()
        seen = ~mask.hidden(start, stop, first, last, device)
        assert torch.equal(
            seen.expand(2, 1, -1, -1)[:, 0] if documents else seen.expand(2, -1, -1),
            expected[:, start:stop, first:last],
        )
    dense = mask.render("sdpa", 9, device).rendered
    if mask.is_plain:
        assert dense is None
    else:
        assert isinstance(dense, Tensor)
        assert torch.equal(dense.expand(2, 1, 9, 9)[:, 0], expected)
    blocks = mask.render("flex", 9, device).rendered
    assert isinstance(blocks, BlockMask)
    pairs = torch.tensor(
        [
            [[blocks.mask_mod(*map(torch.tensor, (b, 0, q, k))).item() for k in range(9)] for q in range(9)]
            for b in range(2)
        ]
    )
    assert torch.equal(pairs, expected)


@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_a_query_sees_its_window_and_no_more(tiny_config, backend: str) -> None:
    """By the gradient of one position's logits, in a model of one layer with 300 tokens (two blocks of queries)."""
    words = ("model.n_layers=1", "model.seq_len=300", "model.window=40", f"model.attention={backend}")
    model = build(tiny_config(*words), mark=None)
    embedded: list[Tensor] = []
    model.embed.register_forward_hook(lambda *args: embedded.append(args[-1].detach().requires_grad_()) or embedded[-1])
    model(some_tokens(300, [])).logits_BTV[0, 280].sum().backward()
    assert embedded[0].grad is not None
    seen = embedded[0].grad[0].abs().sum(-1) > 0
    assert seen.nonzero().flatten().tolist() == list(range(241, 281))


def test_layers_alternate_and_a_wide_window_is_none() -> None:
    assert layer_windows(4, 2, 4, 16) == [4, None, 4, None]
    assert layer_windows(4, None, 2, 16) == [4, 4]
    assert layer_windows(16, 2, 2, 16) == [None, None]
    assert layer_windows(None, 2, 2, 16) == [None, None]


@pytest.mark.oracle
@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_window_equals_mistral(tiny_config, backend: str) -> None:
    from transformers import MistralConfig
    from transformers.models.mistral.modeling_mistral import MistralModel

    theirs_config = MistralConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        sliding_window=5,
        rms_norm_eps=1e-6,
        pad_token_id=None,
    )
    theirs_config._attn_implementation = "eager"
    theirs = MistralModel(theirs_config).eval()
    words = ("+stabilizer=rmsnorm", "model.n_kv_heads=2", "model.mlp=swiglu", "model.d_ff=64", "model.window=5")
    ours = build(tiny_config(*words, f"model.attention={backend}"), mark=None)
    names = {"wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj"}
    weights = theirs.state_dict()
    with torch.no_grad():
        ours.embed.weight.copy_(weights["embed_tokens.weight"])
        for i in range(2):
            block: Any = ours.blocks[i]
            for own, name in names.items():
                block.attn.get_submodule(own).weight.copy_(10 * weights[f"layers.{i}.{name}.weight"])
                weights[f"layers.{i}.{name}.weight"].mul_(10)
            for own, name in {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}.items():
                block.mlp.get_submodule(own).weight.copy_(weights[f"layers.{i}.mlp.{name}.weight"])
        tokens = some_tokens(16, [])
        x = ours.embed(tokens)
        for block, mask in zip(ours.blocks, ours.masks(tokens), strict=True):
            x, _ = block(x, mask)
        expected = theirs(tokens).last_hidden_state
        torch.testing.assert_close(ours.final_norm(x), expected, rtol=1e-4, atol=1e-5)
        full = build(tiny_config(*words[:-1]), mark=None)
        full.load_state_dict(ours.state_dict())
        assert (full(tokens).logits_BTV - ours(tokens).logits_BTV).abs().max() > 1e-3


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
    score_mod = SoftCap(2.0, fused=False)
    mask = Mask(window=50, documents_BT=document_numbers(tokens, ENDS)).render("flex", 200, torch.device("cpu"))
    assert isinstance(mask.rendered, BlockMask)
    got = flex.flex_attention(q, k, v, flex.on_scores(score_mod), False, mask.rendered)
    expected = explicit_attention(q, k, v, 16**-0.5, mask, score_mod=score_mod)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    flex._compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize("cap", [None, 1.0])
def test_statistics_are_of_what_is_seen(cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 300, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    numbers = torch.stack([(torch.arange(300) > 120).long(), torch.zeros(300, dtype=torch.int64)])
    stats = logit_stats(q, k, 0.5, Mask(documents_BT=numbers), score_mod=None if cap is None else SoftCap(cap))
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
    choose, key = choose_backend, "model.window"
    assert choose("auto", Seams(), "cuda", masked_by=key).name == "flex"
    assert "model.window" in choose("auto", Seams(), "cuda", masked_by=key).reason
    assert choose("auto", Seams(), "cuda", head_dim=8, masked_by=key).name == "sdpa"
    assert choose("auto", Seams(), "cuda", dropout=0.1, masked_by=key).name == "sdpa"
    assert choose("auto", Seams(), "cpu", masked_by=key).name == "sdpa"
    assert choose("sdpa", Seams(), "cuda", masked_by=key).name == "sdpa"


def test_the_mark_comes_from_the_data(tiny_config, tiny_run, tmp_path) -> None:
    run = tiny_run("sampling.mask_documents=true")
    assert run.model.mark == ENDS
    assert tiny_run().model.mark is None
    assert tiny_run("data=synthetic_copy", "sampling.mask_documents=true").model.mark == DocumentMark(64, True)
    (tmp_path / "ids.bin").write_bytes(bytes(range(200)) * 8)
    words = (
        "data=tokens",
        "data.dtype=uint16",
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
    words = ("sampling.mask_documents=true", "model.window=5", "model.n_layers=1", "trainer.max_steps=2")
    torch.compiler.reset()
    compiled = train_steps(tiny_run(f"trainer.compile={mode}", *words), 2)
    eager = train_steps(tiny_run(*words), 2)
    torch.compiler.reset()
    for one, other in zip(compiled, eager, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
