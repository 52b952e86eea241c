"""A user's package from outside: installed with its entry point, and not installed, with --allow. Real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stability_lab

pytestmark = pytest.mark.slow

ROOT = Path(stability_lab.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "own_stabilizer"
# As many commands as one start of torch serves; prints their exit codes.
DRIVER = """
import json, sys
from stability_lab import cli
print(json.dumps([cli.run(words) for words in json.loads(sys.argv[1])]))
"""


class Lab:
    """Starts Python in `cwd` with `site` in front of our own folder on its path."""

    def __init__(self, cwd: Path, site: Path | None = None):
        self.cwd = cwd
        path = os.pathsep.join(str(folder) for folder in (site, ROOT) if folder is not None)
        self.environment = {**os.environ, "PYTHONPATH": path}

    def start(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=self.cwd, env=self.environment, capture_output=True, text=True, timeout=300)

    def commands(self, *commands: list[str]) -> subprocess.CompletedProcess[str]:
        done = self.start("-c", DRIVER, json.dumps(commands))
        assert done.returncode == 0, done.stderr
        return done


def codes(done: subprocess.CompletedProcess[str]) -> list[int]:
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has put the example."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(EXAMPLE)], check=True)
    return target


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_an_installed_package_is_as_good_as_our_own(
    site: Path, tmp_path: Path, tiny_overrides: tuple[str, ...]
) -> None:
    lab, tiny = Lab(tmp_path, site), list(tiny_overrides)
    sweep = ["train", "-m", "+stabilizer=none,absnorm", "seed=0,1", "group=g", *tiny]
    single = ["train", "+stabilizer=absnorm", "stabilizer.absnorm.eps=1e-5", "run_name=one", *tiny]
    done = lab.commands(
        ["stabilizers"],
        sweep,
        sweep,
        single,
        ["train", "resume=outputs/runs/one", "trainer.max_steps=8"],
        ["evaluate", "outputs/runs/one"],
        ["compare", "outputs/g"],
        ["plan", "+stabilizer=absnorm", *tiny],
        ["train", "+stabilizer=absnrom", *tiny],
        ["train", "+stabilizer=absnorm", "stabilizer.absnorm.eps=2", *tiny],
        ["train", "+stabilizer=[absnorm,rmsnorm]", *tiny],
    )
    assert codes(done) == [0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2], done.stdout + done.stderr
    assert re.search(r"^absnorm +norm +eps=1e-06 .*\(of own_stabilizer\)$", done.stdout, re.MULTILINE)
    assert done.stdout.count("already there") >= 4
    assert "did you mean absnorm?" in done.stderr
    assert "stabilizer.absnorm.eps=2: must lie between 0 and 1" in done.stderr
    assert "absnorm and rmsnorm both claim" in done.stderr
    manifest = read(tmp_path / "outputs" / "runs" / "one" / "manifest.json")
    origin = manifest["packages"]["own_stabilizer.absnorm.AbsNormStabilizer"]
    assert (origin["package"], origin["version"]) == ("own-stabilizer", "0.1.0")
    assert manifest["seams"] == {"norm": ["absnorm"]}
    assert read(tmp_path / "outputs" / "runs" / "one" / "summary.json")["steps"] == 8
    assert re.search(r"absnorm", done.stdout[done.stdout.index("Decision") :])


def test_the_examples_own_test_passes_with_the_package_installed(site: Path, tmp_path: Path) -> None:
    done = Lab(tmp_path, site).start("-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_package_that_is_not_installed(tmp_path: Path, tiny_overrides: tuple[str, ...]) -> None:
    """From a folder on the path, or the working directory, as a console script has it; resumed with the same flag."""
    lab, tiny = Lab(tmp_path, EXAMPLE), list(tiny_overrides)
    allow, configs = ["--allow", "own_stabilizer"], ["--config-dir", str(EXAMPLE / "own_stabilizer" / "configs")]
    chosen = ["+stabilizer=absnorm", "run_name=one", *configs, *tiny]
    done = lab.commands(
        ["train", *chosen],
        ["train", *chosen, *allow],
        ["train", "resume=outputs/runs/one", "trainer.max_steps=8"],
        ["train", *allow, "resume=outputs/runs/one", "trainer.max_steps=8"],
        ["evaluate", "outputs/runs/one"],
        ["evaluate", "outputs/runs/one", *allow],
        ["data", "inspect", "outputs/runs/one"],
        ["compare", "outputs/runs"],
        ["stabilizers", *configs, "absnorm"],
    )
    assert codes(done) == [2, 0, 2, 0, 2, 0, 0, 0, 0], done.stdout + done.stderr
    sentence = "stabilizer.absnorm._target_=own_stabilizer.absnorm.AbsNormStabilizer: must be a class of stability_lab"
    refused = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(refused) == 3
    for line in refused:
        assert line.startswith(f"error: {sentence}")
        assert "add --allow own_stabilizer" in line
    manifest = read(tmp_path / "outputs" / "runs" / "one" / "manifest.json")
    assert manifest["packages"]["own_stabilizer.absnorm.AbsNormStabilizer"]["version"] is None
    assert "(of own_stabilizer, needs --allow own_stabilizer)" in done.stdout


def test_workers_of_a_sweep_may_import_what_the_command_allows(tmp_path: Path, tiny_overrides: tuple[str, ...]) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "own_stabilizer").symlink_to(EXAMPLE / "own_stabilizer")
    console = tmp_path / "bin" / "stability-lab"
    console.parent.mkdir()
    console.write_text("from stability_lab.cli import main\nmain()\n", encoding="utf-8")
    words = ["train", "-m", "--allow", "own_stabilizer", "--config-dir", "own_stabilizer/configs", "group=g"]
    words += ["+stabilizer=none,absnorm", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *tiny_overrides]
    done = Lab(tmp_path).start(str(console), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "outputs" / "g" / "sweep.json")["counts"] == {"completed": 2}
