"""A decoder-only GPT.

Shape letters: B batch, T tokens, D d_model, V vocab, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_lab.config import ModelConfig
from stability_lab.model.attention import AttentionStats, choose_backend
from stability_lab.model.block import Block
from stability_lab.model.documents import DocumentMark, documents_of
from stability_lab.model.rope import rope_table, sinusoidal_table
from stability_lab.seams import Seams


class GPTOutput(NamedTuple):
    logits_BTV: Tensor
    attn_logit_bound_L: Tensor  # no attention logit of the layer was larger; fp32, detached


class GPT(nn.Module):
    """Token ids (B, T) -> `GPTOutput`. `vocab_size` must be set; `pad_vocab_to` adds rows that no logit comes from.

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
        d, t = config.d_model, config.seq_len
        rows = max(config.vocab_size, config.pad_vocab_to or 0)
        self.config, self.seams, self.mark = config, seams, mark
        self.position_table: Tensor
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        self.backend = choose_backend(
            config.attention, seams, device_type, precision, config.dropout, d // config.n_heads, mark is not None
        )
        self.embed = nn.Embedding(rows, d)
        self.embed_scale = seams.embed_scale(d)
        self.embed_positions = nn.Embedding(t, d) if config.positions == "learned" else None
        if config.positions == "rope":
            cos, sin = rope_table(t, d // config.n_heads, config.rope_theta)
            self.register_buffer("rope_cos", cos, persistent=False)
            self.register_buffer("rope_sin", sin, persistent=False)
        elif config.positions == "sinusoidal":
            self.register_buffer("position_table", sinusoidal_table(t, d), persistent=False)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, i, seams, self.backend.name) for i in range(config.n_layers))
        self.final_norm = seams.norm(d, None, "final") if seams.norm_placement.final else nn.Identity()
        self.head = None if config.tied_head else nn.Linear(d, rows, bias=False)
        self.logit_transform = seams.logit_transform

    def extra_repr(self) -> str:
        owners = (f"{seam} <- {', '.join(names)}" for seam, names in self.seams.owners.items())
        return f"seams: {'; '.join(owners) or 'all empty'}"

    def forward(self, tokens_BT: Tensor, stats: list[AttentionStats] | None = None) -> GPTOutput:
        """`stats`, where given, receives one entry of exact attention statistics a layer."""
        x = self.dropout(self._embed(tokens_BT))
        rope = (self.rope_cos, self.rope_sin) if self.config.positions == "rope" else None
        documents = None if self.mark is None else documents_of(tokens_BT, self.mark, self.backend.name)
        bounds = []
        for block in self.blocks:
            x, bound = block(x, rope, stats, documents)
            bounds.append(bound)
        x = self.final_norm(x)
        logits = F.linear(x, self.embed.weight) if self.head is None else self.head(x)
        if logits.shape[-1] != self.config.vocab_size:
            logits = logits[..., : self.config.vocab_size]
        return GPTOutput(self.logit_transform(logits), torch.stack(bounds))

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed_scale(self.embed(tokens_BT))
        t = tokens_BT.shape[1]
        if self.embed_positions is not None:
            return x + self.embed_positions.weight[:t]
        if self.config.positions == "sinusoidal":
            return x + self.position_table[:t]
        return x


def parameter_counts(model: GPT) -> dict[str, int]:
    """Unique parameters: all of them, and without token embedding, position embedding and head."""
    total = sum(p.numel() for p in model.parameters())
    outside = [model.embed, model.embed_positions, model.head]
    embeddings = sum(p.numel() for m in outside if m is not None for p in m.parameters())
    return {"total": total, "non_embedding": total - embeddings}
