from typing import Any

import numpy as np
import pytest

import stability_lab.judge.log

Log: Any = stability_lab.judge.log.Log  # lists are fine too, which its annotations do not say


def test_lists_become_arrays():
    log = Log([1, 2, 3], [2, 1, float("nan")], None, skipped=[0, 1, 0])
    assert (log.step.dtype, log.loss.dtype, log.skipped.dtype) == (np.int64, np.float64, np.bool_)
    assert len(log) == 3
    assert list(log.signals) == ["loss"]


def test_kept_leaves_out_skipped_steps():
    log = Log([1, 2, 3], [3.0, 2.0, 1.0], [1.0, 9.0, 1.0], lr=[1, 2, 3], skipped=[False, True, False])
    kept = log.kept()
    assert (kept.step.tolist(), kept.loss.tolist(), kept.lr.tolist()) == ([1, 3], [3.0, 1.0], [1.0, 3.0])
    assert kept.tokens is None
    assert kept.stride == 2
    assert Log([1], [1.0], None, skipped=[False]).kept().step.tolist() == [1]


@pytest.mark.parametrize(("steps", "stride"), [([7], 1), ([], 1), ([1, 2, 3], 1), ([10, 20, 30, 35], 10)])
def test_stride(steps, stride):
    assert Log(steps, np.ones(len(steps)), None).stride == stride


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": [1], "loss": None, "grad_norm": None}, "neither"),
        ({"step": [1, 2], "loss": [1.0], "grad_norm": None}, r"loss has shape \(1,\)"),
        ({"step": [[1]], "loss": [[1.0]], "grad_norm": None}, "step has shape"),
        ({"step": [1, 3, 3], "loss": [1.0, 1.0, 1.0], "grad_norm": None}, "3 follows 3"),
        ({"step": [1, 2], "loss": [1.0, 1.0], "grad_norm": None, "lr": [1.0]}, "lr has shape"),
    ],
)
def test_bad_log(given, message):
    with pytest.raises(ValueError, match=message):
        Log(**given)
