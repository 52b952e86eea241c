"""RMSNorm in place of the baseline's LayerNorm.

    y = x / sqrt(mean(x^2) + eps) * gain

It drops LayerNorm's centring and bias. OLMo 2 reports no difference in stability between the two. The statistics and
the gain are computed in fp32 and cast once.

Seam: `norm`. Fast path: any. Papers: Zhang and Sennrich (arXiv:1910.07467); OLMo 2 (arXiv:2501.00656).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from stability_lab.numerics import rms_norm
from stability_lab.seams import Seams, Site


class RMSNorm(nn.RMSNorm):
    """(..., D) -> (..., D); fp32 inside, the input's dtype outside."""

    eps: float
    fused = True

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.fused).to(x.dtype)


@dataclass(frozen=True)
class RMSNormStabilizer:
    """`eps` > 0; `affine`: with a learned gain, which starts at 1."""

    name: ClassVar[str] = "rmsnorm"
    paper: ClassVar[str] = "arXiv:1910.07467, 2501.00656"
    summary: ClassVar[str] = "RMSNorm instead of LayerNorm at every norm of the model"

    eps: float = 1e-6
    affine: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ValueError(f"eps={self.eps:g}: must lie between 0 and 1 (1e-6 is usual)")

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, norm=self._norm)

    def _norm(self, site: Site) -> nn.Module:
        norm = RMSNorm(site.d_model, eps=self.eps, elementwise_affine=self.affine)
        norm.fused = site.fused
        return norm
