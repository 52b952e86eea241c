"""Documents out of JSON lines, Parquet and gzip; the same text gives the same documents however it is packed."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stability_lab.config import ConfigError
from stability_lab.data.sources import text_files as text_module
from stability_lab.data.sources.corpus import TextFiles

ROWS = [f"document {i} naïve 你好 🙂\nsecond line {i}\n" for i in range(40)]


def json_lines(path: Path, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: row}) + "\n" for i, row in enumerate(ROWS)))
    return path


def parquet(path: Path, field: str = "text") -> Path:
    pq.write_table(pa.table({"id": list(range(40)), field: ROWS}), path, row_group_size=7)
    return path


def zipped(path: Path) -> Path:
    target = path.with_name(path.name + ".gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return target


@pytest.mark.parametrize(
    "make",
    [
        lambda f: json_lines(f / "x.jsonl"),
        lambda f: zipped(json_lines(f / "x.jsonl")),
        lambda f: parquet(f / "x.parquet"),
        lambda f: json_lines(f / "x.ndjson"),
    ],
)
def test_rows_are_documents(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    documents = TextFiles(path=str(path)).documents()
    assert [text.decode() for _, text in documents] == ROWS
    assert [name for name, _ in documents] == [f"{path.name}#{i:09d}" for i in range(1, 41)]
    assert documents == sorted(documents)
    assert TextFiles(path=str(tmp_path)).documents() == documents  # the folder has nothing else


def test_another_field(tmp_path: Path) -> None:
    for path in (json_lines(tmp_path / "x.jsonl", "content"), parquet(tmp_path / "x.parquet", "content")):
        assert [text.decode() for _, text in TextFiles(path=str(path), field="content").documents()] == ROWS


def test_gzipped_text_is_recognised_by_content(tmp_path: Path) -> None:
    for i, row in enumerate(ROWS):
        (tmp_path / f"{i:02d}.txt").write_bytes(gzip.compress(row.encode()) if i % 2 else row.encode())
    assert [text.decode() for _, text in TextFiles(path=str(tmp_path)).documents()] == ROWS


def test_few_rows_are_cut_like_a_file(tmp_path: Path) -> None:
    whole = "".join(f"line {i} of the text\n" for i in range(3000))
    (tmp_path / "x.txt").write_text(whole)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": whole}) + "\n")
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress(whole.encode()))
    pieces = [[text for _, text in TextFiles(path=str(tmp_path / n)).documents()] for n in ("x.txt", "x.jsonl", "y.*")]
    assert pieces[0] == pieces[1] == pieces[2]
    assert b"".join(pieces[0]).decode() == whole
    assert len(pieces[0]) >= 20


@pytest.mark.parametrize("skip", [0, 1, 17, 40, 99])
def test_iterate_skips(skip: int, tmp_path: Path) -> None:
    source = TextFiles(path=str(json_lines(tmp_path / "x.jsonl")))
    assert list(source.iterate(skip)) == source.documents()[skip:]


def test_a_large_plain_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_text("some words\n" * 100_000)
    monkeypatch.setattr(text_module, "read_documents", lambda paths, field: pytest.fail("read") if paths else iter(()))
    assert sum(len(text) for _, text in TextFiles(path=str(tmp_path / "x.txt")).iterate()) == 1_100_000


def test_identity_follows_the_files(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "x.jsonl")
    first = TextFiles(path=str(path)).identity()
    assert TextFiles(path=str(path)).identity() == first
    with path.open("a") as file:
        file.write('{"text": "more"}\n')
    assert TextFiles(path=str(path)).identity() != first
    assert TextFiles(path=str(path), field="id").identity() != TextFiles(path=str(path)).identity()


def _write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: _write(f, "x.jsonl", b'{"text": "a"}\nno\n'), r"x\.jsonl, line 2 is not JSON"),
        (
            lambda f: _write(f, "x.jsonl", b'{"body": "a"}\n'),
            r"data\.field=text: .*line 1 has no text .*\(it has body\)",
        ),
        (lambda f: _write(f, "x.jsonl", b'{"text": 3}\n'), r"data\.field=text: .*line 1 has no text"),
        (lambda f: _write(f, "x.jsonl", b"[1]\n"), r"it has no object"),
        (lambda f: parquet(f / "x.parquet", "body"), r"data\.field=text: .*it has id, body"),
        (lambda f: _write(f, "x.parquet", b"PAR1 no"), r"x\.parquet is no sound Parquet file"),
        (lambda f: _write(f, "x.txt.gz", gzip.compress(b"text" * 999)[:-9]), r"x\.txt\.gz cannot be read"),
        (lambda f: _write(f, "x.jsonl.gz", b"\x1f\x8bno"), r"x\.jsonl\.gz cannot be read"),
        (lambda f: _write(f, "x.txt", b"fine\n" * 99 + b"\xff"), r"not UTF-8 text \(byte 0xff at offset 495\)"),
    ],
)
def test_what_is_wrong_is_named(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        TextFiles(path=str(make(tmp_path))).documents()


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    path = _write(tmp_path, "x.jsonl", b'{"text": "a\\ud800b"}\n' * 20)
    assert TextFiles(path=str(path)).documents()[0][1] == b"a?b"
