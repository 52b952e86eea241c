"""What people have after a crash: printed logs, tables with blanks, JSON by column, folders of checkpoints."""

# ruff: noqa: E501 - lines as trainers print them

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from stability_lab.config import ConfigError
from stability_lab.logs.training_log import NamedLog, read_logs


def read(folder: Path, text: str, name: str = "log.txt") -> NamedLog:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    (log,) = read_logs(file)
    return log


def losses(log: NamedLog) -> list[float]:
    assert log.log.loss is not None
    return log.log.loss.tolist()


def norms(log: NamedLog) -> list[float]:
    assert log.log.grad_norm is not None
    return log.log.grad_norm.tolist()


NANOGPT = """number of parameters: 10.65M
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2654, time 30.1ms, mfu -100.00%
iter 10: loss 3.1456, time 12.1ms, mfu 12.00%
saving checkpoint to out
iter 20: loss nan, time 12.1ms, mfu 12.00%
"""
LLM_C = """s:0 tel:11.0092
s:1 trl:11.0091 lr:0.000001 norm:15.37
s:2 trl:10.9 lr:0.000002 norm:15.2
s:250 tel:6.4
s:250 hella:0.25
s:3 trl:10.5 lr:0.000003 norm:nan
"""
LLM_C_STDOUT = """+-----------------------+
| Parameter | Value |
step    1/19560 | loss 11.009165 (+nanz)| norm 15.3677 (+nanz)| lr 8.57e-07 | 3056.36 ms | 42.6% bf16 MFU
step    2/19560 | loss 10.950000 (+nanz)| norm 15.2000 (+nanz)| lr 1.71e-06 | 3056.36 ms | 42.6% bf16 MFU
"""
MODDED = """import os
import sys
with open(sys.argv[0]) as f:
    code = f.read()
====================================================================================================
step:0/5100 val_loss:10.8258 train_time:0ms step_avg:nanms
step:1/5100 train_loss:10.8258 train_time:100ms step_avg:nanms
step:2/5100 train_loss:10.1000 train_time:200ms step_avg:nanms
"""
MEGATRON = """ iteration        1/     100 | consumed samples:            8 | elapsed time per iteration (ms): 4000.1 | learning rate: 1.000E-04 | global batch size:     8 | lm loss: 1.090000E+01 | loss scale: 1.0 | grad norm: 3.200 | number of skipped iterations:   0 | number of nan iterations:   0 |
 validation loss at iteration 1 | lm loss value: 9.9 |
 iteration        2/     100 | consumed samples:           16 | learning rate: 2.000E-04 | lm loss: 1.050000E+01 | loss scale: 1.0 | grad norm: 3.100 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration        3/     100 | consumed samples:           24 | learning rate: 3.000E-04 | loss scale: 1.0 | grad norm: nan | number of skipped iterations:   0 | number of nan iterations:   1 |
"""
NANOTRON = """01/01/2024 00:00:00 [INFO|DP=0] iteration: 1 / 100 | consumed_tokens: 2097152 | lm_loss: 10.6 | lr: 0.0001 | grad_norm: 2.5
01/01/2024 00:00:01 [INFO|DP=0] iteration: 2 / 100 | consumed_tokens: 4194304 | lm_loss: 10.1 | lr: 0.0002 | grad_norm: 2.4
"""
TITAN = """[rank0]:\x1b[32m[titan] 2025-01-01 - root - INFO - Training starts at step 1.\x1b[39m
[rank0]:\x1b[32m[titan] 2025-01-01 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2721  \x1b[35mgrad_norm:  3.1000  memory: 30GiB\x1b[39m
[rank0]:\x1b[32m[titan] 2025-01-01 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss: 11.2000  \x1b[35mgrad_norm:  2.9000  memory: 30GiB\x1b[39m
"""
TRANSFORMERS = """  0%|          | 0/100 [00:00<?, ?it/s]
{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.01}
 50%|#####     | 50/100 [00:10<00:10, 5.00it/s]
{'loss': 2.25, 'grad_norm': nan, 'learning_rate': 4e-05, 'epoch': 0.02}
{'eval_loss': 2.4, 'eval_runtime': 1.0, 'epoch': 0.02}
{'train_runtime': 10.0, 'train_loss': 2.3, 'epoch': 1.0}
"""
LIGHTNING = (
    "Epoch 0:  50%|#####     | 1/2 [00:01<00:01,  1.00it/s, v_num=0, train_loss=2.500]\r"
    "Epoch 0: 100%|##########| 2/2 [00:02<00:00,  1.00it/s, v_num=0, train_loss=2.250]\n"
    "Epoch 1:  50%|#####     | 1/2 [00:01<00:01,  1.00it/s, v_num=0, train_loss=2.000]\n"
)


@pytest.mark.parametrize(
    ("text", "kind", "steps", "values"),
    [
        (NANOGPT, "nanoGPT", [0, 10, 20], [4.2654, 3.1456, math.nan]),
        (LLM_C, "log of llm.c", [1, 2, 3], [11.0091, 10.9, 10.5]),
        (LLM_C_STDOUT, "printed log of llm.c", [1, 2], [11.009165, 10.95]),
        (MODDED, "modded-nanogpt", [1, 2], [10.8258, 10.1]),
        (MEGATRON, "Megatron", [1, 2, 3], [10.9, 10.5, math.nan]),
        (NANOTRON, "Megatron", [1, 2], [10.6, 10.1]),
        (TITAN, "torchtitan", [1, 10], [12.2721, 11.2]),
        (TRANSFORMERS, "transformers", [1, 2], [2.5, 2.25]),
        (LIGHTNING, "Lightning", [1, 2, 3], [2.5, 2.25, 2.0]),
    ],
)
def test_printed_logs(text: str, kind: str, steps: list[int], values: list[float], tmp_path: Path) -> None:
    log = read(tmp_path, text)
    assert kind in log.format
    assert log.log.step.tolist() == steps
    assert losses(log) == pytest.approx(values, nan_ok=True)


def test_their_gradient_norms_and_rates(tmp_path: Path) -> None:
    llm_c = read(tmp_path, LLM_C)
    assert norms(llm_c) == pytest.approx([15.37, 15.2, math.nan], nan_ok=True)
    assert llm_c.log.lr is not None
    assert llm_c.log.lr.tolist() == [1e-6, 2e-6, 3e-6]
    assert norms(read(tmp_path, MEGATRON)) == pytest.approx([3.2, 3.1, math.nan], nan_ok=True)
    assert norms(read(tmp_path, TITAN)) == [3.1, 2.9]
    assert norms(read(tmp_path, TRANSFORMERS)) == pytest.approx([1.5, math.nan], nan_ok=True)


@pytest.mark.parametrize(
    "text",
    ["1 8.05\n2 7.75\n3 7.03\n", "# step loss\n1 8.05\n2 7.75\n3 7.03\n", "step   loss\n1   8.05\n2  7.75\n3 7.03\n"],
)
def test_tables_with_blanks(text: str, tmp_path: Path) -> None:
    log = read(tmp_path, text)
    assert log.log.step.tolist() == [1, 2, 3]
    assert losses(log) == [8.05, 7.75, 7.03]


def test_a_table_without_a_header_loses_no_row(tmp_path: Path) -> None:
    log = read(tmp_path, "1,8.05\n2,7.75\n")
    assert losses(log) == [8.05, 7.75]
    assert any("no header" in note for note in log.notes)
    with pytest.raises(ConfigError, match="its columns are column 1, column 2, column 3"):
        read(tmp_path, "1,8.05,3\n2,7.75,2\n")


@pytest.mark.parametrize(
    ("whole", "steps", "values"),
    [
        (
            {"lm loss": {"start_step": 1, "step_interval": 1, "values": {"1": 12.9, "2": 12.1, "3": "nan"}}},
            [1, 2, 3],
            [12.9, 12.1, math.nan],
        ),
        ({"step": [1, 2, 5], "loss": [3.0, 2.9, 2.8]}, [1, 2, 5], [3.0, 2.9, 2.8]),
        ({"loss": {"0": 3.0, "1": 2.9}}, [0, 1], [3.0, 2.9]),
    ],
)
def test_json_by_column(whole: object, steps: list[int], values: list[float], tmp_path: Path) -> None:
    log = read(tmp_path, json.dumps(whole), "golden.json")
    assert log.log.step.tolist() == steps
    assert losses(log) == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize("name", ["current_steps", "time/batch", "trainer/batch_idx"])
def test_step_names(name: str, tmp_path: Path) -> None:
    rows = [json.dumps({name: step, "total_steps": 100, "loss": 3.0 - step / 100}) for step in (5, 10, 15)]
    assert read(tmp_path, "\n".join(rows) + "\n").log.step.tolist() == [5, 10, 15]


def test_steps_of_a_total(tmp_path: Path) -> None:
    assert read(tmp_path, "step,loss\n5/1000,3.0\n10/1000,2.9\n").log.step.tolist() == [5, 10]


def test_the_checkpoint_with_the_highest_step_is_read(tmp_path: Path) -> None:
    for n in (1000, 500):
        folder = tmp_path / f"checkpoint-{n}"
        folder.mkdir()
        history = [{"loss": 3 - 0.001 * i, "step": i} for i in range(1, n + 1)]
        history.append({"eval_loss": 2.0, "step": n})
        state = folder / "trainer_state.json"
        state.write_text(json.dumps({"log_history": history, "global_step": n}), encoding="utf-8")
        os.utime(state, (1e9, 1e9))
    (log,) = read_logs(tmp_path)
    assert len(log.log) == 1000


def test_what_it_is_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a pointer of Git LFS"):
        read(tmp_path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
