"""`trainer.compile`: the eager losses with every stabilizer, one graph, and no recompilation in a sweep."""

import functools
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from stability_lab.config import config_dir

NAMES = sorted(path.stem for path in (config_dir() / "stabilizer").glob("*.yaml"))
# The norms, the placements and the layer factors exclude one another: two sets hold all seams between them.
MANY = [
    "[qknorm,rmsnorm,perinorm,ln_scaling,embed_scale,softcap,final_softcap,zloss]",
    "[dynamic_scaling,layernorm,reordered_norm,zloss]",
]
# torch's own tracer instantiates the class of a custom backward pass, and looks at the gradient of inputs that are no
# leaves; it warns of both. Other warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture
def compile_with(monkeypatch):
    """`compile_with(backend)`: torch.compile uses that back-end from here on, from an empty cache."""
    compile = torch.compile

    def use(backend: str) -> None:
        monkeypatch.setattr(torch, "compile", functools.partial(compile, backend=backend))

    torch.compiler.reset()
    counters.clear()
    yield use
    torch.compiler.reset()


@pytest.fixture(scope="module")
def losses(tiny_run, train_steps):
    """`losses(*overrides)`: loss, gradient norm and logit bound of three steps."""

    def train(*overrides: str) -> list[float]:
        rows = train_steps(tiny_run("model.init.std=0.1", *overrides), 3)
        return [row[key] for row in rows for key in ("train/loss", "optim/grad_norm", "attn/logit_bound")]

    return train


def selected(name: str) -> list[str]:
    """The stabilizer, in the mode that has parameters where there is one."""
    learned = ["stabilizer.dynamic_scaling.mode=learned"] if name == "dynamic_scaling" else []
    return [f"+stabilizer={name}", *learned]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_stabilizer_gives_the_eager_losses(name, losses, compile_with):
    compile_with("aot_eager")
    eager = losses(*selected(name))
    for how in ("block", "full"):
        counters.clear()
        compiled = losses(*selected(name), f"trainer.compile={how}")
        assert counters["stats"]["unique_graphs"] >= 1
        assert not counters["graph_break"]
        assert compiled == pytest.approx(eager, rel=1e-4), how


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("how", ["block", "full"])
@pytest.mark.parametrize("names", MANY)
def test_compiled_code_gives_the_eager_losses(names, how, losses, compile_with):
    compile_with("inductor")
    compiled = losses(f"+stabilizer={names}", f"trainer.compile={how}")
    assert counters["inductor"]
    assert compiled == pytest.approx(losses(f"+stabilizer={names}"), rel=1e-4)


SWEEP: dict[str, tuple[list[str], list[str]]] = {
    MANY[0]: (
        [],
        [
            "seed=1",
            "optimizer.lr=1e-3",
            "stabilizer.zloss.weight=3e-3",
            "stabilizer.softcap.cap=5",
            "stabilizer.final_softcap.cap=7",
            "stabilizer.embed_scale.factor=3",
        ],
    ),
    "dynamic_scaling": (
        ["stabilizer.dynamic_scaling.mode=linear", "stabilizer.dynamic_scaling.preset=up"],
        ["stabilizer.dynamic_scaling.mode=linear", "stabilizer.dynamic_scaling.preset=down", "seed=1"],
    ),
    "attn_scale": (["stabilizer.attn_scale.mode=none"], ["stabilizer.attn_scale.mode=inverse_d"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["block", "full"])
@pytest.mark.parametrize("names", [*list(SWEEP)[:2], pytest.param("attn_scale", marks=pytest.mark.slow)])
def test_the_second_run_of_a_sweep_compiles_nothing(names, how, losses, compile_with):
    compile_with("eager")
    first, second = SWEEP[names]
    words = (f"+stabilizer={names}", f"trainer.compile={how}")
    losses(*words, *first)
    expected = losses(words[0], *second)
    stance: Any = torch.compiler.set_stance("fail_on_recompile")
    with stance:
        assert losses(*words, *second) == pytest.approx(expected, rel=1e-4)
    # One for two runs; and all blocks are one piece of code.
    assert counters["stats"]["unique_graphs"] == 1
