"""What happens to gradients between the backward pass and the update, and to weights after it, in a fixed order."""

from __future__ import annotations

import torch
from torch import nn

from stability_lab.seams import AfterStep, Gradients, GradientStep, Seams, Site

GRAD_CLIP = "grad_clip"  # the owner of clipping, beside those that are stabilizers


class ClipByNorm(GradientStep):
    """coef = min(1, max_norm / |g|): clipping by the global norm (arXiv:1211.5063), the last of the gradient side."""

    order = 100

    def __init__(self, max_norm: float):
        super().__init__()
        self.max_norm = max_norm

    def forward(self, gradients: Gradients) -> Gradients:
        factor = (self.max_norm / (gradients.norm * gradients.coef + 1e-6)).clamp_max(1.0)
        return gradients._replace(coef=gradients.coef * factor)


class GradientSide(nn.Module):
    """The claims of a run on `grad` and `post_step`, and clipping where `grad_clip` is given. Buffers are its state."""

    def __init__(self, seams: Seams, site: Site, grad_clip: float | None):
        super().__init__()
        grad: dict[str, GradientStep] = {owner: make(site.at("grad")) for owner, make in seams.grad.items()}
        if grad_clip is not None:
            grad[GRAD_CLIP] = ClipByNorm(grad_clip)
        # A stable sort: equals stay in the order of their owners' names.
        ordered = sorted(grad, key=lambda owner: grad[owner].order)
        self.grad = nn.ModuleDict({owner: grad[owner] for owner in ordered})
        self.post_step = nn.ModuleDict({owner: make(site.at("post_step")) for owner, make in seams.post_step.items()})

    @torch.no_grad()
    def before(self, gradients: Gradients) -> Gradients:
        for transform in self.grad.values():
            gradients = transform(gradients)
        return gradients

    @torch.no_grad()
    def after(self, done: AfterStep) -> None:
        for change in self.post_step.values():
            change(done)
