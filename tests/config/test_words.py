"""Names and paths are kept as they are typed; flags end in an answer or a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from stability_lab.config import ConfigError
from stability_lab.config.words import literal

NAMES = ["1_1_1", "2024_01_15", "1e5", "0123", "true", "nan", "a-b.c", "-1", "été", "a b", "x=1"]
NAMES += ["00", "1.", "+7", "0x1F", "1_000.5", "1e-3_2", "NaN", "True", "inf", "2024-01-15", "12:30"]
PATHS = [
    "données/x.txt",
    "a=b.txt",
    "x (1).txt",
    "#x",
    "a&b",
    "it's",
    "x[1].txt",
    "C:\\Users\\me\\x.txt",
    "a|b",
    "a,b",
    "~/x",
    "x{1}.txt",
    "a;b",
    "100%",
    "a\\'b",
    "日本/テキスト.txt",
    "x y/[z](1)=2, é.txt",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["run_name", "+group"])
def test_names_stay_text(key: str, name: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([literal(f"{key}={name}", multirun=False)])
    assert str(override.value()) == name


@pytest.mark.parametrize("path", [*NAMES, *PATHS])
@pytest.mark.parametrize("key", ["data.path", "data.data_files", "tokenizer.path", "output_dir", "resume"])
def test_paths_stay_text(key: str, path: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([literal(f"{key}={path}", multirun=False)])
    assert str(override.value()) == path


def test_sweeps_lists_and_what_is_quoted_already() -> None:
    assert literal("run_name=1_1,b", multirun=True) == "run_name='1_1',b"
    assert literal("data.path=a.txt,b c.txt", multirun=True) == "data.path=a.txt,'b c.txt'"
    for same in (
        "run_name='x'",
        "data.path=[a,b]",
        "group=null",
        "run_name=${seed}",
        "data.path=choice(a,b)",
        "seed=1_1",
        "run_name=",
    ):
        assert literal(same, multirun=True) == same


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--optimizer.lr=0.01", "--seed=1"], "write optimizer.lr=0.01 seed=1, without the dashes (in a W&B sweep: "),
        (["--optimizer.lr", "0.01", "--seed", "1"], "write optimizer.lr=0.01 seed=1, without the dashes"),
        (["seed=1", "--group=x"], "--group=x: write group=x, without the dashes"),
        (["--seed", "model.d_model=32"], "unrecognized arguments: --seed"),
        (["seed=1", "--hydra-help"], "--hydra-help: is not supported"),
        (["seed=1", "--info"], "argument -i/--info: expected one argument"),
        (["--info", "seed=1"], "argument -i/--info: invalid choice: 'seed=1'"),
        (["--resolve"], "--resolve: goes with --cfg job"),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun: is not supported"),
        (["--shell-completion", "uninstall=zsh"], "--shell-completion: is not supported"),
        (["-m", "seed=0,1", "--info", "all"], "--info: shows one run; leave out -m"),
        (["--info", "all", "--cfg", "job"], "--info: shows something else than --cfg; choose one of the two"),
        (["--package", "x"], "--package x: is not supported; --cfg job shows the whole configuration"),
        (["--experimental-rerun", "x"], "--experimental-rerun: is not supported; resume=RUN goes on with a run"),
        (["foo"], "cannot read 'foo': write key=value"),
        (["-m", "seed=0,1", "--cfg", "job"], "--cfg: shows one run; leave out -m"),
        (["-m", "seed=0,1", "--cfg", "hydra"], "--cfg: shows one run; leave out -m"),
        (["--shell-completion", "install=bash"], "--shell-completion: is not supported"),
        (["model.attention=é"], "cannot read 'model.attention=é': write 'model.attention=\"é\"' with both quotes"),
    ],
)
def test_flags_end_in_a_sentence(words: list[str], sentence: str, run_command) -> None:
    shown = run_command("train", *words)
    assert (shown.code, shown.out) == (2, "")
    assert sentence in shown.err
    assert len(shown.err.splitlines()) == 1


def test_the_configuration_has_the_name_that_was_typed(run_command, tiny_overrides) -> None:
    shown = run_command("train", *tiny_overrides, "run_name=1_1_1", "group=2024_01_15", "--cfg", "job")
    config = yaml.safe_load(shown.out)
    assert (config["run_name"], config["group"]) == ("1_1_1", "2024_01_15")


def test_a_run_under_such_a_name(run_command, tiny_overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("train", *tiny_overrides, "trainer.max_steps=1", "run_name=1_1_1", "output_dir=é, (1)").code == 0
    assert (tmp_path / "é, (1)" / "runs" / "1_1_1" / "summary.json").is_file()


def test_a_sweep_under_such_a_name(
    run_command, tiny_overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("-m", *tiny_overrides, "trainer.max_steps=1", "seed=0,1", "group=2024_01_15")
    assert run_command("train", *words).code == 0
    runs = sorted((tmp_path / "outputs" / "2024_01_15").glob("*/config.yaml"))
    assert [yaml.safe_load(run.read_text(encoding="utf-8"))["group"] for run in runs] == ["2024_01_15"] * 2


def test_flags_are_no_overrides() -> None:
    from stability_lab.config.words import check_dashes

    check_dashes(["--config-dir=x", "--cfg=job", "seed=1"])
    with pytest.raises(ConfigError, match="without the dashes"):
        check_dashes(["--seed=1"])
