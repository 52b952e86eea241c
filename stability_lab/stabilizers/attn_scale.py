"""The 1/sqrt(head_dim) question as an experiment.

    logits = q . k * { 1 / sqrt(head_dim)  |  1  |  1 / head_dim }

With entries of unit variance q . k has variance head_dim, so 1/sqrt(head_dim) keeps the logits' variance at 1 whatever
the head size. `none` leaves them unscaled, sharper by sqrt(head_dim); `inverse_d` is muP's choice, for q and k that
align during training and whose product then grows like head_dim.

Seam: `attn_scale`. Fast path: any; what differs from 1/sqrt(head_dim) goes into q.
Papers: Vaswani et al. (arXiv:1706.03762), 3.2.1; muP (arXiv:2203.03466).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from stability_lab.seams import Scale, Scaling, Seams, Site

MODES = ("sqrt", "none", "inverse_d")


@dataclass(frozen=True)
class AttnScale:
    """`mode` sqrt|none|inverse_d; `sqrt` equals the baseline."""

    name: ClassVar[str] = "attn_scale"
    paper: ClassVar[str] = "arXiv:1706.03762, 2203.03466"
    summary: ClassVar[str] = "the scale of the dot product: 1/sqrt(head_dim), none or 1/head_dim"

    mode: str = "inverse_d"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}: must be one of {', '.join(MODES)}")

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, attn_scale=self._module)

    def _module(self, site: Site) -> Scaling:
        root = math.sqrt(site.head_dim)
        return Scale({"sqrt": 1.0, "none": root, "inverse_d": 1 / root}[self.mode])
