"""Interleaved timing: every variant takes its turn in each round, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, one list a variant; the order turns round from round to round.

    `time.process_time` as clock is for one thread beside other work.
    """
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        for name in names if number % 2 else reversed(names):
            started = clock()
            variants[name]()
            if number >= 0:
                seconds[name].append(clock() - started)
    return seconds


def ratio(reference: list[float], ours: list[float]) -> tuple[float, float, float]:
    """Median over rounds of reference / ours (above 1: ours is faster), with its quartiles."""
    ratios = sorted(r / o for r, o in zip(reference, ours, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), low, high
