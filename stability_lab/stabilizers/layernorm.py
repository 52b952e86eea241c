"""LayerNorm with its options spelled out.

    y = (x - mean(x)) / sqrt(var(x) + eps) * gain + bias

The baseline already has LayerNorm with gain and bias and eps 1e-5, and with those values this entry equals it
bit for bit. It is here to vary them: `affine=false` is the non-parametric LayerNorm from which OLMo 2 moved to
RMSNorm, `bias=false` is nanoGPT's.

Seam: `norm`. Fast path: any. Papers: Ba et al. (arXiv:1607.06450); OLMo 2 (arXiv:2501.00656).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from stability_lab.seams import Seams, Site


@dataclass(frozen=True)
class LayerNorm:
    """`eps` > 0; `affine`: learned gain; `bias`: learned shift (only with a gain)."""

    name: ClassVar[str] = "layernorm"
    paper: ClassVar[str] = "arXiv:1607.06450, 2501.00656"
    summary: ClassVar[str] = "LayerNorm with chosen eps, gain and bias (the defaults equal the baseline)"
    identity: ClassVar[bool] = True  # with its default values the model is the baseline

    eps: float = 1e-5
    affine: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ValueError(f"eps={self.eps:g}: must lie between 0 and 1 (1e-5 is usual)")

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, norm=self._norm)

    def _norm(self, site: Site) -> nn.Module:
        return nn.LayerNorm(site.d_model, eps=self.eps, elementwise_affine=self.affine, bias=self.bias)
