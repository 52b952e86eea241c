"""A training step of ours against a plain GPT of the same shape: fp32, eager, same batch, one process, taking turns.

The plain one is written the way small trainers usually are: one matrix for q, k and v, F.cross_entropy,
clip_grad_norm_ and torch's default AdamW on CPU. `--nanogpt DIR` takes the model of a nanoGPT checkout in its place.
Both sides hold the same number of parameters, up to a handful of norm biases.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved, ratio
from torch import Tensor, nn

from stability_lab.build import build_stabilizers, build_step, fill_seams
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.model.init import initialise
from stability_lab.model.transformer import GPT


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
    def __init__(self, d: int, layers: int, heads: int, seq_len: int, vocab: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(seq_len, d)
        self.blocks = nn.ModuleList(PlainBlock(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d, bias=False), nn.Linear(d, vocab, bias=False)
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


def plain_step(model: nn.Module, precision: str) -> Callable[[Tensor], object]:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_step(overrides: list[str], compile: str = "off") -> Callable[[Tensor], object]:
    config = compose_jobs(read_command_line([*overrides, f"trainer.compile={compile}"]))[0].config
    seams = fill_seams(build_stabilizers(config))
    model = GPT(config.model, seams)
    initialise(model, 0)
    step = build_step(config, model)
    return lambda tokens: step(step.objective.batch(tokens, 0), 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, help="folder with nanoGPT's model.py")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=6,
        default=(256, 4, 8, 256, 4096, 16),
        metavar="N",
        help="d_model layers heads seq_len vocab batch (default 256 4 8 256 4096 16)",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    d, layers, heads, seq_len, vocab, batch = args.shape
    if args.nanogpt:
        spec = importlib.util.spec_from_file_location("nanogpt_model", args.nanogpt / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = module
        spec.loader.exec_module(module)
        plain = module.GPT(
            module.GPTConfig(
                block_size=seq_len,
                vocab_size=vocab,
                n_layer=layers,
                n_head=heads,
                n_embd=d,
                dropout=0.0,
                bias=False,
            )
        )
    else:
        plain = PlainGPT(d, layers, heads, seq_len, vocab)
    shape = [
        f"model.d_model={d}",
        f"model.n_layers={layers}",
        f"model.n_heads={heads}",
        f"model.seq_len={seq_len}",
        f"model.vocab_size={vocab}",
        "model.tied_head=true",
        "model.positions=learned",
    ]
    tokens = torch.randint(vocab, (batch, seq_len + 1), generator=torch.Generator().manual_seed(0))
    reference = "nanoGPT" if args.nanogpt else "plain GPT"
    variants = {
        reference: plain_step(plain, "fp32"),
        "ours": our_step(shape),
        "ours, qknorm + zloss": our_step([*shape, "+stabilizer=[qknorm,zloss]"]),
        "ours, rope": our_step([s for s in shape if "positions" not in s]),
        "ours, bf16": our_step([*shape, "trainer.precision=bf16"]),
    }
    seconds = interleaved({name: (lambda f=f: f(tokens)) for name, f in variants.items()}, args.rounds)
    for name in variants:
        middle, low, high = ratio(seconds[reference], seconds[name])
        median = sorted(seconds[name])[len(seconds[name]) // 2]
        rate = f"{batch * seq_len / median:>9,.0f} tokens/s"
        print(f"{name:<22} {rate}   {middle:.2f}x {reference} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
