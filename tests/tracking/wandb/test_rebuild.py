import math

import pytest

from stability_lab.tracking.wandb.rebuild import config_of, rows_of, stabilizers_of, summary_of


def test_our_own_history_comes_back_as_it_was() -> None:
    history = [
        {"_step": 0, "_timestamp": 1.0, "step": 1, "tokens": 16, "train/loss": 2.5, "optim/grad_norm": 1.0},
        {"_step": 1, "step": 1, "event/loss_spike": 1, "event/loss_spike/height": 3.0},
        {"_step": 2, "step": 2, "tokens": 32, "train/loss": "NaN", "optim/grad_norm": "Infinity", "val/loss": 3.5},
    ]
    first, second = rows_of(history)
    assert first == {"step": 1, "tokens": 16, "train/loss": 2.5, "optim/grad_norm": 1.0}
    assert math.isnan(second["train/loss"])
    assert (second["step"], second["optim/grad_norm"], second["val/loss"]) == (2, math.inf, 3.5)


def test_names_of_other_code_become_ours() -> None:
    history = [
        {"_step": 0, "trainer/global_step": 10, "train_loss": 3.0, "grad norm": 1.0, "lr-AdamW": 0.1},
        {"_step": 1, "trainer/global_step": 10, "eval_loss": 4.0},
        {"_step": 2, "trainer/global_step": 20, "train_loss": 2.0, "gpu/image": {"_type": "image-file"}, "note": "x"},
    ]
    assert rows_of(history) == [
        {"step": 10, "train/loss": 3.0, "optim/grad_norm": 1.0, "lr-AdamW": 0.1, "val/loss": 4.0},
        {"step": 20, "train/loss": 2.0},
    ]


def test_the_cross_entropy_is_preferred_and_the_total_kept_apart() -> None:
    assert rows_of([{"step": 1, "train/ce_loss": 2.0, "train/loss": 2.5}]) == [
        {"step": 1, "train/loss": 2.0, "logged/train/loss": 2.5}
    ]


def test_a_counter_of_calls_is_the_last_resort() -> None:
    assert [row["step"] for row in rows_of([{"_step": 0, "loss": 3.0}, {"_step": 5, "loss": 2.0}])] == [0, 5]
    # `epoch_step` is no known name and `step` has too few values: the counter it is.
    rows = rows_of([{"_step": n, "loss": 1.0} | ({"step": 7} if n == 0 else {}) for n in range(4)])
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["logged/step"] == 7


def test_a_call_without_a_step_belongs_to_the_one_before() -> None:
    history = [{"step": 1, "loss": 3.0}, {"val/loss": 3.5}, {"step": 2, "loss": 2.0}]
    assert rows_of(history) == [{"step": 1, "train/loss": 3.0, "val/loss": 3.5}, {"step": 2, "train/loss": 2.0}]


@pytest.mark.parametrize("history", [[], [{}], [{"note": "x"}], [{"_step": 0, "_timestamp": 1.0}]])
def test_a_history_without_numbers_has_no_rows(history: list[dict]) -> None:
    assert rows_of(history) == []


def test_our_config_loses_only_what_the_tracker_added() -> None:
    ours = {"seed": 1, "optimizer": {"lr": 0.1}, "stabilizer": {"qknorm": {}}, "model": {"name": "gpt_nano"}}
    added = {"stabilizers": "qknorm", "lr": 0.1, "model_name": "gpt_nano", "_wandb": {}}
    assert config_of({**added, **ours}) == ours


@pytest.mark.parametrize(
    ("theirs", "optimizer", "seed"),
    [
        ({"learning_rate": 0.1, "random_seed": 3}, {"lr": 0.1}, 3),
        ({"optimizer": "adamw", "lr": "0.1", "training": {"learning_rate": 0.2}}, {"name": "adamw", "lr": 0.2}, None),
        ({"optimizer": {"name": "sgd", "lr": 0.3}, "seed": 5.0}, {"name": "sgd", "lr": 0.3}, 5),
        ({"batch_size": 4}, None, None),
    ],
)
def test_config_of_other_code(theirs: dict, optimizer: dict | None, seed: int | None) -> None:
    config = config_of(theirs)
    assert config.get("optimizer") == optimizer
    assert config.get("seed") == seed
    moved = ("optimizer", "seed", "learning_rate")
    assert config.items() >= {key: value for key, value in theirs.items() if key not in moved}.items()
    assert "learning_rate" not in config  # beside optimizer.lr it would be a second setting


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"stabilizer": {"zloss": {}, "qknorm": {}}}, ["qknorm", "zloss"]),
        ({"stabilizers": "qknorm+zloss"}, ["qknorm", "zloss"]),
        ({"stabilizers": ["zloss"]}, ["zloss"]),
        ({"stabilizers": "none"}, []),
        ({"stabilizers": 3}, []),
        ({}, []),
    ],
)
def test_stabilizers(config: dict, names: list[str]) -> None:
    assert stabilizers_of(config) == names


def test_our_summary_becomes_nested_again() -> None:
    logged = {
        "status": "diverged",
        "verdict": "diverged",
        "val/loss": "NaN",
        "final": {"val/loss": "NaN"},
        "scores.grad_norm.olmo_core.score": 1.5,
        "max_attn_logit": "Infinity",
        "_runtime": 12,
    }
    summary = summary_of(logged, "failed")
    assert math.isnan(summary["final"].pop("val/loss"))
    assert summary == {
        "status": "diverged",
        "verdict": "diverged",
        "final": {},
        "scores": {"grad_norm": {"olmo_core": {"score": 1.5}}},
        "max_attn_logit": math.inf,
    }
    # A run that was resumed has the summary of its first part.
    assert summary_of(logged, "running")["status"] == "running"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("finished", "completed"),
        ("running", "running"),
        ("failed", "failed"),
        ("crashed", "interrupted"),
        ("x", "interrupted"),
    ],
)
def test_summary_of_other_code(state: str, status: str) -> None:
    summary = summary_of({"train_loss": "NaN", "eval_loss": 3.5, "note": "x", "table": {"a": 1}}, state)
    assert (summary["status"], summary["verdict"], summary["final"]["val/loss"]) == (status, None, 3.5)
    assert math.isnan(summary["final"]["train/loss"])
