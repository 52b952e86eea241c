"""Soft-cap on the head's logits.

    logits = cap * tanh(logits / cap), before log Z and the loss

No logit leaves (-cap, cap), and log Z stays within cap + ln(vocabulary). This is not the cap on attention logits
(`softcap`): Gemma 2 has both, 50 on attention and 30 here.

Seam: `logit_transform`. Fast path: any attention back-end. Papers: Gemma 2 (arXiv:2408.00118).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from stability_lab.numerics import Cap
from stability_lab.seams import Seams, Site


@dataclass(frozen=True)
class FinalSoftCapStabilizer:
    """`cap` > 0, in units of the logit."""

    name: ClassVar[str] = "final_softcap"
    paper: ClassVar[str] = "arXiv:2408.00118"
    summary: ClassVar[str] = "cap * tanh(logit / cap) on the head's logits, before log Z"

    cap: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.cap < float("inf"):
            raise ValueError(f"cap={self.cap:g}: must be positive and finite (30 is usual); off means not selected")

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, logit_transform=self._module)

    def _module(self, site: Site) -> nn.Module:
        return Cap(self.cap, site.fused)
