"""From evidence and a claim to a verdict: pure functions, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stability_lab.compare.grouping import LR, Cell, Grouping
from stability_lab.compare.ladders import Ladder, ladders
from stability_lab.compare.statistics import Difference, difference_by_seed, family, paired_difference
from stability_lab.reproduction.catalogue import Claim, Part
from stability_lab.reproduction.claim_verdicts import (
    NOT_RESOLVABLE,
    Finding,
    equal,
    exact,
    printed_difference,
    signed,
    spike_rates,
    stable_rates,
)
from stability_lab.reproduction.evidence import KeptRun, PartEvidence

NOT_BUILT, NOT_RUN = "not built yet", "not run yet"
_PAIRING = ("fingerprint", "first_batch", "last_batch", "validation")


@dataclass(frozen=True)
class Decided:
    claim: Claim
    finding: Finding


def decide(part: Part, found: Sequence[Claim], evidence: PartEvidence | None) -> list[Decided]:
    """A verdict for each claim of the part. Without evidence it is `not run yet`, or `not built yet`.

    Holm's rule corrects the differences for their number within the part; missing ones count.
    """
    planned = [claim.test["kind"] in _DIFFERENCES for claim in found]
    differences = family(
        [
            _DIFFERENCES[claim.test["kind"]](part, claim.test, evidence) if evidence and is_one else None
            for claim, is_one in zip(found, planned, strict=True)
        ],
        sum(planned),
    )
    return [
        Decided(claim, _finding(part, claim, evidence, difference))
        for claim, difference in zip(found, differences, strict=True)
    ]


def ladder_of(
    part: Part, evidence: PartEvidence, where: str, against: str | None = None, up_to: float = math.inf
) -> Ladder | None:
    """The ladder of an arm (`arm` or `arm@setting`) over its learning rates, at most `up_to`, and its difference to
    another arm's."""
    names = [where, *([against] if against is not None else [])]
    cells = []
    for name in names:
        by_lr: dict[float, list[KeptRun]] = {}
        for run in _runs(evidence, name):
            if run.lr is not None and run.lr <= up_to:
                by_lr.setdefault(run.lr, []).append(run)
        cells += [Cell(name, {LR: lr}, tuple(run.record for run in runs)) for lr, runs in sorted(by_lr.items())]
    grouping = Grouping((), (LR,), tuple(names), against or where, tuple(cells), {}, ())
    paired = against is not None and _paired(_runs(evidence, where), _runs(evidence, against))
    return next((ladder for ladder in ladders(grouping, part.metric, paired) if ladder.arm == where), None)


def difference_of(a: Sequence[KeptRun], b: Sequence[KeptRun], metric: str) -> Difference | None:
    """a - b, paired by seed if the same seed saw the same batches; None without a value in each."""
    own, other = _by_seed(a, metric), _by_seed(b, metric)
    return difference_by_seed(own, other, _paired(a, b))


def _finding(part: Part, claim: Claim, evidence: PartEvidence | None, difference: Difference | None) -> Finding:
    test, kind = claim.test, claim.test["kind"]
    if kind == "not_built":
        return Finding(NOT_BUILT)
    if evidence is None:
        return Finding(NOT_RUN)
    computed = part.compute is not None
    if missing := [name for name in _values(test) if computed and name not in evidence.values]:
        return Finding(NOT_RUN, detail=_older(missing[0]))
    if kind == "exact":
        return exact(float(evidence.values[test["value"]]), test["printed"], test["tolerance"])  # pyright: ignore
    if kind == "printed":
        a, b = (float(claim.values[test[side]]) for side in "ab")
        assert claim.uncertainty is not None
        return printed_difference(a, b, claim.uncertainty, test["direction"])
    if kind == "equivalence":
        return _equivalence(part, test, evidence)
    if kind == "spikes":
        return _spikes(test, evidence)
    if kind == "stable_lr":
        return _stable(part, test, evidence)
    if difference is None:
        return _none(part, test, evidence)
    return signed(difference, test["direction"], test.get("effect"))


def _difference(part: Part, test: Mapping[str, Any], evidence: PartEvidence) -> Difference | None:
    a, b = (_at(part, evidence, test, test[side]) for side in "ab")
    return difference_of(a, b, test.get("metric", part.metric))


def _samples(part: Part, test: Mapping[str, Any], evidence: PartEvidence) -> Difference | None:
    if not all(test[side] in evidence.values for side in "ab"):
        return None
    return paired_difference(*(_list(evidence, test[side]) for side in "ab"))


def _sensitivity(part: Part, test: Mapping[str, Any], evidence: PartEvidence) -> Difference | None:
    ladder = ladder_of(part, evidence, test["a"], test["b"], test.get("up_to", math.inf))
    return None if ladder is None else ladder.difference


def _interaction(part: Part, test: Mapping[str, Any], evidence: PartEvidence) -> Difference | None:
    """How much one factor's effect changes with the other, over the seeds that all four arms share."""
    metric, arms = test.get("metric", part.metric), test["arms"]
    first, second = test["factors"]
    cells = [_at(part, evidence, test, arms[label]) for label in ("both", "none", first, second)]
    both, none, one, other = (_by_seed(runs, metric) for runs in cells)
    seeds = [seed for seed in both if seed in none and seed in one and seed in other]
    if not seeds or not all(_paired(cells[0], runs) for runs in cells[1:]):
        return None
    alike = [both[seed] + none[seed] for seed in seeds]
    return paired_difference(alike, [one[seed] + other[seed] for seed in seeds])


def _values(test: Mapping[str, Any]) -> list[str]:
    """Names of the values that a claim needs from a part that computes them."""
    return [str(test[key]) for key in ("value", "a", "b") if key in test and test["kind"] != "printed"]


def _older(what: str) -> str:
    return f"its data are older and have no {what}: run the part again"


def _none(part: Part, test: Mapping[str, Any], evidence: PartEvidence) -> Finding:
    """Why no difference can be computed."""
    if test["kind"] == "lr_sensitivity":
        for one, other in ((test["a"], test["b"]), (test["b"], test["a"])):
            ladder = ladder_of(part, evidence, one, other, test.get("up_to", math.inf))
            if ladder is None or ladder.sensitivity is None:
                why = "no ladder of learning rates" if ladder is None else ladder.reason
                return Finding(NOT_RESOLVABLE, detail=f"{one} has no LR sensitivity: {why}")
    metric, arms = test.get("metric", part.metric), test.get("arms") or {"a": test["a"], "b": test["b"]}
    for arm in arms.values():
        runs = _at(part, evidence, test, arm)
        if not runs:
            return Finding(NOT_RESOLVABLE, detail=f"{arm} has no run with a result")
        if not any(run.record.metric(metric) is not None for run in runs):
            # A run that diverged may lack a value; one that did not has all that its version knew.
            sound = any(not run.record.diverged for run in runs)
            return Finding(NOT_RUN, detail=_older(metric)) if sound else Finding(NOT_RESOLVABLE, detail=_all_gone(arm))
        if not _by_seed(runs, metric):
            return Finding(NOT_RESOLVABLE, detail=_all_gone(arm))
    return Finding(NOT_RESOLVABLE, detail="the arms have no pair of finite runs on the same batches")


def _all_gone(arm: str) -> str:
    return f"{arm} has no run with a finite value"


_DIFFERENCES: Mapping[str, Callable[[Part, Mapping[str, Any], PartEvidence], Difference | None]] = {
    "difference": _difference,
    "samples": _samples,
    "lr_sensitivity": _sensitivity,
    "interaction": _interaction,
}


def _equivalence(part: Part, test: Mapping[str, Any], evidence: PartEvidence) -> Finding:
    if part.compute is not None:
        return equal(_list(evidence, test["a"]), _list(evidence, test["b"]), test["margin"])
    metric = test.get("metric", part.metric)
    a, b = (_at(part, evidence, test, test[side]) for side in "ab")
    own, other = _by_seed(a, metric), _by_seed(b, metric)
    common = [seed for seed in own if seed in other]
    if not common or not _paired(a, b):
        return _none(part, test, evidence)
    return equal([own[seed] for seed in common], [other[seed] for seed in common], test["margin"])


def _spikes(test: Mapping[str, Any], evidence: PartEvidence) -> Finding:
    """Runs that diverged are scored too: their spikes are what the score is for."""
    counts, rates, sides = [], [], [_runs(evidence, test[side]) for side in "ab"]
    for runs in sides:
        scores = {run.seed: run.record.score("grad_norm", "olmo2") for run in runs}
        rates.append({seed: s["score"] for seed, s in scores.items() if s.get("score") is not None})
        counts.append(tuple(sum(int(s.get(key) or 0) for s in scores.values()) for key in ("n_spikes", "n_scored")))
    difference = difference_by_seed(rates[0], rates[1], _paired(*sides))
    return spike_rates(difference, (counts[0], counts[1]), (test["rates"][0], test["rates"][1]))


def _stable(part: Part, test: Mapping[str, Any], evidence: PartEvidence) -> Finding:
    a, b = (ladder_of(part, evidence, test[side]) for side in "ab")
    if a is None or b is None or a.stable is None or b.stable is None:
        return Finding(NOT_RESOLVABLE, detail="an arm has no ladder of learning rates")
    if a.lrs != b.lrs:
        return Finding(NOT_RESOLVABLE, detail="an arm has no run at a learning rate of the other's")
    return stable_rates(a.stable, b.stable, test["direction"], min(a.seeds, b.seeds))


def _at(part: Part, evidence: PartEvidence, test: Mapping[str, Any], where: str) -> list[KeptRun]:
    """The runs of an arm at one learning rate, which the test names by its place in the part's grid."""
    scale = part.scales.get(str(evidence.head.get("scale")))
    lrs = scale.lrs if scale else ()
    lr = lrs[test.get("at", 0)] if lrs else None
    return [run for run in _runs(evidence, where) if run.lr == lr]


def _runs(evidence: PartEvidence, where: str) -> list[KeptRun]:
    return [run for run in evidence.runs if run.place == where and run.record.ended]


def _by_seed(runs: Sequence[KeptRun], metric: str) -> dict[int, float]:
    return {run.seed: value for run in runs if (value := run.metric(metric)) is not None}


def _paired(a: Sequence[KeptRun], b: Sequence[KeptRun]) -> bool:
    """Did the same seed see the same batches, and was it validated on the same windows?"""
    facts = [{run.seed: _batches(run) for run in runs} for runs in (a, b)]
    return all(facts[0][seed] == facts[1][seed] for seed in facts[0] if seed in facts[1])


def _batches(run: KeptRun) -> tuple[Any, ...]:
    data = run.record.manifest.get("data") or {}
    return tuple(data.get(key) for key in _PAIRING)


def _list(evidence: PartEvidence, name: str) -> list[float]:
    value = evidence.values[name]
    return value if isinstance(value, list) else [value]
