"""The command `plan`: what a run or a sweep will cost. `cost.py` says how each number comes about."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stability_lab.command_line import CommandLine, read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import ConfigError, TrainConfig
from stability_lab.plugins.trust import allowed
from stability_lab.text import Table, aligned, duration, filled, next_command, room, text_table
from stability_lab.training.launched import refuse_several

if TYPE_CHECKING:
    from stability_lab.run.cost import Timing

HELP = """usage: stability_lab plan [--format text|json] [--no-timing] [--wide] [-m] [+stabilizer=NAME] [key=value ...]

Takes what `train` takes (--config-dir DIR and --allow PACKAGE too) and says what it would cost: stabilizers and seams,
parameters, FLOPs, tokens, peak memory and time. A few steps are run on this device to measure the last two. Nothing is
written but the token cache. With -m it prints a table of all jobs and the sum of their times; jobs that differ only in
values that do not change the speed (a seed, a learning rate, a cap) are measured once. With --no-timing no step is
run: the answer takes seconds, and its memory is that of weights, gradients and optimizer state. Lines are as
long as the terminal has room for; --wide wraps none.
"""
_log = logging.getLogger("stability_lab")

_UNTIMED = dict.fromkeys(("timing", "times", "eta_s", "memory_bytes", "tokens_per_s", "mfu"))
SWEEP_BUDGET_S = 300.0  # after that, the remaining jobs of a sweep are scaled by their FLOPs


def main(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    refuse_several("plan")
    output, timed, wide, rest = _options(argv)
    if output is None:
        print(HELP, end="")
        raise SystemExit(0)  # as argparse and Hydra end after the help of the other commands
    command = read_command_line(rest)
    if command.only_shows:
        raise ConfigError("plan takes no flag that only shows something: use train for --cfg and the like")
    if output == "json":
        _messages_to_stderr()
    try:
        result = plan(command, started, timed)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        print("error: out of memory on this device: try a smaller trainer.micro_batch_size", file=sys.stderr)
        return 1
    if output == "json":
        print(json.dumps(result, indent=2))
    else:
        width, table = room(wide), _table if timed else _sizes
        print(table(result, width) if command.multirun else _text(result["jobs"][0], width))
        print(next_command("train", *(word for package in allowed() for word in ("--allow", package)), *rest))
    return 0


def _options(argv: Sequence[str]) -> tuple[str | None, bool, bool, list[str]]:
    """The output format (None: help was asked for), whether steps are timed, whether lines may be of any length, and
    what is train's."""
    output, timed, wide, rest, words = "text", True, False, [], iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            return None, timed, wide, []
        if word in ("--no-timing", "--wide"):
            timed, wide = timed and word != "--no-timing", wide or word == "--wide"
            continue
        flag, equals, value = word.partition("=")
        if flag != "--format":
            rest.append(word)
            continue
        output = value if equals else next(words, "")
        if output not in ("text", "json"):
            raise ConfigError(f"--format={output}: must be text or json")
    return output, timed, wide, rest


def _messages_to_stderr() -> None:
    for handler in _log.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


def plan(command: CommandLine, started: float, timed: bool = True) -> dict[str, Any]:
    """`jobs`, one dict a job, `workers`, `start_up_s` of the command and `total_eta_s`.

    ConfigError before anything is timed. Not `timed`: what a measurement would give is None.
    """
    composed = compose_jobs(command)
    from stability_lab.build import check
    from stability_lab.run.compiling import settled
    from stability_lab.run.cost import facts
    from stability_lab.run.workers import makespan, of_a_sweep, workers_of

    workers = 1
    if command.multirun:
        composed, workers = of_a_sweep(composed), workers_of(composed)
    composed = [settled(job) for job in composed]
    check(job.config for job in composed)
    jobs = [facts(job) for job in composed]
    start_up = time.perf_counter() - started
    for job, overrides, composed_job in zip(jobs, command.jobs, composed, strict=True):
        job["job"] = _name(composed_job.config, overrides, command.swept)
    if not timed:
        return {
            "jobs": [job | _UNTIMED for job in jobs],
            "workers": workers,
            "start_up_s": start_up,
            "total_eta_s": None,
        }
    timings = _timings([job.config for job in composed], jobs)
    for job, composed_job, timing in zip(jobs, composed, timings, strict=True):
        job |= _costs(composed_job.config, job, timing)
    # Each worker starts as the command itself did.
    total = start_up * (1 if workers == 1 else 2) + makespan([job["eta_s"] for job in jobs], workers)
    if not command.multirun:
        jobs[0]["eta_s"], jobs[0]["times"]["start_up"] = total, start_up
    return {"jobs": jobs, "workers": workers, "start_up_s": start_up, "total_eta_s": total}


def _name(config: TrainConfig, overrides: Sequence[str], swept: Sequence[str]) -> str:
    varied = [line.lstrip("+~") for line in overrides]
    return " ".join(line for line in varied if line.partition("=")[0] in swept) or config.model.name


def _timings(configs: Sequence[TrainConfig], jobs: Sequence[Mapping[str, Any]]) -> list[Timing]:
    """One for each job. What is alike is measured once; past the sweep's budget the rest is scaled."""
    from stability_lab.run.cost import measure, scaled, speed_key

    known: dict[str, tuple[Timing, float]] = {}
    timings, started = [], time.perf_counter()
    for config, job in zip(configs, jobs, strict=True):
        t = config.trainer
        flops = job["flops_per_token"] * t.micro_batch_size * t.grad_accum_steps * config.model.seq_len
        key = speed_key(config)
        if key not in known:
            if known and time.perf_counter() - started > SWEEP_BUDGET_S:
                known[key] = (scaled(*next(iter(known.values())), flops), flops)
            else:
                _log.info("timing steps of %s, stabilizers %s", job["model"], ", ".join(job["stabilizers"]) or "none")
                known[key] = (measure(config), flops)
        timings.append(known[key][0])
    return timings


def _costs(config: TrainConfig, job: Mapping[str, Any], timing: Timing) -> dict[str, Any]:
    from stability_lab.run.cost import count, mfu, seconds_of_run

    steps, times = config.trainer.max_steps, seconds_of_run(config, timing)
    tokens_per_s = job["tokens"] / steps / timing.step_s
    return {
        "timing": timing._asdict() | {"by_threads": [one._asdict() for one in timing.by_threads]},
        "times": times,
        "eta_s": sum(times.values()),
        "memory_bytes": timing.memory_bytes,
        "tokens_per_s": tokens_per_s,
        "mfu": mfu(job["device"], config.trainer.precision, tokens_per_s * job["flops_per_token"]),
        "n_evaluations": count(config.trainer.eval_every, steps),
        "n_probes": count(config.diagnostics.probe_every, steps),
    }


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(
        text in str(error) for text in ("out of memory", "not enough memory", "t allocate memory")
    )


def _text(job: Mapping[str, Any], width: int | None) -> str:
    """One run, a line for each thing that is known of it."""
    parameters, timing = job["parameters"], job["timing"]
    added = ", ".join(f"{name} {n:+,}" for name, n in parameters["added_by"].items())
    lines = {
        "model": f"{job['model']} on {job['device']}, {job['precision']}",
        "stabilizers": ", ".join(job["stabilizers"]) or "none",
        "seams": "; ".join(f"{seam} <- {', '.join(owners)}" for seam, owners in job["seams"].items()) or "all empty",
        "attention": f"{job['attention']['name']} ({job['attention']['reason']})",
        "parameters": f"{parameters['total']:,}, {parameters['non_embedding']:,} without embeddings and head",
    }
    if "without_heads" in parameters:
        lines["parameters"] += f", {parameters['without_heads']:,} without heads"
    if added:
        lines["added by each alone"] = f"{added}; by all together {parameters['added_together']:+,}"
    for seam, factors in job["layer_factors"].items():
        lines[f"{seam} by layer"] = " ".join(f"{factor:.4g}" for factor in factors)
    if job["recipe"]:
        lines["recipe"] = f"{job['recipe'].get('name')} ({job['recipe'].get('source')})"
        lines["recipe lacks"] = "; ".join(job["recipe"].get("lacks") or ()) or "nothing"
    lines |= {
        "tokens": f"{job['tokens']:,} in {job['steps']:,} steps, {job['flops_per_token'] * job['tokens']:.3g} FLOPs; "
        + ("streamed" if job["epochs"] is None else f"{job['epochs']:.3g} epochs of {job['train_tokens']:,}"),
        "FLOPs a token": f"{job['flops_per_token']:,} forward and backward "
        f"(6 * matrix weights with the head + 12 * layers * d_model * seq_len)",
        "memory without activations": f"{_bytes(job['training_bytes'])} of weights, gradients and optimizer state",
        **({} if timing is None else _measured(job, timing)),
    }
    return "\n".join(
        [*aligned(lines.items(), width), *(filled(f"notice: {notice}", width) for notice in job["notices"])]
    )


def _measured(job: Mapping[str, Any], timing: Mapping[str, Any]) -> dict[str, str]:
    steps = (
        f"{timing['steps_timed']} timed" if timing["scaled_from"] is None else f"scaled from {timing['scaled_from']}"
    )
    return {
        "step": f"{timing['step_s']:.4g} s ({steps}), {job['tokens_per_s']:,.0f} tokens/s",
        "MFU": "n/a: no dense peak known" if job["mfu"] is None else f"{job['mfu']:.1%} of the device's dense peak",
        **_threads(timing["by_threads"]),
        "peak memory": _bytes(job["memory_bytes"]) + (" of the process" if job["device"] == "cpu" else " allocated"),
        "ETA": f"{duration(job['eta_s'])} = " + " + ".join(f"{name} {s:.1f} s" for name, s in job["times"].items()),
    }


def _threads(by_threads: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How long a step takes with one thread and with several, and whether other work was in the way."""
    if not by_threads:
        return {}
    from stability_lab.machine.clock import busy

    one, several = by_threads
    words = [
        f"{_many(t['threads'])} {t['step_s']:.4g} s a step ({t['fastest_s']:.4g} to {t['slowest_s']:.4g})"
        for t in by_threads
    ]
    if one["step_s"] < several["step_s"]:
        words.append("trainer.threads=1 is faster here")
    notice = busy(several["share"], several["threads"])
    return {"threads": "; ".join(words)} | ({} if notice is None else {"busy machine": notice})


def _many(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _sizes(result: Mapping[str, Any], width: int | None) -> str:
    """A sweep of which nothing was timed, one line a job."""
    header = ("job", "parameters", "tokens", "FLOPs", "memory without activations", "what varies")
    rows = []
    for number, job in enumerate(result["jobs"], 1):
        flops = f"{job['flops_per_token'] * job['tokens']:.3g}"
        counts = f"{job['parameters']['total']:,}", f"{job['tokens']:,}", flops
        rows.append((str(number), *counts, _bytes(job["training_bytes"]), job["job"]))
    return text_table(Table("", header, tuple(rows), _notices(result)), width)


def _notices(result: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"notice: {notice}" for job in result["jobs"] for notice in job["notices"]))


def _table(result: Mapping[str, Any], width: int | None) -> str:
    """A sweep, one line a job. `~`: not measured, scaled from another job."""
    header = ("job", "parameters", "tokens", "s/step", "memory", "ETA", "what varies")
    rows = []
    for number, job in enumerate(result["jobs"], 1):
        timing = job["timing"]
        about = "~" if timing["steps_timed"] == 0 else ""
        step, eta = f"{about}{timing['step_s']:.4g}", about + duration(job["eta_s"])
        counts = f"{job['parameters']['total']:,}", f"{job['tokens']:,}"
        rows.append((str(number), *counts, step, _bytes(job["memory_bytes"]), eta, job["job"]))
    at_once = "one after the other" if result["workers"] == 1 else f"{result['workers']} at once"
    total = f"{len(result['jobs'])} jobs, {at_once}: {duration(result['total_eta_s'])}"
    return "\n".join([text_table(Table("", header, tuple(rows), _notices(result)), width), total])


def _bytes(n: int | None) -> str:
    if n is None:
        return "not measured"
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"
