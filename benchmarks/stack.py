"""Many small runs as one graph: K models with stacked parameters through `torch.func` against K steps in sequence.

    python -m benchmarks.stack --members 8 --d-model 32 64 128

Forward, backward and AdamW of plain models (`nn.Linear`, attention by matrix products, no diagnostics), one thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from benchmarks import timing
from benchmarks.timing import Group, group, interleaved, parser, positive, run
from stability_lab.config import ConfigError

VOCAB, LAYERS, HEADS, SEQ_LEN, BATCH = 257, 2, 2, 64, 8


class Plain(nn.Module):
    """A pre-norm GPT of which nothing is fused, so that `vmap` can stack it."""

    def __init__(self, d: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(d),
                    "qkv": nn.Linear(d, 3 * d),
                    "out": nn.Linear(d, d),
                    "norm2": nn.LayerNorm(d),
                    "up": nn.Linear(d, 4 * d),
                    "down": nn.Linear(4 * d, d),
                }
            )
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, t, d = x.shape
        hidden = torch.ones(t, t, dtype=torch.bool, device=tokens.device).triu(1)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            q, k, v = block["qkv"](block["norm1"](x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2) / (d // HEADS) ** 0.5).masked_fill(hidden, -torch.inf)
            x = x + block["out"]((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def variants(d: int, members: int, device: str = "cpu") -> dict[str, Callable[[], None]]:
    """A step of all members, one after the other and as one; on CUDA until the device is done."""
    models = [Plain(d).to(device) for _ in range(members)]
    tokens = torch.randint(VOCAB, (members, BATCH, SEQ_LEN), device=device)
    targets = torch.randint(VOCAB, (members, BATCH, SEQ_LEN), device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]

    def sequence() -> None:
        for model, optimizer, x, y in zip(models, optimizers, tokens, targets, strict=True):
            optimizer.zero_grad(set_to_none=True)
            model(x, y).backward()
            optimizer.step()
        wait()

    parameters, buffers = stack_module_state(models)
    stacked = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    together = torch.optim.AdamW(stacked.values(), fused=True)
    one = Plain(d).to("meta")

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional_call(one, (own, buffers), (x, y))

    gradients = vmap(grad(loss))

    def stack() -> None:
        for name, gradient in gradients({n: p.detach() for n, p in stacked.items()}, tokens, targets).items():
            stacked[name].grad = gradient
        together.step()
        wait()

    return {"sequence": sequence, "stack": stack}


def measured(args: argparse.Namespace) -> Iterator[Group]:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use cpu")
    for d in args.d_model:
        if d % HEADS:
            raise ConfigError(f"--d-model {d}: must be a multiple of the {HEADS} heads")
    for d in args.d_model:
        seconds = interleaved(variants(d, args.members, args.device), args.rounds, clock=timing.clock(args))
        yield group(f"{args.members} models of d {d} on {args.device}", seconds, speed=True)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.stack", __doc__, rounds=21, quick={"rounds": 11})
    timing.add_cpu_time(made)
    made.set_defaults(threads=1)
    made.add_argument("--members", type=positive, default=8, metavar="K", help="default: %(default)s")
    made.add_argument("--d-model", type=positive, nargs="+", default=[32, 64, 128], metavar="D")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
