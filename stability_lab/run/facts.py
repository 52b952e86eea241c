"""What a run says of itself before its first step: the facts of its manifest, and one line for a person."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from stability_lab.build import training_bytes
from stability_lab.compose import Composed
from stability_lab.data.loader import batch_fingerprint
from stability_lab.model.transformer import parameter_counts
from stability_lab.plugins.trust import code_version, provenance
from stability_lab.run.folder import SINGLE_RUNS
from stability_lab.tracking.manifest import fingerprint, redact
from stability_lab.training.loop import Run

_jobs = itertools.count()  # of this process


def facts(run: Run, composed: Composed, overrides: Sequence[str], notices: Sequence[str]) -> dict[str, Any]:
    """What `compare` needs to know whether two runs may be compared."""
    trainer = run.config.trainer
    per_step = trainer.micro_batch_size * trainer.grad_accum_steps
    return {
        "group": run.config.group or SINGLE_RUNS,
        "fingerprint": fingerprint(composed.plain, code_version(composed.plain)),
        "packages": provenance(composed.plain),
        "overrides": redact(list(overrides)),
        "stabilizers": [s.name for s in run.stabilizers],
        "recipe": run.config.recipe,
        "seams": {seam: list(owners) for seam, owners in run.model.seams.owners.items()},
        "attention": {"backend": run.model.backend.name, "reason": run.model.backend.reason},
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "ranks": run.ranks.size,
        "precision": trainer.precision,
        "compile": trainer.compile,
        "implementation": run.config.model.implementation,
        "deterministic": trainer.deterministic,
        "parameters": parameter_counts(run.model),
        "training_bytes": training_bytes(run.config, run.model),
        "earlier_jobs": next(_jobs),
        "data": {
            **run.data.corpus,
            "sampling": vars(run.config.sampling),
            "fingerprint": run.data.fingerprint,
            "vocab_size": run.data.vocab_size,
            "train_tokens": None if run.data.stream else run.data.train_tokens,
            "val_tokens": run.data.val_tokens,
            "unigram_entropy": run.data.unigram_entropy,
            "entropy_rate": run.data.entropy_rate,
            **run.sampler.describe(per_step, trainer.max_steps),
            "validation": batch_fingerprint(run.eval_windows.cpu().numpy()),
            "probe": batch_fingerprint(run.probe_windows.cpu().numpy()),
        },
        "init": run.init,
        "notices": list(notices),
    }


def opening(run: Run) -> str:
    counts, config = parameter_counts(run.model), run.config
    tokens = config.trainer.micro_batch_size * config.trainer.grad_accum_steps * config.model.seq_len
    threads = f" ({torch.get_num_threads()} threads)" if run.device.type == "cpu" else ""
    seams = "; ".join(f"{seam} <- {', '.join(owners)}" for seam, owners in run.model.seams.owners.items())
    return (
        f"{config.model.name}: {counts['total']:,} parameters, {counts['non_embedding']:,} without embeddings; "
        f"{run.device}{threads}, {config.trainer.precision}; attention {run.model.backend.name} "
        f"({run.model.backend.reason}); seams {seams or 'all empty'}; "
        f"{'streamed' if run.data.stream else format(run.data.train_tokens, ',')} training tokens, {tokens:,} a step"
    )
