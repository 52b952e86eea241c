"""The special ids of encoders, [CLS], [SEP], [MASK] and [PAD], and which ids begin a word.

A tokenizer that has them (a WordPiece vocabulary) gives its own; to any other ids they are added at the end of the
vocabulary. So the ids of a text, and with them its cache, are the same for decoders and encoders.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from stability_lab.config import ConfigError
from stability_lab.data.hf_tokenizer import SPECIAL
from stability_lab.data.source import SpecialIds, TokenData
from stability_lab.data.tokenizer import Tokenizer


def with_special(data: TokenData) -> TokenData:
    """The data with a vocabulary that holds the special ids, and with these."""
    own = {} if data.tokenizer is None else data.tokenizer.special
    missing = [name for name in SPECIAL if name not in own]
    ids = {**own, **{name: data.vocab_size + i for i, name in enumerate(missing)}}
    token_bytes = np.pad(data.token_bytes, (0, len(missing))) if len(data.token_bytes) else data.token_bytes
    size = data.vocab_size + len(missing)
    special = SpecialIds(*(ids[name] for name in SPECIAL))
    return dataclasses.replace(data, vocab_size=size, token_bytes=token_bytes, special=special)


def word_pieces(data: TokenData) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Two masks over the vocabulary: ids that can go on with a word, and ids behind which a word can go on.

    With WordPiece a word goes on with `##`; else letters and digits (and bytes of neither) that stand side by side are
    a word. ConfigError where the ids have no known text.
    """
    if data.tokenizer is None:
        raise ConfigError("objective.whole_words=true: the ids of this data have no known text; leave it false")
    continues, continued = np.zeros((2, data.vocab_size), dtype=bool)
    texts = _texts(data.tokenizer)
    pieces = "[CLS]" in data.tokenizer.special and any(text[:2] == "##" and text[2:] for text in texts.values())
    for i, text in texts.items():
        continues[i] = text.startswith("##") if pieces else _in_word(text[:1])
        continued[i] = pieces or _in_word(text[-1:])
    return continues, continued


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Text of each id but the end of a document; half a character is U+FFFD."""
    return {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size) if i != tokenizer.eos_id}


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "\N{REPLACEMENT CHARACTER}"
