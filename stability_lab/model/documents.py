"""Which tokens belong to one document, where attention does not look across documents (arXiv:2402.13991).

Windows are cut out of documents that stand one after the other. Which document a token belongs to follows from the ids
alone, so data, loader and training loop need to know nothing of it. Positions are not reset: RoPE sees differences
only. The last token of a document still predicts the first of the next one.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from stability_lab.model.flex import document_mask


class DocumentMark(NamedTuple):
    """The id that ends every document, or that begins every one."""

    id: int
    begins: bool


class Documents(NamedTuple):
    """Number of the document of each token within its window, and the mask that the back-end takes."""

    number_BT: Tensor  # int64
    mask: Tensor | BlockMask | None  # (B, 1, T, T) of bool, True: visible; None: the back-end compares numbers itself


def documents_of(tokens_BT: Tensor, mark: DocumentMark, backend: str) -> Documents:
    marks_BT = (tokens_BT == mark.id).long()
    number_BT = marks_BT.cumsum(1)
    if not mark.begins:
        number_BT = number_BT - marks_BT  # the end belongs to its document
    if backend == "sdpa":
        T = tokens_BT.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=tokens_BT.device).tril()
        return Documents(number_BT, (causal & same_document(number_BT, number_BT))[:, None])
    return Documents(number_BT, document_mask(number_BT) if backend == "flex" else None)


def same_document(query_BT: Tensor, key_BS: Tensor) -> Tensor:
    """(B, T, S) of bool"""
    return query_BT[:, :, None] == key_BS[:, None, :]
