"""How many runs of a sweep train at once, with what, and on which device."""

from __future__ import annotations

import pytest
import torch

from stability_lab.command_line import read_command_line
from stability_lab.compose import Composed, compose_jobs
from stability_lab.config import ConfigError
from stability_lab.run import workers
from stability_lab.run.workers import makespan, of_a_sweep, take_device, words_of, workers_of


def jobs(*words: str) -> list[Composed]:
    return of_a_sweep(compose_jobs(read_command_line(["-m", "trainer.device=cpu", *words])))


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 8)
    monkeypatch.setattr(workers, "physical_bytes", lambda device: None)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("seed=range(20)",), 8),
        (("seed=0,1,2",), 3),
        (("seed=range(20)", "trainer.threads=2"), 4),
        (("seed=range(20)", "trainer.threads=3"), 2),
        (("seed=range(20)", "trainer.threads=1,4"), 2),
        (("seed=range(20)", "trainer.threads=64"), 1),
        (("seed=range(20)", "sweep.workers=12"), 12),
        (("seed=0,1", "sweep.workers=12"), 2),
    ],
)
def test_a_core_has_one_thread_unless_somebody_asks(words: tuple[str, ...], count: int) -> None:
    made = jobs(*words)
    assert workers_of(made) == count
    assert f"hydra.launcher.n_jobs={count}" in words_of(made, None) or count == 1


@pytest.mark.usefixtures("eight_cores")
def test_memory_bounds_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    large = jobs("model=gpt2_124m", "tokenizer=gpt2", "seed=range(20)")
    needed = workers._rough_bytes(large[0].config)
    assert 10e9 < needed < 40e9  # 16 sequences of 1,024 tokens with 50,257 logits each
    assert workers._rough_bytes(jobs()[0].config) < 1e9  # it takes 0.4
    for memory, count in ((3.5 * needed, 3), (0.5 * needed, 1), (100 * needed, 8)):
        monkeypatch.setattr(workers, "physical_bytes", lambda device, memory=memory: int(memory))
        assert workers_of(large) == count


def test_a_job_of_a_sweep_has_one_thread_and_a_number_that_is_given_stays() -> None:
    (job, _) = jobs("seed=0,1")
    assert (job.config.trainer.threads, job.plain["trainer"]["threads"]) == (1, 1)
    assert words_of([job], None) == ["++trainer.threads=1"]
    assert [job.config.trainer.threads for job in jobs("trainer.threads=2,null")] == [2, None]


def test_a_gpu_has_one_worker_and_no_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "device_of", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    made = jobs("seed=range(9)")
    assert workers_of(made) == 4
    assert made[0].config.trainer.threads is None
    for worker in range(5):
        take_device(worker)
    assert chosen == [0, 1, 2, 3, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    take_device(0)
    assert len(chosen) == 5


def test_a_launcher_that_is_named_has_options_of_its_own() -> None:
    assert words_of(jobs("seed=0,1"), "submitit_slurm") == ["++trainer.threads=1"]
    with pytest.raises(ConfigError, match=r"sweep\.workers=3: hydra/launcher=joblib has options of its own"):
        words_of(jobs("seed=0,1", "sweep.workers=3"), "joblib")


@pytest.mark.parametrize(("count", "seconds"), [(1, 10.0), (2, 6.0), (3, 4.0), (9, 4.0)])
def test_jobs_start_in_order_as_soon_as_a_worker_is_free(count: int, seconds: float) -> None:
    assert makespan([4.0, 3.0, 1.0, 2.0], count) == seconds
