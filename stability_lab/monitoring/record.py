"""The record of a run that somebody else's loop trains: rows on their way to the disk and to the judge.

It knows nothing of the model, so that it can outlive it.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import yaml
from torch import Tensor

from stability_lab.judge.judgement import Judgement
from stability_lab.judge.series import JUDGED, Row, perplexity
from stability_lab.judge.verdict import Evidence, initial_loss_warning
from stability_lab.judge.watch import Watch, without_verdict
from stability_lab.tracking.run_files import RunFiles

_log = logging.getLogger("stability_lab")

# A probe's value is the user's to give; all others are the record's own.
OWN_KEYS = {*JUDGED, "train/ppl", "optim/loss_scale", "val/loss", "val/ppl"} - {"attn/max_logit"}


class Record:
    """Rows on their way to disk, and to the watch that the judge keeps. Knows nothing of the model."""

    def __init__(self, files: RunFiles | None, config: dict[str, Any], flush_every: int, evidence: Evidence):
        self.files, self.config, self.flush_every = files, config, flush_every
        self.find_lr = math.isnan(config["optimizer"]["lr"])
        self.watch = Watch(evidence)
        self.pending: list[Row] = []  # not judged yet; may hold tensors on the device
        self.unwritten: list[Row] = []  # judged; the last row waits, for a validation may still be added to it
        self.step = 0
        self.tokens = 0
        self.waits_for_step = False  # the newest row is a validation whose step may still come
        self.nonfinite = self.rose = self.diverged = self.ended = False
        self.judgement: Judgement | None = None

    def add(self, step: int | None, values: Row) -> None:
        self._check_open()
        if self.waits_for_step and step in (None, self.step):
            row = (self.pending or self.unwritten).pop()
            self.pending.append({**row, **values})
        else:
            self.pending.append({"step": self._advance(step), **values})
        self.waits_for_step = False
        if len(self.pending) >= self.flush_every:
            self.flush()

    def validate(self, loss: float, step: int | None) -> None:
        self._check_open()
        values = {"val/loss": loss, "val/ppl": perplexity(loss)}
        step = self.step if step is None else step
        self.watch.measure(step, values)
        if step == 0:
            evidence = self.watch.evidence
            warning = initial_loss_warning(loss, evidence.vocab_size, evidence.unigram_entropy)
            if warning and self.files:
                _log.warning("%s", warning)
        elif step > self.step:
            self.pending.append({"step": self._advance(step), **values})
            self.waits_for_step = True
        elif row := next((row for row in [*self.unwritten, *self.pending] if row["step"] == step), None):
            row.update(values)
        elif self.files:
            _log.warning("%s: step %d is written already: its validation loss goes to no line", self.files.path, step)

    def _check_open(self) -> None:
        if self.ended:
            raise RuntimeError("the monitor is finished: one Monitor records one run")

    def _advance(self, step: int | None) -> int:
        step = self.step + 1 if step is None else step
        if step <= self.step:
            raise ValueError(f"step {step} comes after step {self.step}, but one run only goes forward")
        self.step = step
        return step

    def flush(self) -> None:
        """Bring the pending rows to the host, judge them, and write all but the last one."""
        rows, self.pending = self.pending, []
        _to_host(rows)
        steps = [row for row in rows if "train/loss" in row]
        for row in steps:
            self._complete(row)
        self.watch.add(steps)
        # A foreign loop may skip such a step without a word: if the next one is finite again, nothing was lost.
        self.nonfinite = _is_bad(steps[-1]) if steps else self.nonfinite
        self.rose = self.rose or self.watch.sees_divergence()
        known, self.diverged = self.diverged, self.nonfinite or self.rose
        if self.files and self.diverged and not known:
            _log.warning("%s: the run has diverged (seen at step %d)", self.files.path, self.step)
        events = self.watch.look()
        self.unwritten += rows
        if self.files is None:
            self.unwritten = self.unwritten[-1:]
        else:
            try:
                self._write(self.files, len(self.unwritten) - 1)
                for event in events:
                    self.files.log_event(event.as_dict())
            except OSError as error:
                # The training matters more than its log: rows wait for the next flush, and the end rewrites the events.
                _log.warning("%s: what waits to be written is kept for now (%s)", self.files.path, error)

    def _write(self, files: RunFiles, n: int) -> None:
        """The first `n` of the rows that wait; of their learning rates the largest, if the user named none."""
        ready = self.unwritten[:n]
        seen = max((row["optim/lr"] for row in ready if "optim/lr" in row), default=math.nan)
        optimizer = self.config["optimizer"]
        if self.find_lr and not seen <= optimizer["lr"] and not math.isnan(seen):
            optimizer["lr"] = seen
            write_config(files, self.config)
        files.log_rows(ready)
        self.unwritten = self.unwritten[n:]

    def _complete(self, row: Row) -> None:
        """Derived values of a row whose tensors have become numbers."""
        scale, norm = row.get("optim/loss_scale"), row.get("optim/grad_norm")
        if scale is not None and norm is not None:
            # A scale that has shrunk to 0 leaves nothing of the gradients to measure.
            row["optim/grad_norm"] = norm / scale if scale > 0 else math.nan
            overflow = not math.isfinite(norm) and math.isfinite(row["train/loss"])
            row["optim/skipped"] = row["optim/skipped"] or (overflow and scale > 1)
        row["optim/skipped"] = float(row["optim/skipped"])
        row["train/ppl"] = perplexity(row["train/loss"])
        if "tokens" in row:
            self.tokens += int(row["tokens"]) if math.isfinite(row["tokens"]) else 0
            row["tokens"] = self.tokens

    def end(self, status: str, ended_by: str | None, nonfinite_parameter: bool = False) -> Judgement | None:
        """Flush, judge and close, once; None where there was no step to judge."""
        if self.ended:
            return self.judgement
        try:
            self.flush()
        except Exception:
            if status == "completed":
                raise
            # A device that has failed takes its last steps with it, and the error itself matters more than they do.
            _log.warning("the last steps could not be read", exc_info=True)
        self.ended = True
        self.judgement, summary = self.watch.judge(nonfinite=self.nonfinite, nonfinite_parameter=nonfinite_parameter)
        if status == "completed" and summary["verdict"] == "diverged":
            status = "diverged"
        if status == "failed":
            summary = without_verdict(summary)
        if self.files:
            self._write(self.files, len(self.unwritten))
            outcome = {"status": status} | ({"ended_by": ended_by} if ended_by else {})
            self.files.replace_events([event.as_dict() for event in self.judgement.events] if self.judgement else [])
            self.files.write_json("summary.json", outcome | summary | {"steps": self.step})
            self.files.close()
        return self.judgement


def write_config(files: RunFiles, config: Mapping[str, Any]) -> None:
    files.write_text("config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def _to_host(rows: Iterable[Row]) -> None:
    """Make numbers of all tensors, with one copy from the device for each dtype."""
    groups: dict[Any, list[tuple[Row, str, Tensor]]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if isinstance(value, Tensor):
                groups[value.device, value.dtype].append((row, key, value))
    for group in groups.values():
        numbers = torch.stack([value for _, _, value in group]).tolist()
        for (row, key, _), number in zip(group, numbers, strict=True):
            row[key] = number


def _is_bad(row: Row) -> bool:
    finite = math.isfinite(row["train/loss"]) and math.isfinite(row.get("optim/grad_norm", 0.0))
    return not finite and not row["optim/skipped"]
