"""The command `score FILE...`: the judge on anybody's training log."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stability_lab.compare.run_record import read_run
from stability_lab.config import ConfigError, Parser
from stability_lab.judge.events import find_events
from stability_lab.judge.judgement import judged
from stability_lab.judge.log import stride_of
from stability_lab.judge.shared import shared_spikes
from stability_lab.judge.spikes import DEFINITIONS, spike_scores
from stability_lab.judge.verdict import Evidence
from stability_lab.text import (
    MISSING,
    Table,
    aligned,
    filled,
    flatten,
    many,
    next_command,
    number,
    room,
    shown,
    text_table,
)

if TYPE_CHECKING:  # pandas is loaded when a log is read
    from stability_lab.logs.sources import Source
    from stability_lab.logs.training_log import LogSeries, NamedLog

Block = dict[str, Any]
Found = TypeVar("Found")
_SHOWN_EVENTS, _SHOWN_SHARED = 20, 10
_STABILIZER = re.compile(r"\+stabilizer=(\w+)")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab score",
        description="Verdict, spike scores and events of training logs: a run's folder, CSV, JSONL, a printed log, "
        "trainer_state.json of transformers, Parquet, TensorBoard event files or an offline .wandb run.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a log, or the folder of a run")
    parser.add_argument("--metric", metavar="COLUMN", help="spike scores of this column alone, whatever it is")
    parser.add_argument("--definition", choices=tuple(DEFINITIONS), help="only this definition of a spike")
    parser.add_argument("--loss", metavar="COLUMN", help="the cross-entropy in nats (default: by common names)")
    parser.add_argument("--grad-norm", metavar="COLUMN", help="the gradient norm before clipping")
    parser.add_argument("--step", metavar="COLUMN", help="the optimizer step")
    parser.add_argument("--runs-by", metavar="COLUMN", help="the column that tells several runs in one table apart")
    parser.add_argument("--split", metavar="WORD", help="only rows of this word, such as train, in a column like split")
    parser.add_argument(
        "--restarts",
        choices=("runs", "continue"),
        help="where steps begin anew: another run, or the same one whose counter does (default: by the values)",
    )
    parser.add_argument(
        "--warmup-steps",
        type=int,
        metavar="N",
        help="steps of warm-up, for the advice (default: those of a run's folder, else 0)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="V", help="a loss that never was below ln V is no_learning")
    parser.add_argument(
        "--initial-loss",
        type=float,
        metavar="NATS",
        help="the loss before training, for a log that begins later (default: the run's own, else the first losses)",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_wide()
    args = parser.parse_args(argv)
    if args.warmup_steps is not None and args.warmup_steps < 0:
        raise ConfigError(f"--warmup-steps={args.warmup_steps}: must be 0 or more")
    if args.vocab_size is not None and args.vocab_size < 2:
        raise ConfigError(f"--vocab-size={args.vocab_size}: must be 2 or more")
    if args.initial_loss is not None and not (math.isfinite(args.initial_loss) and args.initial_loss > 0):
        raise ConfigError(f"--initial-loss={args.initial_loss}: must be a positive number of nats")
    if args.metric is not None and (args.loss is not None or args.grad_norm is not None):
        raise ConfigError("--metric scores one column alone: leave out --loss and --grad-norm")
    from stability_lab.logs.splits import Options
    from stability_lab.logs.training_log import read_logs, read_metrics

    options = Options(args.loss, args.grad_norm, args.step, args.runs_by, args.split, args.restarts)
    if args.metric is not None:
        columns, unread = _each(args.files, lambda path: read_metrics(path, args.metric, options))
        blocks = [_one_metric(*found, args.definition) for found in columns]
    else:
        logs, unread = _each(args.files, lambda path: read_logs(path, options))
        blocks = _judged(logs, args)
    if args.format == "json":
        print(json.dumps([*blocks, *unread], indent=2))
    else:
        width = room(args.wide)
        print("\n\n".join("\n".join(_lines(block, width)) for block in [*blocks, *unread]))
        for line in _shared_lines(blocks):
            print(line if width is None else filled(line, width, indent="  "))
        if not unread:
            print(next_command(*_next(blocks, argv)))
    if unread:
        raise ConfigError(f"{len(unread)} of {len(blocks) + len(unread)} logs cannot be scored: their blocks say why")
    return 0


def _each(paths: Sequence[Path], read: Callable[[Path], Sequence[Found]]) -> tuple[list[Found], list[Block]]:
    """What `read` finds in each log, and a block for each that it refuses; the refusal itself if there is no other."""
    from stability_lab.logs.sources import logs_in

    found: list[Found] = []
    refused: list[tuple[Path, ConfigError]] = []
    for path in paths:
        try:
            logs = logs_in(path)
        except ConfigError as error:
            refused.append((path, error))
            continue
        for log in logs:
            try:
                found += read(log)
            except ConfigError as error:
                refused.append((log, error))
    if len(refused) == 1 and not found:
        raise refused[0][1]
    return found, [{"file": str(path), "error": str(error)} for path, error in refused]


def _judged(logs: Sequence[NamedLog], args: argparse.Namespace) -> list[Block]:
    """One block for each log. Spikes that several of them share are batches, which none of them is blamed for."""
    series = [log.log for log in logs]
    sharing, found = shared_spikes(series, [find_events(each) for each in series])
    blocks = []
    for at, (log, events) in enumerate(zip(logs, found, strict=True)):
        evidence, notes = run_evidence(log.source)
        for name in ("warmup_steps", "vocab_size"):
            if getattr(args, name) is not None:
                evidence = dataclasses.replace(evidence, **{name: getattr(args, name)})
        if args.initial_loss is not None:
            evidence = dataclasses.replace(evidence, initial_val_loss=args.initial_loss)
        judgement = judged(log.log, evidence, events).as_dict()
        steps = _span(log.log.step)
        shared = [spike for spike in sharing.spikes if steps["first"] <= spike.step <= steps["last"]]
        if at in sharing.copies:
            same = logs[sharing.copies[at]]
            notes.append(f"This log equals that of {_called(same.source, same.run)}: they are one run.")
        blocks.append(
            {
                **_head(log.source, log.run, log.format, log.n_rows),
                "columns": log.columns,
                "left_out": log.left_out,
                "left_out_many": sum(log.left_out.values()) > log.n_rows / 100,
                "steps": steps,
                **judgement,
                "scores": _only(judgement["scores"], args.definition),
                **({"shared_spikes": [dataclasses.asdict(spike) for spike in shared]} if shared else {}),
                "notes": [*log.notes, *notes, *judgement["notes"]],
            }
        )
    return blocks


def _shared_lines(blocks: Sequence[Block]) -> Iterator[str]:
    """What the logs have in common, once for all of them."""
    shared = {spike["step"]: spike for block in blocks for spike in block.get("shared_spikes", ())}
    if not shared:
        return
    most = max(spike["runs"] for spike in shared.values())
    steps = ", ".join(f"{step:,}" for step in sorted(shared)[:_SHOWN_SHARED])
    more = f" and {len(shared) - _SHOWN_SHARED:,} more" if len(shared) > _SHOWN_SHARED else ""
    of = max(spike["of"] for spike in shared.values())
    yield ""
    spikes = many(len(shared), "spike")
    yield f"{spikes} at the same step in up to {most} of {of} logs, more than chance would make: {steps}{more}"
    yield "  If these runs read the same data, these are batches: look at it. They count against no run."


def _one_metric(series: LogSeries, source: Source, notes: list[str], definition: str | None) -> Block:
    scores = {name: score.as_dict(series.step) for name, score in spike_scores(series.value).items()}
    return {
        **_head(source.path, source.run, source.format, len(source.table)),
        "columns": {"metric": series.column} | ({"step": series.step_column} if series.step_column else {}),
        "steps": _span(series.step),
        "scores": _only({series.column: scores}, definition),
        "notes": notes,
    }


def _called(file: object, run: str | None) -> str:
    return shown(file) + ("" if run is None else f", run {shown(run)}")


def _head(path: Path, run: str | None, kind: str, n_rows: int) -> Block:
    return {"file": str(path), **({} if run is None else {"run": run}), "format": kind, "rows": n_rows}


def _span(step: NDArray[np.int64]) -> dict[str, Any]:
    """`gaps`, only where there are any: steps that are further apart than the stride, and the widest of them."""
    apart, stride = np.diff(step), stride_of(step)
    span = {"first": int(step[0]), "last": int(step[-1]), "values": step.size, "stride": stride}
    if number := int(np.count_nonzero(apart > stride)):
        at = int(apart.argmax())
        return span | {"gaps": {"number": number, "widest": [int(step[at]), int(step[at + 1])]}}
    return span


def run_evidence(path: Path) -> tuple[Evidence, list[str]]:
    """What one of our own runs knows beyond its series, and a note where its files cannot be read."""
    from stability_lab.logs.sources import run_folder

    folder = run_folder(path)
    if folder is None:
        return Evidence(), []
    try:
        run = read_run(folder)
    except ConfigError as error:
        return Evidence(), [f"judged without the run's own facts, which cannot be read: {error}"]
    facts, config = flatten(run.manifest), flatten(run.config)
    return Evidence(
        initial_val_loss=run.initial("val/loss"),
        final_val_loss=run.metric("val/loss"),
        unigram_entropy=number(facts.get("data.unigram_entropy")),
        vocab_size=_whole(facts.get("data.vocab_size")),
        warmup_steps=_whole(config.get("schedule.warmup_steps")) or 0,
        nonfinite_parameter=run.summary.get("nonfinite_parameter") is True,
        own="trainer" in run.config,
    ), []


def _whole(value: object) -> int | None:
    found = number(value)
    return int(found) if found is not None and math.isfinite(found) else None


def _only(scores: Mapping[str, Mapping[str, Any]], definition: str | None) -> dict[str, dict[str, Any]]:
    return {
        signal: {name: score for name, score in named.items() if definition in (None, name)}
        for signal, named in scores.items()
    }


def _next(blocks: Sequence[Block], argv: Sequence[str]) -> list[str]:
    """What the advice names, else the runs beside ours, else all that is known of these logs."""
    advised = [name for block in blocks for name in _STABILIZER.findall(block.get("reason", ""))]
    if advised:
        return ["stabilizers", advised[0]]
    files = (Path(block["file"]) for block in blocks)
    folders = sorted({str(file.parent) for file in files if (file / "config.yaml").is_file()})
    return ["compare", *folders] if folders else ["score", "--format", "json", *argv]


def _lines(block: Block, width: int | None) -> Iterator[str]:
    yield _called(block["file"], block.get("run"))
    if "error" in block:
        yield from aligned([("  error   ", block["error"])], width)
        return
    steps = block["steps"]
    counter = block["columns"].get("step", "row").rsplit("/", 1)[-1].lower()
    unit = counter if counter in ("row", "epoch") else "step"
    read = (
        f"{block['format']}, {many(block['rows'], 'row')}; {many(steps['values'], 'value')}, "
        f"{unit}s {steps['first']:,} to {steps['last']:,}, one every {_every(steps['stride'], unit)}{_gaps(steps)}"
    )
    lines = [("read", read), ("columns", ", ".join(f"{role}: {name}" for role, name in block["columns"].items()))]
    if "verdict" in block:
        others = ", ".join(f"{name} at {delta} nats" for delta, name in block["sensitivity"].items())
        lines.append(("verdict", f"{block['verdict']}. {block['reason']}"))
        lines.append(("", f"by the rise in loss that counts as divergence: {others}"))
    lines += [("note", note) for note in block["notes"]]
    yield from aligned(((f"  {name:<8}", words) for name, words in lines), width)
    yield ""
    cells = (_score_cells(signal, score) for signal, named in block["scores"].items() for score in named.values())
    header = ("signal", "definition", "window", "threshold", "spikes", "score", "95%", "one spike is")
    yield from _indented(Table("", header, tuple(cells), least=("one spike is", "window")), width)
    if "events" in block:
        yield ""
        yield from _event_lines(block["events"], width)


def _indented(table: Table, width: int | None) -> Iterator[str]:
    return (f"  {line}" for line in text_table(table, None if width is None else width - 2).splitlines())


def _score_cells(signal: str, score: Mapping[str, Any]) -> tuple[str, ...]:
    window = str(score["window"])
    if score["min_window"] < score["window"]:
        window = f"{score['min_window']} to {window}"
    threshold = f"{score['threshold']:g} {'two-sided' if score['two_sided'] else 'above'}"
    head = (signal, score["definition"], window, threshold)
    if score["score"] is None:
        return (*head, f"undefined: {score['reason']}")
    spikes = f"{score['n_spikes']:,} of {score['n_scored']:,}"
    if score["n_nonfinite"]:
        spikes += f" ({score['n_nonfinite']:,} not finite)"
    interval = score["interval"]
    between = MISSING if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}%"
    return (*head, spikes, f"{score['score']:.3g}%", between, f"{score['resolution']:.2g}%")


def _event_lines(events: Sequence[Mapping[str, Any]], width: int | None) -> Iterator[str]:
    if not events:
        yield "  no event"
        return
    kinds = Counter(event["event"] for event in events)
    counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
    yield f"  {many(len(events), 'event')}: {counts}"
    cells = tuple(
        (
            f"{event['step']:,}",
            event["event"],
            _number(event["height"]),
            f"{event['length']:,}",
            "not recovered" if event["recovery"] is None else f"{event['recovery']:,}",
            _number(event["lr"]),
            MISSING if event["tokens"] is None else f"{event['tokens']:,}",
            event["detail"],
        )
        for event in events[:_SHOWN_EVENTS]
    )
    header = ("step", "event", "height", "steps", "recovery", "lr", "tokens", "what")
    yield from _indented(Table("", header, cells, least=("tokens", "lr", "recovery")), width)
    if len(events) > _SHOWN_EVENTS:
        yield f"  and {len(events) - _SHOWN_EVENTS:,} later ones: --format json has all"


def _every(stride: int, unit: str) -> str:
    return unit if stride == 1 else f"{stride:,} {unit}s"


def _gaps(steps: Mapping[str, Any]) -> str:
    if "gaps" not in steps:
        return ""
    number, (before, after) = steps["gaps"]["number"], steps["gaps"]["widest"]
    which = "a gap" if number == 1 else f"{number:,} gaps, the widest"
    return f" but for {which} from {before:,} to {after:,}"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"
