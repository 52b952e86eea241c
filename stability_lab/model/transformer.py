"""A transformer: a decoder, which sees what lies before, or an encoder, which sees both sides.

Shape letters: B batch, T tokens, D d_model, V vocab, L layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_lab.config import ModelConfig
from stability_lab.model.backend import choose_backend
from stability_lab.model.block import Block
from stability_lab.model.encoder import HeadTransform, NoSegments, NoSequenceHead, Segments, SequenceHead
from stability_lab.model.layers import Embedding, Linear
from stability_lab.model.mask import DocumentMark, Masks, layer_windows
from stability_lab.model.rope import LearnedPositions, Rope, SinusoidalPositions
from stability_lab.model.rounding import rounded
from stability_lab.seams import ModelOutput, Seams, Site


class GPT(nn.Module):
    """Token ids (B, T) -> `ModelOutput`. `vocab_size` must be set; `pad_vocab_to` adds rows that no logit comes from.

    With a `mark`, attention stays within the documents that it separates. An encoder is BERT (arXiv:1810.04805): no
    mask but for padding, segments and a norm behind the embeddings, a transform before its unembedding and a bias of
    its logits; with `classes` it has a pooler and logits of whole sequences too.
    """

    def __init__(
        self,
        config: ModelConfig,
        seams: Seams,
        device_type: str = "cpu",
        precision: str = "fp32",
        mark: DocumentMark | None = None,
        classes: int = 0,
    ):
        super().__init__()
        assert config.vocab_size is not None
        seams = seams.placed(config.norm_placement)
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
            seq_len=t,
        )
        seams = rounded(seams, config.rounding)
        encoder, d = config.family == "encoder", config.d_model
        self.masks = Masks(windows, mark, self.backend.name, causal=not encoder)
        self.embed = Embedding(rows, config.d_model)
        self.embed_scale = seams.embed_scale(site)
        self.embed_segments = Segments(2, d) if encoder else NoSegments()
        self.embed_positions = _positions(config)
        self.embed_norm = seams.norm(site) if encoder else nn.Identity()
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        rotate = Rope(t, site.head_dim, config.rope_theta, site.fused) if config.positions == "rope" else None
        self.blocks = nn.ModuleList(
            Block(config, site.at("attn", layer), seams, self.backend.name, rotate) for layer in range(config.n_layers)
        )
        self.final_norm = seams.norm(site.at("final")) if seams.norm_placement.final else nn.Identity()
        self.head = None if config.tied_head else Linear(config.d_model, rows, bias=False)
        self.head_transform = HeadTransform(d, seams.norm(site.at("head"))) if encoder else nn.Identity()
        self.head_bias = nn.Parameter(torch.zeros(rows)) if encoder else None
        self.logit_transform = seams.logit_transform(site.at("logits"))
        self.sequence_head = SequenceHead(d, classes) if classes else NoSequenceHead()

    def extra_repr(self) -> str:
        owners = (f"{seam} <- {', '.join(names)}" for seam, names in self.seams.owners.items())
        return f"seams: {'; '.join(owners) or 'all empty'}"

    @property
    def unembedding(self) -> Tensor:
        """The weight that logits come from, (rows, D): the head's, or the embedding's where it is tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def features(
        self, tokens_BT: Tensor, segments_BT: Tensor | None = None, padding_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the head sees, (B, T, D), and each layer's bound on attention logits, (L,).

        `segments_BT`: 0 or 1, None is 0 everywhere. `padding_BT`: True where a token is to be seen by no other.
        """
        x = self.embed_segments(self.embed_scale(self.embed(tokens_BT)), segments_BT)
        x = self.dropout(self.embed_norm(self.embed_positions(x)))
        bounds = []
        for block, mask in zip(self.blocks, self.masks(tokens_BT, padding_BT), strict=True):
            x, bound = block(x, mask)
            bounds.append(bound)
        return self.final_norm(x), torch.stack(bounds)

    def forward(
        self, tokens_BT: Tensor, segments_BT: Tensor | None = None, padding_BT: Tensor | None = None
    ) -> ModelOutput:
        return self.output(*self.features(tokens_BT, segments_BT, padding_BT))

    def output(self, x_BTD: Tensor, bound_L: Tensor) -> ModelOutput:
        """What follows from the features; `head_parameters` are all the weights that take part."""
        # Rows that pad the vocabulary are multiplied, for speed, and give no logit.
        logits = F.linear(self.head_transform(x_BTD), self.unembedding, self.head_bias)[..., : self.config.vocab_size]
        unembedding = self.unembedding[: self.config.vocab_size]
        return ModelOutput(self.logit_transform(logits), bound_L, unembedding, self.fused, self.sequence_head(x_BTD))

    def head_parameters(self) -> list[Tensor]:
        parts = (self.head_transform, self.logit_transform, self.sequence_head)
        bias = [] if self.head_bias is None else [self.head_bias]
        return [self.unembedding, *bias, *(p for part in parts for p in part.parameters())]


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
    """Unique parameters: all of them, without embeddings and heads, and of an encoder without its heads (a pooler is
    none)."""
    total = sum(p.numel() for p in model.parameters())
    embeddings = _count(model.embed, model.embed_positions, model.embed_segments)
    heads = _count(model.head, model.head_transform, model.head_bias, model.sequence_head.classifier)
    counts = {"total": total, "non_embedding": total - embeddings - heads}
    return counts | ({"without_heads": total - heads} if model.config.family == "encoder" else {})


def _count(*parts: nn.Module | Tensor | None) -> int:
    tensors = ((part,) if isinstance(part, Tensor) else part.parameters() for part in parts if part is not None)
    return sum(p.numel() for own in tensors for p in own)
