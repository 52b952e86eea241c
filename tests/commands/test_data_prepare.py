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


@pytest.mark.parametrize("name", ["list.json", "data.csv", "UP.JSONL", "one.txt"])
def test_sixty_rows_are_sixty_documents_whatever_the_suffix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, text = [{"text": "hello world " * 20}] * 60, "hello world " * 20
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    contents = {"list.json": json.dumps(rows), "data.csv": "text\n" + f'"{text}"\n' * 60, "UP.JSONL": lines}
    Path(name).write_text(contents.get(name, lines))
    words = ["data", "prepare", "data=text", f"data.path={name}", "data.val_every=5", "--out", "o", "--workers", "1"]
    if name == "one.txt":
        assert cli.run(words) == 2
        assert "one.txt holds JSON under the name of plain text" in capsys.readouterr().err
        assert not Path("o").exists()
        return
    assert cli.run(words) == 0
    meta = json.loads(Path("o/meta.json").read_text())
    assert [(meta[split]["documents"], meta[split]["tokens"]) for split in ("train", "val")] == [
        (48, 48 * 241),
        (12, 12 * 241),
    ]


def test_a_giant_first_row_of_the_hub_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (10**5 if i == 0 else 9)}) + "\n" for i in range(51)))
    out = ["--out", str(tmp_path / "o"), "--workers", "1"]
    hub = ["data=hub", "data.name=json", f"data.data_files={path}", "data.streaming=false"]
    assert cli.run(["data", "prepare", *hub, *out]) == 0
    assert "validation has more tokens than training" in capsys.readouterr().out


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
