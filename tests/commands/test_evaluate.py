"""`evaluate RUN` gives the run's own validation loss, whatever the batch size, or says why it cannot."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from stability_lab import cli
from stability_lab.commands.evaluate import evaluate


@pytest.fixture(scope="module", autouse=True)
def logging_as_before() -> Iterator[None]:
    log = logging.getLogger("stability_lab")
    before = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.level, log.propagate = before


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: tuple[str, ...]) -> Path:
    """A short run whose validation has more sequences than any batch size here but the largest."""
    folder = tmp_path_factory.mktemp("evaluate")
    arguments = [*tiny_overrides, "+stabilizer=[qknorm,zloss]", "trainer.eval_sequences=40", "trainer.max_steps=3"]
    assert cli.run(["train", *arguments, f"output_dir={folder}", "run_name=a"]) == 0
    return folder / "runs" / "a"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def own_value(run: Path) -> float:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))["final"]["val/loss"]


@pytest.mark.parametrize("batch_size", [1, 3, 40, 64])
def test_equals_the_runs_own_value(run: Path, batch_size: int) -> None:
    result = evaluate(run, batch_size, "cpu")
    assert result["val/loss"] == pytest.approx(own_value(run), rel=1e-6)


def test_the_best_weights(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's last validation is its best; with other weights in `best` the value is theirs."""
    assert cli.run(["evaluate", str(copy), "--checkpoint", "best", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["val/loss"] == pytest.approx(own_value(copy), rel=1e-6)
    shutil.rmtree(copy / "checkpoints" / "best")
    assert f"{copy} has no weights in checkpoints/best" in refusal(capsys, str(copy), "--checkpoint", "best")


def test_weights_that_were_to_become_last_when_the_process_died(copy: Path) -> None:
    checkpoints = copy / "checkpoints"
    (checkpoints / "last").rename(checkpoints / "last.new")
    assert evaluate(copy, 8, "cpu")["val/loss"] == pytest.approx(own_value(copy), rel=1e-6)


def test_leaves_the_run_as_it_is(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    evaluate(run, 8, "cpu")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_text_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["evaluate", str(run), "--batch-size", "7"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{run}: validation loss ")
    assert "perplexity" in shown
    assert float(shown.split("validation loss ")[1].split()[0]) == pytest.approx(own_value(run), abs=2e-6)
    assert cli.run(["evaluate", str(run), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["val/loss"] == pytest.approx(own_value(run), rel=1e-6)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["evaluate", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1, shown.err
    assert shown.err.startswith("error: ")
    return shown.err


def change(run: Path, **nodes: object) -> None:
    file = run / "config.yaml"
    plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    file.write_text(yaml.safe_dump(plain | nodes), encoding="utf-8")


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run's folder" in refusal(capsys, str(tmp_path / "nothing"))
    assert "is not a run's folder" in refusal(capsys, str(tmp_path))


def test_no_weights(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copy / "checkpoints")
    assert "trainer.save_weights=true" in refusal(capsys, str(copy))


@pytest.mark.parametrize("keep", [0, 7, 1000])
def test_damaged_weights(copy: Path, keep: int, capsys: pytest.CaptureFixture[str]) -> None:
    weights = copy / "checkpoints" / "last" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "model.safetensors does not hold this model's weights" in refusal(capsys, str(copy))


def test_other_weights_of_the_same_shape(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They load, but they are not what was trained."""
    weights = copy / "checkpoints" / "last" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    assert "its hash is not the one that state.json states" in refusal(capsys, str(copy))


@pytest.mark.parametrize("state", ["{}", "", '{"files": {"training.safetensors": "0"}}'])
def test_a_state_that_states_no_hash(copy: Path, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "checkpoints" / "last" / "state.json").write_text(state, encoding="utf-8")
    assert "does not state the hash of model.safetensors" in refusal(capsys, str(copy))
    (copy / "checkpoints" / "last" / "state.json").unlink()  # of an old version
    assert cli.run(["evaluate", str(copy)]) == 0


def test_weights_of_another_model(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copy, stabilizer={})
    assert "model.safetensors does not hold this model's weights" in refusal(capsys, str(copy))


@pytest.mark.parametrize("group", ["data", "tokenizer"])
def test_a_foreign_class_is_not_imported(copy: Path, group: str, capsys: pytest.CaptureFixture[str]) -> None:
    change(copy, **{group: {"_target_": "os.system", "command": "touch stolen"}})
    assert f"{group}._target_=os.system" in refusal(capsys, str(copy))


def test_a_foreign_stabilizer_is_not_imported(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(copy, stabilizer={"evil": {"_target_": "subprocess.Popen"}})
    assert "stabilizer.evil._target_=subprocess.Popen" in refusal(capsys, str(copy))


@pytest.mark.parametrize("content", ["a: [", "- 1\n", "", "seed: !!python/object/apply:os.getcwd []\n"])
def test_a_damaged_config(copy: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "config.yaml").write_text(content, encoding="utf-8")
    refusal(capsys, str(copy))


def test_a_batch_of_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--batch-size=0" in refusal(capsys, str(run), "--batch-size", "0")
