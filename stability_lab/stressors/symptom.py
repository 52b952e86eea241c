"""What a stressor promises to provoke, as its YAML file says it, and the step at which a run shows that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from stability_lab.compare.run_record import RunRecord
from stability_lab.config import ConfigError, config_dir
from stability_lab.text import did_you_mean

VERDICTS = ("diverged", "no_learning")
SMALL = "model=gpt_pico"  # every stressor shows its symptom in this model, in seconds


@dataclass(frozen=True)
class Symptom:
    """`event` is a verdict, a kind of event of the judge, or `above` or `below`: the signal passes `limit`.

    `signal` names the column of metrics.jsonl in which it shows; it begins between the steps `since` and `by`.
    """

    event: str
    signal: str
    by: int
    limit: float | None = None
    since: int = 1

    def step(self, run: RunRecord) -> int | None:
        """The first step at which the run shows it in time; None where it does not."""
        return min((step for step in self._steps(run) if self.since <= step <= self.by), default=None)

    def _steps(self, run: RunRecord) -> list[int]:
        if self.limit is not None:
            series = run.series("step", self.signal)
            sign = -1 if self.event == "below" else 1
            return [int(step) for step in series["step"][sign * series[self.signal] > sign * self.limit]]
        if self.event in VERDICTS:
            begin = run.metric("first_bad_step" if self.event == "diverged" else "steps")
            return [int(begin)] if run.outcome == self.event and begin is not None else []
        return [step for step, _ in run.events(self.event)]


@dataclass(frozen=True)
class Stressor:
    """`shown_with`: the words of `train` with which it shows its symptom; `rescue`: the stabilizer that then helps."""

    name: str
    summary: str
    source: str
    symptom: Symptom
    shown_with: tuple[str, ...]
    rescue: str | None

    @property
    def words(self) -> list[str]:
        """What makes the runs of `demo` and of the tests, but for the stressor itself."""
        return [SMALL, *self.shown_with]


def stressors() -> Iterator[Stressor]:
    """All of them, by name."""
    for file in sorted((config_dir() / "stressor").glob("*.yaml")):
        node = yaml.safe_load(file.read_text(encoding="utf-8"))["stressor"][file.stem]
        fields = node | {"symptom": Symptom(**node["symptom"]), "shown_with": tuple(node["shown_with"])}
        yield Stressor(file.stem, **fields)


def stressor(name: str) -> Stressor:
    """ConfigError for a name that none has."""
    known = {found.name: found for found in stressors()}
    if name not in known:
        raise ConfigError(f"{name} is not a stressor: {did_you_mean(name, known)}")
    return known[name]
