"""Tokenizers: UTF-8 text to ids and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

END_OF_DOCUMENT = "<|endoftext|>"
"""How the end-of-document id is shown in decoded text."""


class Tokenizer(Protocol):
    """What the rest of the package needs from a tokenizer."""

    @property
    def id(self) -> str:
        """Name of the encoding: it changes whenever the same text would get other ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1, the end-of-document id included."""
        ...

    @property
    def eos_id(self) -> int:
        """Id that stands after every document."""
        ...

    def encode(self, data: bytes) -> npt.NDArray[np.unsignedinteger]:
        """Ids of UTF-8 text, shape (tokens,), without the end-of-document id."""
        ...

    def decode(self, ids: npt.NDArray[np.integer] | Sequence[int]) -> str:
        """Text of ids; parts that are not UTF-8 become U+FFFD."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One id a byte: 0 to 255 are the bytes, 256 is the end of a document. Any text, no dependency."""

    # Without annotations these are constants of the class, not dataclass fields.
    id = "bytes-1"
    vocab_size = 257
    eos_id = 256

    def encode(self, data: bytes) -> npt.NDArray[np.uint16]:
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: npt.NDArray[np.integer] | Sequence[int]) -> str:
        """Raises ValueError for an id outside 0 to 256."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() <= self.eos_id:
            raise ValueError(f"ids from {ids.min()} to {ids.max()}: must lie from 0 to {self.eos_id}")
        documents = np.split(ids, np.flatnonzero(ids == self.eos_id))
        texts = (part[part != self.eos_id].astype(np.uint8).tobytes() for part in documents)
        return END_OF_DOCUMENT.join(text.decode(errors="replace") for text in texts)
