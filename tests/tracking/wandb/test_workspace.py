import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stability_lab.tracking.wandb import workspace as wandb_workspace
from stability_lab.tracking.wandb.workspace import Page, publish, report_of, workspace_of

PAGE = Page(
    title="qknorm or zloss",
    command="python -m stability_lab compare outputs/sweep --wandb",
    markdown="| stabilizer | val/loss |\n|---|---|\n| none | 3.5 |",
    groups=["sweep-1", "sweep-2"],
    metric="val/loss",
    by=["stabilizer", "model.n_layers"],
    project="lab",
    entity="team",
)


@pytest.fixture
def figures(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "figures"
    folder.mkdir()
    paths = [folder / name for name in ("lr.png", "lr.svg", "loss.JPG")]
    for path in paths:
        path.write_bytes(b"image")
    return paths


def test_without_a_login_one_sentence(figures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_workspace, "_library", lambda: (None, None))
    monkeypatch.setattr(wandb_workspace, "problem", lambda: "no W&B key is configured")
    assert publish(PAGE, figures) == "Nothing was sent to W&B: no W&B key is configured."


def test_without_the_extra_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb_workspaces", "wandb_workspaces.workspaces"):  # another test may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(wandb_workspace, "problem", lambda: pytest.fail("asked for a login"))
    assert "pip install 'stability-lab[wandb]'" in publish(PAGE, [])


def test_what_the_server_refuses_costs_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise RuntimeError("permission denied\nlong story")

    monkeypatch.setattr(wandb_workspace, "_library", lambda: (None, None))
    monkeypatch.setattr(wandb_workspace, "problem", lambda: None)
    monkeypatch.setattr(wandb_workspace, "_send", refuse)
    assert publish(PAGE, []) == "W&B did not take the page (permission denied)."


@pytest.fixture
def library() -> Any:
    return tuple(pytest.importorskip(f"wandb_workspaces.{name}") for name in ("workspaces", "reports.v2"))


def test_runs_are_grouped_by_stabilizers_where_nothing_else_differs() -> None:
    assert PAGE._replace(by=[]).keys == ["stabilizers"]


def test_the_workspace_of_a_page(library: Any) -> None:
    made = workspace_of(library, PAGE)
    assert (made.entity, made.project, made.name) == ("team", "lab", "qknorm or zloss")
    section = made._spec["spec"]["section"]
    (runs,) = section["runSets"]
    filters = [(item["key"]["name"], item["op"], item["value"]) for item in runs["filters"]["filters"]]
    assert filters == [("group", "IN", ["sweep-1", "sweep-2"]), ("jobType", "!=", "compare")]
    # A nested key of the config lies below the value of its first part.
    assert [key["name"] for key in runs["grouping"]] == ["stabilizers.value", "model.value.n_layers"]
    shown = {
        panel["config"]["chartTitle"]: panel["config"]
        for bank in section["panelBankConfig"]["sections"]
        for panel in bank["panels"]
    }
    assert shown["val/loss"]["xAxis"] == "step"
    assert shown["val/loss"]["metrics"] == ["val/loss"]
    assert shown["val/loss"]["groupBy"] == "stabilizers.value"
    assert (shown["val/loss"]["yLogScale"], shown["optim/grad_norm"]["yLogScale"]) == (False, True)
    scatter = shown["val/loss over learning rate"]
    assert (scatter["xAxis"], scatter["yAxis"]) == ("config:lr.value", "summary:val/loss")


def test_the_report_of_a_page(library: Any) -> None:
    made = report_of(library, PAGE, ["figures/lr"], "run-7")
    grids = [block for block in made.blocks if hasattr(block, "panels")]
    assert made.blocks[0].text == PAGE.markdown
    assert PAGE.command in made.blocks[1].text
    assert [len(grid.panels) for grid in grids] == [3, 2, 1]
    assert grids[0].runsets[0].groupby == ["config.stabilizers", "config.model.n_layers"]
    assert grids[-1].panels[0].media_keys == ["figures/lr"]
    assert "run-7" in grids[-1].runsets[0].filters
    without = report_of(library, PAGE, [], "run-7")
    assert len(without.blocks) == len(made.blocks) - 2


def test_the_report_as_the_server_would_get_it(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interface: Any = pytest.importorskip("wandb_workspaces.reports.v2.interface")
    monkeypatch.setattr(interface, "_get_api", lambda: None)
    monkeypatch.setattr(interface, "execute_graphql", lambda *_: {"project": {"internalId": "7"}})
    made = report_of(library, PAGE, ["figures/lr"], "run-7")
    spec = json.loads(made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    first, _, last = (block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid")
    panels = first["panelBankSectionConfig"]["panels"]
    assert len({(panel["layout"]["x"], panel["layout"]["y"]) for panel in panels}) == 3
    assert panels[0]["config"]["chartTitle"] == "val/loss"
    (runs,) = first["runSets"]
    assert [key["name"] for key in runs["grouping"]] == ["stabilizers.value", "model.value.n_layers"]
    (figures,) = last["runSets"]
    assert [(f["key"]["name"], f["value"]) for f in figures["filters"]["filters"]] == [("name", "run-7")]


def test_what_is_sent(figures: list[Path], library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    workspaces, reports = library
    sent: dict[str, Any] = {}

    class Run:
        id, url, summary = "run-7", "https://w/run-7", sent

        def log(self, media: dict[str, Any]) -> None:
            sent["media"] = media

        def finish(self) -> None:
            sent["finished"] = True

    def init(**options: Any) -> Run:
        sent["init"] = options
        return Run()

    def save(self: Any) -> Any:
        sent[type(self).__name__] = self
        return SimpleNamespace(url=f"https://w/{type(self).__name__}")

    monkeypatch.setattr(wandb_workspace, "problem", lambda: None)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "Image", lambda path: Path(path).name)
    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(default_entity="me"))
    monkeypatch.setattr(workspaces.Workspace, "save", save)
    monkeypatch.setattr(reports.Report, "save", save)
    said = publish(PAGE._replace(entity=None), figures)
    assert said == "W&B: workspace https://w/Workspace, report https://w/Report, figures https://w/run-7."
    assert sent["media"] == {"figures/lr": "lr.png", "figures/loss": "loss.JPG"}
    assert sent["finished"]
    assert sent["table"] == PAGE.markdown
    assert (sent["init"]["job_type"], sent["init"]["entity"], sent["init"]["project"]) == ("compare", "me", "lab")
    assert not Path(sent["init"]["dir"]).exists()
    assert sent["init"]["group"] is None  # of two groups the run can be in neither alone
    assert sent["Workspace"].entity == sent["Report"].entity == "me"
