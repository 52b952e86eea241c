"""Composition root: from a checked configuration to the objects of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, MutableMapping

import torch

from stability_lab.config import ConfigError, TrainConfig
from stability_lab.data.loader import build_sampler, check_length, validation_starts, validation_windows
from stability_lab.data.source import DataSource, TokenData
from stability_lab.data.special import with_special, word_pieces
from stability_lab.diagnostics.memory import physical_bytes
from stability_lab.machine.compiler import missing_compiler
from stability_lab.machine.cores import cores
from stability_lab.machine.precision import has_bf16, weight_dtype
from stability_lab.model.init import fingerprints, initialise
from stability_lab.model.mask import DocumentMark
from stability_lab.model.transformer import GPT, parameter_counts, site_of
from stability_lab.objective.causal_lm import CausalLM
from stability_lab.objective.loss import IGNORE
from stability_lab.objective.objective import VALIDATION, Objective, ObjectiveOptions, Vocabulary
from stability_lab.plugins.instantiate import instantiate, instantiate_as
from stability_lab.seams import SeamConflict, Seams, Stabilizer
from stability_lab.training.gradient_side import GradientSide
from stability_lab.training.inject import parse
from stability_lab.training.loop import Run
from stability_lab.training.optimizers import AdamW, OptimizerOptions
from stability_lab.training.ranks import ONE, Ranks, dropout_seed
from stability_lab.training.schedule import Schedule
from stability_lab.training.step import TrainStep
from stability_lab.training.update import Update

_WEIGHT_BYTES = 8  # of a parameter in fp32: weight and gradient
_LAYER_BYTES = 20_000  # of a layer's Python objects, however small its tensors
_default_threads = torch.get_num_threads()


def build_stabilizers(config: TrainConfig) -> list[Stabilizer]:
    """In the order of their names, so that the order on the command line changes nothing."""
    names = sorted(config.stabilizer)
    return [instantiate_as(Stabilizer, config.stabilizer[name], f"stabilizer.{name}") for name in names]


def fill_seams(stabilizers: list[Stabilizer]) -> Seams:
    seams = Seams()
    for stabilizer in stabilizers:
        try:
            seams = stabilizer.apply(seams)
        except SeamConflict as error:
            names = ",".join(s.name for s in stabilizers)
            raise ConfigError(f"stabilizer=[{names}]: {error}") from error
    return seams


def load_data(config: TrainConfig, known: MutableMapping[str, TokenData] | None = None) -> TokenData:
    """The data of a run; `known` keeps what was loaded, for configurations that share it."""
    key = json.dumps([config.data, config.tokenizer], default=str)
    data = None if known is None else known.get(key)
    if data is None:
        data = instantiate_as(DataSource, config.data, "data").load(instantiate(config.tokenizer, "tokenizer"))
    if known is not None:
        known[key] = data
    if objective_options(config).traits.special:
        data = with_special(data)
    check_length(data, config.model.seq_len)
    wanted = config.model.vocab_size
    if wanted is not None and wanted < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={wanted}: must be at least the tokenizer's {data.vocab_size}, or null to take that"
        )
    rows, padded = wanted or data.vocab_size, config.model.pad_vocab_to
    if padded is not None and padded < rows:
        raise ConfigError(f"model.pad_vocab_to={padded}: must be at least the vocabulary's {rows}, or null")
    return data


def objective_options(config: TrainConfig) -> ObjectiveOptions:
    """ConfigError where the objective is not one for the model."""
    options, model = instantiate_as(ObjectiveOptions, config.objective, "objective"), config.model
    if options.traits.family == model.family:
        return options
    if model.family == "encoder":
        why, advice = (
            "sees the ids that are to be predicted",
            "objective=masked_lm, or a decoder such as model=gpt_nano",
        )
    else:
        why, advice = "sees only what lies before a masked id", "model=bert_mini, or objective=causal_lm"
    raise ConfigError(f"objective={options.name}: model={model.name} {why}; use {advice}")


def build_objective(config: TrainConfig, data: TokenData) -> Objective:
    """The objective for `data` as `load_data` gives it."""
    options, vocabulary = objective_options(config), None
    if options.traits.special:
        vocabulary = _vocabulary(data, words=bool(config.objective.get("whole_words")))
    return options.bound(vocabulary, data_seed_of(config))


def _vocabulary(data: TokenData, words: bool) -> Vocabulary:
    assert data.special is not None
    reserved = {*data.special, *(() if data.eos_id is None else (data.eos_id,))}
    tables = (torch.from_numpy(table) for table in word_pieces(data)) if words else ()
    return Vocabulary(data.vocab_size, tuple(sorted(reserved)), *data.special[:3], *tables)


def data_seed_of(config: TrainConfig) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def target_bytes(data: TokenData, targets: torch.Tensor) -> int:
    """Of text that the targets stand for."""
    return data.bytes_of(targets[targets != IGNORE].numpy())


def device_of(config: TrainConfig) -> torch.device:
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: torch finds no CUDA device here; use trainer.device=cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def document_mark(config: TrainConfig, data: TokenData) -> DocumentMark | None:
    """What separates documents, where attention is not to look across them; ConfigError where nothing does."""
    if not config.sampling.mask_documents:
        return None
    if objective_options(config).traits.windows > 1:
        raise ConfigError(
            "sampling.mask_documents=true: this objective compares two texts, which must see each other; leave it false"
        )
    if data.eos_id is None:
        advice = "set data.eos_id" if "eos_id" in config.data else "leave it false, or choose other data"
        raise ConfigError(
            f"sampling.mask_documents=true: nothing is known to separate the documents of this data; {advice}"
        )
    return DocumentMark(data.eos_id, data.eos_first)


def build_model(config: TrainConfig, data_vocab_size: int, seams: Seams, mark: DocumentMark | None = None) -> GPT:
    """The model on torch's default device, its weights not yet drawn."""
    vocab_size = config.model.vocab_size or data_vocab_size
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    try:
        classes = objective_options(config).traits.classes
        return GPT(model, seams, device_of(config).type, config.trainer.precision, mark, classes)
    except SeamConflict as error:
        raise ConfigError(f"stabilizer=[{','.join(sorted(config.stabilizer))}]: {error}") from error


def check(configs: Iterable[TrainConfig], *, must_fit: bool = False) -> None:
    """Build everything that can be built without memory, time or files; ConfigError where something is wrong.

    `must_fit`: the runs are to be trained here, so what this device cannot hold by far, or not compile, is refused too.
    What runs share is built once.
    """
    data: dict[str, TokenData] = {}
    shapes: set[str] = set()
    for config in configs:
        _check(config, must_fit, data, shapes)


# What a model's shape does not depend on.
_SHAPELESS = frozenset(("seed", "init_seed", "data_seed", "optimizer", "schedule", "run_name", "tracking", "stability"))


def _check(config: TrainConfig, must_fit: bool, known: MutableMapping[str, TokenData], shapes: set[str]) -> None:
    device_of(config)
    seams = fill_seams(build_stabilizers(config))
    instantiate(config.tracking, "tracking")
    objective, seq_len = objective_options(config), config.model.seq_len
    if isinstance(objective, CausalLM) and objective.prompt >= seq_len:
        raise ConfigError(f"objective.prompt={objective.prompt}: must be less than model.seq_len={seq_len}")
    optimizer = instantiate_as(OptimizerOptions, config.optimizer, "optimizer")
    Schedule.of(config.schedule, config.lr, config.trainer.max_steps)
    faults = parse(config.debug.inject, config.trainer.max_steps)
    if any(fault.kind == "kill_in_checkpoint" for fault in faults) and not config.trainer.save_weights:
        raise ConfigError("debug.inject=kill_in_checkpoint: needs trainer.save_weights=true, or there is no checkpoint")
    data = load_data(config, known)
    build_objective(config, data)
    parts = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _SHAPELESS}
    if (shape := repr(parts)) in shapes:
        return
    shapes.add(shape)
    if must_fit:
        _check_size(config, config.model.vocab_size or data.vocab_size, optimizer.state_bytes)
        _check_compiler(config)
        _check_precision(config)
    with torch.device("meta"):
        try:
            build_model(config, data.vocab_size, seams, document_mark(config, data))
        except RuntimeError as error:
            shape = f"model.d_model={config.model.d_model}, model.d_ff={config.model.d_ff}"
            raise ConfigError(f"{shape}: no tensor can be that large; choose a smaller width") from error


def training_bytes(config: TrainConfig, model: GPT) -> int:
    """Of weights, gradients and optimizer state; activations are not counted."""
    state = instantiate_as(OptimizerOptions, config.optimizer, "optimizer").state_bytes
    return _bytes(config, state) * parameter_counts(model)["total"]


def _bytes(config: TrainConfig, state_bytes: int) -> int:
    """Of a parameter's weight, gradient and optimizer state."""
    return (_WEIGHT_BYTES + state_bytes) * weight_dtype(config.trainer.precision).itemsize // 4


def _check_size(config: TrainConfig, vocab_size: int, state_bytes: int) -> None:
    """ConfigError where a lower bound of what a step needs is more than twice the memory of the device."""
    memory = physical_bytes(device_of(config))
    if memory is None:
        return
    model, trainer = config.model, config.trainer
    d_ff = model.d_ff or 4 * model.d_model
    parameters = vocab_size * model.d_model + model.n_layers * 2 * model.d_model * (model.d_model + d_ff)
    tokens = trainer.micro_batch_size * model.seq_len
    for keys, what, needed in (
        (
            f"model.d_model={model.d_model}, model.n_layers={model.n_layers}, model.d_ff={d_ff}",
            "weights, gradients and optimizer state",
            _bytes(config, state_bytes) * parameters + _LAYER_BYTES * model.n_layers,
        ),
        (
            f"trainer.micro_batch_size={trainer.micro_batch_size}",
            "the logits of a micro-batch",
            2 * tokens * vocab_size,
        ),
        (
            f"trainer.grad_accum_steps={trainer.grad_accum_steps}",
            "the token ids of a step",
            8 * tokens * trainer.grad_accum_steps,
        ),
    ):
        if needed > 2 * memory:
            gib = needed / 2**30
            shown = f"{gib:,.0f}" if gib < 1e6 else f"{gib:.1e}"
            raise ConfigError(f"{keys}: {what} need {shown} GiB or more, and this device has {memory / 2**30:,.0f} GiB")


def _check_compiler(config: TrainConfig) -> None:
    """ConfigError where torch.compile would find no C++ compiler for the CPU."""
    if config.trainer.compile == "off" or device_of(config).type != "cpu":
        return
    if (missing := missing_compiler("cpu")) is not None:
        raise ConfigError(
            f"trainer.compile={config.trainer.compile}: needs a C++ compiler, and there is {missing} here: install it, "
            "name another one by the environment variable CXX, or set trainer.compile=off"
        )


def _check_precision(config: TrainConfig) -> None:
    trainer = config.trainer
    on_cpu = trainer.precision == "bf16" and device_of(config).type == "cpu"
    if on_cpu and not trainer.emulate_bf16 and not has_bf16():
        raise ConfigError(
            "trainer.precision=bf16: this CPU has no instructions for it, and a step takes about ten times as long as "
            "in fp32; use trainer.precision=fp32, or trainer.emulate_bf16=true to train all the same"
        )


def build_step(config: TrainConfig, model: GPT, objective: Objective, ranks: Ranks = ONE) -> TrainStep:
    """The training step of a model that is on its device, with the losses and gradient steps of its stabilizers."""
    trainer, site = config.trainer, site_of(model.config)
    terms = {owner: make(site.at("loss")) for owner, make in model.seams.loss_terms.items()}
    for term in terms.values():
        if isinstance(term, torch.nn.Module):
            term.to(model.embed.weight.device)
    called = ranks.wrap(model)  # which may replace the weights that an optimizer is to hold
    return TrainStep(
        model,
        objective,
        terms,
        _build_update(config, model, ranks),
        GradientSide(model.seams, site, trainer.grad_clip).to(model.embed.weight.device),
        grad_accum_steps=trainer.grad_accum_steps,
        precision=trainer.precision,
        compile=trainer.compile,
        on_nonfinite=config.stability.on_nonfinite,
        ranks=ranks,
        called=called,
    )


def _build_update(config: TrainConfig, model: GPT, ranks: Ranks) -> Update:
    options = instantiate_as(OptimizerOptions, config.optimizer, "optimizer")
    if isinstance(options, AdamW):
        return AdamW.build(options, model, model.fused, ranks.local)
    return options.build(model)


def share_threads(workers: int) -> None:
    """Divide this machine's CPU threads among `workers` runs at once, for runs that do not ask for a number."""
    global _default_threads
    _default_threads = max(1, min(_default_threads, cores() // workers))


def build_run(config: TrainConfig, ranks: Ranks = ONE) -> Run:
    """Model and optimizer on the device, with initial weights that depend on (init seed, parameter name) only."""
    device = device_of(config)
    torch.set_num_threads(config.trainer.threads or _default_threads)
    if config.trainer.deterministic != torch.are_deterministic_algorithms_enabled():  # it loads torch's compiler
        torch.use_deterministic_algorithms(config.trainer.deterministic)
    stabilizers = build_stabilizers(config)
    seams = fill_seams(stabilizers)
    data = load_data(config)
    trainer, seq_len = config.trainer, config.model.seq_len
    init_seed = config.seed if config.init_seed is None else config.init_seed
    model = build_model(config, data.vocab_size, seams, document_mark(config, data))
    initialise(model, init_seed)
    init = fingerprints(model)
    model.to(device, weight_dtype(trainer.precision))
    model.masks(torch.zeros(1, seq_len, dtype=torch.long, device=device))  # else a compiled model would make them
    objective = build_objective(config, data)
    step = build_step(config, model, objective, ranks)
    # Dropout only: weights and batches have generators of their own.
    torch.manual_seed(dropout_seed(config.seed, ranks.rank))
    per_sample = objective.traits.windows
    eval_windows = validation_windows(data.val, seq_len, trainer.eval_sequences, per_sample)
    probe_windows = validation_windows(data.val, seq_len, config.diagnostics.probe_sequences, per_sample)
    targets = objective.batch(torch.from_numpy(eval_windows), VALIDATION).targets_MT
    starts = validation_starts(data.val_tokens, seq_len, trainer.eval_sequences)
    return Run(
        config,
        device,
        stabilizers,
        data,
        model,
        init,
        step,
        Schedule.of(config.schedule, config.lr, trainer.max_steps),
        build_sampler(data, seq_len, data_seed_of(config), config.sampling, per_sample),
        torch.from_numpy(eval_windows).to(device),
        target_bytes(data, targets),
        torch.from_numpy(probe_windows).to(device),
        data.optimal_loss(starts, (targets != IGNORE).numpy()) if config.model.family == "decoder" else None,
    )
