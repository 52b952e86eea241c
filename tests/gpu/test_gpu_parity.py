"""Every stabilizer in every precision on the device against the same first step in fp32 on CPU."""

import functools

import pytest
import torch

from stability_lab.build import build_run
from stability_lab.config import config_dir
from stability_lab.training.loop import Run

pytestmark = pytest.mark.gpu
NAMES = sorted(path.stem for path in (config_dir() / "stabilizer").glob("*.yaml"))
# Relative tolerances of loss and gradient norm: two bits of the type's rounding for the loss, more for the norm.
TOLERANCE = {"fp32": (1e-5, 1e-3), "bf16": (8e-3, 8e-2), "fp16": (1e-3, 2e-2)}


def sharpen(run: Run) -> Run:
    """Attention logits of a few units: at initialisation they are near 0, and nothing of attention would show.

    fp16 starts from a loss scale that no first step overflows.
    """
    run.step.scale.value.clamp_(max=256)
    with torch.no_grad():
        for block in run.model.blocks:
            for matrix in ("attn.wq", "attn.wk"):
                block.get_submodule(matrix).weight.mul_(20)  # type: ignore[operator]
    return run


@pytest.fixture(scope="module")
def reference(compose_config, small_overrides, take_steps):
    """`reference(*overrides)`: the first step's row on CPU in fp32."""

    @functools.cache
    def row(*overrides: str) -> dict[str, float]:
        config = compose_config(*small_overrides, "trainer.device=cpu", *overrides)
        return take_steps(sharpen(build_run(config)), 1)[0]

    return row


def check(got: dict[str, float], expected: dict[str, float], precision: str) -> None:
    loss, norm = TOLERANCE[precision]
    assert got["bad"] == got["optim/skipped"] == 0
    assert got["train/loss"] == pytest.approx(expected["train/loss"], rel=loss)
    assert got["train/log_z_mean"] == pytest.approx(expected["train/log_z_mean"], rel=loss, abs=loss)
    assert got["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=norm)
    assert got["attn/logit_bound"] == pytest.approx(expected["attn/logit_bound"], rel=10 * loss)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", NAMES)
def test_first_step(gpu_run, take_steps, reference, name, precision):
    run = sharpen(gpu_run(f"+stabilizer={name}", f"trainer.precision={precision}"))
    (row,) = take_steps(run, 1)
    check(row, reference(f"+stabilizer={name}"), precision)


def test_query_key_layer_equals_the_baseline(gpu_run, take_steps, reference):
    mode = ("+stabilizer=dynamic_scaling", "stabilizer.dynamic_scaling.mode=query_key_layer")
    run = sharpen(gpu_run(*mode, "trainer.precision=fp16"))
    (row,) = take_steps(run, 1)
    check(row, reference("+stabilizer=none"), "fp16")


def test_gains_move_by_less_than_bf16_could_hold(gpu_run, take_steps):
    # A gain of 1 in bf16 has neighbours 2^-7 above and 2^-8 below: updates of 1e-4 would be lost.
    run = gpu_run("+stabilizer=[rmsnorm,qknorm]", "trainer.precision=bf16", "optimizer.lr=1e-4")
    gains = {name: p for name, p in run.model.named_parameters() if p.dim() == 1}
    assert len(gains) >= 9
    take_steps(run, 2)
    for name, gain in gains.items():
        assert gain.dtype == torch.float32, name
        moved = (gain - 1).abs().max().item()
        assert 0 < moved < 2**-9, name
