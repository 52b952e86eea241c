"""The command `stabilizers`: what there is to choose from, read from the YAML files and the source of their classes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stability_lab.config import ConfigError, Parser
from stability_lab.plugins.option_files import class_text, options
from stability_lab.plugins.trust import PACKAGE, is_trusted
from stability_lab.text import MISSING, Table, did_you_mean, next_command, room, shown, text_table

_COLUMNS = ("name", "seam", "parameters", "what it does")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab stabilizers",
        description="Table of all stabilizers: name, seam, parameters with their defaults. With a name: its equation, "
        "why it helps, its papers and options. Select with +stabilizer=NAME, several with '+stabilizer=[A,B]'.",
    )
    parser.add_argument("name", nargs="?", help="one of them")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder of configs of your own, as for train")
    parser.add_argument("--allow", metavar="PACKAGE", help="a package of your own in which their classes are")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_wide()
    args = parser.parse_args(argv)
    rows = list(stabilizers(args.config_dir))
    if args.name is not None:
        named = [row for row in rows if row["name"] == args.name]
        if not named:
            known = [row["name"] for row in rows]
            raise ConfigError(f"{args.name} is not a stabilizer: {did_you_mean(args.name, known)}")
        rows = named
    if args.format == "json":
        print(json.dumps(rows, indent=2))
    else:
        print("\n\n".join(map(_page, rows)) if args.name is not None else _table(rows, room(args.wide)))
        print(next_command("train", f"+stabilizer={args.name}") if args.name else next_command("stabilizers", "qknorm"))
    return 0


def stabilizers(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """One row an option of the group `stabilizer`, `none` first, then ours and those of other packages and `folder`."""
    for file, node in sorted(options("stabilizer", folder), key=lambda option: option[0].stem != "none"):
        target = str(node.get("_target_", f"{PACKAGE}.none"))
        text = class_text(target)
        yield {
            "name": file.stem,
            "package": target.partition(".")[0],
            "trusted": is_trusted(target),
            "seams": text.seams(),
            "parameters": {key: _yaml(value) for key, value in node.items() if key != "_target_"},
            "paper": text.constants.get("paper", "-"),
            "summary": text.constants.get("summary", "-" if node else "the baseline: no stabilizer"),
            "docstring": text.docstring,
            "file": str(file),
        }


def _table(rows: Sequence[Mapping[str, Any]], width: int | None) -> str:
    cells = tuple(
        (
            row["name"],
            ", ".join(row["seams"]) or MISSING,
            " ".join(f"{key}={value}" for key, value in row["parameters"].items()) or MISSING,
            row["summary"] + ("" if row["package"] == PACKAGE else f" ({_whose(row)})"),
        )
        for row in rows
    )
    return text_table(Table("", _COLUMNS, cells, least=("parameters", "seam")), width)


def _whose(row: Mapping[str, Any]) -> str:
    return f"of {row['package']}" + ("" if row["trusted"] else f", needs --allow {row['package']}")


def _page(row: Mapping[str, Any]) -> str:
    yaml = Path(row["file"]).read_text(encoding="utf-8").rstrip()
    parts = [f"{row['name']}: {row['summary']} ({_whose(row)})", row["docstring"] or row["summary"]]
    text = "\n\n".join([*parts, f"{row['file']}\n{yaml}"])
    return "\n".join(map(shown, text.splitlines()))


def _yaml(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
