"""What every command ends with, and how wide its tables are: on real runs, in a terminal of 80 columns."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from stability_lab.cli import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: tuple[str, ...]) -> Path:
    """A folder with a blank in its name, in which a sweep of 2 stabilizers x 2 rates x 2 seeds lies."""
    folder = tmp_path_factory.mktemp("my runs")
    words = [f"output_dir={folder}", "group=a_sweep", "seed=0,1", "optimizer.lr=0.01,0.1", "+stabilizer=none,qknorm"]
    assert run(["train", "-m", *tiny_overrides, *words]) == 0
    return folder


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """`shown(*words)`: the lines of a command in a terminal of 80 columns."""

    def lines(*words: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", "80")
        capsys.readouterr()
        assert run(list(words)) == 0, capsys.readouterr()
        return capsys.readouterr().out.splitlines()

    return lines


def following(lines: list[str]) -> list[str]:
    """The words of the command that the last line names."""
    first, *words = shlex.split(lines[-1])
    assert (first, words[:3]) == ("next:", ["python", "-m", "stability_lab"])
    assert sum(line.startswith("next: ") for line in lines) == 1
    return words[3:]


def widest(lines: list[str]) -> int:
    """Of what is no command, for a command is one line for the shell."""
    return max(len(line) for line in lines if not line.startswith(("next: ", "  python ", "python ")))


def test_from_a_table_of_runs_to_a_comparison_to_suggestions(place: Path, shown) -> None:
    listed = shown("runs", str(place))
    assert widest(listed) <= 80
    assert any("--wide" in line for line in listed)
    assert "created" in "\n".join(shown("runs", str(place), "--wide")).split("\n")[1]
    compared = following(listed)
    assert compared == ["compare", str(place / "a_sweep")]
    report = shown(*compared)
    assert widest(report) <= 80
    whole = shown(*compared, "--wide")
    assert "tokens/s" in "".join(whole)
    assert not any("left out for want of room" in line for line in whole)
    suggested = following(report)
    assert suggested == ["compare", "--suggest", str(place / "a_sweep")]
    assert any(line.startswith("  python -m stability_lab train -m ") for line in shown(*suggested))


def test_from_a_run_to_its_score_to_its_neighbours(place: Path, shown, tiny_overrides: tuple[str, ...]) -> None:
    arguments = [*tiny_overrides, f"output_dir={place}", "group=alone", "seed=0"]
    (scored, path) = following(shown("train", *arguments))
    assert (scored, Path(path).parent) == ("score", place / "alone")
    block = shown(scored, path)
    assert widest(block[1:]) <= 80  # below the path
    assert following(block) == ["compare", str(place / "alone")]
    assert following(shown("evaluate", path)) == ["score", path]
    assert following(shown("train", *arguments, "seed=1")) == ["compare", str(place / "alone")]
    assert following(shown("train", *arguments, "if_exists=skip")) == ["compare", str(place / "alone")]


def test_from_a_plan_to_its_run(place: Path, shown, tiny_overrides: tuple[str, ...]) -> None:
    arguments = [*tiny_overrides, f"output_dir={place / 'planned'}", "run_name=a_b"]
    planned = shown("plan", *arguments, "--wide")
    assert following(planned) == ["train", *arguments]
    assert widest(shown("plan", *arguments)) <= 80
    assert following(shown(*following(planned))) == ["score", str(place / "planned" / "runs" / "a_b")]


def test_from_text_to_tokens_to_a_run(place: Path, shown, tiny_overrides: tuple[str, ...]) -> None:
    book = place / "my book.txt"
    book.write_text("\n\n".join(f"The {n}th of many lines that are not much alike, {n * n}." for n in range(3000)))
    made = place / "its ids"
    prepared = shown("data", "prepare", "data=text", f"data.path={book}", "tokenizer=bytes", f"--out={made}")
    train = following(prepared)
    assert train == ["train", "data=tokens", f"data.path={made}", "tokenizer=bytes"]
    assert following(shown(*train, *tiny_overrides, f"output_dir={place / 'of ids'}"))[0] == "score"


def test_lists_lead_to_one_of_them(shown) -> None:
    stabilizers = shown("stabilizers")
    assert widest(stabilizers) <= 80
    page = shown(*following(stabilizers))
    assert following(page) == ["train", "+stabilizer=qknorm"]
    reproductions = shown("reproduce")
    assert widest(reproductions) <= 80
    assert following(reproductions) == ["reproduce", "textbook", "--dry-run"]


def test_a_log_of_somebody_else_leads_to_all_that_is_known_of_it(tmp_path: Path, shown) -> None:
    log = tmp_path / "a log.csv"
    log.write_text("step,loss\n" + "\n".join(f"{n},{5 - n / 400}" for n in range(1, 401)))
    assert following(shown("score", str(log))) == ["score", "--format", "json", str(log)]


@pytest.mark.parametrize(
    "words", [("runs",), ("compare",), ("compare", "--format=md"), ("compare", "--format=csv")], ids=" ".join
)
def test_what_programs_read_ends_with_no_command(words: tuple[str, ...], place: Path, shown) -> None:
    form = () if len(words) > 1 else ("--format", "json")
    assert not any(line.startswith("next: ") for line in shown(*words, str(place / "a_sweep"), *form))
