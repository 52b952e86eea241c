"""One optimizer step: micro-batches, gradient norm, clipping, the update, and the step's measurements.

Everything stays on the device. The measurements are 0-d tensors that become one row of a device buffer, which the
loop copies to the host when it flushes. Shape letters: A micro-batches, B sequences in each, T tokens, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, _amp_update_scale_, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]

from stability_lab.model.transformer import GPT
from stability_lab.objective.loss import IGNORE, LossSums, language_model_loss
from stability_lab.seams import LossTerm
from stability_lab.training.optimizers import guarded_step

COLUMNS = (
    "train/loss",
    "train/z_loss",
    "train/z_raw",
    "train/log_z_mean",
    "train/log_z_max",
    "optim/grad_norm",
    "optim/clip_coef",
    "optim/loss_scale",
    "optim/skipped",
    "attn/logit_bound",
    "bad",
    "empty",
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


class LossScale:
    """Dynamic loss scale for fp16, on the device: halved at an overflow, doubled after 2,000 good steps."""

    def __init__(self, device: torch.device, enabled: bool):
        self.enabled = enabled
        self.value = torch.tensor(65536.0 if enabled else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        if self.enabled:
            _amp_update_scale_(self.value, self.good_steps, overflow, 2.0, 0.5, 2000)


class TrainStep:
    """(tokens (A*B, T+1)) -> one row of `COLUMNS`, fp32, on the device.

    A step whose loss or gradient norm is not finite (`bad`) changes nothing: weights and optimizer state keep their
    bits. With on_nonfinite=stop neither does any later one, until the loop reads the flag at its next flush and stops;
    with `skip` and `warn` each step is judged for itself. Gradients that overflow at an fp16 loss scale above 1 while
    the loss is finite are `skipped` and not bad. A step without a valid token is `empty` and changes nothing either.
    """

    def __init__(
        self,
        model: GPT,
        terms: Sequence[LossTerm],
        optimizer: torch.optim.AdamW,
        *,
        grad_accum_steps: int,
        grad_clip: float | None,
        precision: str,
        compile: str = "off",
        on_nonfinite: str = "stop",
    ):
        self.model, self.optimizer = model, optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.grad_accum_steps, self.grad_clip, self.precision = grad_accum_steps, grad_clip, precision
        self.scale = LossScale(self.device, precision == "fp16")
        self.on_nonfinite = on_nonfinite
        self.stopped = torch.zeros((), dtype=torch.bool, device=self.device)
        self.forward = forward_loss(model, terms)
        if compile == "full":
            self.forward = torch.compile(self.forward, fullgraph=True)
        elif compile == "block":
            # All blocks are one piece of code and share what is compiled for the first.
            for block in model.blocks:
                block.compile(fullgraph=True)

    def __call__(self, tokens: Tensor, lr: float, targets: Tensor | None = None, poison: str | None = None) -> Tensor:
        """`targets` (A*B, T) unless they are the next tokens; `poison` is a fault to inject (`inject.Injector`)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:] if targets is None else targets
        n = (targets != IGNORE).sum().float()
        inv_n = torch.where(n > 0, 1 / n.clamp_min(1), 0.0)
        for parameter in self.parameters:
            parameter.grad = None
        sums, bound = self._accumulate(inputs, targets, inv_n)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if poison is not None:
            value = math.inf if poison == "inf_loss" else math.nan
            grads[0].mul_(value)
            if poison != "nan_grad":
                sums[0] = sums[0] * value
        norm = torch.stack(_foreach_norm(grads)).norm() / self.scale.value
        coef = torch.ones_like(norm)
        if self.grad_clip is not None:
            coef = (self.grad_clip / (norm + 1e-6)).clamp_max(1.0)
        overflow = ~norm.isfinite()
        loss = sums[0] * inv_n
        skipped = overflow & loss.isfinite() & (self.scale.value > 1)
        bad = (overflow | ~loss.isfinite()) & ~skipped
        empty = n == 0
        call_off = bad | skipped | empty
        if self.on_nonfinite == "stop":
            self.stopped |= bad
            call_off = call_off | self.stopped
        scale = self.scale.value.clone()
        guarded_step(self.optimizer, lr, scale / coef, call_off.float())
        self.scale.update(overflow.float())
        row = (loss, *(s * inv_n for s in sums[1:4]), sums[4], norm, coef, scale, skipped, bound, bad, empty)
        return torch.stack([value.float() for value in row])

    def state(self) -> dict[str, Tensor]:
        """Optimizer, loss scale and stop flag by name: all that a step leaves behind beside the weights."""
        tensors = {"scale/value": self.scale.value, "scale/good_steps": self.scale.good_steps, "stopped": self.stopped}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{name}"] = value
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `state`; ValueError where a tensor is missing or of another shape."""
        parameters = dict(self.model.named_parameters())
        state: dict[Tensor, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            if kind == "optimizer":
                field, _, name = rest.partition("/")
                parameter = parameters.get(name)
                if parameter is None or (field != "step" and value.shape != parameter.shape):
                    raise ValueError(f"{key} fits no parameter of this model")
                state.setdefault(parameter, {})[field] = value.to(self.device).clone()
        for owner, keys in state.items():
            if keys.keys() != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(f"the optimizer's state holds {sorted(keys)} for a parameter of shape {owner.shape}")
        for name, target in (
            ("scale/value", self.scale.value),
            ("scale/good_steps", self.scale.good_steps),
            ("stopped", self.stopped),
        ):
            if name not in tensors or tensors[name].shape != target.shape or tensors[name].dtype != target.dtype:
                raise ValueError(f"{name} is missing or of another kind")
            target.copy_(tensors[name])
        self.optimizer.state.clear()
        self.optimizer.state.update(state)

    def _accumulate(self, inputs: Tensor, targets: Tensor, inv_n: Tensor) -> tuple[list[Tensor], Tensor]:
        """Backward over all micro-batches; sums of ce, terms, z_raw, log_z, then the maxima of |log Z| and bound."""
        sums = [torch.zeros((), device=self.device) for _ in range(4)]
        largest = [torch.zeros((), device=self.device) for _ in range(2)]
        for x, y in zip(inputs.chunk(self.grad_accum_steps), targets.chunk(self.grad_accum_steps), strict=True):
            with autocast(self.device, self.precision):
                loss, bound = self.forward(x, y, inv_n)
            (loss.objective * self.scale.value if self.scale.enabled else loss.objective).backward()
            parts = (loss.ce, loss.terms, loss.z_raw, loss.log_z)
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
            largest = [torch.maximum(a, b) for a, b in zip(largest, (loss.log_z_max, bound), strict=True)]
        return [*sums, largest[0]], largest[1]


def forward_loss(model: GPT, terms: Sequence[LossTerm]) -> Callable[[Tensor, Tensor, Tensor], tuple[LossSums, Tensor]]:
    """The part of a step that torch.compile sees: (inputs, targets, 1/N) -> loss sums and attention-logit bound."""

    def forward(inputs_BT: Tensor, targets_BT: Tensor, inv_n: Tensor) -> tuple[LossSums, Tensor]:
        output = model(inputs_BT)
        sums = language_model_loss(output.logits_BTV.flatten(0, 1), targets_BT.flatten(), inv_n, terms)
        return sums, output.attn_logit_bound_L.amax()

    return forward
