"""Runs fall into arms and settings by what differs between them, and seeds never make a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from stability_lab.compare.grouping import group, short, stabilizer_labels
from stability_lab.compare.run_record import find_runs
from stability_lab.config import ConfigError


def grouped(path: Path, *by: str, baseline: str | None = None):
    return group(find_runs([path])[0], by, baseline)


def test_arms_are_stabilizers_the_baseline_first_and_settings_are_learning_rates(make_run, tmp_path: Path) -> None:
    for i, (stabilizers, lr, seed) in enumerate(
        (s, lr, seed) for s in (["zloss"], ["qknorm", "zloss"], []) for lr in (3e-2, 3e-3) for seed in (1, 0)
    ):
        make_run(f"r{i}", stabilizers, lr, seed)
    grouping = grouped(tmp_path)
    assert grouping.arms == ("none", "qknorm+zloss", "zloss")
    assert grouping.setting == ("optimizer.lr",)
    assert [(cell.setting["optimizer.lr"], cell.arm) for cell in grouping.cells] == [
        (lr, arm) for lr in (3e-3, 3e-2) for arm in grouping.arms
    ]
    assert all([run.seed for run in cell.runs] == [0, 1] for cell in grouping.cells)


def test_an_option_stands_in_the_name_only_where_runs_differ_in_it(make_run, tmp_path: Path) -> None:
    make_run("a", {"zloss": {"weight": 1e-4}, "qknorm": {"scope": "head"}})
    make_run("b", {"zloss": {"weight": 1e-5}})
    runs, _ = find_runs([tmp_path])
    assert stabilizer_labels(runs) == ["qknorm+zloss(weight=0.0001)", "zloss(weight=1e-05)"]


def test_what_varies_with_the_arm_is_named_and_no_setting(make_run, tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(f"a{seed}", [], seed=seed)
        make_run(f"b{seed}", ["qknorm"], seed=seed, config={"optimizer": {"lr": 3e-3, "eps": 1e-5}})
    grouping = grouped(tmp_path)
    assert grouping.setting == ()
    assert grouping.confounded == {"optimizer.eps": {"none": 1e-8, "qknorm": 1e-5}}


@pytest.mark.parametrize(
    ("by", "baseline", "arms"),
    [
        (["optimizer.lr"], None, ("lr=0.003", "lr=0.01", "lr=0.1")),
        (["lr"], "0.1", ("lr=0.1", "lr=0.003", "lr=0.01")),
        (["lr"], "lr=0.01", ("lr=0.01", "lr=0.003", "lr=0.1")),
        (["lr", "optimizer.eps"], None, tuple(f"lr={lr}, eps=1e-08" for lr in ("0.003", "0.01", "0.1"))),
    ],
)
def test_any_key_can_make_the_arms(make_run, tmp_path: Path, by, baseline, arms) -> None:
    for i, lr in enumerate((1e-1, 3e-3, 1e-2)):
        make_run(f"r{i}", lr=lr)
    assert grouped(tmp_path, *by, baseline=baseline).arms == arms


def test_learning_rates_alone_are_the_ladder_of_one_arm(make_run, tmp_path: Path) -> None:
    make_run("a", lr=1e-2)
    make_run("b", lr=1e-3)
    grouping = grouped(tmp_path)
    assert (grouping.arms, grouping.setting) == (("none",), ("optimizer.lr",))


def test_without_stabilizers_what_else_varies_is_compared(make_run, tmp_path: Path) -> None:
    for lr in (1e-3, 1e-2):
        for eps in (1e-8, 1e-5):
            make_run(f"{lr}{eps}", config={"optimizer": {"lr": lr, "eps": eps}})
    grouping = grouped(tmp_path)
    assert (grouping.by, grouping.setting) == (("optimizer.eps",), ("optimizer.lr",))
    assert grouping.arms == ("eps=1e-08", "eps=1e-05")
    assert "the baseline is eps=1e-08" in grouping.notes[0]


def test_without_a_baseline_run_the_first_arm_takes_its_place_and_says_so(make_run, tmp_path: Path) -> None:
    make_run("a", ["zloss"])
    make_run("b", ["qknorm"])
    grouping = grouped(tmp_path)
    assert grouping.baseline == "qknorm"
    assert "--baseline" in grouping.notes[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"by": ["stabilzer"]}, "--by stabilzer: no run has this key: did you mean stabilizer?"),
        ({"by": ["optimizer.LR"]}, "did you mean optimizer.lr?"),
        ({"baseline": "qknrom"}, "--baseline qknrom: no such arm: did you mean qknorm?"),
    ],
)
def test_what_is_not_there_is_named(make_run, tmp_path: Path, arguments, words: str) -> None:
    make_run("a")
    make_run("b", ["qknorm"])
    with pytest.raises(ConfigError) as error:
        group(find_runs([tmp_path])[0], **arguments)
    assert words in str(error.value)


def test_a_baseline_may_be_said_in_any_order(make_run, tmp_path: Path) -> None:
    make_run("a")
    make_run("b", ["qknorm", "zloss"])
    assert grouped(tmp_path, baseline="zloss + qknorm").baseline == "qknorm+zloss"


def test_repeats_of_a_seed_count_once_and_the_latest_result_counts(make_run, tmp_path: Path) -> None:
    make_run("first", loss=1.0, manifest={"created": "2026-01-01T00:00:00"})
    make_run("second", loss=3.0, manifest={"created": "2026-01-02T00:00:00"})
    make_run("third", loss=9.0, manifest={"created": "2026-01-03T00:00:00"}, status="interrupted")
    (cell,) = grouped(tmp_path).cells
    assert [run.name for run in cell.runs] == ["second"]
    assert [run.name for run in cell.repeats] == ["third", "first"] or len(cell.repeats) == 2


def test_seeds_of_init_and_data_make_pairs_too(make_run, tmp_path: Path) -> None:
    for name, seeds in {"a": (0, 7), "b": (1, 7)}.items():
        make_run(name, config={"init_seed": seeds[0], "data_seed": seeds[1]})
    (cell,) = grouped(tmp_path).cells
    assert len(cell.runs) == 2


def test_a_corpus_is_one_key_whatever_options_it_has(make_run, tmp_path: Path) -> None:
    make_run("a", config={"data": {"_target_": "x.Sotu", "val_every": 20}})
    make_run("b", config={"data": {"_target_": "x.Hub", "name": "parquet", "field": "text", "val_documents": 50}})
    make_run("c", config={"data": {"_target_": "x.Hub", "name": "json", "field": "text", "val_documents": 50}})
    grouping = grouped(tmp_path)
    assert grouping.by == ("data",)
    assert grouping.arms == ("data=Hub(name=json)", "data=Hub(name=parquet)", "data=Sotu")


def test_paths_logging_and_devices_are_no_difference(make_run, tmp_path: Path) -> None:
    make_run("a", seed=0, config={"trainer": {"threads": 1, "log_every": 10, "max_steps": 5}, "run_name": "a"})
    make_run("b", seed=1, config={"trainer": {"threads": 2, "log_every": 1, "max_steps": 5}, "group": "x"})
    assert len(grouped(tmp_path).cells) == 1
    assert grouped(tmp_path, "trainer.threads").arms == ("threads=1", "threads=2")
    with pytest.raises(ConfigError, match="no run has this key"):
        grouped(tmp_path, "trainer.log_every")


def test_short_names_stay_clear() -> None:
    assert short("optimizer.lr") == "lr"
    assert short("model.name") == "model"
    assert short("data._target_") == "data"
    assert short("trainer.max_steps", ["trainer.max_steps", "x.max_steps"]) == "trainer.max_steps"
