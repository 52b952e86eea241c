"""The bar on a terminal and the lines elsewhere: short names, the numbers that matter first, nothing glued."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from stability_lab.run import console
from stability_lab.run.progress import Progress, short_name

ROW = {"step": 5, "train/loss": 551.3, "train/ppl": 2.65e239, "optim/grad_norm": 0.5211, "optim/lr": 3e-3}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_name_is_what_tells_runs_of_a_sweep_apart(compose_config) -> None:
    assert short_name(compose_config("optimizer.lr=3e-3")) == "none 0.003 s0"
    assert short_name(compose_config("+stabilizer=[qknorm,zloss]", "seed=7")) == "qknorm+zloss 0.003 s7"
    several = compose_config("+stabilizer=[qknorm,zloss,embed_scale,ln_scaling]")
    assert short_name(several) == "4 stabilizers 0.003 s0"


def test_the_bar_shows_loss_val_and_gradient_norm_first_and_no_line_is_glued_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    console.set_up()
    progress = Progress(300, "qknorm 0.003 s0")
    assert progress.bar is not None
    progress.bar.mininterval = 0  # else it is drawn ten times a second
    logging.getLogger("stability_lab").info("gpt_nano: 131,904 parameters")
    row = ROW | {"train/loss": 4.3211, "train/ppl": 75.27}
    progress.show(row | {"val/loss": 4.25})
    progress.show(row | {"step": 150, "val/loss": 4.5})
    progress.show(row | {"step": 300})
    progress.close()
    lines = [part for line in terminal.getvalue().split("\n") for part in line.split("\r")]
    assert "gpt_nano: 131,904 parameters" in lines
    bars = [line for line in lines if line.startswith("qknorm 0.003 s0 |")]
    assert " 300/300 [" in bars[-1]
    assert bars[-1][:80].rstrip().endswith("], loss 4.321 val 4.500 gnorm 0.52")


def test_lines_elsewhere_hold_the_same_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stability_lab")
    progress = Progress(10, "qknorm 0.003 s0")
    progress.show({**ROW, "val/loss": 4.25, "perf/tokens_per_s": 1234.0})
    progress.show({**ROW, "step": 10})
    progress.close()
    first, second = caplog.messages
    rest = "gnorm 0.521  ppl 2.65e239  lr 3.00e-03  1,234 tok/s  ETA 0:00"
    assert first == f"step 5/10  loss 551.3000  val 4.2500  {rest}"
    assert second == f"step 10/10  loss 551.3000  {rest}"
    assert capsys.readouterr().err == ""
