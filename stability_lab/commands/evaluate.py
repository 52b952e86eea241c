"""The command `evaluate RUN`: validation loss of a run's weights on the run's own validation windows, and whether a
linear classifier finds something in their features."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stability_lab.config import ConfigError, Parser, from_plain
from stability_lab.judge.series import perplexity_in
from stability_lab.text import aligned, next_command, rough

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
    parser.add_argument(
        "--probe",
        metavar="DATA",
        help="a CSV file with text and label (and group), or sotu: also how well a linear classifier on the model's "
        "features tells texts apart (needs scikit-learn)",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size={args.batch_size}: must be 1 or more")
    result = evaluate(args.run, args.batch_size, args.device, args.checkpoint, args.probe)
    if args.format == "json":
        print(json.dumps(result))
    else:
        named, words = perplexity_in(result, "val")
        print(f"{args.run}: validation loss {result['val/loss']:.6f}  {words} {rough(result[named])}")
        if args.probe:
            print(_probed(args.probe, result["probe"]))
        print(next_command("score", str(args.run)))
    return 0


def _probed(source: str, found: Mapping[str, Any]) -> str:
    rows = {
        f"linear probe on {source}": f"{found['texts']} texts in {found['groups']} groups, accuracy (95 % interval)",
        "trained": "{:.3f} ({:.3f} to {:.3f})".format(*found["trained"]),
        "at initialisation": "{:.3f} ({:.3f} to {:.3f})".format(*found["initial"]),
        "difference": "{:+.3f} ({:+.3f} to {:+.3f})".format(*found["difference"]),
        "most frequent label": f"{found['majority']:.3f}",
    }
    return "\n".join(aligned(rows.items()))


def evaluate(
    run: Path, batch_size: int, device: str = "auto", checkpoint: str = "last", probe: str | None = None
) -> dict[str, Any]:
    """What validation measures, of the weights in run/checkpoints/last or best; `probe`: data of a linear probe."""
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
    from stability_lab.diagnostics.linear_probe import linear_probe, read_examples
    from stability_lab.diagnostics.probe import validate
    from stability_lab.machine.precision import autocast, weight_dtype
    from stability_lab.model.init import initialise
    from stability_lab.objective.objective import VALIDATION
    from stability_lab.run.resume import read_config
    from stability_lab.training.checkpoint import find_weights, load_weights

    weights = find_weights(run / "checkpoints", checkpoint)
    if weights is None:
        raise ConfigError(f"{run} has no weights in checkpoints/{checkpoint}")
    config = from_plain(read_config(run))
    examples = None if probe is None else read_examples(probe)
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
        result: dict[str, Any] = validate(model, objective, windows.to(target), batch_size, n_bytes)
        if examples is not None:
            initial = build_model(config, data.vocab_size, seams, document_mark(config, data))
            initialise(initial, config.seed if config.init_seed is None else config.init_seed)
            initial.to(target, weight_dtype(trainer.precision))
            result["probe"] = linear_probe(model, initial, data, examples, batch_size)
    return result
