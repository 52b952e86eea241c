from typing import Any

import numpy as np

import stability_lab.judge.log
from stability_lab.judge.events import find_events
from stability_lab.judge.shared import SharedSpike, shared_spikes

Log: Any = stability_lab.judge.log.Log


def run(seed: int, at: list[int], first: int = 1, lasts: int = 1) -> Any:
    loss = 2 + 0.02 * np.random.default_rng(seed).normal(size=1000)
    for i in at:
        loss[i : i + lasts] += 1.0
    return Log(np.arange(first, first + 1000), loss, None)


def share(*logs: Any) -> Any:
    return shared_spikes(logs, [find_events(log) for log in logs])


def test_spikes_at_the_same_step_are_batches():
    sharing, events = share(run(0, [300, 700, 800]), run(1, [300, 701]), run(2, [300, 500]))
    assert sharing.spikes == [SharedSpike(301, 3, 3), SharedSpike(701, 2, 3)]
    assert sharing.chance < 0.1
    assert [[event.cause for event in own] for own in events] == [
        ["batch", "batch", None],
        ["batch", "batch"],
        ["batch", None],
    ]


def test_runs_count_that_were_logged_at_the_step():
    sharing, _ = share(run(0, [300]), run(1, [300]), run(2, [], first=5000), run(3, [], first=5000))
    assert sharing.spikes == [SharedSpike(301, 2, 2)]


def test_a_slow_spike_stays_the_runs_own():
    _, events = share(run(0, [300], lasts=40), run(1, [300], lasts=40))
    assert {event.cause for own in events for event in own} == {None}


def test_what_chance_makes_is_not_shared():
    rng = np.random.default_rng(0)
    logs = [run(seed, sorted(rng.choice(np.arange(50, 990), 40, replace=False).tolist())) for seed in range(2)]
    sharing, events = share(*logs)
    assert sharing.chance > 3
    assert sharing.spikes == []
    assert {event.cause for own in events for event in own} == {None}


def test_a_copy_is_no_other_run():
    sharing, events = share(run(0, [300]), run(0, [300]), run(1, []))
    assert sharing.copies == {1: 0}
    assert sharing.spikes == []
    assert events[0][0].cause is None
