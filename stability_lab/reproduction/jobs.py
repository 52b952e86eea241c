"""The runs of a part: the commands that make them, which are there already, and how long the others will take."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from stability_lab import __version__
from stability_lab.compare.run_record import RunRecord, read_run
from stability_lab.compose import Composed, compose_jobs, plugin_installed, read_command_line
from stability_lab.config import ConfigError, from_plain
from stability_lab.machine.cores import cores
from stability_lab.reproduction.catalogue import Part
from stability_lab.reproduction.datafile import damage
from stability_lab.reproduction.evidence import KeptRun, torn
from stability_lab.run.folder import CONFIG, MANIFEST, SUMMARY, read_object
from stability_lab.text import shown
from stability_lab.tracking.manifest import fingerprint
from stability_lab.tracking.run_files import METRICS

if TYPE_CHECKING:
    from stability_lab.run.cost import Timing

RUNS = "outputs/reproduction"
UNFINISHED = ("running", "failed", "interrupted")
# Where no GPU is at hand to measure on: this part of an H200's dense bf16 peak, and for a small model the time in which
# its kernels are launched. Assumptions, and printed as such.
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
    """All of a part, in the order in which they run. ConfigError where the part has not that scale."""
    scale = part.at(scale_name)
    workers = _workers(scale_name, scale.workers)
    # One thread, however many workers there are: one and two threads round differently.
    device = ["trainer.device=cpu", "trainer.threads=1"] if scale_name == "cpu" else ["trainer.device=cuda"]
    # repr: a rate of `1` would be an int, and another run by its fingerprint.
    axes = [f"optimizer.lr={','.join(map(repr, scale.lrs))}"] if scale.lrs else []
    axes += [f"seed={','.join(map(str, scale.seeds))}", f"output_dir={RUNS}", f"group={group_of(part, scale_name)}"]
    launcher = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={workers}"] if workers > 1 else []
    made = []
    for setting, setting_words in part.settings_at(scale_name).items():
        for arm, arm_words in part.arms.items():
            words = [f"+experiment={scale.experiment}", *scale.overrides, *setting_words, *arm_words, *device]
            (composed,) = compose_jobs(read_command_line(words))
            jobs = [_job(arm, setting, lr, seed, composed) for lr in scale.lrs or (None,) for seed in scale.seeds]
            made.append(Sweep(("-m", *words, *axes, *launcher), tuple(jobs)))
    return made


def _job(arm: str, setting: str, lr: float | None, seed: int, composed: Composed) -> PlannedRun:
    """Composing takes a quarter of a second, and rates and seeds are plain values of what was composed."""
    plain = {**composed.plain, "seed": seed}
    if lr is not None:
        plain["optimizer"] = {**plain["optimizer"], "lr": lr}
    return PlannedRun(arm, setting, lr, seed, composed._replace(config=from_plain(plain), plain=plain))


def workers_of(part: Part, scale_name: str) -> int:
    return _workers(scale_name, part.at(scale_name).workers)


@dataclass(frozen=True)
class There:
    """What lies in a part's folder: runs with a result, and a sentence on each that has one but is damaged, which
    `train` takes for finished and does not make again."""

    runs: Mapping[str, RunRecord]  # by fingerprint
    faults: Mapping[str, str]

    def left(self, sweeps: Sequence[Sweep]) -> list[PlannedRun]:
        """What `train` would still do."""
        done = {*self.runs, *self.faults}
        return [job for sweep in sweeps for job in sweep.jobs if job.digest not in done]


def there(part: Part, scale: str, made: Sequence[Sweep]) -> There:
    """Runs of an earlier form of the part do not count."""
    folder = Path(RUNS) / group_of(part, scale)
    wanted = {job.digest for sweep in made for job in sweep.jobs}
    runs, faults = {}, {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        known = read_object(path / MANIFEST).get("fingerprint")
        # Without it, `train` goes by the folder's name.
        digest = known or next((digest for digest in wanted if f"_{digest[:8]}" in path.name), None)
        if digest not in wanted or _unfinished(path):
            continue
        try:
            run = read_run(path)
            if why := _fault(run, digest):
                faults[digest] = why
            else:
                runs[digest] = run
        except ConfigError as error:
            faults[digest] = str(error)
    told = "{}: delete the folder, and the same command makes the run again"
    return There(runs, {digest: told.format(why) for digest, why in faults.items() if digest not in runs})


def _unfinished(path: Path) -> bool:
    """Will `train` go on with it, or begin anew? A run that has logged a step has a summary as well."""
    if not (path / SUMMARY).exists():
        return not (path / METRICS).is_file() or not (path / METRICS).stat().st_size
    return read_object(path / SUMMARY).get("status") in UNFINISHED


def _fault(run: RunRecord, digest: str) -> str:
    """Why a run that has ended is not what its name says; empty where it is."""
    if run.manifest.get("fingerprint") != digest:
        return f"{shown(run.path / MANIFEST)} has no fingerprint, or is missing"
    if fingerprint(run.config, __version__) != digest:
        return f"{shown(run.path / CONFIG)} is not the configuration that was run"
    if not run.ended:
        return f"{shown(run.path / SUMMARY)} does not say how the run ended"
    return damage(run) or torn(run)


def collected(made: Sequence[Sweep], done: Mapping[str, RunRecord]) -> list[KeptRun]:
    return [
        KeptRun(job.arm, job.setting, job.lr, job.seed, done[job.digest])
        for sweep in made
        for job in sweep.jobs
        if job.digest in done
    ]


@dataclass(frozen=True)
class Estimate:
    """Of the runs that are still to be made: seconds with all workers, and how that is known."""

    seconds: float
    how: str
    here: bool = True  # by what this machine does


def estimate(
    made: Sequence[Sweep],
    there: There,
    workers: int,
    scale: str,
    known: MutableMapping[str, Timing],
) -> Estimate:
    """From the speed of runs that are there, else from a few steps of one run here; without a GPU, those that need one
    from their FLOPs. `known` keeps what was measured: parts that share a base share its speed."""
    left = there.left(made)
    if not left:
        return Estimate(0.0, "what is not there is damaged" if there.faults else "all runs are there")
    if speeds := [speed for run in there.runs.values() if (speed := run.metric("tokens_per_s"))]:
        seconds = sum(tokens_of(job) for job in left) / median(speeds)
        return Estimate(seconds / workers, "from the speed of the runs that are there")
    from stability_lab.run.cost import measure, scaled, speed_key

    first = left[0].composed.config
    flops = [flops_of(job) for job in left]
    if scale != "cpu" and not _has_cuda():
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
    timing, seconds = known[key], 0.0
    for job, total in zip(left, flops, strict=True):
        steps = job.composed.config.trainer.max_steps
        own = scaled(timing, flops[0] / first.trainer.max_steps, total / steps)
        seconds += timing.build_s + own.first_s + steps * own.step_s + 2 * own.eval_s
        every = job.composed.config.diagnostics.probe_every
        seconds += own.probe_s * (1 + (steps // every if every else 1))
    return Estimate(seconds / workers, "from a few steps of its first run on this machine")


def tokens_of(job: PlannedRun) -> int:
    config = job.composed.config
    return _micro_steps(job) * config.trainer.micro_batch_size * config.model.seq_len


def _micro_steps(job: PlannedRun) -> int:
    t = job.composed.config.trainer
    return t.max_steps * t.grad_accum_steps


def flops_of(job: PlannedRun) -> float:
    return float(flops_and_parameters(job)[0]) * tokens_of(job)


def flops_and_parameters(job: PlannedRun) -> tuple[int, int]:
    """FLOPs a token and unique parameters, from the model on the meta device; no data is read."""
    import torch

    from stability_lab.build import build_model, build_stabilizers, fill_seams
    from stability_lab.model.transformer import parameter_counts
    from stability_lab.run.cost import flops_per_token

    config = job.composed.config
    config = replace(config, trainer=replace(config.trainer, device="cpu"))
    vocab = 50_257 if "Gpt2" in str(config.tokenizer.get("_target_")) else 257
    with torch.device("meta"):
        model = build_model(config, vocab, fill_seams(build_stabilizers(config)))
    return flops_per_token(model), parameter_counts(model)["total"]


def _workers(scale: str, most: int | None) -> int:
    """On a GPU runs follow each other; on a CPU each core has one, with one thread."""
    if scale != "cpu" or not plugin_installed("hydra_joblib_launcher"):
        return 1
    return cores() if most is None else min(most, cores())


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
