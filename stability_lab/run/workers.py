"""How many runs of a sweep this machine trains at once, and with what each of them computes."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import torch

from stability_lab.build import device_of
from stability_lab.compose import Composed
from stability_lab.config import ConfigError, TrainConfig
from stability_lab.diagnostics.memory import physical_bytes
from stability_lab.machine.cores import cores

PROCESS_BYTES = 2**29  # of torch alone
GPT2_VOCAB = 50_304  # of a tokenizer that is not loaded yet


def of_a_sweep(composed: Sequence[Composed]) -> list[Composed]:
    """The jobs as a sweep trains them: with one thread on a CPU, where none asks for another number.

    So a run has the same bits however many runs are beside it: one and two threads round differently.
    """
    if device_of(composed[0].config).type != "cpu" or any(job.config.trainer.threads for job in composed):
        return list(composed)
    return [_with_threads(job, 1) for job in composed]


def workers_of(composed: Sequence[Composed]) -> int:
    """Processes for these jobs: as many as `sweep.workers` says, by default one for each CPU core or each GPU, and on
    a CPU no more than its memory holds by a rough count."""
    config = composed[0].config
    if config.sweep.workers != "auto":
        return min(config.sweep.workers, len(composed))
    if device_of(config).type == "cpu":
        most = cores() // max(job.config.trainer.threads or cores() for job in composed)
        memory = physical_bytes(torch.device("cpu"))
        if memory is not None:
            most = min(most, memory // max(_rough_bytes(job.config) for job in composed))
    else:
        most = torch.cuda.device_count()
    return max(1, min(most, len(composed)))


def _rough_bytes(config: TrainConfig) -> int:
    """A run's memory within a factor of two or so: the process, 16 bytes a parameter, and what backward keeps in fp32:
    some 18 numbers of the width a token and layer, and three of the vocabulary."""
    model, tokens = config.model, config.trainer.micro_batch_size * config.model.seq_len
    unread = 257 if "Byte" in str(config.tokenizer.get("_target_")) else GPT2_VOCAB
    vocab = model.vocab_size or config.tokenizer.get("vocab_size") or unread
    parameters = 12 * model.n_layers * model.d_model**2 + 2 * vocab * model.d_model
    return PROCESS_BYTES + 16 * parameters + 4 * tokens * (18 * model.n_layers * model.d_model + 3 * vocab)


def words_of(composed: Sequence[Composed], launcher: str | None) -> list[str]:
    """What Hydra is told of threads and workers; `launcher` is the one that the command names, which has options of
    its own."""
    workers, threads = composed[0].config.sweep.workers, {job.config.trainer.threads for job in composed}
    words = ["++trainer.threads=1"] if threads == {1} else []
    if launcher is None:
        count = workers_of(composed)
        return words + (["hydra/launcher=joblib", f"hydra.launcher.n_jobs={count}"] if count > 1 else [])
    if workers != "auto":
        raise ConfigError(
            f"sweep.workers={workers}: hydra/launcher={launcher} has options of its own (hydra.launcher.n_jobs of "
            "joblib); leave one of the two out"
        )
    return words


def makespan(seconds: Sequence[float], workers: int) -> float:
    """How long jobs take that start in order, each as soon as one of the workers is free."""
    free = [0.0] * workers
    for taken in seconds:
        heapq.heapreplace(free, free[0] + taken)
    return max(free)


def take_device(worker: int) -> None:
    """The GPU of a worker, by its number from 0 on, where there are several."""
    count = torch.cuda.device_count()
    if count > 1:
        torch.cuda.set_device(worker % count)


def _with_threads(job: Composed, threads: int) -> Composed:
    trainer = dataclasses.replace(job.config.trainer, threads=threads)
    plain = {**job.plain, "trainer": {**job.plain["trainer"], "threads": threads}}
    return job._replace(config=dataclasses.replace(job.config, trainer=trainer), plain=plain)
