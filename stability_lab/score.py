"""The command `score FILE...`: the judge on anybody's training log."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stability_lab.analysis.logs import NamedLog, read_log, read_metric, stride_of
from stability_lab.analysis.sources import run_folder, shown
from stability_lab.config import ConfigError, Parser
from stability_lab.judge.judge import judge
from stability_lab.judge.spikes import DEFINITIONS, spike_scores
from stability_lab.judge.verdict import Evidence

Block = dict[str, Any]
_SHOWN_EVENTS = 20
# A log whose signals are judged apart has the worst of their verdicts.
_WORST_FIRST = ("diverged", "no_learning", "spiky", "stable")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab score",
        description="Verdict, spike scores and events of training logs: a run's folder, CSV, JSONL, trainer_state.json "
        "of transformers, Parquet, TensorBoard event files or an offline .wandb run.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a log, or the folder of a run")
    parser.add_argument("--metric", metavar="COLUMN", help="spike scores of this column alone, whatever it is")
    parser.add_argument("--definition", choices=tuple(DEFINITIONS), help="only this definition of a spike")
    parser.add_argument("--loss", metavar="COLUMN", help="the cross-entropy in nats (default: by common names)")
    parser.add_argument("--grad-norm", metavar="COLUMN", help="the gradient norm before clipping")
    parser.add_argument("--step", metavar="COLUMN", help="the optimizer step")
    parser.add_argument(
        "--warmup-steps",
        type=int,
        metavar="N",
        help="steps of warm-up, after which a finite divergence counts (default: those of a run's folder, else 0)",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    args = parser.parse_args(argv)
    if args.warmup_steps is not None and args.warmup_steps < 0:
        raise ConfigError(f"--warmup-steps={args.warmup_steps}: must be 0 or more")
    if args.metric is not None and (args.loss is not None or args.grad_norm is not None):
        raise ConfigError("--metric scores one column alone: leave out --loss and --grad-norm")
    # All files are read before anything is shown: bad input gives no half of an answer.
    blocks = [_score(path, args) for path in args.files]
    if args.format == "json":
        print(json.dumps(blocks, indent=2))
    else:
        print("\n\n".join("\n".join(_lines(block)) for block in blocks))
    return 0


def _score(path: Path, args: argparse.Namespace) -> Block:
    if args.metric is not None:
        return _one_metric(path, args)
    log = read_log(path, loss=args.loss, grad_norm=args.grad_norm, step=args.step)
    evidence, notes = run_evidence(path)
    if args.warmup_steps is not None:
        evidence = dataclasses.replace(evidence, warmup_steps=args.warmup_steps)
    judgement = judge_log(log, evidence)
    step = log.log.step
    return {
        "file": str(path),
        "format": log.format,
        "rows": log.n_rows,
        "columns": log.columns,
        "steps": {"first": int(step[0]), "last": int(step[-1]), "values": step.size, "stride": stride_of(step)},
        **judgement,
        "scores": _only(judgement["scores"], args.definition),
        "notes": [*log.notes, *notes, *judgement["notes"]],
    }


def _one_metric(path: Path, args: argparse.Namespace) -> Block:
    series, source, notes = read_metric(path, args.metric, step=args.step)
    scores = {name: score.as_dict(series.step) for name, score in spike_scores(series.value).items()}
    step = series.step
    return {
        "file": str(path),
        "format": source.format,
        "rows": len(source.rows),
        "columns": {"metric": series.column} | ({"step": series.step_column} if series.step_column else {}),
        "steps": {"first": int(step[0]), "last": int(step[-1]), "values": step.size, "stride": stride_of(step)},
        "scores": _only({series.column: scores}, args.definition),
        "notes": notes,
    }


def judge_log(log: NamedLog, evidence: Evidence) -> Block:
    """The judgement on a log; where its signals stand at different steps, each is judged and the worse verdict wins."""
    if log.apart is None:
        return judge(log.log, evidence).as_dict()
    first = judge(log.log, evidence).as_dict()
    second = judge(log.apart, Evidence(warmup_steps=evidence.warmup_steps)).as_dict()
    worst = min(first, second, key=lambda block: (_rank(block["verdict"]), block["first_bad_step"] or 0))
    sensitivity = {
        delta: min(name, second["sensitivity"][delta], key=_rank) for delta, name in first["sensitivity"].items()
    }
    parts = (("loss", first), ("gradient norm", second))
    return {
        **worst,
        "sensitivity": sensitivity,
        "scores": {**first["scores"], **second["scores"]},
        "events": sorted([*first["events"], *second["events"]], key=lambda event: event["step"]),
        # Each part lacks the other's signal, and the log as a whole lacks none.
        "notes": [f"{name}: {n}" for name, part in parts for n in part["notes"] if not n.startswith("The log has no ")],
    }


def _rank(verdict: str) -> int:
    return _WORST_FIRST.index(verdict)


def run_evidence(path: Path) -> tuple[Evidence, list[str]]:
    """What one of our own runs knows beyond its series, and a note where its files cannot be read."""
    folder = run_folder(path)
    if folder is None:
        return Evidence(), []
    import yaml

    try:
        manifest, summary = (
            json.loads((folder / name).read_text(encoding="utf-8")) for name in ("manifest.json", "summary.json")
        )
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        data = manifest.get("data") or {}
        return Evidence(
            initial_val_loss=(summary.get("initial") or {}).get("val/loss"),
            final_val_loss=(summary.get("final") or {}).get("val/loss"),
            unigram_entropy=data.get("unigram_entropy"),
            vocab_size=data.get("vocab_size"),
            warmup_steps=int((config.get("schedule") or {}).get("warmup_steps") or 0),
            nonfinite_parameter=bool(summary.get("nonfinite_parameter", False)),
        ), []
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = shown((str(error).strip() or type(error).__name__).splitlines()[0])
        return Evidence(), [f"judged without the run's own facts, which cannot be read: {reason}"]


def _only(scores: Mapping[str, Mapping[str, Any]], definition: str | None) -> dict[str, dict[str, Any]]:
    return {
        signal: {name: score for name, score in named.items() if definition in (None, name)}
        for signal, named in scores.items()
    }


def _lines(block: Block) -> Iterator[str]:
    steps = block["steps"]
    yield shown(block["file"])
    yield (
        f"  read      {block['format']}, {block['rows']:,} rows; {steps['values']:,} values, "
        f"steps {steps['first']:,} to {steps['last']:,}, one every {_steps(steps['stride'])}"
    )
    yield "  columns   " + ", ".join(f"{role}: {shown(column)}" for role, column in block["columns"].items())
    if "verdict" in block:
        yield f"  verdict   {block['verdict']}. {shown(block['reason'])}"
        others = ", ".join(f"{name} at {delta} nats" for delta, name in block["sensitivity"].items())
        yield f"            by the rise in loss that counts as divergence: {others}"
    for note in block["notes"]:
        yield f"  note      {shown(note)}"
    yield ""
    cells = [_score_cells(signal, score) for signal, named in block["scores"].items() for score in named.values()]
    yield from _table(("signal", "definition", "window", "threshold", "spikes", "score", "95%", "one spike is"), cells)
    if "events" in block:
        yield ""
        yield from _event_lines(block["events"])


def _score_cells(signal: str, score: Mapping[str, Any]) -> tuple[str, ...]:
    window = str(score["window"])
    if score["min_window"] < score["window"]:
        window = f"{score['min_window']} to {window}"
    threshold = f"{score['threshold']:g} {'two-sided' if score['two_sided'] else 'above'}"
    head = (shown(signal), score["definition"], window, threshold)
    if score["score"] is None:
        return (*head, f"undefined: {score['reason']}")
    spikes = f"{score['n_spikes']:,} of {score['n_scored']:,}"
    if score["n_nonfinite"]:
        spikes += f" ({score['n_nonfinite']:,} not finite)"
    interval = score["interval"]
    between = "-" if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}%"
    return (*head, spikes, f"{score['score']:.3g}%", between, f"{score['resolution']:.2g}%")


def _event_lines(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not events:
        yield "  no event"
        return
    kinds = Counter(event["event"] for event in events)
    counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
    yield f"  {len(events):,} event{'s' if len(events) > 1 else ''}: {counts}"
    cells = [
        (
            f"{event['step']:,}",
            event["event"],
            _number(event["height"]),
            f"{event['length']:,}",
            "not recovered" if event["recovery"] is None else f"{event['recovery']:,}",
            _number(event["lr"]),
            "-" if event["tokens"] is None else f"{event['tokens']:,}",
            shown(event["detail"]),
        )
        for event in events[:_SHOWN_EVENTS]
    ]
    yield from _table(("step", "event", "height", "steps", "recovery", "lr", "tokens", "what"), cells)
    if len(events) > _SHOWN_EVENTS:
        yield f"  and {len(events) - _SHOWN_EVENTS:,} later ones: --format json has all"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines in columns; what stands last in its row may be as long as it likes."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines if i < len(line) - 1) for i in range(len(header) - 1)] + [0]
    for line in lines:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()


def _steps(stride: int) -> str:
    return "step" if stride == 1 else f"{stride:,} steps"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
