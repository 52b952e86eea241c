"""Every pair of stabilizers trains, or is refused with both names and the seam; the order never matters."""

import functools
import itertools

import pytest

from stability_lab.build import build_stabilizers, fill_seams
from stability_lab.config import ConfigError, config_dir
from stability_lab.plugins.option_files import options
from stability_lab.seams import EXCLUSIVE, Seams
from stability_lab.testing.stabilizer_checks import Candidate, check_pair

NODES = {file.stem: node for file, node in options("stabilizer") if file.is_relative_to(config_dir()) and node}
PAIRS = list(itertools.combinations(sorted(NODES), 2))
candidate = functools.cache(Candidate)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pair(a, b):
    check_pair(candidate(a), b, {b: NODES[b]})


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_claims_on_one_exclusive_seam_are_refused_and_the_seam_is_named(a, b):
    alone = [candidate(name).stabilizer.apply(Seams()) for name in (a, b)]
    contested = set(alone[0].owners) & set(alone[1].owners) & set(EXCLUSIVE)
    if contested:
        with pytest.raises(
            ConfigError, match=rf"^stabilizer=\[{a},{b}\]: stabilizers {a} and {b} both claim"
        ) as caught:
            fill_seams([candidate(a).stabilizer, candidate(b).stabilizer])
        assert any(f"'{seam}'" in str(caught.value) for seam in contested)


def test_the_pair_of_norms_is_refused(tiny_config):
    assert ("layernorm", "rmsnorm") in PAIRS
    with pytest.raises(ConfigError, match="stabilizers layernorm and rmsnorm both claim the exclusive seam 'norm'"):
        fill_seams(build_stabilizers(tiny_config("+stabilizer=[rmsnorm,layernorm]")))


def test_unknown_seam_is_a_programming_error():
    with pytest.raises(TypeError, match="someone claims an unknown seam 'nrom'"):
        Seams().claim("someone", nrom=None)


def test_additive_seams_hold_several_in_the_order_of_their_names():
    seams = Seams().claim("zz", loss_terms="second").claim("aa", loss_terms="first")
    assert list(seams.loss_terms.items()) == [("aa", "first"), ("zz", "second")]
    assert seams.owners == {"loss_terms": ("aa", "zz")}
    assert Seams().owners == {}
