"""What people have after a crash: printed logs, tables with blanks, JSON by column, folders of checkpoints."""

# ruff: noqa: E501 - lines as trainers print them

from __future__ import annotations

import json
import math
import os
import time
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
COMPOSER = """[batch=1/60]:
\t Train time/batch: 0
\t Train loss/train/total: 9.5000
\t Train metrics/train/LanguageCrossEntropy: 9.5000
[batch=2/60]:
\t Train time/batch: 1
\t Train loss/train/total: 9.2500
[Eval batch=1/5] Eval on eval data:
"""
LITGPT = """Epoch 1 | iter 4 step 1 | loss train: 9.500, val: n/a | iter time: 100.0 ms (step)
Epoch 1 | iter 8 step 2 | loss train: 9.250, val: 9.700 | iter time: 100.0 ms (step)
"""
MMDET = """2021-01-01 00:00:00,000 - mmdet - INFO - Epoch [1][1/20]\tlr: 1.0e-02, eta: 1:00:00, loss_cls: 0.1, loss: 7.5, grad_norm: 2.2
2021-01-01 00:00:00,000 - mmdet - INFO - Epoch [1][20/20]\tlr: 1.0e-02, eta: 1:00:00, loss_cls: 0.1, loss: 7.25, grad_norm: 2.1
2021-01-01 00:00:00,000 - mmdet - INFO - Epoch(val) [1][20]\tbbox_mAP: 0.1
2021-01-01 00:00:00,000 - mmdet - INFO - Epoch [2][1/20]\tlr: 1.0e-02, eta: 1:00:00, loss_cls: 0.1, loss: 7.0, grad_norm: 2.0
"""
MMENGINE = """01/01 00:00:00 - mmengine - INFO - Epoch(train)  [1][  50/1000]  lr: 1.0e-02  eta: 1:00:00  loss: 7.5  loss_cls: 0.1
01/01 00:00:00 - mmengine - INFO - Epoch(train)  [2][  50/1000]  lr: 1.0e-02  eta: 1:00:00  loss: 7.25  loss_cls: 0.1
"""
TORCH_EXAMPLE = """Train Epoch: 1 [0/1280 (0%)]\tLoss: 2.250000
Train Epoch: 1 [640/1280 (50%)]\tLoss: 2.000000
Test set: Average loss: 0.1, Accuracy: 1/2 (50%)
Train Epoch: 2 [0/1280 (0%)]\tLoss: nan
"""
KERAS = """Epoch 1/3
 50/100 [=====>......] - ETA: 1s - loss: 9.9000 - accuracy: 0.4
100/100 [============] - 1s 10ms/step - loss: 9.5000 - accuracy: 0.5 - val_loss: 9.9000
Epoch 2/3
1/100 ━ 1s 1s/step - accuracy: 0.5 - loss: 9.9\r100/100 ━━ 1s 10ms/step - accuracy: 0.5 - loss: 9.2500
Epoch 3/3
 50/100 [=====>......] - ETA: 1s - loss: 8.0000 - accuracy: 0.4
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
BUILD_NANOGPT = """0 val 10.9
0 hella 0.25
0 train 10.902
1 train 10.85
2 train nan
"""
BUILD_NANOGPT_STDOUT = """total desired batch size: 524288
validation loss: 10.9
HellaSwag accuracy: 25/100=0.25
step     0 | loss: 10.902000 | lr 8.3916e-07 | norm: 6.5682 | dt: 10578.11ms | tok/sec: 49563.48
step     1 | loss: 10.850000 | lr 1.6783e-06 | norm: 6.4197 | dt: 153.67ms | tok/sec: 3411850.98
"""
BIGRAM = """0.2 M parameters
step 0: train loss 4.4, val loss 4.5
step 100: train loss 2.65, val loss 2.67
"""
OWN_LOOP = """INFO:__main__:Epoch 0 | Step    0/3 | Loss: 8.9 | PPL: 7594.22 | LR: 3.27e-05 | Grad: 20.5 | Time: 1.073s
INFO:__main__:Epoch 0 | Step    2/3 | Loss: 8.2 | PPL: 4455.51 | LR: 5.97e-05 | Grad: 25.5 | Time: 0.507s
INFO:__main__:Validation loss: 8.0
INFO:__main__:Epoch 1 | Step    0/3 | Loss: 7.5 | PPL: 1900.00 | LR: 6.00e-05 | Grad: 2.5 | Time: 0.507s
INFO:__main__:Epoch 1 | Step    2/3 | Loss: 7.1 | PPL: 1300.00 | LR: 6.00e-05 | Grad: 1.5 | Time: 0.507s
"""
FAIRSEQ = """2021-03-08 12:31:36 | INFO | train_inner | {"epoch": 1, "update": 0.1, "loss": "16.0", "num_updates": "100", "lr": "2e-05", "gnorm": "20.5"}
2021-03-08 12:31:37 | INFO | valid | {"epoch": 1, "valid_loss": "15.5", "valid_num_updates": "100"}
2021-03-08 12:32:33 | INFO | train_inner | {"epoch": 1, "update": 0.2, "loss": "15.0", "num_updates": "200", "lr": "4e-05", "gnorm": "19.5"}
"""
FAIRSEQ_WORDS = """2025-10-15 11:33:32 | INFO | train_inner | epoch 001:    100 / 487 loss=16, nll_loss=15, ppl=65536, wps=100, num_updates=100, lr=2e-05, gnorm=20.5
2025-10-15 11:33:52 | INFO | train_inner | epoch 001:    200 / 487 loss=15, nll_loss=14, ppl=32768, wps=100, num_updates=200, lr=4e-05, gnorm=19.5
"""
OLMO = """[2024-04-17 09:42:26] INFO     [olmo.train:816, rank=0] [step=1/739328]
    optim/total_grad_norm=7.5
    train/CrossEntropyLoss=11.25
    train/Perplexity=76,879
    throughput/total_tokens=4,194,304
[2024-04-17 09:42:36] INFO     [olmo.train:816, rank=0] [step=2/739328]
    optim/total_grad_norm=7.0
    train/CrossEntropyLoss=11.0
"""


@pytest.mark.parametrize(
    ("text", "kind", "steps", "values"),
    [
        (BUILD_NANOGPT, "build-nanogpt", [0, 1, 2], [10.902, 10.85, math.nan]),
        (BUILD_NANOGPT_STDOUT, "steps and losses", [0, 1], [10.902, 10.85]),
        (BIGRAM, "steps and losses", [0, 100], [4.4, 2.65]),
        (OWN_LOOP, "steps and losses", [0, 2, 4, 6], [8.9, 8.2, 7.5, 7.1]),
        (
            "Iteration 5: train_loss = 2.5 (best loss 2.4)\nIteration 6: train_loss = inf\nIteration 7: train_loss = NaN\n",
            "steps and losses",
            [5, 6, 7],
            [2.5, math.inf, math.nan],
        ),
        (FAIRSEQ, "fairseq", [100, 200], [16 * math.log(2), 15 * math.log(2)]),
        (FAIRSEQ_WORDS, "fairseq", [100, 200], [16 * math.log(2), 15 * math.log(2)]),
        (OLMO, "OLMo", [1, 2], [11.25, 11.0]),
        (NANOGPT, "nanoGPT", [0, 10, 20], [4.2654, 3.1456, math.nan]),
        (LLM_C, "log of llm.c", [1, 2, 3], [11.0091, 10.9, 10.5]),
        (LLM_C_STDOUT, "printed log of llm.c", [1, 2], [11.009165, 10.95]),
        (MODDED, "modded-nanogpt", [1, 2], [10.8258, 10.1]),
        (MEGATRON, "Megatron", [1, 2, 3], [10.9, 10.5, math.nan]),
        (NANOTRON, "Megatron", [1, 2], [10.6, 10.1]),
        (TITAN, "torchtitan", [1, 10], [12.2721, 11.2]),
        (TRANSFORMERS, "transformers", [1, 2], [2.5, 2.25]),
        (LIGHTNING, "Lightning", [1, 2, 3], [2.5, 2.25, 2.0]),
        (COMPOSER, "Composer", [1, 2], [9.5, 9.25]),
        (LITGPT, "LitGPT", [4, 8], [9.5, 9.25]),
        (MMDET, "OpenMMLab", [1, 20, 21], [7.5, 7.25, 7.0]),
        (MMENGINE, "OpenMMLab", [50, 1050], [7.5, 7.25]),
        (
            "- mmengine - INFO - Iter(train) [  50/9000]  lr: 1.0e-02  eta: 1:00:00  loss: 7.5\n",
            "OpenMMLab",
            [50],
            [7.5],
        ),
        (TORCH_EXAMPLE, "PyTorch's examples", [0, 640, 1280], [2.25, 2.0, math.nan]),
        (KERAS, "Keras", [1, 2], [9.5, 9.25]),
        ("loss=9.5 at step 1\nloss=9.25 at step 2\n", "steps and losses", [1, 2], [9.5, 9.25]),
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
    assert norms(read(tmp_path, BUILD_NANOGPT_STDOUT)) == [6.5682, 6.4197]
    assert norms(read(tmp_path, OWN_LOOP)) == [20.5, 25.5, 2.5, 1.5]
    assert norms(read(tmp_path, FAIRSEQ)) == norms(read(tmp_path, FAIRSEQ_WORDS)) == [20.5, 19.5]
    olmo = read(tmp_path, OLMO)
    assert norms(olmo) == [7.5, 7.0]
    assert olmo.log.tokens is not None
    assert olmo.log.tokens[0] == 4194304


def test_a_rate_that_was_rounded_to_0_is_unknown(tmp_path: Path) -> None:
    lines = "".join(f"s:{i} trl:{3 - 0.01 * i} lr:{'0.000001' if i < 5 else '0.000000'} norm:1.0\n" for i in range(10))
    log = read(tmp_path, lines)
    assert log.log.lr is not None
    assert log.log.lr[:5].tolist() == [1e-6] * 5
    assert all(math.isnan(rate) for rate in log.log.lr[5:])


def test_skipped_iterations_among_those_of_a_line_of_megatron(tmp_path: Path) -> None:
    """Every tenth line has the mean of the iterations that were not skipped; where all were, it has none."""
    line = " iteration {:8d}/     100 | learning rate: 1.0E-04 |{} loss scale: 8.0 | number of skipped iterations: {:3d} | number of nan iterations:   0 |\n"
    text = (
        line.format(10, "", 10) + line.format(20, " lm loss: 1.05E+01 |", 8) + line.format(30, " lm loss: 9.5E+00 |", 0)
    )
    log = read(tmp_path, text)
    assert log.log.step.tolist() == [20, 30]
    assert log.log.skipped is None
    with pytest.raises(ConfigError, match="has no loss: all 1 steps in it were skipped"):
        read(tmp_path, line.format(1, "", 1))


def test_a_log_with_validation_losses_alone_says_so(tmp_path: Path) -> None:
    for text in ("step:0/10 val_loss:10.8 train_time:0ms\nstep:1/10 train_time:9ms\n", "s:0 tel:10.9\ns:250 tel:6.3\n"):
        with pytest.raises(ConfigError, match="has no training loss, only val_loss: --loss val_loss judges that"):
            read(tmp_path, text)


PROGRAM = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'
"""


@pytest.mark.parametrize(
    "text",
    [
        PROGRAM,
        "nohup: ignoring input\nEpoch 1\nEpoch 2, done\nbye\n",
        "Hello, this is a log\nof nothing, really\nat all\n",
        '"an open quote, and no end\n' + "a,b\n" * 5,
        "***\n***\nall is well\n",
    ],
)
def test_what_is_no_log_says_how_it_begins(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no table and no printed log of a known form, it begins '") as caught:
        read(tmp_path, text)
    assert text.splitlines()[0] in str(caught.value)
    assert "and no line names a step and a loss that can be read: give a run's folder" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (
            "[2023-01-01 00:00:00,000] [INFO] step=1, lr=[1e-4], mom=[[0.9, 0.95]]\n" * 9,
            "[2023-01-01 00:00:00,000] [INFO]",
        ),
        ("step 1k: loss 9.8\nstep 2k: loss 9.7\nstep 3k: loss 9.6\n", "step 1k: loss 9.8'"),
        ("Round 1\tobjective 2.5\nRound 2\tobjective 2.4\nend\n", "Round 1\\tobjective 2.5'"),
    ],
)
def test_a_printed_log_of_no_known_form_is_neither_a_table_nor_json(text: str, begin: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert f"is no table and no printed log of a known form, it begins '{begin}" in str(caught.value)


def test_ranks_that_print_into_one_file_are_no_columns(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]:[titan] INFO - step: {i}  loss: {9 + rank}\n" for i in range(1, 9) for rank in range(4)]
    with pytest.raises(
        ConfigError, match=r"8 of 8 steps have several.* lines of one run, and of one rank, alone"
    ) as caught:
        read(tmp_path, "".join(lines))
    assert "COLUMN" not in str(caught.value)


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


@pytest.mark.parametrize("words", ["epoch 1 ", "step 1 ", "loss ", "{'loss' ", "a", "epoch 1 step ", "name 1 | "])
def test_one_endless_line_hangs_nothing(words: str, tmp_path: Path) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match="is no table and no printed log"):
        read(tmp_path, "a log\n" + words * (1_000_000 // len(words)) + "\n")
    assert time.process_time() - began < 5


def test_rows_of_a_json_list_without_names(tmp_path: Path) -> None:
    log = read(tmp_path, json.dumps([[200, 5.9], [400, 5.4]]))
    assert log.log.step.tolist() == [200, 400]
    assert losses(log) == [5.9, 5.4]
    with pytest.raises(ConfigError, match="its columns are column 1, column 2, column 3"):
        read(tmp_path, json.dumps([[200, 5.9, 6.0], [400, 5.4, 5.5]]))


def test_steps_that_golden_values_only_plan_are_no_divergence(tmp_path: Path) -> None:
    """Metrics of the machine are NaN too where there was no step; a loss alone that is NaN is a divergence."""
    loss = {"1": 12.0, "2": 11.0, "3": "nan", "4": "nan"}
    memory = {"1": 5e9, "2": 5e9, "3": "nan", "4": "nan"}
    planned = {"lm loss": {"values": loss}, "mem-allocated-bytes": {"values": memory}}
    log = read(tmp_path, json.dumps(planned))
    assert log.log.step.tolist() == [1, 2]
    assert any(note.startswith("The last 2 rows are left out: mem-allocated-bytes") for note in log.notes)
    ran = planned | {"mem-allocated-bytes": {"values": dict.fromkeys(loss, 5e9)}}
    assert losses(read(tmp_path, json.dumps(ran))) == pytest.approx([12.0, 11.0, math.nan, math.nan], nan_ok=True)
    norms_too = {"lm loss": {"values": loss}, "grad-norm": {"values": loss}}
    assert len(read(tmp_path, json.dumps(norms_too)).log) == 4


def test_the_table_of_runs_of_a_wandb_project_is_no_log(tmp_path: Path) -> None:
    text = "Name,State,Created,Runtime,seed,loss\na,finished,2026-01-01,7,1,2.5\nb,finished,2026-01-01,7,2,2.4\n"
    with pytest.raises(ConfigError, match="is the table of runs of a W&B project, one row a run, and no history"):
        read(tmp_path, text, "wandb_export.csv")


def test_one_row_an_epoch(tmp_path: Path) -> None:
    log = read(tmp_path, "epoch,loss,val_loss\n0,2.5,2.6\n1,2.25,2.4\n2,2.0,2.3\n")
    assert log.log.step.tolist() == [0, 1, 2]
    assert any("a step is an epoch here" in note for note in log.notes)
    # Keras appends the next training to the same file.
    again = "epoch,loss\n" + "".join(f"{i},{3 - 0.1 * i}\n" for _ in range(2) for i in range(12))
    (tmp_path / "again.csv").write_text(again, encoding="utf-8")
    assert [log.log.step.tolist() for log in read_logs(tmp_path / "again.csv")] == [list(range(12))] * 2


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
