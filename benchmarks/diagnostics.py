"""What the default diagnostics cost, as shares of a step of `train`.

    python -m benchmarks.diagnostics
    python -m benchmarks.diagnostics --model gpt_micro --device cuda

Each is timed alone, on the tensors of a step, in the same rounds as the step: a difference between two steps would be
smaller than what a shared machine resolves. What happens every few steps counts by that part. The gradient norm would
be computed for clipping too. Validation is not a diagnostic.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]

from benchmarks import timing
from benchmarks.timing import Group, group, interleaved, parser
from stability_lab.build import build_run
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.diagnostics.probe import probe_attention
from stability_lab.judge.watch import Watch
from stability_lab.machine.precision import autocast
from stability_lab.model.attention import logit_bound
from stability_lab.tracking.run_files import RunFiles
from stability_lab.training.loop import Loop, Run

FLUSHES = 20  # so that the judge sees a series of some length
QUICK = ["model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.seq_len=64", "trainer.micro_batch_size=8"]


def measured(args: argparse.Namespace) -> Iterator[Group]:
    words = [f"model={args.model}", f"trainer.precision={args.precision}", f"trainer.device={args.device}"]
    words += [f"trainer.compile={args.compile}", f"trainer.threads={args.threads}"]
    yield shares([*words, *(QUICK if args.quick else [])], args.rounds, timing.clock(args))


def shares(overrides: Sequence[str], rounds: int, clock: Callable[[], float] = time.perf_counter) -> Group:
    """Time of each part, as a share of that of a step of `train` with these overrides."""
    config = compose_jobs(read_command_line([*overrides, "tracking=local"]))[0].config
    run = build_run(config)
    with tempfile.TemporaryDirectory() as folder:
        parts, every = variants(run, Path(folder))
        if run.device.type == "cuda":
            parts = {name: (lambda f=f: (f(), torch.cuda.synchronize())) for name, f in parts.items()}
        seconds = interleaved(parts, rounds, clock=clock)
    for name, n in every.items():
        seconds[name] = [s / n for s in seconds[name]]
    diagnostics = [name for name in parts if name != "step"]
    seconds["together"] = [sum(seconds[name][r] for name in diagnostics) for r in range(rounds)]
    return group(f"Diagnostics of a step of {config.model.name}, {config.trainer.precision}, on {run.device}", seconds)


def variants(run: Run, folder: Path) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """A step, the parts of its diagnostics, and how many steps share those that are not of every step."""
    config, model, step = run.config, run.model, run.step
    size = config.trainer.micro_batch_size
    batch = run.objective.batch(torch.from_numpy(run.sampler.batch(0, size)).to(run.device), 0)
    row = step(batch, 1e-3)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    heads, width = config.model.n_heads, config.model.d_model // config.model.n_heads
    q = torch.randn(size, config.model.seq_len, heads, width, device=run.device)
    log_z = torch.randn(size * config.model.seq_len, device=run.device)
    values = [value.clone() for value in row]
    rows = min(config.trainer.log_every, config.trainer.max_steps)
    buffer = torch.zeros(rows, len(row), device=run.device)

    def norms() -> Tensor:
        return torch.stack(_foreach_norm(gradients)).norm()

    def log_z_sums() -> tuple[Tensor, Tensor, Tensor]:
        return log_z.square().sum(), log_z.sum(), log_z.amax()

    def bounds() -> Tensor:
        return torch.stack([logit_bound(q, q, 0.2) for _ in range(config.model.n_layers)]).amax()

    def one_row() -> None:
        buffer[0] = torch.stack(values)

    def probe() -> None:
        with autocast(run.device, config.trainer.precision):
            probe_attention(model, run.objective, run.probe_windows)

    every = {"flush, files and judge": rows}
    if config.diagnostics.probe_every is not None:
        every["exact probe of attention"] = config.diagnostics.probe_every
    parts: dict[str, Callable[[], object]] = {
        "step": lambda: step(batch, 1e-3),
        "gradient norms": norms,
        "sums of log Z": log_z_sums,
        "bounds on attention logits": bounds,
        "row of measurements": one_row,
        "flush, files and judge": flush(run, buffer, RunFiles(folder)),
        "exact probe of attention": probe,
    }
    return parts, every


def flush(run: Run, buffer: Tensor, files: RunFiles) -> Callable[[], object]:
    """Copy, complete, write and judge as many steps as `train` does at once, after `FLUSHES` of such."""
    watch: Watch = Loop(run, _Nowhere()).watch
    columns = [name for name in run.step.columns if name not in ("bad", "empty")]

    def call() -> None:
        rows = [
            {"step": watch.n + i + 1, "tokens": 0, "optim/lr": 1e-3, "train/ppl": 10.0}
            | dict(zip(columns, values, strict=False))
            for i, values in enumerate(buffer.tolist())
        ]
        watch.add(rows)
        files.log_rows(rows)
        watch.look(ends=False)

    for _ in range(FLUSHES):
        call()
    return call


class _Nowhere:
    def rows(self, rows: object) -> None:
        return None

    def event(self, event: object) -> None:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.diagnostics", __doc__, rounds=31, quick={"rounds": 15})
    timing.add_cpu_time(made)
    made.add_argument("--model", default="gpt_nano", help="an option of the group model (default: %(default)s)")
    made.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--compile", choices=("off", "block", "full"), default="off")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return timing.run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
