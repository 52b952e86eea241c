"""The runs of a part: the commands that make them, which are there already, and how long the others will take."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from stability_lab import __version__
from stability_lab.command_line import read_command_line
from stability_lab.compare.run_record import RunRecord, read_run
from stability_lab.compose import Composed, compose_jobs
from stability_lab.config import from_plain
from stability_lab.machine.cores import cores
from stability_lab.plugins.instantiate import typed_options
from stability_lab.reproduction.catalogue import Part, last_of_each_key
from stability_lab.reproduction.evidence import KeptRun
from stability_lab.run.folder import finished_in
from stability_lab.tracking.manifest import fingerprint

if TYPE_CHECKING:
    from stability_lab.run.cost import Timing

RUNS = "outputs/reproduction"
# Without a GPU to measure on, the plan assumes this share of an H200's dense bf16 peak, and for a small model this time
# to launch its kernels. The plan prints both as assumptions.
ASSUMED_SHARE = 0.3
ASSUMED_STEP_S = 0.01
H200_FLOPS = 989e12


@dataclass(frozen=True)
class PlannedRun:
    """One run: what it is called in the tables, and its configuration."""

    arm: str
    setting: str
    lr: float | None
    seed: int
    composed: Composed

    @property
    def digest(self) -> str:
        return fingerprint(self.composed.plain, __version__)


@dataclass(frozen=True)
class Sweep:
    """One `train -m`: an arm in a setting, over learning rates and seeds."""

    words: tuple[str, ...]  # after `train`
    jobs: tuple[PlannedRun, ...]

    @property
    def command(self) -> str:
        return shlex.join(["python", "-m", "stability_lab", "train", *self.words])


def group_of(part: Part, scale: str) -> str:
    return f"{part.name}_{part.part}_{scale}"


def sweeps(part: Part, scale_name: str) -> list[Sweep]:
    """The sweeps of a part in the order in which they run."""
    scale = part.scales[scale_name]
    workers = workers_of(part, scale_name)
    # One thread, however many workers there are: one and two threads round differently.
    device = ["trainer.device=cpu", "trainer.threads=1"] if scale_name == "cpu" else ["trainer.device=cuda"]
    axes = [f"optimizer.lr={','.join(map(str, scale.lrs))}"] if scale.lrs else []
    axes += [f"seed={','.join(map(str, scale.seeds))}", f"output_dir={RUNS}", f"group={group_of(part, scale_name)}"]
    launcher = [f"sweep.workers={workers}"]
    made = []
    for setting, setting_words in part.settings_at(scale_name).items():
        for arm, arm_words in part.arms.items():
            words = last_of_each_key([*scale.overrides, *setting_words, *arm_words, *device])
            (composed,) = compose_jobs(read_command_line(words))
            jobs = [job_at(arm, setting, lr, seed, composed) for lr in scale.lrs or (None,) for seed in scale.seeds]
            made.append(Sweep(("-m", *words, *axes, *launcher), tuple(jobs)))
    return made


def job_at(arm: str, setting: str, lr: float | None, seed: int, composed: Composed) -> PlannedRun:
    """Composing takes a quarter of a second, so rates and seeds are set in what was composed once."""
    plain = {**typed_options(composed.plain), "seed": seed}
    if lr is not None:
        plain["optimizer"] = {**plain["optimizer"], "lr": lr}
    return PlannedRun(arm, setting, lr, seed, composed._replace(config=from_plain(plain), plain=plain))


def finished(part: Part, scale: str, made: Sequence[Sweep]) -> dict[str, RunRecord]:
    """The runs of these sweeps that have a result, by fingerprint: those that `train` would not make again.

    ConfigError where the files of one cannot be read.
    """
    wanted = {job.digest for job in _jobs(made)}
    found = finished_in(Path(RUNS) / group_of(part, scale))
    return {digest: read_run(path) for digest, path in found.items() if digest in wanted}


def unfinished(made: Sequence[Sweep], done: Mapping[str, RunRecord]) -> list[PlannedRun]:
    return [job for job in _jobs(made) if job.digest not in done]


def collected(made: Sequence[Sweep], done: Mapping[str, RunRecord]) -> list[KeptRun]:
    jobs = (job for job in _jobs(made) if job.digest in done)
    return [KeptRun(job.arm, job.setting, job.lr, job.seed, done[job.digest]) for job in jobs]


def _jobs(made: Sequence[Sweep]) -> list[PlannedRun]:
    return [job for sweep in made for job in sweep.jobs]


class Estimate(NamedTuple):
    """The seconds that the missing runs will take with all workers, and how that is known."""

    seconds: float
    how: str
    here: bool = True  # from what this machine does


def estimate(
    left: Sequence[PlannedRun],
    done: Mapping[str, RunRecord],
    workers: int,
    known: MutableMapping[str, Timing],
) -> Estimate:
    """The time of `left`: from the speed of the runs in `done`, else from a few steps of one run here, or from FLOPs if
    that needs a GPU and there is none. `known` keeps measurements, because parts that share a base share its speed."""
    if not left:
        return Estimate(0.0, "all runs are there")
    if speeds := [speed for run in done.values() if (speed := run.metric("tokens_per_s"))]:
        seconds = sum(tokens_of(job) for job in left) / median(speeds)
        return Estimate(seconds / workers, "from the speed of the runs that are there")
    from stability_lab.run.cost import measure, scaled, seconds_of_run, speed_key

    flops = [flops_and_parameters(job)[0] * tokens_of(job) for job in left]
    first = left[0].composed.config
    if first.trainer.device == "cuda" and not _has_cuda():
        seconds = sum(
            max(total / (ASSUMED_SHARE * H200_FLOPS), ASSUMED_STEP_S * _micro_steps(job))
            for job, total in zip(left, flops, strict=True)
        )
        how = (
            f"no GPU here: {sum(flops):.2g} FLOPs at an assumed {ASSUMED_SHARE:.0%} of an H200's peak, a step not "
            f"below {ASSUMED_STEP_S * 1000:g} ms; without start, compilation and evaluation"
        )
        return Estimate(seconds, how, here=False)
    key = speed_key(first)
    if key not in known:
        known[key] = measure(first)
    per_step = [total / job.composed.config.trainer.max_steps for job, total in zip(left, flops, strict=True)]
    timings = [scaled(known[key], per_step[0], own) for own in per_step]
    seconds = sum(
        sum(seconds_of_run(job.composed.config, timing).values()) for job, timing in zip(left, timings, strict=True)
    )
    return Estimate(seconds / workers, "from a few steps of its first run on this machine")


def tokens_of(job: PlannedRun) -> int:
    config = job.composed.config
    return _micro_steps(job) * config.trainer.micro_batch_size * config.model.seq_len


def _micro_steps(job: PlannedRun) -> int:
    t = job.composed.config.trainer
    return t.max_steps * t.grad_accum_steps


def flops_and_parameters(job: PlannedRun) -> tuple[int, int]:
    """FLOPs a token and unique parameters, from the model on the meta device; no data is read.

    The tokenizer must be one that knows the size of its vocabulary before it has seen text.
    """
    import torch

    from stability_lab.build import build_model, build_stabilizers, fill_seams, instantiate
    from stability_lab.model.transformer import parameter_counts
    from stability_lab.run.cost import flops_per_token

    config = job.composed.config
    config = replace(config, trainer=replace(config.trainer, device="cpu"))
    vocab_size = instantiate(config.tokenizer, "tokenizer").vocab_size
    with torch.device("meta"):
        model = build_model(config, vocab_size, fill_seams(build_stabilizers(config)))
    return flops_per_token(model), parameter_counts(model)["total"]


def workers_of(part: Part, scale: str) -> int:
    """On a GPU runs follow each other; on a CPU each core has one, with one thread."""
    most = part.scales[scale].workers
    if scale != "cpu":
        return 1
    return cores() if most is None else min(most, cores())


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
