"""What a batch is and what is minimised: the contract that every objective fulfils.

Shape letters: M samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from stability_lab.objective.loss import IGNORE, LossSums, language_model_loss
from stability_lab.seams import LossTerm, ModelOutput

# Validation window m is sample VALIDATION + m: no training sample has such a number.
VALIDATION = -(2**40)


class Batch(NamedTuple):
    """Samples as a model reads them, and what it is to predict."""

    inputs_MT: Tensor
    targets_MT: Tensor  # IGNORE where nothing is to be predicted
    segments_MT: Tensor | None = None
    labels_M: Tensor | None = None  # class of each sample, for a head that judges whole sequences
    weights_M: Tensor | None = None  # of the labels: 1 each, which a training step divides by how many it has

    def chunks(self, n: int) -> list[Batch]:
        """`n` micro-batches of consecutive samples; as many as there are samples, if those are fewer."""
        n = len(self.inputs_MT.chunk(n))
        parts = ((None,) * n if tensor is None else tensor.chunk(n) for tensor in self)
        return [Batch(*part) for part in zip(*parts, strict=True)]

    def without(self, ignored_M: Tensor) -> Batch:
        """The same batch with nothing to predict in the samples where `ignored_M` is True."""
        targets, weights = self.targets_MT.masked_fill(ignored_M[:, None], IGNORE), self.weights_M
        return self._replace(
            targets_MT=targets, weights_M=None if weights is None else weights.masked_fill(ignored_M, 0.0)
        )


class Traits(NamedTuple):
    """What model, data and files have to know of an objective; the values here are those of `causal_lm`."""

    family: str = "decoder"  # of the model: a decoder sees what lies before, an encoder both sides
    special: bool = False  # whether the ids [CLS], [SEP], [MASK] and [PAD] are needed
    windows: int = 1  # of text in a sample
    classes: int = 0  # of whole sequences
    perplexity: str = "ppl"  # how exp(loss) is named
    columns: tuple[str, ...] = ()  # names of `LossSums.measured`


class Vocabulary(NamedTuple):
    """What an objective may know of the ids."""

    size: int
    reserved: tuple[int, ...]  # in ascending order: special ids, and the end of a document
    cls: int
    sep: int
    mask: int
    continues_V: Tensor | None = None  # bool: the id can go on with a word that another began
    continued_V: Tensor | None = None  # bool: a word can go on behind the id


@runtime_checkable
class ObjectiveOptions(Protocol):
    """What a configuration chooses: a frozen dataclass of options, and the objective that it is for given data."""

    name: ClassVar[str]
    traits: ClassVar[Traits]

    def bound(self, vocabulary: Vocabulary | None, seed: int) -> Objective:
        """`vocabulary` is there where the traits ask for special ids; `seed` is that of the data."""
        ...


class Objective(Protocol):
    """It holds no state: what it makes depends on its arguments alone."""

    traits: ClassVar[Traits]

    def batch(self, windows_MT1: Tensor, first: int) -> Batch:
        """Samples first, first + 1, ... out of windows of seq_len + 1 ids, on their device. Where a sample takes
        several windows, a row is these one behind the other.

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


def token_loss(output: ModelOutput, batch: Batch, inv_n: Tensor, terms: Iterable[LossTerm] = ()) -> LossSums:
    """`language_model_loss` of all targets of a batch, wherever they are."""
    logits_NV, targets_N = output.logits_BTV.flatten(0, 1), batch.targets_MT.flatten()
    return language_model_loss(logits_NV, targets_N, inv_n, terms, output.unembedding_VD, output.fused)
