"""The whole contract between the model and the stabilizers.

The model is a textbook GPT with named slots. Each slot holds a null object until a stabilizer claims it. The
model reads the slots in its constructors only, so `forward` never asks which stabilizer is on, and "off" means
that nothing is there.

Shape letters: B batch, T tokens, D d_model, H query heads, G key/value heads, K head_dim, N = B * T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn


class SeamConflict(ValueError):
    """Two stabilizers claim one exclusive seam; the message names both and the seam."""


@dataclass(frozen=True)
class AttentionShape:
    """What a stabilizer may know of an attention layer when it builds its module."""

    layer: int  # 0-based
    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # G
    head_dim: int  # K


class PlainQK(nn.Module):
    """Null object of the `qk_transform` seam."""

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        return q_BTHK, k_BTGK


class LossTerm(Protocol):
    """An auxiliary loss: each token's log Z (logsumexp of its logits, fp32) -> its weighted penalty in nats."""

    def __call__(self, log_z_N: Tensor, /) -> Tensor: ...


def layer_norm(d: int, layer: int | None, role: str) -> nn.Module:
    """Null object of the `norm` seam: the baseline's LayerNorm (gain and bias, eps 1e-5)."""
    return nn.LayerNorm(d, eps=1e-5)


def plain_qk(shape: AttentionShape) -> nn.Module:
    return PlainQK()


EXCLUSIVE = ("norm", "qk_transform")
ADDITIVE = ("loss_terms",)


@dataclass(frozen=True)
class Seams:
    """The slots, and who owns them.

    norm:          (d, layer or None, role) -> module on (..., d); role is "attn", "mlp" or "final"
    qk_transform:  (AttentionShape) -> module (q_BTHK, k_BTGK) -> the same shapes, applied before RoPE
    loss_terms:    auxiliary losses by owner
    """

    norm: Callable[[int, int | None, str], nn.Module] = layer_norm
    qk_transform: Callable[[AttentionShape], nn.Module] = plain_qk
    loss_terms: Mapping[str, LossTerm] = field(default_factory=dict)
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def claim(self, owner: str, **slots: Any) -> Seams:
        """Return new seams in which `owner` holds `slots`; the order of claims never changes the result."""
        owners, changes = dict(self.owners), {}
        for seam, filling in slots.items():
            if seam in EXCLUSIVE:
                if seam in owners:
                    first, second = sorted((owners[seam][0], owner))
                    raise SeamConflict(
                        f"stabilizers {first} and {second} both claim the exclusive seam '{seam}': keep one of them"
                    )
                changes[seam] = filling
            elif seam in ADDITIVE:
                held = {**getattr(self, seam), owner: filling}
                changes[seam] = {name: held[name] for name in sorted(held)}
            else:
                raise TypeError(f"{owner} claims an unknown seam '{seam}'")
            owners[seam] = tuple(sorted((*owners.get(seam, ()), owner)))
        return replace(self, owners={name: owners[name] for name in sorted(owners)}, **changes)


class Stabilizer(Protocol):
    """A frozen dataclass that fills seams. `paper` and `summary` are what `stability_lab stabilizers` shows."""

    name: str
    paper: str
    summary: str

    def apply(self, seams: Seams) -> Seams: ...
