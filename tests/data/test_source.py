"""A source from somebody's own package: the example of the docstring, sampled as any other data."""

import re
import textwrap
from typing import Any

import numpy as np

from stability_lab.config import SamplingConfig
from stability_lab.data.loader import TrainSampler, build_sampler, check_length
from stability_lab.data.source import DataSource, TokenData
from stability_lab.data.tokenizer import ByteTokenizer


def documented_example() -> type[Any]:
    """The class `Dice`, run as it stands in the docstring."""
    found = re.search(r"( +@dataclass.*?)\n\n +# data/", DataSource.__doc__ or "", re.S)
    assert found is not None
    header = "import math\nfrom dataclasses import dataclass\nimport numpy as np\n"
    names: dict[str, Any] = {"TokenData": TokenData, "TokenizerOptions": object}
    exec(header + textwrap.dedent(found[1]), names)
    return names["Dice"]


def test_the_example_of_a_source_of_your_own_is_data() -> None:
    source: DataSource = documented_example()(sides=3)
    data, again = source.load(ByteTokenizer()), source.load(ByteTokenizer())
    np.testing.assert_array_equal(data.train, again.train)
    assert (data.train_tokens, data.val_tokens, data.vocab_size) == (90_000, 10_000, 3)
    assert set(np.unique(data.val)) == {0, 1, 2}
    check_length(data, 64)
    sampler = build_sampler(data, 64, 0, SamplingConfig("permutation", False, False))
    assert isinstance(sampler, TrainSampler)
    assert sampler.batch(5, 8).shape == (8, 65)
    assert data.bytes_of(data.val) == 0  # nothing is known of a text


def test_a_sampler_without_a_state_says_so() -> None:
    sampler = TrainSampler(np.arange(100), 10, 0)
    assert sampler.state() == {}
    sampler.load_state({})
