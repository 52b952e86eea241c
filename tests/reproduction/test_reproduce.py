"""The command: shows, runs, resumes, reports to the byte, and refuses in one sentence."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from stability_lab.commands import train as launch
from stability_lab.compare import figures
from stability_lab.compare.run_record import RunRecord
from stability_lab.reproduction import jobs
from stability_lab.reproduction.catalogue import find
from stability_lab.reproduction.claim_verdicts import CONTRADICTS
from stability_lab.reproduction.datafile import data_path, write
from stability_lab.reproduction.evidence import KeptRun, PartEvidence


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_without_a_name_it_lists_what_there_is(run_command) -> None:
    shown = run_command("reproduce")
    assert shown.code == 0
    for word in ("textbook", "nvidia", "olmo2", "small_scale_proxies", "lr_sensitivity", "training"):
        assert word in shown.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["textbok"], "there is no such reproduction: did you mean textbook?"),
        (["textbook", "--part", "nmbers"], "--part nmbers: textbook has no such part: did you mean numbers?"),
        (["TEXTBOOK"], "there is no such reproduction: did you mean textbook?"),
        (["textbook", "--scale", "full"], "--scale full: textbook numbers: not made at this scale, but no other part"),
        (
            ["textbook", "--part", "training", "--scale", "full"],
            "textbook ramps, attn_scale, norms, placements, seeds: not",
        ),
        (["textbook", "--part="], "--part '': textbook has no such part"),
        (["textbook", "--out", "a" * 300], ": File name too long: give another folder"),
        (["textbook", "--scale", "h200"], "textbook numbers: not made at this scale, but --part ramps has"),
        (["textbook", "--scale", "big"], "invalid choice: 'big'"),
        (["--part", "numbers"], "name one of textbook, nvidia, olmo2"),
        (["textbook", "--dry-run", "--report-only"], "not allowed with argument"),
        (["textbook", "--report-only", "--out", "nowhere"], "--out nowhere: nowhere/data holds no data of textbook"),
        (["textbook", "--out", "file"], "--out file: file/data cannot be written: Not a directory: give another"),
        (["textbook", "--out", "file/sub"], "--out file/sub: file/sub/data cannot be written: Not a directory"),
        (["textbook", "--out", "/proc/nowhere"], "--out /proc/nowhere: /proc/nowhere"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, run_command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine", encoding="utf-8")
    shown = run_command("reproduce", *words)
    assert shown.code == 2
    assert sentence in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert files(tmp_path) == {"file": b"mine"}


@pytest.mark.slow
def test_a_dry_run_shows_commands_sizes_and_time_and_touches_nothing(tiny, run_command) -> None:
    shown = run_command("reproduce", "tiny", "--part", "all", "--dry-run")
    assert shown.code == 0, shown.err
    assert not list(tiny.iterdir())
    commands = [line for line in shown.out.splitlines() if line.startswith("python -m stability_lab train -m")]
    assert len(commands) == 4
    assert "group=tiny_norms_cpu" in commands[0]
    assert "from a few steps of its first run" in shown.out
    assert "total" in shown.out


@pytest.mark.slow
def test_sizes_of_the_papers_need_no_gpu_to_be_shown(run_command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "_has_cuda", lambda: False)
    shown = run_command("reproduce", "nvidia", "--part", "perplexity", "--scale", "full", "--dry-run")
    assert shown.code == 0
    assert "826M" in shown.out
    assert "200B" in shown.out
    assert "an assumed 30% of an H200's peak" in shown.out
    assert files(tmp_path) == {}


@pytest.mark.slow
def test_runs_are_made_once_and_the_page_is_rebuilt_to_the_byte(tiny, run_command, monkeypatch) -> None:
    drawn = []
    draw = figures.draw

    def noted(comparison, *args, **options):
        drawn.append(comparison.grouping.arms)
        return draw(comparison, *args, **options)

    monkeypatch.setattr(figures, "draw", noted)
    shown = run_command("reproduce", "tiny", "--part", "all")
    assert shown.code == 0, shown.err
    assert "equal within 5" in shown.out
    out = tiny / "outputs" / "reproduction"
    made = sorted(path.parent.name for path in out.glob("*/*/summary.json"))
    assert len(made) == 8
    page = (out / "tiny.md").read_bytes()
    data = {name: content for name, content in files(out).items() if name.startswith("data/")}
    assert set(data) == {"data/tiny_norms_cpu.jsonl", "data/tiny_ladder_cpu.jsonl"}
    pictures = re.findall(r"!\[[^]]+\]\((figures/[^)]+)\)", page.decode())
    names = ("norms_cpu/differences", "norms_cpu/curves")
    names = ("ladder_cpu/differences", "ladder_cpu/curves", "ladder_cpu/pair/curves", *names)
    assert pictures == [f"figures/tiny_{name}.png" for name in names]
    assert all((out / picture).is_file() for picture in pictures)
    # Figures call arms as the tables do, and not by their stabilizers, of which `layernorm` has none here.
    assert drawn == [("layernorm", "rmsnorm"), ("none", "qknorm"), ("none", "qknorm")]
    assert b"not built yet" in page
    assert b"a\\|b: 0.5 \xc2\xb10.1" in page
    norms = [json.loads(line) for line in data["data/tiny_norms_cpu.jsonl"].splitlines()]
    assert {(line["arm"], line["seed"]) for line in norms[1:]} == {
        (a, s) for a in ("layernorm", "rmsnorm") for s in (0, 1)
    }
    assert "log_injected_ratio" in norms[1]["summary"]["final"]
    # Again: nothing is left to do, and nothing changes.
    again = run_command("reproduce", "tiny", "--part", "all")
    assert again.code == 0
    assert "all runs are there" in again.out
    assert sorted(path.parent.name for path in out.glob("*/*/summary.json")) == made
    assert (out / "tiny.md").read_bytes() == page
    # From the small files alone, elsewhere.
    copy = tiny / "copy"
    for name, content in data.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    assert run_command("reproduce", "tiny", "--report-only", "--out", "copy").code == 0
    assert (copy / "tiny.md").read_bytes() == page
    # A run that is missing is made anew, and the others are not.
    victim = next(out.glob("tiny_norms_cpu/*/summary.json"))
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/*/summary.json") if path != victim}
    shutil.rmtree(victim.parent)
    third = run_command("reproduce", "tiny")
    assert third.code == 0
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    assert sum(1 for _ in out.glob("tiny_norms_cpu/*/summary.json")) == 4


@pytest.mark.slow
def test_a_stop_in_a_later_part_leaves_the_page_of_the_earlier_ones(tiny, run_command, monkeypatch) -> None:
    calls, train = itertools.count(), launch.main
    monkeypatch.setattr(launch, "main", lambda words, **_: train(words) if next(calls) < 2 else 130)
    shown = run_command("reproduce", "tiny", "--part", "all")
    assert shown.code == 130
    assert "stopped: 0 of 4 runs of ladder are there; the same command goes on" in shown.err
    page = (tiny / "outputs" / "reproduction" / "tiny.md").read_text(encoding="utf-8")
    assert "equal within 5" in page
    assert "not run yet" in page


HEAD = {"name": "tiny", "part": "norms", "scale": "cpu", "commands": ["c"], "date": "d", "versions": {}}
SUMMARY = {"status": "completed", "sensitivity": {}, "steps": 1, "tokens": 1, "initial": {}, "scores": {}}
SUMMARY |= {"final": {"val/loss": 2.0}}
MANIFEST = {"created": "d", "data": dict.fromkeys(("fingerprint", "first_batch", "last_batch", "validation"), "d")}


def data_of_norms(out: Path, *seeds: int) -> Path:
    """Of the part `norms`, with a run of each arm and seed."""
    part = find("tiny").parts["norms"]
    path = data_path(part, "cpu", out)
    path.parent.mkdir(parents=True)
    runs, kept = [], []
    for arm, seed in itertools.product(part.arms, seeds):
        summary = {**SUMMARY, "final": {"val/loss": 2.0 + 0.1 * seed}}
        config = {"optimizer": {"lr": 0.1}, "seed": seed, "stabilizer": {}}
        runs.append(KeptRun(arm, "", None, seed, RunRecord(out, config, MANIFEST, summary)))
        kept.append({"config": config, "manifest": MANIFEST, "summary": summary})
    write(path, PartEvidence(HEAD, tuple(runs)), kept)
    return path


def test_what_was_not_run_says_so(tiny, run_command) -> None:
    data_of_norms(Path("out"), 0)
    shown = run_command("reproduce", "tiny", "--part", "all", "--report-only", "--out", "out")
    assert shown.code == 0, shown.err
    page = Path("out/tiny.md").read_text(encoding="utf-8")
    assert page.count("not run yet") == 2  # a claim, and the number of such
    assert "Not run yet at any scale." in page
    for text in (page, shown.out):
        assert "Incomplete: 2 of 4 runs have a result." in text


def test_a_page_is_never_replaced_by_one_with_less(tiny, run_command) -> None:
    out = tiny / "out"
    path = data_of_norms(out, 0, 1)
    command = ("reproduce", "tiny", "--report-only", "--out", "out")
    assert run_command(*command).code == 0
    page = (out / "tiny.md").read_bytes()
    ladder = find("tiny").parts["ladder"]
    write(data_path(ladder, "cpu", out), PartEvidence({**HEAD, "part": "ladder"}))
    path.unlink()
    shown = run_command(*command)
    assert shown.code == 2
    assert "out/tiny.md shows norms at cpu, of which out/data has no data: put them back" in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    data_path(ladder, "cpu", out).unlink()
    assert "out/data holds no data of tiny" in run_command(*command).err
    assert (out / "tiny.md").read_bytes() == page


def test_damaged_data_are_refused_before_any_run(tiny, run_command, monkeypatch) -> None:
    monkeypatch.setattr(launch, "main", lambda words, **_: pytest.fail("a run was started"))
    data_of_norms(Path("out"), 0).write_text("{", encoding="utf-8")
    shown = run_command("reproduce", "tiny", "--part", "ladder", "--out", "out")
    assert shown.code == 2
    assert "tiny_norms_cpu.jsonl is damaged" in shown.err
    assert len(shown.err.strip().splitlines()) == 1


@pytest.mark.slow
def test_data_are_never_replaced_by_data_of_fewer_runs(tiny, run_command, monkeypatch) -> None:
    assert run_command("reproduce", "tiny").code == 0
    out = tiny / "outputs" / "reproduction"
    known = {path: path.read_bytes() for path in (out / "tiny.md", *out.glob("data/*"))}
    victim = next(out.glob("tiny_norms_cpu/*/summary.json")).parent
    shutil.rmtree(victim)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "main", lambda words, **_: 1)
        shown = run_command("reproduce", "tiny")
    assert shown.code == 1
    assert "norms: 3 of 4 runs have a result" in shown.err
    assert "tiny_norms_cpu.jsonl holds 1 that are not there any more and is kept: delete it to replace it" in shown.err
    assert {path: path.read_bytes() for path in known} == known
    (data,) = out.glob("data/*")
    data.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "main", lambda words, **_: 1)
        assert run_command("reproduce", "tiny").code == 1
    assert len(data.read_bytes().splitlines()) == 4
    # A finished run whose files cannot be read is named.
    victim = next(out.glob("tiny_norms_cpu/*/summary.json")).parent
    (victim / "config.yaml").unlink()
    shown = run_command("reproduce", "tiny")
    assert shown.code == 2
    assert f"{victim.relative_to(tiny)}: its files cannot be read" in shown.err


@pytest.mark.slow
def test_the_textbook_is_computed_and_its_page_is_the_committed_one(run_command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run_command("reproduce", "textbook")
    assert shown.code == 0
    (line,) = [line for line in shown.out.splitlines() if line.startswith("soft-cap 30 of the logit 50")]
    assert "29.09" in line
    assert "27.933" in line
    assert f" {CONTRADICTS} " in line
    committed = Path(__file__).parents[2] / "docs" / "reproduction"
    ours = rows(Path("outputs/reproduction/textbook.md").read_text(encoding="utf-8"))
    theirs = rows((committed / "textbook.md").read_text(encoding="utf-8"))
    assert len(ours) == 48
    assert {name: cells[3] for name, cells in ours.items()} == {name: cells[3] for name, cells in theirs.items()}


def rows(page: str) -> dict[str, list[str]]:
    """Of the table of `numbers`: claim -> the other cells."""
    lines = iter(page.split("## numbers")[1].splitlines())
    next(line for line in lines if line.startswith("| claim"))
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines))[1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return {line[0]: line[1:] for line in cells}


@pytest.mark.parametrize("name", ["textbook", "nvidia", "olmo2", "small_scale_proxies"])
def test_the_committed_pages_follow_from_the_committed_data(name, run_command, tmp_path, monkeypatch) -> None:
    committed = Path(__file__).parents[2] / "docs" / "reproduction"
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "out" / "data"
    data.mkdir(parents=True)
    for path in (committed / "data").glob(f"{name}_*.jsonl"):
        (data / path.name).write_bytes(path.read_bytes())
    assert run_command("reproduce", name, "--report-only", "--out", "out").code == 0
    assert (tmp_path / "out" / f"{name}.md").read_bytes() == (committed / f"{name}.md").read_bytes()
