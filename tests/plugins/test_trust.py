"""Whose classes are imported: ours, those that an installed package offers, those that the user allows. No others."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stability_lab.build import build_stabilizers, check
from stability_lab.command_line import read_command_line
from stability_lab.compose import Composed, compose_jobs
from stability_lab.config import ConfigError
from stability_lab.plugins.instantiate import instantiate
from stability_lab.plugins.trust import allowed, allowing, code_version, config_folders, provenance

Make = Callable[..., Path]


def one(*arguments: str) -> Composed:
    (composed,) = compose_jobs(read_command_line(arguments))
    return composed


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build_stabilizers(one(*arguments).config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_an_installed_package_offers_is_an_option_as_ours_are(package: Make) -> None:
    folder = package("offers_double")
    assert config_folders() == {"offers_double": folder / "configs"}
    composed = one("+stabilizer=[offers_double,qknorm]", "stabilizer.offers_double.factor=3")
    built = build_stabilizers(composed.config)
    assert [stabilizer.name for stabilizer in built] == ["offers_double", "qknorm"]
    assert built[0].factor == 3.0  # pyright: ignore[reportAttributeAccessIssue]
    sweep = read_command_line(["-m", "+stabilizer=none,offers_double", "stabilizer.offers_double.factor=2,3"])
    assert len(compose_jobs(sweep)) == 4
    assert "did you mean offers_double?" in refusal("+stabilizer=offers_doubel")
    assert "factr is not an option" in refusal("+stabilizer=offers_double", "stabilizer.offers_double.factr=3")


def test_composing_imports_nothing(package: Make) -> None:
    folder = package("offers_double")
    one("+stabilizer=offers_double")
    assert not (folder / "imported").exists()


def test_only_the_class_that_is_offered_is_trusted(package: Make) -> None:
    folder = package("offers_double")
    target = "stabilizer.offers_double._target_=offers_double.double.NotOffered"
    sentence = refusal("+stabilizer=offers_double", target)
    assert sentence.startswith(f"{target}: must be a class of stability_lab")
    assert "--allow offers_double" in sentence
    assert not (folder / "imported").exists()
    with allowing(["offers_double"]):
        (built,) = build_stabilizers(one("+stabilizer=offers_double", target).config)
    assert type(built).__name__ == "NotOffered"


def test_two_options_of_one_name_are_not_told_apart_by_their_order(package: Make) -> None:
    folder = package("offers_double")
    option = folder / "configs" / "stabilizer" / "qknorm.yaml"
    option.write_text("qknorm:\n  _target_: offers_double.double.Double\n", encoding="utf-8")
    sentence = refusal("+stabilizer=[offers_double,qknorm]")
    assert sentence.startswith("stabilizer=")
    assert str(option) in sentence
    assert "rename one of them" in sentence
    assert build_stabilizers(one("+stabilizer=offers_double").config)


def test_a_package_that_is_not_installed_needs_its_flag(package: Make) -> None:
    folder = package("has_double", installed=False)
    words = ["--config-dir", str(folder / "configs"), "+stabilizer=has_double"]
    sentence = refusal(*words)
    assert sentence.endswith("add --allow has_double if you trust that package's code")
    assert not (folder / "imported").exists()
    for prefix in ("has_double", "has_double.double"):
        with allowing([prefix]):
            assert [stabilizer.name for stabilizer in build_stabilizers(one(*words).config)] == ["has_double"]
    package("has_doub", installed=False)
    with allowing(["has_doub"]):
        assert "--allow has_double" in refusal(*words)


def test_the_flag_holds_for_one_command(package: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package("has_double", installed=False)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with allowing(["has_double"]):
        with allowing(["has_double.double"]):
            assert allowed() == ("has_double", "has_double.double")
        assert allowed() == ("has_double",)
        assert os.getcwd() in sys.path or "" in sys.path
    assert allowed() == ()
    assert sys.path == path


@pytest.mark.parametrize("prefix", ["no_such_package", "a b", "", "os.", "/tmp/x"])
def test_a_flag_that_names_no_package(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"^--allow .*: no package of this name"), allowing([prefix]):
        pass
    assert allowed() == ()


@pytest.mark.parametrize("target", ["os.system", "subprocess.Popen", "builtins.eval", "", "x", None, 3, ["a.b"]])
def test_a_flag_is_not_advised_for_what_is_no_package_of_anybodys(target: object) -> None:
    with pytest.raises(ConfigError, match=r"_target_=.*: must be a class of") as caught:
        instantiate({"_target_": target}, "data")
    assert ("--allow" in str(caught.value)) == (target == "x")


def test_what_is_allowed_must_still_be_a_dataclass_of_options() -> None:
    with allowing(["os"]), pytest.raises(ConfigError, match=r"os\.system: must be a dataclass of options"):
        instantiate({"_target_": "os.system"}, "data")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("x = (\n", r"importing broken\.double fails: SyntaxError: .*double\.py, line"),
        ("\nx = y\n", r"fails: \S*broken/double\.py, line 2: NameError: name 'y' is not defined"),
        ("import no_such_library\n", r"line 1: ModuleNotFoundError: No module named 'no_such_library'"),
        ("", r"there is no such class"),
        (None, r"there is no module broken\.double"),
    ],
)
def test_a_class_that_cannot_be_imported_says_why(package: Make, code: str | None, sentence: str) -> None:
    folder = package("broken")
    if code is None:
        (folder / "double.py").unlink()
    else:
        (folder / "double.py").write_text(code, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^stabilizer\.broken\._target_=broken\.double\.Double: .*{sentence}"):
        build_stabilizers(one("+stabilizer=broken").config)


@pytest.mark.parametrize("group", ["stabilizer.x", "objective", "optimizer", "data"])
def test_a_class_of_another_kind_is_named(group: str, tiny_config) -> None:
    key, _, name = group.partition(".")
    node = {"_target_": "stability_lab.data.tokenizer.ByteTokenizer"}
    config = dataclasses.replace(tiny_config(), **{key: {name: node} if name else node})
    with pytest.raises(ConfigError, match=rf"^{group}\._target_=.*ByteTokenizer: must have all that stability_lab\."):
        check([config])


def test_provenance_and_the_version_that_counts(package: Make) -> None:
    ours = {"stabilizer": {"qknorm": {"_target_": "stability_lab.stabilizers.qknorm.QKNorm"}}}
    assert provenance(ours) == {}
    assert " " not in code_version(ours)
    folder = package("offers_double")
    plain = one("+stabilizer=[offers_double,qknorm]").plain
    ((target, origin),) = provenance(plain).items()
    assert target == "offers_double.double.Double"
    assert (origin["package"], origin["version"]) == ("offers_double", "1.5")
    before = code_version(plain)
    with (folder / "double.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert code_version(plain) != before


@pytest.fixture
def stranger(tmp_path: Path, package: Make) -> tuple[Path, Path]:
    """A folder of configs, and the package that it would like to see imported."""
    evil = package("evil_package", installed=False)
    folder = tmp_path / "configs of a stranger"
    (folder / "recipe").mkdir(parents=True)
    return folder, evil


@pytest.mark.parametrize(
    ("hydra", "key"),
    [
        ("callbacks: {x: {_target_: evil_package.double.Double}}", "hydra.callbacks.x"),
        ("job_logging: {handlers: {x: {'()': evil_package.double.Double}}}", "hydra.job_logging"),
        ("hydra_logging: {filters: {x: {'()': 'ext://evil_package.double.Double'}}}", "hydra.hydra_logging"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--help"], ["--cfg", "hydra"], ["-m"]])
def test_a_folder_of_configs_makes_hydra_import_nothing(
    stranger, hydra: str, key: str, flags: list[str], run_command, tmp_path, monkeypatch, tiny_overrides
) -> None:
    folder, evil = stranger
    monkeypatch.chdir(tmp_path)
    text = f"# @package _global_\nhydra:\n  {hydra}\n"
    (folder / "recipe" / "free.yaml").write_text(text, encoding="utf-8")
    shown = run_command("train", "--config-dir", str(folder), "+recipe=free", *tiny_overrides, *flags)
    assert shown.code == 2
    assert shown.err.startswith(f"error: {key}: ")
    assert not (evil / "imported").exists()


def test_the_search_path_is_not_for_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"^hydra\.searchpath=\[x\]: add a folder of configs with --config-dir"):
        read_command_line(["hydra.searchpath=[x]"])
