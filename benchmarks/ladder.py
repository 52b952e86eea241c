"""How often the sequential design of `ladder` finds the bracket of the whole grid, and with what share of its runs.

    python -m benchmarks.ladder [--arms 20000] [--spread 0.28]
    python -m benchmarks.ladder --grid outputs/SWEEP --ramps outputs/RAMPS      the same in runs that are there

A simulated arm has a true edge; a run fails with a probability that is logistic in the log of the rate around it, of
standard deviation `--spread` (0.28 in ln rate is that of seeds of a small model). Its loss is a parabola in the log of
the rate with noise of seed and run, and its ramp fails above the edge by a random factor. The sequential design and the
whole grid see the same runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stability_lab.compare.rate_search import Climb, Design, Result, next_job
from stability_lab.compare.run_record import find_runs

RATES = tuple(10 ** (-4 + rung / 5) for rung in range(21))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arms", type=int, default=20_000, help="simulated ones for each row")
    parser.add_argument("--spread", type=float, default=0.28, help="standard deviation of a seed's edge in ln rate")
    parser.add_argument("--grid", type=Path, help="folder of a sweep over rates, stabilizers and seeds: search in it")
    parser.add_argument("--ramps", type=Path, help="folder of their ramps, of one seed")
    args = parser.parse_args()
    if args.grid is not None:
        print("\n".join(replay(args.grid, args.ramps)))
        return
    print(f"{args.arms} simulated arms a row, {len(RATES)} rates from 1e-4 to 1, spread {args.spread:g} in ln rate")
    print("seeds  runs, of the grid's  same bracket  within a rate  misses the true edge: ladder  grid  same best rate")
    for seeds in (1, 2, 3, 5):
        found = np.array([simulate(seeds, args.spread, number) for number in range(args.arms)], dtype=float)
        runs, same, near, missed, missed_by_grid, best = found.mean(0)
        print(
            f"{seeds:5d}  {runs:5.1f} {runs / (len(RATES) * seeds):10.1%}  {same:12.2%}  {near:13.2%}  "
            f"{missed:28.2%}  {missed_by_grid:4.2%}  {best:8.2%}"
        )


def replay(grid: Path, ramps: Path | None) -> Iterator[str]:
    """What the design finds among the runs of a real grid: the same that it would have trained."""
    every: dict[tuple[str, float, int], Result] = {}
    for run in find_runs([grid])[0]:
        assert run.lr is not None
        every[run.stabilizers, run.lr, run.seed] = Result(run.outcome, None if run.diverged else run.metric("val/loss"))
    arms, rates, seeds = (tuple(sorted(set(values))) for values in zip(*every, strict=True))
    by_rung = {(arm, rates.index(lr), seed): result for (arm, lr, seed), result in every.items()}
    hints = {} if ramps is None else {run.stabilizers: run.metric("lr_at_first_bad") for run in find_runs([ramps])[0]}
    design = Design(arms, rates, seeds, width=2)
    known: dict[tuple[str, int, int], Result] = {}
    done: dict[str, float | None] = {}
    while (job := next_job(design, known, done)) is not None:
        if job.rung is None:
            done[job.arm] = hints.get(job.arm)
        else:
            known |= {key: by_rung[key] for key in ((job.arm, job.rung, seed) for seed in job.seeds)}
    yield f"{len(known) + len(done)} of {len(every)} runs ({(len(known) + len(done)) / len(every):.0%})"
    for arm in arms:
        for name, runs in (("ladder", known), ("grid", by_rung)):
            found = Climb(design, arm, runs, None)
            ends = [rates[rung] if 0 <= rung < len(rates) else None for rung in (found.low, found.high)]
            best, span = found.best_rung(), found.usable_rungs()
            usable = None if span is None else [rates[rung] for rung in span]
            above = [rates[rung] for rung in found.stable_above]
            at = None if best is None else rates[best]
            told = f"bracket {ends}, best {at}, usable {usable}, stable above {above}"
            yield f"{arm} by {name}, {found.runs} runs: {told}"


def simulate(n: int, spread: float, number: int) -> tuple[float, ...]:
    """Runs of the design; whether its bracket is that of the grid, and within one rung of it; whether the bracket of
    each misses the true edge by over one rung; whether the best rates are the same or neighbours."""
    random = np.random.default_rng((number, n))
    edge = math.exp(random.uniform(math.log(1e-3), math.log(0.5)))
    seeds = tuple(range(n))
    design = Design(("none",), RATES, seeds)
    every = _runs(random, edge, spread, seeds)
    ramp = edge * math.exp(random.normal(0.7, 0.4))
    ramps: dict[str, float | None] = {}
    known: dict[tuple[str, int, int], Result] = {}
    while (job := next_job(design, known, ramps)) is not None:
        if job.rung is None:
            ramps["none"] = ramp if ramp < RATES[-1] else None
            continue
        known |= {(job.arm, job.rung, seed): every[job.arm, job.rung, seed] for seed in job.seeds}
    own, whole = Climb(design, "none", known, None), Climb(design, "none", every, None)
    off = abs(own.low - whole.low)
    best, expected = own.best_rung(), whole.best_rung()
    same_best = best == expected if best is None or expected is None else abs(best - expected) <= 1
    return own.runs + 1, off == 0, off <= 1, _misses(own, edge), _misses(whole, edge), same_best


def _runs(random: np.random.Generator, edge: float, spread: float, seeds: tuple[int, ...]) -> dict:
    scale, by_seed = spread * math.sqrt(3) / math.pi, random.normal(0, 0.02, len(seeds))
    every = {}
    for rung, rate in enumerate(RATES):
        fails = random.random(len(seeds)) < 1 / (1 + math.exp(-math.log(rate / edge) / scale))
        for seed in seeds:
            loss = 2 + 0.3 * math.log10(rate / (0.15 * edge)) ** 2 + by_seed[seed] + random.normal(0, 0.005)
            every["none", rung, seed] = Result("diverged", None) if fails[seed] else Result("stable", loss)
    return every


def _misses(climb: Climb, edge: float) -> bool:
    """Whether the true edge lies outside of the bracket, by more than one rung."""
    at = 5 * (math.log10(edge) + 4)
    return not climb.low - 1 <= at <= climb.high + 1


if __name__ == "__main__":
    main()
