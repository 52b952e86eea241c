"""How much of a machine a process gets, and when a person is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stability_lab.config import ConfigError
from stability_lab.machine import precision
from stability_lab.machine.clock import Clock, busy
from stability_lab.training import loop


def test_a_clock_sums_the_clock_and_the_threads() -> None:
    clock = Clock()
    with clock.running():
        time.sleep(0.05)
    assert clock.wall_s >= 0.05
    assert clock.share(1) < 0.5
    with clock.running():
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    assert 0.3 <= clock.cpu_s < 0.4
    total = Clock()
    total += clock
    total += clock
    assert total.cpu_s == 2 * clock.cpu_s
    assert total.share(4) == pytest.approx(clock.cpu_s / clock.wall_s / 4)


def test_one_thread_waits_for_no_other() -> None:
    assert busy(0.3, 1) is None
    assert busy(0.95, 2) is None
    told = busy(0.41, 2)
    assert told is not None
    assert told.startswith("2 threads got 41% of the time")
    assert "trainer.threads=1" in told


def test_a_run_says_once_that_the_machine_is_busy(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.0)
    monkeypatch.setattr(Clock, "share", lambda self, threads: 0.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(logging.getLogger("stability_lab"), "propagate", True)
    run = tiny_run("trainer.max_steps=8", "trainer.log_every=1", "trainer.eval_every=null")

    class Nowhere:
        def rows(self, rows: Any) -> None: ...
        def event(self, event: Any) -> None: ...

    with caplog.at_level(logging.INFO, logger="stability_lab"):
        loop.Loop(run, Nowhere()).train()
    assert [r.message for r in caplog.records if "50%" in r.message] == [f"notice: {busy(0.5, 2)}"]


@pytest.mark.parametrize(
    ("processor", "avx512", "amx", "has"),
    [
        ("x86_64", False, False, False),
        ("AMD64", False, True, True),
        ("x86_64", True, False, True),
        ("arm64", False, False, True),
    ],
)
def test_instructions_for_bf16(
    monkeypatch: pytest.MonkeyPatch, processor: str, avx512: bool, amx: bool, has: bool
) -> None:
    monkeypatch.setattr(precision.platform, "machine", lambda: processor)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert precision.has_bf16() is has


def test_bf16_without_instructions_is_refused_unless_forced(
    tiny_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stability_lab import build

    monkeypatch.setattr(build, "has_bf16", lambda: False)
    slow = tiny_config("trainer.precision=bf16", "trainer.device=cpu")
    with pytest.raises(ConfigError, match=r"^trainer\.precision=bf16: this CPU has no instructions for it"):
        build.check([slow], must_fit=True)
    build.check([slow])
    build.check([tiny_config("trainer.precision=bf16", "trainer.emulate_bf16=true")], must_fit=True)
    build.check([tiny_config("trainer.precision=fp32")], must_fit=True)
