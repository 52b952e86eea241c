"""The command `stabilizers`: what there is to choose from, read from the YAML files and their classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stability_lab.config import Parser, config_dir


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab stabilizers",
        description="Table of all stabilizers: name, seam, parameters with their defaults, papers, attention path. "
        "Select with +stabilizer=NAME, several with '+stabilizer=[A,B]'.",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    args = parser.parse_args(argv)
    rows = stabilizers()
    if args.format == "json":
        print(json.dumps(rows, indent=2))
        return 0
    headers = ("name", "seam", "parameters", "attention", "papers", "what it does")
    cells = [
        (
            row["name"],
            ", ".join(row["seams"]) or "-",
            " ".join(f"{key}={value}" for key, value in row["parameters"].items()) or "-",
            row["attention"],
            row["paper"],
            row["summary"],
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [headers, *cells]) for i in range(len(headers))]
    for line in [headers, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def stabilizers() -> list[dict[str, Any]]:
    """One row an option of the group `stabilizer`, `none` first."""
    import yaml

    from stability_lab.build import fill_seams
    from stability_lab.model.attention import choose_backend
    from stability_lab.plugins.instantiate import instantiate

    rows = []
    for path in sorted((config_dir() / "stabilizer").glob("*.yaml"), key=lambda p: (p.stem != "none", p.stem)):
        options = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        built = [instantiate(node, f"stabilizer.{name}") for name, node in options.items()]
        seams = fill_seams(built)
        node = options.get(path.stem, {})
        rows.append(
            {
                "name": path.stem,
                "seams": list(seams.owners),
                "parameters": {key: _yaml(value) for key, value in node.items() if key != "_target_"},
                "attention": choose_backend("auto", seams).name,
                "paper": built[0].paper if built else "-",
                "summary": built[0].summary if built else "the baseline: pre-norm LayerNorm, no stabilizer",
            }
        )
    return rows


def _yaml(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
