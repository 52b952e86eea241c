"""Reordered norm: the norm moves from a branch's input to its output.

    x = x + norm(f(x)),   final norm before the head

What a branch adds to the residual stream has a fixed size, whatever the size of its weights. OLMo 2 uses it with
RMSNorm and QK-norm and reports a gradient-norm spike score of 0.069 against 0.108 for the two together, and that
neither gave good results alone.

Seam: `norm_placement`. Fast path: any.
Papers: OLMo 2 (arXiv:2501.00656), 3.3.2; Swin v2 (arXiv:2111.09883); Chameleon (arXiv:2405.09818).
"""

from dataclasses import dataclass
from typing import ClassVar

from stability_lab.seams import Placement, Seams


@dataclass(frozen=True)
class ReorderedNorm:
    """No options."""

    name: ClassVar[str] = "reordered_norm"
    paper: ClassVar[str] = "arXiv:2501.00656, 2111.09883"
    summary: ClassVar[str] = "the norm on a branch's output instead of its input"

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, norm_placement=Placement(pre=False, branch=True, residual=False, final=True))
