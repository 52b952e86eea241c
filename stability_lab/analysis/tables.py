"""Tables of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from stability_lab.analysis.runs import RunRecord


def comparison(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """One row a run, the baseline first, then by stabilizer, learning rate and seed."""
    rows = [_row(run) for run in sorted(runs, key=lambda r: (r.stabilizers != "none", r.stabilizers, r.lr))]
    return pd.DataFrame(rows)


def _row(run: RunRecord) -> dict[str, Any]:
    summary = run.summary
    final, events = summary.get("final", {}), summary.get("events", {})
    return {
        "stabilizer": run.stabilizers,
        "lr": run.lr,
        "seed": run.config["seed"],
        "val/loss": final.get("val/loss"),
        "val/ppl": final.get("val/ppl"),
        "largest attention logit": summary.get("max_attn_logit"),
        "spike events": events.get("grad_norm_spike", 0) + events.get("loss_spike", 0),
        "verdict": summary.get("verdict"),
    }


FORMATS = {"lr": "{:g}", "val/loss": "{:.3f}", "val/ppl": "{:.2f}", "largest attention logit": "{:,.4g}"}


def markdown(table: pd.DataFrame) -> str:
    """A table that GitHub renders; missing values are shown as a dash."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    for _, row in table.iterrows():
        cells = [
            "-" if pd.isna(value) else FORMATS.get(str(name), "{}").format(value).replace("|", "\\|")
            for name, value in row.items()
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
