"""The library `datasets` for real on local files; streams that are killed and go on."""

import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stability_lab import cli
from stability_lab.config import ConfigError, SamplingConfig
from stability_lab.data import network
from stability_lab.data.loader import StreamSampler, batch_fingerprint, build_sampler
from stability_lab.data.sources import hub
from stability_lab.data.sources.corpus import TextFiles
from stability_lab.data.sources.hub import Hub, HubStream, stream_tokens
from stability_lab.data.tokenizer import Bpe, ByteTokenizer, Gpt2

ROWS = [f"document {i} of the stream, naïve 🙂" * (1 + i % 3) if i % 10 else "\n" for i in range(300)]
TEXTS = [row for row in ROWS if row.strip()]
VAL = 20


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STABILITY_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    hub._stream_tokens.cache_clear()
    network.commit_of.cache_clear()


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("parquet")
    for i in range(3):
        table = pa.table({"id": list(range(100)), "text": ROWS[100 * i : 100 * (i + 1)]})
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=7)
    return str(folder / "*.parquet")


@pytest.fixture(scope="module")
def json_lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("json") / "x.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return str(path)


def expected_ids() -> np.ndarray:
    """Of one epoch of training, from the rows themselves."""
    tokenizer = ByteTokenizer()
    texts = [row for row in ROWS[VAL:] if row.strip()]
    return np.concatenate([np.append(tokenizer.encode(text.encode()), 256) for text in texts]).astype(np.int64)


@pytest.fixture(params=["parquet", "json"])
def source(request: pytest.FixtureRequest, parquet: str, json_lines: str) -> Hub:
    files = {"parquet": parquet, "json": json_lines}[request.param]
    return Hub(name=request.param, data_files=files, val_documents=VAL)


def test_a_stream_is_the_documents_epoch_after_epoch(source: Hub) -> None:
    ids = expected_ids()
    stream = HubStream(source, ByteTokenizer(), 0)
    got = np.concatenate([stream.read(n) for n in (1, 1000, 7, 2 * len(ids) - 1008)])
    np.testing.assert_array_equal(got, np.tile(ids, 2))


def test_windows_of_a_stream_overlap_by_one_id(source: Hub) -> None:
    sampler = StreamSampler(HubStream(source, ByteTokenizer(), 0), 16)
    windows = np.concatenate([sampler.batch(0, 3), sampler.batch(3, 1), sampler.batch(4, 20)])
    ids = expected_ids()
    np.testing.assert_array_equal(windows, [ids[16 * i : 16 * i + 17] for i in range(24)])
    with pytest.raises(ValueError, match="stands at sample 24"):
        sampler.batch(3, 1)


@pytest.mark.parametrize("steps", [0, 1, 17, 150])
def test_a_saved_state_goes_on_exactly(source: Hub, steps: int) -> None:
    """Through JSON, and across the end of an epoch."""
    straight = StreamSampler(HubStream(source, ByteTokenizer(), 0), 16)
    for step in range(steps):
        straight.batch(4 * step, 4)
    state = json.loads(json.dumps(straight.state()))
    resumed = StreamSampler(HubStream(source, ByteTokenizer(), 0), 16)
    resumed.describe(4, 200)  # as the manifest does before the state is loaded
    resumed.load_state(state)
    for step in range(steps, steps + 200):
        np.testing.assert_array_equal(resumed.batch(4 * step, 4), straight.batch(4 * step, 4))


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_what_is_read_ahead_is_not_lost(source: Hub, taken: int) -> None:
    plain, ahead = (StreamSampler(HubStream(source, ByteTokenizer(), 0), 16) for _ in range(2))
    first = plain.batch(0, 4)
    assert ahead.describe(4, 10) == {"first_batch": batch_fingerprint(first), "resume": "exact"}
    assert ahead.describe(4, 10) == {"resume": "exact"}
    np.testing.assert_array_equal(ahead.batch(0, taken), first[:taken])
    resumed = StreamSampler(HubStream(source, ByteTokenizer(), 0), 16)
    resumed.load_state(json.loads(json.dumps(ahead.state())))
    for sampler in (ahead, resumed):
        rest = np.concatenate([sampler.batch(taken, 6), sampler.batch(taken + 6, 2)])
        fresh = StreamSampler(HubStream(source, ByteTokenizer(), 0), 16)
        np.testing.assert_array_equal(rest, fresh.batch(0, taken + 8)[taken:])


CHILD = """
import json, os, signal, sys
from stability_lab.data.sources.hub import Hub, HubStream
from stability_lab.data.loader import batch_fingerprint
from stability_lab.data.loader import StreamSampler
from stability_lab.data.tokenizer import ByteTokenizer
files, state, first, last, kill = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
sampler = StreamSampler(HubStream(Hub(name="parquet", data_files=files, val_documents=20), ByteTokenizer(), 0), 16)
if first:
    sampler.load_state(json.load(open(state)))
for step in range(first, last):
    print(batch_fingerprint(sampler.batch(4 * step, 4)), flush=True)
    if step == kill - 10:
        json.dump(sampler.state(), open(state, "w"))
    if step == kill:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_and_resumed_in_another_process(parquet: str, tmp_path: Path) -> None:
    def child(first: int, last: int, kill: int) -> tuple[int, list[str]]:
        words = [sys.executable, "-W", "ignore", "-c", CHILD, parquet, str(tmp_path / "state.json")]
        done = subprocess.run([*words, *map(str, (first, last, kill))], capture_output=True, text=True)
        return done.returncode, done.stdout.split()

    code, straight = child(0, 300, -1)
    assert (code, len(straight)) == (0, 300)
    code, before = child(0, 300, 120)
    assert code == -9
    assert before == straight[:121]
    code, after = child(111, 300, -1)
    assert code == 0
    assert after == straight[111:]


@pytest.mark.slow
def test_a_shuffled_stream_says_that_it_is_not_exact(parquet: str) -> None:
    source = Hub(name="parquet", data_files=parquet, val_documents=VAL, shuffle_buffer=50)
    data = stream_tokens(source, ByteTokenizer())
    (notice,) = data.notices
    assert notice.startswith("data.shuffle_buffer=50: a resumed run goes on approximately")
    assert data.stream is not None
    sampler = build_sampler(data, 16, 3, SamplingConfig("permutation", False, False))
    assert isinstance(sampler, StreamSampler)
    assert sampler.describe(4, 10)["resume"].startswith("approximate")
    orders = [HubStream(source, ByteTokenizer(), seed).read(3000) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert not np.array_equal(orders[0], expected_ids()[:3000])


def test_validation_is_the_first_documents(source: Hub) -> None:
    data = stream_tokens(source, Gpt2())
    texts = [row for row in ROWS[:VAL] if row.strip()]
    assert data.tokenizer is not None
    assert data.tokenizer.decode(np.asarray(data.val)) == "".join(f"{text}<|endoftext|>" for text in texts)
    assert data.bytes_of(data.val) == data.val_bytes == sum(len(text.encode()) for text in texts)
    assert data.train_tokens == 0
    assert stream_tokens(source, Gpt2()) is data


def test_prepared_is_the_same_text(source: Hub) -> None:
    prepared = dataclasses.replace(source, streaming=False)
    assert [text.decode() for _, text in prepared.iterate()] == TEXTS
    assert [text.decode() for _, text in prepared.iterate(100)] == TEXTS[100:]
    data = prepared.load(ByteTokenizer())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(np.asarray(data.val)) == "".join(f"{text}<|endoftext|>" for text in TEXTS[:VAL])
    assert np.asarray(data.train)[-1] == 256
    assert prepared.load(ByteTokenizer()).fingerprint == data.fingerprint


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_null_is_left_out_everywhere(kind: str, tmp_path: Path) -> None:
    rows = [None if i % 5 == 2 else f"document {i}" for i in range(40)]
    texts = [row for row in rows if row is not None]
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": rows}), path)
    else:
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = Hub(name=kind, data_files=str(path), val_documents=5)
    data = stream_tokens(source, ByteTokenizer())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(np.asarray(data.val)).split("<|endoftext|>")[:-1] == texts[:4]
    assert data.stream is not None
    ids = data.stream(0).read(2 * len("<|endoftext|>".join(texts[4:])))
    seen = data.tokenizer.decode(ids).split("<|endoftext|>")[:-1]
    assert seen == (9 * texts[4:])[: len(seen)]
    assert len(seen) > len(texts[4:])
    prepared = Hub(name=kind, data_files=str(path), val_documents=5, streaming=False)
    assert [text.decode() for _, text in prepared.iterate()] == texts
    assert [text.decode() for _, text in TextFiles(path=str(path), val_every=2).iterate()] == texts


def test_rows_after_the_validation_split_without_any_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["some text"] * 3 + [None, " "] * 5}), tmp_path / "x.parquet")
    source = Hub(name="parquet", data_files=str(tmp_path / "x.parquet"), val_documents=3)
    for refused in (lambda: HubStream(source, ByteTokenizer(), 0).read(1), lambda: stream_tokens(source, Gpt2())):
        with pytest.raises(ConfigError, match=r"data\.val_documents=3: parquet has no document after these"):
            refused()


@pytest.mark.slow
@pytest.mark.parametrize(("n", "expected"), [(2, 1), (59, 2), (200, 10), (20_000, 1000), (20_100, 1000)])
@pytest.mark.parametrize("streaming", [True, False])
def test_of_local_files_a_twentieth_is_validation(n: int, expected: int, streaming: bool, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["ab"] * n}), tmp_path / "x.parquet")
    source = Hub(name="parquet", data_files=str(tmp_path / "x.parquet"), streaming=streaming)
    data = source.load(ByteTokenizer())
    assert data.val_tokens == 3 * expected
    assert data.stream is not None or data.train_tokens == 3 * (n - expected)
    assert dataclasses.replace(source, val_documents=1).held_out == 1


def test_the_hub_holds_out_a_thousand() -> None:
    assert Hub(name="a/b").held_out == 1000  # without opening it


def test_too_few_documents_are_refused_before_anything_is_made(
    parquet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data=hub", "data.name=parquet", f"data.data_files={parquet}", "model.seq_len=16"]
    words += ["data.val_documents=300", f"output_dir={tmp_path / 'out'}"]
    assert cli.run(["train", *words]) == 2
    assert "data.val_documents=300: parquet has no document after these" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_is_learned_after_the_validation_split(parquet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = Bpe._train
    monkeypatch.setattr(Bpe, "_train", lambda self, documents: seen.extend(documents) or real(self, documents))
    data = stream_tokens(Hub(name="parquet", data_files=parquet, val_documents=VAL), Bpe(265))
    assert data.vocab_size == 265
    assert [text.decode() for _, text in seen] == ROWS[VAL:]


def test_the_fingerprint_is_that_of_the_training_text_too(tmp_path: Path) -> None:
    """Same path, size and validation rows; and a vocabulary that was learned from other text is not taken."""

    def write(folder: str, last: str) -> Hub:
        (tmp_path / folder).mkdir(exist_ok=True)
        texts = [f"document {i} of few" for i in range(30)] + 4 * [last]
        pq.write_table(pa.table({"text": texts}), tmp_path / folder / "x.parquet", compression="none")
        return Hub(name="parquet", data_files=str(tmp_path / folder / "*.parquet"), val_documents=3)

    def load(*words: str) -> tuple[str, bytes, Any]:
        source = write(*words)
        plain, learned = stream_tokens(source, ByteTokenizer()), stream_tokens(source, Bpe(261)).tokenizer
        assert learned is not None
        return plain.fingerprint, np.asarray(plain.val).tobytes(), learned

    first, moved, changed = (load(*words) for words in (("a", " zq" * 40), ("b", " zq" * 40), ("a", " xk" * 40)))
    assert moved[0] == first[0]
    assert changed[1] == first[1]
    assert changed[0] != first[0]
    assert len(changed[2].encode(b" zq zq")) > len(first[2].encode(b" zq zq"))


SHAS = ("1" * 40, "2" * 40)


def test_what_is_not_pinned_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    class Api:
        def dataset_info(self, name: str, *, revision: str | None, timeout: float) -> Any:
            asked.append((name, revision))
            return SimpleNamespace(sha=SHAS[0])

    monkeypatch.setattr(network, "use_hub", lambda: True)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    for _ in range(2):
        source = Hub(name="a/b").pinned()
        assert source.about()["version"] == SHAS[0]
    assert Hub(name="a/b", revision=SHAS[1]).pinned().revision == SHAS[1]
    assert asked == [("a/b", None)]
    assert len({source.content(), Hub(name="a/b").content(), Hub(name="a/b", revision=SHAS[1]).content()}) == 3


def test_without_a_network_the_cache_knows_the_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached = tmp_path / "hub" / "datasets--a--b"
    (cached / "snapshots" / SHAS[0]).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(SHAS[0])
    assert Hub(name="a/b").pinned().revision == SHAS[0]
    assert Hub(name="a/b", revision="v2").pinned().revision == "v2"


def test_a_part_of_a_local_file(parquet: str) -> None:
    source = Hub(name="parquet", data_files=parquet, split="train[10:13]", val_documents=1, streaming=False)
    assert [text.decode() for _, text in source.iterate()] == [row for row in ROWS[10:13] if row.strip()]


def test_streams_have_one_order(parquet: str) -> None:
    data = stream_tokens(Hub(name="parquet", data_files=parquet, val_documents=VAL), ByteTokenizer())
    with pytest.raises(ConfigError, match="sampling=random_window: a stream is read in its own order"):
        build_sampler(data, 16, 0, SamplingConfig("random_window", False, False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "^name='': must be a dataset"),
        ({"name": "parquet"}, "^data_files=null: files, or a glob"),
        ({"name": "a/b", "data_files": "x"}, "^data_files=x: files, or a glob"),
        ({"name": "a/b", "shuffle_buffer": -1}, "^shuffle_buffer=-1"),
        ({"name": "a/b", "shuffle_buffer": 5, "streaming": False}, "^shuffle_buffer=5: must be 0"),
        ({"name": "json", "data_files": "x", "split": "test"}, "^split=test: must be train"),
        ({"name": "a/b", "val_documents": 0}, "^val_documents=0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hub(**options)


def test_what_is_wrong_is_named(parquet: str, tmp_path: Path) -> None:
    bad = {kind: str(tmp_path / f"bad.{kind}") for kind in ("parquet", "jsonl")}
    Path(bad["parquet"]).write_bytes(b"PAR1")
    Path(bad["jsonl"]).write_text('{"text": "a"}\n{"text": "b"}\n{"text": broken\n')
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data_files": "none*.parquet"}, r"data\.data_files=none\*\.parquet: no file matches"),
        ({"data_files": parquet, "field": "body"}, r"data\.field=body: parquet has the columns id, text"),
        ({"data_files": parquet, "field": "id"}, r"data\.field=id: parquet has no text there but int"),
        (
            {"data_files": bad["parquet"]},
            r"data\.data_files=.*bad\.parquet: cannot be read as data\.name=parquet \(.+\); mend",
        ),
        (
            {"name": "json", "data_files": bad["jsonl"]},
            r"bad\.jsonl: cannot be read as data\.name=json \(.* in row 2\); mend",
        ),
        ({"name": "arrow", "data_files": bad["jsonl"]}, r"bad\.jsonl: cannot be read as data\.name=arrow \(.+\); mend"),
    ]
    for options, message in cases:
        for streaming in (True, False):
            with pytest.raises(ConfigError, match=message):
                Hub(**{"name": "parquet", "streaming": streaming, **options}).load(ByteTokenizer())
    source = Hub(name="parquet", data_files=parquet, val_documents=300)
    with pytest.raises(ConfigError, match=r"data\.val_documents=300: parquet has no document after these"):
        HubStream(source, ByteTokenizer(), 0).read(1)


def test_a_column_that_only_the_rows_can_tell() -> None:
    """As of streamed CSV. The error is made here, because the library leaves the file open after a real one."""
    source = Hub(name="csv", data_files="x.csv", field="body")
    with pytest.raises(ConfigError, match=r"data\.field=body: csv has no such column"), source.errors():
        raise KeyError("body")


def test_every_document_is_read_once_an_epoch(parquet: str) -> None:
    stream = HubStream(Hub(name="parquet", data_files=parquet, val_documents=VAL), ByteTokenizer(), 0)
    text = ByteTokenizer().decode(stream.read(len(expected_ids())))
    assert text.split("<|endoftext|>")[:-1] == list(itertools.filterfalse(str.isspace, ROWS[VAL:]))


@pytest.mark.parametrize(
    ("online", "sentence"),
    [
        (False, "data.name=a/b: the hub cannot be reached"),
        (True, r"data.name=a/b: the hub does not give it \(403 for \*\*\*\)"),
    ],
)
def test_what_breaks_in_the_middle_says_no_token(
    online: bool, sentence: str, parquet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(network, "use_hub", lambda: online)
    stream = HubStream(Hub(name="parquet", data_files=parquet, val_documents=VAL), ByteTokenizer(), 0)
    stream.read(10)

    def rows() -> Iterator[Any]:
        yield {"text": "x"}
        raise ValueError("403 for hf_secret")

    stream._source = Hub(name="a/b")
    stream._texts = stream._source.texts(rows())
    with pytest.raises(RuntimeError, match=sentence) as caught:
        stream.read(10_000)
    assert "hf_secret" not in "".join(traceback.format_exception(caught.value))


def test_a_small_file_is_hashed_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"some text")
    assert hub.content_hash(tmp_path / "x") == hashlib.sha256(b"some text").hexdigest()


def test_a_large_file_from_head_to_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WHOLE_BYTES", 100), ("SAMPLES", 5), ("SAMPLE_BYTES", 10)):
        monkeypatch.setattr(hub, name, value)
    path, size = tmp_path / "x", 1010

    def changed_at(position: int) -> str:
        text = bytearray(size)
        text[position] = 1
        path.write_bytes(text)
        return hub.content_hash(path)

    seen = [changed_at(position) for position in (0, 255, 500, 755, size - 1)]
    path.write_bytes(bytes(size))
    unseen = hub.content_hash(path)
    path.write_bytes(bytes(size + 1))
    assert len({*seen, unseen, hub.content_hash(path)}) == 7
    assert changed_at(100) == unseen  # what the docstring admits


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("giant", "told"), [(0, True), (3, False)])
def test_a_giant_first_document_is_told(giant: int, told: bool, streaming: bool, tmp_path: Path) -> None:
    rows = ["a small document " * 4] * 50
    rows[giant] *= 1000
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = Hub(name="json", data_files=str(path), streaming=streaming).load(ByteTokenizer())
    assert ["half of the text or more" in notice for notice in data.notices] == [True] * told


def test_pointers_among_local_files_are_named(parquet: str, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.parquet").write_bytes(Path(parquet).with_name("0.parquet").read_bytes())
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
    for name in ("b", "c"):
        (tmp_path / f"{name}.parquet").write_bytes(pointer)
        with pytest.raises(ConfigError, match=r"b\.parquet is a Git LFS pointer, .*git lfs pull") as error:
            Hub(name="parquet", data_files=str(tmp_path / "*.parquet")).load(ByteTokenizer())
    assert str(error.value).endswith("(2 of 3 files are refused: b.parquet, c.parquet)")
