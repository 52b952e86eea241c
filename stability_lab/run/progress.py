"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

_log = logging.getLogger("stability_lab")
LINES = 20  # plain lines a run


class Progress:
    """`show` takes the last row of a flush; `close` ends the display. `done` steps lie before this part of the run."""

    def __init__(self, max_steps: int, name: str, done: int = 0):
        self.max_steps, self.first = max_steps, done
        self.tokens_per_s = 0.0
        self.started = time.monotonic()
        self.next_line = 0.0
        self.bar = (
            tqdm(total=max_steps, initial=done, desc=name[:32], unit="step", dynamic_ncols=True, leave=False)
            if sys.stderr.isatty()
            else None
        )

    def show(self, row: Mapping[str, float]) -> None:
        step = int(row["step"])
        loss, ppl = (float("nan") if row[key] is None else row[key] for key in ("train/loss", "train/ppl"))
        self.tokens_per_s = row.get("perf/tokens_per_s", self.tokens_per_s)
        speed = f"  {self.tokens_per_s:,.0f} tok/s" if self.tokens_per_s else ""
        text = (
            f"loss {loss:.4f}  ppl {ppl:.2f}  grad_norm {row['optim/grad_norm']:.3g}  lr {row['optim/lr']:.2e}{speed}"
        )
        if "val/loss" in row:
            text += f"  val {row['val/loss']:.4f}"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
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
