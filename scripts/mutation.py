"""Runs the tests on changed copies of the checkout; `mutants.py` and `mutation_sample.py` say what is changed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from stability_lab.machine.cores import cores

ROOT = Path(__file__).resolve().parents[1]
TEST_LIMIT_S = 600
NOT_COPIED = (".git", "outputs", "__pycache__", ".pytest_cache", ".ruff_cache", ".cache", "build", "dist")


@dataclass(frozen=True)
class Mutant:
    """A file below the checkout with its changed text, and the pytest arguments that should notice."""

    file: str
    text: str
    tests: tuple[str, ...]
    words: str  # what was changed


def run(mutants: Sequence[Mutant]) -> list[str]:
    """`killed`, `survived`, `timeout` or `error: ...` for each mutant, printed as it comes.

    The tests must pass without any mutant, because a test that fails anyway notices nothing: SystemExit if not.
    """
    with tempfile.TemporaryDirectory(prefix="stability-lab-mutants-") as folder:
        copies: Queue[Path] = Queue()
        for number in range(cores()):
            copy = Path(folder) / f"checkout-{number}"
            shutil.copytree(ROOT, copy, ignore=left_out)
            copies.put(copy)
        copy = copies.get()
        check_import(copy)
        every = dict.fromkeys(word for mutant in mutants for word in mutant.tests)
        before = run_tests(copy, ("-n", "auto", *every), limit_s=None)
        copies.put(copy)
        if before.returncode != 0:
            sys.exit(f"{before.stdout}{before.stderr}error: the tests fail without any mutant.")

        def tried(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                result = verdict(copy, mutant)
            finally:
                copies.put(copy)
            print(f"{result:<10} {mutant.file}: {mutant.words}  [{mutant.tests[0]}]", flush=True)
            return result

        with ThreadPoolExecutor(copies.qsize()) as pool:
            return list(pool.map(tried, mutants))


def verdict(copy: Path, mutant: Mutant) -> str:
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.text, encoding="utf-8")
    try:
        code = run_tests(copy, mutant.tests, TEST_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        path.write_text(source, encoding="utf-8")
    # Pytest's other codes (2 collection, 4 usage, 5 nothing collected) mean a mutant that breaks the import.
    return {0: "survived", 1: "killed"}.get(code, f"error: pytest ended with exit code {code}")


def run_tests(copy: Path, arguments: Sequence[str], limit_s: float | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=copy, env=copied_environment(copy), capture_output=True, text=True, timeout=limit_s
    )


def left_out(folder: str, names: list[str]) -> list[str]:
    """What the copy does without: outputs, caches and virtual environments of any name."""
    return [name for name in names if name in NOT_COPIED or Path(folder, name, "pyvenv.cfg").exists()]


def copied_environment(copy: Path) -> dict[str, str]:
    """The copy's code comes before an editable install of the checkout, in child processes too."""
    # No byte code: a .pyc counts as current when size and second of its source match, as a mutant's can.
    return os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def check_import(copy: Path) -> None:
    command = [sys.executable, "-c", "import stability_lab; print(stability_lab.__file__)"]
    found = subprocess.run(
        command, cwd=copy, env=copied_environment(copy), capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).resolve().is_relative_to(copy.resolve()):
        sys.exit(f"error: the tests would import {found} and not the copy in {copy}.")
