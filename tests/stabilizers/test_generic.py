"""Every stabilizer of configs/stabilizer passes the checks that anybody's must pass, and what is asked of ours alone.

A new YAML file is tested without a change here.
"""

import dataclasses
import functools
import math
from typing import Any

import pytest

from stability_lab.config import ConfigError, config_dir
from stability_lab.model.backend import choose_backend
from stability_lab.plugins.instantiate import instantiate
from stability_lab.plugins.option_files import class_text, options
from stability_lab.seams import Seams, Stabilizer
from stability_lab.testing.stabilizer_checks import (
    CHECKS,
    TINY_ENCODER,
    Candidate,
    it_differs_from_the_baseline,
    it_goes_with_every_other_one_or_says_no,
    it_traces_as_one_graph,
    one_step_is_finite,
    outcome,
    same,
)

NODES = {file.stem: node for file, node in options("stabilizer") if file.is_relative_to(config_dir()) and node}
NAMES = sorted(NODES)


@functools.cache
def candidate(name: str) -> Candidate:
    return Candidate(name)


def stabilizer(name: str) -> Stabilizer:
    return instantiate(NODES[name], f"stabilizer.{name}")


def default_values(name: str) -> dict[str, Any]:
    cls = type(stabilizer(name))
    assert dataclasses.is_dataclass(cls)
    return {f.name: f.default for f in dataclasses.fields(cls)}


def numeric_and_boolean() -> list[tuple[str, str]]:
    """(stabilizer, option) for every option of which another value is at hand."""
    return [
        (name, key) for name in NAMES for key, value in default_values(name).items() if isinstance(value, int | float)
    ]


def test_there_are_stabilizers():
    assert {"zloss", "qknorm", "rmsnorm", "layernorm"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.slow if check is it_traces_as_one_graph else (), id=check.__name__)
        for check in CHECKS
        if check is not it_goes_with_every_other_one_or_says_no  # test_pairs.py, each pair once
    ],
)
def test_check(check, name):
    check(candidate(name))


@functools.cache
def in_an_encoder(name: str) -> Candidate:
    return Candidate(name, base=TINY_ENCODER)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check is one_step_is_finite else pytest.mark.slow, id=check.__name__)
        for check in CHECKS
        if check is not it_goes_with_every_other_one_or_says_no
    ],
)
def test_check_in_an_encoder(check, name):
    check(in_an_encoder(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NAMES} - {"postnorm", "ln_scaling"}))
def test_with_the_norms_of_bert_it_differs_and_trains(name):
    """`postnorm` is there already, and `ln_scaling` needs a pre-norm."""
    bert = Candidate(name, base=(*TINY_ENCODER, "model.norm_placement=post"))
    it_differs_from_the_baseline(bert)
    one_step_is_finite(bert)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name):
    built = stabilizer(name)
    assert built.paper.startswith("arXiv:")
    assert len(built.summary) > 20
    assert type(built).__module__ == f"stability_lab.stabilizers.{name}"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_list_reads_in_the_source_is_so(name):
    built, text = stabilizer(name), class_text(NODES[name]["_target_"])
    assert (text.constants["paper"], text.constants["summary"]) == (built.paper, built.summary)
    assert set(text.seams()) >= set(built.apply(Seams()).owners)


@pytest.mark.parametrize("name", NAMES)
def test_yaml_lists_every_option_with_its_default(name):
    assert dataclasses.MISSING not in default_values(name).values()
    assert {key: value for key, value in NODES[name].items() if key != "_target_"} == default_values(name)


@pytest.mark.parametrize("name", NAMES)
def test_options_that_are_no_numbers_or_words_of_the_set_are_refused(name):
    cls = type(stabilizer(name))
    for key, value in default_values(name).items():
        wrong = {float: (math.nan, math.inf, -math.inf), str: ("nonsense",)}.get(type(value), ())
        for bad in wrong:
            with pytest.raises(ValueError, match=f"^{key}={bad:g}" if isinstance(bad, float) else f"^{key}={bad}"):
                cls(**{key: bad})


@pytest.mark.parametrize(("name", "key"), numeric_and_boolean())
def test_every_option_has_an_effect(name, key):
    value = default_values(name)[key]
    other = str(not value).lower() if isinstance(value, bool) else 50 * value
    changed = Candidate(name, (f"stabilizer.{name}.{key}={other}",))
    assert not same(outcome(changed.run), outcome(candidate(name).run))


@pytest.mark.parametrize("name", NAMES)
def test_fused_attention_is_refused_where_it_would_drop_the_stabilizer(name):
    seams = stabilizer(name).apply(Seams())
    if "score_mod" not in seams.owners:
        assert choose_backend("sdpa", seams).name == choose_backend("auto", seams).name == "sdpa"
    else:
        assert choose_backend("auto", seams).name == "explicit"
        with pytest.raises(ConfigError, match=rf"^model\.attention=sdpa: .*{name}"):
            choose_backend("sdpa", seams)
