"""One training run from its checked configuration to its files, its mirror and its last words."""

from __future__ import annotations

import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from stability_lab import __version__
from stability_lab.build import Run, build_run, device_of
from stability_lab.compose import Composed
from stability_lab.config import ConfigError, TrainConfig
from stability_lab.data.loader import batch_fingerprint
from stability_lab.diagnostics.memory import peak_bytes, reset_peak
from stability_lab.model.gpt import parameter_counts
from stability_lab.model.init import fingerprints
from stability_lab.naming import SINGLE_RUNS, claim_directory, run_name
from stability_lab.tracking.jsonl import RunFiles
from stability_lab.tracking.manifest import fingerprint, manifest, redact
from stability_lab.tracking.tracker import Mirror, RunInfo, Tracker
from stability_lab.training.checkpoint import save_weights
from stability_lab.training.history import LAST, Row, summarise
from stability_lab.training.inject import Injector, parse
from stability_lab.training.loop import Loop, Plan
from stability_lab.training.progress import Progress

_log = logging.getLogger("stability_lab")
EXIT_CODES = {"completed": 0, "failed": 1, "diverged": 3}


class Outcome(NamedTuple):
    path: Path
    status: str
    verdict: str | None
    val_loss: float | None
    exit_code: int


class Terminated(BaseException):
    """SIGTERM, as an exception, so that it ends a run the way Ctrl-C does."""


def execute(
    composed: Composed, overrides: Sequence[str], argv: Sequence[str], *, in_sweep: bool, number: int | None
) -> Outcome:
    """Train; whatever happens, what was measured is on disk and the outcome says how the run ended."""
    config = composed.config
    digest = fingerprint(composed.plain, __version__)
    claim = claim_directory(
        Path(config.output_dir) / (config.group or SINGLE_RUNS) / (config.run_name or _name(config, overrides, digest)),
        config.if_exists or ("skip" if in_sweep else "new"),
        digest,
    )
    if claim.finished:
        _log.info("%s is already finished: skipped (if_exists=new runs it again)", claim.path)
        return _known(claim.path)
    files = RunFiles(claim.path)
    with _log_file(claim.path / "train.log"), _sigterm():
        try:
            return _train(composed, overrides, argv, digest, files, number)
        finally:
            files.close()


def _train(
    composed: Composed,
    overrides: Sequence[str],
    argv: Sequence[str],
    digest: str,
    files: RunFiles,
    number: int | None,
) -> Outcome:
    config, path = composed.config, files.path
    names = sorted(config.stabilizer)
    job = f"job {number}: " if number is not None else ""
    _log.info("%sstabilizers: %s", job, ", ".join(names) or "none")
    notices = [*composed.notices, *_notices(config)]
    for notice in notices:
        _log.info("notice: %s", notice)
    files.write_text("config.yaml", OmegaConf.to_yaml(OmegaConf.create(redact(composed.plain))))
    files.write_json("summary.json", {"status": "running"})
    tracker: Tracker | None = None
    loop = run = None
    status, reason = "failed", None
    try:
        reset_peak(device_of(config))
        run = build_run(config)
        for notice in run.data.notices:
            _log.info("notice: %s", notice)
        notices += run.data.notices
        facts = _facts(run, digest, overrides, notices)
        tracker = _tracker(run, composed, path)
        files.write_json("manifest.json", manifest(argv, {"run": path.name, **facts, "tracker_id": tracker.id}))
        _log.info("%s", _opening(run))
        progress = Progress(config.trainer.max_steps, path.name)
        loop = Loop(
            run.model,
            run.step,
            run.schedule,
            run.sampler,
            run.eval_windows,
            run.eval_bytes,
            run.probe_windows,
            _plan(config),
            _Sink(files, tracker, progress),
            Injector(parse(config.debug.inject)),
        )
        try:
            loop.run()
        finally:
            progress.done()
        status = "diverged" if loop.stopped_by else "completed"
    except (KeyboardInterrupt, Terminated) as stop:
        status, reason = "interrupted", "Ctrl-C" if isinstance(stop, KeyboardInterrupt) else "SIGTERM"
    except ConfigError as error:
        reason = str(error)
        _log.error("error: %s", error)
    except Exception as error:
        reason = _what_failed(error, config)
        _log.error("failed: %s (traceback in %s)", reason, path / "train.log")
        _log.debug("traceback", exc_info=error)
    exit_code = {"Ctrl-C": 130, "SIGTERM": 143}.get(reason or "", EXIT_CODES.get(status, 1))
    return _finish(run, loop, tracker, files, status, reason, exit_code)


def _finish(
    run: Run | None,
    loop: Loop | None,
    tracker: Tracker | None,
    files: RunFiles,
    status: str,
    reason: str | None,
    exit_code: int,
) -> Outcome:
    summary: dict[str, Any] = {"status": status, "exit_code": exit_code}
    if run is not None and loop is not None:
        if status in ("interrupted", "failed"):
            try:
                loop.flush()
            except Exception as error:  # the device itself may have failed
                _log.debug("the last steps could not be read", exc_info=error)
        assert run.model.config.vocab_size is not None
        judged = summarise(
            loop.history,
            loop.stopped_by == "nonfinite",
            run.data.unigram_entropy,
            run.model.config.vocab_size,
            run.schedule.warmup_steps,
        )
        events = judged.pop("events")
        files.replace_events(events)
        for note in judged.get("notes", ()):
            _log.info("note: %s", note)
        summary |= judged | {"events": dict(Counter(event["event"] for event in events))}
        summary["perf/peak_memory_bytes"] = peak_bytes(run.device)
        if run.config.trainer.save_weights and loop.history.n:
            try:
                save_weights(run.model, files.path / "checkpoints" / "last")
            except Exception as error:  # a full disk, which safetensors wraps in an error of its own
                reason = f"the weights could not be saved: {str(error).splitlines()[0]}"
                summary |= {"status": "failed", "exit_code": 1}
                _log.error("failed: %s", reason)
        if run.optimal_loss is not None:
            summary["optimal_loss"] = run.optimal_loss
        # The judge has the last word: a finite divergence ends a run as a non-finite one does.
        if summary["status"] == "completed" and summary["verdict"] == "diverged":
            summary |= {"status": "diverged", "exit_code": EXIT_CODES["diverged"]}
    if reason is not None:
        summary["ended_by"] = reason
    try:
        files.write_json("summary.json", summary)
    except OSError as error:
        _log.error(
            "failed: summary.json could not be written (%s); metrics.jsonl has what was measured", error.strerror
        )
        summary |= {"status": "failed", "exit_code": 1}
    if tracker is not None:
        tracker.finish(_flat(summary), summary["exit_code"])
    if loop is not None:
        _log.info("%s", _last_words(summary, files.path, tracker))
    final = summary.get("final", {}).get("val/loss")
    return Outcome(files.path, summary["status"], summary.get("verdict"), final, summary["exit_code"])


class _Sink:
    def __init__(self, files: RunFiles, tracker: Tracker, progress: Progress):
        self.files, self.tracker, self.progress = files, tracker, progress

    def rows(self, rows: Sequence[Row]) -> None:
        self.files.log_rows(rows)
        self.tracker.log(rows)
        self.progress.show(rows[-1])

    def event(self, event: Mapping[str, Any]) -> None:
        self.files.log_event(dict(event))
        self.tracker.event(event)


def _name(config: TrainConfig, overrides: Sequence[str], digest: str) -> str:
    pairs = {"optimizer.lr": f"{config.optimizer.lr:g}", "seed": str(config.seed)}
    for line in overrides:
        key, _, value = line.lstrip("+~").partition("=")
        group, _, option = key.partition(".")
        unused = group == "stabilizer" and option.split(".")[0] not in config.stabilizer
        if not unused and key not in ("optimizer.lr", "seed"):
            pairs[key] = value
    return run_name(config.stabilizer, pairs.items(), digest)


def _known(path: Path) -> Outcome:
    import json

    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    loss = summary.get("final", {}).get("val/loss")
    return Outcome(path, summary["status"], summary.get("verdict"), loss, EXIT_CODES[summary["status"]])


def _plan(config: TrainConfig) -> Plan:
    t = config.trainer
    return Plan(
        t.max_steps,
        t.micro_batch_size,
        t.grad_accum_steps,
        config.model.seq_len,
        t.log_every,
        t.eval_every,
        config.diagnostics.probe_every,
        config.stability.stop_on_divergence,
        config.sampling.mask_repeats,
    )


def _notices(config: TrainConfig) -> Iterator[str]:
    if config.recipe is not None:
        lacks = "; ".join(config.recipe["lacks"])
        yield f"recipe {config.recipe['name']} ({config.recipe['source']}) lacks: {lacks}"
    warmup, steps = config.schedule.warmup_steps, config.trainer.max_steps
    if warmup > steps:
        yield f"schedule.warmup_steps={warmup} is longer than the run and cut to its {steps} steps"


def _tracker(run: Run, composed: Composed, path: Path) -> Mirror:
    from stability_lab.build import instantiate

    tracking = instantiate(run.config.tracking, "tracking")
    tags = tuple(s.name for s in run.stabilizers) or ("none",)
    return Mirror(tracking.start(RunInfo(path.name, path.parent.name, tags, redact(composed.plain), path)))


def _facts(run: Run, digest: str, overrides: Sequence[str], notices: Sequence[str]) -> dict[str, Any]:
    """What `compare` needs to know whether two runs may be compared."""
    trainer = run.config.trainer
    per_step = trainer.micro_batch_size * trainer.grad_accum_steps
    return {
        "group": run.config.group or SINGLE_RUNS,
        "fingerprint": digest,
        "overrides": redact(list(overrides)),
        "stabilizers": [s.name for s in run.stabilizers],
        "recipe": run.config.recipe,
        "seams": {seam: list(owners) for seam, owners in run.model.seams.owners.items()},
        "attention": {"backend": run.model.backend.name, "reason": run.model.backend.reason},
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "precision": trainer.precision,
        "compile": trainer.compile,
        "deterministic": trainer.deterministic,
        "parameters": parameter_counts(run.model),
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
        "init": fingerprints(run.model),
        "notices": list(notices),
    }


def _opening(run: Run) -> str:
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


def _what_failed(error: Exception, config: TrainConfig) -> str:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error):
        half = max(1, config.trainer.micro_batch_size // 2)
        return f"out of memory: try trainer.micro_batch_size={half} with more trainer.grad_accum_steps ({text})"
    return f"{type(error).__name__}: {text}"


def _last_words(summary: Mapping[str, Any], path: Path, tracker: Tracker | None) -> str:
    final, initial = summary["final"], summary["initial"]
    lines = {
        "status": f"{summary['status']} (exit code {summary['exit_code']})",
        "verdict": f"{summary['verdict']}: {summary['reason']}",
        "train": _loss(final, "train")
        + f" (mean of the last {min(LAST, summary['steps'])} of {summary['steps']} steps)",
        "validation": _loss(final, "val") + f" (at the start {_number(initial.get('val/loss'), '.4f')})",
        **_optimum(summary),
        "grad-norm spikes": _spikes(summary["scores"].get("grad_norm", {})),
        "largest attention logit": f"{_number(summary['max_attn_logit'], '.4g')} on the probe batch",
        "speed": f"{_number(summary['tokens_per_s'], ',.0f')} tokens/s",
        "files": str(path),
        "W&B": tracker.hint if tracker is not None else "not started",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _optimum(summary: Mapping[str, Any]) -> dict[str, str]:
    """Only where the source of the data is known."""
    optimum, loss = summary.get("optimal_loss"), summary["final"].get("val/loss")
    if optimum is None:
        return {}
    distance = "not measured" if loss is None else f"{loss - optimum:.4f} above it"
    return {"best possible": f"loss {optimum:.4f} on these validation tokens; this run is {distance}"}


def _spikes(scores: Mapping[str, Any]) -> str:
    """By OLMo-core's rule, or the robust one where the run is too short for that."""
    for name in ("olmo_core", "robust"):
        score = scores.get(name)
        if score is not None and score["score"] is not None:
            return (
                f"{score['n_spikes']} in {score['n_scored']} scored steps "
                f"({name}: score {score['score']:.2f}%, one spike is {score['resolution']:.2f}%)"
            )
    return f"not scored: {scores['robust']['reason']}" if scores else "not scored"


def _loss(values: Mapping[str, Any], split: str) -> str:
    loss, ppl = values.get(f"{split}/loss"), values.get(f"{split}/ppl")
    return f"loss {_number(loss, '.4f')}  perplexity {_number(ppl, '.2f')}"


def _number(value: float | None, spec: str) -> str:
    return "not measured" if value is None else format(value, spec)


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value
    return flat


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.DEBUG)
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        handler.close()


@contextmanager
def _sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
