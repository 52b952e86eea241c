"""`data prepare`: the same bytes with any number of workers, after an interruption and as training would make."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability_lab import cli
from stability_lab.config import ConfigError
from stability_lab.data.source import Documents, TextSource, TokenData
from stability_lab.data.sources.corpus import TextFiles
from stability_lab.data.sources.token_files import TokenFiles
from stability_lab.data.tokenizer import Bpe, ByteTokenizer, Gpt2, TokenizerOptions
from stability_lab.data.tokens import prepare as prepare_module
from stability_lab.data.tokens import scan as scan_module
from stability_lab.data.tokens.prepare import load_prepared, prepare
from stability_lab.data.tokens.prepared import is_prepared, open_prepared, read_sidecar
from stability_lab.data.tokens.shards import Shards

N = 200


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("STABILITY_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> TextFiles:
    lines = (f"In the year {1800 + i} naïve 🙂 of it's times" * (1 + i % 5) for i in range(N))
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return TextFiles(path=str(path), val_every=7)


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Gpt2(), Bpe(270)], ids=lambda t: t.id[:5])
def test_ids_are_those_that_training_makes(source: TextFiles, tokenizer, tmp_path: Path) -> None:
    prepare(source, tokenizer, tmp_path / "out", shard_tokens=3000)
    data, small = open_prepared(tmp_path / "out", tokenizer), source.load(tokenizer)
    assert isinstance(data.train, Shards)
    if not isinstance(tokenizer, Bpe):  # which learns from the start of the text instead of from every 4th document
        np.testing.assert_array_equal(np.asarray(data.train), small.train)
        np.testing.assert_array_equal(np.asarray(data.val), small.val)
        assert data.unigram_entropy == pytest.approx(small.unigram_entropy, abs=1e-12)
    assert data.val_bytes == small.val_bytes
    assert data.bytes_of(np.asarray(data.val)) == data.val_bytes
    assert (data.vocab_size, data.eos_id) == (small.vocab_size, small.eos_id)
    assert data.corpus["documents"] == N


def test_documents_begin_where_the_sidecar_says(source: TextFiles, tmp_path: Path) -> None:
    meta = prepare(source, ByteTokenizer(), tmp_path / "out", shard_tokens=3000)
    data = open_prepared(tmp_path / "out", ByteTokenizer())
    for split, tokens in (("train", np.asarray(data.train)), ("val", np.asarray(data.val))):
        shards = meta[split]["shards"]
        before = np.cumsum([0, *(shard["tokens"] for shard in shards)])
        starts = np.concatenate(
            [np.load(tmp_path / "out" / s["documents_file"]) + n for s, n in zip(shards, before, strict=False)]
        )
        np.testing.assert_array_equal(starts[1:], np.flatnonzero(tokens == data.eos_id)[:-1] + 1)
        assert starts[0] == 0
        assert len(starts) == meta[split]["documents"]
    assert meta["train"]["largest_id"] == 256
    assert [s["sha256"] for s in meta["val"]["shards"]] == [
        hashes(tmp_path / "out")[s["file"]] for s in meta["val"]["shards"]
    ]


@pytest.mark.slow
def test_workers_change_no_byte(source: TextFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "CHUNK_DOCUMENTS", 9)
    for workers in (1, 2, 3):
        prepare(source, Gpt2(), tmp_path / str(workers), workers=workers, shard_tokens=2000)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2") == hashes(tmp_path / "3")
    assert len(hashes(tmp_path / "1")) == 1 + 4 * len(read_sidecar(tmp_path / "1")["train"]["shards"])


@dataclass(frozen=True)
class Breaks(TextSource):
    """The source, until it has given `after` documents."""

    source: TextFiles
    after: int

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        raise AssertionError("it is prepared, and not loaded")

    def holds_out(self, number: int) -> bool:
        return self.source.holds_out(number)

    def identity(self) -> object:
        return self.source.identity()

    def about(self) -> dict[str, str | int]:
        return self.source.about()

    def iterate(self, skip: int = 0) -> Iterator[tuple[str, bytes]]:
        for i, document in enumerate(self.source.iterate(skip), start=skip):
            if i == self.after:
                raise KeyboardInterrupt
            yield document


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Bpe(270)], ids=lambda t: t.id[:5])
def test_an_interrupted_call_goes_on(
    source: TextFiles, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "CHUNK_DOCUMENTS", 5)
    monkeypatch.setattr(prepare_module, "LEARN_FROM_BYTES", 1000)
    options = {"shard_tokens": 1500, "ngram_filter": True}
    prepare(source, tokenizer, tmp_path / "whole", **options)
    for after in (90, 91, 150, 199):
        with pytest.raises(KeyboardInterrupt):
            prepare(Breaks(source, after), tokenizer, tmp_path / "parts", **options)
        assert not is_prepared(tmp_path / "parts")
        skipped = json.loads((tmp_path / "parts" / "progress.json").read_text())["read"]
        assert 50 < skipped <= after
        with pytest.raises(ConfigError, match="parts is unfinished: run the same data prepare"):
            TokenFiles(path=str(tmp_path / "parts")).load(ByteTokenizer())
        assert cli.run(["data", "inspect", str(tmp_path / "parts")]) == 2
    for left in (".meta.json.7.tmp", "counts-00000.npy", "val-00099.part"):  # of a call that was killed while it wrote
        (tmp_path / "parts" / left).touch()
    prepare(source, tokenizer, tmp_path / "parts", **options)
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "whole")


def test_nothing_is_left_of_a_call_that_came_to_nothing(source: TextFiles, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(Breaks(source, 30), ByteTokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_again_reads_no_text(source: TextFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(source, ByteTokenizer(), tmp_path / "out")
    monkeypatch.setattr(TextFiles, "iterate", lambda *_: pytest.fail("read again"))
    assert prepare(source, ByteTokenizer(), tmp_path / "out", workers=8) == first


def test_training_uses_what_was_prepared(source: TextFiles, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = load_prepared(source, Gpt2())
    monkeypatch.setattr(prepare_module, "encode", lambda *_: pytest.fail("tokenised again"))
    assert load_prepared(source, Gpt2()).fingerprint == first.fingerprint
    (folder,) = cache.glob("prepared-*")
    assert TokenFiles(path=str(folder)).load(Gpt2()).fingerprint == first.fingerprint


def test_the_filter_drops_repetitive_documents(tmp_path: Path) -> None:
    texts = [f"document {i} " + ("ab" * 32 if i % 10 == 3 else "") for i in range(N)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = TextFiles(path=str(tmp_path / "x.jsonl"))
    meta = prepare(source, ByteTokenizer(), tmp_path / "out", ngram_filter=True)
    assert meta["dropped_documents"] == 20
    assert meta["train"]["documents"] + meta["val"]["documents"] == N - 20
    text = ByteTokenizer().decode(np.asarray(open_prepared(tmp_path / "out", ByteTokenizer()).train))
    assert "abab" not in text
    assert "document 101 <" in text
    kept = prepare(source, ByteTokenizer(), tmp_path / "all")
    assert (kept["dropped_documents"], kept["corpus"]["sha256"]) == (0, meta["corpus"]["sha256"])


def test_wide_vocabularies_use_four_bytes(source: TextFiles, tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        id = "wide"
        vocab_size = 65_537
        eos_id = 65_536

        def fit(self, documents: Documents, saved: Path) -> "Wide":
            return self

        def token_bytes(self) -> np.ndarray:
            return np.append(np.ones(65_536, dtype=np.int64), 0)

    meta = prepare(source, Wide(), tmp_path / "out")
    assert meta["dtype"] == "<u4"
    assert np.asarray(open_prepared(tmp_path / "out", Wide()).train)[-1] == 65_536


def _edit(folder: Path, **changes: object) -> None:
    meta = read_sidecar(folder)
    (folder / "meta.json").write_text(json.dumps(meta | changes))


def test_what_is_wrong_is_named(source: TextFiles, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, ByteTokenizer(), out)
    with pytest.raises(ConfigError, match=r"holds other tokens \(ngram_filter false, asked true\)"):
        prepare(source, ByteTokenizer(), out, ngram_filter=True)
    with pytest.raises(ConfigError, match="prepared with the tokenizer bytes-1, and this run has gpt2-1"):
        open_prepared(out, Gpt2())
    with pytest.raises(ConfigError, match=r"data\.dtype=uint16: .* was prepared and knows that itself"):
        TokenFiles(path=str(out), dtype="uint16").load(ByteTokenizer())
    (out / "val-00000.bin").write_bytes(b"12")
    with pytest.raises(ConfigError, match=r"val-00000\.bin: 2 bytes, and meta\.json counts"):
        open_prepared(out, ByteTokenizer())
    (out / "val-00000.bin").unlink()
    with pytest.raises(ConfigError, match=r"val-00000\.bin: missing"):
        open_prepared(out, ByteTokenizer())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ConfigError, match="no unfinished preparation and not empty"):
        prepare(source, ByteTokenizer(), tmp_path / "full")
    assert (tmp_path / "full" / "precious").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.pop("val"), "it has no 'val'"),
        (lambda meta: meta.pop("vocab_size"), "it has no 'vocab_size'"),
        (lambda meta: meta.update(train=[]), "list indices must be .*"),
        (lambda meta: meta["val"].pop("shards"), "it has no 'shards'"),
        (lambda meta: meta["train"]["shards"][0].pop("sha256"), "it has no 'sha256'"),
        (lambda meta: meta["train"]["shards"][0].update(tokens="9"), "unsupported operand .*"),
        (lambda meta: meta["train"].update(shards=[3]), "argument of type 'int' is not .*"),
        (lambda meta: meta["train"].update(tokens=9), "the shards of train do not add up to its tokens"),
        (lambda meta: meta["val"].update(shards=[]), "the shards of val do not add up to its tokens"),
    ],
)
def test_a_damaged_sidecar(source: TextFiles, change: Callable[[dict], Any], message: str, tmp_path: Path) -> None:
    meta = prepare(source, ByteTokenizer(), tmp_path / "out")
    change(meta)
    (tmp_path / "out" / "meta.json").write_text(json.dumps(meta))
    for command in (
        lambda: TokenFiles(path=str(tmp_path / "out")).load(ByteTokenizer()),
        lambda: prepare(source, ByteTokenizer(), tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match=rf"meta\.json is damaged \({message}\); delete the folder"):
            command()


def test_a_folder_that_cannot_be_made(source: TextFiles, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"{folder} cannot be made \(.*\); give another --out"):
            prepare(source, ByteTokenizer(), folder)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_damaged_shard(source: TextFiles, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the right size: ids that are none, and ids that are others."""
    prepare(source, ByteTokenizer(), tmp_path / "out", shard_tokens=3000)
    path = sorted((tmp_path / "out").glob(f"{split}-*.bin"))[-1]
    whole = np.fromfile(path, "<u2")
    for i, message in (
        (9999, r"\.bin: id 9,999 at offset 7 is not in the vocabulary of 257"),
        (0, "its SHA-256 begins"),
    ):
        ids = whole.copy()
        ids[7] = i
        ids.tofile(path)
        with pytest.raises(ConfigError, match=message) as caught:
            open_prepared(tmp_path / "out", ByteTokenizer())
        assert path.name in str(caught.value)
        assert str(caught.value).endswith("delete the folder and prepare it again")
    whole.tofile(path)
    open_prepared(tmp_path / "out", ByteTokenizer())
    monkeypatch.setattr(scan_module, "_scan", lambda *_: pytest.fail("read again"))
    open_prepared(tmp_path / "out", ByteTokenizer())


def test_a_split_without_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    with pytest.raises(ConfigError, match="nothing is left for the training split"):
        prepare(TextFiles(path=str(tmp_path / "x.jsonl")), ByteTokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_at_once(source: TextFiles, tmp_path: Path) -> None:
    class Nosy(Breaks):
        def iterate(self, skip: int = 0) -> Iterator[tuple[str, bytes]]:
            with pytest.raises(ConfigError, match="out is unfinished"):  # before its first shard is complete
                TokenFiles(path=str(tmp_path / "out")).load(ByteTokenizer())
            with pytest.raises(ConfigError, match=rf"out is being prepared by process {os.getpid()} on .*; wait"):
                prepare(source, ByteTokenizer(), tmp_path / "out")
            return super().iterate(skip)

    prepare(Nosy(source, N), ByteTokenizer(), tmp_path / "out")
    assert is_prepared(tmp_path / "out")


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Real SIGKILLs of the command with two workers, then the bytes of an undisturbed one."""
    rng = np.random.default_rng(0)
    with (tmp_path / "x.jsonl").open("w") as file:
        for _ in range(12_000):
            file.write(json.dumps({"text": " ".join(map(str, rng.integers(0, 10_000, 100)))}) + "\n")
    words = [sys.executable, "-m", "stability_lab", "data", "prepare", "data=text", f"data.path={tmp_path / 'x.jsonl'}"]
    words += ["tokenizer=gpt2", "--workers", "2", "--shard-tokens", "100000"]
    environment = os.environ | {"STABILITY_LAB_CACHE": str(tmp_path / "cache")}
    subprocess.run([*words, "--out", str(tmp_path / "whole")], check=True, env=environment, capture_output=True)
    kills, progress = 0, tmp_path / "parts" / "progress.json"
    for wait_for in (1, 5, 9, 14):
        child = subprocess.Popen(
            [*words, "--out", str(tmp_path / "parts")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while child.poll() is None and not _shards(progress) >= wait_for:
            time.sleep(0.002)
        if child.poll() is None:
            time.sleep(float(rng.uniform(0, 0.05)))
            child.kill()  # the parent alone: its workers have to notice
            kills += 1
        child.wait()
    assert kills >= 3
    time.sleep(1)
    assert str(tmp_path) not in "".join(_command_lines()), "a worker outlived its parent"
    subprocess.run([*words, "--out", str(tmp_path / "parts")], check=True, env=environment, capture_output=True)
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "whole")


def _command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_text()
        except OSError:
            continue


def _shards(progress: Path) -> int:
    try:
        return len(json.loads(progress.read_text())["splits"]["train"]["shards"])
    except (OSError, ValueError):
        return 0
