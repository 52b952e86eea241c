"""The monitor in `transformers.Trainer`: `Monitor(...).callback()` makes one of these."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stability_lab.monitoring.monitor import Monitor

_log = logging.getLogger("stability_lab")


class MonitorCallback(TrainerCallback):
    """Gives the monitor what the Trainer logs: its mean loss since the last log, and the newest gradient norm."""

    def __init__(self, monitor: Monitor, stop_on_divergence: bool):
        self.monitor, self.stop_on_divergence = monitor, stop_on_divergence
        self.tokens = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        if args.logging_strategy != "steps" or args.logging_steps != 1:
            every = f"{args.logging_steps} steps" if args.logging_strategy == "steps" else str(args.logging_strategy)
            _log.warning("the Trainer logs every %s: a spike in between is not seen; set logging_steps=1", every)
        if args.logging_nan_inf_filter:
            _log.warning("the Trainer hides losses that are not finite; set logging_nan_inf_filter=False")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            seen = state.num_input_tokens_seen
            self.monitor.step(
                logs["loss"],
                lr=logs.get("learning_rate"),
                grad_norm=logs.get("grad_norm"),
                tokens=int(seen - self.tokens) if seen else None,
                # Accelerate's optimizer says whether its scaler skipped the step; a plain one never skips.
                skipped=bool(getattr(optimizer, "step_was_skipped", False)),
                step=state.global_step,
            )
            self.tokens = seen
        if "eval_loss" in logs:
            self.monitor.log_validation(logs["eval_loss"], step=state.global_step)
        if self.stop_on_divergence and self.monitor.should_stop:
            control.should_training_stop = True
