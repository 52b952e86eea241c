"""The names under which other people log what the judge takes."""

from __future__ import annotations

import re

# In the order in which they are preferred; compared by `spelling`. A cross-entropy stands before a loss, which may hold
# auxiliary terms. The counter of log calls in W&B is the last resort.
NAMES: dict[str, tuple[str, ...]] = {
    "loss": (
        *("train/cross_entropy", "train/crossentropyloss", "train/ce_loss", "train/ce", "train/loss", "loss"),
        *("train_loss", "training_loss", "training/loss", "loss/train", "train/train_loss", "lm_loss"),
        *("lm_loss_training/lm_loss", "train/lm_loss", "reduced_train_loss", "loss_metrics/global_avg_loss"),
        *("loss/train/total", "loss/out", "train/loss_step", "train_loss_step", "train/total_loss", "total_loss"),
        *("cross_entropy", "cross_entropy_loss", "ce_loss", "nll_loss", "train/samples/train_loss"),
    ),
    "grad_norm": (
        *("optim/grad_norm", "optim/total_grad_norm", "train/grad_norm", "grad_norm", "gradient_norm"),
        *(
            "grad_norm/grad_norm",
            "total_grad_norm",
            "global_grad_norm",
            "grad_norm/total",
            "grad/norm/total",
            "train/gradient_norm",
        ),
        *("train/total_grad_norm", "gradients/norm", "l2_norm/grad/global", "grad_2_norm_total", "gnorm"),
    ),
    "step": (
        *("step", "global_step", "train/global_step", "trainer/global_step", "train/step", "iteration", "iter"),
        *("iter_num", "train/iter", "steps", "training_step", "current_steps", "time/batch", "trainer/batch_idx"),
        *("batch_idx", "update", "num_updates", "_step"),
    ),
    "lr": (
        *("optim/lr", "lr", "learning_rate", "train/lr", "train/learning_rate", "optim/learning_rate"),
        *("optim/learning_rate_group0", "lr/group0", "optimizer/lr"),
    ),
    "tokens": (
        *("tokens", "total_tokens", "train/tokens", "tokens_seen", "num_tokens", "throughput/total_tokens"),
        *("consumed_tokens", "num_input_tokens_seen", "train/num_input_tokens_seen"),
    ),
    "skipped": ("optim/skipped", "skipped"),
    "log_z": ("train/log_z_mean", "log_z_mean", "log_z"),
    "max_attn_logit": ("attn/max_logit", "max_attn_logit", "max_attention_logit"),
}


def spelling(name: str) -> str:
    """A name without what does not count in it: case, and which signs join its words."""
    return re.sub(r"[ -]+", "_", name.strip().lower()).replace(".", "/")
