"""The command `compare PATH...`: from a sweep to a decision."""

from __future__ import annotations

import argparse
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stability_lab.compare import text_report as report
from stability_lab.compare.comparison import Comparison, compare
from stability_lab.compare.figures import FORMATS, draw
from stability_lab.compare.run_record import RunRecord, find_runs, of_seeds
from stability_lab.compare.suggest import suggest
from stability_lab.config import ConfigError, Parser
from stability_lab.text import next_command, room, shown

REMOTE = "wandb://"


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    command = shlex.join(["python", "-m", "stability_lab", "compare", *argv])
    _check_output(args)
    paths = [path for given in args.paths for path in _local(given)]
    runs, faults = find_runs(paths)
    runs = of_seeds(runs, args.seeds) if args.seeds else runs
    by = [key for given in args.by for key in given.split(",")]
    comparison = compare(runs, args.metric, by, args.baseline, faults)
    width = room(args.wide) if args.out is None else None
    made = _render(args.format, comparison, command, width)
    if args.suggest and args.format == "table":
        made += "\n\n" + "\n".join(["Next", *suggest(comparison, args.paths)])
    figures = draw(comparison, args.figures, args.figure_format) if args.figures else []
    if args.out is None:
        print(made)
    else:
        _write(args.out, made)
        print(f"written: {shown(args.out)}")
    if args.figures and args.format == "table":
        print(f"figures: {', '.join(map(shown, figures)) or 'none, because the runs hold nothing that can be drawn'}")
    if args.wandb:
        print(_publish(comparison, runs, figures, command))
    if args.format == "table" and not args.suggest:
        # In front, since behind a `--` it would be a path; a second publication is not meant.
        print(next_command("compare", "--suggest", *(word for word in argv if word != "--wandb")))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="stability_lab compare",
        description="Compares runs: groups them by config minus seed, checks that they may be compared, and says what "
        "each arm gains and costs, with intervals.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="folders of runs or sweeps, or wandb://entity/project")
    parser.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="KEY",
        help="what the arms differ in (default: the stabilizers); further keys after a comma, or by a second --by",
    )
    parser.add_argument("--baseline", metavar="ARM", help="the arm that the others are compared with (default: none)")
    parser.add_argument(
        "--metric", default="val/loss", metavar="NAME", help="a final value, or a number of summary.json by its path"
    )
    parser.add_argument(
        "--seeds", type=read_seeds, metavar="SEEDS", help="runs of these seeds alone, such as 3-7 or 0,1,5"
    )
    parser.add_argument("--format", choices=("table", "md", "latex", "csv", "json"), default="table")
    parser.add_wide()
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there instead of to the terminal")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw the figures into this folder")
    parser.add_argument(
        "--figure-format",
        choices=FORMATS,
        action="append",
        metavar="FORMAT",
        help="png (default), svg or pdf; may be repeated",
    )
    parser.add_argument("--suggest", action="store_true", help="print the commands for the next runs")
    parser.add_argument("--wandb", action="store_true", help="make a workspace and a report in Weights & Biases")
    return parser


_MOST_SEEDS = 10_000


def read_seeds(given: str) -> frozenset[int]:
    found: set[int] = set()
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{given!r}: give seeds such as 3-7 or 0,1,5")
        if len(first) > 18 or len(last) > 18 or int(last or first) - int(first) >= _MOST_SEEDS:
            raise argparse.ArgumentTypeError(f"{given!r}: a range of over {_MOST_SEEDS:,} seeds")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _check_output(args: argparse.Namespace) -> None:
    """Before anything is read: a table that cannot be written must not cost a minute of work."""
    if args.out is not None:
        if args.out.is_dir():
            raise ConfigError(f"--out {shown(args.out)} is a folder: give the name of a file")
        if not args.out.parent.is_dir():
            raise ConfigError(f"--out {shown(args.out)}: the folder {shown(args.out.parent)} does not exist")
    if args.figures is not None and args.figures.exists() and not args.figures.is_dir():
        raise ConfigError(f"--figures {shown(args.figures)} is a file: give a folder")
    if args.figure_format and args.figures is None:
        raise ConfigError("--figure-format says how figures are drawn: add --figures DIR")
    if args.suggest and args.format != "table":
        raise ConfigError(f"--suggest prints commands for people: leave out --format {args.format}")


def _local(given: str) -> list[Path]:
    if not given.startswith(REMOTE):
        return [Path(given)]
    from stability_lab.data.tokens.memmap import cache_dir
    from stability_lab.tracking.wandb.api import fetch

    return fetch(given, cache_dir() / "wandb")


def _render(name: str, comparison: Comparison, command: str, width: int | None) -> str:
    if name == "json":
        return report.to_json(comparison, command)
    if name == "table":
        return report.text(comparison, width).rstrip()
    return {"md": report.markdown, "latex": report.latex, "csv": report.csv}[name](comparison).rstrip()


def _write(path: Path, made: str) -> None:
    try:
        path.write_text(made + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {shown(path)} cannot be written: {error.strerror}") from error


def _publish(comparison: Comparison, runs: Sequence[RunRecord], figures: Sequence[Path], command: str) -> str:
    from stability_lab.tracking.wandb.environment import project_of
    from stability_lab.tracking.wandb.workspace import Page, publish

    usual = project_of(os.environ)
    found = Counter(
        (tracking.get("entity"), str(tracking.get("project") or usual))
        for run in runs
        if isinstance(tracking := run.config.get("tracking"), dict)
    )
    (entity, project), _ = found.most_common(1)[0] if found else ((None, usual), 0)
    page = Page(
        title=f"{', '.join(comparison.grouping.by)} on {comparison.metric}",
        command=command,
        markdown=report.markdown(comparison),
        groups=sorted({str(run.manifest.get("group") or run.path.parent.name) for run in runs}),
        metric=comparison.metric,
        by=comparison.grouping.by,
        project=project,
        entity=entity,
    )
    return publish(page, figures)
