"""CPU time of forward and backward of single operations, of the formula's and torch's own against ours: in fp32, and
attention in bf16, where this CPU has instructions for it.

python -m benchmarks.numerics --rounds 61
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.timing import Group, group, interleaved, parser, run
from stability_lab.machine.precision import has_bf16
from stability_lab.model.attention import explicit_attention
from stability_lab.model.rope import rope_table, rotate
from stability_lab.numerics import Cap, rms_norm
from stability_lab.objective.loss import language_model_loss
from stability_lab.seams import LossTerm
from stability_lab.stabilizers.zloss import SquaredLogZ


def measured(args: argparse.Namespace) -> Iterator[Group]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def both_ways(function: Callable[..., Tensor], *inputs: Tensor, grad: Tensor | None = None) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return lambda: torch.autograd.grad(function(*leaves), leaves, grad)

    x, gain, bias, grad = random(16, 128, 128), random(128), random(128), random(16, 128, 128)
    heads, grad_heads = random(16, 128, 4, 32), random(16, 4, 128, 32).transpose(1, 2)
    cos, sin = rope_table(128, 32, 10_000.0)
    scores, grad_scores = random(16, 4, 128, 128), random(16, 4, 128, 128)
    logits, targets = random(2048, 4096), torch.randint(4096, (2048,), generator=generator)
    inv_n, z_loss = torch.tensor(1 / 2048), SquaredLogZ(1e-4)

    def loss(fused: bool, *terms: LossTerm) -> Callable[[], object]:
        return both_ways(lambda z: language_model_loss(z, targets, inv_n, terms, None, fused).objective, logits)

    def capped(fused: bool) -> Callable[[], object]:
        return both_ways(Cap(30.0, fused), scores, grad=grad_scores)

    def normalised(fused: bool) -> Callable[[], object]:
        return both_ways(lambda x, gain: rms_norm(x, gain, 1e-6, fused), x, gain, grad=grad)

    def rotated(fused: bool) -> Callable[[], object]:
        return both_ways(lambda x: rotate(x, cos, sin, fused), heads, grad=grad_heads)

    layer_norm = both_ways(lambda x, gain, bias: F.layer_norm(x, (128,), gain, bias), x, gain, bias, grad=grad)
    torch_rms_norm = both_ways(lambda x, gain: F.rms_norm(x, (128,), gain, 1e-6), x, gain, grad=grad)
    cross_entropy = both_ways(lambda z: F.cross_entropy(z, targets), logits)
    pairs = {
        "soft-cap": (capped(True), {"formula": capped(False)}),
        "RMSNorm": (
            normalised(True),
            {"formula": normalised(False), "F.rms_norm": torch_rms_norm, "F.layer_norm": layer_norm},
        ),
        "RoPE": (rotated(True), {"formula": rotated(False)}),
        "cross-entropy": (loss(True), {"formula": loss(False), "F.cross_entropy": cross_entropy}),
        "with z-loss": (loss(True, z_loss), {"formula": loss(False, z_loss)}),
    }
    for name, (ours, others) in pairs.items():
        yield group(name, interleaved({"ours": ours, **others}, args.rounds, clock=time.process_time))
    if not has_bf16():
        return
    for seq_len, n_heads, k in ((64, 4, 32), (128, 4, 32), (256, 8, 32), (512, 8, 32), (256, 8, 64), (512, 8, 64)):
        qkv = [random(2048 // seq_len, n_heads, seq_len, k).bfloat16() for _ in range(3)]
        upstream = torch.ones_like(qkv[0])

        def attention(attend: Callable[..., Tensor], qkv: list[Tensor] = qkv, grad: Tensor = upstream):
            return both_ways(attend, *qkv, grad=grad)

        kernels = {
            "sdpa_fp32": attention(lambda q, k, v: sdpa(q.float(), k.float(), v.float(), is_causal=True).bfloat16()),
            "sdpa": attention(lambda q, k, v: sdpa(q, k, v, is_causal=True)),
            "explicit": attention(lambda q, k, v: explicit_attention(q, k, v, q.shape[-1] ** -0.5)),
        }
        name = f"attention in bf16, {seq_len} tokens, {n_heads} heads of {k}"
        yield group(name, interleaved(kernels, args.rounds, clock=time.process_time))


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.numerics", __doc__, rounds=31, quick={"rounds": 11})
    made.set_defaults(threads=1)
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
