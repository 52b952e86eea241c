"""Transformer block: two residual branches, each with the norm in front (pre-norm).

Shape letters: B batch, T tokens, D d_model, F d_ff.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from stability_lab.config import ModelConfig
from stability_lab.model.attention import Attention, AttentionStats
from stability_lab.seams import Seams


class MLP(nn.Module):
    """(B, T, D) -> (B, T, D): `gelu` is w_down(gelu(w_up x)); `swiglu` gates w_up with silu(w_gate x)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, d_ff = config.d_model, config.d_ff or 4 * config.d_model
        self.w_up = nn.Linear(d, d_ff, bias=config.bias)
        self.w_gate = nn.Linear(d, d_ff, bias=config.bias) if config.mlp == "swiglu" else None
        self.w_down = nn.Linear(d_ff, d, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up_BTF = self.w_up(x_BTD)
        hidden = F.gelu(up_BTF) if self.w_gate is None else F.silu(self.w_gate(x_BTD)) * up_BTF
        return self.w_down(hidden)


class Block(nn.Module):
    """(B, T, D) -> (B, T, D), and the bound on the layer's attention logits."""

    def __init__(self, config: ModelConfig, layer: int, seams: Seams, backend: str):
        super().__init__()
        self.attn_norm = seams.norm(config.d_model, layer, "attn")
        self.attn = Attention(config, layer, seams, backend)
        self.mlp_norm = seams.norm(config.d_model, layer, "mlp")
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, stats: list[AttentionStats] | None = None
    ) -> tuple[Tensor, Tensor]:
        attended, bound = self.attn(self.attn_norm(x_BTD), rope, stats)
        x_BTD = x_BTD + self.dropout(attended)
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD))), bound
