"""What teaching texts state, computed with this package's own modules: the part `numbers` of `reproduce textbook`.

Arithmetic is in float64 wherever the module allows it. Shape letters: N samples, D head_dim or width, K keys, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_lab.model.attention import logit_stats
from stability_lab.model.rope import sinusoidal_table
from stability_lab.objective.loss import IGNORE, language_model_loss
from stability_lab.objective.masked_lm import MaskedLM
from stability_lab.objective.objective import Vocabulary
from stability_lab.seams import Scaling, Seams, Site
from stability_lab.stabilizers.attn_scale import AttnScale
from stability_lab.stabilizers.dynamic_scaling import DynamicScaling
from stability_lab.stabilizers.layernorm import LayerNorm
from stability_lab.stabilizers.qknorm import QKNormStabilizer
from stability_lab.stabilizers.rmsnorm import RMSNormStabilizer
from stability_lab.stabilizers.softcap import SoftCapStabilizer
from stability_lab.stabilizers.zloss import ZLoss

Value = float | list[float]
SEEDS = range(16)  # of what is drawn, where a claim rests on a mean
DRAWS = 256  # softmaxes a seed
KEYS = 16
PAIRS = 200_000
_NO_EPS = 1e-300  # 0 for all purposes of float64


def numbers() -> dict[str, Value]:
    """Name -> value, or one value a seed."""
    groups = (
        _zloss,
        _qknorm,
        _soft_cap,
        _dot_products,
        _heads_apart,
        _norms,
        _noise,
        _attention,
        _factors,
        _overflow,
        _encoder,
    )
    return dict(pair for group in groups for pair in group())


def _zloss() -> Iterator[tuple[str, float]]:
    term = ZLoss(weight=1e-4).apply(Seams()).loss_terms["zloss"](_heads(4))
    one, target = torch.ones((), dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    for name, logits in (("10_5_0", [10.0, 5.0, 0.0]), ("2_1_0", [2.0, 1.0, 0.0])):
        sums = language_model_loss(torch.tensor([logits], dtype=torch.float64), target, one, [term])
        yield f"logz_{name}", sums.log_z.item()
        yield f"zloss_{name}", sums.terms[0].item()
    for name, log_z in (("above", 5.0), ("below", -5.0)):
        # The slope with the penalty minus the slope without it; a shift of all logits by s changes log Z by s.
        logits = torch.full((1, 8), log_z, dtype=torch.float64) - torch.tensor(8.0, dtype=torch.float64).log()
        slopes = []
        for terms in ([term], []):
            x = logits.clone().requires_grad_()
            language_model_loss(x, target, one, terms).objective.backward()
            assert x.grad is not None
            slopes.append(x.grad.sum().item())
        yield f"zloss_slope_{name}", slopes[0] - slopes[1]


def _qknorm() -> Iterator[tuple[str, float]]:
    q = torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=torch.float64).view(1, 1, 1, 4)
    k = torch.tensor([5.0, 10.0, 15.0, 20.0], dtype=torch.float64).view(1, 1, 1, 4)
    site = _heads(4)
    raw, root = (q * k).sum().item(), site.head_dim**0.5
    yield "raw_logit", raw
    yield "raw_logit_scaled", raw / root
    product = {}
    for norm in ("layer", "rms"):
        module = QKNormStabilizer(norm=norm, affine=False).apply(Seams()).qk_transform(site)
        a, b = module(q, k)
        product[norm] = (a * b).sum().item()
    yield "qknorm_layer_logit", product["layer"]
    yield "qknorm_layer_scaled", product["layer"] / root
    yield "qknorm_norms_differ", float(abs(product["layer"] - product["rms"]) > 1e-4)


def _soft_cap() -> Iterator[tuple[str, float]]:
    module = SoftCapStabilizer(30.0).apply(Seams()).score_mod(_heads(64))
    assert module is not None
    for logit in (100.0, 50.0, 10.0):
        yield f"cap30_{logit:g}", module(torch.tensor(logit, dtype=torch.float64)).item()
    yield "caps_taken", float(sum(_takes(cap) for cap in (0.0, -10.0, -100.0)))


def _takes(cap: float) -> bool:
    try:
        SoftCapStabilizer(cap)
    except ValueError:
        return False
    return True


def _dot_products() -> Iterator[tuple[str, Value]]:
    variances = []
    for d in (4, 64, 256):
        generator = torch.Generator().manual_seed(d)
        # In pieces: 200,000 pairs of 256 entries would need a gigabyte.
        products = [_products(generator, 2000, d) for _ in range(PAIRS // 2000)]
        variances.append(torch.cat(products).var().item() / d)
    yield "variance_over_head_dim", max(variances, key=lambda ratio: abs(ratio - 1))
    one = AttnScale(mode="sqrt").apply(Seams()).attn_scale(_heads(3))(torch.ones(1)).item()
    yield "divisor_head_dim_3", 3**0.5 / one
    for d in (64, 1024):
        for mode, name in (("sqrt", "scaled"), ("none", "unscaled")):
            yield f"gradient_{name}_{d}", [_gradient(seed, d, mode) for seed in SEEDS]


def _products(generator: torch.Generator, n: int, d: int) -> Tensor:
    q, k = (torch.randn(n, d, dtype=torch.float64, generator=generator) for _ in range(2))
    return (q * k).sum(-1)


def _gradient(seed: int, d: int, mode: str) -> float:
    """Mean Frobenius norm of the softmax's Jacobian over queries with 16 keys, entries of variance 1."""
    generator = torch.Generator().manual_seed(seed)
    q_ND = torch.randn(DRAWS, d, dtype=torch.float64, generator=generator)
    k_NKD = torch.randn(DRAWS, KEYS, d, dtype=torch.float64, generator=generator)
    # The module multiplies what the kernel's 1/sqrt(head_dim) leaves.
    q_ND = AttnScale(mode=mode).apply(Seams()).attn_scale(_heads(d))(q_ND) / d**0.5
    logits_NK = torch.einsum("nd,nkd->nk", q_ND, k_NKD)
    jacobian_NKK = torch.func.vmap(torch.func.jacrev(lambda z: z.softmax(-1)))(logits_NK)
    return torch.linalg.matrix_norm(jacobian_NKK).mean().item()


def _heads_apart() -> Iterator[tuple[str, Value]]:
    for mode, name in (("sqrt", "scaled"), ("none", "unscaled")):
        yield f"sharpest_head_{name}", [_sharpest(seed, mode) for seed in SEEDS]


def _sharpest(seed: int, mode: str) -> float:
    """The largest attention weight, the mean of 32 queries, in the sharpest of 8 heads of 64."""
    generator = torch.Generator().manual_seed(seed)
    q_HND, k_HKD = (torch.randn(8, n, 64, dtype=torch.float64, generator=generator) for n in (32, KEYS))
    q_HND = AttnScale(mode=mode).apply(Seams()).attn_scale(_heads(64))(q_HND) / 64**0.5
    weights_HNK = (q_HND @ k_HKD.mT).softmax(-1)
    return weights_HNK.amax(-1).mean(-1).amax().item()


def _heads(head_dim: int) -> Site:
    """The site of an attention layer with one head."""
    return Site(0, 1, "attn", head_dim, n_heads=1, n_kv_heads=1, head_dim=head_dim)


def _norms() -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(0)
    x_64 = torch.randn(1000, 64, dtype=torch.float64, generator=generator)
    rms, layer = _norm("rms", 64)(x_64), _norm("layer", 64)(x_64)
    yield "rmsnorm_radius_64", rms.norm(dim=-1).mean().item()
    yield "layernorm_radius_64", layer.norm(dim=-1).mean().item()
    yield "layernorm_mean_64", layer.mean(-1).abs().amax().item()
    x_8 = torch.randn(64, 8, dtype=torch.float64, generator=generator)
    yield "rmsnorm_rank_8", _rank(_norm("rms", 8), x_8[0])
    yield "layernorm_rank_8", _rank(_norm("layer", 8), x_8[0])
    yield "layernorm_span_8", float(torch.linalg.matrix_rank(_norm("layer", 8)(x_8)).item())
    x_2 = torch.randn(1000, 2, dtype=torch.float64, generator=generator)
    yield "layernorm_points_2", float(len(torch.unique(_norm("layer", 2)(x_2).round(decimals=6), dim=0)))
    yield "layernorm_rank_2", _rank(_norm("layer", 2), x_2[0])

    yield "l2_radius_64", F.normalize(x_64, dim=-1).norm(dim=-1).mean().item()
    for norm in ("l2", "rms"):
        module = QKNormStabilizer(norm=norm, eps=_NO_EPS, affine=False).apply(Seams()).qk_transform(_heads(64))
        lengths = torch.stack([x_64[0] * factor for factor in (1, 2, 10)]).view(1, 3, 1, 64)
        points = module(lengths, lengths)[0].round(decimals=6)
        yield f"{norm}_points_of_lengths", float(len(torch.unique(points[0], dim=0)))


def _noise() -> Iterator[tuple[str, Value]]:
    """RMSNorm of 64 entries: what becomes of another length, and of noise of a tenth in each entry."""
    norm = _norm("rms", 64)
    came, went = [], []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        x_ND, noise_ND = (torch.randn(DRAWS, 64, dtype=torch.float64, generator=generator) for _ in range(2))
        came.append((0.1 * noise_ND.norm(dim=-1) / x_ND.norm(dim=-1)).mean().item())
        went.append(((norm(x_ND + 0.1 * noise_ND) - norm(x_ND)).norm(dim=-1) / norm(x_ND).norm(dim=-1)).mean().item())
    yield "noise_in_length", (norm(x_ND * noise_ND[:, :1].exp()) - norm(x_ND)).abs().amax().item()
    yield "noise_after_rmsnorm", went
    yield "noise_before_half", [value / 2 for value in came]


def _norm(name: str, n: int) -> nn.Module:
    """A norm without gain and bias, in float64."""
    if name == "rms":
        seams = RMSNormStabilizer(eps=_NO_EPS, affine=False).apply(Seams())
    else:
        seams = LayerNorm(eps=_NO_EPS, affine=False, bias=False).apply(Seams())
    return seams.norm(Site(1, 1, "final", n, n_heads=1, n_kv_heads=1, head_dim=n)).double()


def _rank(norm: nn.Module, x: Tensor) -> float:
    """Rank of the Jacobian at `x`; singular values below 1e-9 count as 0."""
    jacobian = torch.autograd.functional.jacobian(norm, x)
    assert isinstance(jacobian, Tensor)
    return float(torch.linalg.matrix_rank(jacobian, atol=1e-9).item())


def _attention() -> Iterator[tuple[str, Value]]:
    for name, factor in (("2", 2.0), ("half", 0.5)):
        scaling = DynamicScaling(mode="linear", first=factor, last=factor)
        module = scaling.apply(Seams()).attn_scale(_heads(32))
        yield f"entropy_factor_{name}", [_entropy(seed, module) for seed in SEEDS]
    yield "position_0_largest", sinusoidal_table(1, 64).amax().item()


def _entropy(seed: int, module: Scaling) -> float:
    """Mean entropy over ln(number of keys), of causal attention over 64 tokens in 4 heads of 32."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 4, 64, 32, generator=generator) for _ in range(2))
    return logit_stats(module(q), k, 32**-0.5).entropy_H.mean().item()


def _factors() -> Iterator[tuple[str, Value]]:
    for name, factor in (("1", 1.0), ("tenth", 0.1)):
        module = DynamicScaling(mode="linear", first=factor, last=factor).apply(Seams()).attn_scale(_heads(1))
        yield f"gradient_factor_{name}", [_passes(seed, module) for seed in SEEDS]
    learned = DynamicScaling(mode="learned").apply(Seams()).attn_scale(_heads(1))
    assert isinstance(learned, torch.nn.Module)
    (theta,) = learned.parameters()
    logits = torch.tensor([2.0, 1.0, 0.0])
    yield "learned_factor_start", learned(torch.ones(1)).item()
    learned(logits).log_softmax(-1)[0].backward()
    assert theta.grad is not None
    yield "learned_factor_moves", float(theta.grad.item() != 0)


def _passes(seed: int, module: Scaling) -> float:
    """Mean Frobenius norm of the Jacobian of 16 attention weights in logits of variance 1 before the factor."""
    logits_NK = torch.randn(DRAWS, KEYS, generator=torch.Generator().manual_seed(seed))
    jacobian_NKK = torch.func.vmap(torch.func.jacrev(lambda z: module(z).softmax(-1)))(logits_NK)
    return torch.linalg.matrix_norm(jacobian_NKK).mean().item()


def _overflow() -> Iterator[tuple[str, float]]:
    """Softmax of the logits 750 and 0 in float64, by its formula and as PyTorch computes it: is a weight not finite?"""
    logits = torch.tensor([750.0, 0.0], dtype=torch.float64)
    yield "naive_softmax_fails", float(not (logits.exp() / logits.exp().sum()).isfinite().all())
    yield "softmax_fails", float(not logits.softmax(-1).isfinite().all())


def _encoder() -> Iterator[tuple[str, float]]:
    """Sinusoidal positions, and how many positions of 10,000 samples of 128 masked language modelling learns from."""
    table_TD = sinusoidal_table(512, 64).double()
    yield "positions_largest", table_TD.abs().amax().item()
    sine, cosine = table_TD[:, 0::2], table_TD[:, 1::2]
    # A shift by k turns each pair by an angle of its own, whatever the position: a matrix that depends on k alone.
    turned = torch.stack(
        (sine[:-7] * cosine[7] + cosine[:-7] * sine[7], cosine[:-7] * cosine[7] - sine[:-7] * sine[7]), -1
    )
    yield "positions_shift_error", (turned.flatten(1) - table_TD[7:]).abs().amax().item()
    windows = torch.randint(0, 100, (10_000, 129), generator=torch.Generator().manual_seed(0))
    batch = MaskedLM().bound(Vocabulary(104, (100, 101, 102, 103), 100, 101, 102), 0).batch(windows, 0)
    yield "masked_share", (batch.targets_MT[:, 1:-1] != IGNORE).double().mean().item()
