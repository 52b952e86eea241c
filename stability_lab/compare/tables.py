"""Tables of strings as Markdown for GitHub or LaTeX (booktabs)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stability_lab.text import MISSING, Table, shown


def p_text(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def markdown_table(table: Table) -> str:
    lines = [table.header, tuple("---" for _ in table.header), *table.rows]
    return "\n".join("| " + " | ".join(escape_markdown(cell) for cell in line) + " |" for line in lines)


_MD = {"\\": "\\\\", "|": "\\|", "<": "&lt;", ">": "&gt;", "*": "\\*", "_": "\\_", "`": "\\`", "[": "\\[", "]": "\\]"}
_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\\": "\\textbackslash{}",
    "±": "$\\pm$",
    "<": "$<$",
    ">": "$>$",
    "†": "$^\\dagger$",
    "∞": "$\\infty$",
    "[": "{[}",
    "]": "{]}",
    "–": "--",
}


def escape_markdown(cell: str) -> str:
    """Characters that Markdown or HTML would take for themselves: a run's name is anybody's text."""
    return "".join(_MD.get(c, c) for c in shown(cell))


def escape_latex(cell: str) -> str:
    return "".join(_LATEX.get(c, c if ord(c) < 256 else f"{{[}}U+{ord(c):04X}{{]}}") for c in shown(cell))


def latex_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(escape_latex, cells)) + r" \\"

    numeric = [all(_is_numeric(row[i]) for row in table.rows) for i in range(len(table.header))]
    columns = "".join("r" if right else "l" for right in numeric)
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(table.header), r"\midrule"]
    body += [*map(line, table.rows), r"\bottomrule", r"\end{tabular}"]
    notes = " ".join(map(escape_latex, table.notes))
    caption = rf"\caption{{{escape_latex(table.title)}. {notes}}}"
    fit = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
    return "\n".join([r"\begin{table}", r"\centering", fit, *body, "}", caption, r"\end{table}"])


def _is_numeric(cell: str) -> bool:
    words = cell.replace(",", "").replace("%", "").split()
    return (bool(words) and words[0].lstrip("+-").replace(".", "", 1).isdigit()) or cell == MISSING


def words_for_nonfinite(value: Any) -> Any:
    """JSON has no infinity: other programs must be able to read this."""
    if isinstance(value, dict):
        return {str(key): words_for_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [words_for_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
