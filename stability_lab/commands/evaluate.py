"""The command `evaluate RUN`: validation loss of a run's weights on the run's own validation windows."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from stability_lab.config import ConfigError, Parser, from_plain
from stability_lab.judge.series import perplexity_in
from stability_lab.text import next_command, rough

_log = logging.getLogger("stability_lab")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab evaluate",
        description="Validation loss (nats per token) and perplexity of a run's weights, on the validation windows "
        "of its own configuration. The result does not depend on the batch size.",
    )
    parser.add_argument("run", type=Path, help="a run's folder, outputs/<group>/<run>")
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last", help="which weights (default last)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences at once (default 32)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--allow", metavar="PACKAGE", help="a package of your own in which its classes are")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size={args.batch_size}: must be 1 or more")
    result = evaluate(args.run, args.batch_size, args.device, args.checkpoint)
    if args.format == "json":
        print(json.dumps(result))
    else:
        named, words = perplexity_in(result, "val")
        print(f"{args.run}: validation loss {result['val/loss']:.6f}  {words} {rough(result[named])}")
        print(next_command("score", str(args.run)))
    return 0


def evaluate(run: Path, batch_size: int, device: str = "auto", checkpoint: str = "last") -> dict[str, float]:
    """What validation measures, of the weights in run/checkpoints/last or best."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run's folder: it has no config.yaml")
    if not (run / "checkpoints").is_dir():
        raise ConfigError(f"{run} has no weights in checkpoints/{checkpoint}: train it with trainer.save_weights=true")

    import torch

    from stability_lab.build import (
        build_model,
        build_objective,
        build_stabilizers,
        device_of,
        document_mark,
        fill_seams,
        load_data,
        target_bytes,
    )
    from stability_lab.data.loader import validation_windows
    from stability_lab.diagnostics.probe import validate
    from stability_lab.machine.precision import autocast, weight_dtype
    from stability_lab.objective.objective import VALIDATION
    from stability_lab.run.resume import read_config
    from stability_lab.training.checkpoint import find_weights, load_weights

    weights = find_weights(run / "checkpoints", checkpoint)
    if weights is None:
        raise ConfigError(f"{run} has no weights in checkpoints/{checkpoint}")
    config = from_plain(read_config(run))
    config.trainer.device = device
    target = device_of(config)
    data = load_data(config)
    seams = fill_seams(build_stabilizers(config))
    model = build_model(config, data.vocab_size, seams, document_mark(config, data))
    model.to(target, weight_dtype(config.trainer.precision))
    try:
        load_weights(model, weights, target)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    objective, trainer = build_objective(config, data), config.trainer
    starts = validation_windows(data.val, config.model.seq_len, trainer.eval_sequences, objective.traits.windows)
    windows = torch.from_numpy(starts)
    n_bytes = target_bytes(data, objective.batch(windows, VALIDATION).targets_MT)
    with autocast(target, trainer.precision):
        return validate(model, objective, windows.to(target), batch_size, n_bytes)
