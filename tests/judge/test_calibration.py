"""The judge against the expert of benchmarks/judge.py, on logs of other seeds than those of the docs."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_judge_agrees_with_an_expert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("judge", "judge_kinds"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    calibration = importlib.import_module("judge")
    kinds = importlib.import_module("judge_kinds").KINDS
    assert len(kinds) >= 60
    sums = np.array([calibration.run_kind(name, seed=100, logs=2, show=False) for name in kinds])
    right, hits, happenings, wrong = sums.sum(axis=0)
    shown = capsys.readouterr().out
    assert right >= 0.95 * 2 * len(kinds), shown
    assert hits >= 0.95 * happenings, shown
    assert hits >= 0.95 * (hits + wrong), shown
