"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from stability_lab.config import TrainConfig
from stability_lab.judge.series import perplexity_in
from stability_lab.text import rough

_log = logging.getLogger("stability_lab")
LINES = 20  # plain lines a run
_LONGEST = 16  # names of stabilizers on the bar
_SHORTEST_BAR = 10
_TIMES, _LONGEST_TIMES = "{elapsed}<{remaining}", "00:00:00<00:00:00"
_COLUMNS = 80  # of a terminal that does not say
# What stands around the bar in a line, from the most room that it takes to the least; the numbers have precedence.
_LAYOUTS = (
    f"{{desc}} |{{bar}}| {{n_fmt}}/{{total_fmt}} [{_TIMES}]{{postfix}}",
    "{desc} |{bar}| {n_fmt}/{total_fmt}{postfix}",
    "|{bar}| {n_fmt}/{total_fmt}{postfix}",
    "|{bar}|{postfix}",
)


def short_name(config: TrainConfig) -> str:
    """`qknorm 0.003 s0`: what tells the runs of a sweep apart, in the room that a bar leaves."""
    names = "+".join(sorted(config.stabilizer)) or "none"
    if len(names) > _LONGEST:
        names = f"{len(config.stabilizer)} stabilizers"
    return f"{names} {config.lr:g} s{config.seed}"


def _short(loss: float) -> str:
    return f"{loss:.3f}" if loss < 1000 else rough(loss)


class Progress:
    """`show` takes the last row of a flush; `close` ends the display. `done` steps lie before this part of the run."""

    def __init__(self, max_steps: int, name: str, done: int = 0):
        self.max_steps, self.first = max_steps, done
        self.speed = ""  # the newest one, as text
        self.val_loss: float | None = None
        self.started = time.monotonic()
        self.next_line = 0.0
        self.bar = (
            tqdm(total=max_steps, initial=done, desc=name, dynamic_ncols=True, leave=False, bar_format=_LAYOUTS[0])
            if sys.stderr.isatty() and "TQDM_DISABLE" not in os.environ  # tqdm reads it once, when it is imported
            else None
        )

    def show(self, row: Mapping[str, float]) -> None:
        step = int(row["step"])
        named, _ = perplexity_in(row, "train")
        loss, ppl = (math.nan if row[key] is None else row[key] for key in ("train/loss", named))
        if "perf/tokens_per_s" in row:
            self.speed = f"  {row['perf/tokens_per_s']:,.0f} tok/s"
        self.val_loss, norm = row.get("val/loss", self.val_loss), row["optim/grad_norm"]
        rest = f"  ppl {rough(ppl)}  lr {row['optim/lr']:.2e}{self.speed}"
        validation = f"  val {row['val/loss']:.4f}" if "val/loss" in row else ""
        text = f"loss {loss:.4f}{validation}  gnorm {norm:.3g}{rest}"
        if self.bar is not None:
            validation = "" if self.val_loss is None else f" val {_short(self.val_loss)}"
            self._fit(f"loss {_short(loss)}{validation} gnorm {norm:.2g}", rest)
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

    def _fit(self, numbers: str, rest: str) -> None:
        """Give the bar the layout that leaves it ten columns beside the numbers; `rest` only where all has room."""
        assert self.bar is not None
        facts = dict(self.bar.format_dict)
        for postfix, layout in [(numbers + rest, _LAYOUTS[0]), *((numbers, layout) for layout in _LAYOUTS)]:
            # As long as it gets, so that the layout does not change while digits are added to counter and times.
            around = layout.replace("{bar}", "").replace("{n_fmt}", "{total_fmt}").replace(_TIMES, _LONGEST_TIMES)
            line = tqdm.format_meter(**facts | {"bar_format": around, "postfix": postfix, "ncols": None})
            if len(line) + _SHORTEST_BAR <= (facts["ncols"] or _COLUMNS):
                break
        self.bar.bar_format = layout
        self.bar.set_postfix_str(postfix, refresh=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
