"""The linear probe: what is a feature, and what a classifier that sees it gets right."""

import sys

import numpy as np
import pytest
import torch

from stability_lab.commands.evaluate import evaluate
from stability_lab.config import ConfigError
from stability_lab.diagnostics.linear_probe import (
    WINDOWS,
    Examples,
    linear_probe,
    read_examples,
    right_answers,
    text_features,
)

ENCODER = ("model=bert_mini", "objective=masked_lm")


@pytest.fixture(scope="module")
def run(tiny_run):
    return tiny_run(*ENCODER)


def test_a_feature_is_the_mean_over_tokens_whatever_the_padding(run):
    texts = ["short", "a text of more than one window of sixteen places", "x"]
    together = text_features(run.model, run.data, texts, 8)
    apart = np.concatenate([text_features(run.model, run.data, [text], 1) for text in texts])
    np.testing.assert_allclose(together, apart, rtol=0, atol=1e-6)
    special = run.data.special
    tokens = torch.tensor([[special.cls, *b"short", special.sep]])
    run.model.eval()
    with torch.no_grad():
        hidden, _ = run.model.features(tokens)
    np.testing.assert_allclose(together[0], hidden[0].double().mean(0), rtol=0, atol=1e-6)


def test_of_a_long_text_some_windows_count(run, monkeypatch):
    seen = []
    features = run.model.features
    monkeypatch.setattr(run.model, "features", lambda tokens, *rest: (seen.append(tokens), features(tokens, *rest))[1])
    text = "".join(chr(97 + i % 26) for i in range(1000))
    text_features(run.model, run.data, [text], 100)
    (tokens,) = seen
    assert tokens.shape == (WINDOWS, 16)
    assert bytes(tokens[0, 1:-1].tolist()) == text[:14].encode()
    assert bytes(tokens[-1, 1:-1].tolist()) == text[-14:].encode()


def test_a_decoder_has_features_too(tiny_run):
    run = tiny_run()
    features = text_features(run.model, run.data, ["a", "two words"], 2)
    assert features.shape == (2, 32)
    alone = text_features(run.model, run.data, ["a"], 1)
    np.testing.assert_allclose(features[:1], alone, rtol=0, atol=1e-6)


def test_the_classifier_finds_what_is_there_and_no_more():
    rng = np.random.default_rng(0)
    labels = ["a", "b"] * 100
    examples = Examples([""] * 200, labels, [str(i // 4) for i in range(200)])
    shift = np.where(np.array(labels) == "a", 3.0, -3.0)[:, None]
    assert right_answers(rng.normal(size=(200, 4)) + shift, examples).mean() > 0.95
    assert 0.3 < right_answers(rng.normal(size=(200, 4)), examples).mean() < 0.7
    # What tells groups apart is of no use for groups that were not seen.
    grouped = Examples(
        [""] * 200, ["a" if i // 20 % 2 else "b" for i in range(200)], [str(i // 20) for i in range(200)]
    )
    of_groups = np.repeat(rng.normal(size=(10, 4)), 20, axis=0)
    assert right_answers(of_groups, grouped).mean() < 0.9


def test_intervals_are_those_of_groups(run):
    examples = read_examples("sotu")
    assert set(examples.labels) == {"Democratic", "Republican"}
    assert len(set(examples.groups)) > 30
    few = Examples(*(field[::8] for field in examples))
    found = linear_probe(run.model, run.model, run.data, few, 64)
    assert found["trained"] == found["initial"]
    assert found["difference"] == [0, 0, 0]
    value, low, high = found["trained"]
    assert low < value < high
    assert 0.5 <= found["majority"] < 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read \(No such file"),
        ("text,topic\na,b\n", "every row must have a text and a label"),
        ("text,label\na,b\n,c\n", "every row must have a text and a label"),
    ],
)
def test_what_is_no_data_is_refused(tmp_path, content, message):
    path = tmp_path / "data.csv"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^--probe={path}: {message}"):
        read_examples(str(path))


def test_one_label_is_nothing_to_tell_apart():
    with pytest.raises(ConfigError, match="two labels or more"):
        right_answers(np.zeros((4, 2)), Examples([""] * 4, ["a"] * 4, list("abcd")))


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ConfigError, match=r"pip install 'stability-lab\[probe\]'"):
        right_answers(np.zeros((4, 2)), Examples([""] * 4, list("abab"), list("abcd")))


@pytest.mark.slow
def test_the_command(run_command, tiny_overrides, tmp_path):
    words = (*tiny_overrides, *ENCODER, f"output_dir={tmp_path}", "run_name=a")
    assert run_command("train", *words).code == 0
    data = tmp_path / "data.csv"
    rows = [f"{word * n},{word}" for n in range(1, 11) for word in ("one", "two")]
    data.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    run = tmp_path / "runs" / "a"
    shown = run_command("evaluate", str(run), "--probe", str(data))
    assert shown.code == 0, shown.err
    assert "masked perplexity" in shown.out
    assert "20 texts in 20 groups" in shown.out
    found = evaluate(run, 8, "cpu", probe=str(data))["probe"]
    assert found["majority"] == 0.5
    assert f"trained {found['trained'][0]:.3f}" in " ".join(shown.out.split())
