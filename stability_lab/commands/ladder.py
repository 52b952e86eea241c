"""The command `ladder`: the largest stable rate, the best one and the usable range of each arm, with few runs."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stability_lab.commands.compare import read_seeds
from stability_lab.compare.rate_search import Climb, Design, Known, Ramps, Result, Trial, next_job
from stability_lab.compare.run_record import RunRecord, read_run
from stability_lab.config import ConfigError, Parser
from stability_lab.run import console
from stability_lab.run.folder import finished_in
from stability_lab.text import duration, many, rough, shown

if TYPE_CHECKING:
    from stability_lab.compose import Composed

_PER_DECADE = 5
_MOST_RATES = 100
_SEEDS = frozenset(range(3))
_RANGE = (1e-4, 1.0)
# A stressor may set the schedule's name.
_RAMP = ("schedule=ramp", "schedule.name=ramp", "schedule.warmup_steps=0")
_RAMPS = "_ramps"  # after the name of the folder: compare shall not see them
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600}
# What the ladder chooses itself, and the option that sets it.
_OWN = {"optimizer.lr": "--range", "seed": "--seeds", "if_exists": "", "resume": "", "run_name": ""}


class _Plan(NamedTuple):
    """Words of `train` by arm and rung (None: the ramp), without the seed; fingerprints by arm, rung and seed."""

    design: Design
    words: Mapping[tuple[str, int | None], list[str]]
    digests: Mapping[tuple[str, int | None, int], str]
    folder: Path


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_intermixed_args(list(argv))
    said = sys.stderr if args.format == "json" else sys.stdout
    plan = _planned(args)
    design = plan.design
    print(
        f"{many(len(design.arms), 'arm')}, {len(design.rates)} rates from {design.rates[0]:g} to {design.rates[-1]:g}, "
        f"{many(len(design.seeds), 'seed')}: the whole grid has {design.full} runs; in {shown(plan.folder)}",
        file=said,
        flush=True,
    )
    code, why = _climb(plan, args.budget, args.runs, said)
    known, ramps = _known(plan)
    print(why, file=said)
    if not known:
        return code
    if args.format == "json":
        print(json.dumps({"folder": str(plan.folder), "end": why, "arms": _plain(design, known, ramps)}, indent=2))
        return code
    print("\n".join(_state(Climb(design, arm, known, ramps.get(arm))) for arm in design.arms), end="\n\n", flush=True)
    from stability_lab.commands import compare

    return code or compare.main([str(plan.folder)])


def _parser() -> Parser:
    parser = Parser(
        prog="stability_lab ladder",
        description="Finds the largest stable learning rate of each arm, the best one and the usable range, by a "
        "sequential design: a ramp first, then bisection over a fixed grid, with more seeds where it matters. Says "
        "after each step what is known, and ends with the tables of compare. The same command goes on.",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="as for train -m; +stabilizer=a,b makes the arms")
    parser.add_argument(
        "--budget", type=_seconds, metavar="TIME", help="such as 40m or 1h: no step begins that ends later"
    )
    parser.add_argument("--runs", type=int, metavar="N", help="at most so many runs, those that are there among them")
    parser.add_argument("--seeds", type=read_seeds, default=_SEEDS, metavar="SEEDS", help="such as 0-4 (default: 0-2)")
    parser.add_argument(
        "--range", type=_range, default=_RANGE, metavar="LOW..HIGH", help="of the learning rate (default: 1e-4..1)"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="json: what was found, alone")
    return parser


def _seconds(given: str) -> float:
    parts = re.findall(r"([0-9.]+)(min|[smh])", given)
    try:
        found = sum(float(number) * _UNITS[unit] for number, unit in parts)
    except ValueError:
        found = 0.0
    if "".join(map("".join, parts)) != given or not found > 0:
        raise argparse.ArgumentTypeError(f"{given!r}: give a time such as 90s, 40m or 1h30m")
    return found


def _range(given: str) -> tuple[float, float]:
    low, dots, high = given.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = math.nan, math.nan
    if not dots or not 0 < ends[0] < ends[1] < math.inf:
        raise argparse.ArgumentTypeError(f"{given!r}: give two rates that ascend, such as 1e-4..1")
    if ends[1] / ends[0] > 10 ** ((_MOST_RATES - 1) / _PER_DECADE):
        raise argparse.ArgumentTypeError(f"{given!r}: the grid would have over {_MOST_RATES} rates")
    return ends


def rates(low: float, high: float) -> tuple[float, ...]:
    """The grid: five rates a decade, to three digits, from `low` on."""
    steps = math.floor(_PER_DECADE * math.log10(high / low) + 1e-6)
    return tuple(float(f"{low * 10 ** (step / _PER_DECADE):.3g}") for step in range(steps + 1))


def _planned(args: argparse.Namespace) -> _Plan:
    """Everything is composed and checked before anything is made. ConfigError for what a ladder cannot be made of."""
    from stability_lab.build import check
    from stability_lab.command_line import STABILIZER, read_command_line
    from stability_lab.compose import compose_jobs
    from stability_lab.config.words import quoted
    from stability_lab.reproduction.jobs import job_at
    from stability_lab.run.workers import of_a_sweep, workers_of
    from stability_lab.tracking.manifest import fingerprint

    if args.runs is not None and args.runs < 1:
        raise ConfigError(f"--runs {args.runs}: must be 1 or more")
    keys = [word.lstrip("+~").partition("=")[0] for word in args.words]
    for word, key in zip(args.words, keys, strict=True):
        if key in _OWN:
            raise ConfigError(f"{word}: the ladder chooses it" + (f"; see {_OWN[key]}" if _OWN[key] else ""))
        if word == "schedule=ramp":
            raise ConfigError(
                "schedule=ramp: the ladder makes a ramp itself; give the schedule of the runs at one rate"
            )
    command = read_command_line(["-m", *args.words])
    if swept := [key for key in command.swept if key != STABILIZER]:
        raise ConfigError(f"{swept[0]}: takes one value here; only +stabilizer=a,b may take several")
    flat = [word for word, key in zip(args.words, keys, strict=True) if key not in (STABILIZER, "group")]
    steep = [word for word in flat if not word.lstrip("+").startswith("schedule")]
    asked = [line for line in command.overrides if line.startswith(f"+{STABILIZER}=")]
    jobs, ramps = (
        of_a_sweep(compose_jobs(read_command_line(["-m", *words, *asked]))) for words in (flat, [*steep, *_RAMP])
    )
    check((job.config for job in (*jobs, *ramps)), must_fit=True)
    names = ["+".join(sorted(job.plain[STABILIZER])) or "none" for job in jobs]
    seeds = tuple(sorted(args.seeds))
    design = Design(tuple(names), rates(*args.range), seeds, min(len(seeds), workers_of(jobs * len(seeds))))
    digest = fingerprint({str(i): fingerprint(job.plain, "") for i, job in enumerate(jobs)}, "")
    first = compose_jobs(command)[0].config
    folder = Path(first.output_dir) / (first.group or f"ladder_{digest[:8]}")
    words, digests = {}, {}
    for arm, lines, job, ramp in zip(names, command.jobs, jobs, ramps, strict=True):
        own = [line for line in lines if line.startswith(f"+{STABILIZER}=")]
        for rung in (None, *range(len(design.rates))):
            rate, group = design.rates[-1 if rung is None else rung], folder.name + _RAMPS * (rung is None)
            kept = [word for word in (flat if rung is not None else [*steep, *_RAMP]) if _concerns(word, job)]
            words[arm, rung] = [*kept, *own, f"optimizer.lr={rate}", f"group={quoted(group)}"]
            for seed in seeds:
                digests[arm, rung, seed] = job_at(arm, "", rate, seed, ramp if rung is None else job).digest
    return _Plan(design, words, digests, folder)


def _concerns(word: str, job: Composed) -> bool:
    """Not the option of a stabilizer that another arm has: alone, a run refuses it."""
    head, _, rest = word.lstrip("+").partition("=")[0].partition(".")
    return head != "stabilizer" or rest.partition(".")[0] in job.plain["stabilizer"]


def _climb(plan: _Plan, budget: float | None, most: int | None, said: Any) -> tuple[int, str]:
    """Train what the design asks for: the exit code, and a sentence on why it ended."""
    from stability_lab.commands import train

    began, longest = time.monotonic(), 0.0
    while True:
        known, ramps = _known(plan)
        made, job = len(known) + len(ramps), next_job(plan.design, known, ramps)
        if job is None:
            return 0, f"done: every interval is as narrow as the grid, with {many(made, 'run')} of {plan.design.full}"
        spent = time.monotonic() - began
        if budget is not None and spent + longest > budget:
            return 0, f"the budget of {duration(budget)} is spent; the same command goes on"
        if most is not None and made + len(job.seeds) > most:
            if made >= most:
                return 0, f"--runs {most}: there are {made}; a larger number goes on"
            job = replace(job, seeds=job.seeds[: most - made])
        start = time.monotonic()
        with console.quiet():
            code = train.main(_words(plan, job), ends=False)
        longest = max(longest, time.monotonic() - start)
        after = _known(plan)
        if (len(after[0]) + len(after[1])) == made:
            return code or 1, f"stopped at {shlex.join(_words(plan, job))}; the same command goes on"
        print(_line(plan.design, job, *after, time.monotonic() - began), file=said, flush=True)
        if code:
            return code, "stopped; the same command goes on"


def _words(plan: _Plan, job: Trial) -> list[str]:
    return ["-m", *plan.words[job.arm, job.rung], f"seed={','.join(map(str, job.seeds))}"]


def _known(plan: _Plan) -> tuple[Known, Ramps]:
    """What the runs that are there say, found by their fingerprints."""
    found = finished_in(plan.folder) | finished_in(plan.folder.with_name(plan.folder.name + _RAMPS))
    known, ramps = {}, {}
    for (arm, rung, seed), digest in plan.digests.items():
        if (path := found.get(digest)) is not None:
            run = read_run(path)
            if rung is None:
                ramps[arm] = run.metric("lr_at_first_bad")
            else:
                known[arm, rung, seed] = Result(run.outcome, _loss(run))
    return known, ramps


def _loss(run: RunRecord) -> float | None:
    loss = None if run.diverged else run.metric("val/loss")
    return loss if loss is not None and math.isfinite(loss) else None


def _line(design: Design, job: Trial, known: Known, ramps: Ramps, spent: float) -> str:
    """What was run, what came out, and what is known of its arm now."""
    if job.rung is None:
        failed = ramps.get(job.arm)
        what = "does not fail" if failed is None else f"fails at {rough(failed)}"
        return f"[{len(known) + len(ramps)} runs, {duration(spent)}] {job.arm}: the ramp {what}"
    results = [known.get((job.arm, job.rung, seed)) for seed in job.seeds]
    told = ", ".join(f"{one.outcome}{'' if one.loss is None else f' {one.loss:.3f}'}" for one in results if one)
    seeds = ",".join(map(str, job.seeds))
    state = _state(Climb(design, job.arm, known, ramps.get(job.arm)))
    made = f"[{len(known) + len(ramps)} runs, {duration(spent)}]"
    return f"{made} lr {design.rates[job.rung]:g} seed {seeds}: {told}; {state}"


def _state(climb: Climb) -> str:
    rate = climb.design.rates
    last = len(rate)
    if not climb.tried:
        return f"{climb.arm}: nothing is known"
    low, high = climb.low, climb.high
    ends = f"[{rate[low]:g}, {rate[high]:g})" if low >= 0 and high < last else ""
    edge = ends or (f">= {rate[low]:g}" if high == last else f"< {rate[high]:g}")
    words = [f"{climb.arm}: largest stable rate {edge}"]
    best, span = climb.best_rung(), climb.usable_rungs()
    if best is not None and span is not None:
        words += [f"best {rate[best]:g}", f"usable {rate[span[0]]:g} to {rate[span[1]]:g}"]
    if climb.stable_above:
        words.append(f"not monotone: stable again at {', '.join(f'{rate[rung]:g}' for rung in climb.stable_above)}")
    return ", ".join(words)


def _plain(design: Design, known: Known, ramps: Ramps) -> dict[str, Any]:
    found = {}
    for arm in design.arms:
        climb = Climb(design, arm, known, ramps.get(arm))
        best, span = climb.best_rung(), climb.usable_rungs()
        rate = dict(enumerate(design.rates))
        found[arm] = {
            "largest_stable_lr": [rate.get(climb.low), rate.get(climb.high)],
            "best_lr": None if best is None else rate[best],
            "usable": None if span is None else [rate[rung] for rung in span],
            "stable_above": [rate[rung] for rung in climb.stable_above],
            "ramp_failed_at": ramps.get(arm),
            "runs": climb.runs + (arm in ramps),
        }
    return found
