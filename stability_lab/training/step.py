"""One optimizer step: micro-batches, gradient norm, the gradient side, the update, and the step's measurements.

Everything stays on the device. The measurements are 0-d tensors that become one row of a device buffer, which the
loop copies to the host when it flushes. Shape letters: A micro-batches, B sequences in each, T tokens, L layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, _amp_update_scale_, nn  # pyright: ignore[reportPrivateImportUsage]

from stability_lab.machine.precision import autocast, weight_dtype
from stability_lab.model.transformer import GPT
from stability_lab.objective.loss import IGNORE, LossSums
from stability_lab.objective.objective import Batch, Objective
from stability_lab.seams import AfterStep, Gradients, LossTerm
from stability_lab.training.chunked_loss import chunked_loss, samples_at_once
from stability_lab.training.gradient_side import GradientSide
from stability_lab.training.ranks import ONE, Ranks
from stability_lab.training.update import Update


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
    """(Batch of A*B samples) -> one row of `columns`, fp32, on the device.

    A step whose loss or gradient norm is not finite (`bad`) changes nothing: weights and optimizer state keep their
    bits. With on_nonfinite=stop neither does any later one, until the loop reads the flag at its next flush and stops;
    with `skip` and `warn` each step is judged for itself. Gradients that overflow at an fp16 loss scale above 1 while
    the loss is finite are `skipped` and not bad; so is what the gradient side calls off. A step without a valid token
    is `empty` and changes nothing either. `called` is `model` as its `ranks` call it.
    """

    def __init__(
        self,
        model: GPT,
        objective: Objective,
        terms: Mapping[str, LossTerm],
        update: Update,
        side: GradientSide,
        *,
        grad_accum_steps: int,
        precision: str,
        compile: str = "off",
        on_nonfinite: str = "stop",
        ranks: Ranks = ONE,
        called: nn.Module | None = None,
    ):
        self.model, self.objective, self.terms, self.update, self.side = model, objective, terms, update, side
        self.device = update.parameters[0].device
        self.grad_accum_steps, self.precision = max(1, grad_accum_steps // ranks.size), precision
        self.ranks = ranks
        self.scale = LossScale(self.device, precision == "fp16")
        self.on_nonfinite = on_nonfinite
        self.stopped = torch.zeros((), dtype=torch.bool, device=self.device)
        self.columns = (
            "train/loss",
            *(f"train/{term.metric}" for term in terms.values()),
            *(f"train/{name}" for name in objective.traits.columns),
            *("train/z_raw", "train/log_z_mean", "train/log_z_max"),
            *("optim/grad_norm", "optim/clip_coef", "optim/loss_scale", "optim/skipped"),
            *("attn/logit_bound", "bad", "empty"),
        )
        self.forward = forward_loss(called or model, objective, terms.values())
        # Not where it was not measured, nor with several ranks, whose hooks want the whole model, nor with fp16's loss
        # scale, which is to multiply before gradients are rounded.
        fits = compile != "full" and ranks.size == 1 and precision != "fp16"
        self.in_chunks = fits and self.device.type == "cpu" and model.fused
        if self.in_chunks:
            self.forward = chunked_loss(self.forward, model, objective, tuple(terms.values()))
        assert compile in ("off", "block", "full"), compile  # `auto` was settled before
        if compile == "full":
            self.forward = torch.compile(self.forward, fullgraph=True)
        elif compile == "block":
            # All blocks are one piece of code and share what is compiled for the first.
            for block in model.blocks:
                block.compile(fullgraph=True)

    def __call__(self, batch: Batch, lr: float, poison: str | None = None) -> Tensor:
        """`poison` is a fault to inject (`inject.Injector`)."""
        (n,) = self.ranks.sums([(batch.targets_MT != IGNORE).sum().to(weight_dtype(self.precision))])
        inv_n = torch.where(n > 0, 1 / n.clamp_min(1), 0.0)
        if batch.weights_M is not None:
            (labels,) = self.ranks.sums([batch.weights_M.sum()])
            batch = batch._replace(weights_M=batch.weights_M / labels.clamp_min(1))
        for parameter in self.update.parameters:
            parameter.grad = None
        sums, bound_L = self._accumulate(batch, inv_n)
        grads = [p.grad for p in self.update.parameters if p.grad is not None]
        if poison is not None:
            value = math.inf if poison == "inf_loss" else math.nan
            grads[0].mul_(value)
            if poison != "nan_grad":
                sums = sums._replace(ce=sums.ce * value)
        norm = self.ranks.norm(grads) / self.scale.value
        overflow = ~norm.isfinite()
        loss = sums.ce * inv_n
        skipped = overflow & loss.isfinite() & (self.scale.value > 1)
        bad = (overflow | ~loss.isfinite()) & ~skipped
        empty = n == 0
        call_off = bad | skipped | empty
        if self.on_nonfinite == "stop":
            self.stopped |= bad
            call_off = call_off | self.stopped
        side = self.side.before(Gradients(grads, loss, norm, torch.ones_like(norm), call_off))
        scale = self.scale.value.clone()
        self.update.step(lr, (scale / side.coef).float(), side.call_off.float())
        self.side.after(AfterStep(self.model, lr, bound_L, side.call_off))
        self.scale.update(overflow.float())
        skipped = skipped | (side.call_off & ~call_off)
        row = (loss, *(term * inv_n for term in sums.terms), *sums.measured)
        row += (sums.z_raw * inv_n, sums.log_z * inv_n, sums.log_z_max)
        row += (norm, side.coef, scale, skipped, bound_L.amax(), bad, empty)
        return torch.stack([value.float() for value in row])

    def at_once(self, n: int) -> int:
        """How many samples validation takes at once: `n`, a micro-batch, or as few as a step forms logits of."""
        return samples_at_once(n, self.model) if self.in_chunks else n

    def state(self) -> dict[str, Tensor]:
        """Optimizer, gradient side, loss scale and stop flag by name: all that a step leaves behind but the weights."""
        return {
            **self._own(),
            **{f"optimizer/{key}": value for key, value in self.ranks.whole(self.update.state()).items()},
            **{f"side/{key}": value for key, value in self.side.state_dict().items()},
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `state`; ValueError where a tensor is missing or of another shape."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        for name, target in self._own().items():
            if name not in tensors or tensors[name].shape != target.shape or tensors[name].dtype != target.dtype:
                raise ValueError(f"{name} is missing or of another kind")
        weights = dict(self.model.named_parameters())
        moments = part("optimizer/")
        for key, value in moments.items():
            if (weight := weights.get(key.partition("/")[2])) is not None:
                moments[key] = self.ranks.divided(value, weight)
        self.update.load_state(moments)
        try:
            self.side.load_state_dict(part("side/"))
        except RuntimeError as error:
            raise ValueError(f"the gradient side: {error}") from error
        for name, target in self._own().items():
            target.copy_(tensors[name])

    def _own(self) -> dict[str, Tensor]:
        return {"scale/value": self.scale.value, "scale/good_steps": self.scale.good_steps, "stopped": self.stopped}

    def _accumulate(self, batch: Batch, inv_n: Tensor) -> tuple[LossSums, Tensor]:
        """Backward over all micro-batches: the sums of the whole step, and each layer's bound on attention logits."""
        parts = []
        chunks = batch.chunks(self.grad_accum_steps)
        for at, part in enumerate(chunks, start=1):
            with self.ranks.backward(last=at == len(chunks)):
                with autocast(self.device, self.precision):
                    sums, bound_L = self.forward(part, inv_n)
                loss = sums.objective * self.scale.value if self.scale.enabled else sums.objective
                # Engines take the mean over ranks, and what is wanted is the sum.
                (loss if self.ranks.size == 1 else loss * self.ranks.size).backward()
            parts.append((sums._replace(objective=sums.objective.detach()), bound_L))
        all_sums, bounds = zip(*parts, strict=True)
        sums, bound_L = functools.reduce(LossSums.plus, all_sums), torch.stack(bounds).amax(0)
        return (sums, bound_L) if self.ranks.size == 1 else self._over_ranks(sums, bound_L)

    def _over_ranks(self, sums: LossSums, bound_L: Tensor) -> tuple[LossSums, Tensor]:
        objective, ce, z_raw, log_z, *rest = self.ranks.sums(
            (sums.objective, sums.ce, sums.z_raw, sums.log_z, *sums.terms, *sums.measured)
        )
        terms, measured = tuple(rest[: len(sums.terms)]), tuple(rest[len(sums.terms) :])
        largest = self.ranks.largest(torch.cat((sums.log_z_max[None], bound_L)))
        return LossSums(objective, ce, terms, z_raw, log_z, largest[0], measured), largest[1:]


def forward_loss(
    model: nn.Module, objective: Objective, terms: Iterable[LossTerm]
) -> Callable[[Batch, Tensor], tuple[LossSums, Tensor]]:
    """The part of a step that torch.compile sees: (batch, 1/N) -> loss sums and each layer's attention-logit bound."""
    terms = tuple(terms)

    def forward(batch: Batch, inv_n: Tensor) -> tuple[LossSums, Tensor]:
        output = model(batch.inputs_MT, batch.segments_MT)
        return objective.loss(output, batch, inv_n, terms), output.attn_logit_bound_L

    return forward
