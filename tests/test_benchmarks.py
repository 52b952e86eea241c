"""The benchmarks' arguments, statistics and JSON; nothing here depends on how long anything takes."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks import growth, step, timing
from benchmarks.score import write_log
from stability_lab.config import ConfigError

NAMES = ("step", "stabilizers", "diagnostics", "sweep", "startup", "data", "score", "compare", "numerics", "stack")
NANO_GPT = """
class GPTConfig:
    def __init__(self, **sizes):
        self.__dict__.update(sizes)


def GPT(config):
    from benchmarks.step import PlainGPT, Shape
    model = PlainGPT(Shape(config.n_embd, config.n_layer, config.n_head, config.block_size, config.vocab_size, 1))
    model.configure_optimizers = lambda decay, lr, betas, device: torch.optim.SGD(model.parameters(), lr)
    print("number of parameters: some")
    return model


import torch
"""


def main_of(name: str, *arguments: str) -> int:
    return importlib.import_module(f"benchmarks.{name}").main(arguments)


def test_the_interval_of_a_median_covers_it_in_at_least_95_percent_of_samples():
    samples = np.random.default_rng(0).lognormal(size=(2000, 15))
    found = [timing.ratio(sample.tolist(), [1.0] * 15) for sample in samples]
    covered = np.mean([low <= 1.0 <= high for _, low, high in found])
    assert 0.95 <= covered <= 0.98
    # Of fewer than six values, no interval within them covers the median that often.
    assert timing.ratio([2.0, 6.0, 4.0], [2.0, 2.0, 2.0]) == (2.0, 1.0, 3.0)


def test_variants_take_turns_and_the_baseline_comes_twice():
    calls: list[str] = []
    seconds = timing.interleaved({n: (lambda n=n: calls.append(n)) for n in "ab"}, rounds=2, warmup=1)
    assert "".join(calls) == "aba" * 3
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 2, "b": 2, "a again": 2}
    table = timing.group("title", {"a": [2.0, 4.0], "b": [1.0, 2.0], "a again": [2.0, 4.0]}, speed=True)
    assert [row["speed"] for row in table.rows] == [1.0, 2.0, 1.0]
    assert re.search(r"^b +1\.50 s +2\.000 \(2\.000 to 2\.000\)$", table.text(), re.MULTILINE)


def test_memory_of_a_process_is_its_own():
    held = np.ones(2**25)  # 256 MiB of this process
    command = timing.Command("-c", "import numpy, sys; sys.exit(len(b'x' * 2**25) - 2**25)")
    command()
    assert 32 < command.peak_mib < held.nbytes / 2**20
    with pytest.raises(subprocess.CalledProcessError):
        timing.Command("-c", "import sys; sys.exit(3)")()


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_refuses_wrong_arguments_in_one_sentence(name, capsys):
    for wrong in (["--rounds", "0"], ["--quick", "--threads", "many"], ["--quik"], ["--json", "/nowhere/at/all.json"]):
        assert main_of(name, *wrong) == 2
        out, err = capsys.readouterr()
        assert not out
        assert re.fullmatch(r"error: .*(--rounds|--threads|--quik|/nowhere/at).*\n", err)


@pytest.mark.parametrize("name", NAMES)
def test_quick_makes_sizes_smaller_unless_the_command_line_says_them(name, monkeypatch):
    module = importlib.import_module(f"benchmarks.{name}")
    seen = []

    def note(args):
        seen.append(args)
        return []

    monkeypatch.setattr(module, "measured", note)
    assert module.main([]) == module.main(["--quick"]) == module.main(["--quick", "--rounds", "9"]) == 0
    usual, quick, said = (vars(args) for args in seen)
    assert {key for key in usual if usual[key] != quick[key]} > {"quick"}
    assert said["rounds"] == 9


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("step", ["--peer", "lingua=x"], "--peer lingua=x: must be nanogpt=PATH"),
        (
            "step",
            ["--peer", "nanogpt=/nowhere"],
            "there is no /nowhere/model.py; name the folder of",
        ),
        ("step", ["--shape", "64,2"], "'64,2' is none of goal, gpt_nano, small, nor d_model,layers"),
        ("step", ["--shape", "64,2,3,64,257,8"], "model.d_model=64"),
        ("stabilizers", ["--only", "qknrm"], "--only qknrm is not a stabilizer: did you mean qknorm"),
        ("diagnostics", ["--model", "gpt_huge"], "gpt_huge"),
        ("sweep", ["--beside", "-1"], "--beside"),
        ("step", ["--growth", "--profile"], "--growth: measures our eager step alone"),
        ("step", ["--picture", "a.png"], "--picture a.png: is drawn by --growth"),
        ("stack", ["--d-model", "3"], "--d-model 3: must be a multiple of the 2 heads"),
        ("data", ["--json", "/tmp"], "--json /tmp: is no file that can be written"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(name, arguments, sentence, capsys):
    assert main_of(name, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_nanogpts_is_refused(tmp_path):
    (tmp_path / "model.py").write_text("GPT = 1\n")
    with pytest.raises(ConfigError, match="is not nanoGPT's model"):
        step.Peer(f"nanogpt={tmp_path}")


def test_json_of_a_step_beside_a_peer(tmp_path, capsys):
    (tmp_path / "model.py").write_text(NANO_GPT)
    out = tmp_path / "some.json"
    words = [
        "--peer",
        f"nanogpt={tmp_path}",
        "--shape",
        "16,1,2,8,32,2",
        "--rounds",
        "2",
        "--precision",
        "fp32",
        "--cpu-time",
    ]
    assert main_of("step", *words, "--profile", "--json", str(out)) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report.keys() == {"benchmark", "settings", "machine", "groups", "load_after"}
    assert {"cpu", "instructions", "cores", "threads", "torch", "load", "git"} <= report["machine"].keys()
    assert report["benchmark"] == "step"
    assert {"rounds": 2, "cpu_time": True}.items() <= report["settings"].items()
    table, profile = report["groups"]
    rows = {row["name"]: row for row in table["rows"]}
    assert list(rows)[:2] == ["nanoGPT, fp32, eager", "ours, fp32, eager"]
    assert "nanoGPT, fp32, eager again" in rows
    assert all(row["low"] <= row["speed"] <= row["high"] for row in rows.values())
    shape = step.Shape(16, 1, 2, 8, 32, 2)
    assert shape.product_flops == 6 * 16 * (12 * 16 * 16 + 16 * 32)
    products, ours = rows["matrix products, fp32"], rows["ours, fp32, eager"]
    attained = shape.product_flops / products["seconds"]
    assert ours["share of products"] == pytest.approx(shape.flops / ours["seconds"] / attained)
    assert sum(row["share"] for row in profile["rows"]) <= 1 + 1e-9
    assert "number of parameters" not in capsys.readouterr().out


def test_diagnostics_are_parts_of_a_step(tmp_path, capsys):
    out = tmp_path / "some.json"
    assert main_of("diagnostics", "--quick", "--rounds", "2", "--threads", "1", "--json", str(out)) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text(encoding="utf-8"))["groups"][0]["rows"]}
    parts = [row["seconds"] for name, row in rows.items() if name not in ("step", "step again", "together")]
    assert len(parts) == 6
    assert sum(parts) > 0
    assert "exact probe of attention" in rows


def test_exponents_and_the_picture_of_growth(tmp_path):
    assert growth.slope((1, 10, 20, 40), (5.0, 100.0, 400.0, 1600.0)) == pytest.approx(2.0)
    rows = [
        {"axis": axis, "value": value, "seconds": 1e-3 * value, "MiB": float(value)}
        for axis, values in growth.QUICK.items()
        for value in values
    ]
    growth.draw(tmp_path / "growth.png", growth.QUICK, rows)
    assert (tmp_path / "growth.png").stat().st_size > 5000


@pytest.mark.slow
def test_growth_measures_every_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(growth, "QUICK", {"layers": (1, 2), "width": (32, 64), "sequence": (8, 16)})
    out = tmp_path / "some.json"
    assert main_of("step", "--growth", "--quick", "--json", str(out)) == 0
    sizes, exponents = (group["rows"] for group in json.loads(out.read_text(encoding="utf-8"))["groups"])
    assert [row["name"] for row in sizes][:2] == ["layers 1", "layers 2"]
    assert all(row["seconds"] > 0 and row["MiB"] > 0 for row in sizes)
    assert [row["name"] for row in exponents] == ["layers", "width", "sequence"]


@pytest.mark.slow
def test_score_reads_the_log_that_its_benchmark_writes(tmp_path, capsys):
    from stability_lab import cli

    path = tmp_path / "log.csv"
    write_log(path, 2000)
    assert cli.run(["score", str(path)]) == 0
    assert "stable" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("compare", ["--runs", "20", "--steps", "20"]),
        ("score", ["--rows", "1000"]),
        ("sweep", ["--runs", "1", "--steps", "2"]),
        ("data", ["--tokens", "2000000"]),
        ("stabilizers", ["--only", "zloss", "--shape", "16,1,2,8,32,2"]),
        ("stack", ["--d-model", "32", "--members", "2"]),
        ("numerics", []),
    ],
)
def test_the_others_measure_from_end_to_end(name, sizes, tmp_path, capsys):
    out = tmp_path / "some.json"
    assert main_of(name, "--quick", "--rounds", "1", *sizes, "--json", str(out)) == 0
    for group in json.loads(out.read_text(encoding="utf-8"))["groups"]:
        assert any(row["name"].endswith(" again") for row in group["rows"])
        assert all(row["seconds"] > 0 for row in group["rows"])


def test_the_readme_lists_every_benchmark():
    folder = Path(timing.__file__).parent
    listed = set(re.findall(r"python -m benchmarks\.(\w+)", (folder / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.stem for path in folder.glob("*.py")} - {"__init__", "timing", "growth", "judge_kinds"}
