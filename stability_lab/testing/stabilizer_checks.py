"""What every stabilizer must hold, ours and anybody's; AssertionError says what does not hold.

Each check trains at most one step of a model of two layers, so that all of them take a few seconds.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from stability_lab.build import Run, build_model, build_run, build_stabilizers, build_step, fill_seams
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import ConfigError, TrainConfig
from stability_lab.model.init import fingerprints, initialise
from stability_lab.objective.loss import IGNORE
from stability_lab.objective.objective import Batch
from stability_lab.plugins.option_files import options
from stability_lab.plugins.trust import allowing, is_trusted
from stability_lab.seams import ADDITIVE, EXCLUSIVE, SeamConflict, Seams, Stabilizer
from stability_lab.training.checkpoint import load_weights, save_weights
from stability_lab.training.optimizers import parameter_groups

TINY = (
    *("model.d_model=32", "model.n_layers=2", "model.n_heads=4", "model.seq_len=16", "trainer.device=cpu"),
    *("trainer.micro_batch_size=4", "trainer.max_steps=5", "trainer.eval_sequences=8", "schedule.warmup_steps=2"),
    *("diagnostics.probe_sequences=2", "optimizer.lr=1e-2", "tracking=local"),
    *("data=synthetic", "data.tokens=20000", "data.val_tokens=2000"),  # drawn: nothing is read or written
)
TINY_ENCODER = (*TINY, "model=bert_mini", "model.dropout=0", "model.norm_placement=pre", "objective=masked_lm_nsp")


@runtime_checkable
class EqualsBaseline(Protocol):
    """What a stabilizer declares whose default values are those of the baseline."""

    identity: ClassVar[bool]


class Candidate:
    """A stabilizer under test, by its name as an option, in the run that `base` describes."""

    def __init__(
        self,
        name: str,
        overrides: Sequence[str] = (),
        config_dir: str | Path | None = None,
        base: tuple[str, ...] = TINY,
    ):
        self.name, self.base = name, base
        folder = () if config_dir is None else ("--config-dir", str(config_dir))
        self.folder = None if config_dir is None else Path(config_dir)
        self.words = (*folder, f"+stabilizer={name}", *overrides)

    def config(self, *words: str) -> TrainConfig:
        return _composed(*self.base, *self.words, *words)

    @cached_property
    def run(self) -> Run:
        """It is not trained: checks that train build their own."""
        return build_run(self.config())

    @property
    def stabilizer(self) -> Stabilizer:
        return self.run.stabilizers[0]


def check_stabilizer(
    name: str,
    *overrides: str,
    config_dir: str | Path | None = None,
    allow: Sequence[str] = (),
    base: tuple[str, ...] = TINY,
) -> None:
    """All checks of `+stabilizer=NAME` with `overrides`, such as "stabilizer.NAME.eps=1e-3".

    `config_dir` and `allow` are the flags of the command line, for a package that is not installed. `base`: `TINY`, or
    `TINY_ENCODER` for the same in an encoder.
    """
    with allowing(allow):
        candidate = Candidate(name, overrides, config_dir, base)
        for check in CHECKS:
            check(candidate)


def it_says_what_it_is(candidate: Candidate) -> None:
    """Name, paper and summary, and a YAML that spells out every option."""
    built = candidate.stabilizer
    _require(len(candidate.run.stabilizers) == 1, candidate, "its YAML must hold one stabilizer")
    _require(
        built.name == candidate.name, candidate, f"its `name` is {built.name}, and its YAML is called {candidate.name}"
    )
    _require(bool(built.paper and built.summary), candidate, "`paper` and `summary` must say something")
    cls = type(built)
    _require(cls.__dataclass_params__.frozen, candidate, f"{cls.__name__} must be a frozen dataclass")  # pyright: ignore
    fields = {field.name for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    written = set(candidate.config().stabilizer[candidate.name]) - {"_target_"}
    _require(
        fields == written, candidate, f"its YAML must hold its options {sorted(fields)}, and has {sorted(written)}"
    )


def it_claims_seams(candidate: Candidate) -> None:
    """Under its own name, and at least one."""
    owners = candidate.stabilizer.apply(Seams()).owners
    _require(bool(owners), candidate, "`apply` claims no seam, so it does nothing")
    _require(set(owners) <= {*EXCLUSIVE, *ADDITIVE}, candidate, f"it claims unknown seams: {sorted(owners)}")
    for seam, names in owners.items():
        _require(names == (candidate.name,), candidate, f"it claims '{seam}' under the name {', '.join(names)}")


def it_differs_from_the_baseline(candidate: Candidate) -> None:
    """In logits, loss or gradients of one batch; or it declares `identity = True`."""
    built = candidate.stabilizer
    if set(built.apply(Seams()).owners) <= {"grad", "post_step"}:
        return  # what comes behind the backward pass may wait for trouble
    equal = same(outcome(candidate.run), outcome(_baseline(candidate.base)))
    if isinstance(built, EqualsBaseline) and built.identity:
        _require(
            equal, candidate, "it declares `identity = True`, and logits, loss or gradients are not the baseline's"
        )
    else:
        _require(not equal, candidate, "logits, loss and gradients are the baseline's: it has no effect")


def its_parameters_get_gradients(candidate: Candidate) -> None:
    gradients = outcome(candidate.run)
    for name, parameter in candidate.run.model.named_parameters():
        gradient = gradients.get(name)
        _require(
            gradient is not None and bool(gradient.ne(0).any()), candidate, f"the parameter {name} gets no gradient"
        )
        assert gradient is not None
        _require(bool(gradient.isfinite().all()), candidate, f"the gradient of {name} is not finite")
        _require(gradient.shape == parameter.shape, candidate, f"the gradient of {name} has another shape")


def the_optimizer_holds_every_parameter(candidate: Candidate) -> None:
    """And there is none outside the model, which no checkpoint would hold."""
    run = candidate.run
    grouped = [name for group in parameter_groups(run.model).values() for name, _ in group]
    _require(sorted(grouped) == sorted(dict(run.model.named_parameters())), candidate, "a parameter is in no group")
    held = {id(parameter) for parameter in run.step.update.parameters}
    _require(held == {id(p) for p in run.model.parameters()}, candidate, "a parameter is not in the optimizer")
    for module in (run.step.side, *(term for term in run.step.terms.values() if isinstance(term, nn.Module))):
        outside = [name for name, _ in module.named_parameters()]
        _require(not outside, candidate, f"{type(module).__name__} holds parameters that nobody trains: {outside}")


def what_it_shares_with_the_baseline_is_equal(candidate: Candidate) -> None:
    """Initial values by name, batches and validation windows: the comparison is paired."""
    run, baseline = candidate.run, _baseline(candidate.base)
    ours, theirs = fingerprints(run.model), fingerprints(baseline.model)
    for name in sorted(ours.keys() & theirs.keys()):
        _require(ours[name] == theirs[name], candidate, f"it changes the initial value of {name}, which it shares")
    for first in (0, 4, 10_000):
        same = (run.sampler.batch(first, 4) == baseline.sampler.batch(first, 4)).all()
        _require(bool(same), candidate, "it changes the batches")
    windows = torch.equal(run.eval_windows, baseline.eval_windows) and torch.equal(
        run.probe_windows, baseline.probe_windows
    )
    _require(windows, candidate, "it changes the windows of validation or probe")


def one_step_is_finite(candidate: Candidate) -> None:
    run = build_run(candidate.config())
    before = fingerprints(run.model)
    _train_one_step(run, candidate)
    for name, parameter in run.model.named_parameters():
        _require(bool(parameter.isfinite().all()), candidate, f"{name} is not finite after one step")
    after = fingerprints(run.model)
    still = [name for name in before if before[name] == after[name]]
    _require(not still, candidate, f"one step leaves {', '.join(still)} as they were")


def explicit_attention_gives_the_same(candidate: Candidate) -> None:
    """The reference back-end, which forms every logit."""
    _gives_the_same(candidate, "model.attention=explicit")


def plain_operations_give_the_same(candidate: Candidate) -> None:
    """Without any gradient that is written by hand."""
    _gives_the_same(candidate, "model.implementation=reference")


def _gives_the_same(candidate: Candidate, override: str) -> None:
    expected = outcome(build_run(candidate.config(override)))
    for name, value in outcome(candidate.run).items():
        allowed = 1e-4 * expected[name].norm() + 1e-6 * math.sqrt(value.numel())
        close = bool((value - expected[name]).norm() <= allowed)
        _require(close, candidate, f"{name} is another one with {override}")


def it_traces_as_one_graph(candidate: Candidate) -> None:
    """torch.compile with fullgraph=True, which trainer.compile uses."""
    torch.compiler.reset()  # else models of earlier checks count towards torch's limit of recompilations
    plain = candidate.run.step.forward
    batch, inv_n = _first_batch(candidate.run)
    traced = torch.compile(plain, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = plain(batch, inv_n)[0].objective
    with warnings.catch_warnings():
        # torch's own tracer instantiates the class of a custom backward pass and warns of it.
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        try:
            got = traced(batch, inv_n)[0].objective
        except torch._dynamo.exc.TorchDynamoException as error:  # pyright: ignore[reportAttributeAccessIssue]
            raise _failed(candidate, f"it breaks the graph of torch.compile: {str(error).strip()}") from error
    got.backward()
    close = torch.allclose(got.detach(), expected, rtol=1e-6, atol=0)
    _require(close, candidate, f"the traced loss is {got.item():.7g} and not {expected.item():.7g}")


def its_weights_survive_a_checkpoint(candidate: Candidate) -> None:
    trained = build_run(candidate.config())
    torch.manual_seed(1)  # what a constructor draws must not be the same again by chance
    other = build_run(candidate.config("seed=1"))
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.add_(0.01)
    with tempfile.TemporaryDirectory() as folder:
        _require(save_weights(trained.model, Path(folder) / "last"), candidate, "its weights cannot be saved")
        load_weights(other.model, Path(folder) / "last", torch.device("cpu"))
    batch, _ = _first_batch(trained)
    with torch.no_grad():
        logits = [run.model(batch.inputs_MT, batch.segments_MT).logits_BTV for run in (trained, other)]
    same = fingerprints(other.model) == fingerprints(trained.model) and torch.equal(*logits)
    _require(same, candidate, "the weights of a checkpoint give other logits: is something no parameter and no buffer?")


def it_goes_with_every_other_one_or_says_no(candidate: Candidate) -> None:
    """With every option of the catalogue: one step, whatever the order, or a conflict that names both."""
    for file, node in options("stabilizer", candidate.folder):
        if is_trusted(node.get("_target_")) and file.stem != candidate.name:
            check_pair(candidate, file.stem, {file.stem: node})


def check_pair(candidate: Candidate, other: str, nodes: Mapping[str, Any]) -> None:
    """`nodes`: the configuration of the stabilizer `other`."""
    config = candidate.config()
    both = dataclasses.replace(config, stabilizer={**config.stabilizer, **nodes})
    built = build_stabilizers(both)
    pair = f"with {other}: "
    messages, filled = [], []
    for order in (built, built[::-1]):
        try:
            seams = fill_seams(order)
            with torch.device("meta"):
                build_model(both, 64, seams)
            filled.append(seams)
        except ConfigError as error:
            _require(isinstance(error.__cause__, SeamConflict), candidate, f"{pair}{error}")
            messages.append(str(error).partition(": ")[2])
        except Exception as error:
            raise _failed(candidate, f"{pair}{type(error).__name__}: {error}") from error
    if messages:
        _require(len(messages) == 2 and len(set(messages)) == 1, candidate, f"{pair}the order decides: {messages}")
        named = all(stabilizer.name in messages[0] for stabilizer in built)
        named = named and any(f"'{seam}'" in messages[0] for seam in EXCLUSIVE)
        _require(named, candidate, f"{pair}the conflict must name both and the seam: {messages[0]}")
        return
    run = build_run(both)
    _require(same(*(_of_seams(run, seams) for seams in filled)), candidate, f"{pair}the order changes the gradients")
    _train_one_step(run, candidate, pair)


CHECKS: tuple[Callable[[Candidate], None], ...] = (
    it_says_what_it_is,
    it_claims_seams,
    it_differs_from_the_baseline,
    its_parameters_get_gradients,
    the_optimizer_holds_every_parameter,
    what_it_shares_with_the_baseline_is_equal,
    one_step_is_finite,
    its_weights_survive_a_checkpoint,
    explicit_attention_gives_the_same,
    plain_operations_give_the_same,
    it_goes_with_every_other_one_or_says_no,
    it_traces_as_one_graph,
)


def _failed(candidate: Candidate, what: str) -> AssertionError:
    return AssertionError(f"stabilizer {candidate.name}: {what}")


def _require(holds: bool, candidate: Candidate, what: str) -> None:
    if not holds:
        raise _failed(candidate, what)


@cache
def _composed(*words: str) -> TrainConfig:
    (job,) = compose_jobs(read_command_line(words))
    return job.config


@cache
def _baseline(base: tuple[str, ...]) -> Run:
    return build_run(_composed(*base))


def _first_batch(run: Run) -> tuple[Batch, Tensor]:
    """And one over the number of its targets."""
    batch = run.objective.batch(torch.from_numpy(run.sampler.batch(0, 4)), 0)
    return batch, 1 / (batch.targets_MT != IGNORE).sum()


def outcome(run: Run) -> dict[str, Tensor]:
    """Logits, loss and gradients of the first batch, by name."""
    batch, inv_n = _first_batch(run)
    run.model.zero_grad()
    with torch.no_grad():
        logits = run.model(batch.inputs_MT, batch.segments_MT).logits_BTV
    objective = run.step.forward(batch, inv_n)[0].objective
    objective.backward()
    gradients = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    return {"logits": logits, "objective": objective.detach(), **gradients}


def _of_seams(run: Run, seams: Seams) -> dict[str, Tensor]:
    """Loss and gradients of the first batch in a model with these seams."""
    model = build_model(run.config, run.data.vocab_size, seams)
    initialise(model, 0)
    objective = build_step(run.config, model, run.objective).forward(*_first_batch(run))[0].objective
    objective.backward()
    return {"objective": objective} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _train_one_step(run: Run, candidate: Candidate, pair: str = "") -> None:
    row = run.step(_first_batch(run)[0], run.schedule.lr(1)).tolist()
    values = dict(zip(run.step.columns, row, strict=True))
    wrong = [name for name, value in values.items() if not math.isfinite(value)]
    _require(not wrong and not values["bad"], candidate, f"{pair}one step is not finite: {', '.join(wrong)}")
