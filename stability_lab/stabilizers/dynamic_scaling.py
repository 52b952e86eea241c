"""A factor on the attention logits of each layer; larger means sharper attention.

    logits_l = factor_l * q . k / sqrt(head_dim),   l = 0 ... L-1

mode `inverse_layer`: 1 / (l + 1), as GPT-2's and Mistral's `scale_attn_by_inverse_layer_idx`: deep layers start flat.
mode `linear`: from `first` (layer 0) to `last` (layer L-1), or a preset: `up` 0.5 to 1.5, `down` 1.5 to 0.5, `flat`
1 everywhere; the three have the same mean, so that the direction is all that differs.
mode `learned`: exp(theta_l), one theta a layer, which starts at 0 and does not decay: the baseline at step 0.
mode `query_key_layer`: Megatron's and GLM's trick. Logits are formed in fp16 from q / (l + 1) and multiplied back by
l + 1 in fp32 before the softmax. In exact arithmetic that is the baseline; in fp16 it keeps large logits below 65,504.
It needs fp16 and explicit logits, and is refused anywhere else, where it would do nothing.

Seam: `attn_scale` (and `score_restore`). Fast path: any; the factor goes into q, never into the kernel's scale.
Papers: the Mistral project's GPT-2 runs (code); Megatron-LM (arXiv:1909.08053, code); GLM-130B (arXiv:2210.02414).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from stability_lab.seams import Scale, Scaling, Seams, Site, scaled

MODES = ("inverse_layer", "linear", "learned", "query_key_layer")
PRESETS = {"up": (0.5, 1.5), "down": (1.5, 0.5), "flat": (1.0, 1.0)}


class LearnedScale(nn.Module):
    """x * exp(theta), multiplied in fp32, with theta of shape (1,), starting at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))

    @property
    def factor(self) -> Tensor:
        return self.theta.exp()

    def forward(self, q_BTHK: Tensor) -> Tensor:
        return scaled(q_BTHK, self.factor)


@dataclass(frozen=True)
class DynamicScaling:
    """`mode`; for `linear` either `preset` or `first` and `last` (positive factors)."""

    name: ClassVar[str] = "dynamic_scaling"
    paper: ClassVar[str] = "arXiv:1909.08053, 2210.02414"
    summary: ClassVar[str] = "a factor on each layer's attention logits"

    mode: str = "inverse_layer"
    preset: str | None = None
    first: float | None = None
    last: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}: must be one of {', '.join(MODES)}")
        given = {"preset": self.preset, "first": self.first, "last": self.last}
        if self.mode != "linear":
            for key, value in given.items():
                if value is not None:
                    raise ValueError(f"{key}={value}: only mode=linear takes it, and mode is {self.mode}")
            return
        if self.preset is not None:
            if self.preset not in PRESETS:
                raise ValueError(f"preset={self.preset}: must be one of {', '.join(PRESETS)}")
            if self.first is not None or self.last is not None:
                raise ValueError(f"preset={self.preset}: give either a preset or first and last")
            return
        for key in ("first", "last"):
            value = given[key]
            if not isinstance(value, float | int) or not 0 < value < math.inf:
                shown = "null" if value is None else f"{value:g}"
                raise ValueError(f"{key}={shown}: mode=linear needs positive first and last, or a preset")

    def apply(self, seams: Seams) -> Seams:
        if self.mode == "query_key_layer":
            return seams.claim(self.name, attn_scale=self._module, score_restore=lambda site: site.layer + 1.0)
        return seams.claim(self.name, attn_scale=self._module)

    def _module(self, site: Site) -> Scaling:
        return LearnedScale() if self.mode == "learned" else Scale(self._factor(site))

    def _factor(self, site: Site) -> float:
        if self.mode != "linear":
            return 1 / (site.layer + 1)
        first, last = PRESETS[self.preset] if self.preset else (self.first, self.last)
        assert first is not None
        assert last is not None
        return first + (last - first) * site.layer / max(site.n_layers - 1, 1)
