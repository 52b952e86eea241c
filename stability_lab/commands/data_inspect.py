"""The command `data inspect FILE|RUN`: what is in a token file, in text, or in the data of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stability_lab.config import ConfigError, Parser, TrainConfig, from_plain
from stability_lab.data.hf_tokenizer import JsonTokenizer
from stability_lab.data.loader import batch_fingerprint, build_sampler
from stability_lab.data.source import TokenData
from stability_lab.data.sources.corpus import TextFiles
from stability_lab.data.sources.text_files import is_text
from stability_lab.data.tokenizer import Bpe, ByteTokenizer, Gpt2, Tokenizer, fit_without_text
from stability_lab.data.tokens.formats import CHUNK, DTYPES, looks_like_wider_ids, recognise
from stability_lab.data.tokens.memmap import ids_dtype
from stability_lab.data.tokens.prepared import VOCABULARY, is_prepared, read_sidecar, refuse_unfinished, regions
from stability_lab.data.tokens.scan import UNCOUNTED, statistics
from stability_lab.data.tokens.shards import Shards
from stability_lab.plugins.instantiate import instantiate
from stability_lab.text import shown

SAMPLE = 2**22
SHOWN_RUNS, SHOWN_TOKENS = 5, 60
Block = dict[str, Any]
Chunks = Iterable[np.ndarray]


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab data inspect",
        description="Format, type, number and range of the ids, their entropies (nats a token), the most frequent "
        "ones, repeated n-grams and a decoded sample: of a token file, of what `data prepare` wrote, of text as "
        "data=text would read it, or of a run's data.",
    )
    parser.add_argument("path", type=Path, metavar="FILE|RUN", help="a file, a prepared folder or a run's folder")
    parser.add_argument("--dtype", choices=DTYPES, help="the file is ids of this type, without a header")
    parser.add_argument("--tokenizer", metavar="NAME", help="bytes, gpt2 or a tokenizer.json, where it is not known")
    parser.add_argument("--split", choices=("train", "val"), default="train", help="of all but a token file")
    parser.add_argument("--step", type=int, metavar="K", help="of a run: the sequences of optimizer step K instead")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    path, split = args.path, args.split
    decoder = _decoder(args.tokenizer)
    refuse_unfinished(path)
    if (path / "config.yaml").is_file():
        block = _run(path, split, args.step)
    elif args.step is not None:
        raise ConfigError(f"--step={args.step}: {path} is no run's folder, and only runs have steps")
    elif is_prepared(path):
        block = _prepared(path, split, decoder)
    elif path.is_dir():
        raise ConfigError(f"{path} is neither a run's folder (config.yaml) nor prepared data (meta.json); name a file")
    elif args.dtype is None and path.is_file() and is_text(path):
        block = _text_file(path, decoder or ByteTokenizer(), split)
    else:
        block = _ids_file(path, args.dtype, decoder)
    block = {"path": str(path), **block}
    print(json.dumps(block, indent=2) if args.format == "json" else "\n".join(_lines(block)))
    return 0


def _ids_file(path: Path, dtype: str | None, decoder: Tokenizer | None) -> Block:
    found = recognise(path, dtype, "--dtype")
    facts: Block = {"format": found.format}
    if found.format == "raw" and (wider := looks_like_wider_ids(found.region)):
        facts["note"] = f"most ids at regular places are 0, they are probably {wider}: --dtype={wider}"
    if found.documents is not None:
        facts["documents"] = len(found.documents)
    return facts | _statistics(path, found.region.dtype.name, found.region.chunks(), decoder)


def _text_file(path: Path, tokenizer: Tokenizer, split: str) -> Block:
    source = TextFiles(path=str(path))
    chosen = [source.holds_out(i) == (split == "val") for i, _ in enumerate(source.iterate())]
    texts = (text for _, text in itertools.compress(source.iterate(), chosen))
    facts = {"format": f"text; this is the {split} split of data=text data.path={path}", "tokenizer": tokenizer.id}
    ids = (np.append(tokenizer.encode(text), tokenizer.eos_id) for text in texts)
    return facts | {"documents": sum(chosen)} | _statistics(path, ids_dtype(tokenizer.vocab_size).name, ids, tokenizer)


def _prepared(path: Path, split: str, decoder: Tokenizer | None) -> Block:
    meta = read_sidecar(path)
    saved, dtype = path / VOCABULARY, np.dtype(meta["dtype"]).name
    learned = [fit_without_text(Bpe(meta["vocab_size"]), saved)] if saved.is_file() else []
    known = (one for one in (*learned, ByteTokenizer(), Gpt2()) if one.id == meta["tokenizer"])
    decoder = decoder or next(known, None)
    facts = {"format": "prepared", **{key: meta[key] for key in ("tokenizer", "vocab_size")}}
    chunks = itertools.chain.from_iterable(region.chunks() for region in regions(path, meta, split))
    return facts | {"documents": meta[split]["documents"]} | _statistics(path, dtype, chunks, decoder)


def _run(folder: Path, split: str, step: int | None) -> Block:
    from stability_lab.build import load_data
    from stability_lab.run.resume import read_config

    config = from_plain(read_config(folder))
    if step is not None and not 1 <= step <= config.trainer.max_steps:
        raise ConfigError(f"--step={step}: the run has the steps 1 to {config.trainer.max_steps}")
    data = load_data(config)
    if data.stream is not None and (step is not None or split == "train"):
        raise ConfigError(f"{folder}: its training data is a stream and is not kept; --split val shows what is")
    if step is not None:
        return _batch(config, data, step)
    tokens = data.train if split == "train" else data.val
    facts = {"format": f"run with data={data.corpus['name']}", "vocab_size": data.vocab_size}
    parts = tokens.parts if isinstance(tokens, Shards) else [tokens]
    chunks = (part[start : start + CHUNK] for part in parts for start in range(0, len(part), CHUNK))
    measured = _statistics(folder, tokens.dtype.name, chunks, data.tokenizer)
    return facts | {"fingerprint": data.fingerprint} | measured


def _batch(config: TrainConfig, data: TokenData, step: int) -> Block:
    """The sequences of an optimizer step, with the numbers of their samples."""
    seed = config.seed if config.data_seed is None else config.data_seed
    n = config.trainer.micro_batch_size * config.trainer.grad_accum_steps
    per_sample = instantiate(config.objective, "objective").traits.windows
    batch = build_sampler(data, config.model.seq_len, seed, config.sampling, per_sample).batch((step - 1) * n, n)
    rows = enumerate(batch, start=(step - 1) * n)
    sequences = [{"sample": i, "text": _decoded(row, data.tokenizer)} for i, row in rows]
    return {"step": step, "batch": batch_fingerprint(batch), "sequences": sequences}


def _statistics(path: Path, dtype: str, chunks: Chunks, decoder: Tokenizer | None) -> Block:
    try:
        found = statistics(chunks, SAMPLE, UNCOUNTED if decoder is None else decoder.vocab_size)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; read as {dtype}, is it of another --dtype or --tokenizer?") from error
    block = {"dtype": dtype, **found._asdict()}
    runs = sorted(found.runs, key=lambda run: -run.repeats * run.period)
    block["repeats"] = f"{len(runs):,} places at which an n-gram of 1 to 13 tokens stands 32 times or more in a row"
    block["runs"] = [run._asdict() for run in runs[:SHOWN_RUNS]]
    block["frequent"] = [{"id": i, "count": count, "text": _decoded([i], decoder)} for i, count in found.frequent]
    return block | {"head": _decoded(found.head, decoder)}


def _decoded(ids: Sequence[int] | np.ndarray, decoder: Tokenizer | None) -> str:
    ids = ids[:SHOWN_TOKENS]
    return " ".join(map(str, ids)) if decoder is None else decoder.decode(ids)


def _decoder(name: str | None) -> Tokenizer | None:
    if name is None or name in ("bytes", "gpt2"):
        return {"bytes": ByteTokenizer(), "gpt2": Gpt2()}.get(name or "")
    if not Path(name).is_file():
        raise ConfigError(f"--tokenizer={name}: must be bytes, gpt2 or a tokenizer.json")
    return fit_without_text(JsonTokenizer(name))


def _lines(block: Mapping[str, Any]) -> Iterator[str]:
    """Key and value a line; a list has a line for each of its items."""
    for key, value in block.items():
        for item in value if isinstance(value, list) else [value]:
            yield f"{key:<16} {_words(item)}"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, str):
        return shown(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
