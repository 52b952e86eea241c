"""What a data source is, and what it gives.

A run asks its source for one thing, `load`. Sources that have ids of their own (`data=tokens`, `data=synthetic`)
implement nothing else; those that have text are a `TextSource`, so that `data prepare` can read it too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from stability_lab.data.tokens.shards import Ids, Tokens, windows_of

if TYPE_CHECKING:
    from stability_lab.data.tokenizer import Tokenizer, TokenizerOptions

Document: TypeAlias = tuple[str, bytes]
"""(name, UTF-8 text)"""
Documents: TypeAlias = list[Document]


@runtime_checkable
class DataSource(Protocol):
    """What `data=` chooses: a frozen dataclass of options whose `load` gives ids.

    A source in a package of your own needs no more than such a class and a YAML that names it:

        @dataclass(frozen=True)
        class Dice:
            sides: int = 6

            def load(self, tokenizer: TokenizerOptions) -> TokenData:
                ids = np.random.default_rng(0).integers(0, self.sides, 100_000).astype(np.uint16)
                about = {"name": "dice", "version": "1", "sha256": "", "source": "drawn", "licence": "none needed"}
                entropy = math.log(self.sides)
                return TokenData(ids[:90_000], ids[90_000:], self.sides, None, entropy, about, f"dice-{self.sides}")

        # data/dice.yaml
        _target_: mypackage.Dice
        sides: 6
    """

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        """The ids of both splits. A command calls this more than once, and equal options must give equal ids.

        Text is encoded with `tokenizer.fit(documents, saved)`; ids of another origin may ignore `tokenizer`.
        ConfigError names the option that is wrong.
        """
        ...


class TextSource(ABC):
    """A `DataSource` of documents, which `data prepare` can tokenise to the disk, whatever their size."""

    @abstractmethod
    def load(self, tokenizer: TokenizerOptions) -> TokenData: ...

    @abstractmethod
    def iterate(self, skip: int = 0) -> Iterator[Document]:
        """Every document but the first `skip`, in the same order each time."""

    @abstractmethod
    def holds_out(self, number: int) -> bool:
        """Whether the document of that number belongs to the validation split."""

    @abstractmethod
    def identity(self) -> Any:
        """What changes whenever text or split do, as JSON can hold it; found without reading all of a large text."""

    @abstractmethod
    def about(self) -> dict[str, str | int]:
        """Name, version, source and licence."""


class TokenStream(Protocol):
    """Ids that come in one order only, such as those of a dataset that is read over the network."""

    @property
    def exact(self) -> bool:
        """Whether a saved state continues with exactly the ids that would have come."""
        ...

    def read(self, n: int) -> Ids:
        """The next n ids, shape (n,)."""
        ...

    def state(self) -> dict[str, Any]:
        """The position in the stream, as JSON can hold it."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class SpecialIds(NamedTuple):
    """What an encoder needs beside the ids of text."""

    cls: int
    sep: int
    mask: int
    pad: int


@dataclass(frozen=True, eq=False)
class TokenData:
    """Ids of both splits. `train` and `val` have shape (tokens,) and are read-only; files are mapped.

    `eos_id` marks where a document ends, or where it begins if `eos_first`; None where nothing does.
    `unigram_entropy` is in nats a token over the training split: the loss of a model that knows frequencies only.
    `corpus` describes the text for the manifest: name, version, sha256, source, licence.
    `fingerprint` identifies corpus text, split and encoding.
    `token_bytes`, shape (vocab_size,), is how many bytes of text each id stands for (end of document: 0); it is empty
    where the ids have no known text. `val_bytes` is their sum over the validation split where it was counted.
    `entropy_rate`, in nats a token, is that of a known source: in the long run no model does better.
    `val_surprisal`, shape (tokens,), is what each id of `val` costs a model that knows the source.
    `tokenizer` decodes the ids where they have a text. `notices` go to log and manifest.
    `stream`, where given, opens for a data seed what training reads instead of `train`, which is then empty.
    `special` ids are there for objectives that need them; no text holds them.
    """

    train: Tokens
    val: Tokens
    vocab_size: int
    eos_id: int | None
    unigram_entropy: float
    corpus: Mapping[str, str | int]
    fingerprint: str
    token_bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    val_bytes: int = 0
    eos_first: bool = False
    entropy_rate: float | None = None
    val_surprisal: npt.NDArray[np.float64] | None = None
    tokenizer: Tokenizer | None = None
    notices: tuple[str, ...] = ()
    stream: Callable[[int], TokenStream] | None = None
    special: SpecialIds | None = None

    def optimal_loss(self, starts: Ids, scored: npt.NDArray[np.bool_]) -> float | None:
        """What a model that knows the source has for a loss on the validation windows at `starts` (M,), over the
        targets that are `scored` (M, T); None if it is not known."""
        if self.val_surprisal is None:
            return None
        return float(windows_of(self.val_surprisal, scored.shape[1])[starts + 1][scored].mean())

    @property
    def train_tokens(self) -> int:
        return len(self.train)

    @property
    def val_tokens(self) -> int:
        return len(self.val)

    def bytes_of(self, ids: npt.ArrayLike) -> int:
        """UTF-8 bytes of the text that ids of any shape stand for, the denominator of bits per byte; 0 if unknown."""
        return int(self.token_bytes[np.asarray(ids)].sum()) if len(self.token_bytes) else 0
