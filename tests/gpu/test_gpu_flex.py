"""Compiled FlexAttention against the explicit path: forward and backward, which no CPU can do."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from stability_lab.model.attention import explicit_attention
from stability_lab.model.flex import block_mask, flex_attention, on_scores
from stability_lab.seams import ScoreMod
from stability_lab.stabilizers.softcap import SoftCap

pytestmark = pytest.mark.gpu
B, H, K = 2, 4, 32


def qkv_and_gradient(n_kv_heads: int, T: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Logits of a few units, so that a cap of 2 bends most of them."""
    generator = torch.Generator(device).manual_seed(0)
    scales = ((H, 2.0), (n_kv_heads, 2.0), (n_kv_heads, 1.0), (H, 1.0))
    return [s * torch.randn(B, h, T, K, generator=generator, device=device).to(dtype) for h, s in scales]


def outcome(attend, tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Output and gradients of q, k, v in fp32."""
    q, k, v, gradient = (x.detach().to(dtype or x.dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = attend(*leaves)
    y.backward(gradient.to(y.dtype))
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == 3
    return [x.detach().float() for x in (y, *gradients)]


CASES = [
    # cap, key/value heads, tokens, dtype
    (2.0, H, 128, torch.float32),
    (2.0, 2, 200, torch.float32),
    (2.0, 2, 200, torch.bfloat16),
    (2.0, 1, 64, torch.float16),
    (None, 2, 200, torch.float32),
    (None, H, 257, torch.bfloat16),
]


@pytest.mark.parametrize(("cap", "n_kv_heads", "T", "dtype"), CASES, ids=str)
def test_equals_the_explicit_path_forward_and_backward(cuda, cap, n_kv_heads, T, dtype):
    score_mod: ScoreMod | None = None if cap is None else SoftCap(cap).to(cuda)
    tensors = qkv_and_gradient(n_kv_heads, T, dtype, cuda)
    causal = block_mask(True, None, None, T, cuda)
    got = outcome(lambda q, k, v: flex_attention(q, k, v, on_scores(score_mod), n_kv_heads != H, causal), tensors)
    exact = outcome(
        lambda q, k, v: explicit_attention(q, k, v, K**-0.5, score_mod=score_mod), tensors, dtype=torch.float32
    )
    # Relative to the largest entry: rounding of the inputs' type, of the weights and of three products after them.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for name, a, b in zip(("y", "dq", "dk", "dv"), got, exact, strict=True):
        error = (a - b).abs().max().item()
        assert error <= tolerance * b.abs().max().item(), f"{name}: off by {error:.2e}"
    if score_mod is not None:
        uncapped = outcome(lambda q, k, v: explicit_attention(q, k, v, K**-0.5), tensors, dtype=torch.float32)
        assert (uncapped[0] - exact[0]).abs().max() > 10 * tolerance * exact[0].abs().max()


def test_no_query_sees_its_future(cuda):
    q, k, v, _ = qkv_and_gradient(H, 200, torch.float32, cuda)
    causal = block_mask(True, None, None, 200, cuda)
    score_mod = SoftCap(2.0).to(cuda)
    before = flex_attention(q, k, v, on_scores(score_mod), False, causal)
    k[:, :, 150:], v[:, :, 150:] = 100.0, 100.0
    after = flex_attention(q, k, v, on_scores(score_mod), False, causal)
    assert torch.equal(before[:, :, :150], after[:, :, :150])
    assert not torch.equal(before[:, :, 150:], after[:, :, 150:])


def test_layers_and_runs_share_one_compilation(cuda, gpu_run, take_steps):
    torch.compiler.reset()
    counters.clear()
    for cap in (5, 50):  # a cap is a tensor: another value needs no other kernel
        run = gpu_run("+stabilizer=softcap", f"stabilizer.softcap.cap={cap}", "model.n_layers=3")
        assert run.model.backend.name == "flex"
        take_steps(run, 2)
    assert counters["stats"]["unique_graphs"] == 1


def test_control_without_a_cap_equals_sdpa(cuda, gpu_run, take_steps):
    rows = [take_steps(gpu_run(f"model.attention={backend}"), 3) for backend in ("flex", "sdpa")]
    for flex, sdpa in zip(*rows, strict=True):
        assert flex == pytest.approx(sdpa, rel=1e-3)
    assert rows[0][0]["train/loss"] == pytest.approx(rows[1][0]["train/loss"], rel=1e-5)
