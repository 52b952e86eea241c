"""The command `reproduce NAME`: a paper's claims, tested. Shows the plan, makes the runs, ends with the verdicts."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stability_lab.compare.tables import MISSING, Table, text_table
from stability_lab.config import ConfigError, Parser
from stability_lab.disk.files import replace_file
from stability_lab.reproduction.catalogue import SCALES, Part, Reproduction, claims_of, find, reproductions
from stability_lab.reproduction.claims import judge
from stability_lab.reproduction.datafile import DATA, FIGURES, data_path, read
from stability_lab.reproduction.page import Found, claim_table, load, lost, page, runs_missing
from stability_lab.text import shown

if TYPE_CHECKING:
    from stability_lab.reproduction.jobs import Sweep
    from stability_lab.run.cost import Timing

OUT = Path("outputs/reproduction")
PLAN_HEADER = ("part", "runs", "there", "parameters", "tokens a run", "ETA", "at most", "known from")
STOPPED = (130, 143)


@dataclass(frozen=True)
class PartPlan:
    """Of a part: its row of the table, and the seconds that what is left will take, None where they are not known."""

    row: tuple[str, ...]
    seconds: float | None
    here: bool  # known from what this machine does
    sweeps: list[Sweep] = field(default_factory=list)
    faults: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.name is None:
        if len(argv):
            raise ConfigError(
                f"reproduce {' '.join(argv)}: name what to reproduce: one of {', '.join(reproductions())}"
            )
        print(_listing())
        return 0
    reproduction = find(args.name)
    asked = reproduction.select(args.part)
    parts = _having(reproduction, asked, args.part, args.scale)
    if args.report_only:
        return _report_only(reproduction, parts, args.scale, args.out)
    _check_output(reproduction, parts, args.scale, args.out, touch=not args.dry_run)
    timings: dict[str, Timing] = {}
    plans = {part.part: _plan(part, args.scale, args.out, timings) for part in parts}
    left_out = [part.part for part in asked if part not in parts]
    print(_plan_text(args.name, args.scale, plans, left_out, with_commands=args.dry_run), flush=True)
    for plan in plans.values():
        for fault in plan.faults:
            print(fault, file=sys.stderr)
    if args.dry_run:
        return 0
    code, made = 0, []
    for part in parts:
        code = max(code, _make(part, args.scale, plans[part.part].sweeps, args.out))
        if code in STOPPED:
            break
        made.append(part)
    if made or code not in STOPPED:
        _publish(reproduction, made, args.scale, args.out, load(reproduction, args.out))
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="stability_lab reproduce",
        description="Tests the claims of a paper, or of teaching texts: shows plan and time, makes the runs that are "
        "not there yet through `train -m` (below outputs/reproduction), and ends with a table of verdicts. Without "
        "NAME it lists what there is.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("--part", metavar="P", help="one part instead of all (textbook: instead of its numbers)")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="size of the runs (default: cpu)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="only show commands, sizes and time")
    how.add_argument("--report-only", action="store_true", help="only rebuild the page from the data in DIR")
    parser.add_argument(
        "--out", type=_folder, default=OUT, metavar="DIR", help=f"for page, data and figures (default: {OUT})"
    )
    return parser


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("give a folder, '.' for this one")
    return Path(text)


def _listing() -> str:
    rows = []
    for reproduction in reproductions().values():
        for part in reproduction.parts.values():
            bundle = next((name for name, parts in reproduction.bundles.items() if part.part in parts), MISSING)
            n = str(len(claims_of(part)))
            rows.append((reproduction.name, part.part, bundle, n, " ".join(part.scales), part.question))
    header = ("name", "part", "bundle", "claims", "scales", "question")
    notes = ("python -m stability_lab reproduce NAME [--part PART or BUNDLE] [--scale SCALE] [--dry-run]",)
    return text_table(Table("What can be reproduced", header, tuple(rows), notes))


def _having(reproduction: Reproduction, parts: Sequence[Part], asked: str | None, scale: str) -> list[Part]:
    """The parts that have this scale. ConfigError where the one that was asked for has not, or none has."""
    having = [part for part in parts if scale in part.scales]
    if having and asked not in reproduction.parts:
        return having
    if len(parts) > 1 and not having:
        names = f"{reproduction.name} {', '.join(part.part for part in parts)}"
        raise ConfigError(f"--scale {scale}: none of {names} has this size")
    try:
        for part in parts:
            part.at(scale)
    except ConfigError as error:
        with_it = {name for name, part in reproduction.parts.items() if scale in part.scales}
        bundles = [name for name, names in reproduction.bundles.items() if with_it & set(names)]
        words = " or ".join([*bundles, *sorted(with_it)][:2])
        raise ConfigError(f"{error}" + (f"; --part {words} has it" if words else "")) from None
    return having


def _check_output(reproduction: Reproduction, parts: Sequence[Part], scale: str, out: Path, touch: bool) -> None:
    """Before any run: a table that cannot be written must not cost hours. With `touch` the folders are made."""
    _check_paths(reproduction, parts, scale, out)
    new = {(part.part, scale) for part in parts}
    _check_page(reproduction, out, {*load(reproduction, out, without=new), *new})
    for folder in (out, out / DATA, out / FIGURES) if touch else ():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _unwritable(out, error) from error


def _check_paths(reproduction: Reproduction, parts: Sequence[Part], scale: str, out: Path) -> None:
    figures = [out / FIGURES / data_path(part, scale, out).stem for part in parts]
    try:
        files = [path for path in (*out.parents, out, out / DATA, out / FIGURES, *figures) if not path.is_dir()]
        files = [path for path in files if path.exists()]
    except OSError as error:
        raise ConfigError(f"--out {shown(out)}: {error.strerror}: give another folder") from error
    if files:
        raise ConfigError(f"--out {shown(out)}: {shown(files[0])} is a file: give a folder")
    for path in (_page_path(reproduction, out), *(data_path(part, scale, out) for part in parts)):
        if path.is_dir():
            raise ConfigError(f"--out {shown(out)}: {shown(path)} is a folder, where a file is to be written")


def _check_page(reproduction: Reproduction, out: Path, found: Collection[tuple[str, str]]) -> None:
    """ConfigError where the page that is there shows what `found` could not make again."""
    path = _page_path(reproduction, out)
    if path.exists() and (gone := lost(path.read_text(encoding="utf-8", errors="replace"), found)):
        raise ConfigError(
            f"--out {shown(out)}: {shown(path)} shows {', '.join(gone)}, of which {shown(out / DATA)} has no data: put "
            "them back, or move the page away"
        )


def _unwritable(out: Path, error: OSError) -> ConfigError:
    name = shown(error.filename or out)
    return ConfigError(f"--out {shown(out)}: {name} cannot be written: {error.strerror}: give another folder")


def _report_only(reproduction: Reproduction, parts: Sequence[Part], scale: str, out: Path) -> int:
    _check_paths(reproduction, parts, scale, out)
    if not out.is_dir():
        raise ConfigError(f"--out {shown(out)}: there is no such folder; leave out --report-only to make the runs")
    found = load(reproduction, out)
    if not found:
        raise ConfigError(
            f"--out {shown(out)}: {shown(out / DATA)} holds no data of {reproduction.name}: give the folder that has "
            "them, or leave out --report-only to make the runs"
        )
    _publish(reproduction, parts, scale, out, found)
    return 0


def _page_path(reproduction: Reproduction, out: Path) -> Path:
    return out / f"{reproduction.name}.md"


def _plan(part: Part, scale: str, out: Path, timings: dict[str, Timing]) -> PartPlan:
    minutes = part.at(scale).minutes
    limit = MISSING if minutes is None else f"{minutes:g} min"
    if part.compute is not None:
        seconds = _seconds(part, scale, out)
        eta, how = (MISSING, "computed anew") if seconds is None else (_duration(seconds), "as long as last time")
        return PartPlan((part.part, "computed", MISSING, MISSING, MISSING, eta, limit, how), seconds, True)
    from stability_lab.reproduction import jobs

    made = jobs.sweeps(part, scale)
    there = jobs.there(part, scale, made)
    every = [job for sweep in made for job in sweep.jobs]
    sizes = sorted({jobs.flops_and_parameters(sweep.jobs[0])[1] for sweep in made})
    tokens = sorted({jobs.tokens_of(job) for job in every})
    estimate = jobs.estimate(made, there, jobs.workers_of(part, scale), scale, timings)
    counts = str(len(every)), str(len(there.runs)), _span(sizes), _span(tokens)
    row = (part.part, *counts, _duration(estimate.seconds), limit, estimate.how)
    return PartPlan(row, estimate.seconds, estimate.here, made, tuple(there.faults.values()))


def _seconds(part: Part, scale: str, out: Path) -> float | None:
    """What computing a part took the last time; None where its data do not say."""
    try:
        return read(data_path(part, scale, out), part, scale).head["seconds"]
    except ConfigError:
        return None


def _plan_text(
    name: str, scale: str, plans: Mapping[str, PartPlan], left_out: Sequence[str], with_commands: bool
) -> str:
    rows = tuple(plan.row for plan in plans.values())
    total = sum(plan.seconds or 0.0 for plan in plans.values())
    words = [f"total {_duration(total)}"]
    if total and all(plan.here for plan in plans.values()):
        words.append("on a machine as busy as now")
    if unknown := [part for part, plan in plans.items() if plan.seconds is None]:
        words.append(f"not counting {', '.join(unknown)}")
    blocks = [text_table(Table(f"{name} at scale {scale}", PLAN_HEADER, rows)), ", ".join(words)]
    if left_out:
        blocks.append(f"left out, since they have not this scale: {', '.join(left_out)}")
    if with_commands:
        blocks += [sweep.command for plan in plans.values() for sweep in plan.sweeps]
    return "\n".join(blocks)


def _make(part: Part, scale: str, made: Sequence[Sweep], out: Path) -> int:
    """Run or compute a part and write its data; an exit code."""
    from stability_lab.reproduction import jobs
    from stability_lab.reproduction.collect import collect, compute

    code = _run(part, scale, made)
    if code in STOPPED:
        n = len(jobs.there(part, scale, made).runs)
        told = f"stopped: {n} of {len(part.runs_at(scale))} runs of {part.part} are there; the same command goes on"
    else:
        try:
            told = collect(part, scale, made, out) if part.compute is None else compute(part, scale, out)
        except OSError as error:
            raise _unwritable(out, error) from error
    if told:
        print(told, file=sys.stderr)
    return code or int(bool(told))


def _run(part: Part, scale: str, made: Sequence[Sweep]) -> int:
    """The highest exit code of the sweeps that have something left to do; none after one that was stopped."""
    from stability_lab.commands.train import main as train
    from stability_lab.reproduction.jobs import there

    code = 0
    for sweep in made:
        if not there(part, scale, [sweep]).left([sweep]):
            continue
        print(sweep.command, flush=True)
        code = max(code, train(sweep.words))
        if code in STOPPED:
            break
    return code


def _publish(reproduction: Reproduction, parts: Sequence[Part], scale: str, out: Path, found: Found) -> None:
    """The page, from the data files; and the claims of what was made on the terminal. No page without any data."""
    path = _page_path(reproduction, out)
    if found:
        _check_page(reproduction, out, found)
        try:
            replace_file(path, page(reproduction, found))
        except OSError as error:
            raise _unwritable(out, error) from error
    for part in parts:
        evidence = found.get((part.part, scale))
        table = claim_table(part, scale, judge(part, claims_of(part), evidence))
        # Sources and caveats need the page's width.
        rows = tuple(row[:-1] for row in table.rows)
        missing = runs_missing(part, scale, evidence)
        print(text_table(Table(table.title, table.header[:-1], rows, (missing,) if missing else ())), end="\n\n")
    print(f"written: {shown(path)}" if found else f"no data yet, so {shown(path)} is not written")


def _span(values: Sequence[int]) -> str:
    words = [_short(value) for value in (values[0], values[-1])]
    return words[0] if words[0] == words[1] else " to ".join(words)


def _short(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
