"""QK-norm: normalised queries and keys bound the attention logits, whatever the projections grow to."""

import math

import pytest
import torch
from torch import Tensor

from stability_lab.model.attention import Attention, explicit_attention, logit_stats
from stability_lab.model.rope import Rope, rope_table, rotate
from stability_lab.model.transformer import site_of
from stability_lab.seams import PlainQK, Seams, Site
from stability_lab.stabilizers.qknorm import QKNorm, QKNormStabilizer

H, G, K = 4, 2, 8
SHAPE = Site(0, 1, "attn", H * K, n_heads=H, n_kv_heads=G, head_dim=K)
VARIANTS = [
    ("head", "rms"),
    ("head", "layer"),
    ("head", "l2"),
    ("full", "rms"),
    ("full", "layer"),
    ("full", "l2"),
]


def qk_norm(scope: str = "head", norm: str = "rms", *, shape: Site = SHAPE, eps=1e-6, affine=True) -> QKNorm:
    return QKNorm(shape, scope, norm, eps, affine)


def randomise(module: QKNorm) -> QKNorm:
    """Gains as a trained model might have them, negative ones too."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, mean=1.0, std=0.5)
    return module


def random_qk(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return scale * torch.randn(2, 16, H, K), scale * torch.randn(2, 16, G, K)


def largest_logit(transform: torch.nn.Module, q: Tensor, k: Tensor) -> float:
    """Largest absolute scaled logit over all heads; q (B, T, H, K), k (B, T, G, K)."""
    q, k = transform(q, k)
    return logit_stats(q.transpose(1, 2), k.transpose(1, 2), q.shape[-1] ** -0.5).max_abs_logit_H.amax().item()


@pytest.mark.parametrize(("norm", "logit"), [(None, 750.0), ("rms", 2.0), ("layer", 2.0), ("l2", 2.0)], ids=str)
@pytest.mark.parametrize("scope", ["head", "full"])
def test_published_example(scope, norm, logit):
    q = torch.tensor([10.0, 20.0, 30.0, 40.0]).view(1, 1, 1, 4)
    k = torch.tensor([5.0, 10.0, 15.0, 20.0]).view(1, 1, 1, 4)
    transform = PlainQK() if norm is None else qk_norm(scope, norm, shape=Site(0, 1, "attn", 1 * 4, 1, 1, 4))
    assert largest_logit(transform, q, k) == pytest.approx(logit, abs=1e-5)


def test_three_token_example():
    q = torch.tensor([[1, 0], [0, 2], [10, 10]], dtype=torch.float64).view(1, 3, 1, 2)
    k = torch.tensor([[1, 1], [2, -1], [3, 6]], dtype=torch.float64).view(1, 3, 1, 2)
    v = torch.tensor([[1, 0], [0, 1], [2, 2]], dtype=torch.float64).view(1, 1, 3, 2)
    q, k = qk_norm(shape=Site(0, 1, "attn", 1 * 2, 1, 1, 2)).double()(q, k)
    y = explicit_attention(q.transpose(1, 2), k.transpose(1, 2), v, 2**-0.5)
    assert y[0, 0, 0].tolist() == [1, 0]
    assert y[0, 0, 1].tolist() == pytest.approx([0.8365056029, 0.1634943971], abs=1e-9)
    assert y[0, 0, 2].tolist() == pytest.approx([1.2379757018, 0.9696993020], abs=1e-9)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_bound_of_scope_head_holds_for_the_worst_vectors(norm):
    module = randomise(qk_norm("head", norm))
    assert module.q_gain is not None
    assert module.k_gain is not None
    bound = math.sqrt(K) * (module.q_gain.abs().max() * module.k_gain.abs().max()).item()
    for scale in (1e-2, 1.0, 1e4):
        assert largest_logit(module, *random_qk(scale)) <= bound * (1 + 1e-6)
    # All the norm in one coordinate, for every coordinate: with gains that peak together the bound is met.
    spikes = 100 * torch.eye(K).view(1, K, 1, K)
    assert largest_logit(module, spikes.expand(1, K, H, K), spikes.expand(1, K, G, K)) <= bound * (1 + 1e-6)
    if norm == "rms":
        with torch.no_grad():
            module.k_gain.copy_(module.q_gain)
        bound = math.sqrt(K) * module.q_gain.abs().max().square().item()
        q, k = spikes.expand(1, K, H, K), spikes.expand(1, K, G, K)
        assert largest_logit(module, q, k) == pytest.approx(bound, rel=1e-5)


def test_scope_full_lets_one_head_take_all_the_norm():
    q, k = torch.zeros(1, 1, H, K), torch.zeros(1, 1, G, K)
    q[..., 0, 0] = k[..., 0, 0] = 100.0
    assert largest_logit(qk_norm("head"), q, k) == pytest.approx(math.sqrt(K), rel=1e-5)
    assert largest_logit(qk_norm("full"), q, k) == pytest.approx(math.sqrt(H * G * K), rel=1e-5)
    for scale in (1e-2, 1.0, 1e4):
        assert largest_logit(qk_norm("full"), *random_qk(scale)) <= math.sqrt(H * G * K) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("scope", "norm", "shapes"),
    [
        ("head", "rms", {"q_gain": (K,), "k_gain": (K,)}),
        ("head", "layer", {"q_gain": (K,), "k_gain": (K,)}),
        ("full", "rms", {"q_gain": (H * K,), "k_gain": (G * K,)}),
        ("full", "layer", {"q_gain": (H * K,), "k_gain": (G * K,)}),
        ("head", "l2", {"temperature": (1,)}),
        ("full", "l2", {"temperature": (1,)}),
    ],
)
def test_shapes_of_the_parameters(scope, norm, shapes):
    assert {name: tuple(p.shape) for name, p in qk_norm(scope, norm).named_parameters()} == shapes
    assert not list(qk_norm(scope, norm, affine=False).parameters())


@pytest.mark.parametrize("scope", ["head", "full"])
def test_affine_starts_as_the_identity(scope):
    for norm in ("rms", "layer", "l2"):
        with_gain = qk_norm(scope, norm)(*random_qk())
        without = qk_norm(scope, norm, affine=False)(*random_qk())
        for a, b in zip(with_gain, without, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_l2_with_temperature_starts_as_rms():
    for a, b in zip(qk_norm(norm="l2")(*random_qk()), qk_norm(norm="rms")(*random_qk()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_temperature_is_the_largest_logit():
    module = qk_norm(norm="l2")
    with torch.no_grad():
        assert module.temperature is not None
        module.temperature.fill_(7.0)
    q = torch.randn(1, 1, H, K)
    assert largest_logit(module, q, 3 * q[:, :, ::2]) == pytest.approx(7.0, rel=1e-5)


@pytest.mark.parametrize(("scope", "norm"), VARIANTS)
def test_scale_of_q_and_k_does_not_matter(scope, norm):
    q, k = random_qk()
    module = randomise(qk_norm(scope, norm, eps=1e-9))
    for a, b in zip(module(q, k), module(1000 * q, 0.1 * k), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("scope", "norm"), VARIANTS)
def test_low_precision_input_is_normalised_in_fp32(scope, norm):
    q, k = (x.bfloat16() for x in random_qk(0.05))
    module = randomise(qk_norm(scope, norm))
    for low, exact in zip(module(q, k), module.double()(q.double(), k.double()), strict=True):
        assert low.dtype == torch.bfloat16
        torch.testing.assert_close(low.double(), exact, rtol=2**-8 * 1.01, atol=1e-4)


def attention(tiny_config, module: QKNorm, *overrides: str) -> Attention:
    """Our layer of width H * K with random weights, `module` in its seam."""
    config = tiny_config(f"model.n_kv_heads={G}", "model.attention=explicit", *overrides).model
    torch.manual_seed(1)
    return Attention(
        config,
        site_of(config).at("attn"),
        Seams().claim("test", qk_transform=lambda shape: module),
        "explicit",
        Rope(16, K, 10_000.0),
    )


def test_it_is_applied_before_rope(tiny_config):
    layer = attention(tiny_config, randomise(qk_norm()))
    x, rope = torch.randn(2, 16, H * K), rope_table(16, K, 10_000.0)
    q, k = layer.wq(x).view(2, 16, H, K), layer.wk(x).view(2, 16, G, K)
    v = layer.wv(x).view(2, 16, G, K).transpose(1, 2)

    def finish(q: Tensor, k: Tensor) -> Tensor:
        y = explicit_attention(q.transpose(1, 2), k.transpose(1, 2), v, K**-0.5)
        return layer.wo(y.transpose(1, 2).flatten(2))

    norm = layer.qk_transform
    q_first, k_first = norm(q, k)
    before = finish(rotate(q_first, *rope), rotate(k_first, *rope))
    after = finish(*norm(rotate(q, *rope), rotate(k, *rope)))
    torch.testing.assert_close(layer(x)[0], before, rtol=1e-5, atol=1e-6)
    assert (before - after).abs().max() > 1e-3  # with a gain the order matters


def test_logits_of_a_model_stay_bounded_at_any_weight_scale(tiny_run):
    from stability_lab.diagnostics.probe import probe_attention

    largest = {}
    for name in ("none", "qknorm"):
        run = tiny_run(f"+stabilizer={name}")
        with torch.no_grad():
            for block in run.model.blocks:
                block.attn.wq.weight.mul_(1e3)
                block.attn.wk.weight.mul_(1e3)
        largest[name] = probe_attention(run.model, run.objective, run.probe_windows)["attn/max_abs_logit"]
    assert largest["qknorm"] <= math.sqrt(K) * (1 + 1e-5)
    assert largest["none"] > 100


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"scope": "layer"}, "scope"),
        ({"norm": "rmsnorm"}, "norm"),
        ({"eps": 0.0}, "eps"),
        ({"eps": -1e-6}, "eps"),
        ({"eps": 1.0}, "eps"),
        ({"eps": math.nan}, "eps"),
    ],
)
def test_bad_options_are_refused(options, field):
    with pytest.raises(ValueError, match=f"^{field}="):
        QKNormStabilizer(**options)


@pytest.mark.oracle
@pytest.mark.parametrize("scope", ["head", "full"])
def test_equals_qwen3_and_olmo2(tiny_config, scope):
    from transformers import LlamaConfig, Olmo2Config, Qwen3Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    config_class, attention_class = {
        "head": (Qwen3Config, Qwen3Attention),
        "full": (Olmo2Config, Olmo2Attention),
    }[scope]
    config = config_class(
        hidden_size=H * K,
        num_attention_heads=H,
        num_key_value_heads=G,
        num_hidden_layers=1,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=16,
        rms_norm_eps=1e-6,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.head_dim = K
    config._attn_implementation = "eager"
    theirs = attention_class(config, 0).eval()
    ours = attention(tiny_config, randomise(qk_norm(scope)))
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    names |= {"qk_transform.q_gain": "q_norm.weight", "qk_transform.k_gain": "k_norm.weight"}
    weights = {}
    for name, value in ours.state_dict().items():
        stem = name.removesuffix(".weight")
        weights[names[stem] + name[len(stem) :]] = value
    theirs.load_state_dict(weights)
    x = torch.randn(2, 16, H * K)
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=H * K, num_attention_heads=H, max_position_embeddings=16))
    mask = torch.full((16, 16), -torch.inf).triu(1).expand(2, 1, 16, 16)
    expected = theirs(x, rotary(x, torch.arange(16)[None]), mask)[0]
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(ours(x)[0], expected, rtol=1e-5, atol=1e-5)
