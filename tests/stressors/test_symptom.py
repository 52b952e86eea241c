"""Each stressor shows the symptom that its file promises, with five seeds, and the same runs without it do not.

`pytest tests/stressors -s` prints the numbers of the table in docs/stressors.md."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stability_lab.command_line import read_command_line
from stability_lab.compare.run_record import RunRecord, read_run
from stability_lab.compose import compose_jobs
from stability_lab.config import ConfigError, config_dir
from stability_lab.judge.events import SPIKES
from stability_lab.stressors.symptom import VERDICTS, Stressor, Symptom, stressor, stressors
from stability_lab.text import flatten

ALL = tuple(stressors())
SEEDS = range(5)
MISSED = 1  # of five seeds, that may go either way
DOCS = Path(__file__).resolve().parents[2] / "docs"
QUIET = ("tracking=local", "trainer.threads=1", "trainer.save_weights=false", "trainer.eval_every=null")


def names(option: Stressor) -> str:
    return option.name


def record(folder: Path, losses: list[float], events: list[dict[str, Any]], summary: dict[str, Any]) -> RunRecord:
    rows = [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, start=1)]
    for name, lines in (("metrics", rows), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return RunRecord(folder, {}, {}, summary)


def test_a_symptom_is_an_event_a_verdict_or_a_level_in_its_time(tmp_path: Path) -> None:
    events = [{"event": "loss_spike", "step": 7, "length": 1}, {"event": "loss_spike", "step": 9, "length": 1}]
    run = record(tmp_path, [5.0, 9.0, 4.0, 8.5], events, {"status": "diverged", "first_bad_step": 4})
    assert Symptom("loss_spike", "train/loss", by=10).step(run) == 7
    assert Symptom("loss_spike", "train/loss", by=10, since=8).step(run) == 9
    assert Symptom("loss_spike", "train/loss", by=6).step(run) is None
    assert Symptom("grad_norm_spike", "optim/grad_norm", by=10).step(run) is None
    assert Symptom("above", "train/loss", by=10, limit=8.0).step(run) == 2
    assert Symptom("above", "train/loss", by=10, limit=8.0, since=3).step(run) == 4
    assert Symptom("above", "train/loss", by=10, limit=9.0).step(run) is None
    assert Symptom("below", "train/loss", by=10, limit=4.5).step(run) == 3
    assert Symptom("below", "train/loss", by=10, limit=4.0).step(run) is None
    assert Symptom("diverged", "train/loss", by=4).step(run) == 4
    assert Symptom("diverged", "train/loss", by=3).step(run) is None


def test_a_name_that_none_has_gets_a_sentence() -> None:
    with pytest.raises(ConfigError, match="attention_grwth is not a stressor: did you mean attention_growth"):
        stressor("attention_grwth")
    assert stressor("attention_growth").rescue == "qknorm"


@pytest.mark.parametrize("option", ALL, ids=names)
def test_a_stressor_says_what_it_provokes_and_has_a_page(option: Stressor) -> None:
    assert option.summary
    assert option.source
    assert option.symptom.event in {*SPIKES, *VERDICTS, "attention_logit_alert", "nonfinite_step", "above", "below"}
    assert (option.symptom.event in ("above", "below")) == (option.symptom.limit is not None)
    if option.rescue is not None:
        assert (config_dir() / "stabilizer" / f"{option.rescue}.yaml").is_file()
    page = (DOCS / "stressors" / f"{option.name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {option.name}\n")
    assert f"stressors/{option.name}.md" in (DOCS / "stressors.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ALL, ids=names)
def test_the_words_that_show_a_stressor_leave_its_keys_alone(option: Stressor) -> None:
    (job,) = compose_jobs(read_command_line([*option.words, f"+stressor={option.name}"]))
    content = yaml.safe_load((config_dir() / "stressor" / f"{option.name}.yaml").read_text(encoding="utf-8"))
    composed = flatten(job.plain)
    own = flatten({key: value for key, value in content.items() if key not in ("stressor", "defaults")})
    assert own
    assert {key: composed[key] for key in own} == own


def test_stressors_and_stabilizers_go_together_and_a_key_that_two_set_is_refused() -> None:
    words = ["+stressor=[attention_growth,no_clip]", "+stabilizer=qknorm", "optimizer.lr=0.1"]
    (job,) = compose_jobs(read_command_line(words))
    assert job.config.stressor is not None
    assert set(job.config.stressor) == {"attention_growth", "no_clip"}
    assert (job.config.lr, job.config.trainer.grad_clip) == (0.1, None)
    with pytest.raises(
        ConfigError, match=r"stressor=\[attention_growth,lr_ramp\]: both set optimizer.lr, to 0.3 and to 3"
    ):
        read_command_line(["+stressor=[attention_growth,lr_ramp]"])
    with pytest.raises(ConfigError, match="stressor=no_clup is not an option: did you mean no_clip"):
        read_command_line(["+stressor=[no_clup]"])


@pytest.fixture(scope="session")
def first_steps(tmp_path_factory: pytest.TempPathFactory, run_command: Callable[..., Any]) -> Callable[..., Any]:
    """`first_steps(symptom, *words)`: for each seed the step at which the run shows it, and CPU seconds of a run.

    Equal runs are made once."""
    made: dict[tuple[str, ...], tuple[list[RunRecord], float]] = {}

    def runs(*words: str) -> tuple[list[RunRecord], float]:
        begin = time.process_time()
        folder = tmp_path_factory.mktemp("runs")
        for seed in SEEDS:
            done = run_command("train", *words, *QUIET, f"output_dir={folder}", f"run_name={seed}", f"seed={seed}")
            assert done.code in (0, 3), done.err
        each = (time.process_time() - begin) / len(SEEDS)
        return [read_run(folder / "runs" / str(seed)) for seed in SEEDS], each

    def steps(symptom: Symptom, *words: str) -> tuple[list[int | None], float]:
        if words not in made:
            made[words] = runs(*words)
        records, each = made[words]
        return [symptom.step(run) for run in records], each

    return steps


@pytest.mark.slow
@pytest.mark.parametrize("option", ALL, ids=names)
def test_the_symptom_appears_with_the_stressor_and_not_without(
    option: Stressor, first_steps: Callable[..., tuple[list[int | None], float]]
) -> None:
    found, each = first_steps(option.symptom, *option.words, f"+stressor={option.name}")
    without, _ = first_steps(option.symptom, *option.words)
    print(f"\n{option.name}: with it at steps {found}, without at {without}, {each:.1f} CPU seconds a run")
    assert found.count(None) <= MISSED, found
    assert len(SEEDS) - without.count(None) <= MISSED, without
