"""The figures of `compare`: what is drawn, where, and what is left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import yaml
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stability_lab.compare.comparison import Comparison, compare
from stability_lab.compare.decision import tuned
from stability_lab.compare.figures import FORMATS, draw
from stability_lab.compare.figures import style as styles
from stability_lab.compare.figures.attention_logits import attention_logits
from stability_lab.compare.figures.curves import curves, running_median
from stability_lab.compare.figures.decision_panels import decision
from stability_lab.compare.figures.differences import differences
from stability_lab.compare.figures.learning_rate import loss_over_lr
from stability_lab.compare.figures.looks import STABILIZERS, looks
from stability_lab.compare.run_record import RunRecord, find_runs
from stability_lab.config import ConfigError, config_dir

LRS = (1e-3, 1e-2, 1e-1)
ARMS = ("none", "qknorm", "zloss")
STEPS = 40
ALL = ["decision", "loss_over_lr", "curves", "attention_logits", "differences"]
SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF-"}


HIGH_START = {"initial": {"val/loss": 2e12}}  # a run that ends above its start has diverged


def write_run(
    folder: Path,
    arm: str = "none",
    lr: float = 1e-2,
    seed: int = 0,
    loss: float | None = 2.0,
    *,
    rows: Sequence[dict[str, Any]] | None = None,
    events: Sequence[dict[str, Any]] = (),
    logit: float | None = 20.0,
    diverged: bool = False,
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """`rows` None: no metrics.jsonl."""
    path = folder / f"run{len(list(folder.glob('run*'))):03d}"
    path.mkdir(parents=True)
    names = [] if arm == "none" else arm.split("+")
    content = {"seed": seed, "optimizer": {"lr": lr}, "trainer": {"max_steps": STEPS}, **(config or {})}
    (path / "config.yaml").write_text(yaml.safe_dump({**content, "stabilizer": {name: {} for name in names}}))
    content = {
        "status": "diverged" if diverged else "completed",
        "verdict": "diverged" if diverged else "stable",
        "initial": {"val/loss": 5.5},
        "final": {} if loss is None else {"val/loss": loss},
        "max_attn_logit": logit,
        **(summary or {}),
    }
    (path / "summary.json").write_text(json.dumps(content))
    if rows is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def log(level: float = 2.0, steps: int = STEPS, layers: int = 3, **changes: dict[int, float]) -> list[dict[str, Any]]:
    """Metrics of a run; `changes` puts values at steps, by `loss` or `norm`."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"step": step, "train/loss": level + 3 / step, "optim/grad_norm": 0.5 + level / step}
        row["train/loss"] = changes.get("loss", {}).get(step, row["train/loss"])
        row["optim/grad_norm"] = changes.get("norm", {}).get(step, row["optim/grad_norm"])
        if step % 5 == 0:
            own = {f"attn/max_logit/L{layer:02d}": (1.0 + layer) * level * step for layer in range(layers)}
            row |= own | {"attn/max_logit": max(own.values(), default=0.0)}
        rows.append(row)
    return rows


def read(folder: Path, **options: Any) -> Comparison:
    return compare(find_runs([folder])[0], **options)


@pytest.fixture
def style() -> Iterator[None]:
    with styles.applied():
        yield


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three arms, learning rates and seeds; at the highest rate the baseline diverges, and one seed of zloss."""
    for number, arm in enumerate(ARMS):
        for at, lr in enumerate(LRS):
            for seed in range(3):
                diverged = at == 2 and (arm == "none" or (arm == "zloss" and seed == 1))
                loss = 2.0 + 0.02 * at - 0.3 * number + 0.01 * seed * (1 + number)
                rows = log(loss, steps=25 if diverged else STEPS)
                write_run(tmp_path, arm, lr, seed, None if diverged else loss, rows=rows, diverged=diverged)
    return tmp_path


def lines(axes: Any, label: str) -> list[Line2D]:
    return [line for line in axes.lines if line.get_label() == label]


def xy(line: Line2D) -> tuple[list[float], list[float]]:
    return [float(x) for x in np.asarray(line.get_xdata())], [float(y) for y in np.asarray(line.get_ydata())]


def colour(line: Line2D) -> str:
    return to_hex(line.get_color())


def legend_of(figure: Figure) -> dict[str, Line2D]:
    (legend,) = figure.legends
    return dict(zip([t.get_text() for t in legend.get_texts()], legend.get_lines(), strict=True))


# Files


@pytest.mark.slow
def test_each_figure_in_each_format_and_the_same_runs_the_same_bytes(sweep: Path, tmp_path: Path) -> None:
    comparison = read(sweep)
    paths = draw(comparison, tmp_path / "new" / "figures", [*FORMATS, "png"])
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in ALL for kind in FORMATS]
    assert sorted(path.name for path in (tmp_path / "new" / "figures").iterdir()) == sorted(p.name for p in paths)
    for path in paths:
        assert path.read_bytes().startswith(SIGNATURES[path.suffix[1:]])
    again = draw(comparison, tmp_path / "again", FORMATS)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_png_is_the_default_and_as_wide_as_a_page(sweep: Path, tmp_path: Path) -> None:
    paths = draw(read(sweep), tmp_path / "figures")
    assert [path.name for path in paths] == [f"{name}.png" for name in ALL]
    for path in paths:
        width, height = (int.from_bytes(path.read_bytes()[at : at + 4]) for at in (16, 20))
        assert width == 1400
        assert 300 < height < 1400


@pytest.mark.slow
def test_text_stays_text_in_svg_and_truetype_in_pdf(sweep: Path, tmp_path: Path) -> None:
    paths = draw(read(sweep), tmp_path / "figures", ["svg", "pdf"])
    for path in paths:
        if path.suffix == ".svg":
            words = re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text(encoding="utf-8"))
            assert {"qknorm", "zloss"} <= set(words), path.name
        else:
            assert b"/Type3" not in path.read_bytes()


@pytest.mark.slow
def test_a_users_matplotlibrc_changes_nothing(sweep: Path, tmp_path: Path) -> None:
    comparison = read(sweep)
    (plain, *_) = draw(comparison, tmp_path / "plain")
    with mpl.rc_context({"font.size": 20, "text.usetex": True, "lines.linewidth": 9}):
        (other, *_) = draw(comparison, tmp_path / "other")
        assert mpl.rcParams["font.size"] == 20
    assert other.read_bytes() == plain.read_bytes()


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_or_written_is_one_sentence(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = read(sweep)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="cannot be made"):
        draw(comparison, tmp_path / "file" / "figures")
    assert (tmp_path / "file").read_text() == "kept"
    (old,) = draw(comparison, tmp_path / "figures")[:1]
    before = old.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"decision.png cannot be written \(No space left on device\)"):
        draw(comparison, old.parent)
    assert old.read_bytes() == before


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([{"rows": log()}], ["curves", "attention_logits"]),
        ([{}], []),
        ([{}, {"arm": "qknorm"}], ["differences"]),
        ([{}, {"lr": 1e-3}], ["loss_over_lr"]),
        ([{}, {"lr": 1e-3}, {"arm": "qknorm"}], ["decision", "loss_over_lr", "differences"]),
        ([{"lr": 1e-3}, {"lr": 1e-2, "arm": "qknorm"}], ["differences"]),  # the learning rate belongs to the arm
        ([{"rows": log(layers=0)}], ["curves"]),
        ([{"rows": []}, {"arm": "qknorm", "loss": None}], []),
        ([{"loss": math.nan, "lr": lr} for lr in LRS], []),
        ([{"loss": None, "diverged": True, "lr": lr} for lr in LRS], ["loss_over_lr"]),
        ([{"rows": [{"step": 1, "train/loss": math.nan, "optim/grad_norm": math.inf}]}], []),
    ],
)
def test_what_the_runs_do_not_hold_is_left_out(tmp_path: Path, runs: list[dict[str, Any]], names: list[str]) -> None:
    for run in runs:
        write_run(tmp_path / "runs", **run)
    assert [path.stem for path in draw(read(tmp_path / "runs"), tmp_path / "figures")] == names


def test_only_figures_that_are_asked_for_are_drawn_in_that_order(sweep: Path, tmp_path: Path) -> None:
    paths = draw(read(sweep), tmp_path / "figures", only=("differences", "decision"))
    assert [path.name for path in paths] == ["differences.png", "decision.png"]
    assert len(list((tmp_path / "figures").iterdir())) == 2


def test_only_the_logs_of_drawn_runs_are_read(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[Path] = set()
    series = RunRecord.series

    def counted(self: RunRecord, *columns: str) -> dict[str, np.ndarray]:
        asked.add(self.path)
        return series(self, *columns)

    monkeypatch.setattr(RunRecord, "series", counted)
    draw(read(sweep), tmp_path / "figures")
    assert len(asked) == len(ARMS)


@pytest.mark.slow
def test_many_arms_and_names_of_strangers(tmp_path: Path) -> None:
    """Warnings are errors here: of glyphs that a font lacks, of layouts that do not fit, of overflow."""
    names = [
        "none",
        "_hidden",
        "中文",
        "a$x_{1}$b$",
        "\\alpha\x1b[0m",
        "&<b>",
        *("n" * 55 + f"{n:05d}" for n in range(7)),
    ]
    for number, name in enumerate(names):
        for lr in LRS:
            loss = {0: 1e12, 1: 1e300, 12: math.inf}.get(number, 2.0 + 0.1 * number)
            rows = log(2.0 + number, loss={3: 1e300, 4: math.inf, 5: -1e300}, norm={3: 1e300, 4: math.inf, 5: 0.0})
            summary = {"initial": {"val/loss": 1e300}}
            write_run(tmp_path / "runs", name, lr, 0, loss, rows=rows, logit=10.0 ** (number * 20), summary=summary)
    paths = draw(read(tmp_path / "runs"), tmp_path / "figures", FORMATS)
    assert len(paths) == len(ALL) * len(FORMATS)
    svg = (tmp_path / "figures" / "loss_over_lr.svg").read_text(encoding="utf-8")
    for shown in (" _hidden", "\\u4e2d\\u6587", "a$x_{1}$b$", "\\alpha\\x1b[0m", "&amp;&lt;b&gt;", "n" * 55 + "00005"):
        assert f">{shown}</text>" in svg


def test_one_arm_has_one_colour_and_the_baseline_is_black(sweep: Path, style: None) -> None:
    comparison = read(sweep)
    loss, steps, logits, forest = (f(comparison) for f in (loss_over_lr, curves, attention_logits, differences))
    assert loss
    assert steps
    assert logits
    assert forest
    expected = {arm: look.colour.lower() for arm, look in looks(ARMS).items()}
    assert expected["none"] == "#000000"
    assert len(set(expected.values())) == 3
    for arm in ARMS:
        found = [legend_of(figure)[arm] for figure in (loss, steps, logits)]
        found += lines(loss.axes[0], arm) + lines(loss.axes[1], arm) + lines(logits.axes[0], arm)
        found += lines(forest.axes[0], arm)
        assert len(found) == (6 if arm == "none" else 6 + 2 * (arm == "zloss") + 2 * (arm == "qknorm"))
        assert {colour(line) for line in found} == {expected[arm]}
        assert len({str(line.get_marker()) for line in found} - {"None"}) == 1


def test_thirty_arms_have_thirty_looks() -> None:
    found = list(looks([str(n) for n in range(30)]).values())
    assert len({(look.colour, look.marker, str(look.dashes)) for look in found}) == 30
    assert sum(look.colour == "#000000" for look in found) == 1
    assert not {look.marker for look in found} & {"v", "x"}  # spikes and divergence


def test_each_stabilizer_has_one_look_in_every_figure() -> None:
    catalogue = sorted(path.stem for path in (config_dir() / "stabilizer").glob("*.yaml"))
    assert set(catalogue) <= {"none", *STABILIZERS}
    own = {name: looks([name])[name] for name in catalogue}
    assert len({(look.colour, look.marker) for look in own.values()}) == len(catalogue)
    others = ["absnorm", "softcap(cap=30)", "d_model=64"]
    for seed in range(20):
        arms = [str(arm) for arm in np.random.default_rng(seed).permutation([*catalogue, *others])]
        found = looks(arms)
        assert list(found) == arms
        assert {name: found[name] for name in catalogue} == own
        assert not {(found[name].colour, found[name].marker) for name in others} & {
            (look.colour, look.marker) for look in own.values()
        }
        assert len({(look.colour, look.marker, str(look.dashes)) for look in found.values()}) == len(arms)


def test_a_combination_has_one_look_and_is_told_from_its_parts() -> None:
    combined = looks(["none", "qknorm+softcap"])["qknorm+softcap"]
    assert looks(["zloss", "qknorm+softcap", "absnorm", "qknorm", "softcap"])["qknorm+softcap"] == combined
    parts = looks(["qknorm", "softcap"])
    assert combined.colour not in {look.colour for look in parts.values()}
    assert combined.marker not in {look.marker for look in parts.values()}
    pairs = ["+".join(pair) for pair in combinations(sorted(STABILIZERS), 2)]
    alone = {pair: looks([pair])[pair] for pair in pairs}
    assert all(looks(["none", "qknorm", "softcap", pair])[pair] == look for pair, look in alone.items())


def test_an_own_stabilizer_keeps_its_look_beside_others() -> None:
    assert looks(["none", "absnorm", "qknorm"])["absnorm"] == looks(["zloss", "absnorm"])["absnorm"]


# Loss over the learning rate


def test_mean_and_seeds_over_a_logarithmic_learning_rate(sweep: Path, style: None) -> None:
    figure = loss_over_lr(read(sweep))
    assert figure
    loss, logit = figure.axes
    assert (loss.get_xscale(), loss.get_yscale(), logit.get_xscale(), logit.get_yscale()) == (
        "log",
        "linear",
        "log",
        "log",
    )
    assert loss.get_ylabel() == "validation loss (nats per token)"
    x, y = xy(lines(loss, "zloss")[0])
    assert x == list(LRS)
    assert y == pytest.approx([1.43, 1.45, 1.47])
    assert xy(lines(loss, "none")[0])[1] == pytest.approx([2.01, 2.03, math.nan], nan_ok=True)
    assert len(lines(loss, "seeds")) == 8  # not where the baseline diverged
    assert xy(lines(loss, "seeds")[0])[1] == pytest.approx([2.0, 2.01, 2.02])
    assert [tick.get_text() for tick in loss.get_xticklabels()] == ["0.001", "0.01", "0.1"]


def test_diverged_runs_stand_above_the_rule_with_their_share(sweep: Path, style: None) -> None:
    figure = loss_over_lr(read(sweep))
    assert figure
    loss = figure.axes[0]
    crosses = lines(loss, "diverged")
    assert [(xy(line)[0], line.get_marker(), colour(line)) for line in crosses] == [
        ([0.1], "x", "#000000"),
        ([0.1], "x", looks(ARMS)["zloss"].colour.lower()),
    ]
    (rule,) = (line for line in loss.lines if line.get_transform() == loss.transAxes)
    heights = [xy(line)[1][0] for line in crosses]
    assert xy(rule)[1][0] < heights[1] < heights[0] < 1
    top = max(y for line in lines(loss, "seeds") for y in xy(line)[1])
    bottom, limit = loss.get_ylim()
    assert (top - bottom) / (limit - bottom) < xy(rule)[1][0]
    assert [text.get_text() for text in loss.texts] == ["1/3"]
    assert [tick.get_text() for tick in loss.get_yticklabels()][-1] == "diverged"


def test_one_huge_loss_does_not_flatten_the_rest(tmp_path: Path, style: None) -> None:
    for arm in ("none", "qknorm"):
        for at, lr in enumerate(LRS):
            loss = 1e12 if arm == "none" and at == 2 else 2.0 + at * 0.1
            write_run(tmp_path, arm, lr, loss=loss, summary=HIGH_START)
    figure = loss_over_lr(read(tmp_path))
    assert figure
    loss = figure.axes[0]
    assert 2.2 < loss.get_ylim()[1] < 2.3
    assert xy(lines(loss, "none")[0])[1] == [2.0, 2.1, 2.2]  # at the edge, with its value beside it
    assert [text.get_text() for text in loss.texts] == ["1e12 ↑"]


def test_degraded_means_are_open(tmp_path: Path, style: None) -> None:
    for lr, value in zip(LRS, (2.0, 2.05, 2.2), strict=True):
        write_run(tmp_path, lr=lr, loss=value)
        write_run(tmp_path, "qknorm", lr=lr, loss=2.0, logit=2e4 if lr == LRS[1] else 10.0)
    figure = loss_over_lr(read(tmp_path))
    assert figure
    means = lines(figure.axes[0], "mean")
    assert [line.get_markerfacecolor() == "white" for line in means] == [False, False, True, False, True, False]
    assert "0.1 worse, or logits > 10,000" in legend_of(figure)


@pytest.mark.parametrize(("losses", "seen"), [((2.0, 2.1), False), ((5.0, 5.6), True)])
def test_the_loss_at_initialisation_is_drawn_where_it_is_in_view(
    tmp_path: Path, style: None, losses: tuple[float, float], seen: bool
) -> None:
    for lr, loss in zip(LRS, losses, strict=False):
        write_run(tmp_path, lr=lr, loss=loss)
    figure = loss_over_lr(read(tmp_path))
    assert figure
    axes = figure.axes[0]
    assert axes.get_ylim()[1] == pytest.approx(losses[1] + 0.06 * (losses[1] - losses[0]))
    assert [text.get_text() for text in axes.texts] == ["at initialisation"] * seen
    assert [xy(line)[1] for line in axes.lines if xy(line)[0] == [0, 1]] == [[5.5, 5.5]] * seen


def test_the_largest_logit_has_the_line_of_ten_thousand_in_view(sweep: Path, style: None) -> None:
    figure = loss_over_lr(read(sweep))
    assert figure
    axes = figure.axes[1]
    assert [xy(line)[1] for line in axes.lines if xy(line)[0] == [0, 1]] == [[1e4, 1e4]]
    assert axes.get_ylim()[0] < 20 < 1e4 < axes.get_ylim()[1]
    assert all(xy(lines(axes, arm)[0])[1] == [20, 20, 20] for arm in ARMS)


def test_a_row_of_panels_for_each_setting_of_other_keys(tmp_path: Path, style: None) -> None:
    for width in range(8):
        for arm in ("none", "qknorm"):
            for lr in LRS:
                write_run(tmp_path, arm, lr, loss=2.0 + width, logit=None, config={"model": {"d_model": width}})
    figure = loss_over_lr(read(tmp_path))
    assert figure
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"d_model={width}" for width in range(6)]
    assert figure.get_suptitle() == "6 of 8 settings"
    assert xy(lines(figure.axes[3], "none")[0])[1] == [5.0] * 3


@pytest.mark.parametrize(
    ("lrs", "losses", "x", "y"),
    [
        ((1e-3, 1e-2), (2.0, 2.0), ["0.001", "0.01"], ["1.990", "2.000", "2.010"]),
        ((1e-3, 1e-2), (0.0, 0.0), ["0.001", "0.01"], ["−0.02", "0.00", "0.02"]),
        ((1e-3, 1.00001e-3), (2.0, 3.0), ["0.001", "0.00100001"], ["2.0", "2.2", "3.0"]),
        (tuple(1e-4 * 1.5**n for n in range(9)), (0.5, 1.0), ["0.0001", "0.000225", "0.000506", "0.00114"], ["1.0"]),
        ((1e-3, 1e-2), (1e12, 1e12), ["0.001", "0.01"], ["1T"]),
    ],
)
def test_numbers_on_the_axes_are_apart_and_not_alike(
    tmp_path: Path, style: None, lrs: Sequence[float], losses: tuple[float, float], x: list[str], y: list[str]
) -> None:
    for at, lr in enumerate(lrs):
        write_run(tmp_path, lr=lr, loss=losses[at % 2], summary=HIGH_START)
    figure = loss_over_lr(read(tmp_path))
    assert figure
    axes = figure.axes[0]
    found = [[tick.get_text() for tick in ticks] for ticks in (axes.get_xticklabels(), axes.get_yticklabels())]
    assert set(x) <= set(found[0])
    assert set(y) <= set(found[1])
    assert all(len(set(texts)) == len(texts) for texts in found)
    places = [(tick - axes.get_ylim()[0]) / (axes.get_ylim()[1] - axes.get_ylim()[0]) for tick in axes.get_yticks()]
    assert np.diff(places).min() > 0.1


def test_a_sweep_of_the_learning_rate_alone_is_one_line(tmp_path: Path, style: None) -> None:
    for lr in LRS:
        write_run(tmp_path, lr=lr, loss=2 + lr)
    figure = loss_over_lr(read(tmp_path, by=["lr"]))
    assert figure
    assert xy(lines(figure.axes[0], "all runs")[0]) == (list(LRS), [2 + lr for lr in LRS])


# Curves over steps


def test_curves_are_of_the_highest_learning_rate_that_every_arm_has(tmp_path: Path, style: None) -> None:
    for arm in ("none", "qknorm"):
        for lr in LRS:
            if (arm, lr) != ("qknorm", LRS[2]):
                for seed in (0, 1) if arm == "none" else (1, 2):
                    write_run(tmp_path, arm, lr, seed, rows=log(100 * lr + seed / 10))
    figure = curves(read(tmp_path))
    assert figure
    assert figure.get_suptitle() == "lr=0.01, seed 1"
    for line in lines(figure.axes[0], "all values"):
        assert xy(line)[1] == pytest.approx([1.1 + 3 / step for step in range(1, STEPS + 1)])
    assert set(legend_of(figure)) == {"none", "qknorm"}


def test_curves_are_of_the_learning_rate_at_which_arms_differ_most(tmp_path: Path, style: None) -> None:
    """A rate at which all fail alike says nothing of them; one at which some diverge says most."""
    ladders = {"none": [2.0, 2.5, 3.0], "qknorm": [2.0, 2.1, 3.0]}
    for arm, losses in ladders.items():
        for lr, loss in zip(LRS, losses, strict=True):
            write_run(tmp_path, arm, lr, 0, loss, rows=log())
    figure = curves(read(tmp_path))
    assert figure
    assert figure.get_suptitle() == f"lr={LRS[1]:g}, seed 0"
    for arm in ladders:
        write_run(tmp_path, arm, 1.0, 0, None if arm == "none" else 2.0, rows=log(), diverged=arm == "none")
    figure = curves(read(tmp_path))
    assert figure
    assert figure.get_suptitle() == "lr=1, seed 0"


def test_an_arm_without_the_common_seed_says_its_own(tmp_path: Path, style: None) -> None:
    for arm, seed in (("none", 0), ("qknorm", 0), ("zloss", 7)):
        write_run(tmp_path, arm, seed=seed, rows=log())
    figure = curves(read(tmp_path))
    assert figure
    assert figure.get_suptitle() == "seed 0"
    assert set(legend_of(figure)) == {"none", "qknorm", "zloss (seed 7)"}


def test_the_norm_is_logarithmic_and_raw_values_are_drawn(tmp_path: Path, style: None) -> None:
    write_run(tmp_path, rows=log(norm={20: 50.0}))
    write_run(tmp_path, "qknorm", rows=log())
    figure = curves(read(tmp_path))
    assert figure
    loss, norm = figure.axes
    assert (loss.get_yscale(), norm.get_yscale()) == ("linear", "log")
    assert (loss.get_xlabel(), norm.get_ylabel()) == ("optimizer step", "gradient L2 norm before clipping")
    assert len(lines(loss, "all values")) == len(lines(norm, "all values")) == len(lines(norm, "median")) == 2
    assert xy(lines(norm, "all values")[0])[1][19] == 50.0
    assert norm.get_ylim()[1] > 50


def test_spikes_stand_at_their_events_steps_on_their_own_panel(tmp_path: Path, style: None) -> None:
    events = [
        {"step": 18, "event": "grad_norm_spike", "value": 50.0, "length": 4},
        {"step": 31, "event": "grad_norm_spike", "value": 1e30},
        {"step": 12, "event": "loss_spike", "value": 6.0},
        {"step": 15, "event": "level_shift"},
        {"step": 99, "event": "loss_spike"},
    ]
    write_run(tmp_path, rows=log(norm={18: 9.0, 20: 50.0, 31: 1e30}, loss={12: 6.0}), events=events)
    figure = curves(read(tmp_path))
    assert figure
    loss, norm = figure.axes
    assert [xy(line) for line in lines(loss, "loss_spike")] == [([12], [pytest.approx(min(6.0, loss.get_ylim()[1]))])]
    (line,) = lines(norm, "grad_norm_spike")
    assert xy(line) == ([20, 31], [50.0, norm.get_ylim()[1]])
    assert line.get_marker() == "v"
    assert norm.get_ylim()[1] < 1e4
    assert "spike" in legend_of(figure)


def test_a_run_that_ended_early_ends_with_a_cross_at_its_last_finite_value(tmp_path: Path, style: None) -> None:
    write_run(
        tmp_path, rows=log(steps=25, loss={24: 1e12, 25: math.nan}, norm={25: math.inf}), diverged=True, loss=None
    )
    write_run(tmp_path, "qknorm", rows=log())
    figure = curves(read(tmp_path))
    assert figure
    loss, norm = figure.axes
    ((loss_end,), (norm_end,)) = (lines(axes, "ended early") for axes in (loss, norm))
    assert xy(loss_end) == ([24], [loss.get_ylim()[1]])
    assert xy(norm_end) == ([24], [pytest.approx(0.5 + 2 / 24)])
    assert colour(loss_end) == "#000000"
    assert loss.get_ylim()[1] < 10


def test_damaged_events_and_a_log_without_steps_still_make_curves(tmp_path: Path, style: None) -> None:
    rows = [{"train/loss": 2.0}, {"train/loss": 1.0}]
    path = write_run(tmp_path, rows=rows)
    (path / "events.jsonl").write_text("nonsense\n\n{")
    figure = curves(read(tmp_path))
    assert figure
    (axes,) = figure.axes  # no panel of norms, which this log lacks
    assert xy(lines(axes, "all values")[0]) == ([1, 2], [2.0, 1.0])


def test_running_median() -> None:
    short = np.array([3.0, 1.0, 2.0])
    assert running_median(short).tolist() == [3.0, 1.0, 2.0]
    spiky = np.full(120, 1.0)
    spiky[60:62] = 100.0
    assert running_median(spiky).tolist() == [1.0] * 120
    falling = np.arange(120.0, 0.0, -1.0)
    assert running_median(falling).tolist() == falling.tolist()  # the ends are not drawn nearer to the middle


# Attention logits


def test_a_panel_of_all_arms_and_one_of_each_arms_layers(sweep: Path, style: None) -> None:
    figure = attention_logits(read(sweep))
    assert figure
    panels = figure.axes[:-1]  # the last one is the colour bar
    assert [axes.get_title() for axes in panels] == ["largest of all layers", *ARMS]
    assert figure.axes[-1].get_ylabel() == "layer"
    assert {axes.get_yscale() for axes in panels} == {"log"}
    for axes in panels:
        assert [xy(line)[1][0] for line in axes.lines if xy(line)[0] == [0, 1]] == [1e3, 1e4]
    x, y = xy(lines(panels[0], "qknorm")[0])
    assert x == list(range(5, STEPS + 1, 5))
    assert y == pytest.approx([3 * 1.74 * step for step in x])
    third = [line for line in panels[2].lines if line.get_label() == "attn/max_logit/L02"]
    assert xy(third[0])[1] == pytest.approx(y)
    assert len({colour(line) for line in panels[1].lines if "/L0" in str(line.get_label())}) == 3


def test_the_largest_of_the_layers_stands_for_a_column_that_is_missing(tmp_path: Path, style: None) -> None:
    write_run(tmp_path, rows=[{"step": 1, "attn/max_logit/L00": 5.0, "attn/max_logit/L01": 9.0}, {"step": 2}])
    figure = attention_logits(read(tmp_path))
    assert figure
    assert xy(lines(figure.axes[0], "none")[0]) == ([1], [9.0])


def test_logits_without_layers_are_one_panel(tmp_path: Path, style: None) -> None:
    write_run(
        tmp_path, rows=[{"step": step, "attn/max_logit": -1.0 if step == 1 else 10.0 * step} for step in (1, 2, 3)]
    )
    figure = attention_logits(read(tmp_path))
    assert figure
    (axes,) = figure.axes
    assert xy(lines(axes, "none")[0])[1] == pytest.approx([math.nan, 20, 30], nan_ok=True)


# Decision


def test_the_decision_is_that_of_the_sentences(sweep: Path, style: None) -> None:
    comparison = read(sweep)
    figure = decision(comparison)
    assert figure
    best, sensitivity, rates = figure.axes  # nothing says tokens/s
    assert [tick.get_text() for tick in best.get_yticklabels()] == list(ARMS)
    ladders = {ladder.arm: ladder for ladder in comparison.ladders}
    for y, arm in enumerate(ARMS):
        (point,) = lines(sensitivity, arm)
        mean = ladders[arm].sensitivity
        assert mean
        assert xy(point) == ([mean.value], [y])
        change = ladders[arm].difference
        assert (point.get_markerfacecolor() != "white") is bool(change and change.significant)
        (interval,) = (line for line in lines(sensitivity, "interval") if xy(line)[1] == [y, y])
        assert xy(interval)[0] == [mean.low, mean.high]
    assert lines(sensitivity, "qknorm")[0].get_markerfacecolor() != "white"
    for y, one in enumerate(tuned(comparison), start=1):
        assert one.difference
        assert one.difference.significant
        (point,) = lines(best, one.ladder.arm)
        assert xy(point) == ([one.difference.value], [y])
        assert point.get_markerfacecolor() != "white"
    assert not lines(best, "none")
    assert [xy(line)[0] for line in best.lines if xy(line)[1] == [0, 1]] == [[0, 0]]
    # Losses rise by 0.02 a step of the grid, from the lowest rate on.
    assert [xy(lines(rates, arm)[0])[0] for arm in ARMS] == [[1e-3, 1e-2]] * 3
    assert [xy(line) for line in lines(rates, "fair")] == [([], []), ([1e-1], [1]), ([], [])]
    assert [xy(line)[0] for line in lines(rates, "diverged")] == [[1e-1], [], [1e-1]]
    assert not any(xy(line)[0] for line in lines(rates, "far"))
    assert set(legend_of(figure)) >= {"learning rate at which a seed diverged"}


def test_the_decision_shows_what_an_arm_costs_and_what_is_not_resolved(tmp_path: Path, style: None) -> None:
    for lr, loss in ((1e-3, 2.0), (1e-2, 3.0)):
        for seed in range(3):
            write_run(tmp_path, "none", lr, seed, loss + 0.01 * seed, summary={"tokens_per_s": 1000.0})
            write_run(tmp_path, "zloss", lr, seed, loss + 0.2 * (seed % 2), summary={"tokens_per_s": 900.0})
    figure = decision(read(tmp_path))
    assert figure
    best, sensitivity, rates, speed = figure.axes
    assert [lines(axes, "zloss")[0].get_markerfacecolor() for axes in (best, sensitivity)] == ["white", "white"]
    assert [xy(line) for line in lines(rates, "far")] == [([1e-2], [0]), ([1e-2], [1])]
    assert xy(lines(speed, "zloss")[0]) == ([pytest.approx(0.9)], [1])
    assert not lines(speed, "none")


def test_a_wide_interval_is_shown_beside_narrow_ones(tmp_path: Path, style: None) -> None:
    wiggle = {"none": 0.0, "qknorm": 0.1, "softcap": 0.0001, "zloss": 0.0002}
    for lr in LRS[:2]:
        for seed in range(3):
            for arm, size in wiggle.items():
                write_run(tmp_path, arm, lr, seed, 2.0 + size * (seed - 1) ** 2 + lr)
    comparison = read(tmp_path)
    figure = decision(comparison)
    assert figure
    wide = next(one.difference for one in tuned(comparison) if one.ladder.arm == "qknorm")
    assert wide
    assert wide.low is not None
    assert wide.high is not None
    low, high = figure.axes[0].get_xlim()
    assert low < wide.low < wide.high < high
    assert not lines(figure.axes[0], "beyond")


def test_the_decision_is_grouped_by_setting_and_cut_where_it_is_long(tmp_path: Path, style: None) -> None:
    for width in range(15):
        for arm in ARMS[:2]:
            for lr in LRS[:2]:
                write_run(tmp_path, arm, lr, loss=2.0, config={"model": {"d_model": width}})
    figure = decision(read(tmp_path))
    assert figure
    rows = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert rows[:4] == ["d_model=0", "none", "qknorm", "d_model=1"]
    assert len(rows) == 40
    assert figure.get_suptitle() == "the first 40 of 45 rows"


# Differences


def test_significant_differences_are_filled_and_all_have_their_interval(tmp_path: Path, style: None) -> None:
    for seed in range(4):
        write_run(tmp_path, "none", seed=seed, loss=2.0 + 0.01 * seed)
        write_run(tmp_path, "qknorm", seed=seed, loss=1.5 + 0.01 * seed)
        write_run(tmp_path, "zloss", seed=seed, loss=2.0 + 0.2 * (seed % 2))
    comparison = read(tmp_path)
    figure = differences(comparison)
    assert figure
    (axes,) = figure.axes
    by_arm = {row.cell.arm: row.difference for row in comparison.rows}
    for arm, filled in (("qknorm", True), ("zloss", False)):
        (point,) = lines(axes, arm)
        difference = by_arm[arm]
        assert difference
        assert xy(point)[0] == [difference.value]
        assert (point.get_markerfacecolor() != "white") is filled
        (interval,) = (line for line in lines(axes, "interval") if colour(line) == colour(point))
        assert xy(interval)[0] == [difference.low, difference.high]
        assert xy(interval)[1] == xy(point)[1] * 2
    assert not lines(axes, "none")
    assert [xy(line)[0] for line in axes.lines if xy(line)[1] == [0, 1]] == [[0, 0]]
    assert axes.get_xlabel() == "difference to none: validation loss (nats per token)"
    assert axes.get_xlim()[0] < -0.5
    assert axes.texts[0].get_text() == "−0.5"
    assert set(legend_of(figure)) == {"p ≤ 0.05 after Holm, 95% interval", "not significant, or not tested"}


def test_differences_are_grouped_by_setting_and_say_what_is_missing(sweep: Path, style: None) -> None:
    for arm in ("none", "qknorm"):
        write_run(sweep, arm, 1e-4, loss=2.0 + (arm == "qknorm"))
    write_run(sweep, "zloss", 1e-4, loss=None, diverged=True)
    figure = differences(read(sweep))
    assert figure
    (axes,) = figure.axes
    heads_and_arms = [tick.get_text() for tick in axes.get_yticklabels()]
    # At 0.1 the baseline diverged: there is nothing to compare with.
    assert heads_and_arms == [
        "lr=0.0001",
        "qknorm",
        "zloss",
        "lr=0.001",
        "qknorm",
        "zloss",
        "lr=0.01",
        "qknorm",
        "zloss",
    ]
    assert [text.get_text() for text in axes.texts][:2] == ["+1, one seed", "all diverged"]
    rows = [line for arm in ("qknorm", "zloss") for line in lines(axes, arm)]
    assert len(rows) == 5
    assert len({xy(line)[1][0] for line in rows}) == 5


def test_a_difference_out_of_view_is_an_arrow_at_the_edge(tmp_path: Path, style: None) -> None:
    for number, loss in enumerate((2.0, 2.1, 2.2, 2.15, 2.05, 2.12, 1e12)):
        write_run(tmp_path, "none" if number == 0 else f"s{number}", loss=loss, summary=HIGH_START)
    figure = differences(read(tmp_path))
    assert figure
    (axes,) = figure.axes
    assert axes.get_xlim()[1] < 0.3
    (arrow,) = lines(axes, "beyond")
    assert xy(arrow)[0] == [axes.get_xlim()[1]]
    assert [text.get_text() for text in axes.texts][-1] == "+1e+12, one seed"


def test_a_long_list_of_differences_is_cut_and_says_so(tmp_path: Path, style: None) -> None:
    for width in range(41):
        for arm in ARMS:
            write_run(tmp_path, arm, loss=2.0 + (arm == "zloss"), config={"model": {"d_model": width}})
    figure = differences(read(tmp_path))
    assert figure
    (axes,) = figure.axes
    assert axes.get_title() == "the first 80 of 82 differences"
    assert len(lines(axes, "qknorm")) + len(lines(axes, "zloss")) == 80


# Style


@pytest.mark.parametrize(
    ("values", "logarithmic", "expected"),
    [
        ([1.6, 1.62, 1.65, 1.7, 1.75, 5.4], False, (1.6, 1.75)),
        ([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.5], False, (2.0, 2.5)),  # near enough although the quartiles agree
        ([1.0, 2.0, math.nan, math.inf], False, (1.0, 2.0)),
        ([-1e12, 1.0, 2.0, 1.5, 1.2, 1.3], False, (1.0, 2.0)),
        ([1e300, -1e300], False, (-1e100, 1e100)),
        ([1e300, 1e-300], True, (1e-100, 1e100)),
        ([0.0, -3.0, 0.1, 50.0], True, (0.1, 50.0)),
        ([1.0, 1.1, 1.2, 1.3, 1e12], True, (1.0, 1.3)),
        ([1.0, 1.1, 1.2, 1.3, 900.0], True, (1.0, 900.0)),
        ([math.nan], False, None),
        ([-1.0, 0.0], True, None),
    ],
)
def test_view(values: list[float], logarithmic: bool, expected: tuple[float, float] | None) -> None:
    assert styles.view(values, logarithmic) == expected


def test_padded_leaves_the_top_free() -> None:
    low, high = styles.padded(0.0, 1.0, top=0.25)
    assert low == pytest.approx(-0.06)
    assert (1.06 - low) / (high - low) == pytest.approx(0.75)
    assert styles.padded(2.0, 2.0)[0] < 2.0 < styles.padded(2.0, 2.0)[1]
    assert styles.padded(1.0, 100.0, log=True) == pytest.approx((10**-0.12, 10**2.12))


def test_labels() -> None:
    assert styles.label("a$b$") == "a$b$"
    assert styles.label("_x") == " _x"
    assert styles.label("") == " "
    assert styles.label("a\nb\x07") == "a\\nb\\x07"
    long = styles.label("x" * 500, 20, 2).split("\n")
    assert [len(line) for line in long] == [20, 20]
    assert long[1].endswith("…")
    assert styles.brief("beginning_and_end", 9) == "begin…end"
