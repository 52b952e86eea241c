"""Rows of a comparison: what counts in a mean, what is counted apart, and what may be tested."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from stability_lab.compare.comparison import Comparison, compare, finding
from stability_lab.compare.plain_values import as_dict, flat
from stability_lab.compare.run_record import find_runs
from stability_lab.config import ConfigError

NONE = [2.00, 2.10, 2.05]
QKNORM = [1.90, 1.99, 1.97]


def compared(path: Path, **options) -> Comparison:
    return compare(find_runs([path])[0], **options)


@pytest.fixture
def sweep(make_run, tmp_path: Path) -> Path:
    for seed in range(3):
        make_run(f"none{seed}", [], seed=seed, loss=NONE[seed])
        make_run(f"qknorm{seed}", ["qknorm"], seed=seed, loss=QKNORM[seed], tokens_per_s=900.0)
    return tmp_path


@pytest.mark.oracle
def test_the_difference_is_scipys_paired_test(sweep: Path) -> None:
    none, qknorm = compared(sweep).rows
    assert none.is_baseline
    assert none.difference is None
    assert none.metric is not None
    assert none.metric.value == pytest.approx(sum(NONE) / 3)
    assert qknorm.difference is not None
    expected = stats.ttest_rel(QKNORM, NONE)
    assert qknorm.difference.p == pytest.approx(expected.pvalue)
    assert qknorm.p_holm == pytest.approx(expected.pvalue)
    assert finding(qknorm) == "lower"
    assert qknorm.perplexity is not None
    assert qknorm.perplexity.value == pytest.approx(math.exp(sum(QKNORM) / 3))
    assert qknorm.speed == pytest.approx(0.9)
    assert qknorm.memory == pytest.approx(1.0)


def test_pairs_are_made_by_seed_and_not_by_position(make_run, tmp_path: Path) -> None:
    for seed, loss in {0: 2.0, 1: 3.0, 2: 4.0}.items():
        make_run(f"n{seed}", [], seed=seed, loss=loss)
    for seed, loss in {1: 3.1, 2: 4.1, 3: 9.0}.items():
        make_run(f"q{seed}", ["qknorm"], seed=seed, loss=loss)
    row = compared(tmp_path).rows[1]
    assert row.difference is not None
    assert (row.difference.n, row.difference.method) == (2, "paired")
    assert row.difference.value == pytest.approx(0.1)


@pytest.mark.parametrize("loss", [None, math.nan, 7.0])
def test_a_diverged_run_leaves_the_mean_and_is_counted(sweep: Path, make_run, loss) -> None:
    before = compared(sweep).rows[1]
    make_run("bad", ["qknorm"], seed=3, loss=loss, status="diverged", verdict="diverged", exit_code=3)
    comparison = compared(sweep)
    row = comparison.rows[1]
    assert row.metric == before.metric
    assert row.difference == before.difference
    assert len(row.cell.diverged) == 1
    assert len(row.cell.ended) == 4
    assert row.verdicts.count("diverged") == 1
    assert any("1 runs diverged" in note and "bad" in note for note in comparison.notes)


@pytest.mark.parametrize("loss", [6.01, 111.6, math.inf, 10**400, 1e308])
def test_a_run_that_ended_above_its_start_has_diverged_whatever_its_verdict(sweep: Path, make_run, loss) -> None:
    """It began at 5.5: older versions called it no_learning and took it into the mean."""
    before = compared(sweep).rows[1]
    make_run("bad", ["qknorm"], seed=3, loss=None, final={"val/loss": loss}, verdict="no_learning")
    row = compared(sweep).rows[1]
    assert row.metric == before.metric
    assert [run.name for run in row.cell.diverged] == ["bad"]
    assert row.verdicts.count("diverged") == 1


def test_a_run_that_ended_within_half_a_nat_of_its_start_has_not(sweep: Path, make_run) -> None:
    make_run("slow", ["qknorm"], seed=3, loss=5.99, verdict="no_learning")
    row = compared(sweep).rows[1]
    assert row.metric is not None
    assert row.metric.n == 4


def test_an_undecided_run_counts_in_means_and_is_named(sweep: Path, make_run) -> None:
    make_run("short", ["qknorm"], seed=3, loss=1.95, verdict="undecided")
    row = compared(sweep).rows[1]
    assert row.metric is not None
    assert row.metric.n == 4
    assert flat(row, compared(sweep))["undecided"] == 1


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_an_unfinished_run_is_left_out_by_name(sweep: Path, make_run, status: str) -> None:
    before = compared(sweep).rows[1]
    make_run("late", ["qknorm"], seed=3, loss=9.0, status=status)
    comparison = compared(sweep)
    assert comparison.rows[1].metric == before.metric
    assert any(f"1 runs have no result ({status})" in note and "late" in note for note in comparison.notes)


def test_one_seed_gives_no_interval_and_a_warning(make_run, tmp_path: Path) -> None:
    make_run("a", [], loss=2.0)
    make_run("b", ["qknorm"], loss=1.9)
    comparison = compared(tmp_path)
    none, qknorm = comparison.rows
    assert none.metric is not None
    assert none.metric.half is None
    assert qknorm.difference is not None
    assert qknorm.difference.p is None
    assert finding(qknorm) == "one seed: no test"
    assert any("rests on one seed" in note for note in comparison.notes)


def test_an_unresolved_difference_says_how_many_seeds_it_would_take(make_run, tmp_path: Path) -> None:
    for seed, (a, b) in enumerate([(2.0, 2.05), (2.1, 2.08), (1.9, 1.93), (2.0, 2.04), (2.1, 2.15), (2.2, 2.16)]):
        make_run(f"n{seed}", [], seed=seed, loss=a)
        make_run(f"z{seed}", ["zloss"], seed=seed, loss=b)
    row = compared(tmp_path).rows[1]
    assert row.difference is not None
    assert row.difference.seeds_range is not None
    few, many = row.difference.seeds_range
    assert 2 < few < many
    assert finding(row) == (
        "not distinguishable with this budget; a difference of this size, were it the true one, "
        f"takes {few} to {many} new seeds tested alone"
    )


def test_three_pairs_give_no_number_of_seeds(make_run, tmp_path: Path) -> None:
    for seed, (a, b) in enumerate([(2.0, 2.05), (2.1, 2.08), (1.9, 1.93)]):
        make_run(f"n{seed}", [], seed=seed, loss=a)
        make_run(f"z{seed}", ["zloss"], seed=seed, loss=b)
    assert finding(compared(tmp_path).rows[1]) == "not distinguishable with this budget"


def test_runs_with_equal_results_are_identical(make_run, tmp_path: Path) -> None:
    for seed in range(3):
        make_run(f"n{seed}", [], seed=seed, loss=2.0 + seed)
        make_run(f"z{seed}", {"zloss": {"weight": 0}}, seed=seed, loss=2.0 + seed)
    row = compared(tmp_path).rows[1]
    assert finding(row) == "identical to the baseline"
    assert row.p_holm == 1.0


def test_p_is_corrected_over_all_rows(make_run, tmp_path: Path) -> None:
    for seed in range(3):
        make_run(f"n{seed}", [], seed=seed, loss=NONE[seed])
        for name, shift in {"qknorm": 0.0, "zloss": 0.011, "softcap": 0.2}.items():
            make_run(f"{name}{seed}", [name], seed=seed, loss=QKNORM[seed] + shift)
    rows = [row for row in compared(tmp_path).rows if row.difference]
    ps = [row.difference.p for row in rows if row.difference and row.difference.p is not None]
    assert len(ps) == 3
    smallest = min(range(3), key=ps.__getitem__)
    assert rows[smallest].p_holm == pytest.approx(3 * ps[smallest])


def test_the_report_is_one_family(make_run, tmp_path: Path) -> None:
    """Two arms at two rates: four differences, two sensitivities; the gains are among the differences."""
    for lr in (1e-3, 1e-2):
        for seed in range(3):
            make_run(f"n{lr}{seed}", [], lr, seed, NONE[seed] + 10 * lr)
            make_run(f"q{lr}{seed}", ["qknorm"], lr, seed, QKNORM[seed] + 10 * lr)
            make_run(f"z{lr}{seed}", ["zloss"], lr, seed, QKNORM[seed] + 9 * lr + 0.01 * seed**2)
    comparison = compared(tmp_path)
    assert comparison.tests == 6
    assert {row.difference.tests for row in comparison.rows if row.difference} == {6}
    for ladder in comparison.ladders[1:]:
        assert ladder.tuned == (1e-3, 1e-3)
        assert ladder.gain is next(r.difference for r in comparison.rows if r.cell.arm == ladder.arm)
        assert ladder.difference is not None
        assert ladder.difference.tests == 6
    note = f"findings by Holm's rule: {comparison.findings} of 6 tests (differences, LR sensitivities, gains"
    assert any(
        line.startswith(note) and line.endswith("without the rule 0.3 would be expected") for line in comparison.notes
    )


def test_the_notes_say_where_seeds_are_taken_out(make_run, tmp_path: Path) -> None:
    """At 0.001 the three arms agree on what a seed costs, at 0.01 they do not."""
    noise = ((0.0, 0.0, 0.01), (0.0, 0.01, 0.0), (0.01, 0.0, 0.0))
    for arm, (name, own) in enumerate(zip(([], ["qknorm"], ["zloss"]), noise, strict=True)):
        for seed in range(3):
            make_run(f"a{arm}{seed}", name, 1e-3, seed, 2 + seed + own[seed])
            make_run(f"b{arm}{seed}", name, 1e-2, seed, 2 + own[seed])
    (note,) = [note for note in compared(tmp_path).notes if "F test" in note]
    assert "(F test over all arms, 5%): lr=0.001; elsewhere" in note
    assert note.endswith("(Welch): lr=0.01")


def test_one_pair_and_the_first_job_say_nothing_of_speed(make_run, tmp_path: Path) -> None:
    for seed in range(3):
        jobs = {"earlier_jobs": 2 * seed}, {"earlier_jobs": 2 * seed + 1}
        make_run(f"n{seed}", [], seed=seed, manifest=jobs[0], tokens_per_s=500.0 if seed == 0 else 1000.0)
        make_run(f"q{seed}", ["qknorm"], seed=seed, manifest=jobs[1], tokens_per_s=900.0)
        speed = compared(tmp_path).rows[1].speed
        assert speed == (None if seed < 2 else pytest.approx(0.9))


def test_memory_is_counted_on_a_cpu_and_the_peak_on_a_gpu(make_run, tmp_path: Path) -> None:
    make_run("n", [])
    make_run("q", ["qknorm"], manifest={"training_bytes": 17_000_000})
    assert compared(tmp_path).rows[1].memory == pytest.approx(17 / 16)
    for name, peak in {"n": 4e9, "q": 5e9}.items():
        device = {"device": "NVIDIA H200"}
        make_run(
            f"gpu{name}", [] if name == "n" else ["qknorm"], 1e-1, manifest=device, **{"perf/peak_memory_bytes": peak}
        )
    assert compared(tmp_path).rows[3].memory == pytest.approx(5 / 4)


def test_degraded_is_what_one_run_cannot_know(make_run, tmp_path: Path) -> None:
    make_run("best", [], 3e-3, loss=1.7)
    make_run("worse", [], 3e-2, loss=1.81)
    make_run("near", ["qknorm"], 3e-2, loss=1.79)
    make_run("hot", ["qknorm"], 3e-3, loss=1.7, max_attn_logit=1.2e4)
    degraded = {row.cell.runs[0].name: row.degraded for row in compared(tmp_path).rows}
    assert degraded == {"best": 0, "worse": 1, "near": 0, "hot": 1}


def test_spike_scores_are_pooled_and_have_a_resolution(sweep: Path) -> None:
    rate = compared(sweep).rows[0].spikes["grad_norm"]
    assert (rate.definition, rate.spikes, rate.scored) == ("olmo_core", 3, 516)
    assert rate.score == pytest.approx(100 * 3 / 516)
    assert rate.resolution == pytest.approx(100 / 516)


def test_any_final_value_can_be_the_metric(sweep: Path) -> None:
    comparison = compared(sweep, metric="clip_fraction")
    assert comparison.rows[0].metric is not None
    assert comparison.rows[0].metric.value == pytest.approx(0.1)
    assert comparison.rows[0].perplexity is None
    with pytest.raises(ConfigError, match="--metric val/los: no run has it: did you mean val/loss"):
        compared(sweep, metric="val/los")


def test_a_busy_machine_is_noticed(make_run, tmp_path: Path) -> None:
    make_run("a", seed=0, tokens_per_s=1000.0)
    make_run("b", seed=1, tokens_per_s=400.0)
    assert compared(tmp_path).busy is None  # the first job of a process is slow for other reasons
    make_run("c", seed=2, tokens_per_s=1000.0)
    assert any("by up to a factor of 2.5" in note for note in compared(tmp_path).notes)


def test_all_of_it_is_plain_json(sweep: Path, make_run) -> None:
    make_run("bad", ["qknorm"], 1e-1, loss=math.inf, status="diverged", verdict="diverged")
    content = json.loads(json.dumps(as_dict(compared(sweep))))
    assert content["baseline"] == "none"
    assert {row["arm"] for row in content["rows"]} == {"none", "qknorm"}


# Whether runs may be compared at all


MISMATCHES = {
    "data": {"data": {"fingerprint": "other", "first_batch": "first0", "last_batch": "last0", "validation": "v" * 16}},
    "first batch": {
        "data": {"fingerprint": "d" * 64, "first_batch": "x", "last_batch": "last0", "validation": "v" * 16}
    },
    "last batch": {
        "data": {"fingerprint": "d" * 64, "first_batch": "first0", "last_batch": "x", "validation": "v" * 16}
    },
    "evaluation windows": {
        "data": {"fingerprint": "d" * 64, "first_batch": "first0", "last_batch": "last0", "validation": "x"}
    },
    "shared initial weights": {"init": {"embed.weight": "other"}},
    "precision": {"precision": "bf16"},
    "compile": {"compile": "full"},
    "implementation": {"implementation": "reference"},
    "attention back-end": {"attention": {"backend": "explicit"}},
    "threads": {"threads": 1},
    "processes": {"ranks": 2},
    "device": {"device": "NVIDIA H200"},
    "platform": {"platform": "Windows-11"},
    "deterministic kernels": {"deterministic": True},
    "torch": {"versions": {"torch": "2.11.0", "stability_lab": "0.1.0", "python": "3.11.7", "numpy": "2.4.6"}},
    "code revision": {"git": {"revision": "1" * 40, "dirty": False}},
    "Python": {"versions": {"torch": "2.13.0", "stability_lab": "0.1.0", "python": "3.12.1", "numpy": "2.4.6"}},
}
UNPAIRED = {"data", "first batch", "last batch", "evaluation windows", "shared initial weights"}


@pytest.mark.parametrize("name", MISMATCHES)
def test_each_mismatch_is_named_and_takes_pairs_away_where_it_must(make_run, tmp_path: Path, name: str) -> None:
    make_run("a0", [], seed=0)
    make_run("a1", [], seed=1)
    make_run("b0", ["qknorm"], seed=0, manifest=MISMATCHES[name])
    make_run("b1", ["qknorm"], seed=1)
    comparison = compared(tmp_path)
    wrong = [check.name for check in comparison.checks if check.same is False]
    assert wrong == [name]
    assert comparison.paired == (name not in UNPAIRED)
    assert comparison.rows[1].difference is not None
    assert comparison.rows[1].difference.method == ("welch" if name in UNPAIRED else "paired")


def test_without_a_mismatch_all_is_the_same(sweep: Path) -> None:
    comparison = compared(sweep)
    assert {check.same for check in comparison.checks} == {True}
    assert comparison.paired


def test_runs_that_do_not_say_are_unknown_and_no_pairs(make_run, tmp_path: Path) -> None:
    make_run("a", [])
    make_run("b", ["qknorm"])
    for folder in (tmp_path / "sweep").iterdir():
        (folder / "manifest.json").unlink()
    comparison = compared(tmp_path)
    assert not comparison.paired
    assert next(check for check in comparison.checks if check.name == "data").same is None


def test_data_may_differ_between_settings(make_run, tmp_path: Path) -> None:
    """Arms are compared within a setting, so that two corpora are no mismatch but two answers."""
    for name in ("sotu", "stdlib"):
        data = {"fingerprint": name, "first_batch": name, "last_batch": name, "validation": name}
        for arm in ([], ["qknorm"]):
            make_run(
                f"{name}{len(arm)}",
                arm,
                config={"data": {"_target_": f"data.{name}", "val_every": 20}},
                manifest={"data": data},
            )
    comparison = compared(tmp_path)
    assert comparison.grouping.setting == ("data",)
    assert {cell.setting["data"] for cell in comparison.grouping.cells} == {"sotu", "stdlib"}
    assert comparison.paired


def test_an_arm_that_is_missing_somewhere_is_named(make_run, tmp_path: Path) -> None:
    make_run("a", [], 1e-3)
    make_run("b", ["qknorm"], 1e-3)
    make_run("c", [], 1e-2)
    check = next(check for check in compared(tmp_path).checks if check.name == "settings")
    assert check.detail == "no run of qknorm in 1 of 2 settings"


def test_data_that_differ_between_learning_rates_are_a_mismatch(make_run, tmp_path: Path) -> None:
    """A sweep that was extended later on other data: the ladder would mix them."""
    other = {"fingerprint": "other", "first_batch": "first0", "last_batch": "last0", "validation": "v" * 16}
    for arm in ([], ["qknorm"]):
        make_run(f"a{len(arm)}", arm, 1e-3)
        make_run(f"b{len(arm)}", arm, 1e-2, manifest={"data": other})
    comparison = compared(tmp_path)
    assert [check.name for check in comparison.checks if check.same is False] == ["data"]
    assert not comparison.paired
    from stability_lab.compare import text_report as report

    made = report.text(comparison)
    assert "LR sensitivity*" in made
    assert "With care: data differs" in made


def test_uncommitted_code_is_said(make_run, tmp_path: Path) -> None:
    make_run("a", [], manifest={"git": {"revision": "0" * 40, "dirty": True}})
    make_run("b", ["qknorm"])
    check = next(check for check in compared(tmp_path).checks if check.name == "uncommitted code")
    assert check.detail == "1 runs (none) had changes beside their revision"


@pytest.mark.parametrize("loss", [math.nan, "many", [1]])
def test_a_run_that_completed_without_a_finite_loss_is_named(sweep: Path, make_run, loss) -> None:
    make_run("odd", ["qknorm"], seed=3, final={"val/loss": loss})
    comparison = compared(sweep)
    row = comparison.rows[1]
    assert row.metric is not None
    assert row.metric.n == 3
    assert any("1 runs have no finite val/loss and are in no mean: odd" in note for note in comparison.notes)
    from stability_lab.compare import text_report as report

    line = next(line for line in report.text(comparison).splitlines() if line.startswith("qknorm"))
    assert line.split()[1:4] == ["3", "of", "4"]


def test_a_running_run_is_not_among_the_seeds(sweep: Path, make_run) -> None:
    make_run("late", ["qknorm"], seed=3, loss=9.0, status="running")
    from stability_lab.compare import text_report as report

    line = next(line for line in report.text(compared(sweep)).splitlines() if line.startswith("qknorm"))
    assert line.split()[1] == "3"


def test_scores_that_are_no_numbers_do_not_count(make_run, tmp_path: Path) -> None:
    make_run("a", scores={"grad_norm": {"robust": {"score": "high", "n_spikes": "many", "n_scored": 5}}})
    rate = compared(tmp_path).rows[0].spikes["grad_norm"]
    assert (rate.score, rate.spikes) == (None, 0)


def test_runs_that_cannot_be_read_are_in_the_notes(sweep: Path, make_run) -> None:
    (make_run("bad") / "summary.json").unlink()
    runs, faults = find_runs([sweep])
    comparison = compare(runs, faults=faults)
    assert any(note.startswith("left out: ") and "bad" in note for note in comparison.notes)


def test_an_attention_logit_that_is_not_finite_is_the_largest(make_run, tmp_path: Path) -> None:
    make_run("a", seed=0, max_attn_logit=math.nan)
    make_run("b", seed=1)
    assert compared(tmp_path).rows[0].max_attn_logit == math.inf
