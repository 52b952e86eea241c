"""Soft-cap on attention logits.

    logits = cap * tanh(q . k / (sqrt(head_dim) * cap)), then the mask, then the softmax

Small logits pass, large ones saturate at +-cap, so no softmax becomes harder than the cap allows. The price is the
slope 1 - tanh^2: at logit = cap it is 0.42, at 2 cap 0.07, at 4 cap 0.001, so what is far beyond the cap hardly learns.
`attn/max_logit` is measured before the cap; the shares of logits beyond cap/2 (touched) and beyond 2 cap (saturated)
and the share of gradient that passes through them are logged beside it.

Seam: `score_mod`. Fast path: compiled FlexAttention on CUDA; elsewhere logits are formed explicitly, because fused
attention kernels have no cap. To tell the cap from the back-end, run the baseline with the same `model.attention`.
Papers: Gemma 2 (arXiv:2408.00118), cap 50; Grok-1's released code, 30; Rybakov et al. (arXiv:2410.16682), 50.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stability_lab.numerics import Cap, fp32
from stability_lab.seams import Seams


class SoftCap(Cap):
    """The cap, with what the probe asks of it."""

    def slope(self, logits: Tensor) -> Tensor:
        return 1 - torch.tanh(fp32(logits) / self.cap).square()

    def regions(self, logits: Tensor) -> dict[str, Tensor]:
        size = logits.abs()
        return {"touched": size > self.cap / 2, "saturated": size > 2 * self.cap}


@dataclass(frozen=True)
class SoftCapStabilizer:
    """`cap` > 0, in units of the scaled logit."""

    name: ClassVar[str] = "softcap"
    paper: ClassVar[str] = "arXiv:2408.00118, 2410.16682"
    summary: ClassVar[str] = "cap * tanh(logit / cap) on attention logits, before the mask"

    cap: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.cap < float("inf"):
            raise ValueError(
                f"cap={self.cap:g}: must be positive and finite (30, 50 are usual); off means not selected"
            )

    def apply(self, seams: Seams) -> Seams:
        # All layers share one instance, so that FlexAttention is compiled once.
        shared = {fused: SoftCap(self.cap, fused) for fused in (True, False)}
        return seams.claim(self.name, score_mod=lambda site: shared[site.fused])
