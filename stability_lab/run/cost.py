"""What a run costs: FLOPs from its model, time and memory from a few real steps on this device.

    FLOPs a token = 6 * (weights of matrix products, the head's among them, tied or not) + 12 * L * d * T

forward and backward, in the convention of PaLM (arXiv:2204.02311, appendix B), which counts a causal model's whole
attention matrix. Embedding look-ups, norms and elementwise work are not counted.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from stability_lab.build import (
    build_model,
    build_run,
    build_stabilizers,
    device_of,
    document_mark,
    fill_seams,
    load_data,
    objective_options,
    training_bytes,
)
from stability_lab.compose import Composed
from stability_lab.config import TrainConfig, in_speed_key
from stability_lab.diagnostics.memory import peak_bytes, reset_peak
from stability_lab.diagnostics.probe import probe_attention, validate
from stability_lab.machine.clock import Clock
from stability_lab.machine.precision import autocast
from stability_lab.model.transformer import GPT, parameter_counts, site_of
from stability_lab.seams import Seams, Stabilizer
from stability_lab.text import flatten

BUDGET_S = 30.0  # three steps that would take longer are replaced by one micro-batch
ROUNDS = 7  # of steps with one thread and with several
STEPS, MOST_STEPS, SHORT_S = 3, 20, 2.0  # timed steps: three, and more as long as they are that short together

# Dense peaks in FLOP/s from NVIDIA's data sheets (their larger numbers are for sparse matrices; fp32 is without TF32).
# The names are exact, so that a slice of a GPU or another model with a similar name gets no number.
_A100 = {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}
_H100 = {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}
PEAKS: Mapping[str, Mapping[str, float]] = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), _A100),
    **dict.fromkeys(("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), _A100),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), _H100),
}


class ThreadTiming(NamedTuple):
    """Seconds of a step with so many CPU threads, and the part of their time that the process got."""

    threads: int
    step_s: float
    fastest_s: float
    slowest_s: float
    share: float


class Timing(NamedTuple):
    """Seconds on this device, and the peak memory of all that was timed."""

    build_s: float
    first_s: float  # the first step, with warm-up and compilation
    step_s: float
    eval_s: float  # one pass over the validation windows
    probe_s: float
    steps_timed: int
    scaled_from: str | None  # None: whole steps of this very job were timed
    memory_bytes: int | None
    by_threads: tuple[ThreadTiming, ...] = ()  # one thread and the usual number, in turn


def facts(job: Composed) -> dict[str, Any]:
    """What follows from the configuration alone; the model is built on the meta device."""
    config = job.config
    data, stabilizers, device = load_data(config), build_stabilizers(config), device_of(config)

    def built(chosen: list[Stabilizer]) -> GPT:
        seams = fill_seams(chosen)
        with torch.device("meta"):
            return build_model(config, data.vocab_size, seams, document_mark(config, data))

    model, trainer = built(stabilizers), config.trainer
    counts, baseline = parameter_counts(model), parameter_counts(built([]))["total"]
    per_sample = objective_options(config).traits.windows
    samples = trainer.max_steps * trainer.micro_batch_size * trainer.grad_accum_steps
    return {
        "model": config.model.name,
        "stabilizers": [s.name for s in stabilizers],
        "seams": {seam: list(owners) for seam, owners in model.seams.owners.items()},
        "attention": model.backend._asdict(),
        "layer_factors": _layer_factors(config, model.seams),
        "parameters": {
            **counts,
            "added_by": {s.name: parameter_counts(built([s]))["total"] - baseline for s in stabilizers},
            "added_together": counts["total"] - baseline,
        },
        "flops_per_token": flops_per_token(model),
        "training_bytes": training_bytes(config, model),
        "tokens": samples * config.model.seq_len,
        "steps": trainer.max_steps,
        "train_tokens": None if data.stream else data.train_tokens,
        "epochs": None if data.stream else samples * per_sample / ((data.train_tokens - 1) // config.model.seq_len),
        "recipe": config.recipe,
        "notices": list(job.notices),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": trainer.precision,
    }


def flops_per_token(model: GPT) -> int:
    """Forward and backward, as this module's docstring says; rows that pad the vocabulary are multiplied too."""
    of_sequences = set(model.sequence_head.modules())  # they see one token of each sequence
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m not in of_sequences)
    if model.head is None:
        weights += model.embed.weight.numel()
    config = model.config
    return 6 * weights + 12 * config.n_layers * config.d_model * config.seq_len


def _layer_factors(config: TrainConfig, seams: Seams) -> dict[str, list[float]]:
    """Each layer's initial factor, for the seams that hold one."""
    sites = [site_of(config.model).at("attn", layer) for layer in range(config.model.n_layers)]
    found = {
        "attn_scale": [seams.attn_scale(site).factor for site in sites],
        "norm_scale": [seams.norm_scale(site).factor for site in sites],
        "score_restore": [seams.score_restore(site) for site in sites],
    }
    factors = {
        name: [torch.as_tensor(value).item() for value in values if value is not None] for name, values in found.items()
    }
    return {name: values for name, values in factors.items() if values}


def speed_key(config: TrainConfig) -> str:
    """The same for two jobs whose steps take the same time and memory.

    Of a float it knows whether it is 0: that may switch something off, while a rate, a cap or a width of the initial
    weights changes no amount of work.
    """
    built = dataclasses.replace(config, stabilizer={s.name: s for s in build_stabilizers(config)})
    values = {key: value for key, value in flatten(dataclasses.asdict(built)).items() if in_speed_key(key)}
    work = {key: bool(value) if isinstance(value, float) else value for key, value in values.items()}
    return json.dumps(work, sort_keys=True)


def scaled(known: Timing, known_flops: float, flops: float) -> Timing:
    factor = flops / known_flops
    seconds = {name: getattr(known, name) * factor for name in ("first_s", "step_s", "eval_s", "probe_s")}
    return known._replace(**seconds, steps_timed=0, scaled_from="another job, by FLOPs", memory_bytes=None)


def measure(config: TrainConfig) -> Timing:
    """Build the run as `train` does, and time its parts. The weights that come out are thrown away."""
    device, trainer = device_of(config), config.trainer
    reset_peak(device)

    def timed(action: Callable[[], Any]) -> float:
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    started = time.perf_counter()
    run = build_run(config)
    build_s = time.perf_counter() - started
    micro, accumulated = trainer.micro_batch_size, trainer.grad_accum_steps

    read = 0  # samples so far: a stream gives each of them once

    def steps(accumulate: int) -> Callable[[], None]:
        def step() -> None:
            nonlocal read
            windows = torch.from_numpy(run.sampler.batch(read, micro * accumulate)).to(device)
            run.step.grad_accum_steps = accumulate
            run.step(run.objective.batch(windows, read), run.schedule.lr(1)).tolist()
            read += micro * accumulate

        return step

    warm_s = timed(steps(1))
    # A step so slow is not slowed much by being the first, and a second one would double the wait.
    one_s = warm_s if warm_s > BUDGET_S and trainer.compile == "off" else timed(steps(1))
    scaled = STEPS * accumulated * one_s > BUDGET_S
    if scaled:
        times = [one_s * accumulated]
    else:
        times = []
        while len(times) < STEPS or (len(times) < MOST_STEPS and sum(times) < SHORT_S):
            times.append(timed(steps(accumulated)))
    step_s = statistics.median(times)
    windows = run.eval_windows[: 1 if scaled else micro]

    def evaluate() -> None:
        with autocast(device, trainer.precision):
            validate(run.model, run.objective, windows, run.step.at_once(micro), run.eval_bytes)

    def probe() -> None:
        with autocast(device, trainer.precision):
            probe_attention(run.model, run.objective, run.probe_windows)

    first_s = step_s + max(0.0, warm_s - one_s)
    if trainer.compile != "off":
        first_s += timed(evaluate) + timed(probe)
    eval_s = timed(evaluate) * len(run.eval_windows) / len(windows)
    probe_s = timed(probe)
    if not scaled:  # the heap of a longer run is a little larger; a second round shows most of that
        timed(steps(accumulated))
        timed(evaluate)
    how = "one micro-batch" if scaled and accumulated > 1 else None
    memory = peak_bytes(device)
    threads = trainer.threads is None and device.type == "cpu" and trainer.compile == "off" and not scaled
    by_threads = _by_threads(steps(accumulated)) if threads else ()
    return Timing(build_s, first_s, step_s, eval_s, probe_s, len(times), how, memory, by_threads)


def _by_threads(step: Callable[[], None]) -> tuple[ThreadTiming, ...]:
    """Steps with one thread and with the usual number, in turn, so that other work slows both alike."""
    usual = torch.get_num_threads()
    clocks: dict[int, list[Clock]] = {1: [], usual: []} if usual > 1 else {}
    try:
        for _ in range(ROUNDS):
            for threads, seen in clocks.items():
                torch.set_num_threads(threads)
                seen.append(Clock())
                with seen[-1].running():
                    step()
    finally:
        torch.set_num_threads(usual)
    found = []
    for threads, seen in clocks.items():
        times = [clock.wall_s for clock in seen]
        share = statistics.median(clock.share(threads) for clock in seen)
        found.append(ThreadTiming(threads, statistics.median(times), min(times), max(times), share))
    return tuple(found)


def count(every: int | None, steps: int) -> int:
    """How often the loop does within its steps what it does before the first, every so many, and after the last."""
    return 2 if every is None else 1 + -(-steps // every)


def seconds_of_run(config: TrainConfig, timing: Timing) -> dict[str, float]:
    """Seconds of each part of a run."""
    steps = config.trainer.max_steps
    return {
        "build": timing.build_s,
        "steps": timing.first_s + (steps - 1) * timing.step_s,
        "evaluations": count(config.trainer.eval_every, steps) * timing.eval_s,
        "probes": count(config.diagnostics.probe_every, steps) * timing.probe_s,
    }


def mfu(device: str, precision: str, flops_per_s: float) -> float | None:
    """Share of the device's dense peak; None where that is not known."""
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        return None  # TF32 has another peak
    peak = PEAKS.get(device, {}).get(precision)
    return None if peak is None else flops_per_s / peak
