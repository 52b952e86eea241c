"""Kinds of training logs with the answers of an expert, fixed before the judge saw them: benchmarks/judge.py.

Each kind is a function of a random generator; ten calls give ten logs that differ in noise, length, heights and places.
Shapes follow public logs: loss curves that fall as a power or an exponential of the step, noise in nats that depends on
the batch, gradient norms with noise in proportion to their size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.log import Log
from stability_lab.judge.verdict import Evidence

Array = NDArray[np.float64]
Rng = np.random.Generator
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Happening:
    """Something that an event should name: one of `kinds` that begins within `near` steps of `step`."""

    step: int
    kinds: tuple[str, ...] = ("loss_spike", "grad_norm_spike")
    near: int = 20


@dataclass(frozen=True)
class Case:
    """A log with its answers; events from the step `open_from` on are neither right nor wrong."""

    verdict: str
    log: Log
    happenings: tuple[Happening, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    open_from: int | None = None


KINDS: dict[str, Callable[[Rng], Case]] = {}


def kind(build: Callable[[Rng], Case]) -> Callable[[Rng], Case]:
    KINDS[build.__name__] = build
    return build


# Curves. Steps count from 1, and index i holds step i + 1.


def small(rng: Rng, n: int = 1000, sd: float = 0.05) -> Array:
    """A byte model of a million parameters: from ln 256 to some 2 nats."""
    t = np.arange(n)
    return 2.0 + 3.55 * np.exp(-t / rng.uniform(50, 90)) + 0.3 * np.exp(-t / n) + sd * rng.normal(size=n)


def large(rng: Rng, n: int = 5000, sd: float = 0.1) -> Array:
    """Pre-training on 50,000 tokens of vocabulary: from 10.8 to some 3 nats."""
    t = np.arange(n)
    return 2.6 + 8.2 * (1 + t / rng.uniform(25, 60)) ** -0.6 + sd * rng.normal(size=n)


def norms(rng: Rng, n: int, sigma: float = 0.15, end: float = 0.4) -> Array:
    """A gradient norm that falls to `end` while the rate warms up, with log-normal noise."""
    return end * (1 + 6 * np.exp(-np.arange(n) / 60)) * np.exp(sigma * rng.normal(size=n))


def log_of(
    loss: Array | None, norm: Array | None = None, first: int = 1, every: int = 1, skipped: Array | None = None
) -> Log:
    n = len(loss if loss is not None else norm if norm is not None else ())
    return Log(first + every * np.arange(n), loss, norm, skipped=None if skipped is None else skipped.astype(bool))


def bump(x: Array, at: int, height: float, lasts: float) -> None:
    """A jump at index `at` that decays with a time of `lasts` steps; 0 is a single step."""
    if lasts == 0:
        x[at] += height
        return
    away = np.arange(x.size - at)
    x[at:] += height * np.exp(-away / lasts)


def plateau(x: Array, at: int, height: float, width: int) -> None:
    x[at : at + width] += height


def apart(rng: Rng, k: int, first: int, last: int, gap: int = 40) -> list[int]:
    """`k` places between `first` and `last`, at least `gap` apart."""
    free = last - first - (k - 1) * gap
    return [int(first + i * gap + x) for i, x in enumerate(np.sort(rng.integers(0, free, size=k)))]


def spikes_at(places: list[int]) -> tuple[Happening, ...]:
    return tuple(Happening(at + 1) for at in places)


# Healthy, without an event


@kind
def clean_small(rng: Rng) -> Case:
    return Case("stable", log_of(small(rng), norms(rng, 1000)))


@kind
def clean_200_steps(rng: Rng) -> Case:
    return Case("stable", log_of(small(rng, 200), norms(rng, 200)))


@kind
def clean_5000_steps(rng: Rng) -> Case:
    return Case("stable", log_of(large(rng), norms(rng, 5000)))


@kind
def clean_20000_steps(rng: Rng) -> Case:
    return Case("stable", log_of(large(rng, 20_000), norms(rng, 20_000)))


@kind
def clean_50000_steps_of_wide_gradient_noise(rng: Rng) -> Case:
    return Case("stable", log_of(large(rng, 50_000), norms(rng, 50_000, sigma=0.35)))


@kind
def clean_with_very_wide_gradient_noise(rng: Rng) -> Case:
    return Case("stable", log_of(small(rng), norms(rng, 1000, sigma=0.6)))


@kind
def clean_large_batch(rng: Rng) -> Case:
    return Case("stable", log_of(large(rng, sd=0.003), norms(rng, 5000, sigma=0.03)))


@kind
def clean_loss_alone(rng: Rng) -> Case:
    return Case("stable", log_of(small(rng, 600)))


@kind
def clean_gradient_norm_alone(rng: Rng) -> Case:
    return Case("stable", log_of(None, norms(rng, 600)))


@kind
def clean_every_tenth_step(rng: Rng) -> Case:
    return Case("stable", log_of(large(rng)[::10], norms(rng, 5000)[::10], first=10, every=10))


@kind
def clean_averaged_over_ten(rng: Rng) -> Case:
    return Case("stable", log_of(large(rng).reshape(-1, 10).mean(axis=1), first=10, every=10))


@kind
def clean_rounded_to_two_decimals(rng: Rng) -> Case:
    return Case("stable", log_of(np.round(small(rng, sd=0.01), 2), np.round(norms(rng, 1000), 2)))


@kind
def clean_warmup_stable_decay(rng: Rng) -> Case:
    loss = large(rng, 3000, sd=0.05)
    loss[2400:] -= 0.3 * np.linspace(0, 1, 600)
    return Case("stable", log_of(loss, norms(rng, 3000)))


@kind
def clean_slow_oscillation(rng: Rng) -> Case:
    n, t = 2000, np.arange(2000)
    wave = 0.3 * np.sin(2 * np.pi * (t / 100 + rng.uniform()))
    return Case("stable", log_of(small(rng, n, sd=0.03) + wave, norms(rng, n)))


@kind
def clean_cyclic_rate(rng: Rng) -> Case:
    n, t = 2000, np.arange(2000)
    wave = 0.06 * np.cos(2 * np.pi * t / 400)
    return Case("stable", log_of(small(rng, n, sd=0.03) + wave, norms(rng, n)))


@kind
def clean_white_noise_of_half_a_nat(rng: Rng) -> Case:
    return Case("stable", log_of(small(rng, 1500, sd=0.5), norms(rng, 1500, sigma=0.3)))


@kind
def clean_correlated_noise(rng: Rng) -> Case:
    noise = np.zeros(2000)
    for i, x in enumerate(rng.normal(size=2000)):
        noise[i] = 0.9 * noise[i - 1] + 0.02 * x
    return Case("stable", log_of(small(rng, 2000, sd=0.01) + noise, norms(rng, 2000)))


@kind
def clean_noise_that_grows(rng: Rng) -> Case:
    loss = small(rng, 2000, sd=0) + np.linspace(0.02, 0.08, 2000) * rng.normal(size=2000)
    return Case("stable", log_of(loss, norms(rng, 2000)))


@kind
def clean_gradient_norm_that_doubles_slowly(rng: Rng) -> Case:
    return Case("stable", log_of(large(rng, 6000), norms(rng, 6000) * np.linspace(1, 2, 6000)))


@kind
def clean_tail_of_a_longer_run(rng: Rng) -> Case:
    loss = 2.8 - 0.01 * np.linspace(0, 1, 2000) + 0.08 * rng.normal(size=2000)
    return Case("stable", log_of(loss, 0.3 * np.exp(0.1 * rng.normal(size=2000)), first=50_001))


@kind
def clean_epochs(rng: Rng) -> Case:
    loss = 1.6 - 0.25 * (np.arange(1500) // 500) - 0.1 * (np.arange(1500) / 1500) + 0.08 * rng.normal(size=1500)
    loss[:100] += np.linspace(0.8, 0, 100)
    return Case("stable", log_of(loss, norms(rng, 1500)))


@kind
def clean_batch_is_doubled(rng: Rng) -> Case:
    n = 3000
    loss = large(rng, n, sd=0) + np.where(np.arange(n) < 1500, 0.1, 0.07) * rng.normal(size=n)
    return Case("stable", log_of(loss, norms(rng, n) * np.where(np.arange(n) < 1500, 1, 0.7)))


@kind
def clean_own_run(rng: Rng) -> Case:
    evidence = Evidence(5.56, 2.1, 3.04, 256, 20)
    return Case("stable", log_of(small(rng, 300), norms(rng, 300)), evidence=evidence)


@kind
def clean_run_that_converged(rng: Rng) -> Case:
    loss = 0.4 + 2 * np.exp(-np.arange(3000) / 40) + 0.01 * rng.normal(size=3000)
    return Case("stable", log_of(loss, norms(rng, 3000)))


# Healthy, with spikes at the rate of healthy public runs


@kind
def three_bad_batches_in_1000(rng: Rng) -> Case:
    loss, at = small(rng, sd=0.02), apart(rng, 3, 200, 950)
    for i in at:
        bump(loss, i, 0.4, 0)
    return Case("stable", log_of(loss), spikes_at(at))


@kind
def one_bad_batch_in_400(rng: Rng) -> Case:
    loss, norm, at = small(rng, 400), norms(rng, 400), apart(rng, 1, 150, 380)
    for i in at:
        bump(loss, i, 1.5, 0)
        norm[i] *= 5
    return Case("stable", log_of(loss, norm), spikes_at(at))


@kind
def odd_batches_of_a_small_model(rng: Rng) -> Case:
    loss, at = large(rng, 6000), apart(rng, 18, 300, 5900)
    for i in at:
        plateau(loss, i, rng.uniform(1.0, 2.0), int(rng.integers(1, 3)))
    return Case("stable", log_of(loss), spikes_at(at))


@kind
def odd_documents_of_a_large_model(rng: Rng) -> Case:
    loss, at = large(rng, 20_000, sd=0.18), apart(rng, 80, 300, 19_900)
    for k, i in enumerate(at):
        plateau(loss, i, rng.uniform(1.8, 2.7), int(rng.integers(4, 9)) if k % 16 == 0 else int(rng.integers(1, 3)))
    return Case("stable", log_of(loss), spikes_at(at))


@kind
def a_spike_at_step_12(rng: Rng) -> Case:
    loss = large(rng, 1000, sd=0.03)
    bump(loss, 11, 3.0, 0)
    return Case("stable", log_of(loss), (Happening(12, near=2),))


@kind
def a_bad_batch_while_the_loss_falls(rng: Rng) -> Case:
    loss, at = large(rng, 2000, sd=0.03), int(rng.integers(40, 120))
    bump(loss, at, 3.0, 0)
    return Case("stable", log_of(loss), spikes_at([at]))


@kind
def small_spikes_of_a_large_batch(rng: Rng) -> Case:
    loss, at = large(rng, sd=0.003), apart(rng, 6, 800, 4900)
    for i in at:
        bump(loss, i, 0.08, 0)
    return Case("stable", log_of(loss), spikes_at(at))


@kind
def one_clipped_gradient(rng: Rng) -> Case:
    norm, at = norms(rng, 1000), apart(rng, 1, 200, 900)
    norm[at] *= 20
    return Case("stable", log_of(small(rng), norm), spikes_at(at))


@kind
def fp16_overflows_without_a_mark(rng: Rng) -> Case:
    norm, at = norms(rng, 2000), apart(rng, 5, 30, 1900)
    norm[at] = INF
    marks = tuple(Happening(i + 1, ("nonfinite_step",)) for i in at)
    return Case("stable", log_of(small(rng, 2000), norm), marks)


@kind
def fp16_first_two_steps(rng: Rng) -> Case:
    norm = norms(rng, 200)
    norm[:2] = NAN
    return Case("stable", log_of(small(rng, 200), norm), (Happening(1, ("nonfinite_step",)),))


@kind
def fp16_skips_with_a_mark(rng: Rng) -> Case:
    norm, at = norms(rng, 1000), apart(rng, 4, 50, 900)
    norm[at] = INF
    marks = tuple(Happening(i + 1, ("skipped_step",), 0) for i in at)
    return Case("stable", log_of(small(rng), norm, skipped=~np.isfinite(norm)), marks)


# Healthy, with a change of the data


def _mixture(rng: Rng, jump: float) -> Case:
    n, at = 2000, int(rng.integers(500, 900))
    loss = 2.2 + 3 * np.exp(-np.arange(n) / 250) + 0.04 * rng.normal(size=n)
    loss[at:] += jump
    return Case("stable", log_of(loss, norms(rng, n)), (Happening(at + 1, ("level_shift",)),))


@kind
def data_mixture_adds_1_3_nats(rng: Rng) -> Case:
    return _mixture(rng, 1.3)


@kind
def data_mixture_adds_0_4_nats(rng: Rng) -> Case:
    return _mixture(rng, 0.4)


@kind
def data_mixture_adds_2_5_nats(rng: Rng) -> Case:
    return _mixture(rng, 2.5)


@kind
def data_gets_easier(rng: Rng) -> Case:
    loss = large(rng, 3000, sd=0.05)
    loss[1500:] -= 0.5
    return Case("stable", log_of(loss, norms(rng, 3000)))


@kind
def harder_data_for_a_while(rng: Rng) -> Case:
    n, at = 3000, int(rng.integers(800, 1200))
    loss = 2.2 + 3 * np.exp(-np.arange(n) / 500) + 0.04 * rng.normal(size=n)
    loss[at : at + 600] += 0.6
    return Case("stable", log_of(loss), (Happening(at + 1, ("level_shift",)),))


@kind
def longer_sequences_double_the_gradient_norm(rng: Rng) -> Case:
    n, at = 2000, int(rng.integers(800, 1200))
    loss, norm = 2.2 + 3 * np.exp(-np.arange(n) / 300) + 0.04 * rng.normal(size=n), norms(rng, n)
    loss[at:] -= 0.2
    norm[at:] *= 2.5
    return Case("stable", log_of(loss, norm), (Happening(at + 1, ("level_shift",)),))


# Spiky


@kind
def frequent_short_spikes(rng: Rng) -> Case:
    loss, at = small(rng, sd=0.03), apart(rng, 20, 200, 980, gap=30)
    for i in at:
        bump(loss, i, rng.uniform(0.5, 1.5), 0)
    return Case("spiky", log_of(loss, norms(rng, 1000)), spikes_at(at))


@kind
def spikes_that_last_ten_steps(rng: Rng) -> Case:
    loss, at = small(rng, sd=0.04), apart(rng, 6, 200, 950)
    for i in at:
        bump(loss, i, rng.uniform(0.8, 2.0), 5)
    return Case("spiky", log_of(loss, norms(rng, 1000)), spikes_at(at))


@kind
def one_spike_that_recovers_slowly(rng: Rng) -> Case:
    loss, norm, at = small(rng), norms(rng, 1000), apart(rng, 1, 300, 700)
    bump(loss, at[0], rng.uniform(1.5, 2.5), 30)
    norm[at[0]] *= 8
    return Case("spiky", log_of(loss, norm), spikes_at(at))


@kind
def three_spikes_that_recover_slowly(rng: Rng) -> Case:
    loss, at = large(rng), apart(rng, 3, 1000, 4500, gap=400)
    for i in at:
        bump(loss, i, rng.uniform(2.0, 3.0), 50)
    return Case("spiky", log_of(loss, norms(rng, 5000)), spikes_at(at))


@kind
def spikes_that_rise_over_twenty_steps(rng: Rng) -> Case:
    loss, at = large(rng, sd=0.05), apart(rng, 4, 1000, 4500, gap=400)
    for i in at:
        loss[i : i + 20] += np.linspace(0, 1.5, 20)
        bump(loss, i + 20, 1.5, 25)
    return Case("spiky", log_of(loss), spikes_at([i + 5 for i in at]))


@kind
def gradient_spikes_alone(rng: Rng) -> Case:
    norm, at = norms(rng, 1000), apart(rng, 7, 200, 950)
    for i in at:
        norm[i : i + 8] *= rng.uniform(5, 10)
    return Case("spiky", log_of(small(rng), norm), spikes_at(at))


@kind
def gradient_spikes_of_2_5_in_little_noise(rng: Rng) -> Case:
    norm, at = norms(rng, 1000, sigma=0.03), apart(rng, 16, 200, 980, gap=30)
    norm[at] *= 2.5
    return Case("spiky", log_of(small(rng), norm), spikes_at(at))


@kind
def spikes_while_the_loss_falls(rng: Rng) -> Case:
    loss, at = large(rng, 800, sd=0.03), apart(rng, 4, 40, 300, gap=50)
    for i in at:
        bump(loss, i, rng.uniform(2.0, 3.0), 6)
    return Case("spiky", log_of(loss), spikes_at(at))


@kind
def lasting_small_spikes_of_a_large_batch(rng: Rng) -> Case:
    loss, at = large(rng, sd=0.003), apart(rng, 14, 1000, 4900)
    for i in at:
        bump(loss, i, rng.uniform(0.08, 0.15), 6)
    return Case("spiky", log_of(loss), spikes_at(at))


@kind
def nan_loss_once(rng: Rng) -> Case:
    loss, at = small(rng), int(rng.integers(300, 900))
    loss[at] = NAN
    return Case("spiky", log_of(loss, norms(rng, 1000)), (Happening(at + 1, ("nonfinite_step",)),))


@kind
def spikes_ever_more_often(rng: Rng) -> Case:
    loss, norm = large(rng, 4000, sd=0.05), norms(rng, 4000)
    at = [int(x) for x in 3900 - np.cumsum(np.linspace(50, 280, 14)) + rng.integers(-5, 6, size=14)][::-1]
    for i in at:
        bump(loss, i, rng.uniform(0.6, 1.5), 4)
        norm[i : i + 6] *= 6
    return Case("spiky", log_of(loss, norm), spikes_at(at))


@kind
def spikes_in_200_steps(rng: Rng) -> Case:
    loss, norm, at = small(rng, 200), norms(rng, 200), apart(rng, 3, 110, 190, gap=25)
    for i in at:
        bump(loss, i, rng.uniform(1.0, 2.0), 5)
        norm[i : i + 4] *= 6
    return Case("spiky", log_of(loss, norm), spikes_at(at))


@kind
def a_fault_of_the_learning_rate(rng: Rng) -> Case:
    loss, norm, at = small(rng, 400), norms(rng, 400), int(rng.integers(150, 250))
    bump(loss, at, 2.0, 25)
    norm[at : at + 20] *= 4
    return Case("spiky", log_of(loss, norm), spikes_at([at]))


# Diverged


@kind
def nan_at_the_end(rng: Rng) -> Case:
    loss, norm = small(rng, 500), norms(rng, 500)
    loss[-1] = norm[-1] = NAN
    return Case("diverged", log_of(loss, norm), (Happening(500, ("nonfinite_step",)),))


@kind
def nan_from_the_middle_on(rng: Rng) -> Case:
    loss, norm, at = small(rng), norms(rng, 1000), int(rng.integers(300, 700))
    loss[at:] = norm[at:] = NAN
    return Case("diverged", log_of(loss, norm), (Happening(at + 1, ("nonfinite_step",)),))


@kind
def inf_gradient_and_then_nan(rng: Rng) -> Case:
    loss, norm, at = small(rng), norms(rng, 1000), int(rng.integers(300, 700))
    norm[at], loss[at + 1 :], norm[at + 1 :] = INF, NAN, NAN
    return Case("diverged", log_of(loss, norm), (Happening(at + 1, ("nonfinite_step",)),))


def _late(rng: Rng, n: int, rows: int, height: float) -> Case:
    loss = large(rng, n)
    loss[-rows:] += np.linspace(0.2, height, rows)
    return Case("diverged", log_of(loss, norms(rng, n)), open_from=n - rows)


@kind
def last_30_of_5000_explode(rng: Rng) -> Case:
    return _late(rng, 5000, 30, 4.0)


@kind
def last_30_of_50000_explode(rng: Rng) -> Case:
    return _late(rng, 50_000, 30, 4.0)


@kind
def last_100_of_20000_explode(rng: Rng) -> Case:
    return _late(rng, 20_000, 100, 3.0)


@kind
def blow_up_in_the_first_20_steps(rng: Rng) -> Case:
    t = np.arange(300)
    loss = np.where(t < 8, 10.8 - 0.2 * t, 12 + 60 * np.exp(-t / 80)) + 0.3 * rng.normal(size=300)
    return Case("diverged", log_of(loss), open_from=1)


@kind
def blow_up_in_30_steps(rng: Rng) -> Case:
    loss = np.r_[np.linspace(10.8, 10.0, 10), np.linspace(14, 80, 20)] + 0.1 * rng.normal(size=30)
    return Case("diverged", log_of(loss), open_from=1)


@kind
def blow_up_within_warmup(rng: Rng) -> Case:
    t = np.arange(200)
    loss = 5.6 - 2 * (1 - np.exp(-t / 25)) + np.where(t > 100, 2.1 * (t - 100), 0) + 0.05 * rng.normal(size=200)
    evidence = Evidence(5.57, 212.3, 3.04, 256, 200)
    return Case("diverged", log_of(loss, norms(rng, 200)), evidence=evidence, open_from=90)


@kind
def ends_above_its_initial_loss(rng: Rng) -> Case:
    t = np.arange(300)
    loss = 7.3 + 3 * np.exp(-((t - 40) ** 2) / 300) - 1.7 * np.exp(-t / 8) + 0.15 * rng.normal(size=300)
    return Case("diverged", log_of(loss), evidence=Evidence(5.6, 7.3, 3.04, 256, 30), open_from=1)


@kind
def back_to_chance_after_a_fall_of_0_8(rng: Rng) -> Case:
    t = np.arange(1500)
    loss = 10.82 - 0.8 * (1 - np.exp(-t / 60)) + 0.03 * rng.normal(size=1500)
    at = int(rng.integers(600, 900))
    loss[at:] = 10.82 - 0.8 * np.exp(-np.arange(1500 - at) / 30) + 0.03 * rng.normal(size=1500 - at)
    return Case("diverged", log_of(loss), open_from=at - 20)


@kind
def back_to_chance_after_a_long_fall(rng: Rng) -> Case:
    loss, at = large(rng, 3000, sd=0.05), int(rng.integers(1500, 2000))
    rise = 10.82 - (10.82 - 3.2) * np.exp(-np.arange(3000 - at) / 40)
    loss[at:] = rise + 0.05 * rng.normal(size=3000 - at)
    return Case("diverged", log_of(loss), open_from=at - 20)


@kind
def slow_climb_of_1_6_nats(rng: Rng) -> Case:
    loss = large(rng, 6000, sd=0.05)
    loss[3500:] += np.linspace(0, 1.9, 2500)
    return Case("diverged", log_of(loss), open_from=3500)


@kind
def jump_to_a_plateau(rng: Rng) -> Case:
    n, at = 2000, int(rng.integers(500, 900))
    loss = 2.2 + 3 * np.exp(-np.arange(n) / 250) + 0.04 * rng.normal(size=n)
    loss[at:] = loss[at - 50 : at].mean() + 1.6 + 0.04 * rng.normal(size=n - at)
    return Case("diverged", log_of(loss, norms(rng, n)), open_from=at - 20)


@kind
def oscillation_that_explodes(rng: Rng) -> Case:
    loss, t = small(rng, 800), np.arange(300)
    loss[500:] += np.abs(np.sin(t / 4)) * np.exp(t / 180) * 0.8 + np.linspace(0, 3, 300)
    return Case("diverged", log_of(loss), open_from=480)


@kind
def ramp_of_the_rate(rng: Rng) -> Case:
    loss, t = small(rng, 500, sd=0.06), np.arange(500)
    at = int(rng.integers(300, 380))
    loss[at:] += 2.4 * (t[at:] - at) / (500 - at) + 0.2 * rng.normal(size=500 - at) * (t[at:] - at) / (500 - at)
    return Case("diverged", log_of(loss, norms(rng, 500)), open_from=at - 20)


# Did not learn


@kind
def constant_loss(rng: Rng) -> Case:
    return Case("no_learning", log_of(np.full(1000, 10.82)))


@kind
def constant_loss_with_noise(rng: Rng) -> Case:
    return Case("no_learning", log_of(10.82 + 0.02 * rng.normal(size=1000), norms(rng, 1000)))


@kind
def constant_loss_with_the_vocabulary_known(rng: Rng) -> Case:
    loss = 5.55 + 0.3 * rng.normal(size=1000)
    return Case("no_learning", log_of(loss, first=4000), evidence=Evidence(vocab_size=256))


@kind
def a_fall_of_0_02_nats(rng: Rng) -> Case:
    return Case("no_learning", log_of(10.82 - 0.02 * np.linspace(0, 1, 800) + 0.02 * rng.normal(size=800)))


@kind
def no_better_than_single_tokens(rng: Rng) -> Case:
    loss = 3.1 + 2.4 * np.exp(-np.arange(400) / 20) + 0.02 * rng.normal(size=400)
    return Case("no_learning", log_of(loss, norms(rng, 400)), evidence=Evidence(5.56, 3.1, 3.1, 256, 20))


# Too little to say


@kind
def one_row(rng: Rng) -> Case:
    return Case("undecided", log_of(np.array([rng.uniform(2, 10)])))


@kind
def five_rising_rows(rng: Rng) -> Case:
    return Case("undecided", log_of(np.linspace(3, 3 + rng.uniform(0.2, 2), 5)))


@kind
def thirty_falling_rows(rng: Rng) -> Case:
    return Case("undecided", log_of(small(rng, 30), norms(rng, 30)))


@kind
def gradient_norm_of_exactly_0(rng: Rng) -> Case:
    return Case("undecided", log_of(None, np.zeros(500)))


@kind
def rises_0_6_nats_until_the_end(rng: Rng) -> Case:
    loss = small(rng, 1500)
    loss[1100:] += np.linspace(0, 0.7, 400)
    return Case("undecided", log_of(loss, norms(rng, 1500)), open_from=1100)


@kind
def gradient_norm_grows_1000_fold(rng: Rng) -> Case:
    norm = norms(rng, 2000) * np.geomspace(1, 1000, 2000)
    return Case("undecided", log_of(small(rng, 2000), norm), open_from=100)


@kind
def ends_within_a_spike(rng: Rng) -> Case:
    loss = small(rng)
    loss[-5:] += np.linspace(0.6, 2.0, 5)
    return Case("undecided", log_of(loss, norms(rng, 1000)), (Happening(996),))


@kind
def every_step_was_skipped(rng: Rng) -> Case:
    norm = np.full(60, INF)
    return Case("undecided", log_of(np.full(60, 10.8), norm, skipped=np.ones(60)), open_from=1)
