"""A comparison in every format that people paste somewhere."""

from __future__ import annotations

import csv as csv_reader
import io
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from stability_lab.compare import text_report as report
from stability_lab.compare.comparison import Comparison, compare
from stability_lab.compare.run_record import find_runs
from stability_lab.compare.statistics import Difference, Mean
from stability_lab.compare.tables import escape_latex, escape_markdown, latex_table, markdown_table, p_text
from stability_lab.text import Table, text_table


@pytest.fixture
def comparison(make_run, tmp_path: Path) -> Comparison:
    for lr in (3e-3, 3e-2):
        for seed in range(3):
            make_run(f"n{lr}{seed}", [], lr, seed, 1.0 / 3 + lr + 0.01 * seed, train_loss=1)
            make_run(f"q{lr}{seed}", ["qknorm"], lr, seed, 1.0 / 3 + 0.013 * seed)
    make_run("bad", ["zloss"], 3e-2, 0, math.nan, status="diverged", verdict="diverged")
    return compare(find_runs([tmp_path])[0])


def test_the_perplexity_of_masked_tokens_is_named_so(make_run, tmp_path: Path) -> None:
    for seed in range(2):
        make_run(f"n{seed}", [], seed=seed, final={"val/masked_ppl": math.exp(2.0)})
        make_run(f"q{seed}", ["qknorm"], seed=seed, final={"val/masked_ppl": math.exp(2.0)})
    made = compare(find_runs([tmp_path])[0])
    for text in (report.csv(made), report.text(made)):
        assert "val/masked_ppl" in text
        assert "val/ppl" not in text


def test_csv_has_one_header_line_and_full_precision(comparison: Comparison) -> None:
    made = report.csv(comparison)
    table = pd.read_csv(io.StringIO(made))
    assert table.shape[0] == len(comparison.rows) == 5
    assert next(iter(csv_reader.reader([made.splitlines()[0]]))) == list(table.columns)
    first = comparison.rows[0].metric
    assert first is not None
    assert float(made.splitlines()[1].split(",")[list(table.columns).index("val/loss")]) == first.value
    assert float(table["val/loss high"].tolist()[0]) == pytest.approx(first.high, rel=1e-15)
    assert table["optimizer.lr"].tolist() == [0.003, 0.003, 0.03, 0.03, 0.03]
    bad = table[table["arm"] == "zloss"].iloc[0]
    assert math.isnan(bad["val/loss"])
    assert (bad["diverged"], bad["n"]) == (1, 0)


def test_json_is_strict_and_holds_the_command(comparison: Comparison) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    content = json.loads(report.to_json(comparison, "compare x"), parse_constant=refuse)
    assert content["command"] == "compare x"
    first = comparison.rows[0].metric
    assert first is not None
    assert content["rows"][0]["val/loss"] == first.value
    assert {check["name"] for check in content["checks"]} >= {"data", "precision", "threads"}
    assert len(content["learning_rates"]) == 3
    assert content["learning_rates"][1]["ratio"] == [0.0, "Infinity"]


def test_the_text_says_all_of_it(comparison: Comparison) -> None:
    made = report.text(comparison)
    for words in ("Comparable?", "Loss\n", "Stability and cost", "Learning rates", "Decision", "Notes"):
        assert words in made
    assert "1 runs diverged" in made
    assert "difference to none" in made
    assert max(map(len, made.split("Learning rates: ")[0].splitlines())) < 200


def test_markdown_tables_are_whole(comparison: Comparison) -> None:
    made = report.markdown(comparison)
    for block in re.findall(r"(?:^\|.*\n?)+", made, flags=re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().splitlines()}
        assert len(widths) == 1
    assert len([line for line in made.splitlines() if line.startswith("| --- |")]) == 3


def test_strangers_text_stays_text() -> None:
    table = Table("t", ("a|b",), (("<script>x</script> [x](y) `z` *e* _f_ \x1b[2J",),))
    made = markdown_table(table)
    assert "<" not in made
    assert "\x1b" not in made
    assert made.splitlines()[0] == "| a\\|b |"
    assert escape_markdown("[x](y)") == "\\[x\\](y)"
    assert "\x1b" not in text_table(table)


def test_latex_is_escaped_and_balanced(comparison: Comparison) -> None:
    assert escape_latex(r"50% of_a & b #1 {x} ~^\ $5 < ± [2]") == (
        r"50\% of\_a \& b \#1 \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} \$5 $<$ $\pm$ {[}2{]}"
    )
    made = report.latex(comparison)
    assert made.count(r"\begin{tabular}") == made.count(r"\end{tabular}") == made.count(r"\toprule") == 3
    assert made.count("{") == made.count("}")
    body = made.split(r"\midrule")[1].split(r"\bottomrule")[0]
    columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", made)
    assert columns is not None
    for line in body.strip().splitlines():
        assert line.count(" & ") == len(columns[1]) - 1
        assert line.endswith(r" \\")
    assert latex_table(Table("x", ("a",), (("1.5",),))).count(r"{r}") == 1


@pytest.mark.parametrize(
    ("mean", "words"),
    [
        (None, "-"),
        (Mean(1.7712, 1.7590, 1.7834, 3), "1.771 ± 0.012"),
        (Mean(1.7712, None, None, 1), "1.771"),
        (Mean(153.21, 150.0, 156.42, 3), "153.2 ± 3.2"),
        (Mean(0.0123, 0.01, 0.0146, 3), "0.01230 ± 0.00230"),
        (Mean(1e12, None, None, 1), "1e12"),
        (Mean(5.53e239, 1e239, 1.006e240, 3), "5.53e239 ± 4.53e239"),
        (Mean(50257.4, 40000.0, 60514.8, 3), "50257 ± 10257"),
    ],
)
def test_means_have_the_digits_that_a_reader_needs(mean, words: str) -> None:
    assert report.mean_text(mean) == words


def test_differences_have_a_sign_and_an_interval() -> None:
    assert report.difference_text(None) == "-"
    assert report.difference_text(Difference(-0.0123, -0.02, -0.0046, 0.01, 3, "paired")) == (
        "-0.0123 [-0.0200, -0.0046]"
    )
    assert report.difference_text(Difference(0.5, None, None, None, 1, "paired")) == "+0.5000"
    assert [p_text(p) for p in (1e-6, 0.0123, 0.5)] == ["< 0.0001", "0.012", "0.50"]


def test_a_mismatch_marks_the_columns_that_it_spoils(make_run, tmp_path: Path) -> None:
    make_run("a")
    make_run("b", ["softcap"], manifest={"attention": {"backend": "explicit"}})
    made = report.text(compare(find_runs([tmp_path])[0]))
    assert "tokens/s†" in made
    assert "val/loss*" not in made
    assert "attention back-end differs, sdpa (none), explicit (softcap)" in made


def test_a_busy_machine_gives_no_ratio_of_speeds(make_run, tmp_path: Path) -> None:
    for seed, speed in enumerate((1000.0, 500.0, 1000.0)):
        make_run(f"n{seed}", [], seed=seed, tokens_per_s=speed)
        make_run(f"q{seed}", ["qknorm"], seed=seed, tokens_per_s=900.0)
    made = report.text(compare(find_runs([tmp_path])[0]))
    row = next(line for line in made.splitlines() if line.split()[:2] == ["qknorm", "stable"])
    assert "  900  " in row
    assert "of a busy machine" in made
    assert "not measured (busy machine)" in made
