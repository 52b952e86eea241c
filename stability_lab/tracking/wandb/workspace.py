"""A comparison as a page in W&B: a plain description of it, and a saved workspace and a report made from that."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from stability_lab.config import ConfigError
from stability_lab.tracking.wandb.login import first_line, problem

Spec = dict[str, Any]

JOB_TYPE = "compare"
# Keys of a comparison under the names that the tracker gives them in the config of a run.
_CONFIG_KEYS = {"stabilizer": "stabilizers", "optimizer.lr": "lr", "model": "model_name"}
_MOST_TITLE = 128  # of a report
_INIT_TIMEOUT_S = 30.0
_IMAGES = (".png", ".jpg", ".jpeg")


def spec_of(comparison: Mapping[str, Any], figures: Sequence[Path], project: str, entity: str | None) -> Spec:
    """All that the page shows, as plain values: which runs, in which groups, in which panels.

    `comparison` has `title`, `command`, `markdown`, `group`, `metric` and `by`; its runs are those of the groups in
    `group`, or all of the project where that is empty. A metric stands as `history:KEY` over steps, `summary:KEY` or
    `config:KEY` for a run.
    """
    by = [_CONFIG_KEYS.get(key, key) for key in comparison["by"]] or ["stabilizers"]
    metric = comparison["metric"]

    def line(key: str, *, log_y: bool = False) -> Spec:
        return {"kind": "line", "title": key, "x": "step", "y": key, "log_y": log_y, "group_by": by[0]}

    return {
        "title": comparison["title"],
        "command": comparison["command"],
        "entity": entity,
        "project": project,
        "runs": {
            "groups": list(comparison["group"]),
            "without_job_type": JOB_TYPE,
            "group_by": by,
        },
        "sections": [
            {
                "name": "Loss",
                "panels": [
                    line(metric),
                    line("train/loss"),
                    {
                        "kind": "scatter",
                        "title": f"{metric} over learning rate",
                        "x": "config:lr",
                        "y": f"summary:{metric}",
                        "log_x": True,
                    },
                ],
            },
            {
                "name": "Stability",
                "panels": [line("optim/grad_norm", log_y=True), line("attn/max_logit", log_y=True)],
            },
        ],
        "markdown": comparison["markdown"],
        "figures": [{"key": f"figures/{path.stem}", "file": path.name} for path in figures],
    }


def publish(
    comparison: Mapping[str, Any], figures: Sequence[Path], entity: str | None, project: str, spec_path: Path
) -> str:
    """Write the description to `spec_path`, and the page to W&B where that is possible; a sentence says which.

    On W&B appear a saved workspace, a report, and a run of the job type `compare` that holds the figures; of `figures`
    it takes PNG and JPEG, which are what W&B shows as images. Raises `ConfigError` only where `spec_path` cannot be
    written.
    """
    figures = [path for path in figures if path.suffix.lower() in _IMAGES]
    spec = spec_of(comparison, figures, project, entity)
    try:
        spec_path.write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{spec_path} cannot be written: {error.strerror or error}") from error
    missing = _missing_extra() or problem()
    if missing:
        return f"Nothing was sent to W&B: {missing}; what the page would show is in {spec_path}."
    try:
        return _send(spec, figures)
    except Exception as error:
        return f"W&B did not take the page ({first_line(error)}); what it would show is in {spec_path}."


def _missing_extra() -> str | None:
    try:
        _library()
    except ImportError:
        return "the extra is not installed (pip install 'stability-lab[wandb]')"
    return None


def _library() -> tuple[Any, Any]:
    """The modules for workspaces and reports of an extra that need not be installed."""
    return import_module("wandb_workspaces.workspaces"), import_module("wandb_workspaces.reports.v2")


def _send(spec: Spec, figures: Sequence[Path]) -> str:
    import wandb

    entity = spec["entity"] or wandb.Api().default_entity
    spec = {**spec, "entity": entity}
    run = _log_figures(spec, figures)
    workspace = workspace_of(spec).save()
    report = report_of(spec, run.id).save()
    return f"W&B: workspace {workspace.url}, report {report.url}, figures {run.url}."


def _log_figures(spec: Spec, figures: Sequence[Path]) -> Any:
    import wandb

    groups = spec["runs"]["groups"]
    settings = wandb.Settings(
        silent=True, console="off", disable_code=True, disable_git=True, host="", init_timeout=_INIT_TIMEOUT_S
    )
    # Nothing of this run is kept here: its figures are files of the comparison.
    with tempfile.TemporaryDirectory(prefix="stability-lab-wandb-", ignore_cleanup_errors=True) as folder:
        run = wandb.init(
            entity=spec["entity"],
            project=spec["project"],
            group=groups[0] if len(groups) == 1 else None,
            job_type=JOB_TYPE,
            name=spec["title"][:_MOST_TITLE],
            config={"command": spec["command"], "groups": groups},
            mode="online",
            reinit="create_new",
            dir=folder,
            settings=settings,
        )
        try:
            if figures:
                keys = [item["key"] for item in spec["figures"]]
                run.log({key: wandb.Image(str(path)) for key, path in zip(keys, figures, strict=True)})
            run.summary["table"] = spec["markdown"]
        finally:
            run.finish()
    return run


def workspace_of(spec: Spec) -> Any:
    """The `wandb_workspaces.workspaces.Workspace` of a description; not saved yet."""
    ws, wr = _library()
    return ws.Workspace(
        entity=spec["entity"],
        project=spec["project"],
        name=spec["title"],
        sections=[
            ws.Section(name=section["name"], panels=[_panel(wr, panel) for panel in section["panels"]], is_open=True)
            for section in spec["sections"]
        ],
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=1000),
        runset_settings=ws.RunsetSettings(
            filters=_filters(ws, spec),
            groupby=[ws.Config(key) for key in spec["runs"]["group_by"]],
        ),
    )


def report_of(spec: Spec, figures_run: str) -> Any:
    """The `wandb_workspaces.reports.v2.Report` of a description, with the figures that a run holds; not saved yet."""
    ws, wr = _library()
    place = {"entity": spec["entity"], "project": spec["project"]}
    runs = wr.Runset(
        **place,
        name="Runs",
        filters=_filters(ws, spec),
        groupby=[f"config.{key}" for key in spec["runs"]["group_by"]],
    )
    blocks = [wr.MarkdownBlock(text=spec["markdown"]), wr.MarkdownBlock(text=f"```\n{spec['command']}\n```")]
    for section in spec["sections"]:
        panels = [_panel(wr, panel) for panel in section["panels"]]
        blocks += [wr.H2(text=section["name"]), wr.PanelGrid(runsets=[runs], panels=panels)]
    if spec["figures"]:
        figures = wr.Runset(**place, name="Figures", filters=ws.And(ws.Metric("ID") == figures_run))
        browser = wr.MediaBrowser(media_keys=[item["key"] for item in spec["figures"]])
        blocks += [wr.H2(text="Figures"), wr.PanelGrid(runsets=[figures], panels=[browser])]
    return wr.Report(**place, title=spec["title"][:_MOST_TITLE], blocks=blocks)


def _filters(ws: Any, spec: Spec) -> Any:
    runs = spec["runs"]
    filters = [ws.Metric("JobType") != runs["without_job_type"]]
    return ws.And(*([ws.Metric("Group").isin(runs["groups"])] if runs["groups"] else []), *filters)


def _panel(wr: Any, panel: Spec) -> Any:
    if panel["kind"] == "line":
        return wr.LinePlot(
            title=panel["title"],
            x=panel["x"],
            y=[panel["y"]],
            log_y=panel["log_y"],
            groupby=wr.Config(panel["group_by"]),
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
        )
    return wr.ScatterPlot(
        title=panel["title"],
        x=wr.Config(panel["x"].removeprefix("config:")),
        y=wr.SummaryMetric(panel["y"].removeprefix("summary:")),
        log_x=panel["log_x"],
    )
