"""The command `reproduce NAME`: a paper's claims, tested. Shows the plan, makes the runs, ends with the verdicts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability_lab.analysis.sources import shown
from stability_lab.analysis.tables import MISSING, Table, text_table
from stability_lab.config import ConfigError, Parser
from stability_lab.reproduction.catalogue import SCALES, Part, Reproduction, claims_of, find, reproductions
from stability_lab.reproduction.claims import judge
from stability_lab.reproduction.evidence import Evidence, by_delta, file_name, small, write
from stability_lab.reproduction.report import claim_table, load, page

if TYPE_CHECKING:
    from stability_lab.analysis.runs import RunRecord
    from stability_lab.cost import Timing
    from stability_lab.reproduction.evidence import Run
    from stability_lab.reproduction.jobs import Sweep

OUT = Path("outputs/reproduction")
DATA, FIGURES = "data", "figures"
PLAN_HEADER = ("part", "runs", "there", "parameters", "tokens a run", "ETA", "at most", "known from")
STOPPED = (130, 143)
# Of a part: its sweeps, its row of the table, and the seconds that the runs left will take.
Plan = tuple[list["Sweep"], tuple[str, ...], float]


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
    parts = _parts(reproduction, args.part, args.scale)
    if args.report_only:
        return _report_only(reproduction, parts, args)
    _check_output(args.out)
    timings: dict[str, Timing] = {}
    plans = {part.part: _plan(part, args.scale, timings) for part in parts}
    print(_plan_text(parts, args.scale, plans, with_commands=args.dry_run), flush=True)
    if args.dry_run:
        return 0
    code = 0
    for part in parts:
        made = plans[part.part][0]
        code = max(code, _run(part, args.scale, made))
        if code in STOPPED:
            print("stopped: the same command goes on from here", file=sys.stderr)
            break
        code = max(code, _collect(part, args.scale, made, args.out))
    _publish(reproduction, parts, args.scale, args.out)
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
        "--out", type=Path, default=OUT, metavar="DIR", help=f"for page, data and figures (default: {OUT})"
    )
    return parser


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


def _parts(reproduction: Reproduction, asked: str | None, scale: str) -> list[Part]:
    """ConfigError where a part that was asked for has not that scale, or none has."""
    parts = reproduction.select(asked)
    having = [part for part in parts if scale in part.scales]
    if asked in reproduction.parts or not having:
        for part in parts:
            part.at(scale)
    return having


def _check_output(out: Path) -> None:
    """Before any run: a table that cannot be written must not cost hours."""
    for folder in (out, out / DATA, out / FIGURES):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {shown(out)}: {shown(folder)} is a file: give a folder")


def _report_only(reproduction: Reproduction, parts: Sequence[Part], args: argparse.Namespace) -> int:
    if not args.out.is_dir():
        raise ConfigError(f"--out {shown(args.out)}: there is no such folder; leave out --report-only to make the runs")
    _publish(reproduction, parts, args.scale, args.out)
    return 0


def _plan(part: Part, scale: str, timings: dict[str, Timing]) -> Plan:
    """The sweeps of a part, and its row of the table."""
    minutes = part.at(scale).minutes
    limit = MISSING if minutes is None else f"{minutes:g} min"
    if part.compute is not None:
        return [], (part.part, "computed", MISSING, MISSING, MISSING, MISSING, limit, "no training"), 0.0
    from stability_lab.reproduction import jobs

    made = jobs.sweeps(part, scale)
    done = jobs.finished(part, scale, made)
    every = [job for sweep in made for job in sweep.jobs]
    sizes = sorted({jobs.flops_and_parameters(sweep.jobs[0])[1] for sweep in made})
    tokens = sorted({jobs.tokens_of(job) for job in every})
    estimate = jobs.estimate(made, done, jobs.workers_of(part, scale), scale, timings)
    counts = str(len(every)), str(len(done)), _span(sizes), _span(tokens)
    return made, (part.part, *counts, _duration(estimate.seconds), limit, estimate.how), estimate.seconds


def _plan_text(parts: Sequence[Part], scale: str, plans: Mapping[str, Plan], with_commands: bool) -> str:
    rows = tuple(plans[part.part][1] for part in parts)
    title = f"{parts[0].name} at scale {scale}"
    total = sum(plans[part.part][2] for part in parts)
    blocks = [text_table(Table(title, PLAN_HEADER, rows)), f"total {_duration(total)}, on a machine as busy as now"]
    if with_commands:
        blocks += [sweep.command for part in parts for sweep in plans[part.part][0]]
    return "\n".join(blocks)


def _run(part: Part, scale: str, made: Sequence[Sweep]) -> int:
    """The highest exit code of the sweeps that have something left to do; none after one that was stopped."""
    from stability_lab.launch import main as train
    from stability_lab.reproduction.jobs import finished

    code = 0
    for sweep in made:
        if len(finished(part, scale, [sweep])) == len({job.digest for job in sweep.jobs}):
            continue
        print(sweep.command, flush=True)
        code = max(code, train(sweep.words))
        if code in STOPPED:
            break
    return code


def _collect(part: Part, scale: str, made: Sequence[Sweep], out: Path) -> int:
    """Write the data of a part; 1 where a run has no result."""
    path = out / DATA / file_name(part.name, part.part, scale)
    head: dict[str, Any] = {"name": part.name, "part": part.part, "scale": scale}
    if part.compute is not None:
        command = f"python -m stability_lab reproduce {part.name} --part {part.part} --scale {scale}"
        today = datetime.now(UTC).date().isoformat()
        head |= {"commands": [command], "date": today, "versions": _versions()}
        write(path, Evidence(head, values=_computed(part, scale)))
        return 0
    from stability_lab.reproduction import jobs

    done = jobs.finished(part, scale, made)
    runs = jobs.collected(made, done)
    missing = sum(len(sweep.jobs) for sweep in made) - len(runs)
    if missing:
        print(f"{part.part}: {missing} runs have no result; the same command tries them again", file=sys.stderr)
    if runs:
        records = [run.record for run in runs]
        head |= {"commands": [sweep.command for sweep in made], **_facts(records)}
        kept = [small(record, part.injected) for record in records]
        head["figures"] = _draw(part, runs, kept, out / FIGURES / jobs.group_of(part, scale))
        write(path, Evidence(head, tuple(runs)), kept)
    return int(missing > 0)


def _computed(part: Part, scale: str) -> Mapping[str, float | list[float]]:
    if part.compute == "numbers":
        from stability_lab.reproduction.numbers import numbers

        return numbers()
    from hydra import initialize_config_dir

    from stability_lab.compose import compose_job
    from stability_lab.config import config_dir
    from stability_lab.reproduction.growth import growth

    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose_job("train", ["trainer.device=cpu"]).config
    at = part.at(scale)
    return growth(config, at.widths, at.layers, at.tokens, at.seeds)


def _facts(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Of the runs as a whole: when, on what, with what, and how long. Where they differ all values are named."""

    def all_of(group: str, key: str) -> str | None:
        groups = (record.manifest.get(group) for record in records)
        found = {str(node[key]) for node in groups if isinstance(node, Mapping) and node.get(key) is not None}
        return ", ".join(sorted(found)) or None

    seconds = [
        float(record.summary["tokens"]) / speed for record in records if (speed := record.metric("tokens_per_s"))
    ]
    return {
        "date": max(str(record.manifest.get("created", "")) for record in records)[:10],
        "device": ", ".join(sorted({str(record.manifest.get("device")) for record in records})),
        "versions": {name: all_of("versions", name) for name in ("stability_lab", "torch", "python")},
        "git": all_of("git", "revision"),
        "seconds": round(sum(seconds), 1),
    }


def _versions() -> dict[str, str]:
    import platform

    import torch

    from stability_lab import __version__

    return {"stability_lab": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _draw(part: Part, runs: Sequence[Run], kept: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw the figures with the part's names for arms and the values of `kept`; their files relative to the page."""
    from stability_lab.analysis.comparison import compare
    from stability_lab.analysis.figures import draw

    named = []
    for run, values in zip(runs, kept, strict=True):
        record = run.record
        summary = by_delta(record.summary, part.delta)
        summary |= {"final": {**(record.summary.get("final") or {}), **values["summary"]["final"]}}
        named.append(replace(record, config={**record.config, "stabilizer": {run.arm: {}}}, summary=summary))
    if not any(record.ended and not record.diverged for record in named):
        return []
    baseline = next(arm for arm in part.arms if any(run.arm == arm for run in runs))
    drawn = draw(compare(named, part.metric, by=("stabilizer",), baseline=baseline), folder, only=part.figures)
    two = [record for record, run in zip(named, runs, strict=True) if run.arm in part.pair]
    if len({run.arm for run in runs} & set(part.pair)) == 2:
        drawn += draw(compare(two, part.metric, by=("stabilizer",)), folder / "pair", only=("curves",))
    return [path.relative_to(folder.parent.parent).as_posix() for path in drawn]


def _publish(reproduction: Reproduction, parts: Sequence[Part], scale: str, out: Path) -> None:
    """The page, from the data files; and the claims of what was asked for on the terminal."""
    found = load(reproduction, out / DATA)
    path = out / f"{reproduction.name}.md"
    try:
        path.write_text(page(reproduction, found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {shown(path)} cannot be written: {error.strerror}") from error
    for part in parts:
        judged = judge(part, claims_of(part), found.get((part.part, scale)))
        table = claim_table(part, scale, judged)
        # Sources and caveats need the page's width.
        print(text_table(Table(table.title, table.header[:-1], tuple(row[:-1] for row in table.rows))), end="\n\n")
    print(f"written: {shown(path)}")


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
