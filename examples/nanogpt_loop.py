"""The judge in a plain PyTorch loop: a small character model that learns this very file.

python examples/nanogpt_loop.py --steps 300 --lr 3e-3

The lines marked with (m) are all that the monitor needs.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from stability_lab import Monitor  # (m)

BATCH, CONTEXT, WIDTH, WARMUP = 16, 32, 32, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharacterModel(nn.Module):
    def __init__(self, n_characters):
        super().__init__()
        self.embedding, self.position = nn.Embedding(n_characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, n_characters))

    def forward(self, inputs, targets):
        x = self.embedding(inputs) + self.position.weight
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())


def batch(data, generator):
    starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
    windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def validation_loss(model, data):
    generator = torch.Generator().manual_seed(1)
    return torch.stack([model(*batch(data, generator)) for _ in range(4)]).mean()


def train(steps, max_lr, folder):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    text = Path(__file__).read_text(encoding="utf-8")
    characters = sorted(set(text))
    data = torch.tensor([characters.index(character) for character in text])
    train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    model = CharacterModel(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr)

    config = {"seed": 0, "optimizer": {"name": "adamw", "lr": max_lr}, "steps": steps}
    with Monitor(folder, model=model, config=config, warmup_steps=WARMUP, vocab_size=len(characters)) as monitor:  # (m)
        monitor.log_validation(validation_loss(model, val_data))  # (m)
        for step in range(1, steps + 1):
            lr = max_lr * min(step / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr
            inputs, targets = batch(train_data, generator)
            loss = model(inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            monitor.step(loss, lr=lr, tokens=inputs.numel())  # (m) after backward, before clipping
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0 or step == steps:
                monitor.log_validation(validation_loss(model, val_data))  # (m)
            if monitor.should_stop:  # (m)
                break
    return monitor.path, monitor.finish()  # (m)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", default="outputs/mine/characters")
    arguments = parser.parse_args()
    path, judgement = train(arguments.steps, arguments.lr, arguments.out)
    print(path)
    if judgement is not None:  # there was a step
        print(f"{judgement.verdict.verdict}: {judgement.verdict.reason}")
