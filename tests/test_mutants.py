"""The table of scripts/mutants.py fits the code; scripts/mutate.sh runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_defining_lines_are_few_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from mutants import REPLACEMENTS  # pyright: ignore[reportMissingImports]

    assert len(REPLACEMENTS) <= 30
    for r in REPLACEMENTS:
        source = (ROOT / "stability_lab" / r.file).read_text(encoding="utf-8")
        assert source.count(r.old) == 1, f"{r.file}: {r.old!r} does not occur exactly once"
        file, _, test = r.test.partition("::")
        assert f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), r.test
