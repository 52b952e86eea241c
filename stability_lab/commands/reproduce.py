"""The command `reproduce NAME` tests a paper's claims: it shows the plan, makes the runs and ends with the verdicts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stability_lab.config import ConfigError, Parser
from stability_lab.disk.files import replace_file
from stability_lab.reproduction.catalogue import SCALES, Part, Reproduction, claims_of, find, reproductions
from stability_lab.reproduction.claims import decide
from stability_lab.reproduction.datafile import DATA, FIGURES
from stability_lab.reproduction.page import Found, claim_table, load, lost, page, runs_missing
from stability_lab.text import MISSING, Table, duration, next_command, room, shown, text_table

if TYPE_CHECKING:
    from stability_lab.reproduction.collect import Keep
    from stability_lab.reproduction.jobs import Sweep
    from stability_lab.run.cost import Timing

OUT = Path("outputs/reproduction")
PLAN_LEAST = ("at most", "tokens a run", "there")
PLAN_HEADER = ("part", "runs", "there", "parameters", "tokens a run", "ETA", "at most", "known from")
STOPPED = (130, 143)


class PartPlan(NamedTuple):
    """The row of a part in the table, and the seconds that its missing runs will take."""

    row: tuple[str, ...]
    seconds: float = 0.0
    here: bool = True  # known from what this machine does
    sweeps: Sequence[Sweep] = ()


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    width = room(args.wide)
    if args.name is None:
        if [word for word in argv if word != "--wide"]:
            raise ConfigError(f"reproduce {' '.join(argv)}: name one of {', '.join(reproductions())}")
        print(_listing(width))
        print(next_command("reproduce", next(iter(reproductions())), "--dry-run"))
        return 0
    reproduction = find(args.name)
    parts, lacking = reproduction.select(args.part, args.scale)
    known = load(reproduction, args.out)
    if args.report_only:
        if not known:
            raise ConfigError(
                f"--out {shown(args.out)}: {shown(args.out / DATA)} holds no data of {args.name}: give the folder that "
                "has them, or leave out --report-only to make the runs"
            )
        _publish(reproduction, parts, args, known, width)
        return 0
    timings: dict[str, Timing] = {}
    plans = [_plan(part, args.scale, timings) for part in parts]
    show_plans(f"{args.name} at scale {args.scale}", plans, width)
    if lacking:
        print(f"left out, since they lack this scale: {', '.join(lacking)}")
    if args.dry_run:
        print("\n".join(sweep.command for plan in plans for sweep in plan.sweeps))
        print(next_command("reproduce", *(word for word in argv if word != "--dry-run")))
        return 0
    code, made = make(parts, args.scale, plans, args.out)
    if made:
        _publish(reproduction, made, args, load(reproduction, args.out), width)
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="stability_lab reproduce",
        description="Tests the claims of a paper, or of teaching texts: shows plan and time, makes the runs that are "
        "missing through `train -m` (below outputs/reproduction), and ends with a table of verdicts. Without NAME it "
        "lists all reproductions.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("--part", metavar="P", help="one part instead of all (textbook: instead of its numbers)")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="size of the runs (default: cpu)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="only show commands, sizes and time")
    how.add_argument("--report-only", action="store_true", help="only rebuild the page from the data in DIR")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help=f"for page, data, figures (default: {OUT})"
    )
    parser.add_wide()
    return parser


def _listing(width: int | None) -> str:
    rows = []
    for reproduction in reproductions().values():
        for part in reproduction.parts.values():
            bundle = next((name for name, parts in reproduction.bundles.items() if part.part in parts), MISSING)
            n = str(len(claims_of(part)))
            rows.append((reproduction.name, part.part, bundle, n, " ".join(part.scales), part.question))
    header = ("name", "part", "bundle", "claims", "scales", "question")
    notes = ("python -m stability_lab reproduce NAME [--part PART or BUNDLE] [--scale SCALE] [--dry-run]",)
    table = Table("What can be reproduced", header, tuple(rows), notes, ("bundle", "scales", "claims"))
    return text_table(table, width)


def unwritable(out: Path, error: OSError) -> ConfigError:
    name = shown(error.filename or out)
    return ConfigError(f"--out {shown(out)}: {name} cannot be written: {error.strerror}: give another folder")


def _plan(part: Part, scale: str, timings: dict[str, Timing]) -> PartPlan:
    if part.compute is not None:
        minutes = part.scales[scale].minutes
        limit = MISSING if minutes is None else f"{minutes:g} min"
        return PartPlan((part.part, "computed", *[MISSING] * 4, limit, MISSING))
    from stability_lab.reproduction import jobs

    return plan_of(part, scale, jobs.sweeps(part, scale), timings)


def plan_of(part: Part, scale: str, made: Sequence[Sweep], timings: dict[str, Timing]) -> PartPlan:
    """The row of a part that is trained by these sweeps; `timings` keeps measurements for other parts."""
    from stability_lab.reproduction import jobs

    minutes = part.scales[scale].minutes
    limit = MISSING if minutes is None else f"{minutes:g} min"
    done = jobs.finished(part, scale, made)
    left = jobs.unfinished(made, done)
    sizes = sorted({jobs.flops_and_parameters(sweep.jobs[0])[1] for sweep in made})
    tokens = sorted({jobs.tokens_of(sweep.jobs[0]) for sweep in made})
    estimate = jobs.estimate(left, done, jobs.workers_of(part, scale), timings)
    counts = str(len(left) + len(done)), str(len(done)), _span(sizes), _span(tokens)
    row = (part.part, *counts, duration(estimate.seconds), limit, estimate.how)
    return PartPlan(row, estimate.seconds, estimate.here, made)


def show_plans(title: str, plans: Sequence[PartPlan], width: int | None) -> None:
    print(text_table(Table(title, PLAN_HEADER, tuple(plan.row for plan in plans), least=PLAN_LEAST), width))
    total = sum(plan.seconds for plan in plans)
    busy = ", on a machine as busy as now" if total and all(plan.here for plan in plans) else ""
    print(f"total {duration(total)}{busy}", flush=True)


def make(
    parts: Sequence[Part], scale: str, plans: Sequence[PartPlan], out: Path, keep: Keep | None = None
) -> tuple[int, list[Part]]:
    """Make all parts as planned: the highest exit code, and the parts that were not stopped. `keep` makes what is kept
    of a run; None: what claims use."""
    try:  # a table that cannot be written must not cost hours
        for folder in (DATA, FIGURES):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from error
    code, made = 0, []
    for part, plan in zip(parts, plans, strict=True):
        code = max(code, _make(part, scale, plan.sweeps, out, keep))
        if code in STOPPED:
            break
        made.append(part)
    return code, made


def _make(part: Part, scale: str, made: Sequence[Sweep], out: Path, keep: Keep | None) -> int:
    """Run or compute a part and write its data. The highest exit code of the sweeps that had something left to do."""
    from stability_lab.commands.train import main as train
    from stability_lab.reproduction import jobs
    from stability_lab.reproduction.collect import collect, compute, usual

    code = 0
    for sweep in made:
        if not jobs.unfinished([sweep], jobs.finished(part, scale, [sweep])):
            continue
        print(sweep.command, flush=True)
        code = max(code, train(sweep.words, ends=False))
        if code in STOPPED:
            n, planned = len(jobs.finished(part, scale, made)), len(part.runs_at(scale))
            words = f"stopped: {n} of {planned} runs of {part.part} are there; the same command goes on"
            print(words, file=sys.stderr)
            return code
    try:
        if part.compute is not None:
            compute(part, scale, out)
        elif fault := collect(part, scale, made, out, keep or usual):
            print(fault, file=sys.stderr)
            code = code or 1
    except OSError as error:
        raise unwritable(out, error) from error
    return code


def _publish(
    reproduction: Reproduction, parts: Sequence[Part], args: argparse.Namespace, found: Found, width: int | None
) -> None:
    """Write the page from the data files, if there are any, and print the claims of `parts`."""
    scale, out = args.scale, args.out
    path = out / f"{reproduction.name}.md"
    try:
        if path.exists() and (gone := lost(path.read_text(encoding="utf-8", errors="replace"), found)):
            raise ConfigError(
                f"{shown(path)} shows {', '.join(gone)}, of which {shown(out / DATA)} has no data: put them back, or "
                "move the page away"
            )
        if found:
            replace_file(path, page(reproduction, found))
    except OSError as error:
        raise unwritable(out, error) from error
    for part in parts:
        evidence = found.get((part.part, scale))
        table = claim_table(part, scale, decide(part, claims_of(part), evidence))
        missing = runs_missing(part, scale, evidence)
        print(text_table(replace(table, notes=(missing,) if missing else ()), width), end="\n\n")
    print(f"written: {shown(path)}" if found else f"no data yet, so {shown(path)} is not written")
    print(next_command(*_next(parts, args)))


def _next(parts: Sequence[Part], args: argparse.Namespace) -> list[str]:
    """The runs that are here are compared; those that are not are planned."""
    from stability_lab.reproduction.jobs import RUNS, group_of

    folders = [Path(RUNS) / group_of(part, args.scale) for part in parts if part.compute is None]
    there = [str(folder) for folder in folders if folder.is_dir()]
    part = ["--part", args.part] if args.part else []
    return ["compare", there[0]] if there else ["reproduce", args.name, *part, "--scale", args.scale, "--dry-run"]


def _span(values: Sequence[int]) -> str:
    words = [_short(value) for value in (values[0], values[-1])]
    return words[0] if words[0] == words[1] else " to ".join(words)


def _short(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"
