import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stability_lab.config import ConfigError
from stability_lab.tracking.wandb import workspace as wandb_workspace
from stability_lab.tracking.wandb.workspace import publish, report_of, spec_of, workspace_of

COMPARISON = {
    "title": "qknorm or zloss",
    "command": "python -m stability_lab compare outputs/sweep --wandb",
    "markdown": "| stabilizer | val/loss |\n|---|---|\n| none | 3.5 |",
    "group": ["sweep-1", "sweep-2"],
    "metric": "val/loss",
    "by": ["stabilizer", "model.n_layers"],
    "arms": [],
}


@pytest.fixture
def figures(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "figures"
    folder.mkdir()
    paths = [folder / name for name in ("lr.png", "lr.svg", "loss.JPG")]
    for path in paths:
        path.write_bytes(b"image")
    return paths


def panels(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {panel["title"]: panel for section in spec["sections"] for panel in section["panels"]}


def test_the_description_says_which_runs_and_panels() -> None:
    spec = spec_of(COMPARISON, [Path("a/lr.png")], "lab", "team")
    assert json.loads(json.dumps(spec)) == spec
    assert spec["runs"] == {
        "groups": ["sweep-1", "sweep-2"],
        "without_job_type": "compare",
        "group_by": ["stabilizers", "model.n_layers"],
    }
    shown = panels(spec)
    assert shown["val/loss"] == {
        "kind": "line",
        "title": "val/loss",
        "x": "step",
        "y": "val/loss",
        "log_y": False,
        "group_by": "stabilizers",
    }
    assert shown["optim/grad_norm"]["log_y"] is True
    assert shown["attn/max_logit"]["log_y"] is True
    scatter = shown["val/loss over learning rate"]
    assert (scatter["x"], scatter["y"], scatter["log_x"]) == ("config:lr", "summary:val/loss", True)
    assert spec["figures"] == [{"key": "figures/lr", "file": "lr.png"}]
    assert spec["markdown"] == COMPARISON["markdown"]


def test_another_metric_and_no_keys() -> None:
    spec = spec_of({**COMPARISON, "metric": "val/ppl", "by": [], "group": []}, [], "lab", None)
    assert panels(spec)["val/ppl"]["group_by"] == "stabilizers"
    assert panels(spec)["val/ppl over learning rate"]["y"] == "summary:val/ppl"
    assert spec["runs"]["groups"] == []


def test_without_a_login_the_description_is_written_and_one_sentence_says_so(
    tmp_path: Path, figures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_workspace, "_missing_extra", lambda: None)
    monkeypatch.setattr(wandb_workspace, "problem", lambda: "no W&B key is configured")
    path = tmp_path / "page.json"
    said = publish(COMPARISON, figures, None, "lab", path)
    assert said == f"Nothing was sent to W&B: no W&B key is configured; what the page would show is in {path}."
    spec = json.loads(path.read_text())
    assert [item["file"] for item in spec["figures"]] == ["lr.png", "loss.JPG"]


def test_without_the_extra_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setattr(wandb_workspace, "problem", lambda: pytest.fail("asked for a login"))
    said = publish(COMPARISON, [], None, "lab", tmp_path / "page.json")
    assert "pip install 'stability-lab[wandb]'" in said
    assert (tmp_path / "page.json").is_file()


def test_what_the_server_refuses_costs_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise RuntimeError("permission denied\nlong story")

    monkeypatch.setattr(wandb_workspace, "_missing_extra", lambda: None)
    monkeypatch.setattr(wandb_workspace, "problem", lambda: None)
    monkeypatch.setattr(wandb_workspace, "_send", refuse)
    path = tmp_path / "page.json"
    said = publish(COMPARISON, [], None, "lab", path)
    assert said == f"W&B did not take the page (permission denied); what it would show is in {path}."


def test_a_description_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"page\.json cannot be written: No such file"):
        publish(COMPARISON, [], None, "lab", tmp_path / "nowhere" / "page.json")


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("wandb_workspaces.workspaces")


def test_the_workspace_of_a_description(library: Any) -> None:
    made = workspace_of(spec_of(COMPARISON, [], "lab", "team"))
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


def test_the_report_of_a_description(library: Any) -> None:
    made = report_of(spec_of(COMPARISON, [Path("lr.png")], "lab", "team"), "run-7")
    grids = [block for block in made.blocks if hasattr(block, "panels")]
    assert made.blocks[0].text == COMPARISON["markdown"]
    assert COMPARISON["command"] in made.blocks[1].text
    assert [len(grid.panels) for grid in grids] == [3, 2, 1]
    assert grids[0].runsets[0].groupby == ["config.stabilizers", "config.model.n_layers"]
    assert grids[-1].panels[0].media_keys == ["figures/lr"]
    assert "run-7" in grids[-1].runsets[0].filters
    without = report_of(spec_of(COMPARISON, [], "lab", "team"), "run-7")
    assert len(without.blocks) == len(made.blocks) - 2


def test_the_report_as_the_server_would_get_it(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interface: Any = pytest.importorskip("wandb_workspaces.reports.v2.interface")
    monkeypatch.setattr(interface, "_get_api", lambda: None)
    monkeypatch.setattr(interface, "execute_graphql", lambda *_: {"project": {"internalId": "7"}})
    made = report_of(spec_of(COMPARISON, [Path("lr.png")], "lab", "team"), "run-7")
    spec = json.loads(made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    first, _, last = (block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid")
    panels = first["panelBankSectionConfig"]["panels"]
    assert len({(panel["layout"]["x"], panel["layout"]["y"]) for panel in panels}) == 3
    assert panels[0]["config"]["chartTitle"] == "val/loss"
    (runs,) = first["runSets"]
    assert [key["name"] for key in runs["grouping"]] == ["stabilizers.value", "model.value.n_layers"]
    (figures,) = last["runSets"]
    assert [(f["key"]["name"], f["value"]) for f in figures["filters"]["filters"]] == [("name", "run-7")]


def test_what_is_sent(tmp_path: Path, figures: list[Path], library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    reports: Any = pytest.importorskip("wandb_workspaces.reports.v2")
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
    monkeypatch.setattr(library.Workspace, "save", save)
    monkeypatch.setattr(reports.Report, "save", save)
    said = publish(COMPARISON, figures, None, "lab", tmp_path / "page.json")
    assert said == "W&B: workspace https://w/Workspace, report https://w/Report, figures https://w/run-7."
    assert sent["media"] == {"figures/lr": "lr.png", "figures/loss": "loss.JPG"}
    assert sent["finished"]
    assert sent["table"] == COMPARISON["markdown"]
    assert (sent["init"]["job_type"], sent["init"]["entity"], sent["init"]["project"]) == ("compare", "me", "lab")
    assert not Path(sent["init"]["dir"]).exists()
    assert sent["init"]["group"] is None  # of two groups the run can be in neither alone
    assert sent["Workspace"].entity == sent["Report"].entity == "me"
