"""`trainer.compile=auto`: which mode it is, from configuration and machine alone; what a run records, and keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from stability_lab import cli
from stability_lab.command_line import read_command_line
from stability_lab.compose import Composed, compose_jobs
from stability_lab.run import compiling
from stability_lab.run.compiling import Eager, block_flops, choose, settled
from stability_lab.run.cost import flops_per_token

TINY = ["train", "trainer.device=cpu", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.seq_len=16"]
TINY += ["trainer.micro_batch_size=2", "trainer.max_steps=2", "trainer.eval_sequences=2", "tracking=local"]
TINY += ["diagnostics.probe_sequences=1", "trainer.threads=1", "trainer.compile=auto"]


def job(*words: str) -> Composed:
    return compose_jobs(read_command_line(["trainer.device=cpu", "trainer.compile=auto", "trainer.threads=1", *words]))[
        0
    ]


@pytest.fixture(autouse=True)
def a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "missing_compiler", lambda kind: None)


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which compiling is for nothing."""
    monkeypatch.setattr(compiling, "KINDS", {"cpu": Eager(1e9, 1e-3, 0.5, 1e-6)})


@pytest.mark.parametrize(
    "words", [[], ["model.mlp=swiglu", "model.n_kv_heads=2"], ["model.d_ff=100", "trainer.grad_accum_steps=3"]]
)
def test_flops_of_the_blocks_are_those_of_the_cost_model_without_the_head(words: list[str], tiny_run) -> None:
    run = tiny_run(*words)
    config = run.config
    head = 6 * run.model.config.d_model * run.model.unembedding.shape[0]
    tokens = config.trainer.micro_batch_size * config.trainer.grad_accum_steps * config.model.seq_len
    assert block_flops(config) == tokens * (flops_per_token(run.model) - head)


def test_blocks_are_compiled_where_enough_steps_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KINDS", {"cpu": Eager(30e9, 1e-3, 0.1, 60.0)})
    few, many = job("trainer.max_steps=300"), job("trainer.max_steps=1000000")
    assert choose(few.config).mode == "off"
    assert "300 steps of an estimated" in choose(few.config).reason
    assert choose(many.config).mode == "block"
    assert "save more than" in choose(many.config).reason
    # Two threads halve a step, and the arms of a comparison are compiled alike.
    steps = next(n for n in range(1000, 10**6, 1000) if choose(job(f"trainer.max_steps={n}").config).mode == "block")
    assert choose(job(f"trainer.max_steps={steps}", "trainer.threads=2").config).mode == "off"
    assert choose(job(f"trainer.max_steps={steps}", "+stabilizer=[rmsnorm,softcap]").config).mode == "block"


def test_a_machine_without_a_compiler_compiles_nothing(monkeypatch: pytest.MonkeyPatch, pays: None) -> None:
    assert choose(job().config).mode == "block"
    monkeypatch.setattr(compiling, "missing_compiler", lambda kind: "no g++")
    assert choose(job().config) == ("off", "there is no g++ here")
    monkeypatch.setattr(compiling, "missing_compiler", {"cuda": "no Triton", "cpu": None}.get)
    monkeypatch.setattr(compiling, "device_of", lambda config: torch.device("cuda"))
    assert choose(job().config) == ("off", "there is no Triton here")


def test_the_mode_takes_the_place_of_the_word_and_one_line_says_so(pays: None) -> None:
    asked = job()
    made = settled(asked)
    assert (made.config.trainer.compile, made.plain["trainer"]["compile"]) == ("block", "block")
    assert made.notices == (f"compile: block, since {choose(asked.config).reason}",)
    given = job("trainer.compile=full")
    assert settled(given) is given
    assert asked.plain["trainer"]["compile"] == "auto"


@pytest.mark.slow
def test_a_run_records_the_mode_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where another number of steps, or another machine, would have chosen another one."""
    monkeypatch.chdir(tmp_path)
    assert cli.run([*TINY, "run_name=one"]) == 0
    assert "notice: compile: off, since 2 steps of an estimated" in capsys.readouterr().out
    run = tmp_path / "outputs" / "runs" / "one"
    config = run / "config.yaml"
    assert yaml.safe_load(config.read_text())["trainer"]["compile"] == "off"
    monkeypatch.setattr(compiling, "KINDS", {"cpu": Eager(1e9, 1e-3, 0.5, 1e-6)})
    same = [*TINY, "run_name=one", "if_exists=resume", "trainer.max_steps=3"]
    for words in (same, ["train", f"resume={run}", "trainer.compile=auto", "trainer.max_steps=4"]):
        assert cli.run(words) == 0
        assert "notice: compile: off, since the run has begun so" in capsys.readouterr().out
        assert yaml.safe_load(config.read_text())["trainer"]["compile"] == "off"
