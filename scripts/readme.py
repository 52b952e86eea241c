"""Fills the generated parts of the pages: the first picture, the table of stabilizers and, from a sweep, the results.

python scripts/readme.py                  README.md: its picture and caption, from docs/reproduction/data;
                                          docs/stabilizers/README.md: the table
python scripts/readme.py SWEEP            also docs/results.md: tables, decision and three pictures of that sweep
"""

import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from stability_lab.commands.stabilizers import stabilizers
from stability_lab.compare.comparison import Comparison, Row, compare
from stability_lab.compare.decision import decision
from stability_lab.compare.figures import draw, style
from stability_lab.compare.figures.looks import looks as arm_looks
from stability_lab.compare.grouping import LR
from stability_lab.compare.run_record import find_runs
from stability_lab.compare.tables import escape_markdown, markdown_table, p_text
from stability_lab.compare.text_report import tables
from stability_lab.reproduction.catalogue import find
from stability_lab.reproduction.datafile import data_path, read
from stability_lab.text import Table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
IMAGES = {"decision": "decision", "loss_over_lr": "comparison", "curves": "curves"}
ALT = {
    "decision": "Loss at the best learning rate, LR sensitivity and usable learning rates, for each stabilizer",
    "loss_over_lr": "Validation loss and largest attention logit over learning rate, for each stabilizer",
    "curves": "Training loss and gradient norm over steps at the highest learning rate, for each stabilizer",
}
ARMS = {"none": "no stabilizer", "qknorm": "QK-norm"}
FONT = 12.5  # points; GitHub shows the picture, 7 inches wide, at 700 px and more: 17 px


def first_comparison() -> Comparison:
    """`none` against `qknorm` over learning rates, from the data of a reproduction that lie in the repository."""
    part = find("small_scale_proxies").parts["lr_sensitivity"]
    runs = read(data_path(part, "cpu", DOCS / "reproduction"), part, "cpu").runs
    records = [
        replace(run.record, config={**run.record.config, "stabilizer": {run.arm: {}}})
        for run in runs
        if run.setting == "small" and run.arm in ARMS
    ]
    return compare(records, "val/loss", by=("stabilizer",))


def first_picture(comparison: Comparison) -> Figure:
    """Loss over learning rate in one panel, with the names of the arms at their lines."""
    figure = style.new_figure(7.0, 4.2)
    axes = figure.subplots()
    looks = arm_looks(comparison.grouping.arms)
    style.learning_rates(axes, [lr_of(row) for row in comparison.rows], width=7.0)
    for arm, look in looks.items():
        rows = rows_of(comparison, arm)
        lrs = [lr_of(row) for row in rows]
        means = [row.metric.value for row in rows if row.metric]
        axes.plot(lrs, means, linewidth=2.4, markersize=8, **{**look.point(), **look.line()})
        for row, lr in zip(rows, lrs, strict=True):
            losses = [loss for run in row.cell.finite if (loss := run.metric(comparison.metric)) is not None]
            axes.plot([lr] * len(losses), losses, ".", color=look.colour, markersize=5, alpha=0.6)
        at = lrs.index(widest(comparison))
        above = arm == comparison.grouping.baseline
        axes.annotate(
            ARMS[arm],
            (lrs[at], means[at]),
            xytext=(-12, 8) if above else (10, -6),
            textcoords="offset points",
            ha="right" if above else "left",
            va="bottom" if above else "top",
            color=look.colour,
            fontsize=FONT + 2,
            fontweight="bold",
        )
    axes.set_ylabel("validation loss (nats per token)", fontsize=FONT)
    axes.set_xlabel("peak learning rate (lines: means, dots: seeds)", fontsize=FONT)
    axes.tick_params(labelsize=FONT)
    return figure


def caption(comparison: Comparison) -> str:
    losses = {arm: [row.metric.value for row in rows_of(comparison, arm) if row.metric] for arm in ARMS}
    row = next(row for row in rows_of(comparison, "qknorm") if lr_of(row) == widest(comparison))
    gain = row.difference
    assert gain is not None
    assert gain.low is not None
    assert gain.high is not None
    assert gain.p_holm is not None
    best = abs(min(losses["none"]) - min(losses["qknorm"]))
    return textwrap.fill(
        f"At a learning rate of {lr_of(row):g} the model with QK-norm ends {-gain.value:.2f} nats below the one "
        f"without ({gain.n} seeds, {row.cell.runs[0].summary['steps']} steps; 95% interval {-gain.high:.2f} to "
        f"{-gain.low:.2f}, p {p_text(gain.p_holm)} after Holm's correction). With each at its best rate they are "
        f"{best:.2f} nats apart.",
        118,
    )


def rows_of(comparison: Comparison, arm: str) -> list[Row]:
    return sorted((row for row in comparison.rows if row.cell.arm == arm), key=lr_of)


def lr_of(row: Row) -> float:
    return float(row.cell.setting[LR])


def widest(comparison: Comparison) -> float:
    """The learning rate at which the arms differ most."""
    return lr_of(max(rows_of(comparison, "qknorm"), key=lambda row: abs(row.difference.value) if row.difference else 0))


def first_part() -> str:
    comparison = first_comparison()
    with style.applied():
        style.save(first_picture(comparison), DOCS / "images" / "first.png")
    return (
        "![Validation loss over learning rate, without a stabilizer and with QK-norm](docs/images/first.png)\n\n"
        f"*{caption(comparison)}*"
    )


def stabilizer_table() -> str:
    rows = []
    for row in stabilizers():
        parameters = " ".join(f"{key}={value}" for key, value in row["parameters"].items())
        cells = [
            f"[{row['name']}]({row['name']}.md)",
            ", ".join(f"`{seam}`" for seam in row["seams"]) or "–",
            f"`{parameters}`" if parameters else "–",
            row["paper"] if row["paper"] != "-" else "–",
            row["summary"],
        ]
        rows.append("| " + " | ".join(cells) + " |")
    head = "| name | seam | options | papers | what it does |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def results_part(sweep: Path) -> str:
    comparison = compare(find_runs([sweep])[0])
    with tempfile.TemporaryDirectory() as folder:
        for path in draw(comparison, Path(folder), only=tuple(IMAGES)):
            shutil.copy(path, DOCS / "images" / f"{IMAGES[path.stem]}.png")
    made = {table.title: table for table in tables(comparison)}
    parts = ["**Decision**\n\n" + "\n".join(f"- {escape_markdown(line)}" for line in decision(comparison))]
    parts += [_picture("decision"), _picture("loss_over_lr")]
    parts += [_titled(_measured(made[title])) for title in ("Loss", "Learning rates", "Stability and cost")]
    return "\n\n".join([*parts, _picture("curves")])


def _picture(name: str) -> str:
    return f"![{ALT[name]}](images/{IMAGES[name]}.png)"


def _measured(table: Table) -> Table:
    """Without the columns that `compare` marks as void, such as speeds of a busy machine."""
    kept = [place for place, name in enumerate(table.header) if not name.endswith("†")]

    def pick(cells: Sequence[str]) -> tuple[str, ...]:
        return tuple(cells[place] for place in kept)

    return replace(table, header=pick(table.header), rows=tuple(pick(row) for row in table.rows))


def _titled(table: Table) -> str:
    return f"**{escape_markdown(table.title)}**\n\n{markdown_table(table)}"


def fill(page: Path, name: str, content: str) -> None:
    text = page.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    assert rest, f"{page} has no part {name}"
    page.write_text(f"{before}{start}\n{content}\n{end}{after}", encoding="utf-8")


def main() -> None:
    if any(word.startswith("-") for word in sys.argv[1:]) or len(sys.argv) > 2:
        print(__doc__)
        return
    fill(ROOT / "README.md", "first", first_part())
    fill(DOCS / "stabilizers" / "README.md", "stabilizers", stabilizer_table())
    if len(sys.argv) > 1:
        fill(DOCS / "results.md", "results", results_part(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
