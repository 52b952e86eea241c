"""The command `plan`: its counts against hand calculation and torch's counter, its words, and the run it predicts."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stability_lab import cli
from stability_lab.command_line import read_command_line
from stability_lab.commands import plan
from stability_lab.compose import compose_jobs
from stability_lab.diagnostics.memory import peak_bytes, reset_peak
from stability_lab.run import cost
from stability_lab.run.cost import Timing, count, facts, mfu, speed_key
from stability_lab.text import duration
from stability_lab.training.loop import _due

CPU = torch.device("cpu")
D, LAYERS, HEAD_DIM, T, V = 32, 2, 8, 16, 257  # of the tiny configuration
BLOCK = 12 * D * D  # weights of one block's matrix products: 4 d^2 and 2 * 4 d^2


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is timed; the list holds the configurations that would have been."""
    configs: list[Any] = []

    def measure(config: Any) -> Timing:
        configs.append(config)
        return Timing(1.0, 3.0, 2.0, 0.5, 0.25, 3, None, 2**30)

    monkeypatch.setattr(cost, "measure", measure)
    return configs


@pytest.fixture
def of(tiny_overrides: tuple[str, ...]):
    """`of(*overrides)`: the facts of a tiny run."""

    def compute(*overrides: str) -> dict[str, Any]:
        (job,) = compose_jobs(read_command_line([*tiny_overrides, *overrides]))
        return facts(job)

    return compute


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.run(["plan", "--format=json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("tied", "rows"), [(False, V), (True, V), (True, 320)])
def test_counts_by_hand(of, tied: bool, rows: int) -> None:
    pad = [f"model.pad_vocab_to={rows}"] if rows != V else []
    found = of(f"model.tied_head={tied}".lower(), *pad)
    norms = (2 * LAYERS + 1) * 2 * D
    assert found["parameters"]["non_embedding"] == LAYERS * BLOCK + norms
    assert found["parameters"]["total"] == LAYERS * BLOCK + norms + (1 if tied else 2) * rows * D
    # The head is multiplied whether it is tied or not, and so are its rows that pad the vocabulary.
    assert found["flops_per_token"] == 6 * (LAYERS * BLOCK + rows * D) + 12 * LAYERS * D * T
    assert found["tokens"] == 5 * 4 * T
    assert found["epochs"] == pytest.approx(20 / ((found["train_tokens"] - 1) // T))


def test_gpt2_small_has_its_published_size(capsys: pytest.CaptureFixture[str], measured: list[Any]) -> None:
    result = planned(capsys, "model=gpt2_124m", "tracking=local")
    assert result["jobs"][0]["parameters"]["total"] == 124_439_808


def test_flops_are_those_that_torch_counts(tiny_run, of) -> None:
    shape = ("model.attention=explicit", "model.mlp=swiglu", "model.n_kv_heads=2", "model.tied_head=true")
    run = tiny_run(*shape)
    with FlopCounterMode(display=False) as counter:
        run.step(run.objective.batch(torch.from_numpy(run.sampler.batch(0, 4)), 0), 1e-3)
    assert counter.get_total_flops() == of(*shape)["flops_per_token"] * 4 * T


def test_parameters_that_each_stabilizer_adds(of) -> None:
    found = of("+stabilizer=[qknorm,rmsnorm,zloss]")["parameters"]
    without_bias = -(2 * LAYERS + 1) * D
    assert found["added_by"] == {"qknorm": 2 * HEAD_DIM * LAYERS, "rmsnorm": without_bias, "zloss": 0}
    assert found["added_together"] == 2 * HEAD_DIM * LAYERS + without_bias
    # Together they are not always the sum: a norm on both sides of a branch has no bias either.
    both = of("+stabilizer=[perinorm,rmsnorm]")["parameters"]
    assert both["added_by"] == {"perinorm": 2 * LAYERS * 2 * D, "rmsnorm": without_bias}
    assert both["added_together"] == (4 * LAYERS + 1) * D - (2 * LAYERS + 1) * 2 * D
    assert of()["parameters"]["added_by"] == {}


@pytest.mark.slow
def test_factors_of_each_layer(of) -> None:
    assert of()["layer_factors"] == {}
    root = 1 / math.sqrt(2)
    assert of("+stabilizer=ln_scaling")["layer_factors"] == {"norm_scale": pytest.approx([1.0, root])}
    assert of("+stabilizer=dynamic_scaling")["layer_factors"] == {"attn_scale": [1.0, 0.5]}
    learned = of("+stabilizer=dynamic_scaling", "stabilizer.dynamic_scaling.mode=learned")
    assert learned["layer_factors"] == {"attn_scale": [1.0, 1.0]}
    fp16 = of(
        "+stabilizer=dynamic_scaling", "stabilizer.dynamic_scaling.mode=query_key_layer", "trainer.precision=fp16"
    )
    assert fp16["layer_factors"] == {"attn_scale": [1.0, 0.5], "score_restore": [1.0, 2.0]}


def test_mfu_only_where_the_peak_is_known() -> None:
    assert mfu("NVIDIA H200", "bf16", 494.5e12) == 0.5
    assert mfu("NVIDIA A100-SXM4-80GB", "bf16", 156e12) == 0.5
    assert mfu("NVIDIA H200", "fp32", 67e12) == 1.0
    for unknown in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090"):
        assert mfu(unknown, "bf16", 1e12) is None


@pytest.mark.parametrize("every", [None, 1, 2, 5, 7, 20])
@pytest.mark.parametrize("steps", [1, 6, 14])
def test_counts_measurements_as_the_loop_does(every: int | None, steps: int) -> None:
    assert count(every, steps) == 1 + sum(_due(step, every, step == steps) for step in range(1, steps + 1))


def test_one_run_in_words_and_nothing_written(
    capsys: pytest.CaptureFixture[str],
    tiny_overrides: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Steps are really taken here.
    assert cli.run(["plan", *tiny_overrides, "+stabilizer=[ln_scaling,qknorm]", "--format", "text"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    lines = {name: text.strip() for name, text in lines.items()}
    assert lines["stabilizers"] == "ln_scaling, qknorm"
    assert lines["seams"] == "norm_scale <- ln_scaling; qk_transform <- qknorm"
    assert lines["attention"].startswith("sdpa (")
    assert lines["added by each alone"] == "ln_scaling +0, qknorm +32; by all together +32"
    assert lines["norm_scale by layer"] == "1 0.7071"
    assert lines["MFU"].startswith("n/a")
    assert lines["peak memory"].endswith("of the process")
    assert lines["ETA"].split(" = ")[0].endswith(" s")
    assert list(tmp_path.iterdir()) == []


def test_json_of_one_run(
    capsys: pytest.CaptureFixture[str], tiny_overrides: tuple[str, ...], measured: list[Any]
) -> None:
    result = planned(capsys, *tiny_overrides, "trainer.eval_every=2", "diagnostics.probe_every=null")
    (job,) = result["jobs"]
    # Before step 1, after steps 2 and 4, and after the last. The first step takes 3 s, each of the others 2.
    assert (job["n_evaluations"], job["n_probes"]) == (4, 2)
    start_up = result["start_up_s"]
    assert job["times"] == {"build": 1.0, "steps": 11.0, "evaluations": 2.0, "probes": 0.5, "start_up": start_up}
    assert job["eta_s"] == result["total_eta_s"] == pytest.approx(14.5 + start_up)
    assert job["tokens_per_s"] == 4 * T / 2.0
    assert job["memory_bytes"] == 2**30
    assert job["mfu"] is None


@pytest.mark.slow
def test_a_sweep_measures_what_is_alike_once(
    capsys: pytest.CaptureFixture[str],
    tiny_overrides: tuple[str, ...],
    measured: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = ("-m", "+stabilizer=none,qknorm", "optimizer.lr=1e-3,1e-2", "trainer.max_steps=5,10", *tiny_overrides[:5])
    assert cli.run(["plan", *sweep, "tracking=local", "trainer.device=cpu"]) == 0
    out = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(out) if line.split()[:2] == ["job", "parameters"])
    rows = [line.split() for line in out[header + 2 : header + 10]]
    assert [row[0] for row in rows] == [str(i) for i in range(1, 9)]
    assert len({row[1] for row in rows}) == 2
    assert rows[1][-3:] == ["stabilizer=none", "optimizer.lr=0.001", "trainer.max_steps=10"]
    # Start, end and build, and 3 + 4 * 2 or 3 + 9 * 2 seconds of steps: four jobs of each.
    one = [1 + 3 + 2 * (steps - 1) + 2 * 0.5 + 2 * 0.25 for steps in (5, 10)]
    assert [row[6] for row in rows[:2]] == [duration(seconds).removesuffix(" s") for seconds in one]
    assert out[header + 10].startswith("8 jobs, one after the other: ")
    assert out[-1] == "next: " + shlex.join(
        ["python", "-m", "stability_lab", "train", *sweep, "tracking=local", "trainer.device=cpu"]
    )
    assert [config.stabilizer.keys() for config in measured] == [{}.keys(), {"qknorm": 0}.keys()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_past_its_time_a_sweep_is_scaled_by_flops(
    capsys: pytest.CaptureFixture[str],
    tiny_overrides: tuple[str, ...],
    measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "SWEEP_BUDGET_S", -1.0)
    command = [*tiny_overrides, "-m", "model.n_layers=2,4"]
    first, second = planned(capsys, *command)["jobs"]
    assert len(measured) == 1
    ratio = second["flops_per_token"] / first["flops_per_token"]
    assert second["timing"]["step_s"] == pytest.approx(2.0 * ratio)
    assert second["timing"]["steps_timed"] == 0
    assert second["memory_bytes"] is None
    assert cli.run(["plan", *command]) == 0
    row = capsys.readouterr().out.splitlines()[-3]
    assert "~" in row
    assert "not measured" in row


@pytest.mark.slow
def test_long_steps_are_scaled_from_one_micro_batch(tiny_config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "BUDGET_S", 0.0)
    timing = cost.measure(tiny_config("trainer.grad_accum_steps=50"))
    assert timing.scaled_from == "one micro-batch"
    assert timing.steps_timed == 1
    one = cost.measure(tiny_config())
    assert one.scaled_from is None
    assert timing.step_s > 5 * one.step_s


@pytest.mark.slow
def test_what_makes_two_jobs_alike(tiny_config) -> None:
    capped = ("+stabilizer=softcap", "stabilizer.softcap.cap=50")
    key = speed_key(tiny_config(*capped))
    for same in ("seed=3", "optimizer.lr=1", "trainer.max_steps=9", "stabilizer.softcap.cap=30", "model.init.std=0.1"):
        assert speed_key(tiny_config(*capped, same)) == key
    for other in ("trainer.micro_batch_size=8", "trainer.precision=bf16", "model.d_model=64", "trainer.threads=1"):
        assert speed_key(tiny_config(*capped, other)) != key
    assert speed_key(tiny_config()) != key
    assert speed_key(tiny_config("+stabilizer=qknorm")) != speed_key(
        tiny_config("+stabilizer=qknorm", "stabilizer.qknorm.scope=full")
    )


def test_a_recipe_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], tiny_overrides: tuple[str, ...], measured: list[Any]
) -> None:
    assert cli.run(["plan", *tiny_overrides, "+recipe=gemma2"]) == 0
    out = capsys.readouterr().out
    assert "gemma2 (arXiv:2408.00118)" in out
    assert "training by distillation" in out
    assert "explicit (softcap acts on single attention logits" in out


def test_out_of_memory_is_an_answer(
    capsys: pytest.CaptureFixture[str], tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(_: Any) -> Timing:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(cost, "measure", measure)
    assert cli.run(["plan", *tiny_overrides]) == 1
    assert "trainer.micro_batch_size" in capsys.readouterr().err

    def broken(_: Any) -> Timing:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(cost, "measure", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.run(["plan", *tiny_overrides])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["+sed=3"], "sed"),
        (["+stabilizer=qknrom"], "did you mean qknorm?"),
        (["seed=1,2"], "add -m"),
        (["--format=xml"], "--format=xml: must be text or json"),
        (["--format"], "must be text or json"),
        (["--cfg", "job"], "use train"),
        (["-m", "model.n_heads=4,5"], "model.n_heads=5"),
        (["data=text", "data.path=/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_times_nothing(
    capsys: pytest.CaptureFixture[str], measured: list[Any], arguments: list[str], sentence: str
) -> None:
    assert cli.run(["plan", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert measured == []


def test_refuses_torchrun_as_train_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(["plan"]) == 2
    assert "WORLD_SIZE=2" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.run(["plan", "+stabilizer=qknorm", flag])
    assert "--format text|json" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_peak_memory_is_that_since_the_reset() -> None:
    size = 256 * 2**20
    reset_peak(CPU)
    before = peak_bytes(CPU)
    assert before is not None
    held = torch.ones(size // 4)
    peak = peak_bytes(CPU)
    assert peak is not None
    assert 0.9 * size < peak - before < 1.3 * size
    del held
    assert peak_bytes(CPU) == pytest.approx(peak, rel=0.01)
    reset_peak(CPU)
    after = peak_bytes(CPU)
    assert after is not None
    assert after < peak - 0.9 * size


RUN = ("+stabilizer=qknorm", "trainer.max_steps=60", "trainer.threads=1", "trainer.device=cpu", "tracking=local")
ATTEMPTS = 3  # another process can slow down the plan and not the run, or the other way round


@pytest.mark.slow
def test_a_run_takes_the_time_and_memory_that_its_plan_said(tmp_path: Path) -> None:
    """Time within 30% (mean of a plan before and one after the run), memory within 20%."""

    def command(*words: str) -> tuple[str, float]:
        started = time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "stability_lab", *words, *RUN],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout, time.perf_counter() - started

    command("plan")  # fills the token cache
    ratios = []
    for attempt in range(ATTEMPTS):
        before = json.loads(command("plan", "--format=json")[0])
        _, seconds = command("train", f"run_name=attempt{attempt}")
        after = json.loads(command("plan", "--format=json")[0])
        summary = json.loads((tmp_path / f"outputs/runs/attempt{attempt}/summary.json").read_text(encoding="utf-8"))
        for planned_run in (before, after):
            assert planned_run["jobs"][0]["memory_bytes"] == pytest.approx(summary["perf/peak_memory_bytes"], rel=0.2)
        ratios.append((before["total_eta_s"] + after["total_eta_s"]) / 2 / seconds)
        if 0.7 < ratios[-1] < 1.3:
            return
    pytest.fail(f"planned / real seconds: {ratios}")


@pytest.mark.parametrize(
    ("words", "parameters", "memory"),
    [
        (("model=gpt2_124m",), "124,439,808", 124_439_808 * 16),  # fp32: weight, gradient and two moments
        (("model=gpt2_124m", "optimizer=sgd"), "124,439,808", 124_439_808 * 12),
        (("model=gpt2_124m", "+stabilizer=qknorm"), "124,441,344", 124_441_344 * 16),
    ],
)
def test_without_timing_sizes_follow_from_the_configuration_alone(
    capsys: pytest.CaptureFixture[str], measured: list[Any], words: tuple[str, ...], parameters: str, memory: int
) -> None:
    assert cli.run(["plan", *words, "--no-timing", "trainer.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert f"{parameters}, " in out
    assert f"{memory / 2**30:.2f} GiB of weights, gradients and optimizer state" in out
    assert not any(word in out for word in ("ETA", "peak memory", "tokens/s"))
    (job,) = (result := planned(capsys, "--no-timing", *words, "trainer.device=cpu"))["jobs"]
    assert (job["training_bytes"], job["eta_s"], job["timing"], result["total_eta_s"]) == (memory, None, None, None)
    assert measured == []


def test_a_sweep_without_timing(
    capsys: pytest.CaptureFixture[str], tiny_overrides: tuple[str, ...], measured: list[Any]
) -> None:
    assert cli.run(["plan", "-m", *tiny_overrides, "--no-timing", "model.n_layers=1,2"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()[-5:-1]
    assert header.split()[:4] == ["job", "parameters", "tokens", "FLOPs"]
    assert [row.split()[-1] for row in rows] == ["model.n_layers=1", "model.n_layers=2"]
    assert measured == []
