"""The page of a reproduction, from its data files alone: the same bytes from the same files."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from stability_lab.compare.ladders import Ladder
from stability_lab.compare.statistics import t_interval
from stability_lab.compare.tables import escape_markdown, markdown_table
from stability_lab.judge.divergence import ABOVE_NATS
from stability_lab.reproduction.catalogue import SCALES, Part, Reproduction, claims_of
from stability_lab.reproduction.claim_verdicts import VERDICTS, Finding
from stability_lab.reproduction.claims import NOT_BUILT, Decided, decide, ladder_of
from stability_lab.reproduction.datafile import data_path, read
from stability_lab.reproduction.evidence import KeptRun, PartEvidence
from stability_lab.text import MISSING, Table

Found = Mapping[tuple[str, str], PartEvidence]  # (part, scale) -> evidence
# Units of a difference; a metric that is not listed is a pure number.
_UNITS = {
    "val/loss": "nats",
    "abs_log_z": "nats",
    "log10_max_attn_logit": "decades",
    **dict.fromkeys(("grad_level", "grad_growth", "log_injected_ratio", "log_tokens_per_s"), "(natural logarithm)"),
    "ln_failing_lr/2.6": "(natural logarithm)",
    "spike_events": "a run",
}
_TESTED = ("/decision.png", "/differences.png")
_FAMILY = "A filled mark is significant by Holm's rule over all tests of these runs; claims are corrected apart."


def load(reproduction: Reproduction, out: Path) -> dict[tuple[str, str], PartEvidence]:
    """The data below `out`; ConfigError for a damaged file."""
    found = {}
    for part in reproduction.parts.values():
        for scale in part.scales:
            path = data_path(part, scale, out)
            if os.path.exists(path):  # Path.exists raises where a name is too long
                found[part.part, scale] = read(path, part, scale)
    return found


def lost(text: str, found: Found) -> list[str]:
    """Parts, with their scale, that a page of ours shows and that have no data any more."""
    parts = [section.partition("\n")[::2] for section in text.split("\n## ")[1:]]
    shown = [(part, scale) for part, body in parts for scale in SCALES if f"\n`{scale}`, " in body]
    return [f"{part} at {scale}" for part, scale in shown if (part, scale) not in found]


def page(reproduction: Reproduction, found: Found) -> str:
    """Markdown of all parts and claims; a part that was not run says so."""
    blocks = [f"# {reproduction.name}", _sentence(reproduction.about)]
    verdicts: Counter[str] = Counter()
    not_built: set[str] = set()  # a method counts once, in however many parts it would be tried
    bodies = []
    for part in reproduction.parts.values():
        bodies.append(f"## {part.part}\n\n{escape_markdown(part.question)}")
        scales = [scale for scale in SCALES if (part.part, scale) in found]
        for scale in scales or [None]:
            evidence = None if scale is None else found[part.part, scale]
            decided = decide(part, claims_of(part), evidence)
            verdicts.update(j.finding.verdict for j in decided if j.finding.verdict != NOT_BUILT)
            not_built.update(j.claim.id for j in decided if j.finding.verdict == NOT_BUILT)
            bodies.append(_body(part, scale, evidence, decided))
    verdicts[NOT_BUILT] = len(not_built)
    counted = [name for name in VERDICTS if verdicts[name]] + sorted(set(+verdicts) - set(VERDICTS))
    blocks.append("Verdicts: " + ", ".join(f"{verdicts[name]} {name}" for name in counted) + ".")
    return "\n\n".join([*blocks, *bodies]) + "\n"


def claim_table(part: Part, scale: str, decided: Sequence[Decided]) -> Table:
    """Claim, published value, our value with its interval, scale, verdict; numbers in brackets refer to the notes."""
    notes = _notes(decided)
    rows = []
    for j in decided:
        marks = "".join(f" [{notes[text]}]" for text in j.claim.caveats)
        ours = " ".join(word for word in (shown(j.finding), _unit(part, j)) if word)
        rows.append((j.claim.statement + marks, j.claim.printed, ours, scale, _verdict(j.finding), j.claim.where))
    header = ("claim", "published", "ours", "scale", "verdict", "source")
    return Table(f"{part.name} {part.part}: {part.question}", header, tuple(rows), least=("source", "scale"))


def _notes(decided: Sequence[Decided]) -> dict[str, int]:
    """Caveat -> its number; they are numbered in the order of the claims."""
    return {text: n for n, text in enumerate(dict.fromkeys(text for j in decided for text in j.claim.caveats), 1)}


def _unit(part: Part, decided: Decided) -> str:
    """The unit of the column `ours`."""
    test, finding = decided.claim.test, decided.finding
    if finding.value is None and finding.low is None:
        return ""
    if test["kind"] == "printed":
        return f"{decided.claim.unit}, of the printed values"
    by_kind = {"lr_sensitivity": "nats", "stable_lr": "times", "spikes": "percent", "kept": "rates"}
    by_metric = _UNITS.get(test.get("metric", part.metric), "") if part.compute is None else ""
    return by_kind.get(test["kind"], by_metric)


def shown(finding: Finding) -> str:
    """`-0.031 [-0.044, -0.018]`; the value or the interval alone where the other is missing."""
    if finding.low is None or finding.high is None:
        # Enough digits to see the tolerance of every exact claim.
        return MISSING if finding.value is None else _number(finding.value, 5)
    interval = f"[{_number(finding.low, 3)}, {_number(finding.high, 3)}]"
    return interval if finding.value is None else f"{_number(finding.value, 3)} {interval}"


def _body(part: Part, scale: str | None, evidence: PartEvidence | None, decided: Sequence[Decided]) -> str:
    notes = "\n".join(f"{n}. {escape_markdown(text)}" for text, n in _notes(decided).items())
    blocks = [markdown_table(claim_table(part, scale or MISSING, decided))]
    if evidence is None or scale is None:
        blocks.insert(0, "Not run yet at any scale.")
    else:
        figures = evidence.head["figures"] or []
        blocks = [*_how(part, scale, evidence), *blocks, *(_picture(part, path) for path in figures)]
        blocks += [_FAMILY] * any(path.endswith(_TESTED) for path in figures)
        tables = (_measured(part, evidence), _ladders(part, evidence), _computed(evidence))
        blocks += [markdown_table(table) for table in tables if table.rows]
    return "\n\n".join([*blocks, notes] if notes else blocks)


def runs_missing(part: Part, scale: str, evidence: PartEvidence | None) -> str:
    """A sentence if runs of the part have no result; otherwise empty."""
    planned = len(part.runs_at(scale))
    there = planned if evidence is None else sum(run.record.ended for run in evidence.runs)
    return f"Incomplete: {there} of {planned} runs have a result." if there < planned else ""


def _picture(part: Part, path: str) -> str:
    words = path.rpartition("/")[2].rpartition(".")[0].replace("_", " ")
    return f"![{part.name} {part.part}: {words}]({path})"


def provenance(scale: str, evidence: PartEvidence) -> list[str]:
    """Date, device, time and versions; the commands."""
    head, seconds = evidence.head, evidence.head["seconds"]
    device = f", on {head['device']}" if head["device"] else ""
    took = "" if seconds is None else f", {_time(seconds)}{', summed over runs' if evidence.runs else ''}"
    versions = [f"{name} {version}" for name, version in head["versions"].items()]
    versions += [f"commit {revision[:7]}" for revision in (head["git"] or "").split(", ") if revision]
    commands = "\n".join(head["commands"])
    return [f"`{scale}`, {head['date']}{device}{took}; {', '.join(versions)}.", f"```\n{commands}\n```"]


def _how(part: Part, scale: str, evidence: PartEvidence) -> list[str]:
    """Provenance, missing runs, settings and D."""
    blocks = provenance(scale, evidence)
    if missing := runs_missing(part, scale, evidence):
        blocks.append(f"**{missing}**")
    settings = [f"{name} is {' '.join(overrides)}" for name, overrides in part.settings_at(scale).items() if name]
    facts = [f"Settings: {escape_markdown('; '.join(settings))}."] if settings else []
    if evidence.runs:
        facts.append(
            f"A finite run counts as diverged if its loss ends {part.delta:g} nats above its lowest level, or "
            f"{ABOVE_NATS:g} above its initial one."
        )
    return blocks + [" ".join(facts)] * bool(facts)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def _measured(part: Part, evidence: PartEvidence) -> Table:
    names = list(dict.fromkeys(name for word in (part.metric, *part.show) for name in _expanded(word, evidence)))
    cells: dict[tuple[str, float | None], list[KeptRun]] = {}
    for run in evidence.runs:
        if run.record.ended:
            cells.setdefault((run.place, run.lr), []).append(run)
    rows = []
    for (place, lr), runs in cells.items():
        columns = [[v for run in runs if (v := run.metric(name)) is not None] for name in names]
        means = [_mean(values) + (f" of {len(values)}" if 0 < len(values) < len(runs) else "") for values in columns]
        used = runs[0].record.lr if lr is None else lr
        rate = MISSING if used is None else f"{used:g}"
        rows.append((place, rate, str(len(runs)), str(sum(run.record.diverged for run in runs)), *means))
    return Table("Measured", ("arm", "lr", "seeds", "diverged", *names), tuple(rows))


def _expanded(word: str, evidence: PartEvidence) -> list[str]:
    """`act/rms/*` -> one name for each layer; another name stays as it is."""
    if not word.endswith("*"):
        return [word]
    finals = (run.record.summary.get("final") or {} for run in evidence.runs)
    return sorted({name for final in finals for name in final if name.startswith(word[:-1] + "L")})


def _computed(evidence: PartEvidence) -> Table:
    """Means of the values that were computed for several seeds."""
    lists = {name: values for name, values in evidence.values.items() if isinstance(values, list)}
    rows = tuple((name, str(len(values)), _mean(values)) for name, values in sorted(lists.items()))
    return Table("Computed", ("value", "seeds", "mean"), rows)


def _ladders(part: Part, evidence: PartEvidence) -> Table:
    made = {place: ladder_of(part, evidence, place) for place in dict.fromkeys(run.place for run in evidence.runs)}
    header = ("arm", "LR sensitivity", "lowest loss", "best lr", "usable", "edge", "largest stable lr")
    rows = [_ladder_row(place, ladder) for place, ladder in made.items() if ladder is not None]
    return Table("Learning rates", header, tuple(rows))


def _ladder_row(arm: str, ladder: Ladder) -> tuple[str, ...]:
    losses = [loss for loss in ladder.losses if loss is not None and math.isfinite(loss)]
    s, usable, best, edge = ladder.sensitivity, MISSING, MISSING, MISSING
    if ladder.best_lr is not None:
        best = f"{ladder.best_lr:g}" + (" (end of the grid)" if ladder.at_end else "")
    if ladder.usable is not None:
        usable = " ".join(f"{lr:g}" for lr in ladder.usable.usable)
        edge = "beyond the grid" if ladder.usable.edge is None else f"{ladder.usable.edge:g}"
    return (
        arm,
        shown(Finding("", s.value, s.low, s.high)) + (" (at chance)" if ladder.at_chance else "") if s else MISSING,
        _number(min(losses), 4) if losses else MISSING,
        *(best, usable, edge),
        MISSING if ladder.stable is None else str(ladder.stable),
    )


def _mean(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    mean = t_interval(values)
    return shown(Finding("", mean.value, mean.low, mean.high))


def _verdict(finding: Finding) -> str:
    return f"{finding.verdict}: {finding.detail}" if finding.detail else finding.verdict


def _number(value: float, digits: int) -> str:
    """Significant digits; whole numbers and those of four digits before the point are whole."""
    if not math.isfinite(value):
        return str(value).replace("inf", "∞")
    if abs(value) < 1e6 and (value == round(value) or abs(value) >= 1000):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def _sentence(text: str) -> str:
    return f"{escape_markdown(text[0].upper() + text[1:])}."
