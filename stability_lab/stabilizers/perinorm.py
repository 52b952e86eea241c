"""Peri-norm: norms on both sides of a branch.

    x = x + norm(f(norm(x))),   final norm before the head

It keeps pre-norm's clean input and bounds what the branch adds. Also called sandwich norm; Gemma 2 and 3 use it.

Seam: `norm_placement`. Fast path: any.
Papers: Peri-LN (arXiv:2502.02732); CogView (arXiv:2105.13290); Gemma 2 (arXiv:2408.00118).
"""

from dataclasses import dataclass
from typing import ClassVar

from stability_lab.seams import Placement, Seams


@dataclass(frozen=True)
class PeriNorm:
    """No options."""

    name: ClassVar[str] = "perinorm"
    paper: ClassVar[str] = "arXiv:2502.02732, 2408.00118"
    summary: ClassVar[str] = "norms on a branch's input and on its output"

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, norm_placement=Placement(pre=True, branch=True, residual=False, final=True))
