"""LayerNorm scaling: the output of a block's pre-norms shrinks with depth.

    branch input = norm(x) / sqrt(l),   l = 1 ... L

Under pre-norm the variance of the residual stream grows with depth until deep blocks hardly change it. The factor acts
on the input of a branch and not on its output. At step 0 the largest attention logit of the second block is half the
baseline's, because q and k both carry 1/sqrt(2).

Seam: `norm_scale`; there must be a pre-norm. Fast path: any. The authors advise against combining it with scaled
initialisation. Papers: The Curse of Depth (arXiv:2502.05795).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from stability_lab.seams import Scale, Scaling, Seams, Site


@dataclass(frozen=True)
class LNScaling:
    """No options."""

    name: ClassVar[str] = "ln_scaling"
    paper: ClassVar[str] = "arXiv:2502.05795"
    summary: ClassVar[str] = "pre-norm output divided by sqrt(layer)"

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, norm_scale=self._module)

    def _module(self, site: Site) -> Scaling:
        return Scale(1 / math.sqrt(site.layer + 1))
