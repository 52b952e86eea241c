"""The whole contract between the model and the stabilizers.

The model is a textbook GPT with named slots. Each slot holds a null object until a stabilizer claims it. The
model reads the slots in its constructors only, so `forward` never asks which stabilizer is on, and "off" means
that nothing is there.

Shape letters: B batch, T tokens, D d_model, H query heads, G key/value heads, K head_dim, N = B * T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
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


class ScoreMod(Protocol):
    """A module that maps scaled attention logits element by element; one instance serves all layers.

    Besides the map itself a probe needs its derivative, and the regions of logits that are worth counting as bool
    masks by name.
    """

    def __call__(self, logits: Tensor, /) -> Tensor: ...

    def slope(self, logits: Tensor) -> Tensor: ...

    def regions(self, logits: Tensor) -> dict[str, Tensor]: ...


class Scale(nn.Module):
    """x * factor; the factor is a tensor, so that another value needs no recompilation."""

    factor: Tensor

    def __init__(self, factor: float):
        super().__init__()
        self.register_buffer("factor", torch.tensor(float(factor)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.to(x.dtype)

    def extra_repr(self) -> str:
        return f"factor={self.factor.item():g}"


class Placement(NamedTuple):
    """Which norms exist: residual(x + branch(f(pre(x)))) in each branch, and `final` before the head."""

    pre: bool
    branch: bool
    residual: bool
    final: bool


PRE_NORM = Placement(pre=True, branch=False, residual=False, final=True)


def layer_norm(d: int, layer: int | None, role: str) -> nn.Module:
    """Null object of the `norm` seam: the baseline's LayerNorm (gain and bias, eps 1e-5)."""
    return nn.LayerNorm(d, eps=1e-5)


def plain_qk(shape: AttentionShape) -> nn.Module:
    return PlainQK()


def identity(_: Any) -> nn.Module:
    return nn.Identity()


EXCLUSIVE = (
    "norm",
    "norm_placement",
    "norm_scale",
    "embed_scale",
    "qk_transform",
    "attn_scale",
    "score_restore",
    "score_mod",
    "logit_transform",
)
ADDITIVE = ("loss_terms",)


@dataclass(frozen=True)
class Seams:
    """The slots, and who owns them.

    norm:            (d, layer or None, role) -> module on (..., d); role is "attn", "mlp" or "final"
    norm_placement:  which of the norms exist
    norm_scale:      (layer) -> module on the output of a branch's pre-norm
    embed_scale:     (d_model) -> module on the token embeddings
    qk_transform:    (AttentionShape) -> module (q_BTHK, k_BTGK) -> the same shapes, applied before RoPE
    attn_scale:      (AttentionShape) -> module on q_BTHK: the factor of the layer's attention logits
    score_restore:   (AttentionShape) -> factor; logits are formed in fp16 and multiplied by it in fp32
    score_mod:       elementwise on scaled attention logits, before the mask
    logit_transform: module on the head's logits, before log Z
    loss_terms:      auxiliary losses by owner
    """

    norm: Callable[[int, int | None, str], nn.Module] = layer_norm
    norm_placement: Placement = PRE_NORM
    norm_scale: Callable[[int], nn.Module] = identity
    embed_scale: Callable[[int], nn.Module] = identity
    qk_transform: Callable[[AttentionShape], nn.Module] = plain_qk
    attn_scale: Callable[[AttentionShape], nn.Module] = identity
    score_restore: Callable[[AttentionShape], float] | None = None
    score_mod: ScoreMod | None = None
    logit_transform: nn.Module = field(default_factory=nn.Identity)
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

    def check(self) -> None:
        """SeamConflict for fillings of different seams that cannot work together."""
        if "norm_scale" in self.owners and not self.norm_placement.pre:
            scaled, placed = self.owners["norm_scale"][0], self.owners["norm_placement"][0]
            raise SeamConflict(
                f"stabilizer {scaled} fills the seam 'norm_scale', the output of the pre-norm, and {placed} fills "
                f"'norm_placement' without a pre-norm: keep one of them"
            )
        if self.score_restore is not None and self.score_mod is not None:
            restored, modified = self.owners["score_restore"][0], self.owners["score_mod"][0]
            raise SeamConflict(
                f"stabilizer {restored} fills the seam 'score_restore', which is exact only where the softmax follows, "
                f"and {modified} fills 'score_mod' in between: keep one of them"
            )


class Stabilizer(Protocol):
    """A frozen dataclass that fills seams. `paper` and `summary` are what `stability_lab stabilizers` shows."""

    name: str
    paper: str
    summary: str

    def apply(self, seams: Seams) -> Seams: ...
