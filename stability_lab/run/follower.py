"""The other ranks of a run on several processes: they train beside the first one, which alone owns files and words."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stability_lab.build import build_run
from stability_lab.compose import Composed
from stability_lab.judge.series import Row
from stability_lab.run.compiling import settled
from stability_lab.run.resume import Start, prepare
from stability_lab.run.signals import EXIT_CODES, Terminated, interruption
from stability_lab.training.inject import ENDS_THE_PROCESS, Injector, parse
from stability_lab.training.loop import Loop
from stability_lab.training.ranks import Ranks, dropout_seed

_log = logging.getLogger("stability_lab")


class _Silent:
    def rows(self, rows: Sequence[Row]) -> None:
        del rows

    def event(self, event: Mapping[str, Any]) -> None:
        del event


def follow(composed: Composed, ranks: Ranks) -> int:
    """This rank's part of the run that rank 0 trains; the exit code, 0 however the run itself ends."""
    config = composed.config
    with interruption() as stop:
        stop.told = True  # rank 0 says it
        try:
            place = ranks.told(None)
            if place is None:  # it is already finished
                return 0
            path, resumes = place
            composed = settled(composed, path if resumes else None)
            start = prepare(path, composed) if resumes else Start()
            ranks.any(False)
            faults = parse(config.debug.inject, config.trainer.max_steps)
            if resumes:
                faults = tuple(fault for fault in faults if fault.kind not in ENDS_THE_PROCESS)
            loop = Loop(build_run(composed.config, ranks), _Silent(), Injector(faults), None, stop.asked)
            if start.found.state is not None:
                loop.load_state(start.found.state)
                torch.manual_seed(dropout_seed(config.seed, ranks.rank, start.step))  # else all would drop alike
            stop.can_wait = True
            loop.train()
        except (KeyboardInterrupt, Terminated):
            return EXIT_CODES.get(stop.reason or "", 1)
        except Exception as error:
            # torchrun ends the other ranks, and shows which one failed first.
            print(f"rank {ranks.rank} failed: {type(error).__name__}: {error}", file=sys.stderr)
            _log.debug("traceback", exc_info=error)
            return 1
    return 0
