"""One sentence about each arm of a comparison.

It says whether the arm is better where each is at its best, how much the learning rate still matters, whether it
diverges less, and what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stability_lab.compare.comparability import LOSS, spoiled
from stability_lab.compare.comparison import Comparison, Row, finding
from stability_lab.compare.grouping import LR, Cell, setting_text
from stability_lab.compare.ladders import Ladder
from stability_lab.compare.statistics import Difference


@dataclass(frozen=True, eq=False)
class Tuned:
    """An arm over its learning rates beside the baseline over its own, in one setting of the other keys.

    `speed`: tokens/s relative to the baseline's, None where it was not measured well.
    """

    ladder: Ladder
    base: Ladder
    speed: float | None

    @property
    def difference(self) -> Difference | None:
        """Of the losses where each is at its best, which is what a tuned recipe would gain."""
        return self.ladder.gain


def decision(comparison: Comparison) -> list[str]:
    """One sentence for each arm and setting. Where learning rates vary, it compares the best one of each arm."""
    if comparison.ladders:
        lines = [_over_learning_rates(comparison, one) for one in tuned(comparison)]
    else:
        lines = [
            f"{_named(row.cell.arm, row.cell.setting)}: {'; '.join(_plain(comparison, row))}."
            for row in comparison.rows
            if not row.is_baseline and row.difference is not None
        ]
    if lines and (wrong := spoiled(comparison.checks, LOSS)):
        differs = "differs" if len(wrong) == 1 else "differ"
        lines.append(f"With care: {', '.join(check.name for check in wrong)} {differs} and may explain any of this.")
    return lines


def tuned(comparison: Comparison) -> list[Tuned]:
    """All arms but the baseline, where the baseline has learning rates in the same setting too."""
    base = {_key(ladder): ladder for ladder in comparison.ladders if ladder.arm == comparison.grouping.baseline}
    others = [ladder for ladder in comparison.ladders if ladder.arm != comparison.grouping.baseline]
    return [
        Tuned(ladder, base[_key(ladder)], _speed(_rows(comparison, ladder), comparison.busy))
        for ladder in others
        if _key(ladder) in base
    ]


def _over_learning_rates(comparison: Comparison, one: Tuned) -> str:
    name, parts, ladder, base = comparison.grouping.baseline, [], one.ladder, one.base
    among = "" if ladder.lrs == base.lrs else " of the rates that both have"
    if one.difference is not None and ladder.tuned is not None:
        own, of_base = ladder.tuned
        amount = _amount(one.difference)
        parts.append(f"at its best learning rate{among} ({own:g}) {amount} {name} at its own ({of_base:g})")
    if ladder.difference is not None and not among and ladder.sensitivity and base.sensitivity:
        change = f"LR sensitivity {ladder.sensitivity.value:.3g} against {base.sensitivity.value:.3g}"
        parts.append(change + _tested(ladder.difference))
    elif ladder.difference is not None:
        parts.append(f"LR sensitivity{among} {ladder.difference.value:+.3g}{_tested(ladder.difference)}")
    edges = [_edge(one) for one in (ladder, base)]
    if not among and edges[0] != edges[1] and not all(edge.startswith("nowhere") for edge in edges) and ladder.lrs:
        parts.append(f"loses 0.1 nats {edges[0]} ({name} {edges[1]})")
    cells = _rows(comparison, ladder)
    # An arm is neither blamed nor praised for rates that it did not run.
    common = [
        [row for row in rows if row.cell.setting[LR] in ladder.common] for rows in (cells, _rows(comparison, base))
    ]
    parts += _diverged(*common)
    parts += _cost(cells, comparison.busy)
    return f"{_named(ladder.arm, ladder.setting)}: {'; '.join(parts) or 'no run to judge by'}."


def _named(arm: str, setting: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (setting_text(setting), arm)))


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
    if difference.significant is False:
        return f"not distinguishable ({difference.value:+.4f}, p {difference.p_holm:.2g} by Holm) from"
    return f"{abs(difference.value):.4g} {'below' if difference.value < 0 else 'above'}{_tested(difference)}"


def _tested(difference: Difference) -> str:
    if difference.p_holm is None:
        return " (one seed, no test)"
    return f" ({'' if difference.significant else 'not distinguishable, '}p {difference.p_holm:.2g} by Holm)"


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
    memories = [row.memory for row in rows if row.memory is not None and row.memory > 0]
    if (speed := _speed(rows, busy)) is not None:
        yield f"{speed:.2f}x the tokens/s"
    elif busy is not None and any(row.speed for row in rows):
        yield "its tokens/s not measured (busy machine)"
    if memories:
        yield f"{_middle(memories):.2f}x the memory"


def _speed(rows: list[Row], busy: float | None) -> float | None:
    speeds = [row.speed for row in rows if row.speed is not None and row.speed > 0]
    return _middle(speeds) if speeds and busy is None else None


def _rows(comparison: Comparison, ladder: Ladder) -> list[Row]:
    return [row for row in comparison.rows if row.cell.arm == ladder.arm and _same(row.cell, ladder.setting)]


def _middle(values: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _same(cell: Cell, setting: Mapping[str, Any]) -> bool:
    return all(cell.setting.get(key) == value for key, value in setting.items())


def _key(ladder: Ladder) -> tuple[Any, ...]:
    return tuple(ladder.setting.values())
