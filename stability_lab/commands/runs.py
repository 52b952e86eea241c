"""The command `runs [DIR]`: a table of all runs that are found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stability_lab.compare.run_record import RunRecord, find_runs
from stability_lab.compare.tables import markdown_table, words_for_nonfinite
from stability_lab.config import Parser
from stability_lab.text import MISSING, Table, next_command, room, shown, text_table

STATUSES = ("running", "completed", "diverged", "failed", "interrupted", "killed")
# A run's name holds its stabilizers, learning rate and seed.
_LEAST = ("created", "tokens/s", "steps", "seed", "lr", "stabilizers", "largest attn logit", "ended by", "spikes")
_FORMATS = {"lr": "g", "val/loss": ".4f", "largest attn logit": ",.4g", "tokens/s": ",.0f"}


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="stability_lab runs", description="All runs at or below a folder, the oldest first.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="default: outputs")
    parser.add_argument("--status", choices=STATUSES, action="append", help="only runs of this status; may be repeated")
    parser.add_argument("--format", choices=("table", "md", "csv", "json"), default="table")
    parser.add_wide()
    args = parser.parse_args(argv)
    runs, faults = find_runs(args.folders or [Path("outputs")])
    wanted = [run for run in runs if args.status is None or run.status in args.status]
    wanted.sort(key=lambda run: (str(run.manifest.get("created", "")), str(run.path)))
    print(_render([_row(run) for run in wanted], args.format, len(runs), room(args.wide)))
    if args.format == "table":
        for fault in faults:
            print(f"left out: {fault}")
        if words := _next(wanted, args.folders):
            print(next_command(*words))
    return 0


def _next(runs: Sequence[RunRecord], folders: Sequence[Path]) -> list[str]:
    """Runs with a result are compared; a single one is scored, else one that was interrupted goes on."""
    ended = [run.path for run in runs if run.ended]
    if len(ended) > 1:
        parents = {path.parent for path in ended}
        return ["compare", *map(str, parents if len(parents) == 1 else folders or ["outputs"])]
    if ended:
        return ["score", str(ended[0])]
    interrupted = [run.path for run in runs if run.status == "interrupted"]
    return ["train", f"resume={interrupted[-1]}"] if interrupted else []


def _row(run: RunRecord) -> dict[str, Any]:
    summary = run.summary
    events = summary.get("events")
    counts = {str(name): n for name, n in events.items() if isinstance(n, int)} if isinstance(events, dict) else {}
    return {
        "run": str(run.path),
        "status": run.status,
        "verdict": run.verdict,
        "stabilizers": run.stabilizers,
        "lr": run.lr,
        "seed": run.seed,
        "steps": summary.get("steps"),
        "val/loss": run.metric("val/loss"),
        "largest attn logit": run.metric("max_attn_logit"),
        "spikes": sum(n for name, n in counts.items() if name.endswith("_spike")),
        "tokens/s": run.metric("tokens_per_s"),
        "created": str(run.manifest.get("created", ""))[:16].replace("T", " ") or None,
        "ended by": summary.get("ended_by"),
    }


def _render(rows: Sequence[dict[str, Any]], form: str, found: int, width: int | None) -> str:
    if form == "json":
        return json.dumps(words_for_nonfinite(list(rows)), indent=2)
    if form == "csv":
        import pandas as pd

        return pd.DataFrame(rows).to_csv(index=False).rstrip()
    if not rows:
        return f"none of {found} runs has this status"
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = tuple(tuple(_cell(name, row[name]) for name in columns) for row in rows)
    states = Counter(row["status"] for row in rows).most_common()
    title = f"{len(rows)} of {found} runs: " + ", ".join(f"{n} {status}" for status, n in states)
    table = Table(title, tuple(columns), cells, least=_LEAST)
    return markdown_table(table) if form == "md" else text_table(table, width)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float) and name in _FORMATS:
        return format(value, _FORMATS[name])
    return shown(value).partition(" (")[0] if name == "ended by" else shown(value)
