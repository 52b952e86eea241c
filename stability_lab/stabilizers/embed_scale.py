"""Scaled embeddings: token embeddings are multiplied before they enter the residual stream.

    x_0 = factor * embed(token),   factor = sqrt(d_model) unless given

With embeddings of standard deviation 0.02 the residual stream starts small and the first blocks' norms amplify
gradients; a larger start conditions them. OLMo 2 tried this remedy and found that it slowed convergence.

Seam: `embed_scale`. Fast path: any.
Papers: Vaswani et al. (arXiv:1706.03762), 3.4; Takase et al. (arXiv:2312.16903); Gemma 2 (arXiv:2408.00118).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from stability_lab.seams import Scale, Scaling, Seams, Site


@dataclass(frozen=True)
class EmbedScale:
    """`factor` > 0; null means sqrt(d_model)."""

    name: ClassVar[str] = "embed_scale"
    paper: ClassVar[str] = "arXiv:1706.03762, 2312.16903, 2408.00118"
    summary: ClassVar[str] = "token embeddings times sqrt(d_model)"

    factor: float | None = None

    def __post_init__(self) -> None:
        if self.factor is not None and not 0 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor:g}: must be positive and finite, or null for sqrt(d_model)")

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, embed_scale=self._module)

    def _module(self, site: Site) -> Scaling:
        return Scale(math.sqrt(site.d_model) if self.factor is None else self.factor)
