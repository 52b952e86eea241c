"""The command `stabilizers` shows every YAML file as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stability_lab import cli
from stability_lab.build import build_stabilizers
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import config_dir
from stability_lab.plugins.instantiate import instantiate
from stability_lab.seams import ADDITIVE, EXCLUSIVE

OPTIONS = {path.stem: path for path in (config_dir() / "stabilizer").glob("*.yaml")}


def test_table_has_every_stabilizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["stabilizers"]) == 0
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["name", "seam", "parameters"]
    *lines, after = lines
    assert after == "next: python -m stability_lab stabilizers qknorm"
    names = [line.split()[0] for line in lines]
    assert names[0] == "none"
    assert sorted(names) == sorted(OPTIONS)
    zloss = next(line for line in lines if line.startswith("zloss"))
    assert zloss.split()[1:4] == ["loss_terms", "weight=0.0001", "penalty"]


def test_json_has_every_stabilizer_with_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["stabilizers", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(OPTIONS)
    for name, row in rows.items():
        node = (yaml.safe_load(OPTIONS[name].read_text(encoding="utf-8")) or {}).get(name, {})
        assert set(row["parameters"]) == set(node) - {"_target_"}
        assert set(row["seams"]) <= {*EXCLUSIVE, *ADDITIVE}
        if name != "none":
            assert row["seams"], name
            assert row["summary"], name
            assert row["paper"], name


def test_one_is_a_page(run_command) -> None:
    shown = run_command("stabilizers", "zloss")
    assert shown.code == 0
    for words in ("log Z = logsumexp(logits)", "arXiv:2204.02311", "weight: 1.0e-4", "+stabilizer=zloss"):
        assert words in shown.out
    assert "did you mean zloss?" in run_command("stabilizers", "zlos").err
    (row,) = json.loads(run_command("stabilizers", "zloss", "--format", "json").out)
    assert row["name"] == "zloss"


def test_the_list_needs_no_torch() -> None:
    code = "import sys; from stability_lab import cli; cli.run(['stabilizers']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_files_that_hold_no_stabilizer(tmp_path: Path, run_command) -> None:
    folder = tmp_path / "stabilizer"
    folder.mkdir()
    (folder / "odd.yaml").write_text("[1, 2]", encoding="utf-8")
    (folder / "gone.yaml").write_text("gone: {_target_: no_such.Thing}", encoding="utf-8")
    lines = run_command("stabilizers", "--config-dir", str(tmp_path)).out.splitlines()
    assert lines[-3].split(maxsplit=3)[3] == "- (of no_such, needs --allow no_such)"
    (folder / "odd.yaml").write_text("{", encoding="utf-8")
    shown = run_command("stabilizers", "--config-dir", str(tmp_path))
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert "odd.yaml cannot be read" in shown.err
    assert "there is no such folder" in run_command("stabilizers", "--config-dir", str(tmp_path / "x")).err


@pytest.mark.slow
def test_parameters_are_shown_as_they_are_written_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["stabilizers", "--format", "json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        name = row["name"]
        written = [f"stabilizer.{name}.{key}={value}" for key, value in row["parameters"].items()]
        (composed,) = compose_jobs(read_command_line([f"+stabilizer={name}", *written]))
        options = yaml.safe_load(OPTIONS[name].read_text(encoding="utf-8"))
        assert build_stabilizers(composed.config) == [instantiate(node, name) for node in options.values()]


def test_an_unknown_format_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["stabilizers", "--format", "xml"]) == 2
    assert "--format" in capsys.readouterr().err
