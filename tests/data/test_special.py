"""Special ids: whose they are, where they lie, and that padding is seen by nothing."""

import numpy as np
import pytest
import torch

from stability_lab.build import build_run, load_data
from stability_lab.config import ConfigError
from stability_lab.data.hf_tokenizer import WordPiece
from stability_lab.data.special import with_special, word_pieces
from stability_lab.objective.loss import IGNORE

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "war", "##s", "##hip", "un", "##known", ",")


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return path


def test_they_are_added_behind_the_vocabulary(tiny_config):
    plain = load_data(tiny_config())
    data = load_data(tiny_config("model=bert_mini", "objective=masked_lm"))
    assert (plain.vocab_size, plain.special) == (257, None)
    assert (data.vocab_size, data.special) == (261, (257, 258, 259, 260))
    assert data.fingerprint == plain.fingerprint
    np.testing.assert_array_equal(data.token_bytes, [*plain.token_bytes, 0, 0, 0, 0])


def test_wordpiece_gives_its_own(vocabulary, tmp_path):
    tokenizer = WordPiece(str(vocabulary)).fit([], tmp_path)
    ids = tokenizer.encode(b"The warships, Unknown. [MASK]")
    words = [VOCABULARY[i] for i in ids]
    assert words[:9] == ["the", "war", "##s", "##hip", "##s", ",", "un", "##known", "[UNK]"]
    assert "[MASK]" not in words  # text is never read as a special token
    assert tokenizer.decode([5, 9, 10]) == "the unknown"
    assert tokenizer.eos_id == 3
    assert tokenizer.special == {"[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "[PAD]": 0}


def test_a_text_in_wordpieces_trains(tiny_config, vocabulary, tmp_path):
    text = tmp_path / "text"
    text.write_text("the war, the unknown wars\n" * 400, encoding="utf-8")
    words = ("model=bert_mini", "objective=masked_lm", "objective.whole_words=true", "data=text", f"data.path={text}")
    run = build_run(tiny_config(*words, "tokenizer=wordpiece", f"tokenizer.path={vocabulary}"))
    assert run.data.vocab_size == len(VOCABULARY)
    assert run.data.special == (2, 3, 4, 0)
    continues, continued = word_pieces(run.data)
    assert [VOCABULARY[i] for i in np.flatnonzero(continues)] == ["##s", "##hip", "##known"]
    assert continued[VOCABULARY.index("un")]
    windows = torch.from_numpy(run.sampler.batch(0, 200))
    batch = run.objective.batch(windows, 0)
    whole = torch.where(batch.targets_MT == IGNORE, batch.inputs_MT, batch.targets_MT)
    unknown = (whole[:, :-1] == 9) & (whole[:, 1:] == 10)
    masked = batch.targets_MT != IGNORE
    assert unknown.any()
    assert torch.equal(masked[:, :-1][unknown], masked[:, 1:][unknown])


@pytest.mark.parametrize("content", ["[SEP]\nthe", "[UNK]\nthe"])
def test_a_file_that_is_no_vocabulary_is_refused(tmp_path, content):
    path = tmp_path / "vocab.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^tokenizer\.path=.*: the vocabulary has no \[(UNK|SEP)\]"):
        WordPiece(str(path)).fit([], tmp_path)


def test_ids_without_a_tokenizer_get_them_too(tiny_config):
    data = load_data(tiny_config("data=synthetic", "data.tokens=20000", "data.val_tokens=2000"))
    assert with_special(data).vocab_size == data.vocab_size + 4


@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_padding_changes_no_other_token_and_gives_no_nan(tiny_run, backend):
    run = tiny_run("model=bert_mini", "objective=masked_lm", f"model.attention={backend}")
    model, pad = run.model.eval(), run.data.special.pad
    tokens = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    padding = torch.zeros(3, 16, dtype=torch.bool)
    padding[1, 9:], padding[2] = True, True  # and a row that is nothing but padding
    padded = tokens.masked_fill(padding, pad)
    logits = model(padded, None, padding).logits_BTV
    alone = model(tokens[1:2, :9]).logits_BTV
    torch.testing.assert_close(logits[1:2, :9], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits[:1], model(tokens[:1]).logits_BTV, rtol=1e-5, atol=1e-6)
    assert logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_encoder_sees_both_sides_and_a_decoder_does_not(tiny_run):
    for words, sees in ((("model=bert_mini", "objective=masked_lm"), True), ((), False)):
        model = tiny_run(*words).model.eval()
        tokens = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
        changed = tokens.clone()
        changed[0, -1] = (tokens[0, -1] + 1) % 256
        same = torch.equal(model(tokens).logits_BTV[0, 0], model(changed).logits_BTV[0, 0])
        assert same != sees
