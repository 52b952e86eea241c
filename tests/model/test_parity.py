"""Our GPT with the weights of a published architecture gives its logits, loss and gradients.

The references are tiny random models of `transformers`. All are compared whole: embedding, positions, blocks, final
norm and head.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stability_lab.build import build_model, build_stabilizers, fill_seams
from stability_lab.model.block import MLP
from stability_lab.model.transformer import GPT
from stability_lab.objective.causal_lm import CausalLM
from stability_lab.training.step import forward_loss

pytestmark = pytest.mark.oracle

V, D, T, L = 65, 32, 16, 2
GQA = ("model.n_kv_heads=2",)
SWIGLU = ("model.mlp=swiglu", "model.d_ff=64")
Tensors = dict[str, Tensor]
LLAMA_NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
    "self_attn.q_proj.weight": "attn.wq.weight",
    "self_attn.k_proj.weight": "attn.wk.weight",
    "self_attn.v_proj.weight": "attn.wv.weight",
    "self_attn.o_proj.weight": "attn.wo.weight",
    "self_attn.q_norm.weight": "attn.qk_transform.q_gain",
    "self_attn.k_norm.weight": "attn.qk_transform.k_gain",
    "mlp.gate_proj.weight": "mlp.w_gate.weight",
    "mlp.up_proj.weight": "mlp.w_up.weight",
    "mlp.down_proj.weight": "mlp.w_down.weight",
}
PRE_NORM_NAMES = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "mlp_norm.weight"}
OLMO2_NAMES = {
    "post_attention_layernorm.weight": "attn_branch_norm.weight",
    "post_feedforward_layernorm.weight": "mlp_branch_norm.weight",
}
GEMMA2_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "attn_branch_norm.weight",
    "pre_feedforward_layernorm.weight": "mlp_norm.weight",
    "post_feedforward_layernorm.weight": "mlp_branch_norm.weight",
    "mlp.w_up.weight": "mlp.w_up.weight",
    "mlp.w_down.weight": "mlp.w_down.weight",
}


def renamed(theirs: Tensors, names: dict[str, str]) -> Tensors:
    """Their parameters, or gradients, by our names."""
    ours = {}
    for name, value in theirs.items():
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        ours[f"blocks.{layer[1]}.{names[layer[2]]}" if layer else names[name]] = value
    return ours


def from_gpt2(theirs: Tensors) -> Tensors:
    """Their linear layers hold the transposed matrix, and q, k and v in one."""
    ours = {
        "embed.weight": theirs["transformer.wte.weight"],
        "embed_positions.weight": theirs["transformer.wpe.weight"],
        "final_norm.weight": theirs["transformer.ln_f.weight"],
        "final_norm.bias": theirs["transformer.ln_f.bias"],
    }
    for i in range(L):
        for kind in ("weight", "bias"):
            layer = f"transformer.h.{i}.{{}}.{kind}".format
            ours[f"blocks.{i}.attn_norm.{kind}"] = theirs[layer("ln_1")]
            ours[f"blocks.{i}.mlp_norm.{kind}"] = theirs[layer("ln_2")]
            for name, value in zip(("wq", "wk", "wv"), theirs[layer("attn.c_attn")].chunk(3, -1), strict=True):
                ours[f"blocks.{i}.attn.{name}.{kind}"] = value.mT if kind == "weight" else value
            for name, their in (("attn.wo", "attn.c_proj"), ("mlp.w_up", "mlp.c_fc"), ("mlp.w_down", "mlp.c_proj")):
                value = theirs[layer(their)]
                ours[f"blocks.{i}.{name}.{kind}"] = value.mT if kind == "weight" else value
    return ours


def small(config_class: type, **fields: Any) -> Any:
    config = config_class(
        **{
            "vocab_size": V,
            "hidden_size": D,
            "num_attention_heads": 4,
            "num_hidden_layers": L,
            "max_position_embeddings": T,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            **fields,
        }
    )
    config._attn_implementation = "eager"
    return config


def randomise(theirs: nn.Module, gains_at: float = 1.0) -> nn.Module:
    """Weights as far from initial ones as a trained model's: logits of several units, gains that differ."""
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        gain = (parameter.ndim == 1 and "norm" in name) or re.search(r"ln_\w+\.weight", name)
        nn.init.normal_(parameter, mean=gains_at if gain else 0.0, std=0.3)
    return theirs.eval()


def our_model(tiny_config, *overrides: str) -> GPT:
    config = tiny_config(*overrides)
    return build_model(config, V, fill_seams(build_stabilizers(config)))


def check_parity(ours: GPT, theirs: Any, translate: Callable[[Tensors], Tensors], gain_offset: float = 0.0) -> None:
    weights = translate(dict(theirs.named_parameters()))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            offset = gain_offset if parameter.ndim == 1 and "norm" in name else 0.0
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name] + offset)
    assert weights.keys() == dict(ours.named_parameters()).keys()
    tokens = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens, labels=tokens)
    assert expected.logits.std() > 0.5
    logits = ours(tokens).logits_BTV
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5 * expected.logits.abs().max().item())
    objective = CausalLM()
    batch = objective.batch(tokens, 0)
    sums, _ = forward_loss(ours, objective, [])(batch, torch.tensor(1 / batch.targets_MT.numel()))
    assert sums.objective.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    sums.objective.backward()
    expected.loss.backward()
    gradients = translate({name: p.grad for name, p in theirs.named_parameters()})
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        gradient = gradients[name]
        # Without RoPE a bias of the keys shifts all logits of a query alike: both have rounding only.
        size = largest / 10 if name.endswith("wk.bias") else gradient.abs().max().item()
        assert size > 0, name
        assert parameter.grad is not None
        atol = 1e-5 * size
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("scaled", [False, True], ids=["gpt2", "gpt2 with inverse_layer"])
@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_gpt2(tiny_config, backend, scaled):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = small(GPT2Config, activation_function="gelu", scale_attn_by_inverse_layer_idx=scaled)
    like_gpt2 = ("model.positions=learned", "model.bias=true", "model.tied_head=true")
    name = "dynamic_scaling" if scaled else "none"
    ours = our_model(tiny_config, *like_gpt2, f"model.attention={backend}", f"+stabilizer={name}")
    check_parity(ours, randomise(GPT2LMHeadModel(config)), from_gpt2)


@pytest.mark.parametrize("caps", [(2.0, 3.0), (50.0, 30.0)], ids=str)
def test_gemma2(tiny_config, caps):
    """With our MLP in the place of its GeGLU, which we have not, and full attention in every layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = small(
        Gemma2Config,
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        layer_types=["full_attention"] * L,
        attn_logit_softcapping=caps[0],
        final_logit_softcapping=caps[1],
    )
    ours = our_model(
        tiny_config,
        *GQA,
        "model.tied_head=true",
        "+stabilizer=[rmsnorm,perinorm,softcap,final_softcap,embed_scale]",
        f"stabilizer.softcap.cap={caps[0]}",
        f"stabilizer.final_softcap.cap={caps[1]}",
    )
    theirs = Gemma2ForCausalLM(config)
    for layer in theirs.model.layers:
        layer.mlp = MLP(ours.config)  # type: ignore[assignment]
    names = LLAMA_NAMES | GEMMA2_NAMES
    check_parity(ours, randomise(theirs, gains_at=0.0), lambda tensors: renamed(tensors, names), gain_offset=1.0)


def test_olmo2(tiny_config):
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = small(Olmo2Config, intermediate_size=64, num_key_value_heads=2, rms_norm_eps=1e-6)
    set_of_olmo2 = ("+stabilizer=[rmsnorm,qknorm,reordered_norm]", "stabilizer.qknorm.scope=full")
    ours = our_model(tiny_config, *GQA, *SWIGLU, *set_of_olmo2)
    names = LLAMA_NAMES | OLMO2_NAMES
    check_parity(ours, randomise(Olmo2ForCausalLM(config)), lambda tensors: renamed(tensors, names))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_qwen3(tiny_config, tied):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = small(
        Qwen3Config,
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
    )
    ours = our_model(tiny_config, *GQA, *SWIGLU, f"model.tied_head={str(tied).lower()}", "+stabilizer=[rmsnorm,qknorm]")
    names = LLAMA_NAMES | PRE_NORM_NAMES
    check_parity(ours, randomise(Qwen3ForCausalLM(config)), lambda tensors: renamed(tensors, names))
