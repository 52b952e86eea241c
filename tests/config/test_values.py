"""Runs are told apart by the values of their configuration, not by how somebody wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stability_lab.command_line import read_command_line
from stability_lab.commands.train import main
from stability_lab.compare.grouping import group
from stability_lab.compare.run_record import read_run
from stability_lab.compose import Composed, compose_jobs
from stability_lab.config import by_value, typed
from stability_lab.plugins.instantiate import typed_options
from stability_lab.run.resume import prepare
from stability_lab.tracking.manifest import fingerprint

SAME = (
    ("trainer.max_steps=10", "trainer.max_steps=1e1", "trainer.max_steps=10.0", "trainer.max_steps='10'"),
    ("optimizer.lr=3e-3", "optimizer.lr=0.003", "optimizer.lr=3.0E-3", "optimizer.lr='3e-3'"),
    ("optimizer.lr=1", "optimizer.lr=1.0"),
    ("seed=1", "seed=1.0", "seed=1e0"),
    ("model.dropout=0", "model.dropout=0.0", "model.dropout=-0.0"),
    ("model.n_kv_heads=null", "model.n_kv_heads=4", "model.n_kv_heads=4e0"),
    ("model.d_ff=null", "model.d_ff=128"),
    ("init_seed=null", "init_seed=0"),
    ("data_seed=null", "data_seed=0.0"),
    ("debug.inject=null", "debug.inject=[]"),
    ("debug.inject=nan_grad@3", "debug.inject=[nan_grad@3]"),
    ("stabilizer.zloss.weight=1", "stabilizer.zloss.weight=1.0", "stabilizer.zloss.weight='1e0'"),
    ("tokenizer=bpe tokenizer.vocab_size=300", "tokenizer=bpe tokenizer.vocab_size=3e2"),
)


@pytest.fixture
def one(tiny_overrides: tuple[str, ...]) -> Any:
    def composed(words: str) -> Composed:
        stabilizer = ["+stabilizer=zloss"] if "zloss" in words else []
        (job,) = compose_jobs(read_command_line([*tiny_overrides, *stabilizer, *words.split()]))
        return job._replace(plain=typed_options(job.plain))

    return composed


@pytest.mark.parametrize("spellings", SAME, ids=lambda spellings: spellings[0])
def test_spellings_of_one_value_are_one_run(spellings: tuple[str, ...], one: Any, tmp_path: Path) -> None:
    jobs = [one(words) for words in spellings]
    assert len({fingerprint(job.plain, "0") for job in jobs}) == 1
    for i, job in enumerate(jobs):
        write_run(tmp_path / str(i), job.plain)
        prepare(tmp_path / "0", job)  # none of them is another run that cannot go on there
    assert len(group([read_run(tmp_path / str(i)) for i in range(len(jobs))]).cells) == 1


@pytest.mark.parametrize(
    "pair",
    [
        ("trainer.max_steps=10", "trainer.max_steps=11"),
        ("optimizer.lr=0.003", "optimizer.lr=0.0030001"),
        ("model.n_kv_heads=1", "model.n_kv_heads=2"),
        ("seed=1 init_seed=0", "seed=1 init_seed=1"),
        ("trainer.threads=null", "trainer.threads=1"),  # as many as torch takes are one on some machines only
        ("model.name='1e1'", "model.name='10'"),  # words
    ],
)
def test_other_values_are_other_runs(pair: tuple[str, str], one: Any) -> None:
    first, second = (fingerprint(one(words).plain, "0") for words in pair)
    assert first != second


def test_the_configuration_on_disk_has_the_types_of_its_keys(one: Any) -> None:
    plain = one("trainer.max_steps=1e1 optimizer.lr=1 seed=2.0 stabilizer.zloss.weight=1").plain
    assert repr(plain["trainer"]["max_steps"]) == "10"
    assert repr(plain["optimizer"]["lr"]) == "1.0"
    assert repr(plain["seed"]) == "2"
    assert repr(plain["stabilizer"]["zloss"]["weight"]) == "1.0"


@pytest.mark.parametrize(
    "old",
    [
        {"seed": 1.0, "trainer": {"max_steps": 1e1}},
        {"seed": "1", "trainer": {"max_steps": "10"}},
        {"model": {"n_kv_heads": 4, "d_ff": 128.0}, "init_seed": 1},
    ],
)
def test_runs_that_an_older_version_wrote_are_compared_by_value(
    old: Mapping[str, Any], one: Any, tmp_path: Path
) -> None:
    plain = one("seed=1 trainer.max_steps=10").plain
    spelled = {key: {**plain[key], **value} if isinstance(value, dict) else value for key, value in old.items()}
    write_run(tmp_path / "new", plain)
    write_run(tmp_path / "old", {**plain, **spelled})
    grouping = group([read_run(tmp_path / name) for name in ("new", "old")])
    (cell,) = grouping.cells
    assert len(cell.runs) == len(cell.repeats) == 1  # of one seed, too
    assert fingerprint({**plain, **spelled}, "0") == fingerprint(plain, "0")


def test_another_programs_configuration_stays_as_it_is() -> None:
    foreign = {"seed": "many", "model": "gpt2", "trainer": ["a"], 3: {"optimizer": 1}, "debug": {"inject": {}}}
    assert typed(foreign) == foreign
    assert by_value({"model.d_ff": 4, "model.d_model": "wide"}) == {"model.d_ff": 4, "model.d_model": "wide"}


@pytest.mark.slow
def test_a_run_and_a_sweep_are_named_by_value(
    tiny_overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*tiny_overrides, "tracking=local", "output_dir=out", "trainer.save_weights=false", "if_exists=error"]
    main([*words, "trainer.max_steps=2", "optimizer.lr=3e-3", "seed=1"])
    (made,) = (tmp_path / "out" / "runs").iterdir()
    with pytest.raises(Exception, match=rf"{made.name} exists"):
        main([*words, "trainer.max_steps=2.0", "optimizer.lr=0.003", "seed=1e0"])
    words = [*words[:-1], "-m"]
    main([*words, "trainer.max_steps=2,3", "optimizer.lr=3e-3"])
    main([*words, "optimizer.lr=0.003", "trainer.max_steps=2e0,3.0"])
    (sweep,) = set((tmp_path / "out").iterdir()) - {made.parent, tmp_path / "out" / "wandb"}
    result = json.loads((sweep / "sweep.json").read_text(encoding="utf-8"))
    assert [job["skipped"] for job in result["jobs"]] == [True, True]
    assert "max_steps2_" in result["jobs"][0]["path"]


def write_run(path: Path, plain: Mapping[str, Any]) -> None:
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(dict(plain)), encoding="utf-8")
    (path / "summary.json").write_text('{"status": "completed", "final": {"val/loss": 2.0}}', encoding="utf-8")
