"""Which stabilizer cures which failure: counts, tests and the page of the gallery, from its data files alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.statistics import Difference, fisher, holm, paired_difference, share_interval
from stability_lab.compare.tables import escape_markdown, markdown_table, p_text
from stability_lab.reproduction.evidence import KeptRun, PartEvidence
from stability_lab.reproduction.page import provenance
from stability_lab.text import MISSING, Table

BASELINE = "none"
SYMPTOM = "symptom"  # among the kept values of a run: 1 where it shows the symptom
EXCLUDED, OTHERWISE = "cannot be combined", "removes the symptom, fails otherwise"
_FAILED = ("diverged", "no_learning")
_RESOLVED = 0.05
_CANNOT = "cannot"

Gallery = Mapping[str, PartEvidence]  # by stressor


@dataclass(frozen=True)
class Remedy:
    """One stabilizer under one stressor: `shown` of `runs` have the symptom, and `failed` diverged or did not learn.

    `p` is Fisher's, against the runs without a stabilizer, after Holm's rule over the whole gallery. `loss` is the
    validation loss minus the baseline's over seeds of which neither failed. `excluded`: why they do not go together.
    """

    stressor: str
    stabilizer: str
    shown: int = 0
    runs: int = 0
    failed: int = 0
    fewer: bool = False  # than without a stabilizer
    p: float | None = None
    loss: Difference | None = None
    excluded: str | None = None

    @property
    def verdict(self) -> str:
        if self.excluded is not None:
            return EXCLUDED
        if self.stabilizer == BASELINE or self.p is None:
            return ""
        if self.p > _RESOLVED:
            return "not told apart"
        if not self.fewer:
            return "worsens"
        return "cures" if 2 * self.failed < self.runs else OTHERWISE


def slim(run: RunRecord, symptom: bool) -> dict[str, Any]:
    """What the gallery keeps of a run, in the layout of its files."""
    final = {"val/loss": run.metric("val/loss"), "train/loss": run.metric("train/loss"), SYMPTOM: float(symptom)}
    return {
        "config": {"seed": run.seed},
        "manifest": {key: run.manifest.get(key) for key in ("created", "device", "fingerprint")},
        "summary": {
            **{key: run.summary.get(key) for key in ("status", "verdict", "steps", "max_attn_logit")},
            "initial": {"val/loss": run.initial("val/loss")},
            "final": final,
        },
    }


def remedies(gallery: Gallery) -> dict[str, dict[str, Remedy]]:
    """By stressor, then by stabilizer: the baseline first. Every stabilizer is tested that has runs."""
    cells = [cell for stressor, evidence in gallery.items() for cell in _cells(stressor, evidence)]
    ps = holm([cell.p for cell in cells])
    found: dict[str, dict[str, Remedy]] = {}
    for cell, p in zip(cells, ps, strict=True):
        found.setdefault(cell.stressor, {})[cell.stabilizer] = replace(cell, p=p)
    return found


def _cells(stressor: str, evidence: PartEvidence) -> Iterator[Remedy]:
    by_arm: dict[str, list[KeptRun]] = {BASELINE: []}
    for run in evidence.runs:
        if run.record.ended:
            by_arm.setdefault(run.arm, []).append(run)
    base = by_arm[BASELINE]
    for arm, runs in by_arm.items():
        shown, failed = _shown(runs), sum(run.record.outcome in _FAILED for run in runs)
        cell = Remedy(stressor, arm, shown, len(runs), failed)
        if arm != BASELINE and base:
            its = _shown(base)
            p, fewer = fisher((shown, len(runs)), (its, len(base))), shown * len(base) < its * len(runs)
            cell = replace(cell, p=p, fewer=fewer, loss=_loss(runs, base))
        yield cell
    for arm, why in (evidence.head.get("excluded") or {}).items():
        yield Remedy(stressor, arm, excluded=str(why))


def _shown(runs: Sequence[KeptRun]) -> int:
    return sum(run.record.metric(SYMPTOM) == 1 for run in runs)


def _loss(runs: Sequence[KeptRun], base: Sequence[KeptRun]) -> Difference | None:
    own, its = (
        {run.seed: run.metric("val/loss") for run in arm if run.record.outcome not in _FAILED} for arm in (runs, base)
    )
    pairs = [(a, b) for seed, a in own.items() if a is not None and (b := its.get(seed)) is not None]
    return paired_difference(*zip(*pairs, strict=True)) if len(pairs) > 1 else None


def overview(found: Mapping[str, Mapping[str, Remedy]]) -> Table:
    """Stabilizers as rows, stressors as columns: runs with the symptom of all."""
    arms = list(dict.fromkeys(arm for cells in found.values() for arm in cells))
    rows = [(arm, *(_short(cells.get(arm)) for cells in found.values())) for arm in sorted(arms, key=_first_none)]
    notes = (
        "runs with the symptom of all runs; + fewer and - more than without a stabilizer (p <= 0.05, Fisher, Holm's "
        f"rule over the whole gallery), x most runs diverge or do not learn, {_CANNOT}: {EXCLUDED}",
    )
    return Table("Which remedy cures which failure", ("stabilizer", *found), tuple(rows), notes)


def _first_none(arm: str) -> tuple[bool, str]:
    return arm != BASELINE, arm


def _short(cell: Remedy | None) -> str:
    if cell is None:
        return ""
    if cell.excluded is not None:
        return _CANNOT
    marks = ("+" if cell.fewer else "-") * resolved(cell) + "x" * (2 * cell.failed >= cell.runs)
    return f"{cell.shown}/{cell.runs}" + f" {marks}" * bool(marks)


def resolved(cell: Remedy) -> bool:
    return cell.p is not None and cell.p <= _RESOLVED


def sentences(found: Mapping[str, Mapping[str, Remedy]]) -> list[str]:
    """One on each stressor: what cures it."""
    lines = []
    for stressor, cells in found.items():
        cures = [arm for arm, cell in cells.items() if cell.verdict == "cures"]
        other = [arm for arm, cell in cells.items() if cell.verdict == OTHERWISE]
        line = f"{stressor}: cured by {', '.join(cures)}" if cures else f"{stressor}: no stabilizer is shown to cure it"
        lines.append(
            line + (f"; with {', '.join(other)} the symptom is gone and most runs fail otherwise" if other else "")
        )
    return lines


def page(gallery: Gallery, summaries: Mapping[str, str], picture: str) -> str:
    """Markdown, the same bytes from the same data. `picture`: the path of the figure from the page."""
    found = remedies(gallery)
    tests = sum(cell.p is not None for cells in found.values() for cell in cells.values())
    runs = sum(len(evidence.runs) for evidence in gallery.values())
    blocks = [
        "# Gallery",
        "Which stabilizer cures which failure? Each [stressor](stressors.md) makes a small model fail on purpose, with "
        "each [stabilizer](stabilizers/README.md) and several seeds. The command goes on where it was interrupted, and "
        "makes runs of stressors and stabilizers that are new:",
        "```\npython -m stability_lab gallery --out docs/gallery\n```",
        f"![runs with the symptom, by stabilizer and stressor]({picture})",
        markdown_table(overview(found)),
        f"These are {runs:,} runs. Without a stabilizer there are three times as many seeds as with one, because every "
        "arm is compared with it. Intervals of shares are exact (Clopper-Pearson), and p is Fisher's after Holm's rule "
        f"over all {tests} tests of this page. A small model that fails within seconds ranks remedies of that failure; "
        "it does not say what a large model needs.",
        "\n".join(f"- {escape_markdown(line)}." for line in sentences(found)),
    ]
    for stressor, evidence in gallery.items():
        table = _table(stressor, found[stressor])
        head = [f"## {stressor}", f"{escape_markdown(summaries[stressor])}. See [its page](stressors/{stressor}.md)."]
        blocks += [*head, *provenance(str(evidence.head["scale"]), evidence), markdown_table(table)]
        why = [
            f"- {cell.stabilizer}: {cell.excluded}" for cell in found[stressor].values() if cell.excluded is not None
        ]
        blocks += ["Not combined:", "\n".join(map(escape_markdown, why))] * bool(why)
    return "\n\n".join(blocks) + "\n"


def _table(stressor: str, cells: Mapping[str, Remedy]) -> Table:
    header = (
        "stabilizer",
        "symptom",
        "share [95%]",
        "p",
        "diverged or no learning",
        "validation loss - none [95%]",
        "",
    )
    rows = []
    for cell in cells.values():
        if cell.excluded is not None:
            rows.append((cell.stabilizer, *[MISSING] * 5, cell.verdict))
            continue
        low, high = share_interval(cell.shown, cell.runs)
        share = f"{cell.shown / cell.runs:.2f} [{low:.2f}, {high:.2f}]"
        rows.append(
            (
                cell.stabilizer,
                f"{cell.shown} of {cell.runs}",
                share,
                MISSING if cell.p is None else p_text(cell.p),
                f"{cell.failed} of {cell.runs}",
                MISSING
                if cell.loss is None
                else f"{cell.loss.value:+.3f} [{cell.loss.low:+.3f}, {cell.loss.high:+.3f}]",
                cell.verdict,
            )
        )
    return Table(stressor, header, tuple(rows))


def draw(gallery: Gallery, path: Path) -> None:
    from stability_lab.compare.figures.heat_map import Tile, draw_heat_map

    found = remedies(gallery)
    arms = sorted({arm for cells in found.values() for arm in cells}, key=_first_none)
    tiles = {
        (arm, stressor): Tile(
            cell.shown / cell.runs, f"{cell.shown}/{cell.runs}", resolved(cell), 2 * cell.failed >= cell.runs
        )
        for stressor, cells in found.items()
        for arm, cell in cells.items()
        if cell.excluded is None and cell.runs
    }
    draw_heat_map(arms, list(found), tiles, "share of runs with the stressor's symptom", path)
