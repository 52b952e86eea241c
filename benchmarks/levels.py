"""Level and power of `compare`: simulated sweeps without and with a true effect.

    python -m benchmarks.levels                   about five minutes
    python -m benchmarks.levels --sweeps 2000     the tables of docs/compare.md

A sweep has a baseline and three arms at three learning rates. A loss is 2 + seed + noise; `share` is the part of the
variance within an arm that the seed explains. Noise has the same spread in all arms, or a spread five times as large in
one of them (the baseline, another arm, all but the baseline; in one arm at one rate), or spreads from 1 to 5. Nothing
is fitted to these sweeps: records of runs are made in memory and `compare` does the rest.

Level: the part of sweeps without any effect in which a table has a finding; the last three columns are the larger of
the two shares. Power: the part in which the one true effect is found. "Paired" is what `compare` did before:
Student's paired test of two arms, Holm's rule in the table of losses alone.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from stability_lab.compare.comparability import checks
from stability_lab.compare.comparison import compared
from stability_lab.compare.grouping import group
from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.statistics import holm

ARMS, LRS = ("none", "qknorm", "softcap", "zloss"), (1e-3, 3e-3, 1e-2)
SEEDS = (3, 5, 8)
SHARES = (0.0, 0.3, 0.5, 0.8)
SPREADS = {
    "equal": [[1, 1, 1, 1]] * 3,
    "baseline 5": [[5, 1, 1, 1]] * 3,
    "an arm 5": [[1, 5, 1, 1]] * 3,
    "all arms 5": [[1, 5, 5, 5]] * 3,
    "1, 2, 3, 5": [[1, 2, 3, 5]] * 3,
    "an arm 5 at one rate": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 5, 1, 1]],
}
# Of the first arm at the first rate, in standard deviations of the noise.
EFFECTS = {3: 6.0, 5: 3.0, 8: 2.0}
SIZE = 0.01  # nats of one standard deviation: small beside the differences between rates, so that the best one is known


class Found(NamedTuple):
    """Shares of sweeps with a finding: in the table of losses, in that of learning rates, in the report; and with the
    effect found, or a finding in the table, by paired tests as before."""

    losses: float
    rates: float
    report: float
    effect: float
    paired_losses: float
    paired_effect: float


def simulated(seeds: int, name: str, share: float, effect: float, sweeps: int, seed: int = 0) -> Found:
    """Sweeps with the spreads of this name, drawn from a generator that is keyed by the case."""
    spread = np.array(SPREADS[name], dtype=float)
    rng = np.random.default_rng([seed, seeds, list(SPREADS).index(name), int(100 * share), int(effect)])
    shape = len(LRS), len(ARMS), seeds
    runs = [_run(arm, lr, seed) for lr in LRS for arm in ARMS for seed in range(seeds)]
    grouping = group(runs)
    found = checks(grouping)
    own = np.sqrt((spread**2).mean(1))[:, None, None]  # of a rate
    hits = np.zeros(6)
    for _ in range(sweeps):
        seed_effects = math.sqrt(share / (1 - share)) * own * rng.normal(size=(len(LRS), 1, seeds))
        losses = seed_effects + spread[:, :, None] * rng.normal(size=shape)
        losses[0, 1] += effect * own[0, 0]
        for run, loss in zip(runs, (2 + SIZE * losses + np.arange(3)[:, None, None] / 10).ravel(), strict=True):
            final = run.summary["final"]
            final["val/loss"] = float(loss)
        comparison = compared(grouping, found, "val/loss")
        rows = [row.difference for row in comparison.rows if row.difference]
        significant = [bool(d.significant) for d in rows]
        rates = any(bool(d and d.significant) for one in comparison.ladders for d in (one.difference, one.gain))
        ps = _paired(losses)
        hits += (any(significant), rates, comparison.findings > 0, significant[0], min(ps) <= 0.05, ps[0] <= 0.05)
    return Found(*(hits / sweeps))


def _paired(losses: np.ndarray) -> list[float]:
    pairs = losses[:, 1:] - losses[:, :1]
    t = pairs.mean(-1) / (pairs.std(-1, ddof=1) / math.sqrt(pairs.shape[-1]))
    ps = 2 * stats.t.sf(np.abs(t), pairs.shape[-1] - 1)
    return [p for p in holm(ps.ravel().tolist()) if p is not None]


def _run(arm: str, lr: float, seed: int) -> RunRecord:
    data = {"fingerprint": "d", "first_batch": f"first{seed}", "last_batch": f"last{seed}", "validation": "v"}
    return RunRecord(
        Path(f"{arm}-{lr:g}-{seed}"),
        {"seed": seed, "optimizer": {"lr": lr}, "stabilizer": {} if arm == "none" else {arm: {}}},
        {"data": data, "init": {"embed": f"{seed}"}, "earlier_jobs": 1},
        {"status": "completed", "verdict": "stable", "initial": {"val/loss": 5.5}, "final": {}},
    )


def levels(sweeps: int, seed: int) -> Iterator[str]:
    shares = SHARES[::3]
    columns = [f"table of losses, seeds explain {share:.0%}" for share in shares]
    yield f"| seeds | spread | {' | '.join(columns)} | learning rates | report | paired: table of losses |"
    yield "|---|---|---|---|---|---|---|"
    for seeds in SEEDS:
        for name in SPREADS:
            found = [simulated(seeds, name, share, 0.0, sweeps, seed) for share in shares]
            cells = [f"{f.losses:.1%}" for f in found]
            cells += [
                f"{max(values):.1%}"
                for values in zip(*((f.rates, f.report, f.paired_losses) for f in found), strict=True)
            ]
            yield f"| {seeds} | {name} | {' | '.join(cells)} |"


def powers(sweeps: int, seed: int) -> Iterator[str]:
    yield f"| seeds | true effect | {' | '.join(f'seeds explain {share:.0%}' for share in SHARES)} | paired |"
    yield "|---|---|---|---|---|---|---|"
    for seeds in SEEDS:
        found = [simulated(seeds, "equal", share, EFFECTS[seeds], sweeps, seed) for share in SHARES]
        before = sum(f.paired_effect for f in found) / len(found)
        yield f"| {seeds} | {EFFECTS[seeds]:g} sd | {' | '.join(f'{f.effect:.0%}' for f in found)} | {before:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=600, help="of each scenario")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    for table in (levels, powers):
        for line in table(args.sweeps, args.seed):
            print(line, flush=True)
        print()
    print(f"{args.sweeps} sweeps of each scenario in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
