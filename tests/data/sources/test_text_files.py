"""Documents out of JSON lines, Parquet and gzip; the same text gives the same documents however it is packed."""

import csv
import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stability_lab.config import ConfigError
from stability_lab.data.sources import text_files as text_module
from stability_lab.data.sources.corpus import TextFiles, split_documents

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
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


def json_list(path: Path) -> Path:
    path.write_text(json.dumps([{"id": i, "text": row} for i, row in enumerate(ROWS)], indent=1))
    return path


def table(path: Path, delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([["id", "text"], *enumerate(ROWS)])
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda f: json_list(f / "list.json"),
        lambda f: zipped(json_list(f / "LIST.JSON")),
        lambda f: json_lines(f / "lines.json"),
        lambda f: table(f / "data.csv"),
        lambda f: table(f / "data.TSV", "\t"),
        lambda f: zipped(table(f / "x.csv")),
        lambda f: json_lines(f / "UP.JSONL"),
        lambda f: parquet(f / "Up.Parquet"),
        lambda f: json_lines(f / "x.NdJson"),
    ],
)
def test_rows_under_other_names_are_documents_too(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    documents = TextFiles(path=str(path)).documents()
    assert [text.decode() for _, text in documents] == ROWS
    assert TextFiles(path=str(tmp_path)).documents() == documents  # the folder has nothing else


def test_lists_and_tables_beside_text_are_left_alone(tmp_path: Path) -> None:
    json_lines(tmp_path / "x.jsonl")
    (tmp_path / "dataset_info.json").write_text('{"size": 40}')
    (tmp_path / "statistics.csv").write_text("a,b\n1,2\n")
    assert [text.decode() for _, text in TextFiles(path=str(tmp_path)).documents()] == ROWS


def test_a_large_cell_of_a_table(tmp_path: Path) -> None:
    rows = ["x" * 300_000, *ROWS]
    with (tmp_path / "x.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["text"], *([row] for row in rows)])
    documents = [text.decode() for _, text in TextFiles(path=str(tmp_path / "x.csv")).documents()]
    assert "".join(documents) == "".join(rows)


@pytest.mark.parametrize("kind", ["plain", "lines", "list", "parquet"])
@pytest.mark.parametrize("at", [0, 20])
def test_a_giant_is_cut_where_it_would_be_held_out(
    kind: str, at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pieces are in both splits, and the other documents stay whole."""
    texts = [f"a small document {i}\n" for i in range(51)]
    texts[at] = "".join(f"line {i} of the giant\n" for i in range(40_000))
    if kind == "plain":
        for i, text in enumerate(texts):
            (tmp_path / f"{i:02d}.txt").write_text(text)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet")
    else:
        rows = [json.dumps({"text": text}) for text in texts]
        end = ("x.jsonl", "\n".join(rows)) if kind == "lines" else ("x.json", f"[{','.join(rows)}]")
        (tmp_path / end[0]).write_text(end[1])
    source = TextFiles(path=str(tmp_path))
    documents = source.documents()
    assert b"".join(text for _, text in documents).decode() == "".join(texts)
    assert [text.decode() for _, text in documents if b"small" in text] == texts[:at] + texts[at + 1 :]
    assert list(source.iterate(33)) == documents[33:]
    _, val = split_documents(documents, 20)
    share = sum(len(text) for _, text in val) / sum(len(text) for _, text in documents)
    assert 0.03 < share < 0.08
    assert "100% of the text: it is cut into pieces, of which every 20th is held out" in caplog.text


def test_a_giant_in_training_and_a_long_document_stay_whole(tmp_path: Path) -> None:
    texts = ["word " * 100 for _ in range(60)]
    for at, size in ((1, 10_000), (20, 1000)):
        texts[at] = "word " * size
        (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        assert [text.decode() for _, text in TextFiles(path=str(tmp_path)).documents()] == texts


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
        (lambda f: _write(f, "x.txt", POINTER), r"x\.txt is a Git LFS pointer, .*: fetch it with git lfs pull$"),
        (lambda f: _write(f, "x.jsonl", POINTER), r"x\.jsonl is a Git LFS pointer"),
        (lambda f: _write(f, "x.parquet", POINTER), r"x\.parquet is a Git LFS pointer"),
        (lambda f: _write(f, "x", pickle.dumps(ROWS)), r"x is a pickle of Python: give text$"),
        (lambda f: _write(f, "x.txt.gz", gzip.compress(b"PK\3\4" + bytes(99))), r"x\.txt\.gz is a zip archive"),
        (lambda f: parquet(f / "x.txt"), r"x\.txt is a Parquet file: .* under a name that ends in \.parquet$"),
        (lambda f: _write(f, "x.bin", bytes(range(100)) * 2 + bytes(99)), r"x\.bin is no text but binary"),
        (lambda f: json_list(f / "x.txt"), r"x\.txt holds JSON under .* ends in \.json, so that data\.field=text"),
        (lambda f: json_lines(f / "wiki_00"), r"wiki_00 holds JSON under .* ends in \.jsonl, so"),
        (lambda f: _write(f, "x.json", b'{\n "text": ["a", "b"]\n}'), r"x\.json is neither a JSON list .* nor JSON"),
        (lambda f: _write(f, "x.json", b'[{"text": "a"},'), r"x\.json is not JSON"),
        (lambda f: _write(f, "x.json", b'[{"text": "a"}, {"body": 1}]'), r"x\.json, item 2 has no text .*has body"),
        (lambda f: _write(f, "x.json", b"[" * 10**6), r"x\.json is not JSON \(maximum recursion"),
        (lambda f: _write(f, "x.jsonl", b"[" * 10**6), r"x\.jsonl, line 1 is not JSON \(maximum recursion"),
        (lambda f: _write(f, "x.csv", b"id,body\n1,a\n"), r"data\.field=text: .*row 1 .*\(the columns are id, body\)"),
        (lambda f: _write(f, "x.csv", b"id,text\n1,a\n2\n"), r"x\.csv, row 2 has no such cell"),
        (lambda f: _write(f, "x.csv", b"text\ncaf\xe9\n"), r"x\.csv is no sound table in UTF-8"),
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


def test_all_bad_files_of_a_mixture_are_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        json_lines(tmp_path / name)
    _write(tmp_path, "b.jsonl", POINTER)
    _write(tmp_path, "d.txt", gzip.compress(POINTER))
    with pytest.raises(ConfigError, match=r"b\.jsonl is a Git LFS .*\(2 of 4 files are refused: b\.jsonl, d\.txt\)$"):
        TextFiles(path=str(tmp_path)).documents()


@pytest.mark.parametrize("text", ["{}\n{}\n", '{"a": 1}\nand words\n', "[1, 2]\n[3]\n", "[{x}]\n", "{\n", "[" * 5000])
def test_text_that_only_begins_like_json_is_text(text: str, tmp_path: Path) -> None:
    path = _write(tmp_path, "x.txt", text.encode() * 40)
    assert b"".join(piece for _, piece in TextFiles(path=str(path)).documents()) == text.encode() * 40


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = json_lines(tmp_path / "x.jsonl")
    assert TextFiles(path="~/x.jsonl").documents() == TextFiles(path=str(path)).documents()


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    path = _write(tmp_path, "x.jsonl", b'{"text": "a\\ud800b"}\n' * 20)
    assert TextFiles(path=str(path)).documents()[0][1] == b"a?b"
