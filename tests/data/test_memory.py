"""Memory stays flat over files much larger than it should ever hold."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MIB = 2**20

SCAN = """
import sys, resource
import numpy as np
from stability_lab.data.tokenizer import Gpt2
from stability_lab.data.sources.token_files import TokenFiles
from stability_lab.data.loader import TrainSampler

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024

Gpt2().token_bytes()
before, peak = anonymous(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
data = TokenFiles(path=sys.argv[1], dtype="uint16").load(Gpt2())
scanned = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - peak
sampler = TrainSampler(data.train, 1024, 0)
total = sum(int(sampler.batch(16 * step, 16).sum()) for step in range(200))
tail = np.asarray(data.val[-4:]).tolist()
print(scanned, anonymous() - before, data.train_tokens + data.val_tokens, *tail)
"""

PREPARE = """
import sys, threading, time
from pathlib import Path
from stability_lab.data.sources.corpus import TextFiles
from stability_lab.data.tokens.prepare import prepare
from stability_lab.data.tokenizer import ByteTokenizer

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024

def watch():
    while True:
        seen.append(anonymous())
        time.sleep(0.01)

seen = [anonymous()]
threading.Thread(target=watch, daemon=True).start()
meta = prepare(TextFiles(path=sys.argv[1]), ByteTokenizer(), Path(sys.argv[2]))
print(max(seen) - seen[0], meta["train"]["tokens"] + meta["val"]["tokens"])
"""


def child(code: str, cache: Path, *words: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        check=True,
        capture_output=True,
        text=True,
        env={"STABILITY_LAB_CACHE": str(cache), "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    return [int(word) for word in done.stdout.split()[-7:]]


@pytest.mark.slow
def test_two_gigabytes_of_ids(tmp_path: Path) -> None:
    """A sparse file: checked from end to end, then sampled; what is mapped is the kernel's to drop."""
    path = tmp_path / "ids.bin"
    with path.open("wb") as file:
        file.truncate(2**31)
        file.seek(2**31 - 8)
        file.write(np.array([1, 2, 3, 4], np.uint16).tobytes())
    scanned, sampled, tokens, *tail = child(SCAN, tmp_path, str(path))
    assert (tokens, tail) == (2**30, [1, 2, 3, 4])
    assert scanned < 300  # MiB of 2,048: a chunk of ids in several types
    assert sampled < 150


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_text_larger_than_memory_is_prepared_piece_by_piece(kind: str, tmp_path: Path) -> None:
    path, line = tmp_path / f"x.{kind}", "some words that make up a line of text\n" * 25
    size = 200 * MIB
    with path.open("w") as file:
        one = line if kind == "txt" else json.dumps({"text": line}) + "\n"
        for _ in range(size // len(one)):
            file.write(one)
    grown, tokens = child(PREPARE, tmp_path, str(path), str(tmp_path / "out"))
    assert tokens > 0.9 * size
    assert grown < 100  # MiB; the text is mapped, and its pages are the kernel's to drop
