"""How long `compare` takes for many runs, and how much memory: tables alone and with figures.

    python -m benchmarks.compare --runs 1000

The runs are made here, with the columns and the size of real ones. Time and memory are those of a whole process, start
included. The goals are below 10 s for 200 runs of 2,000 steps, and 30 s and 1 GiB for 1,000.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from benchmarks.timing import AGAIN, Command, Group, group, interleaved, parser, positive, run

ARMS = ((), ("qknorm",), ("zloss",), ("softcap",), ("qknorm", "zloss"))
LRS = (1e-3, 3e-3, 1e-2, 3e-2)
LAYERS = 4


def measured(args: argparse.Namespace) -> Iterator[Group]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "sweep"
        for i in range(args.runs):
            write_run(folder / f"run{i:03d}", i, args.steps)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        words = ("-m", "stability_lab", "compare", str(folder))
        calls = {
            "tables": Command(*words),
            "tables and figures": Command(*words, "--figures", str(Path(name) / "figures")),
        }
        seconds = interleaved(calls, args.rounds, warmup=0)
    peaks = {name: call.peak_mib for name, call in calls.items()}
    table = group(f"{args.runs:,} runs of {args.steps:,} steps, {size:,.0f} MB", seconds)
    yield table.add("peak MiB", lambda row: peaks[row["name"].removesuffix(AGAIN)])


def write_run(folder: Path, i: int, steps: int) -> None:
    folder.mkdir(parents=True)
    rng = random.Random(i)
    stabilizers, lr, seed = ARMS[i % 5], LRS[i // 5 % 4], i // 20
    config = {
        "model": {"name": "gpt_nano", "d_model": 128, "n_layers": LAYERS, "n_heads": 4, "seq_len": 128},
        "optimizer": {"name": "adamw", "lr": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 30},
        "trainer": {"max_steps": steps, "micro_batch_size": 16, "grad_clip": 1.0},
        "seed": seed,
        "stabilizer": {name: {"_target_": f"stability_lab.stabilizers.{name}.X"} for name in stabilizers},
    }
    manifest = {
        "created": "2026-01-01T00:00:00+00:00",
        "overrides": [],
        "versions": {"torch": "2.13.0", "stability_lab": "0.1.0", "python": "3.11.7", "numpy": "2.4.6"},
        "git": {"revision": "0" * 40},
        "device": "cpu",
        "threads": 2,
        "precision": "fp32",
        "compile": "off",
        "attention": {"backend": "sdpa"},
        "data": {"fingerprint": "d", "first_batch": f"f{seed}", "last_batch": f"l{seed}", "validation": "v"},
        "init": {f"blocks.{n}.weight": f"{seed}-{n}" for n in range(60)},
    }
    lines, loss = [], 0.0
    for step in range(1, steps + 1):
        loss = 1.8 + 3.7 * math.exp(-step / 300) + rng.gauss(0, 0.02)
        row = {"step": step, "tokens": 2048 * step, "optim/lr": lr, "train/loss": loss, "train/ppl": math.exp(loss)}
        row |= {"train/z_loss": 0.0, "train/z_raw": 40 + rng.random(), "train/log_z_mean": 7 + rng.random()}
        row |= {"train/log_z_max": 8 + rng.random(), "optim/grad_norm": math.exp(rng.gauss(0, 0.3))}
        row |= {"optim/clip_coef": 1.0, "optim/loss_scale": 1.0, "optim/skipped": 0.0, "attn/logit_bound": 6.4}
        row |= {"perf/tokens_per_s": 2e4 + rng.random()}
        if step % 20 == 0:
            row |= {"attn/max_logit": 5 + rng.random(), "attn/entropy": rng.random()}
            row |= {f"attn/max_logit/L{n:02d}": 5 + rng.random() for n in range(LAYERS)}
        lines.append(json.dumps(row))
    score = {"score": 0.0, "n_spikes": 0, "n_scored": steps, "resolution": 100 / steps, "steps": []}
    summary = {
        "status": "completed",
        "verdict": "stable",
        "steps": steps,
        "initial": {"val/loss": 5.5},
        "final": {"val/loss": loss, "train/loss": loss},
        "best": {"val/loss": loss},
        "max_attn_logit": 6.0,
        "clip_fraction": 0.1,
        "tokens_per_s": 2e4,
        "perf/peak_memory_bytes": 5e8,
        "scores": {signal: dict.fromkeys(("olmo2", "olmo_core", "robust"), score) for signal in ("grad_norm", "loss")},
        "events": {},
    }
    events = [{"event": "grad_norm_spike", "step": rng.randrange(1, steps)} for _ in range(3)]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.compare", __doc__, rounds=3, quick={"runs": 100, "steps": 500, "rounds": 1})
    made.add_argument("--runs", type=positive, default=200, metavar="N", help="default: %(default)s")
    made.add_argument("--steps", type=positive, default=2000, metavar="N", help="default: %(default)s")
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
