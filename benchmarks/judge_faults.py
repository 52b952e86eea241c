"""How well the judge finds faults: real training runs with and without an injected fault.

    python -m benchmarks.judge_faults --seeds 0-19      the seeds on which thresholds were fixed
    python -m benchmarks.judge_faults --seeds 20-39     the seeds on which docs/judge.md reports

Clean runs: `none` and `qknorm` at a sound learning rate, one of each a seed; an event or a verdict other than `stable`
is a false positive. Faulty runs: one fault at step 120 of 200. A fault is found when an event begins within 20 steps of
it; the delay is in steps. Precision counts the events of faulty runs that are no such event as false.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stability_lab.build import build_run
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.judge.series import Row
from stability_lab.training.inject import Injector, parse
from stability_lab.training.loop import Loop

STEP, NEAR = 120, 20
FAULTS = ("lr_spike@120x30", "lr_spike@120x100", "bad_batch@120", "nan_grad@120")
BASE = [
    *("model.d_model=48", "model.n_layers=2", "model.n_heads=2", "model.seq_len=64", "trainer.micro_batch_size=8"),
    *("trainer.max_steps=200", "trainer.eval_every=null", "trainer.eval_sequences=32", "trainer.threads=1"),
    *("diagnostics.probe_every=100", "tracking=local"),
]


class Nowhere:
    def rows(self, rows: Sequence[Row]) -> None:
        pass

    def event(self, event: Mapping[str, Any]) -> None:
        pass


def judged(seed: int, *overrides: str) -> dict[str, Any]:
    """The summary of one run, with its events."""
    config = compose_jobs(read_command_line([*BASE, f"seed={seed}", *overrides]))[0].config
    run = build_run(config)
    loop = Loop(run, Nowhere(), Injector(parse(config.debug.inject, config.trainer.max_steps)))
    loop.train()
    judgement, summary = loop.judge()
    assert judgement is not None
    return summary | {"events": [event.as_dict() for event in judgement.events]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="20-39")
    parser.add_argument("--out", type=Path, help="JSON with every run's verdict and events")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split("-"))
    seeds = range(first, last + 1)
    torch.set_num_threads(1)
    record = []
    for stabilizer in ("none", "qknorm"):
        runs = [judged(seed, f"+stabilizer={stabilizer}") for seed in seeds]
        record += [{"seed": s, "fault": stabilizer, **_brief(r)} for s, r in zip(seeds, runs, strict=True)]
        verdicts = Counter(run["verdict"] for run in runs)
        events = sum(len(run["events"]) for run in runs)
        print(f"clean {stabilizer:<14} {len(runs)} runs: verdicts {dict(verdicts)}, {events} events", flush=True)
    for fault in FAULTS:
        runs = [judged(seed, f"debug.inject={fault}") for seed in seeds]
        record += [{"seed": s, "fault": fault, **_brief(r)} for s, r in zip(seeds, runs, strict=True)]
        delays = [d for d in map(delay, runs) if d is not None]
        other = sum(not STEP <= event["step"] <= STEP + NEAR for run in runs for event in run["events"])
        right = len(delays)
        precision = right / (right + other) if right + other else float("nan")
        verdicts = Counter(run["verdict"] for run in runs)
        print(
            f"{fault:<20} recall {right}/{len(runs)}, precision {precision:.2f}, "
            f"delay {sorted(delays)[len(delays) // 2] if delays else '-'} (median) steps, verdicts {dict(verdicts)}",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(record, indent=1), encoding="utf-8")


def delay(run: Mapping[str, Any]) -> int | None:
    """Steps from the fault to the first event near it."""
    near = [event["step"] - STEP for event in run["events"] if STEP <= event["step"] <= STEP + NEAR]
    return min(near) if near else None


def _brief(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"verdict": run["verdict"], "events": [(e["event"], e["step"], e["height"]) for e in run["events"]]}


if __name__ == "__main__":
    main()
