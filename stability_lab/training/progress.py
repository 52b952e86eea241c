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
    """`show` takes the last row of a flush; `done` ends the display."""

    def __init__(self, max_steps: int, name: str):
        self.max_steps = max_steps
        self.started = time.monotonic()
        self.next_line = 0.0
        self.bar = (
            tqdm(total=max_steps, desc=name[:32], unit="step", dynamic_ncols=True, leave=False)
            if sys.stderr.isatty()
            else None
        )

    def show(self, row: Mapping[str, float]) -> None:
        step = int(row["step"])
        loss, ppl = (float("nan") if row[key] is None else row[key] for key in ("train/loss", "train/ppl"))
        text = (
            f"loss {loss:.4f}  ppl {ppl:.2f}  grad_norm {row['optim/grad_norm']:.3g}  "
            f"lr {row['optim/lr']:.2e}  {row.get('perf/tokens_per_s', 0):,.0f} tok/s"
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
        eta = elapsed / step * (self.max_steps - step)
        line = f"step {step}/{self.max_steps}  {text}  ETA {int(eta // 60)}:{int(eta % 60):02d}"
        _log.info("%s", line, extra={"only_file": not on_console})

    def done(self) -> None:
        if self.bar is not None:
            self.bar.close()
