"""A comparison as a page in W&B: a saved workspace, a report, and a run that holds the figures."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from stability_lab.tracking.wandb.login import first_line, problem

JOB_TYPE = "compare"
# Keys of a comparison under the names that the tracker gives them in the config of a run.
_CONFIG_KEYS = {"stabilizer": "stabilizers", "optimizer.lr": "lr", "model": "model_name"}
_MOST_TITLE = 128  # of a report
_INIT_TIMEOUT_S = 30.0
_IMAGES = (".png", ".jpg", ".jpeg")


class Page(NamedTuple):
    """What the page shows: the runs of `groups`, or all of the project where there is none, in groups `by` key."""

    title: str
    command: str
    markdown: str
    groups: Sequence[str]
    metric: str
    by: Sequence[str]
    project: str
    entity: str | None = None

    @property
    def keys(self) -> list[str]:
        """Config keys by which runs are grouped."""
        return [_CONFIG_KEYS.get(key, key) for key in self.by] or ["stabilizers"]


def publish(page: Page, figures: Sequence[Path]) -> str:
    """Make the page in W&B where that is possible; a sentence says what was made, or why nothing was.

    Of `figures` it takes PNG and JPEG, which are what W&B shows as images.
    """
    try:
        library = _library()
    except ImportError:
        return "Nothing was sent to W&B: the extra is not installed (pip install 'stability-lab[wandb]')."
    if trouble := problem():
        return f"Nothing was sent to W&B: {trouble}."
    try:
        return _send(library, page, [path for path in figures if path.suffix.lower() in _IMAGES])
    except Exception as error:
        return f"W&B did not take the page ({first_line(error)})."


def _library() -> tuple[Any, Any]:
    """The modules for workspaces and reports of an extra that need not be installed."""
    return import_module("wandb_workspaces.workspaces"), import_module("wandb_workspaces.reports.v2")


def _send(library: tuple[Any, Any], page: Page, figures: Sequence[Path]) -> str:
    import wandb

    page = page._replace(entity=page.entity or wandb.Api().default_entity)
    images = {f"figures/{path.stem}": path for path in figures}
    run = _log_figures(page, images)
    workspace = workspace_of(library, page).save()
    report = report_of(library, page, list(images), run.id).save()
    return f"W&B: workspace {workspace.url}, report {report.url}, figures {run.url}."


def _log_figures(page: Page, images: Mapping[str, Path]) -> Any:
    import wandb

    settings = wandb.Settings(
        silent=True, console="off", disable_code=True, disable_git=True, host="", init_timeout=_INIT_TIMEOUT_S
    )
    # Nothing of this run is kept here: its figures are files of the comparison.
    with tempfile.TemporaryDirectory(prefix="stability-lab-wandb-", ignore_cleanup_errors=True) as folder:
        run = wandb.init(
            entity=page.entity,
            project=page.project,
            group=page.groups[0] if len(page.groups) == 1 else None,
            job_type=JOB_TYPE,
            name=page.title[:_MOST_TITLE],
            config={"command": page.command, "groups": list(page.groups)},
            mode="online",
            reinit="create_new",
            dir=folder,
            settings=settings,
        )
        try:
            if images:
                run.log({key: wandb.Image(str(path)) for key, path in images.items()})
            run.summary["table"] = page.markdown
        finally:
            run.finish()
    return run


def workspace_of(library: tuple[Any, Any], page: Page) -> Any:
    """The `wandb_workspaces.workspaces.Workspace` of a page; not saved yet."""
    ws, wr = library
    return ws.Workspace(
        entity=page.entity,
        project=page.project,
        name=page.title,
        sections=[ws.Section(name=name, panels=panels, is_open=True) for name, panels in _sections(wr, page).items()],
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=1000),
        runset_settings=ws.RunsetSettings(filters=_filters(ws, page), groupby=[ws.Config(key) for key in page.keys]),
    )


def report_of(library: tuple[Any, Any], page: Page, images: Sequence[str], run_id: str) -> Any:
    """The `wandb_workspaces.reports.v2.Report` of a page, with the images that a run holds; not saved yet."""
    ws, wr = library
    place = {"entity": page.entity, "project": page.project}
    keys = [f"config.{key}" for key in page.keys]
    runs = wr.Runset(**place, name="Runs", filters=_filters(ws, page), groupby=keys)
    blocks = [wr.MarkdownBlock(text=page.markdown), wr.MarkdownBlock(text=f"```\n{page.command}\n```")]
    for name, panels in _sections(wr, page).items():
        blocks += [wr.H2(text=name), wr.PanelGrid(runsets=[runs], panels=panels)]
    if images:
        figures = wr.Runset(**place, name="Figures", filters=ws.And(ws.Metric("ID") == run_id))
        browser = wr.MediaBrowser(media_keys=list(images))
        blocks += [wr.H2(text="Figures"), wr.PanelGrid(runsets=[figures], panels=[browser])]
    return wr.Report(**place, title=page.title[:_MOST_TITLE], blocks=blocks)


def _filters(ws: Any, page: Page) -> Any:
    groups = [ws.Metric("Group").isin(list(page.groups))] if page.groups else []
    return ws.And(*groups, ws.Metric("JobType") != JOB_TYPE)


def _sections(wr: Any, page: Page) -> dict[str, list[Any]]:
    def line(key: str, *, log_y: bool = False) -> Any:
        by = {"groupby": wr.Config(page.keys[0]), "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
        return wr.LinePlot(title=key, x="step", y=[key], log_y=log_y, **by)

    over_lr = wr.ScatterPlot(
        title=f"{page.metric} over learning rate", x=wr.Config("lr"), y=wr.SummaryMetric(page.metric), log_x=True
    )
    return {
        "Loss": [line(page.metric), line("train/loss"), over_lr],
        "Stability": [line("optim/grad_norm", log_y=True), line("attn/max_logit", log_y=True)],
    }
