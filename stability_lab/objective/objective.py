"""What a batch is and what is minimised: the contract that every objective fulfils.

Shape letters: M samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from stability_lab.objective.loss import IGNORE, LossSums
from stability_lab.seams import LossTerm, ModelOutput

# Validation window m is sample VALIDATION + m: no training sample has such a number.
VALIDATION = -(2**40)


class Batch(NamedTuple):
    """Samples as a model reads them, and what it is to predict."""

    inputs_MT: Tensor
    targets_MT: Tensor  # IGNORE where nothing is to be predicted

    def chunks(self, n: int) -> list[Batch]:
        """`n` micro-batches of consecutive samples."""
        return [Batch(*parts) for parts in zip(*(tensor.chunk(n) for tensor in self), strict=True)]

    def without(self, ignored_M: Tensor) -> Batch:
        """The same batch with nothing to predict in the samples where `ignored_M` is True."""
        return self._replace(targets_MT=self.targets_MT.masked_fill(ignored_M[:, None], IGNORE))


@runtime_checkable
class Objective(Protocol):
    """A frozen dataclass of options. It holds no state: what it makes depends on its arguments alone."""

    name: ClassVar[str]

    def batch(self, windows_MT1: Tensor, first: int) -> Batch:
        """Samples first, first + 1, ... out of windows of seq_len + 1 ids, on their device.

        Whatever is drawn must be a function of the sample's number, so that runs stay paired and a resumed run reads
        what an uninterrupted one reads.
        """
        ...

    def loss(self, output: ModelOutput, batch: Batch, inv_n: Tensor, terms: Iterable[LossTerm] = ()) -> LossSums:
        """Sums over the batch's targets; `inv_n` is 1 / number of targets of the whole optimizer step."""
        ...

    def trivial_loss(self, unigram_entropy: float | None) -> float | None:
        """The loss in nats of a model that knows only how often each token occurs; None where that is unknown."""
        ...

    def metrics(self, nats: float, n_targets: int, n_bytes: int) -> dict[str, float]:
        """Validation metrics of a summed cross-entropy over targets that encode `n_bytes` of text (0: unknown)."""
        ...
