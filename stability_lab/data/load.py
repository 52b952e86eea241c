"""From what a configuration chooses to ids: read, prepared or drawn, as the source asks for."""

from __future__ import annotations

from typing import Any

from stability_lab.data.sources.corpus import TextFiles
from stability_lab.data.sources.hub import Hub, stream_tokens
from stability_lab.data.tokenizer import TokenizerOptions
from stability_lab.data.tokens.memmap import TokenData, load_tokens
from stability_lab.data.tokens.prepare import default_folder, prepare
from stability_lab.data.tokens.prepared import open_prepared

LARGE_BYTES = 2**28
"""Text files from this size on are prepared on the disk and never held in memory."""


def load(source: Any, tokenizer: TokenizerOptions) -> TokenData:
    """Ids of a data source: one that has ids of its own, a small corpus, or text that is tokenised to the disk."""
    if hasattr(source, "load"):
        return source.load(tokenizer)
    if isinstance(source, Hub):
        return stream_tokens(source, tokenizer) if source.streaming else load_prepared(source, tokenizer)
    if isinstance(source, TextFiles) and source.file_bytes() >= LARGE_BYTES:
        return load_prepared(source, tokenizer)
    return load_tokens(source, tokenizer)


def load_prepared(source: Any, tokenizer: TokenizerOptions) -> TokenData:
    """Ids of `source` from where `data prepare` puts them unless told otherwise; made now where they are not there."""
    folder = default_folder(source, tokenizer)
    prepare(source, tokenizer, folder)
    return open_prepared(folder, tokenizer)
