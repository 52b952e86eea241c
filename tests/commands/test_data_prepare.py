"""The command `data prepare`, and training with what it wrote."""

import json
from pathlib import Path

import pytest

from stability_lab import cli


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STABILITY_LAB_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(3000)))
    return path


@pytest.mark.slow
def test_prepare_and_train(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_overrides: tuple[str, ...]
) -> None:
    words = ["data", "prepare", "data=text", f"data.path={text}", "--out", str(tmp_path / "out"), "--workers", "1"]
    assert cli.run(words) == 0
    shown = capsys.readouterr().out
    assert f"data=tokens data.path={tmp_path / 'out'}" in shown
    assert cli.run([*words, "--format", "json"]) == 0
    meta = json.loads(capsys.readouterr().out)
    runs = []
    for name, data in (("text", ["data=text", f"data.path={text}"]), ("tokens", [f"data.path={tmp_path / 'out'}"])):
        out = [f"output_dir={tmp_path}", f"run_name={name}"]
        assert cli.run(["train", *(data if name == "text" else ["data=tokens", *data]), *tiny_overrides, *out]) == 0
        folder = tmp_path / "runs" / name
        runs.append(json.loads((folder / "manifest.json").read_text())["data"])
        runs[-1]["loss"] = json.loads((folder / "summary.json").read_text())["final"]["val/loss"]
    assert meta["train"]["tokens"] == runs[0]["train_tokens"]
    same = ("first_batch", "last_batch", "validation", "loss", "train_tokens", "val_tokens", "vocab_size")
    assert {key: runs[0][key] for key in same} == {key: runs[1][key] for key in same}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0"], "--workers=0: must be 1 to 1024"),
        (["--shard-tokens", "0"], "--shard-tokens=0: must be 1 or more"),
        (["data=tokens", "data.path=x"], "data: TokenFiles has ids already"),
        (["data=txet"], "did you mean text?"),
        (["data=text", "data.path=nowhere.txt"], "no such file or folder"),
        (["seed=1,2"], "add -m"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_input(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["data", "prepare", *words, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []
