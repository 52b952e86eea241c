"""What every stabilizer of configs/stabilizer must hold; a new YAML file is tested without a change here.

An entry whose default values equal the baseline declares `identity = True`.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from stability_lab.config import ConfigError, config_dir
from stability_lab.model.backend import choose_backend
from stability_lab.model.init import fingerprints
from stability_lab.objective.objective import Batch
from stability_lab.plugins.instantiate import instantiate
from stability_lab.seams import ADDITIVE, EXCLUSIVE, Seams, Stabilizer
from stability_lab.training.checkpoint import load_weights, save_weights
from stability_lab.training.loop import Run
from stability_lab.training.optimizers import parameter_groups

FOLDER = config_dir() / "stabilizer"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "none")


def node(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))[name]


def options(name: str) -> dict[str, Any]:
    return {k: v for k, v in yaml.safe_load((FOLDER / f"{name}.yaml").read_text())[name].items() if k != "_target_"}


def stabilizer(name: str) -> Stabilizer:
    return instantiate(node(name), f"stabilizer.{name}")


def default_values(name: str) -> dict[str, Any]:
    cls = type(stabilizer(name))
    assert dataclasses.is_dataclass(cls)
    return {f.name: f.default for f in dataclasses.fields(cls)}


def numeric_and_boolean() -> list[tuple[str, str]]:
    """(stabilizer, option) for every option of which another value is at hand."""
    return [
        (name, key) for name in NAMES for key, value in default_values(name).items() if isinstance(value, int | float)
    ]


def first_batch(run: Run) -> Batch:
    return run.objective.batch(torch.from_numpy(run.sampler.batch(0, 4)), 0)


def inverse(batch: Batch) -> Tensor:
    return torch.tensor(1 / batch.targets_MT.numel())


def outcome(run: Run) -> dict[str, Tensor]:
    """Logits, loss and gradients of the first batch, by name."""
    batch = first_batch(run)
    run.model.zero_grad()
    with torch.no_grad():
        logits = run.model(batch.inputs_MT).logits_BTV
    loss = run.step.forward(batch, inverse(batch))[0]
    loss.objective.backward()
    gradients = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    return {"logits": logits, "objective": loss.objective.detach(), **gradients}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def baseline(tiny_run) -> Run:
    return tiny_run()


@pytest.fixture(scope="module", params=NAMES)
def run(request, tiny_run) -> Run:
    """With default values; tests of this module must not train it."""
    return tiny_run(f"+stabilizer={request.param}")


def name_of(run: Run) -> str:
    (built,) = run.stabilizers
    return built.name


def test_there_are_stabilizers():
    assert {"zloss", "qknorm", "rmsnorm", "layernorm"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name):
    built = stabilizer(name)
    assert built.name == name
    assert built.paper.startswith("arXiv:")
    assert len(built.summary) > 20
    module = type(built).__module__
    assert module == f"stability_lab.stabilizers.{name}"


@pytest.mark.parametrize("name", NAMES)
def test_yaml_lists_every_option_with_its_default(name):
    written = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert list(written) == [name]
    assert dataclasses.MISSING not in default_values(name).values()
    assert options(name) == default_values(name)


@pytest.mark.parametrize("name", NAMES)
def test_options_that_are_no_numbers_or_words_of_the_set_are_refused(name):
    cls = type(stabilizer(name))
    for key, value in default_values(name).items():
        wrong = {float: (math.nan, math.inf, -math.inf), str: ("nonsense",)}.get(type(value), ())
        for bad in wrong:
            with pytest.raises(ValueError, match=f"^{key}={bad:g}" if isinstance(bad, float) else f"^{key}={bad}"):
                cls(**{key: bad})


def test_it_claims_known_seams(run):
    owners = run.model.seams.owners
    assert owners
    assert set(owners) <= {*EXCLUSIVE, *ADDITIVE}
    assert set(owners.values()) == {(name_of(run),)}
    assert run.stabilizers[0].apply(Seams()).owners == owners


def test_it_differs_from_the_baseline_unless_it_says_otherwise(run, baseline):
    identity = getattr(run.stabilizers[0], "identity", False)
    assert same(outcome(run), outcome(baseline)) == identity


@pytest.mark.parametrize(("name", "key"), numeric_and_boolean())
def test_every_option_has_an_effect(name, key, tiny_run):
    value = default_values(name)[key]
    other = str(not value).lower() if isinstance(value, bool) else 50 * value
    changed = tiny_run(f"+stabilizer={name}", f"stabilizer.{name}.{key}={other}")
    assert not same(outcome(changed), outcome(tiny_run(f"+stabilizer={name}")))


def test_every_parameter_gets_a_gradient(run):
    gradients = outcome(run)
    for name, parameter in run.model.named_parameters():
        assert gradients[name].isfinite().all(), name
        assert gradients[name].shape == parameter.shape
        assert gradients[name].ne(0).any(), name


def test_every_parameter_is_in_one_group_of_the_optimizer(run):
    grouped = [name for group in parameter_groups(run.model).values() for name, _ in group]
    assert sorted(grouped) == sorted(name for name, _ in run.model.named_parameters())
    held = [id(p) for p in run.step.update.parameters]
    assert sorted(held) == sorted(id(p) for p in run.model.parameters())
    outside = [run.step.side, *(t for t in run.step.terms.values() if isinstance(t, torch.nn.Module))]
    assert not [p for module in outside for p in module.parameters()]


def test_shared_parameters_and_batches_are_those_of_the_baseline(run, baseline):
    ours, theirs = fingerprints(run.model), fingerprints(baseline.model)
    shared = ours.keys() & theirs.keys()
    assert "blocks.1.attn.wq.weight" in shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    for first in (0, 4, 10_000):
        assert (run.sampler.batch(first, 4) == baseline.sampler.batch(first, 4)).all()
    assert torch.equal(run.eval_windows, baseline.eval_windows)
    assert torch.equal(run.probe_windows, baseline.probe_windows)


@pytest.mark.parametrize("name", NAMES)
def test_one_step_is_finite(name, tiny_run, train_steps):
    run = tiny_run(f"+stabilizer={name}")
    before = fingerprints(run.model)
    (row,) = train_steps(run, 1)
    assert all(math.isfinite(value) for value in row.values())
    assert row["bad"] == 0
    assert all(p.isfinite().all() for p in run.model.parameters())
    after = fingerprints(run.model)
    assert not [parameter for parameter in before if before[parameter] == after[parameter]]


@pytest.mark.parametrize("name", NAMES)
def test_explicit_attention_gives_the_same(name, tiny_run):
    fast, explicit = (tiny_run(f"+stabilizer={name}", f"model.attention={way}") for way in ("auto", "explicit"))
    assert explicit.model.backend.name == "explicit"
    expected = outcome(explicit)
    for key, value in outcome(fast).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6, msg=partial("{}: {}".format, key))


@pytest.mark.parametrize("name", NAMES)
def test_fused_attention_is_refused_where_it_would_drop_the_stabilizer(name):
    seams = stabilizer(name).apply(Seams())
    if "score_mod" not in seams.owners:
        assert choose_backend("sdpa", seams).name == choose_backend("auto", seams).name == "sdpa"
    else:
        assert choose_backend("auto", seams).name == "explicit"
        with pytest.raises(ConfigError, match=rf"^model\.attention=sdpa: .*{name}"):
            choose_backend("sdpa", seams)


# torch's own tracer instantiates the class of a custom backward pass and warns of it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_traces_as_one_graph(run):
    torch.compiler.reset()  # otherwise the models of this module add up to torch's limit of recompilations
    batch, plain = first_batch(run), run.step.forward
    traced = torch.compile(plain, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = plain(batch, inverse(batch))[0]
    got = traced(batch, inverse(batch))[0]
    got.objective.backward()
    torch.testing.assert_close(got.objective.detach(), expected.objective, rtol=1e-6, atol=0)


def test_weights_survive_a_checkpoint(run, tiny_run, tmp_path):
    name = name_of(run)
    trained = tiny_run(f"+stabilizer={name}")
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.add_(0.01)
    other = tiny_run(f"+stabilizer={name}", "seed=1")
    assert save_weights(trained.model, tmp_path / "last")
    load_weights(other.model, tmp_path / "last", torch.device("cpu"))
    assert fingerprints(other.model) == fingerprints(trained.model)
    inputs, _ = first_batch(trained)
    with torch.no_grad():
        assert torch.equal(other.model(inputs).logits_BTV, trained.model(inputs).logits_BTV)
