"""Running the training loop without files."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from stability_lab.build import Run
from stability_lab.training.history import Row
from stability_lab.training.inject import Injector, parse
from stability_lab.training.loop import Intervals, Loop


class Recorder:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.seen: list[Row] = []
        self.deliveries: list[int] = []
        self.events: list[dict[str, Any]] = []

    def rows(self, rows: Sequence[Row]) -> None:
        self.seen += rows
        self.deliveries.append(len(rows))

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))


class Trained(NamedTuple):
    run: Run
    loop: Loop
    sink: Recorder

    @property
    def steps(self) -> list[Row]:
        """The rows without what depends on the clock or on how often the model is measured."""
        measured = ("perf/", "val/", "act/", "weight/")
        measured += tuple(f"attn/{name}" for name in ("max", "entropy", "score_mod", "scale", "qk_gain"))
        return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in self.sink.seen]


def make_loop(run: Run) -> Trained:
    trainer, sink = run.config.trainer, Recorder()
    plan = Intervals(
        max_steps=trainer.max_steps,
        micro_batch_size=trainer.micro_batch_size,
        grad_accum_steps=trainer.grad_accum_steps,
        seq_len=run.config.model.seq_len,
        log_every=trainer.log_every,
        eval_every=trainer.eval_every,
        probe_every=run.config.diagnostics.probe_every,
        mask_repeats=run.config.sampling.mask_repeats,
    )
    measured = {"eval_windows": run.eval_windows, "eval_bytes": run.eval_bytes, "probe_windows": run.probe_windows}
    injector = Injector(parse(run.config.debug.inject, run.config.trainer.max_steps))
    loop = Loop(run.model, run.step, run.schedule, run.sampler, **measured, plan=plan, sink=sink, injector=injector)
    return Trained(run, loop, sink)


@pytest.fixture(scope="session")
def prepare(tiny_run):
    """`prepare(*overrides)`: a tiny run and its loop, not yet started."""
    return lambda *overrides: make_loop(tiny_run(*overrides))


@pytest.fixture(scope="session")
def trained(prepare):
    """`trained(*overrides)`: a tiny run that went through its loop."""

    def train(*overrides: str) -> Trained:
        result = prepare(*overrides)
        result.loop.run()
        return result

    return train
