"""Mutation check: each mutant must turn its test red (started by scripts/mutate.sh, standard library only).

A mutant is one exact replacement in one file of a temporary copy of the checkout. The copy is first tested as
it is, because a test that is red anyway notices nothing. Exit code 0 if every mutant was noticed, 1 if one
survived or could not be tried.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST_LIMIT_S = 600
NOT_COPIED = (".git", "outputs", "__pycache__", ".pytest_cache", ".ruff_cache", ".cache", "build", "dist")


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str  # stands exactly once in the file
    new: str
    test: str  # pytest target: file or node id


MUTANTS: tuple[Mutant, ...] = ()


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


def run_tests(copy: Path, targets: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *targets]
    return subprocess.run(
        command, cwd=copy, env=copied_environment(copy), capture_output=True, text=True, timeout=TEST_LIMIT_S
    )


def judge(copy: Path, mutant: Mutant) -> str:
    """`killed`, `survived`, or `error: ...` where the mutant says nothing about its test."""
    path = copy / mutant.file
    if not path.is_file():
        return "error: no such file"
    source = path.read_text(encoding="utf-8")
    if (count := source.count(mutant.old)) != 1:
        return f"error: the old text stands {count} times in the file, not once"
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code = run_tests(copy, [mutant.test]).returncode
    except subprocess.TimeoutExpired:
        return f"error: no result within {TEST_LIMIT_S} s"
    finally:
        path.write_text(source, encoding="utf-8")
    # Pytest's other codes (2 collection, 4 usage, 5 nothing collected) mean a mutant that breaks the import.
    return {0: "survived", 1: "killed"}.get(code, f"error: pytest ended with exit code {code}")


def describe(mutant: Mutant) -> str:
    return f"{mutant.file}: {' '.join(mutant.old.split())}  ->  {' '.join(mutant.new.split())}"


def main(words: list[str]) -> int:
    mutants = [m for m in MUTANTS if not words or any(word in m.file or word in m.test for word in words)]
    if not mutants:
        print(f"error: no mutant matches {' '.join(words) or 'an empty list'}.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="stability-lab-mutants-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=left_out)
        check_import(copy)
        before = run_tests(copy, sorted({mutant.test for mutant in mutants}))
        if before.returncode != 0:
            print(before.stdout + before.stderr, file=sys.stderr)
            print("error: the tests fail without any mutant.", file=sys.stderr)
            return 1
        results = []
        for mutant in mutants:
            results.append(judge(copy, mutant))
            print(f"{results[-1]:<10} {describe(mutant)}  [{mutant.test}]", flush=True)
    unnoticed = sum(result != "killed" for result in results)
    print(f"{len(results) - unnoticed} of {len(results)} mutants killed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
