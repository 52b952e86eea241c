"""Mean-absolute norm in place of the baseline's LayerNorm.

    y = x / (mean(|x|) + eps)

One large entry changes the mean of absolute values less than it changes the root of the mean of squares, so a single
outlier shrinks all the others less than under RMSNorm. There is no gain.

Seam: `norm`. Fast path: any. Papers: none; it is an example.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from stability_lab.numerics import fp32
from stability_lab.seams import Seams, Site


class AbsNorm(nn.Module):
    """(..., D) -> (..., D); fp32 inside, the input's dtype outside."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = fp32(x)
        return (wide / (wide.abs().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@dataclass(frozen=True)
class AbsNormStabilizer:
    """`eps` between 0 and 1."""

    name: ClassVar[str] = "absnorm"
    paper: ClassVar[str] = "none"
    summary: ClassVar[str] = "mean-absolute norm instead of LayerNorm at every norm of the model"

    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ValueError(f"eps={self.eps:g}: must lie between 0 and 1 (1e-6 is usual)")

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, norm=self._norm)

    def _norm(self, site: Site) -> nn.Module:
        return AbsNorm(self.eps)
