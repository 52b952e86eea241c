"""QK-norm: queries and keys are normalised before RoPE and the dot product.

    logits = norm(q) . norm(k) / sqrt(head_dim)

Attention logits grow with the norms of q and k; at high learning rates they reach thousands, the softmax becomes
one-hot and its gradient vanishes. With a norm a logit is bounded by sqrt(head_dim) * max|g_q| * max|g_k|, where g
are the learned gains.

scope `head`: over each head's K entries, one gain of shape (K,) shared by all heads (Wortsman, Qwen 3, Gemma 3);
scope `full`: over the whole projection, H*K for q and G*K for k, before the heads are split (OLMo 2). One head can
then take all the norm, and the bound is sqrt(H*G) times larger.
norm `rms` or `layer`: as RMSNorm and LayerNorm without bias; norm `l2`: unit length, with one learned temperature a
layer in place of the gains, logits = temperature * (unit q . unit k). It starts where the model is that of `rms`, at
sqrt(head_dim) for scope `head`; without it (`affine=false`) it stays there.

Seam: `qk_transform`. Fast path: any attention back-end.
Papers: Henry et al. (arXiv:2010.04245); Dehghani et al. (arXiv:2302.05442); Wortsman et al. (arXiv:2309.14322);
Rybakov et al. (arXiv:2410.16682); OLMo 2 (arXiv:2501.00656).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_lab.numerics import fp32, rms_norm
from stability_lab.seams import QKTransform, Seams, Site

NORMS = ("rms", "layer", "l2")
SCOPES = ("head", "full")


class QKNorm(nn.Module):
    """(q_BTHK, k_BTGK) -> normalised q and k of the same shapes and dtypes; fp32 inside."""

    def __init__(self, site: Site, scope: str, norm: str, eps: float, affine: bool):
        super().__init__()
        self.scope, self.norm, self.eps, self.fused = scope, norm, eps, site.fused
        k = site.head_dim
        q_width, k_width = (k, k) if scope == "head" else (site.n_heads * k, site.n_kv_heads * k)
        if norm == "l2":
            # At the start the lengths are those of `rms`; the usual 1/sqrt(K) of the dot product follows.
            self.start = math.sqrt(q_width * k_width / k)
            self.temperature = nn.Parameter(torch.tensor([self.start])) if affine else None
            self.q_gain = self.k_gain = None
        else:
            self.q_gain = nn.Parameter(torch.ones(q_width)) if affine else None
            self.k_gain = nn.Parameter(torch.ones(k_width)) if affine else None

    def _normalise(self, x_BTHK: Tensor, gain: Tensor | None) -> Tensor:
        x = fp32(x_BTHK if self.scope == "head" else x_BTHK.flatten(-2))
        if self.norm == "rms":
            x = rms_norm(x, gain, self.eps, self.fused)
        elif self.norm == "layer":
            x = F.layer_norm(x, x.shape[-1:], gain, None, self.eps)
        else:
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps) * math.sqrt(x.shape[-1])
        return x.view(x_BTHK.shape)

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self._normalise(q_BTHK, self.q_gain), self._normalise(k_BTGK, self.k_gain)
        if self.norm == "l2" and self.temperature is not None:
            q = q * (self.temperature / self.start)
        return q.to(q_BTHK.dtype), k.to(k_BTGK.dtype)

    def gain_product(self) -> Tensor | None:
        if self.q_gain is None or self.k_gain is None:
            return None
        return self.q_gain.abs().amax() * self.k_gain.abs().amax()

    def extra_repr(self) -> str:
        return f"scope={self.scope}, norm={self.norm}, eps={self.eps:g}"


@dataclass(frozen=True)
class QKNormStabilizer:
    """`scope` head|full; `norm` rms|layer|l2; `eps` > 0; `affine`: learned gains (l2: a learned temperature)."""

    name: ClassVar[str] = "qknorm"
    paper: ClassVar[str] = "arXiv:2302.05442, 2309.14322, 2410.16682, 2501.00656"
    summary: ClassVar[str] = "queries and keys normalised before the dot product"

    scope: str = "head"
    norm: str = "rms"
    eps: float = 1e-6
    affine: bool = True

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"scope={self.scope}: must be one of {', '.join(SCOPES)}")
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm}: must be one of {', '.join(NORMS)}")
        if not 0 < self.eps < 1:
            raise ValueError(f"eps={self.eps:g}: must lie between 0 and 1 (1e-6 is usual)")

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, qk_transform=self._module)

    def _module(self, site: Site) -> QKTransform:
        return QKNorm(site, self.scope, self.norm, self.eps, self.affine)
