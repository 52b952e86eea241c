"""Which keys a query sees: one value, and what each attention back-end makes of it.

A key is hidden where it lies in the future (`causal`), further than `window` positions away (arXiv:2004.05150), or in
another document (arXiv:2402.13991). Windows of training data are cut out of documents that follow one another. Which
document a token belongs to follows from the ids alone, so data, loader and training loop need to know nothing of it.
Positions are not reset: RoPE sees differences only. The last token of a document still predicts the first of the next
one.

Shape letters: B batch, T tokens (queries and keys), C a block of queries, S the keys that some query of it may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from stability_lab.model.flex import block_mask

SDPA = ("sdpa", "sdpa_fp32")


class DocumentMark(NamedTuple):
    """The id that ends every document, or that begins every one."""

    id: int
    begins: bool


class Mask(NamedTuple):
    """What one layer may see. `window` counts the query's own position: 1 is itself alone; None is no limit."""

    causal: bool = True
    window: int | None = None
    documents_BT: Tensor | None = None  # number of each token's document
    rendered: Tensor | BlockMask | None = None  # made once a forward pass, of the kind that the back-end takes

    def keys(self, start: int, stop: int, n_keys: int) -> tuple[int, int]:
        """The first key that any of the queries `start` to `stop` may see, and the one behind the last."""
        reach = n_keys if self.window is None else self.window - 1
        return max(0, start - reach), stop if self.causal else min(n_keys, stop + reach)

    def hidden(self, start: int, stop: int, first: int, last: int, device: torch.device) -> Tensor:
        """Which pairs of queries start..stop and keys first..last are hidden: bool, (C, S), or (B, 1, C, S) with
        documents.
        """
        distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(first, last, device=device)
        hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        if self.window is not None:
            hidden = hidden | (distance.abs() >= self.window)
        if self.documents_BT is None:
            return hidden
        query, key = self.documents_BT[:, start:stop, None], self.documents_BT[:, None, first:last]
        return (hidden | (query != key))[:, None]

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels know this mask without a tensor."""
        return self.window is None and self.documents_BT is None

    def render(self, backend: str, n_tokens: int, device: torch.device) -> Mask:
        """The mask for a back-end: for SDPA visible pairs as a tensor unless it `is_plain`, for `flex` a block mask."""
        if backend == "flex":
            return self._replace(rendered=block_mask(self.causal, self.window, self.documents_BT, n_tokens, device))
        if backend in SDPA and not self.is_plain:
            return self._replace(rendered=~self.hidden(0, n_tokens, 0, n_tokens, device))
        return self


CAUSAL = Mask()


class Masks:
    """Token ids (B, T) -> the rendered mask of each layer. Layers of one window share theirs.

    Padding is a document of its own: nothing else sees it, and as it sees itself no row of weights is empty.
    """

    def __init__(self, windows: Sequence[int | None], mark: DocumentMark | None, backend: str, causal: bool = True):
        self.windows, self.mark, self.backend, self.causal = tuple(windows), mark, backend, causal

    def __call__(self, tokens_BT: Tensor, padding_BT: Tensor | None = None) -> list[Mask]:
        documents = None if self.mark is None else document_numbers(tokens_BT, self.mark)
        if padding_BT is not None:
            documents = (torch.zeros_like(tokens_BT) if documents is None else documents).masked_fill(padding_BT, -1)
        made = {
            window: Mask(self.causal, window, documents).render(self.backend, tokens_BT.shape[1], tokens_BT.device)
            for window in dict.fromkeys(self.windows)
        }
        return [made[window] for window in self.windows]


def layer_windows(window: int | None, full_every: int | None, n_layers: int, seq_len: int) -> list[int | None]:
    """Each layer's window: every `full_every`-th layer sees everything, and a window of `seq_len` hides nothing."""
    if window is None or window >= seq_len:
        return [None] * n_layers
    return [None if full_every and (layer + 1) % full_every == 0 else window for layer in range(n_layers)]


def document_numbers(tokens_BT: Tensor, mark: DocumentMark) -> Tensor:
    """Number of the document of each token within its row, (B, T) of int64, from 0 or 1."""
    marks_BT = (tokens_BT == mark.id).long()
    number_BT = marks_BT.cumsum(1)
    return number_BT if mark.begins else number_BT - marks_BT  # the end belongs to its document
