"""Transformer block: two residual branches, and the norms that the placement calls for.

Shape letters: B batch, T tokens, D d_model, F d_ff.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from stability_lab.config import ModelConfig
from stability_lab.model.attention import Attention
from stability_lab.model.mask import CAUSAL, Mask
from stability_lab.model.rounding import linear
from stability_lab.seams import Seams, Site


class MLP(nn.Module):
    """(B, T, D) -> (B, T, D): `gelu` is w_down(gelu(w_up x)); `swiglu` gates w_up with silu(w_gate x)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, d_ff = config.d_model, config.d_ff or 4 * config.d_model
        self.w_up = linear(config, d, d_ff)
        self.w_gate = linear(config, d, d_ff) if config.mlp == "swiglu" else None
        self.w_down = linear(config, d_ff, d)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up_BTF = self.w_up(x_BTD)
        hidden = F.gelu(up_BTF) if self.w_gate is None else F.silu(self.w_gate(x_BTD)) * up_BTF
        return self.w_down(hidden)


class Block(nn.Module):
    """(B, T, D) -> (B, T, D), and the bound on the layer's attention logits.

    Either branch is residual_norm(x + branch_norm(f(pre_norm(x)))); the norms that the placement has not are
    identities.
    """

    def __init__(self, config: ModelConfig, site: Site, seams: Seams, backend: str, rotate: nn.Module | None = None):
        super().__init__()
        attn, mlp = site.at("attn", site.layer), site.at("mlp", site.layer)

        def norm(present: bool, site: Site) -> nn.Module:
            return seams.norm(site) if present else nn.Identity()

        place = seams.norm_placement
        self.attn_norm, self.mlp_norm = norm(place.pre, attn), norm(place.pre, mlp)
        self.attn_norm_scale, self.mlp_norm_scale = seams.norm_scale(attn), seams.norm_scale(mlp)
        self.attn = Attention(config, attn, seams, backend, rotate)
        self.mlp = MLP(config)
        self.attn_branch_norm, self.mlp_branch_norm = norm(place.branch, attn), norm(place.branch, mlp)
        self.attn_residual_norm, self.mlp_residual_norm = norm(place.residual, attn), norm(place.residual, mlp)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x_BTD: Tensor, mask: Mask = CAUSAL) -> tuple[Tensor, Tensor]:
        attended, bound = self.attn(self.attn_norm_scale(self.attn_norm(x_BTD)), mask)
        x_BTD = self.attn_residual_norm(x_BTD + self.attn_branch_norm(self.dropout(attended)))
        mixed = self.mlp(self.mlp_norm_scale(self.mlp_norm(x_BTD)))
        return self.mlp_residual_norm(x_BTD + self.mlp_branch_norm(self.dropout(mixed))), bound
