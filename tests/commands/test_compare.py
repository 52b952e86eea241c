"""The commands `compare` and `runs`, on directories that `train` made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from scipy import stats

from stability_lab.cli import run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, tiny_overrides) -> Path:
    """2 stabilizers x 3 seeds, and a further seed of one of them."""
    folder = tmp_path_factory.mktemp("outputs")
    common = [*tiny_overrides, f"output_dir={folder}", "group=sweep", "trainer.max_steps=30"]
    assert run(["train", "-m", *common, "seed=0,1,2", "+stabilizer=none,qknorm"]) == 0
    assert run(["train", *common, "seed=3", "+stabilizer=qknorm"]) == 0
    return folder / "sweep"


def out(capsys, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run(["compare", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def summaries(folder: Path) -> pd.DataFrame:
    rows = []
    for path in folder.glob("*/summary.json"):
        config = yaml.safe_load((path.parent / "config.yaml").read_text())
        final = json.loads(path.read_text())["final"]
        rows.append({"arm": "+".join(config["stabilizer"]) or "none", "seed": config["seed"], **final})
    return pd.DataFrame(rows).set_index(["arm", "seed"])["val/loss"]  # pyright: ignore[reportReturnType]


@pytest.mark.slow
@pytest.mark.oracle
def test_runs_of_train_are_pairs_and_tested_as_scipy_does(sweep: Path, capsys) -> None:
    content = json.loads(out(capsys, str(sweep), "--format", "json"))
    assert content["paired"] is True
    assert {check["name"] for check in content["checks"] if check["same"] is False} == {"seeds"}
    losses = summaries(sweep)
    row = next(row for row in content["rows"] if row["arm"] == "qknorm")
    a, b = ([losses[arm, seed] for seed in range(3)] for arm in ("qknorm", "none"))
    expected = stats.ttest_rel(a, b)
    assert row["p"] == pytest.approx(expected.pvalue)
    assert row["difference"] == pytest.approx(sum(a) / 3 - sum(b) / 3)
    assert row["val/loss"] == pytest.approx(losses["qknorm"].mean())
    assert row["n"] == 4
    assert row["pairs"] == 3


@pytest.mark.slow
def test_a_run_that_another_seed_of_weights_started_is_no_pair(sweep: Path, capsys, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sweep, copy)
    path = next(copy.glob("qknorm*seed1*")) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["init"]["embed.weight"] = "0" * 12
    path.write_text(json.dumps(manifest))
    made = out(capsys, str(copy))
    assert "differs  shared initial weights" in made
    assert "paired   no" in made
    assert "Welch" in made


@pytest.mark.slow
def test_every_format_goes_to_a_file(sweep: Path, capsys, tmp_path: Path) -> None:
    for form in ("table", "md", "latex", "csv", "json"):
        target = tmp_path / f"made.{form}"
        out(capsys, str(sweep), "--format", form, "--out", str(target))
        assert "qknorm" in target.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{sweep}", "--metric", "val/lss"], "--metric val/lss: no run has it: did you mean val/loss?"),
        (["{sweep}", "--by", "stabliser"], "did you mean stabilizer?"),
        (["{sweep}", "--baseline", "zloss"], "--baseline zloss: no such arm"),
        (["{sweep}/nothing"], "does not exist"),
        (["{sweep}", "--out", "{sweep}"], "is a folder"),
        (["{sweep}", "--out", "{sweep}/no/file"], "does not exist"),
        (["{sweep}", "--figure-format", "svg"], "add --figures DIR"),
        (["{sweep}", "--format", "csv", "--suggest"], "leave out --format csv"),
        (["{sweep}", "--seeds", "0-999999999999"], "a range of over 10,000 seeds"),
        (["{sweep}", "--seeds", "7-3"], "'7-3': give seeds such as 3-7 or 0,1,5"),
        (["{sweep}", "--seeds", "4-9"], "--seeds: no run has one of these seeds; there are 0, 1, 2, 3"),
        (["{sweep}", "--format", "html"], "invalid choice: 'html'"),
        ([], "the following arguments are required: PATH"),
    ],
)
def test_bad_input_is_one_sentence(sweep: Path, capsys, words: list[str], message: str) -> None:
    error = out(capsys, *(word.format(sweep=sweep) for word in words), code=2)
    assert message in error
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_next_commands_are_ones_that_train_takes(sweep: Path, capsys) -> None:
    from stability_lab.command_line import read_command_line
    from stability_lab.compose import compose_jobs

    made = out(capsys, str(sweep), "--suggest")
    (line,) = [line for line in made.splitlines() if line.startswith("  python -m stability_lab train -m")]
    assert "trainer.threads" not in line
    import shlex

    words = shlex.split(line)[4:]
    jobs = compose_jobs(read_command_line(words))
    assert {job.config.model.d_model for job in jobs} == {32}
    assert {len(job.config.stabilizer) for job in jobs} == {0, 1}


@pytest.mark.slow
def test_seeds_choose_the_runs_that_are_compared(sweep: Path, capsys) -> None:
    content = json.loads(out(capsys, str(sweep), "--seeds", "1-2,3", "--format", "json"))
    assert [row["seeds"] for row in content["rows"]] == ["1 2", "1 2 3"]


@pytest.mark.slow
def test_runs_lists_what_is_there(sweep: Path, capsys) -> None:
    capsys.readouterr()
    assert run(["runs", str(sweep)]) == 0
    made = capsys.readouterr().out
    assert made.startswith("7 of 7 runs: 7 completed")
    assert run(["runs", str(sweep), "--status", "failed"]) == 0
    assert capsys.readouterr().out == "none of 7 runs has this status\n"
    assert run(["runs", str(sweep), "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8
    assert run(["runs", str(sweep), "--format", "json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)} == {"completed"}
    assert run(["runs", str(sweep), "--status", "stuck"]) == 2
    assert "invalid choice: 'stuck'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "runs"])
def test_torch_is_not_needed(sweep: Path, command: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'wandb', 'hydra'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from stability_lab.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, command, str(sweep)]
    words += ["--figures", str(tmp_path / "figures")] if command == "compare" else []
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "qknorm" in done.stdout
