"""The whole contract between the model, the training step and the stabilizers.

The model is a textbook transformer with named slots. Each slot holds a null object until a stabilizer claims it. The
model reads the slots in its constructors only, so `forward` never asks which stabilizer is on, and "off" means
that nothing is there.

Shape letters: B batch, T tokens, D d_model, H query heads, G key/value heads, K head_dim, V vocab, N = B * T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class SeamConflict(ValueError):
    """Two stabilizers claim one exclusive seam; the message names both and the seam."""


@dataclass(frozen=True)
class Site:
    """Where a module is to stand. Every factory gets one."""

    layer: int  # 0-based; 0 before the blocks and n_layers behind them, which `role` tells apart
    n_layers: int
    role: str  # attn or mlp in a block; embed before; final, head, logits, loss, grad and post_step behind
    d_model: int
    n_heads: int  # H
    n_kv_heads: int  # G
    head_dim: int  # K
    fused: bool = True  # False: plain operations only, which autograd differentiates

    def at(self, role: str, layer: int | None = None) -> Site:
        """Another place in the same model; behind the blocks unless a layer is given."""
        return replace(self, role=role, layer=self.n_layers if layer is None else layer)


class PlainQK(nn.Module):
    """Null object of the `qk_transform` seam."""

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        return q_BTHK, k_BTGK

    def gain_product(self) -> Tensor | None:
        return None


class QKTransform(Protocol):
    """A module (q_BTHK, k_BTGK) -> the same shapes.

    `gain_product` is for the probe: the largest |gain of q| times the largest |gain of k|, 0-d, by which the bound on
    a normalised logit grows; None without gains.
    """

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, /) -> tuple[Tensor, Tensor]: ...

    def gain_product(self) -> Tensor | None: ...


class Scaling(Protocol):
    """A module that multiplies by `factor` (0-d or (1,)); None where there is no single factor to show."""

    @property
    def factor(self) -> Tensor | None: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


class ModelOutput(NamedTuple):
    """What a model gives for token ids (B, T); C classes of whole sequences."""

    logits_BTV: Tensor
    attn_logit_bound_L: Tensor  # no attention logit of the layer was larger; fp32, detached
    unembedding_VD: Tensor  # the weight that logits come from, without rows that pad the vocabulary
    fused: bool = True  # False: the loss too is to be formed of plain operations
    classes_BC: Tensor | None = None  # logits of a head that judges whole sequences, where there is one


class LossRecord(NamedTuple):
    """What an auxiliary loss may see of one micro-batch. The two statistics are computed where they are asked for."""

    log_z_N: Tensor  # logsumexp of each token's logits, fp32
    logits_NV: Tensor
    unembedding_VD: Tensor

    def mean_logit_N(self) -> Tensor:
        return self.logits_NV.mean(-1, dtype=torch.promote_types(self.logits_NV.dtype, torch.float32))

    def max_logit_N(self) -> Tensor:
        return self.logits_NV.amax(-1).to(torch.promote_types(self.logits_NV.dtype, torch.float32))


class LossTerm(Protocol):
    """A module: record -> weighted penalty in nats, of each token (N,) or of the whole model (0-d).

    It is averaged over valid tokens as the cross-entropy is, and logged as `train/<metric>`.
    """

    metric: str

    def __call__(self, record: LossRecord, /) -> Tensor: ...


class Gradients(NamedTuple):
    """The gradients of one optimizer step on their way to the update; all tensors are on the device.

    The update multiplies every gradient by `coef`, which costs no pass over them. `call_off` is True where the step
    changes nothing (a value is not finite, or nothing was to be predicted): state must then keep its bits.
    """

    grads: list[Tensor]  # of all parameters, in the order of the optimizer's groups, times the fp16 loss scale
    loss: Tensor  # 0-d, nats per token, without auxiliary terms
    norm: Tensor  # 0-d, L2 norm of all gradients without the loss scale and without `coef`
    coef: Tensor  # 0-d
    call_off: Tensor  # 0-d bool


class GradientStep(nn.Module):
    """Gradients -> Gradients, between the backward pass and the update. Its buffers are in the checkpoint.

    Those of lower `order` come first, equals by their owners' names; clipping by the global norm has 100. One that
    changes `grads` in place changes `norm` with them.
    """

    order = 0


class AfterStep(NamedTuple):
    """What a `post_step` module sees, without gradients, when the weights are new."""

    model: nn.Module
    lr: float
    attn_logit_bound_L: Tensor  # of this step's forward passes
    call_off: Tensor  # 0-d bool: the update changed nothing, and neither may this


class ScoreMod(Protocol):
    """A module that maps scaled attention logits element by element; one instance serves all layers.

    Besides the map itself a probe needs its derivative, and the regions of logits that are worth counting as bool
    masks by name.
    """

    def __call__(self, logits: Tensor, /) -> Tensor: ...

    def slope(self, logits: Tensor) -> Tensor: ...

    def regions(self, logits: Tensor) -> dict[str, Tensor]: ...


class Unscaled(nn.Identity):
    """Null object of the seams that scale."""

    factor: Tensor | None = None


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor in the dtype of `x`, rounded once: bf16 has no 1/3, and no factor between 1 and 1.0078."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * factor).to(x.dtype)


class Scale(nn.Module):
    """x * factor, multiplied in fp32; the factor is a tensor, so that another value needs no recompilation."""

    factor: Tensor

    def __init__(self, factor: float):
        super().__init__()
        self.register_buffer("factor", torch.tensor(float(factor)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.factor)

    def extra_repr(self) -> str:
        return f"factor={self.factor.item():g}"


class Placement(NamedTuple):
    """Which norms exist: residual(x + branch(f(pre(x)))) in each branch, and `final` before the head."""

    pre: bool
    branch: bool
    residual: bool
    final: bool


PRE_NORM = Placement(pre=True, branch=False, residual=False, final=True)
POST_NORM = Placement(pre=False, branch=False, residual=True, final=False)


def layer_norm(site: Site) -> nn.Module:
    """Null object of the `norm` seam: the baseline's LayerNorm (gain and bias, eps 1e-5)."""
    return nn.LayerNorm(site.d_model, eps=1e-5)


def plain_qk(site: Site) -> QKTransform:
    return PlainQK()


def unscaled(site: Site) -> Scaling:
    return Unscaled()


def identity(site: Site) -> nn.Module:
    return nn.Identity()


def nothing(site: Site) -> None:
    """Null object of the seams whose absence chooses another kernel."""


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
ADDITIVE = ("loss_terms", "grad", "post_step")


@dataclass(frozen=True)
class Seams:
    """The slots, and who owns them. All but `norm_placement` hold a factory that gets the `Site` of its module.

    norm:            module on (..., D); roles attn, mlp and final, and embed and head of an encoder
    norm_placement:  which of the norms exist
    norm_scale:      module on the output of a branch's pre-norm; roles attn and mlp
    embed_scale:     module on the token embeddings
    qk_transform:    module (q_BTHK, k_BTGK) -> the same shapes, applied before RoPE
    attn_scale:      module on q_BTHK: the factor of the layer's attention logits
    score_restore:   factor; logits are formed in fp16 and multiplied by it in fp32
    score_mod:       elementwise on scaled attention logits, before the mask; one instance may serve all layers
    logit_transform: module on the head's logits, before log Z
    loss_terms:      auxiliary losses by owner
    grad:            modules between the backward pass and the update, by owner
    post_step:       modules AfterStep -> None that change weights in place, by owner; buffers are in the checkpoint
    """

    norm: Callable[[Site], nn.Module] = layer_norm
    norm_placement: Placement = PRE_NORM
    norm_scale: Callable[[Site], Scaling] = unscaled
    embed_scale: Callable[[Site], Scaling] = unscaled
    qk_transform: Callable[[Site], QKTransform] = plain_qk
    attn_scale: Callable[[Site], Scaling] = unscaled
    score_restore: Callable[[Site], float | None] = nothing
    score_mod: Callable[[Site], ScoreMod | None] = nothing
    logit_transform: Callable[[Site], nn.Module] = identity
    loss_terms: Mapping[str, Callable[[Site], LossTerm]] = field(default_factory=dict)
    grad: Mapping[str, Callable[[Site], GradientStep]] = field(default_factory=dict)
    post_step: Mapping[str, Callable[[Site], nn.Module]] = field(default_factory=dict)
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

    def placed(self, name: str) -> Seams:
        """The same with the model's own placement, `pre` or `post`, where no stabilizer claims it."""
        if "norm_placement" in self.owners:
            return self
        return replace(self, norm_placement={"pre": PRE_NORM, "post": POST_NORM}[name])

    def check(self) -> None:
        """SeamConflict for fillings of different seams that cannot work together."""
        if "norm_scale" in self.owners and not self.norm_placement.pre:
            scaled = self.owners["norm_scale"][0]
            fills = f"stabilizer {scaled} fills the seam 'norm_scale', the output of the pre-norm, and"
            if "norm_placement" not in self.owners:
                raise SeamConflict(f"{fills} this model has none: set model.norm_placement=pre, or leave {scaled} out")
            placed = self.owners["norm_placement"][0]
            raise SeamConflict(f"{fills} {placed} fills 'norm_placement' without a pre-norm: keep one of them")
        if "score_restore" in self.owners and "score_mod" in self.owners:
            restored, modified = self.owners["score_restore"][0], self.owners["score_mod"][0]
            raise SeamConflict(
                f"stabilizer {restored} fills the seam 'score_restore', which is exact only where the softmax follows, "
                f"and {modified} fills 'score_mod' in between: keep one of them"
            )


@runtime_checkable
class Stabilizer(Protocol):
    """A frozen dataclass that fills seams. `paper` and `summary` are what `stability_lab stabilizers` shows."""

    name: str
    paper: str
    summary: str

    def apply(self, seams: Seams) -> Seams: ...
