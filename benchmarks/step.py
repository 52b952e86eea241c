"""A training step of ours against that of a plain GPT of the same shape, or of another project's checkout.

    python -m benchmarks.step                                     a plain GPT as small trainers write it, eager
    python -m benchmarks.step --peer nanogpt=PATH --compile       nanoGPT's model and optimizer, eager and compiled
    python -m benchmarks.step --shape gpt_nano --threads 1        another shape
    python -m benchmarks.step --profile                           and where our step spends it
    python -m benchmarks.step --growth                            how time and memory grow with the model

Both sides compute on the same batch in one process, clip gradients at 1 and hold the same number of parameters, up to a
handful of norm biases. In bf16 the peer's forward pass is under autocast, also on a CPU, where nanoGPT itself switches
autocast off. `matrix products` are those of the step with its weights (forward, and both of backward) and nothing else:
what the machine attains. `share` is a step's FLOPs a second (6 per weight and token, 12 L d T per token for attention)
as a part of that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import growth, timing
from benchmarks.timing import Group, group, interleaved, parser, positive, run
from stability_lab.build import build_stabilizers, build_step, fill_seams
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import ConfigError
from stability_lab.machine.precision import autocast, has_bf16
from stability_lab.model.init import initialise
from stability_lab.model.transformer import GPT
from stability_lab.objective.causal_lm import CausalLM

CPU = torch.device("cpu")


class Shape(NamedTuple):
    d: int
    layers: int
    heads: int
    seq_len: int
    vocab: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each weight that is multiplied."""
        d = self.d
        return self.layers * [(d, d), (d, d), (d, d), (d, d), (d, 4 * d), (4 * d, d)] + [(d, self.vocab)]

    @property
    def product_flops(self) -> int:
        return 6 * self.tokens * sum(k * n for k, n in self.products)

    @property
    def flops(self) -> int:
        return self.product_flops + 12 * self.tokens * self.layers * self.d * self.seq_len

    @property
    def words(self) -> str:
        return (
            f"{self.layers} layers, d {self.d}, {self.heads} heads, {self.batch} x {self.seq_len} tokens, "
            f"vocabulary {self.vocab:,}"
        )

    @property
    def overrides(self) -> list[str]:
        return [
            *(f"model.d_model={self.d}", f"model.n_layers={self.layers}", f"model.n_heads={self.heads}"),
            *(f"model.seq_len={self.seq_len}", f"model.vocab_size={self.vocab}"),
        ]


# `goal` is the shape at which other projects were compared; `gpt_nano` and `small` are shapes of sweeps on a laptop.
SHAPES = {
    "goal": Shape(256, 4, 8, 256, 4096, 16),
    "gpt_nano": Shape(128, 4, 4, 128, 257, 16),
    "small": Shape(64, 2, 2, 64, 257, 8),
}
LIKE_PEER = ("model.positions=learned", "model.tied_head=true")


class PlainBlock(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(d, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(shape.vocab, shape.d), nn.Embedding(shape.seq_len, shape.d)
        self.blocks = nn.ModuleList(PlainBlock(shape.d, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.d, bias=False), nn.Linear(shape.d, shape.vocab, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_parts(shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain GPT and torch's default AdamW."""
    model = PlainGPT(shape)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


class Peer:
    """The checkout that `--peer nanogpt=PATH` names; ConfigError where there is none."""

    def __init__(self, text: str):
        name, _, path = text.partition("=")
        if name != "nanogpt" or not path:
            raise ConfigError(f"--peer {text}: must be nanogpt=PATH, with the folder of a nanoGPT checkout")
        file = Path(path).expanduser() / "model.py"
        if not file.is_file():
            raise ConfigError(f"--peer {text}: there is no {file}; name the folder of a nanoGPT checkout")
        spec = importlib.util.spec_from_file_location("nanogpt_model", file)
        assert spec is not None
        assert spec.loader is not None
        self.module: Any = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = self.module  # its dataclass looks its own module up
        try:
            spec.loader.exec_module(self.module)
            self.model, self.config = self.module.GPT, self.module.GPTConfig
        except (AttributeError, ImportError, SyntaxError) as error:
            raise ConfigError(f"--peer {text}: {file} is not nanoGPT's model ({error})") from error

    def parts(self, shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Its model, and the optimizer that it makes for itself."""
        sizes = {"n_embd": shape.d, "n_layer": shape.layers, "n_head": shape.heads, "block_size": shape.seq_len}
        with contextlib.redirect_stdout(io.StringIO()):
            model = self.model(self.config(**sizes, vocab_size=shape.vocab, dropout=0.0, bias=False))
            optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
        return model, optimizer


def peer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, compile: bool
) -> Callable[[Tensor], object]:
    forward = torch.compile(model) if compile else model

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(CPU, precision):
            _, loss = forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_step(overrides: Sequence[str], compile: str = "off") -> Callable[[Tensor], object]:
    config = compose_jobs(read_command_line([*overrides, f"trainer.compile={compile}"]))[0].config
    model = GPT(config.model, fill_seams(build_stabilizers(config)), precision=config.trainer.precision)
    initialise(model, 0)
    step = build_step(config, model, CausalLM())
    return lambda tokens: step(step.objective.batch(tokens, 0), 1e-3)


def products(shape: Shape, precision: str) -> Callable[[], None]:
    """The step's products of activations with weights and their gradients, each as one call."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    made = []
    for k, n in set(shape.products):
        x, w, grad = (torch.randn(size, dtype=dtype) for size in ((shape.tokens, k), (n, k), (shape.tokens, n)))
        outs = [torch.empty(size, dtype=dtype) for size in ((shape.tokens, n), (shape.tokens, k), (n, k))]
        made.append((shape.products.count((k, n)), x, w, grad, outs))

    def call() -> None:
        for count, x, w, grad, (y, grad_x, grad_w) in made:
            for _ in range(count):
                torch.mm(x, w.t(), out=y)
                torch.mm(grad, w, out=grad_x)
                torch.mm(grad.t(), x, out=grad_w)

    return call


def shape_of(text: str) -> Shape:
    if text in SHAPES:
        return SHAPES[text]
    numbers = text.split(",")
    if len(numbers) != len(Shape._fields):
        known = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}, nor d_model,layers,heads,seq_len,vocab,batch")
    return Shape(*map(positive, numbers))


def measured(args: argparse.Namespace) -> Iterator[Group]:
    if args.growth and (args.peer or args.compile or args.profile):
        raise ConfigError("--growth: measures our eager step alone; leave out --peer, --compile and --profile")
    if args.picture and not args.growth:
        raise ConfigError(f"--picture {args.picture}: is drawn by --growth; add it")
    if args.growth:
        yield from growth.measured(args, our_step)
        return
    shape: Shape = args.shape
    peer = Peer(args.peer) if args.peer else None
    theirs, name = (peer.parts, "nanoGPT") if peer else (plain_parts, "plain GPT")
    tokens = torch.randint(shape.vocab, (shape.batch, shape.seq_len + 1), generator=torch.Generator().manual_seed(0))
    precisions = [p for p in args.precision if p == "fp32" or has_bf16()]
    steps: dict[str, Callable[[Tensor], object]] = {}
    for precision in precisions:
        for compile in (False, True) if args.compile else (False,):
            how = f"{precision}, {'compiled' if compile else 'eager'}"
            ours = [*shape.overrides, f"trainer.precision={precision}"]
            mode = "full" if compile else "off"
            steps[f"{name}, {how}"] = peer_step(*theirs(shape), precision, compile)
            steps[f"ours, {how}"] = our_step([*ours, *LIKE_PEER], mode)
            steps[f"ours with RoPE, untied, {how}"] = our_step(ours, mode)
    variants: dict[str, Callable[[], object]] = {key: (lambda f=f: f(tokens)) for key, f in steps.items()}
    variants |= {f"matrix products, {precision}": products(shape, precision) for precision in precisions}
    seconds = interleaved(variants, args.rounds, clock=timing.clock(args))
    yield _table(shape, seconds, [p for p in args.precision if p not in precisions])
    if args.profile:
        for key in steps:
            if key.startswith("ours, "):
                yield profile(key, variants[key])


def _table(shape: Shape, seconds: Mapping[str, Sequence[float]], left_out: Sequence[str]) -> Group:
    note = f"{', '.join(left_out)} is left out: this CPU has no instructions for it" if left_out else ""
    table = group(f"A step: {shape.words}", seconds, speed=True, note=note)
    # Products at their own speed, and a step against those of its precision.
    rate = {row["name"]: shape.product_flops / row["seconds"] for row in table.rows if row["name"].startswith("matrix")}

    def share(row: Mapping[str, Any]) -> float | None:
        if row["name"] in rate:
            return None
        attained = rate["matrix products, bf16" if "bf16" in row["name"] else "matrix products, fp32"]
        return shape.flops / row["seconds"] / attained

    table.add("tokens/s", lambda row: None if row["name"] in rate else shape.tokens / row["seconds"])
    return table.add("share of products", share).add("GFLOP/s", lambda row: rate.get(row["name"], 0) / 1e9 or None)


def profile(name: str, call: Callable[[], object], steps: int = 5, most: int = 12) -> Group:
    """Shares of the CPU time of some steps by operation, without what it calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            call()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in events)
    rows = [
        {"name": event.key[:60], "seconds": event.self_cpu_time_total / steps / 1e6, "calls": event.count / steps}
        for event in events[:most]
    ]
    return Group(f"Profile of a step: {name}", rows).add("share", lambda row: 1e6 * steps * row["seconds"] / whole)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.step", __doc__, rounds=15, quick={"shape": SHAPES["small"], "rounds": 15})
    timing.add_cpu_time(made)
    made.add_argument("--peer", metavar="nanogpt=PATH", help="a checkout of nanoGPT (default: a plain GPT)")
    made.add_argument(
        "--shape",
        type=shape_of,
        default=SHAPES["goal"],
        metavar="NAME|D,L,H,T,V,B",
        help=f"{', '.join(SHAPES)}, or width, layers, heads, tokens, vocabulary, batch (default: goal)",
    )
    made.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    made.add_argument("--compile", action="store_true", help="compiled as well: a minute or two more")
    made.add_argument("--profile", action="store_true", help="where the time of our eager step goes")
    made.add_argument("--growth", action="store_true", help="how time and memory grow, with exponents and a picture")
    made.add_argument("--picture", type=Path, metavar="FILE", help="of --growth (default: none is drawn)")
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
