"""Fills the generated parts of README.md: the table of stabilizers and, from a sweep's folder, the comparison.

python scripts/readme.py                  the table of stabilizers
python scripts/readme.py SWEEP            also the comparison, with docs/images/comparison.png
"""

import sys
from pathlib import Path

from stability_lab.analysis.figures import against_learning_rate
from stability_lab.analysis.runs import find_runs
from stability_lab.analysis.tables import comparison, markdown
from stability_lab.listing import stabilizers

ROOT = Path(__file__).resolve().parent.parent


def stabilizer_table() -> str:
    lines = ["| name | seam | parameters | attention | papers | what it does |", "|---|---|---|---|---|---|"]
    for row in stabilizers():
        parameters = " ".join(f"{key}={value}" for key, value in row["parameters"].items())
        cells = [
            f"[{row['name']}](docs/stabilizers/{row['name']}.md)",
            ", ".join(f"`{seam}`" for seam in row["seams"]) or "–",
            f"`{parameters}`" if parameters else "–",
            row["attention"],
            row["paper"] if row["paper"] != "-" else "–",
            row["summary"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparison_part(sweep: Path) -> str:
    table = comparison(find_runs([sweep]))
    image = ROOT / "docs" / "images" / "comparison.png"
    image.parent.mkdir(exist_ok=True)
    against_learning_rate(table, image)
    shown = table.drop(columns=["seed"])
    picture = "![Validation loss and largest attention logit over learning rate](docs/images/comparison.png)"
    return f"{picture}\n\n{markdown(shown)}"


def fill(text: str, name: str, content: str) -> str:
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    assert rest, f"README.md has no part {name}"
    return f"{before}{start}\n{content}\n{end}{after}"


def main() -> None:
    readme = ROOT / "README.md"
    text = fill(readme.read_text(encoding="utf-8"), "stabilizers", stabilizer_table())
    if len(sys.argv) > 1:
        text = fill(text, "comparison", comparison_part(Path(sys.argv[1])))
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
