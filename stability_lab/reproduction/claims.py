"""From evidence and a claim to a verdict: pure functions, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy import stats

from stability_lab.compare.contrasts import difference_by_seed
from stability_lab.compare.grouping import LR, Cell, Grouping
from stability_lab.compare.ladders import Ladder, ladders
from stability_lab.compare.statistics import Difference, family, paired_difference
from stability_lab.reproduction.catalogue import Claim, Part
from stability_lab.reproduction.claim_verdicts import (
    ABSENT,
    NOT_RESOLVABLE,
    NOT_STATED,
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
_HALF = 0.5  # of what was learned, whose loss is a failure
NO_PAIR = "the arms have no pair of finite runs on the same batches"
_Test = Mapping[str, Any]
_PAIRING = ("fingerprint", "first_batch", "last_batch", "validation")


@dataclass(frozen=True)
class Decided:
    claim: Claim
    finding: Finding


class NoFinding(Exception):
    """The evidence cannot decide a claim; `finding` says why."""

    def __init__(self, detail: str, verdict: str = NOT_RESOLVABLE):
        super().__init__(detail)
        self.finding = Finding(verdict, detail=detail)


def decide(part: Part, found: Sequence[Claim], evidence: PartEvidence | None) -> list[Decided]:
    """A verdict for each claim of the part. Without evidence it is `not run yet`, or `not built yet`.

    Holm's rule corrects the differences for their number within the part; missing ones count.
    """
    results = [_result(part, claim, evidence) for claim in found]
    planned = sum(claim.test["kind"] in _DIFFERENCES for claim in found)
    corrected = family([result if isinstance(result, Difference) else None for result in results], planned)
    decided = []
    for claim, result, difference in zip(found, results, corrected, strict=True):
        if difference is not None:
            result = signed(difference, claim.test["direction"], claim.test.get("effect"))
        assert isinstance(result, Finding)
        decided.append(Decided(claim, _qualified(claim, result, evidence)))
    return decided


def _qualified(claim: Claim, finding: Finding, evidence: PartEvidence | None) -> Finding:
    """The finding under another verdict, if nobody states what was tested or if the claim's precondition is not met."""
    if evidence is None or finding.verdict in (NOT_BUILT, NOT_RUN):
        return finding
    if claim.own:
        return replace(finding, verdict=NOT_STATED)
    if (needs := claim.test.get("needs")) is None:
        return finding
    rises = [
        value - start
        for run in _runs(evidence, needs["arm"])
        if (run.lr or 0.0) <= claim.test.get("up_to", math.inf)
        and (value := run.record.metric(needs["metric"])) is not None
        and (start := run.record.initial("val/loss")) is not None
    ]
    if not rises:
        return _older(needs["metric"]).finding
    if max(rises) >= needs["rise"]:
        return finding
    words = f"{needs['metric']} of {needs['arm']} rises by at most {max(rises):.2g}, not by {needs['rise']:g}"
    return replace(finding, verdict=ABSENT, detail=words)


def _result(part: Part, claim: Claim, evidence: PartEvidence | None) -> Finding | Difference:
    """The difference of a claim that has a direction, the finding of any other."""
    kind = claim.test["kind"]
    if kind == "not_built":
        return Finding(NOT_BUILT)
    if evidence is None:
        return Finding(NOT_RUN)
    if kind == "printed":
        a, b = (float(claim.values[claim.test[side]]) for side in "ab")
        assert claim.uncertainty is not None
        return printed_difference(a, b, claim.uncertainty, claim.test["direction"])
    try:
        return _RULES[kind](part, claim.test, evidence) or NoFinding(NO_PAIR).finding
    except NoFinding as error:
        return error.finding


def ladder_of(
    part: Part, evidence: PartEvidence, where: str, against: str | None = None, up_to: float = math.inf
) -> Ladder | None:
    """The ladder of an arm (`arm` or `arm@setting`) over its learning rates, at most `up_to`, and its difference to
    another arm's. The other arms of their settings show how much runs vary."""
    compared = [where, *([against] if against is not None else [])]
    names = [*compared, *_beside(evidence, compared)]
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


def _exact(part: Part, test: _Test, evidence: PartEvidence) -> Finding:
    return exact(_values(evidence, test["value"])[0], test["printed"], test["tolerance"])


def _equivalence(part: Part, test: _Test, evidence: PartEvidence) -> Finding:
    if part.compute is not None:
        return equal(_values(evidence, test["a"]), _values(evidence, test["b"]), test["margin"])
    (own, other), paired = _columns(part, test, evidence, [test["a"], test["b"]])
    seeds = [seed for seed in own if seed in other]
    if not seeds or not paired:
        raise NoFinding(NO_PAIR)
    return equal([own[seed] for seed in seeds], [other[seed] for seed in seeds], test["margin"])


def _spikes(part: Part, test: _Test, evidence: PartEvidence) -> Finding:
    """Runs that diverged are scored too: their spikes are what the score is for."""
    counts, rates, sides = [], [], [_runs(evidence, test[side]) for side in "ab"]
    for runs in sides:
        scores = {run.seed: run.record.score("grad_norm", "olmo2") for run in runs}
        rates.append({seed: s["score"] for seed, s in scores.items() if s.get("score") is not None})
        counts.append(tuple(sum(int(s.get(key) or 0) for s in scores.values()) for key in ("n_spikes", "n_scored")))
    difference = difference_by_seed(rates[0], rates[1], _paired(*sides))
    return spike_rates(difference, (counts[0], counts[1]), (test["rates"][0], test["rates"][1]))


def _stable(part: Part, test: _Test, evidence: PartEvidence) -> Finding:
    a, b = _two_ladders(part, test, evidence)
    if a.stable is None or b.stable is None:
        raise NoFinding("an arm has no ladder of learning rates")
    return stable_rates(a.stable, b.stable, test["direction"], min(a.seeds, b.seeds))


def _difference(part: Part, test: _Test, evidence: PartEvidence) -> Difference | None:
    """Of several `b` the difference to the best: the one in which `a` is least ahead."""
    found = []
    for other in [test["b"]] if isinstance(test["b"], str) else test["b"]:
        arms = [test["a"], other]
        (own, theirs), paired = _columns(part, test, evidence, arms)
        beside = (_column(part, test, evidence, arm) for arm in _beside(evidence, arms))
        found.append(difference_by_seed(own, theirs, paired, list(filter(None, beside))))
    return min(filter(None, found), key=lambda d: d.value * test["direction"], default=None)


def _ranks(part: Part, test: _Test, evidence: PartEvidence) -> Difference | None:
    """As `difference`, with the p of Mann and Whitney's test: counts of few events are not normal."""
    found = _difference(part, test, evidence)
    (own, other), _ = _columns(part, test, evidence, [test["a"], test["b"]])
    return found and replace(found, p=_rank_p(own, other))


def _kept(part: Part, test: _Test, evidence: PartEvidence) -> Difference | None:
    """At how many of the rates a seed's run keeps more than half of what its arm learned at the arm's best rate, beyond
    the frequencies of the tokens."""
    sides = [_runs(evidence, test[side]) for side in "ab"]
    own, other = map(_rates_kept, sides)
    found = difference_by_seed(own, other, _paired(*sides))
    return found and replace(found, p=_rank_p(own, other))


def _rates_kept(runs: Sequence[KeptRun]) -> dict[int, float]:
    """By seed; a run without a finite loss keeps nothing."""
    losses: dict[float | None, dict[int, float]] = {}
    for run in runs:
        loss = run.record.metric("val/loss")
        losses.setdefault(run.lr, {})[run.seed] = math.inf if loss is None or math.isnan(loss) else loss
    best = min(math.fsum(of_seeds.values()) / len(of_seeds) for of_seeds in losses.values())
    floor = next(run.record.manifest["data"]["unigram_entropy"] for run in runs)
    limit = best + _HALF * (floor - best)
    return {seed: float(sum(of[seed] < limit for of in losses.values() if seed in of)) for seed in losses[runs[0].lr]}


def _rank_p(own: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Mann and Whitney's p; None where an arm has fewer than two values."""
    if min(len(own), len(other)) < 2:
        return None
    a, b = list(own.values()), list(other.values())
    return 1.0 if len({*a, *b}) == 1 else float(stats.mannwhitneyu(a, b).pvalue)


def _samples(part: Part, test: _Test, evidence: PartEvidence) -> Difference:
    return paired_difference(_values(evidence, test["a"]), _values(evidence, test["b"]))


def _sensitivity(part: Part, test: _Test, evidence: PartEvidence) -> Difference | None:
    ladders = _two_ladders(part, test, evidence)
    for arm, ladder in zip((test["a"], test["b"]), ladders, strict=True):
        if ladder.sensitivity is None:
            raise NoFinding(f"{arm} has no LR sensitivity: {ladder.reason}")
    return ladders[0].difference


def _two_ladders(part: Part, test: _Test, evidence: PartEvidence) -> tuple[Ladder, Ladder]:
    """Of `a` against `b`, and of `b`."""
    a, b, up_to = test["a"], test["b"], test.get("up_to", math.inf)
    own, other = ladder_of(part, evidence, a, b, up_to), ladder_of(part, evidence, b, a, up_to)
    if own is None or other is None:
        raise NoFinding(f"{b if own else a} has no ladder of learning rates")
    if own.lrs != other.lrs:
        raise NoFinding("an arm has no run at a learning rate of the other's")
    return own, other


_Rule = Callable[[Part, _Test, PartEvidence], Finding | Difference | None]
# Differences are decided together, all others one by one.
_DIFFERENCES: Mapping[str, _Rule] = {
    "difference": _difference,
    "ranks": _ranks,
    "kept": _kept,
    "samples": _samples,
    "lr_sensitivity": _sensitivity,
}
_RULES: Mapping[str, _Rule] = {
    **_DIFFERENCES,
    "exact": _exact,
    "equivalence": _equivalence,
    "spikes": _spikes,
    "stable_lr": _stable,
}


def _values(evidence: PartEvidence, name: str) -> list[float]:
    if name not in evidence.values:
        raise _older(name)
    value = evidence.values[name]
    return value if isinstance(value, list) else [value]


def _columns(
    part: Part, test: _Test, evidence: PartEvidence, arms: Sequence[str]
) -> tuple[list[dict[int, float]], bool]:
    """Values by seed of each arm, and whether each seed saw the same batches in all of them."""
    metric = test.get("metric", part.metric)
    sides = [_at(part, evidence, test, arm) for arm in arms]
    columns = [_column(part, test, evidence, arm) for arm in arms]
    for arm, runs, column in zip(arms, sides, columns, strict=True):
        if not runs:
            raise NoFinding(f"{arm} has no run with a result")
        # A run that diverged may lack a value; one that did not has all that its version knew.
        if all(run.record.metric(metric) is None for run in runs) and not all(run.record.diverged for run in runs):
            raise _older(metric)
        if not column:
            raise NoFinding(f"{arm} has no run with a finite value")
    return columns, all(_paired(sides[0], runs) for runs in sides[1:])


def _column(part: Part, test: _Test, evidence: PartEvidence, arm: str) -> dict[int, float]:
    """The finite values of an arm by seed."""
    metric = test.get("metric", part.metric)
    return {run.seed: v for run in _at(part, evidence, test, arm) if (v := run.metric(metric)) is not None}


def _beside(evidence: PartEvidence, arms: Sequence[str]) -> list[str]:
    """The other arms of the settings of these."""
    settings = {arm.partition("@")[2] for arm in arms}
    return list(dict.fromkeys(r.place for r in evidence.runs if r.setting in settings and r.place not in arms))


def _older(what: str) -> NoFinding:
    return NoFinding(f"its data are older and have no {what}: run the part again", NOT_RUN)


def _at(part: Part, evidence: PartEvidence, test: _Test, where: str) -> list[KeptRun]:
    """The runs of an arm at one learning rate, which the test names by its place in the part's grid."""
    scale = part.scales.get(str(evidence.head.get("scale")))
    lrs = [lr for lr in scale.lrs if lr <= test.get("up_to", math.inf)] if scale else []
    lr = lrs[test.get("at", 0)] if lrs else None
    return [run for run in _runs(evidence, where) if run.lr == lr]


def _runs(evidence: PartEvidence, where: str) -> list[KeptRun]:
    return [run for run in evidence.runs if run.place == where and run.record.ended]


def _paired(a: Sequence[KeptRun], b: Sequence[KeptRun]) -> bool:
    """Did the same seed see the same batches, and was it validated on the same windows?"""
    facts = [{run.seed: _batches(run) for run in runs} for runs in (a, b)]
    return all(facts[0][seed] == facts[1][seed] for seed in facts[0] if seed in facts[1])


def _batches(run: KeptRun) -> tuple[Any, ...]:
    data = run.record.manifest.get("data") or {}
    return tuple(data.get(key) for key in _PAIRING)
