"""`trainer.compile=auto`: blocks are compiled where the steps of a run pay for it.

    saved = max_steps * grad_accum_steps * SHARE * max(FLOPs of the blocks / FLOPS, n_layers * LAYER_S)

against COMPILE_S, with a margin, because the estimate is within a factor of two or so. It asks for the configuration
and the kind of machine only, never for the clock, so that a command means the same run whatever else the machine does.
It does not ask for stabilizers: the arms of a comparison are compiled alike. docs/performance.md has the measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stability_lab.build import device_of
from stability_lab.compose import Composed
from stability_lab.config import TrainConfig
from stability_lab.machine.compiler import missing_compiler
from stability_lab.machine.cores import cores
from stability_lab.run.resume import read_config
from stability_lab.text import flatten

AUTO = "auto"
MODES = ("off", "block", "full")
MARGIN = 2.0


class Eager(NamedTuple):
    """What eager blocks take, and what compiling them takes and saves."""

    flops: float  # a second, on CPUs of each thread
    layer_s: float  # at least, forward and backward
    share: float  # of the time of the blocks
    compile_s: float


# The first was measured with one thread (docs/performance.md#step). On a GPU nothing was: the second assumes a third of
# an H100's fp32, some 60 launches a layer, and that half of the time is saved.
KINDS: Mapping[str, Eager] = {
    "cpu": Eager(50e9, 3e-3, 0.045, 40.0),
    "cuda": Eager(2e13, 5e-4, 0.5, 60.0),
}


class Choice(NamedTuple):
    mode: str
    reason: str


def choose(config: TrainConfig) -> Choice:
    """`block` or `off`, and why."""
    kind = device_of(config).type
    if (missing := missing_compiler(kind)) is not None:
        return Choice("off", f"there is {missing} here")
    eager, trainer = KINDS[kind], config.trainer
    flops = eager.flops * ((trainer.threads or cores()) if kind == "cpu" else 1)
    step_s = max(block_flops(config) / flops, config.model.n_layers * eager.layer_s * trainer.grad_accum_steps)
    saved_s = trainer.max_steps * eager.share * step_s
    what = f"{trainer.max_steps:,} steps of an estimated {step_s:.2g} s"
    if saved_s < MARGIN * eager.compile_s:
        return Choice("off", f"{what} save less than compiling takes, about {eager.compile_s:.0f} s")
    return Choice("block", f"{what} save more than the {eager.compile_s:.0f} s or so that compiling takes")


def block_flops(config: TrainConfig) -> float:
    """FLOPs of the blocks in a step, forward and backward, as `cost.py` counts them. No data is read for it."""
    model, trainer = config.model, config.trainer
    d, d_ff = model.d_model, model.d_ff or 4 * model.d_model
    grouped = (model.n_kv_heads or model.n_heads) / model.n_heads
    weights = model.n_layers * (2 * d * d * (1 + grouped) + (3 if model.mlp == "swiglu" else 2) * d * d_ff)
    tokens = trainer.micro_batch_size * trainer.grad_accum_steps * model.seq_len
    return tokens * (6 * weights + 12 * model.n_layers * d * model.seq_len)


def settled(job: Composed, run: Path | None = None) -> Composed:
    """The job with the mode that `auto` is here, or that `run` has, which the job goes on with; it is what the run
    records. Other modes stay as they are."""
    if job.config.trainer.compile != AUTO:
        return job
    known = None if run is None else flatten(read_config(run)).get("trainer.compile")
    mode, reason = choose(job.config) if known not in MODES else Choice(known, "the run has begun so")
    trainer = dataclasses.replace(job.config.trainer, compile=mode)
    return Composed(
        dataclasses.replace(job.config, trainer=trainer),
        {**job.plain, "trainer": {**job.plain["trainer"], "compile": mode}},
        (*job.notices, f"compile: {mode}, since {reason}"),
    )
