"""The judge against the expert of benchmarks/judge.py, on logs of other seeds than those of the docs."""

import numpy as np
import pytest

from benchmarks import judge
from benchmarks.judge_kinds import KINDS


@pytest.mark.slow
def test_the_judge_agrees_with_an_expert(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(KINDS) >= 60
    sums = np.array([judge.run_kind(name, seed=100, logs=2, show=False) for name in KINDS])
    right, hits, happenings, wrong = sums.sum(axis=0)
    shown = capsys.readouterr().out
    assert right >= 0.95 * 2 * len(KINDS), shown
    assert hits >= 0.95 * happenings, shown
    assert hits >= 0.95 * (hits + wrong), shown
