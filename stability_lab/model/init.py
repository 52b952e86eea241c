"""Initial values. Every parameter has a random generator of its own, keyed by (init seed, parameter name).

A stabilizer that adds parameters therefore leaves the initial value of every other one bit-identical, on any
device: values are drawn on the CPU in fp32.

| scheme   | linear layers                              | last layer of a residual branch (wo, w_down) | embeddings |
|----------|--------------------------------------------|----------------------------------------------|------------|
| normal   | std (OLMo 2: 0.02, truncated at 3)         | std                                          | std        |
| gpt2     | std (GPT-2: 0.02)                          | std / sqrt(2 L)                              | std        |
| mitchell | 1 / sqrt(fan_in)                           | 1 / sqrt(2 fan_in (l + 1)), l from 0         | 1 / sqrt(d) |
| fan_in   | 1 / sqrt(fan_in)                           | 1 / sqrt(fan_in)                             | 1 / sqrt(d) |

Sources: GPT-2; OLMo 2 (arXiv:2501.00656), 3.3; `mitchell` as in the OLMo code; `fan_in` as in Wortsman et al.
(arXiv:2309.14322), 2.1. Biases start at 0; gains keep the value their module gave them.
"""

import hashlib
import math

import torch
from torch import nn

from stability_lab.config import InitConfig
from stability_lab.model.transformer import GPT


def parameter_generator(init_seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{init_seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialise(model: GPT, init_seed: int) -> None:
    """Set every weight of a linear layer or embedding; `model` must be on the CPU."""
    config = model.config.init
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        std = weight_std(config, name, module, model.config.n_layers)
        generator = parameter_generator(init_seed, f"{name}.weight")
        weight = module.weight
        if name in ("embed", "head"):
            # Rows that only pad the vocabulary are 0 and do not shift the draws of the others.
            weight[model.config.vocab_size :] = 0
            weight = weight[: model.config.vocab_size]
        if config.truncate is None:
            weight.normal_(0.0, std, generator=generator)
        else:
            limit = config.truncate * std
            nn.init.trunc_normal_(weight, 0.0, std, -limit, limit, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()


def weight_std(config: InitConfig, name: str, module: nn.Linear | nn.Embedding, n_layers: int) -> float:
    """Standard deviation (before truncation) of the weight of the module called `name`."""
    if config.scheme in ("normal", "gpt2"):
        residual = config.scheme == "gpt2" and _ends_branch(name)
        return config.std / math.sqrt(2 * n_layers) if residual else config.std
    if isinstance(module, nn.Embedding):
        return 1 / math.sqrt(module.embedding_dim)
    if config.scheme == "mitchell" and _ends_branch(name):
        layer = int(name.split(".")[1])
        return 1 / math.sqrt(2 * module.in_features * (layer + 1))
    return 1 / math.sqrt(module.in_features)


def _ends_branch(name: str) -> bool:
    return name.endswith((".attn.wo", ".mlp.w_down"))


def fingerprints(model: GPT) -> dict[str, str]:
    """Parameter name -> first 12 hex digits of the SHA-256 of its fp32 bytes: what `compare` pairs runs by."""
    return {
        name: hashlib.sha256(p.detach().cpu().float().contiguous().numpy().tobytes()).hexdigest()[:12]
        for name, p in model.named_parameters()
    }
