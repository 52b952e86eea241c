"""Running the training loop without files."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from stability_lab.judge.series import Row
from stability_lab.training.inject import Injector, parse
from stability_lab.training.loop import Loop, Run


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
    sink = Recorder()
    injector = Injector(parse(run.config.debug.inject, run.config.trainer.max_steps))
    return Trained(run, Loop(run, sink, injector), sink)


@pytest.fixture(scope="session")
def prepare(tiny_run):
    """`prepare(*overrides)`: a tiny run and its loop, not yet started."""
    return lambda *overrides: make_loop(tiny_run(*overrides))


@pytest.fixture(scope="session")
def trained(prepare):
    """`trained(*overrides)`: a tiny run that went through its loop."""

    def train(*overrides: str) -> Trained:
        result = prepare(*overrides)
        result.loop.train()
        return result

    return train
