"""Post-norm, the placement of the first Transformer and of BERT.

    x = norm(x + f(x)),   no norm before the head

The residual stream is normalised in every block, so its size cannot grow with depth; but gradients pass through every
norm, and deep post-norm models are known to need a warm-up. It is here as the reference that pre-norm replaced.

Seam: `norm_placement`. Fast path: any.
Papers: Vaswani et al. (arXiv:1706.03762); BERT (arXiv:1810.04805); Xiong et al. (arXiv:2002.04745).
"""

from dataclasses import dataclass
from typing import ClassVar

from stability_lab.seams import POST_NORM, Seams


@dataclass(frozen=True)
class PostNorm:
    """No options."""

    name: ClassVar[str] = "postnorm"
    paper: ClassVar[str] = "arXiv:1706.03762, 2002.04745"
    summary: ClassVar[str] = "the norm after the residual addition"

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, norm_placement=POST_NORM)
