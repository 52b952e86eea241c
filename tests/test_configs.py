"""Every YAML file composes and builds, and YAML and schemas have the same keys."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from stability_lab import build
from stability_lab.command_line import read_command_line
from stability_lab.compose import Composed, compose_jobs
from stability_lab.config import OPEN_SETS, ConfigError, TrainConfig, config_dir, typed_fields
from stability_lab.data import hf_tokenizer
from stability_lab.data.source import SpecialIds
from stability_lab.data.sources import hub
from stability_lab.plugins.instantiate import instantiate

OPTIONS = sorted(path.relative_to(config_dir()).with_suffix("").as_posix() for path in config_dir().glob("*/*.yaml"))
FIELDS: dict[str, Any] = typed_fields(TrainConfig)
CLOSED_SETS: dict[str, Any] = {name: kind for name, kind in FIELDS.items() if dataclasses.is_dataclass(kind)}
GLOBAL = {"recipe", "stressor", "experiment", "scale"}  # groups whose options set keys of others
IN_THE_ROOT = {"stability", "sweep", "debug"}  # small sections with one way to be


class StrictLoader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys and says nothing; this loader says it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice: {keys}"
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    content = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    assert isinstance(content, dict), path
    return content


@functools.cache
def compose_one(*arguments: str) -> Composed:
    (composed,) = compose_jobs(read_command_line(arguments))
    return composed


def chosen(option: str) -> str:
    """The override that chooses an option of a group; the root alone has no scale."""
    group, name = option.split("/")
    return f"{'+' * (group == 'scale')}{group}={name}"


def partner(option: str) -> list[str]:
    """An encoder's objective, or the encoder of an objective."""
    if option.startswith("model/bert"):
        return ["objective=masked_lm_nsp"]
    return ["model=bert_mini"] if option.startswith("objective/masked") else []


def some_tokenizer() -> str:
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate([*ByteLevel.alphabet(), "</s>"])}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer.to_str()


def required(option: str, given: Mapping[str, object]) -> list[str]:
    """Overrides for the keys and groups that an option leaves open (`???`), with the values that are `given`."""
    content = read(config_dir() / f"{option}.yaml")
    entries = [entry for entry in content.get("defaults", []) if isinstance(entry, dict)]
    names = [f"{option.split('/')[0]}.{key}" for key, value in content.items() if value == "???"]
    names += [key.partition("/")[2] for entry in entries for key, value in entry.items() if value == "???"]
    return [f"{name}={given[name]}" for name in names]


class FewTokens:
    """Stands for a corpus where only its vocabulary matters."""

    vocab_size = 261
    eos_id = 256
    eos_first = False
    special = SpecialIds(257, 258, 259, 260)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Something real for every key that an option leaves open, and a hub that has any dataset and any tokenizer."""
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"document {i}" for i in range(10_050)]})
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, streaming, **options: rows.to_iterable_dataset() if streaming else rows
    )
    monkeypatch.setattr(hub, "use_hub", lambda: True)
    monkeypatch.setattr(hub, "commit_of", lambda name, revision: revision)
    monkeypatch.setattr(hf_tokenizer, "_fetch", lambda name, revision: some_tokenizer())
    (tmp_path / "tokenizer.json").write_text(some_tokenizer(), encoding="utf-8")
    # Enough different words to learn a vocabulary from; and ids of the byte tokenizer.
    text = "".join(f"line {n:x} of {n * n} bottles\n" for n in range(20_000))
    (tmp_path / "text").write_text(text, encoding="utf-8")
    np.save(tmp_path / "ids.npy", np.frombuffer(text.encode(), np.uint8))
    return {
        "data.path": tmp_path / "text",
        "data.name": "owner/dataset",
        "tokenizer.path": tmp_path / "tokenizer.json",
        "tokenizer.name": "owner/model",
        "text": tmp_path / "text",
        "ids": tmp_path / "ids.npy",
        "model": "gpt_nano",
    }


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_builds(
    option: str, given: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group, name = option.split("/")
    extra = required(option, {**given, "data.path": given["ids"]} if option == "data/tokens" else given)
    extra += partner(option)
    if option == "tokenizer/wordpiece":
        (vocabulary := tmp_path / "vocab.txt").write_text("[UNK]\n[SEP]\nline\n", encoding="utf-8")
        extra = [f"tokenizer.path={vocabulary}"]
    if group in ("data", "tokenizer"):
        extra += ["model.seq_len=16"]
    else:
        monkeypatch.setattr(build, "load_data", lambda config, known: FewTokens())
    if group == "tokenizer":
        extra += ["data=text", f"data.path={given['text']}"]
    composed = compose_one(chosen(option), *extra)
    build.check([composed.config])
    assert composed.notices == ()
    if group == "model":
        assert composed.config.model.name == name
    if group == "stabilizer":
        assert set(composed.config.stabilizer) == {name} - {"none"}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_all_keys_of_its_schema_and_no_other(option: str) -> None:
    group = option.split("/")[0]
    paths_and_names = dict.fromkeys(("data.path", "data.name", "tokenizer.path", "tokenizer.name"), "a/b")
    composed = compose_one(chosen(option), *required(option, {"model": "gpt_nano", **paths_and_names}))
    if group in ("stressor", "experiment", "scale"):
        for section, schema in CLOSED_SETS.items():
            assert_same_keys(composed.plain[section], schema, section)
        assert not composed.plain["stabilizer"], "what a preset compares is not part of its base"
        return
    if group in CLOSED_SETS:
        assert_same_keys(composed.plain[group], CLOSED_SETS[group], group)
        return
    node = composed.plain["stabilizer" if group == "recipe" else group]
    nodes = node.values() if group in ("stabilizer", "recipe") else [node]
    for node in nodes:
        module, _, class_name = node["_target_"].rpartition(".")
        cls = getattr(importlib.import_module(module), class_name)
        assert set(node) - {"_target_"} == set(typed_fields(cls)), option
        built = instantiate(node, group)
        if group == "recipe" or is_preset(option):
            continue  # its values are the published model's, or the dataset's
        # The value stands in the YAML; the class repeats it for those who use it without Hydra.
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING and (group, field.name) != ("tracking", "mode"):
                assert getattr(built, field.name) == field.default, f"{option}: {field.name}"


def is_preset(option: str) -> bool:
    """Whether an option fills in what another option of the same class leaves open."""
    siblings = [o for o in OPTIONS if o.split("/")[0] == option.split("/")[0] and o != option]
    target = read(config_dir() / f"{option}.yaml").get("_target_")
    same = [read(config_dir() / f"{o}.yaml") for o in siblings if target is not None]
    return any(one.get("_target_") == target and "???" in one.values() for one in same)


def assert_same_keys(plain: dict[str, Any], schema: Any, prefix: str) -> None:
    kinds: dict[str, Any] = typed_fields(schema)
    assert set(plain) == set(kinds), prefix
    for name, kind in kinds.items():
        if dataclasses.is_dataclass(kind):
            assert_same_keys(plain[name], kind, f"{prefix}.{name}")


def test_the_root_and_its_groups_are_the_whole_schema() -> None:
    root = read(config_dir() / "train.yaml")
    groups = {key for entry in root["defaults"] if isinstance(entry, dict) for key in entry if " " not in key}
    own = set(root) - {"defaults", "hydra"}
    assert own | groups == {*FIELDS, "experiment"}
    assert not own & groups, "a key has two values"
    assert groups == {*CLOSED_SETS, *OPEN_SETS, *GLOBAL} - {*IN_THE_ROOT, "scale"}  # an experiment brings its scale
    for section in IN_THE_ROOT:
        assert_same_keys(root[section], CLOSED_SETS[section], section)


def test_values_stand_only_in_yaml() -> None:
    schemas: list[Any] = [TrainConfig, *CLOSED_SETS.values(), typed_fields(CLOSED_SETS["model"])["init"]]
    for schema in schemas:
        for field in dataclasses.fields(schema):
            if field.name in ("recipe", "stressor"):
                continue  # absent unless one is chosen
            assert field.default is field.default_factory is dataclasses.MISSING, f"{schema.__name__}.{field.name}"


@pytest.mark.parametrize("option", [*OPTIONS, "train"])
def test_no_file_has_a_key_twice(option: str) -> None:
    assert read(config_dir() / f"{option}.yaml") is not None


def test_configs_holds_the_root_and_its_groups_only() -> None:
    files = {path.relative_to(config_dir()).as_posix() for path in config_dir().rglob("*") if path.is_file()}
    assert files == {"train.yaml", *(f"{option}.yaml" for option in OPTIONS)}
    assert {option.split("/")[0] for option in OPTIONS} == {*CLOSED_SETS, *OPEN_SETS, *GLOBAL} - IN_THE_ROOT


RECIPES = sorted((config_dir() / "recipe").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_where_it_is_from_and_what_it_lacks(path: Path) -> None:
    recipe = read(path)["recipe"]
    assert set(recipe) == {"name", "source", "lacks"}
    assert recipe["name"] == path.stem
    assert recipe["source"]
    assert all(isinstance(item, str) for item in recipe["lacks"])
    assert recipe["lacks"]


def test_a_recipe_wins_over_the_groups_and_the_command_line_over_it() -> None:
    config = compose_one("+recipe=olmo2", "optimizer.eps=1e-5", "stabilizer.qknorm.scope=head").config
    assert config.lr == 3e-4
    assert config.model.init.truncate == 3.0
    assert config.optimizer["eps"] == 1e-5
    assert config.stabilizer["qknorm"]["scope"] == "head"
    assert set(config.stabilizer) == {"qknorm", "reordered_norm", "rmsnorm", "zloss"}


@pytest.mark.parametrize("order", [("+recipe=olmo2", "+stabilizer=qknorm"), ("stabilizer=qknorm", "recipe=olmo2")])
def test_a_stabilizer_reached_twice_with_other_values_is_refused(order: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"qknorm is reached twice.*scope full and head"):
        read_command_line(order)


def test_a_stabilizer_reached_twice_with_the_same_values_is_fine() -> None:
    assert "layernorm" in compose_one("+recipe=nvidia_baseline", "+stabilizer=layernorm").config.stabilizer


def test_a_stabilizer_file_is_keyed_by_its_own_name() -> None:
    for path in (config_dir() / "stabilizer").glob("*.yaml"):
        assert set(read(path)) == {path.stem} - {"none"}


@pytest.mark.parametrize(
    ("model", "total"), [("gpt2_124m", 124_439_808), ("gpt_nano", None), ("gpt_micro", None), ("gpt_27m", None)]
)
def test_model_sizes_are_what_the_files_say(model: str, total: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from stability_lab.model.transformer import parameter_counts
    from stability_lab.seams import Seams

    config = compose_one(f"model={model}").config
    with torch.device("meta"):
        counts = parameter_counts(build.build_model(config, 257, Seams()))
    if total is not None:
        assert counts["total"] == total
    about = {"gpt_nano": 0.79e6, "gpt_micro": 4.7e6}
    if model in about:
        assert counts["non_embedding"] == pytest.approx(about[model], rel=0.02)
    if model == "gpt_27m":
        assert counts["total"] == pytest.approx(26.7e6, rel=0.01)
