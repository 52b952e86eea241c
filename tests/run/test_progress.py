"""The bar on a terminal and the lines elsewhere: short names, the numbers that matter first, nothing glued."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

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
    assert bars[-1].rstrip() == "qknorm 0.003 s0 |##########| 300/300, loss 4.321 val 4.500 gnorm 0.52"


def test_a_worker_of_a_sweep_draws_no_bar_beside_those_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TQDM_DISABLE", "1")  # as `set_up_worker` leaves it
    assert Progress(300, "qknorm 0.003 s0").bar is None


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


@pytest.mark.slow
def test_in_a_terminal_of_80_columns_each_bar_has_its_numbers_and_no_line_is_glued_to_it(
    tmp_path: Path, tiny_overrides: tuple[str, ...]
) -> None:
    several = "+stabilizer=[qknorm,zloss]"
    words = [*tiny_overrides, several, "trainer.max_steps=2000", "trainer.eval_every=100", "trainer.log_every=100"]
    written = in_terminal(80, "train", *words, cwd=tmp_path)
    frames = [frame for line in written.split("\r\n") for frame in line.split("\r")]
    bars = [frame for frame in frames if frame.startswith("qknorm+zloss 0.01 s0 |")]
    shown = [found for frame in bars if (found := BAR.fullmatch(frame.rstrip()))]
    assert len(shown) > 3
    assert all(len(bar.group(1)) >= 10 and len(bar.group(0)) <= 80 for bar in shown)
    assert [int(bar.group(2)) for bar in shown] == sorted(int(bar.group(2)) for bar in shown)
    assert any(frame.startswith("gpt_nano: ") for frame in frames)
    assert any(frame.startswith("status    ") for frame in frames)
    assert not any(frame.partition("gnorm")[2].strip().count(" ") for frame in bars)


BAR = re.compile(
    r"qknorm\+zloss 0\.01 s0 \|([ ▏▎▍▌▋▊▉█]+)\| (\d+)/2000(?: \[.*\])?, loss \d\.\d{3} val \d\.\d{3} gnorm [\d.]+"
)


def in_terminal(columns: int, *words: str, cwd: Path) -> str:
    """What a command writes to a terminal that is so wide."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "stability_lab", *words]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=cwd, env=environment) as process:
        os.close(its)
        written = b""
        with contextlib.suppress(OSError):  # the other side has closed
            while part := os.read(ours, 65536):
                written += part
        os.close(ours)
    assert process.returncode == 0, written
    return written.decode()


def test_numbers_have_precedence_over_name_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress(200_000, "job 12 4 stabilizers 0.003 s0")
    assert progress.bar is not None
    progress.show(ROW | {"val/loss": 2.65e5})
    assert progress.bar.bar_format == "|{bar}| {n_fmt}/{total_fmt}{postfix}"
    assert progress.bar.postfix == "loss 551.300 val 2.65e5 gnorm 0.52"
    progress.close()
