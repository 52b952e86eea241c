"""Cores are counted on every system."""

import os

import pytest

from stability_lab import build
from stability_lab.commands import train
from stability_lab.machine.cores import cores


def test_only_the_cores_of_this_process_count() -> None:
    assert cores() == len(os.sched_getaffinity(0))


def test_without_a_list_of_them_the_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no `sched_getaffinity`; a sweep and the threads of its runs need the number all the same."""
    from omegaconf import OmegaConf

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(build, "_default_threads", 6)
    assert cores() == 6
    launcher = {"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "n_jobs": -1}
    assert train._workers(OmegaConf.create({"launcher": launcher}), 99) == 6
    build.share_threads(3)
    assert build._default_threads == 2
