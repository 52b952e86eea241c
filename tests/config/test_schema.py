"""Conversion and bounds of values, and the sentences for those that are wrong."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import ConfigError, check_bounds, config_dir, convert, from_plain, schema


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    (composed,) = compose_jobs(read_command_line([]))
    return composed.plain


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, int, 3),
        (1e2, int, 100),
        ("1e2", int, 100),
        ("100", int, 100),
        (10**30, int, 10**30),
        (3, float, 3.0),
        (3e-3, float, 3e-3),
        ("1e-4", float, 1e-4),
        ("inf", float, float("inf")),
        (None, int | None, None),
        (7, int | None, 7),
        ("7", int | None, 7),
        (True, bool, True),
        (False, bool | None, False),
        ("word", str, "word"),
        (5, str, "5"),
        (None, str | None, None),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        ("b", Literal["a", "b"], "b"),
        (None, Literal["a", "b"] | None, None),
        (["1", 2.0], list[int], [1, 2]),
        (0.5, list[float] | None, [0.5]),
    ],
)
def test_converts(value: Any, kind: Any, expected: Any) -> None:
    converted = convert("some.key", value, kind)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "sentence"),
    [
        (1.5, int, "some.key=1.5: must be a whole number"),
        ("1.5", int, "some.key=1.5: must be a whole number"),
        (True, int, "some.key=True: must be a whole number"),
        (False, float, "some.key=False: must be a number such as 3e-3"),
        (True, str, "some.key=True: must be a word"),
        (1, bool, "some.key=1: must be true or false"),
        ("true", bool, "some.key=true: must be true or false"),
        ("abc", float, "some.key=abc: must be a number such as 3e-3"),
        ("abc", int | None, "some.key=abc: must be a whole number or null"),
        ("", float, "some.key=: must be a number such as 3e-3"),
        (float("nan"), float, "some.key=nan: must be a number such as 3e-3"),
        (float("inf"), int, "some.key=inf: must be a whole number"),
        ("inf", int, "some.key=inf: must be a whole number"),
        (None, int, "some.key=null: must be a whole number, and null is none"),
        (None, dict[str, Any], "some.key=null: must be a group of keys, and null is none"),
        (3, dict[str, Any], "some.key=3: must be a group of keys"),
        ([1, 2], float, "some.key=[1, 2]: must be a number such as 3e-3"),
        ({"a": 1}, str, "some.key={'a': 1}: must be a word"),
        ("c", Literal["a", "b"], "some.key=c: must be a or b"),
        (None, Literal["a", "b"], "some.key=null: must be a or b, and null is none"),
        ("x", list[int], "some.key=x: must be a whole number"),
        (
            1,
            complex,
            f"some.key: its class declares {complex}, and an option is of bool, int, float, str, Literal[...]",
        ),
    ],
)
def test_refuses(value: Any, kind: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert("some.key", value, kind)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "sentence"),
    [
        ({"ge": 1}, 1, 0, "k=0: must be 1 or more"),
        ({"gt": 0}, 1e-9, 0.0, "k=0: must be more than 0"),
        ({"le": 1}, 1.0, 1.5, "k=1.5: must be 1 or less"),
        ({"lt": 1}, 0.9, 1.0, "k=1: must be less than 1"),
        ({"ge": 0, "lt": 1}, 0.0, -0.1, "k=-0.1: must be 0 or more"),
        ({"gt": 0}, 1.0, float("inf"), "k=inf: must be finite"),
        ({"one_of": ("a", "b")}, "a", "c", "k=c: must be one of a, b"),
        ({"one_of": ("a",)}, "a", "c", "k=c: must be a"),
    ],
)
def test_bounds(bounds: dict[str, Any], good: Any, bad: Any, sentence: str) -> None:
    check_bounds("k", good, bounds)
    check_bounds("k", None, bounds)
    with pytest.raises(ConfigError) as caught:
        check_bounds("k", bad, bounds)
    assert str(caught.value) == sentence


def changed(plain: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(plain)
    *path, last = key.split(".")
    node = result
    for name in path:
        node = node[name]
    node[last] = value
    return result


def test_from_plain_reads_what_compose_gives(plain: dict[str, Any]) -> None:
    config = from_plain(plain)
    assert (config.seed, config.model.d_model, config.lr) == (0, 128, 3e-3)
    assert config.model.init.scheme == "normal"
    assert config.stabilizer == {}
    assert from_plain(changed(plain, "trainer.max_steps", 1e2)).trainer.max_steps == 100


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("sed", 3, "sed is not a key of the configuration: did you mean seed?"),
        ("model.dmodel", 3, "model.dmodel is not a key of the configuration: did you mean d_model?"),
        ("model.init.st", 3, "model.init.st is not a key of the configuration: did you mean std?"),
        ("trainer.max_steps", 0, "trainer.max_steps=0: must be 1 or more"),
        ("trainer.grad_clip", 0, "trainer.grad_clip=0: must be more than 0"),
        ("trainer.eval_every", 0, "trainer.eval_every=0: must be 1 or more"),
        ("schedule.decay_fraction", 1.5, "schedule.decay_fraction=1.5: must be 1 or less"),
        ("optimizer.lr", "inf", "optimizer.lr=inf: must be finite"),
        ("schedule.decay_fraction", 0, "schedule.decay_fraction=0: must be more than 0"),
        ("model.attention", "flash", "model.attention=flash: must be one of auto, sdpa, sdpa_fp32"),
        ("model", 3, "model=3: must be a group of keys, not a single value"),
        ("model.n_heads", 5, "model.n_heads=5: must divide model.d_model=128; near it are 4, 2, 8"),
        ("model.n_kv_heads", 3, "model.n_kv_heads=3: must divide model.n_heads=4"),
        ("model.n_heads", 128, "model.n_heads=128: RoPE needs an even head_dim"),
        ("if_exists", "maybe", "if_exists=maybe: must be one of new, skip, resume, error, overwrite"),
        ("seed", True, "seed=True: must be a whole number"),
        ("stabilizer", None, "stabilizer=null: must be a group of keys, and null is none"),
    ],
)
def test_from_plain_refuses(plain: dict[str, Any], key: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        from_plain(changed(plain, key, value))


@pytest.mark.parametrize("key", ["seed", "model", "optimizer.lr", "model.init.std"])
def test_from_plain_names_a_missing_key(plain: dict[str, Any], key: str) -> None:
    incomplete = copy.deepcopy(plain)
    *path, last = key.split(".")
    node = incomplete
    for name in path:
        node = node[name]
    del node[last]
    with pytest.raises(ConfigError, match=f"^{key} is missing"):
        from_plain(incomplete)


def test_heads_of_odd_size_are_fine_without_rope(plain: dict[str, Any]) -> None:
    learned = changed(plain, "model.positions", "learned")
    assert from_plain(changed(learned, "model.n_heads", 128)).model.n_heads == 128


def test_a_broken_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (config_dir() / "train.yaml").is_file()
    monkeypatch.setattr(schema, "__file__", str(tmp_path / "stability_lab" / "config" / "schema.py"))
    with pytest.raises(ConfigError, match="reinstall"):
        config_dir()


def test_a_tilde_in_a_folder_is_the_home(plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    config = from_plain({**plain, "output_dir": "~/runs", "resume": "~/runs/one"})
    assert (config.output_dir, config.resume) == ("/somewhere/runs", "/somewhere/runs/one")
    assert from_plain({**plain, "output_dir": "a~/b"}).output_dir == "a~/b"
    assert from_plain({**plain, "output_dir": "~no_such_user/x"}).output_dir == "~no_such_user/x"
