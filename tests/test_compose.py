"""What the command line means: flags, stabilizers, sweeps, and the sentences for what means nothing."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from stability_lab import build
from stability_lab.command_line import CommandLine, read_command_line
from stability_lab.compose import Composed, compose_jobs
from stability_lab.config import ConfigError


@functools.cache
def jobs(*arguments: str) -> list[Composed]:
    return compose_jobs(read_command_line(arguments))


def one(*arguments: str) -> Composed:
    (composed,) = jobs(*arguments)
    return composed


def stabilizers(*arguments: str) -> list[list[str]]:
    return [sorted(job.config.stabilizer) for job in jobs(*arguments)]


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        jobs(*arguments)
    sentence = str(caught.value)
    assert sentence
    assert "\n" not in sentence
    return sentence


# Flags


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_multirun_may_stand_anywhere(flag: str, place: int) -> None:
    arguments = ["seed=1,2", "+stabilizer=none,zloss"]
    arguments.insert(place, flag)
    command = read_command_line(arguments)
    assert command.multirun
    assert command.flags == [flag]
    assert len(command.jobs) == 4
    assert command.swept == ["seed", "stabilizer"]
    assert [job[0] for job in command.jobs] == ["++seed=1", "++seed=1", "++seed=2", "++seed=2"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_flag_with_a_value_may_stand_anywhere(place: int) -> None:
    arguments = ["seed=1", "tracking=local"]
    arguments[place:place] = ["--cfg", "job"]
    command = read_command_line(arguments)
    assert command.only_shows
    assert command.flags == ["--cfg", "job"]
    assert command.overrides == ["++seed=1", "tracking=local"]


def test_one_value_needs_no_sweep() -> None:
    command = read_command_line(["seed=1"])
    assert command == CommandLine([], ["++seed=1"], [["++seed=1"]], [], False, False)
    assert one("-m", "seed=1").config.seed == 1


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--cfg"], ["--cfg", "everything"], ["-x", "seed=1"]])
def test_an_unknown_flag_is_one_sentence(arguments: list[str]) -> None:
    assert refusal(*arguments).endswith("see python -m stability_lab train --help")


@pytest.mark.parametrize("flag", [["--config-path", "x"], ["-cn", "mine"]])
def test_flags_that_would_bypass_the_checks_are_refused(flag: list[str]) -> None:
    assert "--config-dir" in refusal(*flag)


# Stabilizers


@pytest.mark.parametrize(
    "arguments",
    [
        ["+stabilizer=[qknorm,zloss]"],
        ["+stabilizer=[zloss, qknorm]"],
        ["stabilizer=[qknorm,zloss]"],
        ["++stabilizer=[qknorm,zloss]"],
        ["+stabilizer=qknorm", "+stabilizer=zloss"],
        ["stabilizer=zloss", "seed=0", "+stabilizer=qknorm"],
        ["+stabilizer=[qknorm,zloss]", "+stabilizer=qknorm"],
        ["+stabilizer=none", "+stabilizer=qknorm", "+stabilizer=zloss"],
        ["+stabilizer=[none,qknorm,zloss,zloss]"],
    ],
)
def test_a_set_of_stabilizers_is_one_whatever_its_spelling(arguments: list[str]) -> None:
    composed = one(*arguments)
    assert composed == one("+stabilizer=[qknorm,zloss]")
    assert sorted(composed.config.stabilizer) == ["qknorm", "zloss"]


@pytest.mark.parametrize("arguments", [[], ["+stabilizer=none"], ["stabilizer=[]"], ["+stabilizer=[none]"]])
def test_the_baseline(arguments: list[str]) -> None:
    assert one(*arguments) == one()
    assert one(*arguments).config.stabilizer == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sets"),
    [
        (["+stabilizer=none,qknorm"], [[], ["qknorm"]]),
        (["+stabilizer=none,[qknorm,zloss],zloss"], [[], ["qknorm", "zloss"], ["zloss"]]),
        (["+stabilizer=[qknorm],[zloss,qknorm],[qknorm,zloss]"], [["qknorm"], ["qknorm", "zloss"]]),
        (["+stabilizer=none,qknorm", "+stabilizer=zloss"], [["zloss"], ["qknorm", "zloss"]]),
        (
            ["+stabilizer=none,qknorm", "+stabilizer=none,zloss"],
            [[], ["zloss"], ["qknorm"], ["qknorm", "zloss"]],
        ),
        (["+stabilizer=glob([rmsn*,layern*,qkn*],exclude=q*)"], [["layernorm"], ["rmsnorm"]]),
        (["+stabilizer=glob([zl*,qkn*])"], [["qknorm"], ["zloss"]]),
        (["+stabilizer=choice(none,zloss)"], [[], ["zloss"]]),
    ],
)
def test_sweeps_over_sets(arguments: list[str], sets: list[list[str]]) -> None:
    assert stabilizers("-m", *arguments) == sets


@pytest.mark.slow
def test_glob_takes_every_stabilizer() -> None:
    found = stabilizers("-m", "+stabilizer=glob(*)")
    assert [] in found
    assert {name for names in found for name in names} >= {"layernorm", "qknorm", "rmsnorm", "zloss"}
    assert all(len(names) <= 1 for names in found)


def test_a_sweep_over_other_keys_crosses() -> None:
    command = read_command_line(["-m", "+stabilizer=none,qknorm", "optimizer.lr=3e-3,3e-2", "seed=range(2)"])
    assert command.swept == ["stabilizer", "optimizer.lr", "seed"]
    found = [(sorted(j.config.stabilizer), j.config.lr, j.config.seed) for j in compose_jobs(command)]
    assert found == [(s, lr, seed) for s in ([], ["qknorm"]) for lr in (3e-3, 3e-2) for seed in (0, 1)]


def test_a_sweep_over_options_of_a_group() -> None:
    assert [j.config.schedule.name for j in jobs("-m", "schedule=cosine,wsd")] == ["cosine", "wsd"]


def test_a_glob_over_options_of_a_group() -> None:
    assert [j.config.schedule.name for j in jobs("-m", "schedule=glob(c*)")] == ["constant", "cosine"]


def test_a_value_for_one_stabilizer_of_a_sweep_is_ignored_elsewhere_with_one_notice() -> None:
    arguments = ["+stabilizer=none,zloss,[qknorm,zloss]", "stabilizer.zloss.weight=1e-5"]
    none, zloss, both = jobs("-m", *arguments)
    assert none.config.stabilizer == {}
    assert none.plain["stabilizer"] == {}
    assert none.notices == ("stabilizer.zloss.weight is ignored here: this run has no zloss",)
    assert zloss.config.stabilizer["zloss"]["weight"] == both.config.stabilizer["zloss"]["weight"] == 1e-5
    assert zloss.notices == both.notices == ()


def test_the_order_of_stabilizer_and_its_value_is_free() -> None:
    tuned = ["stabilizer.zloss.weight=1e-5", "+stabilizer=zloss"]
    assert one(*tuned) == one(*reversed(tuned))
    assert one(*tuned).config.stabilizer["zloss"]["weight"] == 1e-5


def test_a_value_that_is_swept_too() -> None:
    found = jobs("-m", "+stabilizer=none,zloss", "stabilizer.zloss.weight=1e-5,1e-4")
    assert [bool(job.notices) for job in found] == [True, True, False, False]
    assert [job.config.stabilizer["zloss"]["weight"] for job in found[2:]] == [1e-5, 1e-4]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["stabilizer.zloss.weight=1e-5"],
            "stabilizer.zloss.weight=1e-5: no run has zloss; add +stabilizer=zloss",
        ),
        (["-m", "+stabilizer=none,qknorm", "stabilizer.zloss.weight=1e-5"], "no run has zloss"),
        (["+stabilizer=zloss", "stabilizer.zlos.weight=1"], "zlos is not a stabilizer: did you mean zloss?"),
        (["+stabilizer=qknrom"], "stabilizer=qknrom is not a stabilizer: did you mean qknorm?"),
        (["-m", "+stabilizer=none,qknrom"], "stabilizer=qknrom is not a stabilizer: did you mean qknorm?"),
        (["+stabilizer=[zloss,qknrom]"], "stabilizer=qknrom is not a stabilizer: did you mean qknorm?"),
        (["-m", "+stabilizer=none,[zloss,qknrom]"], "stabilizer=qknrom is not a stabilizer"),
        (["+stabilizer=null"], "stabilizer=null is not a stabilizer"),
        (["+stabilizer=30"], "stabilizer=30 is not a stabilizer"),
        (["+stabilizer=true"], "stabilizer=True is not a stabilizer"),
        (["+stabilizer="], "is not a stabilizer"),
        (["+stabilizer={a:1}"], "is not a stabilizer"),
    ],
)
def test_a_wrong_stabilizer_is_named(arguments: list[str], sentence: str) -> None:
    assert sentence in refusal(*arguments)


# Keys, groups and values


@pytest.mark.parametrize("spelling", ["seed=3", "+seed=3", "++seed=3"])
def test_a_plus_changes_nothing(spelling: str) -> None:
    assert one(spelling).config.seed == 3


def test_a_number_may_be_written_as_one_likes() -> None:
    assert one("trainer.max_steps=1e2").config.trainer.max_steps == 100
    assert one("optimizer.lr=3e-2").config.lr == 0.03
    assert one("optimizer.lr='3e-2'").config.lr == 0.03
    assert one("trainer.grad_clip=null").config.trainer.grad_clip is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("output_dir='a, b'", "a, b"),
        ('output_dir="a, b"', "a, b"),
        ("output_dir='a=b'", "a=b"),
        ("output_dir='[x]'", "[x]"),
        ("output_dir=a b", "a b"),
        ("output_dir='it\\'s'", "it's"),
        ("output_dir=runs/${seed}", "runs/0"),
    ],
)
def test_quoting(override: str, value: str) -> None:
    assert one(override).config.output_dir == value
    assert one("-m", override).config.output_dir == value


def test_a_sweep_over_quoted_values() -> None:
    assert [job.config.output_dir for job in jobs("-m", "output_dir='a,b','c=d',e f")] == ["a,b", "c=d", "e f"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["seed=1,2"], "seed=1,2: several values need a sweep; add -m"),
        (["+stabilizer=none,qknorm"], "several values need a sweep; add -m"),
        (
            ["hydra.run.dir=x"],
            "hydra.run.dir=x: a run makes its own folder; choose with output_dir, group and run_name",
        ),
        (["-m", "hydra.sweep.dir=x", "seed=1,2"], "hydra.sweep.dir=x: a run makes its own folder"),
        (["schedule=glob(*)"], "several values need a sweep; add -m"),
        (["model=gpt_nao"], "model=gpt_nao is not an option: did you mean gpt_nano?"),
        (["-m", "model=gpt_nano,gpt_nao"], "model=gpt_nao is not an option: did you mean gpt_nano?"),
        (["model=null"], "model=null is not an option: known are"),
        (["trainer=7"], "trainer=7 is not an option: known are default"),
        (["+stabiliser=qknorm"], "stabiliser is not a key of the configuration: did you mean stabilizer?"),
        (["lr=0.01"], "lr is not a key of the configuration: did you mean optimizer.lr?"),
        (["max_steps=10"], "max_steps is not a key of the configuration: did you mean trainer.max_steps?"),
        (["steps=100"], "did you mean schedule.warmup_steps or trainer.grad_accum_steps or trainer.max_steps?"),
        (["batch_size=8"], "did you mean trainer.micro_batch_size?"),
        (["learning_rate=1"], "learning_rate is not a key of the configuration: did you mean optimizer.lr?"),
        (["iters=100"], "iters is not a key of the configuration: did you mean trainer.max_steps?"),
        (["path=book.txt"], "path is not a key of the configuration: did you mean data.path?"),
        (["weight_decay=0"], "did you mean optimizer.weight_decay?"),
        (["model.path=x"], "model.path is not a key of the configuration: "),
        (["trainer.n_layers=2"], "did you mean model.n_layers?"),
        (["zzz=3"], "known are data, data_seed, debug, "),
        (["+sed=3"], "sed is not a key of the configuration: did you mean seed?"),
        (["trainer.max_step=3"], "trainer.max_step is not a key of the configuration: did you mean max_steps?"),
        (["-m", "seed=1,-2"], "seed=-2: must be 0 or more"),
        (["~optimizer.lr"], "optimizer.lr is missing"),
        (["~model"], "model is missing"),
        (["model.init=3"], "model.init=3: must be a group of keys"),
        (["optimizer.lr={a:1}"], "optimizer.lr={'a': 1}: must be a number"),
        (["optimizer.lr=[1,2]"], "optimizer.lr=[1, 2]: must be a number"),
        (["seed=???"], "seed is missing: give it a value, seed=..."),
        (["data=text"], "data.path is missing: give it a value, data.path=..."),
        (["foo"], "cannot read 'foo': write key=value"),
        (["seed=[1"], "cannot read 'seed=[1'"),
        (["run_name=a=b"], "run_name=a=b: must be a folder's name"),
        (["=3"], "=3"),
        (["seed=${oc.env:STABILITY_LAB_NO_SUCH_VARIABLE}"], "STABILITY_LAB_NO_SUCH_VARIABLE"),
        (["hydra.foo=3"], "hydra.foo"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    assert sentence in refusal(*arguments)


def test_a_file_for_an_option_of_data_is_a_path(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    assert "is not an option: known are" in refusal(f"data={book}")
    book.touch()
    assert refusal(f"data={book}").endswith(f"to train on this text, write data=text data.path={book}")


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("no book.jsonl", "data=text 'data.path=no book.jsonl'"),
        ("~/no/train.bin", "data=tokens 'data.path=~/no/train.bin'"),
        ("é (1).txt", "data=text 'data.path=é (1).txt'"),
    ],
)
def test_what_may_be_a_file_gets_the_right_words_too(value: str, right: str) -> None:
    assert refusal(f"data={value}").endswith(f"; for a file, write {right}")


def test_an_interpolation_that_leads_nowhere_names_its_key() -> None:
    assert "seed" in refusal("seed=${no_such_key}")


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("model@model=gpt_micro", "model@model"),
        ("+optimizer@foo=adamw", "foo"),
        ("optimizer@foo=adamw", "foo"),
        ("seed@x=3", "x"),
        ("+stabilizer@model=qknorm", "model"),
    ],
)
def test_a_foreign_package_is_refused(override: str, word: str) -> None:
    assert word in refusal(override)


# The user's own folder of configs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stabilizer = tmp_path / "my configs" / "stabilizer"
    stabilizer.mkdir(parents=True)
    (stabilizer / "strong_z.yaml").write_text(
        "strong_z:\n  _target_: stability_lab.stabilizers.zloss.ZLoss\n  weight: 1.0e-2\n", encoding="utf-8"
    )
    return tmp_path / "my configs"


def test_a_stabilizer_from_the_users_own_folder(folder: Path) -> None:
    composed = one("--config-dir", str(folder), "+stabilizer=[strong_z,qknorm]", "stabilizer.strong_z.weight=2e-2")
    assert composed.config.stabilizer["strong_z"]["weight"] == 2e-2
    built = build.build_stabilizers(composed.config)
    assert [s.name for s in built] == ["qknorm", "zloss"]
    assert stabilizers("-m", f"--config-dir={folder}", "+stabilizer=none,strong_z") == [[], ["strong_z"]]


def test_the_users_folder_is_needed(folder: Path) -> None:
    del folder
    assert "strong_z is not a stabilizer" in refusal("+stabilizer=strong_z")


def test_a_users_model(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "mine.yaml").write_text("defaults: [gpt_nano, _self_]\nn_layers: 3\n", encoding="utf-8")
    composed = one("--config-dir", str(folder), "model=mine")
    assert (composed.config.model.n_layers, composed.config.model.d_model) == (3, 128)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nope"
    assert refusal("--config-dir", str(missing)) == f"--config-dir {missing}: there is no such folder"


def test_a_foreign_class_is_not_imported(folder: Path) -> None:
    (folder / "stabilizer" / "evil.yaml").write_text("evil:\n  _target_: os.system\n  command: id\n", encoding="utf-8")
    composed = one("--config-dir", str(folder), "+stabilizer=evil")
    with pytest.raises(ConfigError, match=re.escape("stabilizer.evil._target_=os.system: must be a class of")):
        build.build_stabilizers(composed.config)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--resolve"], r"^--resolve: goes with --cfg"),
        (["-m", "seed=range(0,0)"], r"make 0 runs"),
        (["-m", "seed=range(0,1000000)"], r"^seed=range\(0,1000000\): a sweep has 1 to 10,000 runs"),
        (
            ["-m", "optimizer.lr=interval(1e-3,1)"],
            r"^optimizer\.lr=interval\(1e-3,1\): an interval has no single values",
        ),
        (["-m", "seed=range(0,200)", "init_seed=range(0,200)"], r"make 40,000 runs"),
    ],
)
def test_what_cannot_be_a_sweep_is_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_command_line(arguments)


def test_a_range_of_floats_is_a_sweep() -> None:
    assert len(read_command_line(["-m", "optimizer.weight_decay=range(0,0.3,0.1)"]).jobs) == 3
