"""The judge in anybody's own training loop: gradient norm, the files of a run and a verdict, in five lines.

Nothing here waits for the device except a flush, every `flush_every` steps. Needs neither Hydra nor W&B.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, _foreach_norm, nn  # pyright: ignore[reportPrivateImportUsage]

from stability_lab import __version__
from stability_lab.judge.judgement import Judgement
from stability_lab.judge.series import Row
from stability_lab.judge.verdict import Evidence
from stability_lab.monitoring.record import OWN_KEYS, Record, write_config
from stability_lab.run.folder import new_directory
from stability_lab.tracking.manifest import fingerprint, manifest, redact
from stability_lab.tracking.run_files import RunFiles

if TYPE_CHECKING:
    from stability_lab.monitoring.callback import MonitorCallback

_log = logging.getLogger("stability_lab")
_LOW = (torch.float16, torch.bfloat16)


class Monitor:
    """Records a training loop into `path` as `train` records a run, and judges it.

    Call `step` after backward and before clipping and the optimizer; `finish` at the end, or use the monitor as a
    context manager. A folder that exists is never written to: the run then goes to a numbered sibling; `path` says
    where. In a distributed run, make one on every rank: rank 0 writes, the others only judge, and their `path` is None.

    `model` is what the gradient norm is measured on; without one give `grad_norm` to `step`. `config`, a mapping or an
    object such as an `argparse.Namespace`, is kept in `config.yaml`: `compare` reads `seed` and `optimizer.lr` from it,
    and the latter is taken from `lr`, `learning_rate` or the largest learning rate of the log where it is missing.
    `stabilizers` names what the model uses. `should_stop` asks for a finite divergence after `warmup_steps`.
    `vocab_size` and `unigram_entropy` (of the training data, nats) are what the initial validation loss is compared
    with. Raises `ValueError` for values out of reach, before there is a folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module | None = None,
        config: Mapping[str, Any] | object | None = None,
        *,
        stabilizers: Iterable[str] = (),
        flush_every: int = 50,
        warmup_steps: int = 0,
        vocab_size: int | None = None,
        unigram_entropy: float | None = None,
    ):
        _check_whole("flush_every", flush_every, 1)
        _check_whole("warmup_steps", warmup_steps, 0)
        if vocab_size is not None:
            _check_whole("vocab_size", vocab_size, 1)
        if unigram_entropy is not None and not 0 <= unigram_entropy < math.inf:
            raise ValueError(f"unigram_entropy is {unigram_entropy}, but must be a number of nats from 0 on")
        self.model = model
        self._sharded = model is not None and any(type(m).__name__.startswith("FullySharded") for m in model.modules())
        plain = redact(_config({} if config is None else config))
        names = [stabilizers] if isinstance(stabilizers, str) else sorted(stabilizers)
        files = _open(Path(path), plain, names, model) if _rank() == 0 else None
        evidence = Evidence(unigram_entropy=unigram_entropy, vocab_size=vocab_size, warmup_steps=warmup_steps)
        self._record = Record(files, plain, flush_every, evidence)
        # It holds the record and not the monitor: a run that is abandoned is closed, and its model can be freed.
        self._abandoned = weakref.finalize(self, _abandon, self._record, os.getpid())

    @property
    def path(self) -> Path | None:
        """The folder of the run; None on every rank but 0."""
        return self._record.files.path if self._record.files else None

    @property
    def should_stop(self) -> bool:
        """True once a flush has found that the run has diverged.

        The same on every rank, provided that all of them are given the same loss and gradient norm.
        """
        return self._record.diverged

    def step(
        self,
        loss: Tensor | float,
        *,
        lr: float | None = None,
        grad_norm: Tensor | float | None = None,
        tokens: Tensor | int | None = None,
        scale: Tensor | float | None = None,
        skipped: Tensor | bool | None = None,
        step: int | None = None,
        **extra: Tensor | float,
    ) -> None:
        """Record one optimizer step; all values may be numbers or 0-d tensors, which are read at the next flush.

        `loss` is the mean cross-entropy of the whole step in nats, without loss scale. `grad_norm` is the global L2
        norm before clipping, as `clip_grad_norm_` returns it, and measured on the model where it is not given.
        `tokens` counts this step only. `scale` is what the gradients are still multiplied by (GradScaler's): the norm
        is divided by it, and a step whose gradients overflow while its loss is finite counts as skipped. `skipped` says
        so where you know it yourself. `step` is the number of the optimizer step, by default one more than the last.
        Each name in `extra` is a column of `metrics.jsonl`. Raises `ValueError` for what is no number, and for a step
        that does not come after the last one; then nothing is recorded.
        """
        if loss is None:
            raise ValueError("loss is None, but must be one number")
        if step is not None:
            _check_whole("step", step, 1)
        if tokens is not None and not isinstance(tokens, Tensor) and not 0 <= tokens < math.inf:
            raise ValueError(f"tokens is {tokens}, but must be a number of tokens from 0 on")
        wrong = OWN_KEYS & extra.keys()
        if wrong:
            raise ValueError(f"{', '.join(sorted(wrong))}: the monitor writes this column itself")
        if grad_norm is None and self.model is not None:
            grad_norm = self._measure(self.model)
        row: Row = {"train/loss": loss, "optim/grad_norm": grad_norm, "optim/lr": lr, "tokens": tokens}
        row |= {"optim/skipped": False if skipped is None else skipped, "optim/loss_scale": scale, **extra}
        self._record.add(step, {key: _scalar(key, value) for key, value in row.items() if value is not None})

    def log_validation(self, loss: Tensor | float, *, step: int | None = None) -> None:
        """Record a validation loss (mean cross-entropy, nats) after the newest step, or before the first one.

        `step` says after which one instead, and `step()` may still follow for the same one. Raises `ValueError` for
        what is no number.
        """
        if step is not None:
            _check_whole("step", step, 0)
        self._record.validate(float(_scalar("loss", loss)), step)

    def finish(self) -> Judgement | None:
        """Write what is left, judge the run and close its files; None for a run without a step.

        A second call returns the same judgement. A full disk raises `OSError` here, and only here.
        """
        return self._end("completed", None)

    def callback(self, *, stop_on_divergence: bool = True) -> MonitorCallback:
        """A callback for `transformers.Trainer`, which records what the Trainer logs; call `finish` afterwards."""
        from stability_lab.monitoring.callback import MonitorCallback

        return MonitorCallback(self, stop_on_divergence)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self._end("completed", None)
        elif isinstance(error, Exception):
            first = str(error).strip().split("\n")[0]
            self._end("failed", f"{type(error).__name__}: {first}")
        else:
            self._end("interrupted", "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__)

    def _end(self, status: str, ended_by: str | None) -> Judgement | None:
        self._abandoned.detach()
        # After an exception the device may be broken; and who stopped early is not judged by the last update.
        bad = status == "completed" and self.model is not None and _has_nonfinite(self.model)
        return self._record.end(status, ended_by, bad)

    def _measure(self, model: nn.Module) -> Tensor:
        if self._sharded:
            raise ValueError("the model is sharded (FSDP): give step() the grad_norm that its clip_grad_norm_ returns")
        norm = _global_norm(model.parameters())
        if norm is not None:
            return norm
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("all parameters of the model are frozen: there is no gradient to measure")
        raise ValueError(
            "no parameter has a gradient: call step() after backward() and before zero_grad(), or give it grad_norm="
        )


def _abandon(record: Record, process: int) -> None:
    # A process that was forked from the one that trains must not write the end of its run.
    if os.getpid() == process:
        record.end("interrupted", "the program never called finish()")


def _rank() -> int:
    """This process's rank; before the process group exists, what its launcher says."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _open(path: Path, config: dict[str, Any], stabilizers: list[str], model: nn.Module | None) -> RunFiles:
    """The files of a new run, as far as they are known before its first step."""
    digest = fingerprint(config, __version__)
    claimed = new_directory(path)
    if claimed != path:
        _log.warning("%s exists, so this run is written to %s", path, claimed)
    files = RunFiles(claimed)
    facts: dict[str, Any] = {"run": claimed.name, "group": claimed.absolute().parent.name, "fingerprint": digest}
    facts |= {"stabilizers": stabilizers, "written_by": "Monitor"}
    if model is not None:
        facts["parameters"] = {"total": sum(p.numel() for p in model.parameters())}
    files.write_json("manifest.json", manifest(extra=facts))
    files.write_json("summary.json", {"status": "running"})
    write_config(files, config)
    return files


def _check_whole(name: str, value: Any, least: int) -> None:
    try:
        fits = least <= operator.index(value) < 2**53
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} is {value!r}, but must be a whole number from {least} on, below 2**53")


def _config(given: Any) -> dict[str, Any]:
    """The user's config as plain values, with the two keys that `compare` reads: `seed` and `optimizer.lr`."""
    if not isinstance(given, Mapping):
        try:
            given = vars(given)
        except TypeError:
            raise ValueError(f"config is a {type(given).__name__}, but must be a mapping or have attributes") from None
    config = _plain(given)
    optimizer = config.get("optimizer")
    optimizer = dict(optimizer) if isinstance(optimizer, dict) else {"name": optimizer} if optimizer else {}
    lr = optimizer.get("lr")
    for name in ("lr", "learning_rate"):
        # Moved and not copied: a comparison would take two keys that differ from run to run for two settings.
        if lr is None:
            lr = config.pop(name, None)
        elif config.get(name) == lr:
            del config[name]
    try:
        optimizer["lr"] = math.nan if lr is None else float(lr)
    except (TypeError, ValueError):
        raise ValueError(f"config: the learning rate is {lr!r}, but must be one number") from None
    return {"seed": None, **config, "optimizer": optimizer}


def _plain(value: Any) -> Any:
    """What YAML and JSON can hold; anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


def _scalar(name: str, value: Tensor | float) -> Tensor | float:
    """A number as it is; of a tensor a copy, which the next step cannot overwrite (CUDA graphs reuse their memory)."""
    if not isinstance(value, Tensor):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} is {value!r}, but must be one number") from None
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but must be one number")
    return value.detach().reshape(()).clone()


@torch.no_grad()
def _global_norm(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """L2 norm of all gradients together, in fp32 on their device; None where there is no gradient."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for grad in (p.grad for p in parameters if p.grad is not None):
        if hasattr(grad, "full_tensor"):
            raise ValueError("the gradients are sharded: give step() the grad_norm that clip_grad_norm_ returns")
        grad = grad.coalesce().values() if grad.is_sparse else grad
        groups[grad.device, grad.dtype].append(grad)
    norms: list[Tensor] = []
    for (_, dtype), grads in groups.items():
        # In its own dtype a norm of bf16 or fp16 has three digits, and overflows in fp16.
        norms += _foreach_norm(grads, 2, dtype=torch.float32 if dtype in _LOW else None)
    return torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).norm() if norms else None


def _has_nonfinite(model: nn.Module) -> bool:
    local = (p for p in model.parameters() if not (p.is_meta or hasattr(p, "full_tensor")))
    return any(not bool(p.isfinite().all()) for p in local)
