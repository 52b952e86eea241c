"""What a comparison says about each arm, in one sentence: is it better where each is at its best, how much does the
learning rate still matter, does it diverge less, and what does it cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from stability_lab.analysis.comparability import LOSS, spoiled
from stability_lab.analysis.comparison import Comparison, Row, by_seed, finding
from stability_lab.analysis.grouping import LR, Cell, short, shown_value
from stability_lab.analysis.ladders import Ladder
from stability_lab.analysis.statistics import Difference, difference_by_seed, family


def decision(comparison: Comparison) -> list[str]:
    """One sentence an arm and setting; of a setting that is a learning rate only the best one of each arm counts."""
    if comparison.ladders:
        base = {_key(ladder): ladder for ladder in comparison.ladders if ladder.arm == comparison.grouping.baseline}
        others = [ladder for ladder in comparison.ladders if ladder.arm != comparison.grouping.baseline]
        pairs = [(ladder, base[_key(ladder)]) for ladder in others if _key(ladder) in base]
        differences = family([tuned(comparison, *pair) for pair in pairs])
        lines = [
            _over_learning_rates(comparison, *pair, difference)
            for pair, difference in zip(pairs, differences, strict=True)
        ]
    else:
        lines = [
            f"{_where(row.cell.setting)}{row.cell.arm}: {'; '.join(_plain(comparison, row))}."
            for row in comparison.rows
            if not row.is_baseline and row.difference is not None
        ]
    if lines and (wrong := spoiled(comparison.checks, LOSS)):
        differs = "differs" if len(wrong) == 1 else "differ"
        lines.append(f"With care: {', '.join(check.name for check in wrong)} {differs} and may explain any of this.")
    return lines


def tuned(comparison: Comparison, ladder: Ladder, base: Ladder) -> Difference | None:
    """The arm at its own best learning rate against the baseline at its own: what a tuned recipe would gain."""
    own, other = (_at_best(comparison, one) for one in (ladder, base))
    return difference_by_seed(own, other, comparison.paired)


def _over_learning_rates(comparison: Comparison, ladder: Ladder, base: Ladder, difference: Difference | None) -> str:
    name, parts = comparison.grouping.baseline, []
    if difference is not None:
        parts.append(
            f"at its best learning rate ({ladder.best_lr:g}) {_amount(difference)} {name} at its own ({base.best_lr:g})"
        )
    if ladder.sensitivity and base.sensitivity:
        parts.append(f"LR sensitivity {ladder.sensitivity.value:.3g} against {base.sensitivity.value:.3g}")
    edges = [_edge(one) for one in (ladder, base)]
    if edges[0] != edges[1]:
        parts.append(f"loses 0.1 nats {edges[0]} ({name} {edges[1]})")
    cells = [row for row in comparison.rows if row.cell.arm == ladder.arm and _same(row.cell, ladder.setting)]
    bases = [row for row in comparison.rows if row.cell.arm == name and _same(row.cell, ladder.setting)]
    parts += _diverged(cells, bases)
    parts += _cost(cells, comparison.busy)
    return f"{_where(ladder.setting)}{ladder.arm}: {'; '.join(parts) or 'no run to judge by'}."


def _plain(comparison: Comparison, row: Row) -> Iterator[str]:
    assert row.difference is not None
    words = finding(row)
    yield (
        f"{_amount(row.difference)} {comparison.grouping.baseline}"
        if words in ("lower", "higher")
        else (words if words.startswith(("identical", "no ")) else f"{row.difference.value:+.4f}, {words}")
    )
    base = [r for r in comparison.rows if r.is_baseline and dict(r.cell.setting) == dict(row.cell.setting)]
    yield from _diverged([row], base)
    yield from _cost([row], comparison.busy)


def _amount(difference: Difference) -> str:
    if difference.identical:
        return "identical to"
    side = f"{abs(difference.value):.4g} {'below' if difference.value < 0 else 'above'}"
    if difference.p_holm is None:
        return f"{side} (one seed, no test)"
    if not difference.significant:
        return f"not distinguishable ({difference.value:+.4f}, p {difference.p_holm:.2g} by Holm) from"
    return f"{side} (p {difference.p_holm:.2g} by Holm)"


def _edge(ladder: Ladder) -> str:
    if ladder.usable is None:
        return "at every learning rate"
    return f"at {ladder.usable.edge:g}" if ladder.usable.edge is not None else f"nowhere up to {ladder.lrs[-1]:g}"


def _diverged(rows: list[Row], bases: list[Row]) -> Iterator[str]:
    own, other = (sum(len(row.cell.diverged) for row in some) for some in (rows, bases))
    of, of_other = (sum(len(row.cell.ended) for row in some) for some in (rows, bases))
    if own or other:
        yield f"{own} of {of} runs diverged (baseline {other} of {of_other})"


def _cost(rows: list[Row], busy: float | None) -> Iterator[str]:
    speeds = [row.speed for row in rows if row.speed is not None and row.speed > 0]
    memories = [row.memory for row in rows if row.memory is not None and row.memory > 0]
    if speeds:
        yield f"{_middle(speeds):.2f}x the tokens/s" if busy is None else "its tokens/s not measured (busy machine)"
    if memories:
        yield f"{_middle(memories):.2f}x the memory"


def _middle(values: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _at_best(comparison: Comparison, ladder: Ladder) -> dict[str, float]:
    values: dict[str, float] = {}
    for cell in comparison.grouping.cells:
        if cell.arm == ladder.arm and cell.setting.get(LR) == ladder.best_lr and _same(cell, ladder.setting):
            values |= by_seed(cell, comparison.metric)
    return values


def _same(cell: Cell, setting: Mapping[str, Any]) -> bool:
    return all(cell.setting.get(key) == value for key, value in setting.items())


def _key(ladder: Ladder) -> tuple[Any, ...]:
    return tuple(ladder.setting.values())


def _where(setting: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{short(key, setting)}={shown_value(value)}" for key, value in setting.items())
    return f"{parts}: " if parts else ""
