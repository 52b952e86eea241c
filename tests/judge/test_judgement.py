import json
from typing import Any

import numpy as np

import stability_lab.judge.log
from stability_lab.judge.judgement import judge
from stability_lab.judge.spikes import DEFINITIONS
from stability_lab.judge.verdict import Evidence

Log: Any = stability_lab.judge.log.Log  # lists are fine too, which its annotations do not say

NAN, INF = float("nan"), float("inf")


def short_run():
    rng = np.random.default_rng(1)
    norm = rng.normal(1.0, 0.1, 100)
    norm[29], norm[34], norm[59] = 50.0, NAN, 50.0
    return Log(np.arange(1, 101), 3 + np.exp(-np.arange(100) / 20), norm)


def test_short_run_with_spikes_and_a_nan():
    """A hundred steps, spikes of 50 times at 30 and 60, NaN at 35."""
    judgement = judge(short_run(), Evidence(warmup_steps=10))
    robust = judgement.as_dict()["scores"]["grad_norm"]["robust"]
    assert (robust["steps"], robust["n_nonfinite"], robust["min_window"]) == ([30, 35, 60], 1, 20)
    assert [(event.kind, event.step) for event in judgement.events] == [
        ("grad_norm_spike", 30),
        ("nonfinite_step", 35),
        ("grad_norm_spike", 60),
    ]
    # The gradient norm was finite again: the log does not say so, but the step at 35 was skipped.
    assert (judgement.verdict.verdict, judgement.verdict.first_bad_step) == ("stable", None)
    assert any("skipped" in note for note in judgement.notes)
    assert judgement.scores["grad_norm"]["olmo_core"].score is None


def test_as_dict_is_json_with_null_for_undefined():
    told = judge(short_run()).as_dict()
    assert json.loads(json.dumps(told)) is not None
    assert {"verdict", "reason", "first_bad_step", "delta", "sensitivity", "scores", "events", "notes"} <= told.keys()
    assert told["scores"].keys() == {"loss", "grad_norm"}
    assert told["scores"]["loss"].keys() == DEFINITIONS.keys()
    undefined = told["scores"]["loss"]["olmo2"]
    assert undefined["reason"]
    assert [undefined[key] for key in ("score", "interval", "resolution", "n_spikes")] == [None] * 4
    assert told["lr_at_first_bad"] is None


def test_spikes_carry_the_logs_own_steps():
    norm = np.random.default_rng(0).normal(1.0, 0.05, 300)
    norm[200] = 9.0
    skipped = np.arange(300) == 50
    log = Log(5 * np.arange(1, 301), None, norm, skipped=skipped)
    told = judge(log).as_dict()
    assert [told["scores"]["grad_norm"][name]["steps"] for name in ("robust", "olmo_core")] == [[1005], [1005]]
    assert [event["step"] for event in told["events"] if event["event"] == "grad_norm_spike"] == [1005]


def test_notes():
    loss, norm = np.linspace(5, 2, 300), np.ones(300)
    assert judge(Log(np.arange(1, 301), loss, norm, skipped=np.zeros(300)), Evidence(5.5, vocab_size=256)).notes == []
    assert "far above" in judge(Log([1], [5.0], [1.0]), Evidence(9.5, vocab_size=256)).notes[0]
    sparse = " ".join(judge(Log([10, 20, 30, 35], [4.0] * 4, None)).notes)
    assert "every 10 steps" in sparse
    assert "not always 10" in sparse
    assert "no gradient norm" in sparse
    assert "begins at step 500" in " ".join(judge(Log([500, 501], None, [1.0, 1.0])).notes)
    norm[40] = INF
    assert "fp16 loss scaling" in " ".join(judge(Log(np.arange(1, 301), loss, norm)).notes)
    (note,) = judge(Log(np.arange(1, 301), loss, norm, skipped=~np.isfinite(norm))).notes
    assert "1 of 300 steps were skipped" in note


def test_five_hundred_rows():
    log = Log(np.arange(1, 501), np.linspace(5, 3, 500), np.random.default_rng(0).lognormal(0, 0.1, 500))
    judgement = judge(log, Evidence(initial_val_loss=5.5))
    assert judgement.scores["loss"]["olmo2"].score is None
    assert judgement.verdict.verdict == "stable"
    assert judgement.events == []


def test_the_same_log_has_the_same_judgement():
    first, second = (json.dumps(judge(short_run()).as_dict()) for _ in range(2))
    assert first == second


def test_scores_of_a_signal_that_some_steps_lack():
    norm = np.random.default_rng(0).normal(1.0, 0.05, 300)
    norm[200] = 9.0
    absent = np.arange(300) % 5 != 0
    log = Log(np.arange(1, 301), np.linspace(5, 2, 300), norm, no_grad_norm=absent)
    told = judge(log).as_dict()
    robust = told["scores"]["grad_norm"]["robust"]
    assert (robust["steps"], robust["n_scored"], robust["n_nonfinite"]) == ([201], 40, 0)
    assert told["scores"]["loss"]["robust"]["n_scored"] == 280
    assert any(note.startswith("gradient norm: One value every 5 steps") for note in told["notes"])
    assert any(note.startswith("gradient norm: 240 of 300 steps have no value") for note in told["notes"])
    assert not any(note.startswith("loss: ") for note in told["notes"])


def test_losses_near_the_largest_float_are_scored_without_a_warning():
    loss = np.random.default_rng(0).normal(2.0, 0.1, 3000)
    loss[[1500, 2600]] = 1e308
    told = judge(Log(np.arange(1, 3001), loss, None)).as_dict()
    for name in ("olmo_core", "llm_c", "robust"):
        assert told["scores"]["loss"][name]["steps"] == [1501, 2601]
