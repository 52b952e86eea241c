"""`data inspect` on files and on a run; bad input is one sentence."""

import gzip
import json
import math
import os
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from stability_lab import cli
from stability_lab.data.loader import batch_fingerprint
from stability_lab.data.sources.corpus import TextFiles
from stability_lab.data.tokenizer import ByteTokenizer, Gpt2
from stability_lab.data.tokens.formats import CHUNK


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert cli.run(["data", "inspect", *words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_raw_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = b"to be or not to be, " * 50 + b"\n" * 40
    np.frombuffer(text, np.uint8).astype(np.uint16).tofile(tmp_path / "x.bin")
    raw = [str(tmp_path / "x.bin"), "--dtype", "uint16"]
    block = inspect(capsys, *raw, "--tokenizer", "bytes")
    counts = np.bincount(np.frombuffer(text, np.uint8))
    p = counts[counts > 0] / len(text)
    assert block["unigram_entropy"] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12)
    assert (block["format"], block["dtype"], block["tokens"]) == ("raw", "uint16", len(text))
    assert block["frequent"][0] == {"id": 32, "count": 300, "text": " "}
    assert block["head"].startswith("to be or not")
    assert block["runs"] == [{"start": 1000, "period": 1, "repeats": 40}]
    assert cli.run(["data", "inspect", *raw]) == 0
    shown = capsys.readouterr().out
    assert "uint16" in shown
    assert re.search(r"^runs +start 1,000, period 1, repeats 40$", shown, re.M)
    assert re.search(r"^unigram_entropy +\d\.\d{4}$", shown, re.M)


def test_wider_ids_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "x.bin")
    assert cli.run(["data", "inspect", str(tmp_path / "x.bin")]) == 2
    assert capsys.readouterr().err.endswith("say so by their type: --dtype=uint32\n")
    narrow = inspect(capsys, str(tmp_path / "x.bin"), "--dtype", "uint16")
    assert narrow["note"] == "most ids at regular places are 0, they are probably uint32: --dtype=uint32"
    block = inspect(capsys, str(tmp_path / "x.bin"), "--dtype", "uint32")
    assert (block["dtype"], block["largest_id"], "note" in block) == ("uint32", 999, False)
    assert block["unigram_entropy"] == pytest.approx(math.log(1000))


def test_text_is_shown_as_training_would_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"line {i} of the text\n" for i in range(3000))
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "rows.jsonl").write_text('{"text": "one document"}\n' * 40)
    for name, tokenizer in (("book.txt", "bytes"), ("book.txt.gz", "gpt2"), ("rows.jsonl", "bytes")):
        source = TextFiles(path=str(tmp_path / name))
        data = source.load({"bytes": ByteTokenizer(), "gpt2": Gpt2()}[tokenizer])
        for split, tokens in (("train", data.train_tokens), ("val", data.val_tokens)):
            block = inspect(capsys, str(tmp_path / name), "--tokenizer", tokenizer, "--split", split)
            assert block["tokens"] == tokens
            assert f"the {split} split of data=text data.path={tmp_path / name}" in block["format"]
            held_out = [source.holds_out(i) for i in range(int(data.corpus["documents"]))]
            assert block["documents"] == held_out.count(split == "val")
        assert block["head"].startswith("line 0" if "book" in name else "one document<|endoftext|>")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 99)
    assert cli.run(["data", "inspect", str(tmp_path / "latin.txt")]) == 2
    assert "is text in another encoding than UTF-8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_and_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_overrides, tiny_run) -> None:
    words = [*tiny_overrides, f"output_dir={tmp_path}", "run_name=one"]
    assert cli.run(["train", *words]) == 0
    capsys.readouterr()
    folder = str(tmp_path / "runs" / "one")
    run = tiny_run()
    block = inspect(capsys, folder)
    assert block["tokens"] == run.data.train_tokens
    assert block["unigram_entropy"] == pytest.approx(run.data.unigram_entropy, abs=1e-12)
    assert inspect(capsys, folder, "--split", "val")["tokens"] == run.data.val_tokens
    step = inspect(capsys, folder, "--step", "3")
    batch = run.sampler.batch(8, 4)
    assert step["batch"] == batch_fingerprint(batch)
    assert [s["text"] for s in step["sequences"]] == [run.data.tokenizer.decode(row[:60]) for row in batch]
    assert cli.run(["data", "inspect", folder, "--step", "6"]) == 2
    assert "the run has the steps 1 to 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.bin"], "cannot be read"),
        (["fifo.bin"], "cannot be read (it is a FIFO and no file)"),
        (["/dev/zero"], "cannot be read (it is a device and no file)"),
        (["."], "neither a run's folder"),
        (["x.bin", "--dtype", "uint64"], "is it of another --dtype"),
        (["x.bin", "--dtype", "uint16", "--tokenizer", "bytes"], "id 257 at offset 257 is not in a vocabulary of 257"),
        (["x.bin", "--tokenizer", "latin"], "must be bytes, gpt2 or a tokenizer.json"),
        (["x.bin", "--step", "1"], "only runs have steps"),
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
    np.arange(1000, dtype=np.uint16).tofile("x.bin")
    os.mkfifo("fifo.bin")
    assert cli.run(["data", "inspect", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is a Git LFS pointer"),
        ("e.bin", struct.pack("<256i", 20240522, 1, 8, *[0] * 253) + bytes(16), "is an evaluation set of llm.c"),
        ("w.safetensors", struct.pack("<Q", 2) + b"{}", "holds weights (safetensors)"),
        ("x.pkl", pickle.dumps(list(range(999))), "is a pickle of Python"),
        ("x.idx", b"TNTIDX\0\0" + bytes(30), "(TNTIDX)"),
        ("x.txt", b'[{"text": "a"}]', "holds JSON under the name of plain text"),
        ("utf16.txt", ("words " * 99).encode("utf-16"), "is text in another encoding than UTF-8"),
        ("odd.bin", bytes(range(201)), "no whole number of uint16 ids"),
        ("x.gz", gzip.compress(bytes(range(200))), "is gzipped: unpack it first"),
    ],
)
@pytest.mark.parametrize("dtype", [[], ["--dtype=uint16"]])
def test_what_is_neither_ids_nor_text(
    dtype: list[str],
    name: str,
    content: bytes,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content * (5 if dtype and name == "x.txt" else 1))
    assert cli.run(["data", "inspect", name, *dtype]) == 2
    error = capsys.readouterr().err
    assert (message if not (dtype and name == "x.txt") else "is text and holds no ids") in error
    assert error.count("\n") == 1


def test_the_offset_is_that_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = np.zeros(CHUNK + 100, dtype=np.uint16)
    ids[CHUNK + 7 :] = 300
    ids.tofile(tmp_path / "x.bin")
    assert cli.run(["data", "inspect", str(tmp_path / "x.bin"), "--dtype=uint16", "--tokenizer", "bytes"]) == 2
    assert f"id 300 at offset {CHUNK + 7:,} is not in a vocabulary of 257" in capsys.readouterr().err


def test_the_data_command_says_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (([], "arguments are required: command"), (["inpsect"], "did you mean inspect?")):
        assert cli.run(["data", *words]) == 2
        assert message in capsys.readouterr().err
