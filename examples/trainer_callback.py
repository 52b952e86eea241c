"""The judge in transformers' Trainer: a tiny GPT-2 that learns this very file, byte by byte.

pip install transformers accelerate
python examples/trainer_callback.py --steps 100

The lines marked with (m) are all that the monitor needs.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from stability_lab import Monitor  # (m)

CONTEXT = 32


class Windows(torch.utils.data.Dataset):
    """A part of this file, in windows that start every 16 bytes."""

    def __init__(self, start, stop):
        data = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, CONTEXT, 16)
        self.windows = data[int(start * len(data)) : int(stop * len(data))]

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def train(steps, lr, folder):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as checkpoints:
        settings = TrainingArguments(
            output_dir=checkpoints,
            max_steps=steps,
            learning_rate=lr,
            per_device_train_batch_size=8,
            logging_steps=1,  # (m) a row for every step
            logging_nan_inf_filter=False,  # (m) the Trainer would replace a NaN by a mean
            eval_strategy="steps",
            eval_steps=max(1, steps // 2),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
            use_cpu=True,
        )
        monitor = Monitor(folder, model=model, config={"seed": 0, "lr": lr}, vocab_size=256)  # (m)
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=Windows(0, 0.9),
            eval_dataset=Windows(0.92, 1),
            callbacks=[monitor.callback()],  # (m)
        )
        trainer.train()
    return monitor.path, monitor.finish()  # (m)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", default="outputs/mine/trainer")
    arguments = parser.parse_args()
    path, judgement = train(arguments.steps, arguments.lr, arguments.out)
    print(path)
    if judgement is not None:  # there was a step
        print(f"{judgement.verdict.verdict}: {judgement.verdict.reason}")
