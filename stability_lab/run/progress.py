"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from stability_lab.config import TrainConfig
from stability_lab.text import rough

_log = logging.getLogger("stability_lab")
LINES = 20  # plain lines a run
_LONGEST = 16  # names of stabilizers on the bar
# The bar itself is short, so that 80 columns have room for loss, val and gnorm beside it.
_BAR = "{desc} |{bar:6}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


def short_name(config: TrainConfig) -> str:
    """`qknorm 0.003 s0`: what tells the runs of a sweep apart, in the room that a bar leaves."""
    names = "+".join(sorted(config.stabilizer)) or "none"
    if len(names) > _LONGEST:
        names = f"{len(config.stabilizer)} stabilizers"
    return f"{names} {config.lr:g} s{config.seed}"


class Progress:
    """`show` takes the last row of a flush; `close` ends the display. `done` steps lie before this part of the run."""

    def __init__(self, max_steps: int, name: str, done: int = 0):
        self.max_steps, self.first = max_steps, done
        self.speed = ""  # the newest one, as text
        self.val_loss: float | None = None
        self.started = time.monotonic()
        self.next_line = 0.0
        self.bar = (
            tqdm(total=max_steps, initial=done, desc=name, dynamic_ncols=True, leave=False, bar_format=_BAR)
            if sys.stderr.isatty()
            else None
        )

    def show(self, row: Mapping[str, float]) -> None:
        step = int(row["step"])
        loss, ppl = (math.nan if row[key] is None else row[key] for key in ("train/loss", "train/ppl"))
        if "perf/tokens_per_s" in row:
            self.speed = f"  {row['perf/tokens_per_s']:,.0f} tok/s"
        self.val_loss, norm = row.get("val/loss", self.val_loss), row["optim/grad_norm"]
        rest = f"  ppl {rough(ppl)}  lr {row['optim/lr']:.2e}{self.speed}"
        validation = f"  val {row['val/loss']:.4f}" if "val/loss" in row else ""
        text = f"loss {loss:.4f}{validation}  gnorm {norm:.3g}{rest}"
        if self.bar is not None:
            validation = "" if self.val_loss is None else f" val {self.val_loss:.3f}"
            self.bar.set_postfix_str(f"loss {loss:.3f}{validation} gnorm {norm:.2g}{rest}", refresh=False)
            self.bar.update(step - self.bar.n)
            _log.info("step %d/%d  %s", step, self.max_steps, text, extra={"only_file": True})
            return
        on_console = step >= self.next_line or step == self.max_steps
        if on_console:
            self.next_line = step + self.max_steps / LINES
        elapsed = time.monotonic() - self.started
        eta = elapsed / (step - self.first) * (self.max_steps - step)
        line = f"step {step}/{self.max_steps}  {text}  ETA {int(eta // 60)}:{int(eta % 60):02d}"
        _log.info("%s", line, extra={"only_file": not on_console})

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
