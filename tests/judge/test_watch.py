"""The watch: when the judge looks, that looks change nothing, and that a restored watch goes on as the first one."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest

from stability_lab.judge.events import Event, find_events
from stability_lab.judge.series import Row
from stability_lab.judge.verdict import Evidence, diverged_at
from stability_lab.judge.watch import Watch


def rows_of(n: int, seed: int = 0) -> list[Row]:
    """A noisy run with spikes of both signals, a shift of the loss, a skipped and a bad step."""
    random = np.random.default_rng(seed)
    loss = np.linspace(4, 2, n) + 0.02 * random.standard_normal(n)
    norm = np.exp(0.1 * random.standard_normal(n))
    loss[n // 2 :] += 0.7
    norm[[n // 3, n // 3 + 200]] = 30
    loss[n // 3 + 60] += 2
    norm[n // 3 + 90] = math.nan
    rows: list[Row] = [{"step": i + 1, "train/loss": loss[i], "optim/grad_norm": norm[i]} for i in range(n)]
    rows[n // 3 + 120]["optim/skipped"] = 1.0
    return rows


def kinds(events: list[Event]) -> list[tuple[int, str]]:
    return sorted((event.step, event.kind) for event in events)


def follow(watch: Watch, rows: list[Row], every: int) -> list[Event]:
    """Flush `rows` every `every` steps, as a training loop does."""
    events = []
    for first in range(0, len(rows), every):
        watch.add(rows[first : first + every])
        events += watch.look(ends=first + every >= len(rows))
    return events


@pytest.mark.parametrize("every", [1, 7, 50, 333])
def test_events_do_not_depend_on_when_rows_come(every: int) -> None:
    rows = rows_of(1200)
    watch = Watch(Evidence())
    found = follow(watch, rows, every)
    assert kinds(found) == kinds(find_events(watch.log()))
    assert {event.kind for event in found} >= {"loss_spike", "grad_norm_spike", "nonfinite_step", "skipped_step"}
    assert repr(watch.events_so_far()) == repr(find_events(watch.log()))


def test_a_look_is_due_when_the_log_has_grown_by_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("stability_lab.judge.watch.find_events", lambda log, start: seen.append(len(log)) or [])
    watch = Watch(Evidence())
    follow(watch, rows_of(1500)[:1000], 1)
    assert seen[:202] == [*range(1, 201), 202, 204]
    assert all(b - a == max(1, a // 100) for a, b in pairwise(seen[:-1]))
    assert seen[-1] == 1000
    assert not watch.due
    assert watch.look() == []


def test_divergence_is_seen_at_the_first_look_that_shows_it() -> None:
    rows = [{"step": n, "train/loss": 4.0 if n < 150 else 6.0} for n in range(1, 301)]
    watch, seen = Watch(Evidence(warmup_steps=20)), []
    for first in range(0, 300, 10):
        watch.add(rows[first : first + 10])
        seen += [watch.n] if watch.sees_divergence() else []
        watch.look()
    shown = [n for n in range(10, 301, 10) if diverged_at(watch.log().rows(slice(n)), 20) is not None]
    assert seen == shown
    assert seen


def test_a_row_of_the_newest_step_replaces_it() -> None:
    watch = Watch(Evidence())
    watch.add([{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 3.0}])
    watch.add([{"step": 2, "train/loss": 3.0, "optim/grad_norm": 1.0, "attn/max_logit": 5.0}])
    log = watch.log()
    assert log.max_attn_logit is not None
    assert log.no_grad_norm is not None
    assert (log.step.tolist(), log.max_attn_logit[1], log.no_grad_norm.tolist()) == ([1, 2], 5.0, [True, False])


@pytest.mark.parametrize("stop", [90, 500, 1110])
def test_a_restored_watch_goes_on_with_the_same_looks(stop: int) -> None:
    rows, more = rows_of(1200), ("train/loss_again",)
    whole, first, second = (Watch(Evidence(), more) for _ in range(3))
    expected = follow(whole, rows, 10)
    found = []
    for watch, part in ((first, rows[:stop]), (second, rows[stop:])):
        for i in range(0, len(part), 10):
            watch.add(part[i : i + 10])
            found += watch.look(ends=watch is second and i + 10 >= len(part))
        if watch is first:
            watch.measure(0, {"val/loss": 5.0, "val/ppl": 148.4})
            watch.measure(stop, {"val/loss": 3.0, "val/ppl": 20.1})
            columns, plain = watch.state()
            second.load_state(columns, json.loads(json.dumps(plain)))
    assert repr(found) == repr(expected)
    assert second.looked_at == whole.looked_at
    assert (second.initial, second.newest, second.best["step"]) == (first.initial, first.newest, stop)


def test_measurements_are_the_newest_and_the_best_ones() -> None:
    watch = Watch(Evidence())
    assert watch.measure(0, {"val/loss": 4.0, "val/ppl": 54.6, "attn/max_logit": 1.0})
    watch.add(rows_of(1000)[:200])
    assert watch.measure(100, {"val/loss": 3.0, "val/ppl": 20.1})
    assert not watch.measure(200, {"attn/max_logit": 2.0})
    assert not watch.measure(150, {"val/loss": 3.5, "val/ppl": 33.1})  # came late
    assert watch.newest == {"val/loss": 3.0, "val/ppl": 20.1, "attn/max_logit": 2.0}
    assert watch.best == {"val/loss": 3.0, "val/ppl": 20.1, "step": 100}
    assert not watch.measure(201, {"val/loss": math.nan, "val/ppl": math.nan})


def test_the_summary_has_percentiles_of_the_gradient_norm() -> None:
    watch = Watch(Evidence())
    watch.add({"step": n, "train/loss": 2.0, "optim/grad_norm": float(n)} for n in range(1, 202))
    assert watch.judge()[1]["grad_norm"] == {"p50": 101.0, "p90": 181.0, "p99": 199.0}


def test_a_validation_before_the_first_step_is_no_final_one() -> None:
    watch = Watch(Evidence())
    watch.measure(0, {"val/loss": 4.0, "val/ppl": 54.6})
    watch.add({"step": n, "train/loss": 4 - n / 100, "optim/grad_norm": 1.0} for n in range(1, 201))
    judgement, summary = watch.judge()
    assert judgement is not None
    assert judgement.verdict.verdict == "stable"
    assert "val/loss" not in summary["final"]
