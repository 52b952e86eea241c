"""How often the judge agrees with an expert: synthetic logs whose answers were fixed before the judge saw them.

    python -m benchmarks.judge                  every kind, 10 logs of each: docs/judge.md has the table
    python -m benchmarks.judge --clean          false `spiky` on clean logs of 200 to 100,000 steps
    python -m benchmarks.judge --seed 1         other logs of the same kinds
    python -m benchmarks.judge --only jump_to_a_plateau --show

Verdict: the share of logs with the expert's word. Recall: happenings that an event of the right kind names within 20
steps. Precision: events that name a happening; events after the begin of a divergence are neither right nor wrong.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.judge_kinds import KINDS, Case, large, log_of, norms
from stability_lab.judge.events import Event
from stability_lab.judge.judgement import Judgement, judge

LENGTHS, CLEAN_LOGS = (200, 500, 2000, 10_000, 100_000), 50


def found(case: Case, events: Sequence[Event]) -> tuple[int, list[Event]]:
    """How many happenings have an event of their own, and the events that name none."""

    def names(event: Event) -> Iterator[int]:
        for i, happening in enumerate(case.happenings):
            if event.kind in happening.kinds and abs(event.step - happening.step) <= happening.near:
                yield i

    hit = {i for event in events for i in names(event)}
    open_from = np.inf if case.open_from is None else case.open_from
    return len(hit), [event for event in events if event.step < open_from and not list(names(event))]


def run_kind(name: str, seed: int, logs: int, show: bool) -> tuple[int, int, int, int]:
    """Right verdicts, happenings found, happenings, and false events, over `logs` logs."""
    right, hits, all_, wrong = 0, 0, 0, 0
    given: Counter[str] = Counter()
    answer, false = "", []
    for i in range(logs):
        case = KINDS[name](np.random.default_rng([seed, list(KINDS).index(name), i]))
        judgement = judge(case.log, case.evidence)
        answer, word = case.verdict, judgement.verdict.verdict
        hit, stray = found(case, judgement.events)
        right, hits, all_, wrong = right + (word == answer), hits + hit, all_ + len(case.happenings), wrong + len(stray)
        given[word] += 1
        false += stray
        if show and (word != answer or stray or hit < len(case.happenings)):
            print_case(case, judgement, stray)
    verdicts = ", ".join(f"{n} {word}" for word, n in given.most_common())
    strays = ", ".join(f"{n} {kind}" for kind, n in Counter(event.kind for event in false).most_common())
    print(f"| {name.replace('_', ' ')} | {answer} | {verdicts} | {hits} of {all_} | {strays or 0} |", flush=True)
    return right, hits, all_, wrong


def print_case(case: Case, judgement: Judgement, stray: Sequence[Event]) -> None:
    print(f"    {case.verdict} / {judgement.verdict.verdict}: {judgement.verdict.reason}")
    print(f"    wanted {[(h.step, h.kinds[0]) for h in case.happenings][:8]}")
    for event in judgement.events[:8]:
        sign = "!" if event in stray else " "
        print(f"     {sign}{event.step:>6} {event.kind} {event.height} recovery {event.recovery}: {event.detail}")


def clean(seed: int) -> None:
    print("| steps | clean logs | called spiky | spikes per 1,000 steps |\n|---|---|---|---|")
    for steps in LENGTHS:
        spiky = spikes = 0
        for i in range(CLEAN_LOGS):
            rng = np.random.default_rng([seed, steps, i])
            sigma = rng.choice([0.05, 0.15, 0.35, 0.5])
            log = log_of(large(rng, steps, sd=rng.choice([0.003, 0.03, 0.1, 0.3])), norms(rng, steps, sigma=sigma))
            judgement = judge(log)
            spiky += judgement.verdict.verdict == "spiky"
            spikes += len(judgement.events)
        print(f"| {steps:,} | {CLEAN_LOGS} | {spiky} | {1000 * spikes / steps / CLEAN_LOGS:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=int, default=10, help="logs of each kind")
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--show", action="store_true", help="print each log whose judgement is not the expert's")
    args = parser.parse_args()
    if args.clean:
        clean(args.seed)
        return
    print("| kind | expert | judge | found | false events |\n|---|---|---|---|---|")
    sums = np.array([run_kind(name, args.seed, args.logs, args.show) for name in args.only])
    right, hits, all_, wrong = sums.sum(axis=0)
    logs, kinds = args.logs * len(sums), int((sums[:, 0] == args.logs).sum())
    print(
        f"\nverdict right in {right} of {logs} logs ({right / logs:.1%}), in all logs of {kinds} of {len(sums)} kinds"
    )
    print(f"events: recall {hits / max(1, all_):.3f} ({hits} of {all_}), precision {hits / max(1, hits + wrong):.3f}")


if __name__ == "__main__":
    main()
