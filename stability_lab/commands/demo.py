"""The command `demo`: two runs on the same batches, one that fails and one that a stabilizer rescues."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stability_lab.compare.run_record import RunRecord, read_run
from stability_lab.config import ConfigError, Parser
from stability_lab.disk.files import read_text
from stability_lab.run.signals import CTRL_C, EXIT_CODES, SIGTERM
from stability_lab.run.sweep import RESULT, beside
from stability_lab.stressors.symptom import Stressor, stressors
from stability_lab.text import did_you_mean, next_command, rough, shown

BEST = "attention_growth"
_LOOK_EVERY_S, _LINE_EVERY_S = 1.0, 5.0
_WORDS = {
    "attn/max_abs_logit": "the largest attention logit",
    "optim/grad_norm": "the gradient norm",
    "train/loss": "the training loss",
    "train/log_z_mean": "the mean log Z",
}
_LOSS, _NORM = "train/loss", "optim/grad_norm"


def main(argv: Sequence[str]) -> int:
    known = {stressor.name: stressor for stressor in stressors() if stressor.rescue is not None}
    args = _parser(known).parse_intermixed_args(list(argv))
    names = [word for word in args.words if "=" not in word]
    if len(names) > 1:
        raise ConfigError(f"demo {' '.join(names)}: takes one name")
    name = names[0] if names else BEST
    if name not in known:
        raise ConfigError(f"demo {name}: no stressor of this name has a rescue to show: {did_you_mean(name, known)}")
    stressor, words = known[name], [word for word in args.words if "=" in word]
    print(f"{name}: {stressor.summary}", flush=True)
    command = ["-m", *stressor.words, f"+stressor={name}", f"+stabilizer=none,{stressor.rescue}", "tracking=local"]
    return _train(stressor, [*command, f"group=demo_{name}", *words])


def _parser(known: Mapping[str, Stressor]) -> Parser:
    parser = Parser(
        prog="stability_lab demo",
        description="Trains the same small model twice on the same batches, once as it is and once with a stabilizer: "
        "the first run fails. Ends with a picture of both and three sentences. NAME is one of: "
        f"{', '.join(known)} (default: {BEST}).",
    )
    parser.add_argument("words", nargs="*", metavar="NAME, key=value", help="the demonstration; keys as for train")
    return parser


def _train(stressor: Stressor, words: list[str]) -> int:
    from stability_lab.command_line import read_command_line
    from stability_lab.commands import train
    from stability_lab.compose import compose_jobs
    from stability_lab.run.workers import of_a_sweep, workers_of

    composed = compose_jobs(read_command_line(words))
    config = composed[0].config
    folder = Path(config.output_dir) / str(config.group)
    # One run after the other has a bar of its own on a terminal.
    has_bar = workers_of(of_a_sweep(composed)) == 1 and sys.stderr.isatty()
    with nullcontext() if has_bar else _live(folder, config.trainer.max_steps):
        code = train.main(words, ends=False)
    if code in (EXIT_CODES[CTRL_C], EXIT_CODES[SIGTERM]):
        return code
    jobs = json.loads(read_text(folder / RESULT))["jobs"]
    runs = [read_run(Path(job["path"])) for job in jobs if job.get("path")]
    if len(runs) != 2 or not all(run.ended for run in runs):
        print("error: the runs have no result; their reasons are above", file=sys.stderr)
        return 1
    failed, rescued = sorted(runs, key=lambda run: str(stressor.rescue) in run.stabilizers)
    picture = folder / f"{stressor.name}.png"
    _draw(stressor, failed, rescued, picture)
    print("\n".join(sentences(stressor, failed, rescued)))
    print(f"picture: {shown(str(picture))}")
    seeds = "seed=0,1,2"
    print(next_command("train", *(word for word in words if not word.startswith(("group=", "seed="))), seeds))
    return 0


def _draw(stressor: Stressor, failed: RunRecord, rescued: RunRecord, picture: Path) -> None:
    from stability_lab.compare.figures.pair import draw_pair

    signal = stressor.symptom.signal
    draw_pair(
        {run.stabilizers: run for run in (failed, rescued)},
        [_LOSS, _NORM if signal == _LOSS else signal],
        f"{stressor.name}: the same weights and batches, seed {failed.seed}",
        picture,
    )


def sentences(stressor: Stressor, failed: RunRecord, rescued: RunRecord) -> Iterator[str]:
    """What broke and when; what the stabilizer did; what the two runs share, and what may be concluded."""
    step, signal = stressor.symptom.step(failed), stressor.symptom.signal
    name = _WORDS.get(signal, signal)
    broke = f"{name} left its bounds at step {step} and" if step is not None else f"nothing broke this time: {name}"
    yield (
        f"Without a stabilizer {broke} reached {_worst(failed, stressor)}; the verdict is {failed.outcome}, at a "
        f"validation loss of {_loss(failed)} nats."
    )
    yield (
        f"With {rescued.stabilizers} {name} reached {_worst(rescued, stressor)}; the verdict is {rescued.outcome}, at "
        f"{_loss(rescued)} nats."
    )
    if _shared(failed) == _shared(rescued):
        yield (
            "Both runs began with the same weights and read the same batches, so the difference is the stabilizer's; "
            "one seed is an anecdote, and the next command trains three."
        )
    else:
        yield "The two runs began with other weights or read other batches, so their difference says nothing."


def _shared(run: RunRecord) -> tuple[Any, ...]:
    """Hashes of what a pair has in common; a stabilizer may bring parameters of its own."""
    return tuple(run.facts.get(key) for key in ("data.first_batch", "data.last_batch", "init.embed.weight"))


def _worst(run: RunRecord, stressor: Stressor) -> str:
    """The value of the signal that is furthest on the side of the symptom."""
    values = run.series(stressor.symptom.signal)[stressor.symptom.signal]
    furthest = min if stressor.symptom.event == "below" else max
    return rough(furthest(values[values == values], default=math.nan))


def _loss(run: RunRecord) -> str:
    loss = run.metric("val/loss")
    return "unknown" if loss is None else f"{loss:.3f}"


@contextmanager
def _live(folder: Path, steps: int) -> Iterator[None]:
    """Say meanwhile how far the runs are: in one line that changes on a terminal, in a line every few seconds else."""
    terminal, began = sys.stdout.isatty(), time.time()
    line = tqdm(bar_format="{desc}", leave=False, file=sys.stdout) if terminal else None

    def watch(over: threading.Event) -> None:
        while not over.wait(_LOOK_EVERY_S if terminal else _LINE_EVERY_S):
            files = sorted(folder.glob("*/metrics.jsonl"))
            told = "  |  ".join(
                text for file in files if file.stat().st_mtime >= began and (text := _state(file, steps))
            )
            if line is not None:
                line.set_description_str(told)
            elif told:
                print(told, flush=True)

    try:
        with beside(watch):
            yield
    finally:
        if line is not None:
            line.close()


def _state(file: Path, steps: int) -> str:
    """The newest step of a run that trains; its last line may be half written."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        row = json.loads(read_text(file).splitlines()[-1])
        arm = file.parent.name.split("_")[0]
        return f"{arm} {row['step']}/{steps} loss {row[_LOSS]:.3f} gnorm {row[_NORM]:.2g}"
    return ""
