"""z-loss: a penalty on the square of the log-partition function of the output softmax.

    loss = (1/N) * sum_n [ CE_n + weight * (log Z_n)^2 ],   log Z = logsumexp(logits)

Cross-entropy does not change when a constant is added to all logits of a token, so nothing keeps log Z from
drifting; large logits then lose precision in bf16 and, late in training at high learning rates, the logits
diverge. The gradient 2 * weight * log Z * softmax(logits) pulls log Z towards 0 from both sides.

Seam: `loss_terms`. Fast path: shares the log-softmax and the backward pass of the cross-entropy.
Papers: PaLM (arXiv:2204.02311), weight 1e-4; Wortsman et al. (arXiv:2309.14322), 1e-4; Chameleon
(arXiv:2405.09818), 1e-5; OLMo 2 (arXiv:2501.00656), text 1e-4, released configurations 1e-5.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from stability_lab.seams import LossRecord, LossTerm, Seams, Site


class SquaredLogZ(nn.Module):
    """weight * log_z^2 in nats per token; the weight is a tensor so that another value needs no recompilation."""

    metric = "z_loss"
    weight: Tensor

    def __init__(self, weight: float):
        super().__init__()
        self.register_buffer("weight", torch.tensor(float(weight)), persistent=False)

    def forward(self, record: LossRecord) -> Tensor:
        return self.weight * record.log_z_N.square()

    def extra_repr(self) -> str:
        return f"weight={self.weight.item():g}"


@dataclass(frozen=True)
class ZLoss:
    """`weight` (nats per squared nat, >= 0); 0 trains bit-identically to no z-loss."""

    name: ClassVar[str] = "zloss"
    paper: ClassVar[str] = "arXiv:2204.02311, 2309.14322, 2501.00656"
    summary: ClassVar[str] = "penalty on the squared log-partition function of the output softmax"

    weight: float = 1e-4

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"weight={self.weight:g}: must be finite and 0 or more (1e-4 and 1e-5 are usual)")

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, loss_terms=self._term)

    def _term(self, site: Site) -> LossTerm:
        return SquaredLogZ(self.weight)
