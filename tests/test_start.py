"""What the start of a run loads and how often it composes: counts, for seconds depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stability_lab import build, compose
from stability_lab.command_line import read_command_line
from stability_lab.compose import _compose, checked, compose_jobs
from stability_lab.config import config_dir

# torch's compiler (1.4 s), what it needs, and packages that other commands need.
LATE = (
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "scipy.special",
    "pandas",
    "matplotlib",
    "datasets",
    "wandb",
    "joblib",
)

PROGRAM = """
import json, sys
from stability_lab import cli
code = cli.run(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump({"code": code, "loaded": [name for name in %r if name in sys.modules]}, file)
"""


@pytest.mark.parametrize("stabilizers", ["none", "[qknorm,zloss,rmsnorm]"])
def test_an_eager_run_loads_no_compiler(tiny_overrides: tuple[str, ...], tmp_path: Path, stabilizers: str) -> None:
    words = ["train", *tiny_overrides, f"+stabilizer={stabilizers}", "trainer.max_steps=2", f"output_dir={tmp_path}"]
    subprocess.run([sys.executable, "-c", PROGRAM % (LATE,), str(tmp_path / "seen"), *words], check=True)
    assert json.loads((tmp_path / "seen").read_text()) == {"code": 0, "loaded": []}


HELP = """
import sys
from stability_lab import cli
try:
    cli.run(["train", "--help"])
finally:
    assert "hydra" in sys.modules and "torch" not in sys.modules
"""


def test_the_help_of_train_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert "Train one model" in done.stdout


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of Hydra's `compose`, of the loading of data, and of the building of a model."""
    counts = {"compose": 0, "build_model": 0, "instantiate_as": 0}

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            counts[name] += name != "instantiate_as" or args[2] == "data"
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, called)

    count(compose, "compose")
    count(build, "build_model")
    count(build, "instantiate_as")
    return counts


def test_a_run_is_composed_once(tiny_overrides: tuple[str, ...], tmp_path: Path, counted: dict[str, int]) -> None:
    from stability_lab import cli

    assert cli.run(["train", *tiny_overrides, "trainer.max_steps=1", f"output_dir={tmp_path}"]) == 0
    assert counted["compose"] == 1


def test_what_the_jobs_of_a_sweep_share_is_made_once(counted: dict[str, int]) -> None:
    words = ("-m", "trainer.device=cpu", "+stabilizer=none,qknorm", "optimizer.lr=1e-3,3e-3,1e-2", "seed=range(20)")
    jobs = compose_jobs(read_command_line(words))
    assert (len(jobs), counted["compose"]) == (120, 2)
    build.check(job.config for job in jobs)
    assert (counted["build_model"], counted["instantiate_as"]) == (2, 1)


SWEEPS = [
    ("optimizer.lr=1e-3,3e-2", "seed=range(3)", "model.n_kv_heads=null,2"),
    ("+stabilizer=none,[qknorm,zloss]", "stabilizer.zloss.weight=1e-5,1e-4", "seed=1"),
    ("+recipe=olmo2,gemma2", "seed=0,1", "trainer.max_steps=1e3"),
    ("schedule=cosine,wsd", "schedule.warmup_steps=5,10", "run_name=1_1", "data=text", "data.path=x.txt,'y=z.txt'"),
    ("optimizer=adamw,sgd", "optimizer.lr=0.1,1", "debug.inject='[nan_grad@3,lr_spike@5x3]',null"),
    ("output_dir=${oc.env:HOME}/x", "seed=0,1", "model.d_model=64,128"),
    ("~trainer.grad_clip", "trainer.grad_clip=1.0", "seed=0,1"),
]


@pytest.mark.parametrize("words", SWEEPS, ids=[words[0] for words in SWEEPS])
def test_a_job_is_what_hydra_makes_of_its_words_alone(words: tuple[str, ...]) -> None:
    command = read_command_line(["-m", *words])
    with compose.initialize_config_dir(str(config_dir()), version_base="1.3"):
        alone = [checked(_compose(job)).plain for job in command.jobs]
    assert [job.plain for job in compose_jobs(command)] == alone
