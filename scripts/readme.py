"""Fills the generated parts of README.md: the table of stabilizers and, from a sweep's folder, the comparison.

python scripts/readme.py                  the table of stabilizers
python scripts/readme.py SWEEP            also the comparison and its three pictures in docs/images
"""

import shutil
import sys
import tempfile
from pathlib import Path

from stability_lab.commands.stabilizers import stabilizers
from stability_lab.compare.comparison import compare
from stability_lab.compare.decision import decision
from stability_lab.compare.figures import draw
from stability_lab.compare.run_record import find_runs
from stability_lab.compare.tables import Table, escape_markdown, markdown_table
from stability_lab.compare.text_report import tables

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {"decision": "decision", "loss_over_lr": "comparison", "curves": "curves"}
ALT = {
    "loss_over_lr": "Validation loss and largest attention logit over learning rate, for each stabilizer",
    "curves": "Training loss and gradient norm over steps at the highest learning rate, for each stabilizer",
}


def stabilizer_table() -> str:
    rows = []
    for row in stabilizers():
        parameters = " ".join(f"{key}={value}" for key, value in row["parameters"].items())
        cells = [
            f"[{row['name']}](docs/stabilizers/{row['name']}.md)",
            ", ".join(f"`{seam}`" for seam in row["seams"]) or "–",
            f"`{parameters}`" if parameters else "–",
            row["paper"] if row["paper"] != "-" else "–",
            row["summary"],
        ]
        rows.append("| " + " | ".join(cells) + " |")
    head = "| name | seam | parameters | papers | what it does |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def comparison_part(sweep: Path) -> str:
    comparison = compare(find_runs([sweep])[0])
    with tempfile.TemporaryDirectory() as folder:
        for path in draw(comparison, Path(folder), only=tuple(IMAGES)):
            shutil.copy(path, ROOT / "docs" / "images" / f"{IMAGES[path.stem]}.png")
    made = {table.title: table for table in tables(comparison)}
    parts = [f"![{ALT['loss_over_lr']}](docs/images/comparison.png)"]
    parts += [_titled(made[title]) for title in ("Loss", "Learning rates", "Stability and cost")]
    parts.append("**Decision**\n\n" + "\n".join(f"- {escape_markdown(line)}" for line in decision(comparison)))
    parts.append(f"![{ALT['curves']}](docs/images/curves.png)")
    return "\n\n".join(parts)


def _titled(table: Table) -> str:
    return f"**{escape_markdown(table.title)}**\n\n{markdown_table(table)}"


def fill(text: str, name: str, content: str) -> str:
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    assert rest, f"README.md has no part {name}"
    return f"{before}{start}\n{content}\n{end}{after}"


def main() -> None:
    if any(word.startswith("-") for word in sys.argv[1:]) or len(sys.argv) > 2:
        print(__doc__)
        return
    readme = ROOT / "README.md"
    text = fill(readme.read_text(encoding="utf-8"), "stabilizers", stabilizer_table())
    if len(sys.argv) > 1:
        text = fill(text, "comparison", comparison_part(Path(sys.argv[1])))
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
