"""A decoder-only transformer.

Shape letters: B batch, T tokens, D d_model, V vocab, L layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_lab.config import ModelConfig
from stability_lab.model.backend import choose_backend
from stability_lab.model.block import Block
from stability_lab.model.layers import Embedding, Linear
from stability_lab.model.mask import DocumentMark, Masks, layer_windows
from stability_lab.model.rope import LearnedPositions, Rope, SinusoidalPositions
from stability_lab.model.rounding import rounded
from stability_lab.seams import ModelOutput, Seams, Site


class GPT(nn.Module):
    """Token ids (B, T) -> `ModelOutput`. `vocab_size` must be set; `pad_vocab_to` adds rows that no logit comes from.

    With a `mark`, attention stays within the documents that it separates.
    """

    def __init__(
        self,
        config: ModelConfig,
        seams: Seams,
        device_type: str = "cpu",
        precision: str = "fp32",
        mark: DocumentMark | None = None,
    ):
        super().__init__()
        assert config.vocab_size is not None
        seams.check()
        site, t = site_of(config), config.seq_len
        rows = max(config.vocab_size, config.pad_vocab_to or 0)
        windows = layer_windows(config.window, config.full_attention_every, config.n_layers, t)
        masked_by = "sampling.mask_documents" if mark else "model.window" if any(windows) else None
        self.config, self.seams, self.mark, self.fused = config, seams, mark, site.fused
        self.backend = choose_backend(
            config.attention,
            seams,
            device_type,
            precision,
            config.dropout,
            site.head_dim,
            masked_by,
            fp16_scores=config.rounding.scores is not None,
        )
        seams = rounded(seams, config.rounding)
        self.masks = Masks(windows, mark, self.backend.name)
        self.embed = Embedding(rows, config.d_model)
        self.embed_scale = seams.embed_scale(site)
        self.embed_positions = _positions(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        rotate = Rope(t, site.head_dim, config.rope_theta, site.fused) if config.positions == "rope" else None
        self.blocks = nn.ModuleList(
            Block(config, site.at("attn", layer), seams, self.backend.name, rotate) for layer in range(config.n_layers)
        )
        self.final_norm = seams.norm(site.at("final")) if seams.norm_placement.final else nn.Identity()
        self.head = None if config.tied_head else Linear(config.d_model, rows, bias=False)
        self.logit_transform = seams.logit_transform(site.at("logits"))

    def extra_repr(self) -> str:
        owners = (f"{seam} <- {', '.join(names)}" for seam, names in self.seams.owners.items())
        return f"seams: {'; '.join(owners) or 'all empty'}"

    @property
    def unembedding(self) -> Tensor:
        """The weight that logits come from, (rows, D): the head's, or the embedding's where it is tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(self, tokens_BT: Tensor) -> ModelOutput:
        x = self.dropout(self.embed_positions(self.embed_scale(self.embed(tokens_BT))))
        bounds = []
        for block, mask in zip(self.blocks, self.masks(tokens_BT), strict=True):
            x, bound = block(x, mask)
            bounds.append(bound)
        # Rows that pad the vocabulary are multiplied, for speed, and give no logit.
        logits = F.linear(self.final_norm(x), self.unembedding)[..., : self.config.vocab_size]
        unembedding = self.unembedding[: self.config.vocab_size]
        return ModelOutput(self.logit_transform(logits), torch.stack(bounds), unembedding, self.fused)


def site_of(config: ModelConfig) -> Site:
    """The site of the embedding; `Site.at` gives the others."""
    h = config.n_heads
    fused = config.implementation == "fused"
    return Site(0, config.n_layers, "embed", config.d_model, h, config.n_kv_heads or h, config.d_model // h, fused)


def _positions(config: ModelConfig) -> nn.Module:
    if config.positions == "learned":
        return LearnedPositions(config.seq_len, config.d_model)
    if config.positions == "sinusoidal":
        return SinusoidalPositions(config.seq_len, config.d_model)
    return nn.Identity()


def parameter_counts(model: GPT) -> dict[str, int]:
    """Unique parameters: all of them, and without token embedding, position embedding and head."""
    total = sum(p.numel() for p in model.parameters())
    outside = (model.embed, model.embed_positions, model.head)
    embeddings = sum(p.numel() for m in outside if m is not None for p in m.parameters())
    return {"total": total, "non_embedding": total - embeddings}
