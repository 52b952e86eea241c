"""A comparison as text for a terminal, Markdown for GitHub, LaTeX (booktabs), CSV or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from stability_lab.compare.comparability import COST, LOSS, spoiled
from stability_lab.compare.comparison import Comparison, Row, SpikeRate, finding
from stability_lab.compare.costs import counted
from stability_lab.compare.decision import decision
from stability_lab.compare.factorial import Factorial
from stability_lab.compare.grouping import Cell, Grouping, setting_text, short, shown_value, tally
from stability_lab.compare.ladders import Ladder
from stability_lab.compare.plain_values import as_dict, flat
from stability_lab.compare.statistics import Difference, Mean
from stability_lab.compare.tables import (
    escape_latex,
    escape_markdown,
    latex_table,
    markdown_table,
    p_text,
    words_for_nonfinite,
)
from stability_lab.text import MISSING, Table, aligned, filled, rough, text_table

_MARKS = {LOSS: "*", COST: "†"}


def tables(comparison: Comparison) -> list[Table]:
    made = [_losses(comparison), _stability(comparison)]
    if comparison.ladders:
        made.append(_learning_rates(comparison))
    return made + [_effects(comparison, factorial) for factorial in comparison.factorials]


def text(comparison: Comparison, width: int | None = None) -> str:
    """For a terminal of `width` columns."""
    parts = [filled(_opening(comparison), width), _checks_text(comparison, width)]
    parts += [text_table(table, width) for table in tables(comparison)]
    parts.append(_listing("Decision", decision(comparison), width))
    parts.append(_listing("Notes", comparison.notes, width))
    return "\n\n".join(part for part in parts if part)


def markdown(comparison: Comparison) -> str:
    parts = [f"{escape_markdown(_opening(comparison))}"]
    for table in tables(comparison):
        parts.append(f"**{escape_markdown(table.title)}**\n\n{markdown_table(table)}")
        parts += [escape_markdown(note) for note in table.notes]
    for title, lines in _lists(comparison):
        parts.append(f"**{title}**\n\n" + "\n".join(f"- {escape_markdown(line)}" for line in lines))
    return "\n\n".join(parts)


def latex(comparison: Comparison) -> str:
    """`table` environments that need only the package booktabs, and graphicx where one is too wide for the page."""
    parts = ["% Needs \\usepackage{booktabs,graphicx}", *map(latex_table, tables(comparison))]
    for title, lines in _lists(comparison):
        items = "\n".join(f"\\item {escape_latex(line)}" for line in lines)
        parts.append(f"\\paragraph{{{title}}}\n\\begin{{itemize}}\n{items}\n\\end{{itemize}}")
    return "\n\n".join(parts)


def _lists(comparison: Comparison) -> list[tuple[str, Sequence[str]]]:
    checks, notes = [_check_line(comparison)], comparison.notes
    lists = [("Decision", decision(comparison)), ("Comparable?", checks), ("Notes", notes)]
    return [(title, lines) for title, lines in lists if lines]


def csv(comparison: Comparison) -> str:
    """One header line, one line a row, full precision; an undefined value is an empty field."""
    import pandas as pd  # for this format alone

    return pd.DataFrame([flat(row, comparison) for row in comparison.rows]).to_csv(index=False)


def to_json(comparison: Comparison, command: str) -> str:
    """All that was computed. What is undefined is null; infinities and NaN stand as the words Infinity and NaN."""
    content = {"command": command, **as_dict(comparison), "decision": decision(comparison)}
    return json.dumps(words_for_nonfinite(content), indent=2, allow_nan=False)


# The tables


def _losses(comparison: Comparison) -> Table:
    grouping, metric = comparison.grouping, comparison.metric
    mark = _mark(comparison, LOSS)
    has_ppl = any(row.perplexity for row in comparison.rows)
    # A column of its own only where a run has been better than at its end.
    has_best = any(row.best != row.metric for row in comparison.rows if row.best)
    head = [*_setting_names(grouping), _arm_name(grouping), "seeds", metric + mark]
    head += [f"best {metric}{mark}"] * has_best + [f"{comparison.perplexity_name}{mark}"] * has_ppl
    head += [f"difference to {grouping.baseline}{mark}", "p (Holm)", "finding"]
    lines = []
    for row in comparison.rows:
        cells = [*_setting(row.cell), row.cell.arm, _of(row.metric, len(row.cell.ended)), mean_text(row.metric)]
        cells += [mean_text(row.best)] * has_best + [mean_text(row.perplexity, 4)] * has_ppl
        p = MISSING if row.p_holm is None else p_text(row.p_holm)
        cells += [difference_text(row.difference, row.metric), p, _finding(row)]
        lines.append(tuple(cells))
    notes = ["Mean over seeds ± 95% t-interval."]
    if any(row.cell.diverged for row in comparison.rows):
        notes.append("2 of 3: of three seeds one has no finite value, or diverged, and is in no mean.")
    notes.append("p by Holm's rule over all tests of this report, see the notes.")
    if any("n.d." in line[-1] for line in lines):
        notes.append(
            "n.d.: not distinguishable with this budget. N to M: so many new seeds, tested alone, find a difference of "
            "this size with 80% power, were it the true one, at the ends of the 95% interval of the spread; no number "
            "is given where it would be a guess."
        )
    least = [f"{comparison.perplexity_name}{mark}", f"best {metric}{mark}", "seeds", "p (Holm)"]
    return Table("Loss", tuple(head), tuple(lines), (*notes, *_spoiled_notes(comparison, LOSS)), tuple(least))


def _finding(row: Row) -> str:
    words, d = finding(row), row.difference
    if not words.startswith("not distinguishable") or d is None:
        return words
    return "n.d." if d.seeds_range is None else f"n.d., {d.seeds_range[0]} to {d.seeds_range[1]}"


def _stability(comparison: Comparison) -> Table:
    grouping = comparison.grouping
    mark = _mark(comparison, COST)
    definition = next((rate.definition for row in comparison.rows for rate in row.spikes.values()), "robust")
    head = [*_setting_names(grouping), _arm_name(grouping), "verdicts", f"grad spikes ({definition})", "loss spikes"]
    head += ["largest attn logit", "clipped", f"tokens/s{mark}", f"memory{mark}"]
    lines = []
    for row in comparison.rows:
        verdicts = tally(row.verdicts) or MISSING
        if row.degraded:
            verdicts += f" (degraded {row.degraded})"
        cells = [*_setting(row.cell), row.cell.arm, verdicts, *map(_spikes, row.spikes.values())]
        cells += [_number(row.max_attn_logit, ",.4g"), _number(row.clip_fraction, ".0%")]
        speed = row.speed if comparison.busy is None else None  # a ratio that is not to be trusted is not shown
        cells += [_cost(row.tokens_per_s, speed, "{:,.0f}"), _cost(row.memory_bytes, row.memory, "{:.2f} GB", 1e9)]
        lines.append(tuple(cells))
    notes = ["Spikes: share of scored steps (spikes of steps; one spike is worth 100/steps percent)."]
    if counted(comparison.grouping.cells):
        notes.append("Memory on a CPU: weights, gradients and optimizer state, counted; activations are not in it.")
    if comparison.busy is not None:
        notes.append("tokens/s: of a busy machine (see the notes), so without a ratio to the baseline.")
    if any(row.degraded for row in comparison.rows):
        notes.append("Degraded: finite, but over 0.1 nats above the sweep's best, or an attention logit above 10,000.")
    notes += _spoiled_notes(comparison, COST)
    least = ("clipped", f"memory{mark}", "loss spikes", f"tokens/s{mark}", "largest attn logit")
    return Table("Stability and cost", tuple(head), tuple(lines), tuple(notes), least)


def _learning_rates(comparison: Comparison) -> Table:
    grouping = comparison.grouping
    rest = list(comparison.ladders[0].setting)
    names = [short(key, grouping.setting) for key in rest]
    mark = _mark(comparison, LOSS)
    head = [*names, _arm_name(grouping), "seeds", f"LR sensitivity{mark}", f"diverged as initial{mark}"]
    head += [
        f"difference to {grouping.baseline}{mark}",
        "p (Holm)",
        f"best LR{mark}",
        f"usable LRs{mark}",
        f"edge{mark}",
    ]
    head += [f"largest stable LR{mark}", f"ratio{mark}"]
    lines = []
    for ladder in comparison.ladders:
        cells = [*(shown_value(ladder.setting[key]) for key in rest), ladder.arm, _of(ladder.sensitivity, ladder.seeds)]
        cells += [_sensitivity(ladder, ladder.sensitivity), _sensitivity(ladder, ladder.sensitivity_l0)]
        p = ladder.difference.p_holm if ladder.difference else None
        cells += [difference_text(ladder.difference), MISSING if p is None else p_text(p), _best(ladder)]
        cells += _usable(ladder)
        cells += [str(ladder.stable) if ladder.stable else MISSING, _ratio(ladder)]
        lines.append(tuple(cells))
    grids: dict[tuple[float, ...], list[str]] = {}
    for ladder in comparison.ladders:
        grids.setdefault(ladder.lrs, []).append(ladder.arm)
    shown = [(", ".join(f"{lr:g}" for lr in grid) or "none", dict.fromkeys(arms)) for grid, arms in grids.items()]
    if len(shown) == 1:
        notes = [f"Learning rates: {shown[0][0]}."]
    else:
        each = "; ".join(f"{rates} ({', '.join(arms)})" for rates, arms in shown)
        notes = [f"Learning rates: {each}. Columns take an arm's own rates, differences those that both arms have."]
    reasons = {ladder.arm: ladder.reason for ladder in comparison.ladders if ladder.reason}
    notes += [f"No LR sensitivity of {arm}: {reason}." for arm, reason in reasons.items()]
    notes.append(
        "LR sensitivity (arXiv:2309.14322): mean over the learning rates of min(loss, loss at initialisation) minus "
        "the lowest; `diverged as initial` gives a run that diverged while finite the loss at initialisation. Usable: "
        "within 0.02 nats of the best; edge: the first above the best that is 0.1 worse."
    )
    if any(ladder.sensitivity and ladder.sensitivity.n < ladder.seeds for ladder in comparison.ladders):
        notes.append("2 of 3 seeds: the others lack a learning rate of the grid and are in no sensitivity.")
    notes += _spoiled_notes(comparison, LOSS)
    names = ("ratio", "edge", "diverged as initial", "usable LRs", "largest stable LR")
    least = (*(f"{name}{mark}" for name in names), "seeds")
    return Table("Learning rates", tuple(head), tuple(lines), tuple(notes), least)


def _effects(comparison: Comparison, factorial: Factorial) -> Table:
    where = setting_text(factorial.setting)
    lines = [
        (
            effect.name,
            difference_text(effect.difference),
            MISSING if effect.difference.p_holm is None else p_text(effect.difference.p_holm),
        )
        for effect in factorial.effects
    ]
    notes = [
        f"{arm}: the cap touches {100 * share:.3g}% of the attention logits (beyond half of it) at the end."
        for arm, share in factorial.touched.items()
    ]
    if factorial.reason:
        notes.append(factorial.reason[0].upper() + factorial.reason[1:] + ".")
    notes.append(
        "A main effect is mean with minus mean without; an interaction is half of what one changes in the other."
    )
    title = f"Effects of {' and '.join(factorial.factors)} on {comparison.metric}" + (f" at {where}" if where else "")
    mark = _mark(comparison, LOSS)
    head = ("effect", f"size{mark}", f"p (Holm){mark}")
    return Table(title, head, tuple(lines), (*notes, *_spoiled_notes(comparison, LOSS)))


# Cells


def mean_text(mean: Mean | None, digits: int = 4) -> str:
    """`1.771 ± 0.012`: as many decimals as the interval's size asks for, at least enough for `digits` digits."""
    if mean is None:
        return MISSING
    decimals = _decimals(mean.value, digits)
    half = mean.half if mean.half is not None and math.isfinite(mean.half) else None
    if max(abs(mean.value), half or 0.0) >= 1e6:  # a perplexity of a run that went wrong
        return rough(mean.value) if half is None else f"{rough(mean.value)} ± {rough(half)}"
    if half is None:
        return f"{mean.value:.{decimals}f}"
    return f"{mean.value:.{decimals}f} ± {half:.{decimals}f}"


def difference_text(difference: Difference | None, of: Mean | None = None) -> str:
    """`-0.0123 [-0.0200, -0.0046]`; with the number of pairs where that is not the number of values in `of`."""
    if difference is None:
        return MISSING
    d = difference
    size = max(abs(x) for x in (d.value, d.low, d.high) if x is not None)
    text = f"{_signed(d.value, size)} {interval_text(d.low, d.high, size)}".removesuffix(f" {MISSING}")
    return f"{text} ({d.n} pairs)" if of and d.method == "paired" and 1 < d.n < of.n else text


def interval_text(low: float | None, high: float | None, size: float | None = None) -> str:
    if low is None or high is None:
        return MISSING
    size = max(abs(low), abs(high)) if size is None else size
    return f"[{_signed(low, size)}, {_signed(high, size)}]"


def _signed(value: float, size: float) -> str:
    """Four decimals for losses; fewer for what is large, and powers of ten for what four decimals would hide."""
    if size and size < 1e-3:
        return f"{value:+.1e}"
    return f"{value:+.4f}" if size < 100 else f"{value:+,.1f}"


def _decimals(value: float, digits: int) -> int:
    size = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    return min(max(digits - 1 - size, 0), 6)


def _number(value: float | None, spec: str) -> str:
    return MISSING if value is None else format(value, spec)


def _cost(value: float | None, ratio: float | None, form: str, unit: float = 1.0) -> str:
    if value is None:
        return MISSING
    return form.format(value / unit) + ("" if ratio is None else f" ({ratio:.2f}x)")


def _spikes(rate: SpikeRate) -> str:
    return "not scored" if rate.score is None else f"{rate.score:.2f}% ({rate.spikes} of {rate.scored:,})"


def _of(mean: Mean | None, seeds: int) -> str:
    n = mean.n if mean else 0
    return f"{n} of {seeds}" if n < seeds else str(n)


def _sensitivity(ladder: Ladder, mean: Mean | None) -> str:
    return mean_text(mean, 3) + (" (at chance)" if mean and ladder.at_chance else "")


def _best(ladder: Ladder) -> str:
    if ladder.best_lr is None:
        return MISSING
    return f"{ladder.best_lr:g}" + (" (grid's end)" if ladder.at_end else "")


def _usable(ladder: Ladder) -> tuple[str, str]:
    if ladder.usable is None:
        return MISSING, MISSING
    lrs = ladder.usable.usable
    edge = f"> {ladder.lrs[-1]:g}" if ladder.usable.edge is None else f"{ladder.usable.edge:g}"
    return (f"{lrs[0]:g}" if len(lrs) == 1 else f"{lrs[0]:g} to {lrs[-1]:g}"), edge


def _ratio(ladder: Ladder) -> str:
    if ladder.ratio is None:
        return MISSING
    low, high = ladder.ratio
    return f"({low:.3g}, {'∞' if math.isinf(high) else format(high, '.3g')})"


def _arm_name(grouping: Grouping) -> str:
    return ", ".join(short(key, grouping.by) for key in grouping.by)


def _setting_names(grouping: Grouping) -> list[str]:
    return [short(key, grouping.setting) for key in grouping.setting]


def _setting(cell: Cell) -> list[str]:
    return [shown_value(value) for value in cell.setting.values()]


def _mark(comparison: Comparison, kind: str) -> str:
    return _MARKS[kind] if spoiled(comparison.checks, kind) else ""


def _spoiled_notes(comparison: Comparison, kind: str) -> list[str]:
    return [
        f"{_MARKS[kind]} Not comparable in full: {check.name} differs, {check.detail}."
        for check in spoiled(comparison.checks, kind)
    ]


# Texts around them


def _opening(comparison: Comparison) -> str:
    grouping = comparison.grouping
    n = sum(len(cell.runs) for cell in grouping.cells)
    over = f" at each {', '.join(_setting_names(grouping))}" if grouping.setting else ""
    return (
        f"{n} runs, {len(grouping.arms)} of {_arm_name(grouping)}{over}; "
        f"{comparison.metric}, baseline {grouping.baseline}"
    )


def _check_line(comparison: Comparison) -> str:
    by_word: dict[str, list[str]] = {}
    for check in comparison.checks:
        what = check.name if check.same is True else f"{check.name} ({check.detail})"
        by_word.setdefault(check.word, []).append(what)
    order = [word for word in ("same", "differs", "unknown") if word in by_word]
    paired = "runs of one seed are pairs" if comparison.paired else "runs are not paired"
    return "; ".join(f"{word}: {', '.join(by_word[word])}" for word in order) + f"; {paired}"


def _checks_text(comparison: Comparison, width: int | None) -> str:
    width = min(width or 120, 120) - 2
    same = ", ".join(check.name for check in comparison.checks if check.same is True)
    rows: list[tuple[str, ...]] = [("same", same)] * bool(same)
    rows += [(check.word, check.name, check.detail) for check in comparison.checks if check.same is not True]
    rows.append(("paired", "yes, runs of one seed are pairs" if comparison.paired else "no"))
    return "\n".join(["Comparable?", *(f"  {line}" for line in aligned(rows, width))])


def _listing(title: str, lines: Iterable[str], width: int | None) -> str:
    wrapped = [filled(f"- {line}", width, indent="  ") for line in lines]
    return "\n".join([title, *wrapped]) if wrapped else ""
