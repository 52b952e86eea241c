"""The command `data inspect FILE|RUN`: what is in a token file, or in the data of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stability_lab.config import ConfigError, Parser, from_plain
from stability_lab.data.hf_tokenizer import JsonTokenizer
from stability_lab.data.tokenizer import Bpe, ByteTokenizer, Gpt2, Tokenizer, fit_without_text
from stability_lab.data.tokens.formats import CHUNK, DTYPES, Region, looks_like_wider_ids, recognise
from stability_lab.data.tokens.prepared import VOCABULARY, is_prepared, read_sidecar, refuse_unfinished, regions
from stability_lab.data.tokens.shards import Shards, Tokens
from stability_lab.data.tokens.token_statistics import Statistics, statistics

SAMPLE = 2**22
SHOWN_RUNS = 5
SHOWN_TOKENS = 60


class Subject(NamedTuple):
    """What is looked at: its facts, its ids in chunks, its first ids and what decodes them."""

    facts: dict[str, Any]
    chunks: Iterator[np.ndarray]
    head: np.ndarray
    tokenizer: Tokenizer | None


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab data inspect",
        description="Format, type, number and largest of the ids, their entropies, the most frequent ones, a decoded "
        "sample and repeated n-grams; of a token file, of what `data prepare` wrote, or of a run's training data.",
    )
    parser.add_argument("path", type=Path, metavar="FILE|RUN", help="a token file, a prepared folder or a run's folder")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the ids of a raw file (default uint16)")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="decode with bytes, gpt2 or a tokenizer.json (known for prepared data and runs)",
    )
    parser.add_argument("--split", choices=("train", "val"), default="train", help="of prepared data and runs")
    parser.add_argument("--step", type=int, metavar="K", help="of a run: the sequences of optimizer step K instead")
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help="ids for bigrams and repeats (2^22)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    if args.sample < 1:
        raise ConfigError(f"--sample={args.sample}: must be 1 or more")
    is_run = (args.path / "config.yaml").is_file()
    if args.step is not None:
        if not is_run:
            raise ConfigError(f"--step={args.step}: {args.path} is no run's folder, and only runs have steps")
        block = _batch(args.path, args.step)
    else:
        subject = _run(args.path, args.split) if is_run else _tokens(args.path, args.dtype, args.tokenizer, args.split)
        block = _block(subject, args.path, args.sample)
    print(json.dumps(block, indent=2) if args.format == "json" else "\n".join(_lines(block)))
    return 0


def _tokens(path: Path, dtype: str | None, tokenizer: str | None, split: str) -> Subject:
    decoder = _decoder(tokenizer)
    if is_prepared(path):
        meta = read_sidecar(path)
        found = regions(path, meta, split)
        facts = {
            "format": "prepared",
            "dtype": np.dtype(meta["dtype"]).name,
            "tokenizer": meta["tokenizer"],
            "documents": meta[split]["documents"],
            "vocab_size": meta["vocab_size"],
        }
        return Subject(facts, _chunks(found), _head(found), decoder or _prepared_decoder(path, meta))
    refuse_unfinished(path)
    if path.is_dir():
        raise ConfigError(f"{path} is neither a run's folder (config.yaml) nor prepared data (meta.json); name a file")
    found = recognise(path, dtype or "uint16")
    facts = {}
    if found.format == "raw" and dtype is None and (wider := looks_like_wider_ids(found.region)):
        found = recognise(path, wider)
        facts["note"] = f"read as {wider}: as uint16 most ids at regular places would be 0"
    facts |= {"format": found.format, "dtype": found.region.dtype.name}
    if found.documents is not None:
        facts["documents"] = len(found.documents)
    return Subject(facts, _chunks([found.region]), _head([found.region]), decoder)


def _run(folder: Path, split: str) -> Subject:
    from stability_lab.build import load_data

    data = load_data(_config(folder))
    tokens = data.train if split == "train" else data.val
    if not len(tokens):
        raise ConfigError(f"{folder}: its training data is a stream and is not kept; --split val shows what is")
    facts = {"format": f"run with data={data.corpus['name']}", "dtype": tokens.dtype.name}
    facts |= {"vocab_size": data.vocab_size, "fingerprint": data.fingerprint}
    return Subject(facts, _slices(tokens), np.asarray(tokens[:SHOWN_TOKENS]), data.tokenizer)


def _batch(folder: Path, step: int) -> dict[str, Any]:
    from stability_lab.build import load_data
    from stability_lab.data.loader import RandomWindows, TrainSampler, batch_fingerprint
    from stability_lab.data.stream import build_sampler

    config = _config(folder)
    trainer = config.trainer
    if not 1 <= step <= trainer.max_steps:
        raise ConfigError(f"--step={step}: the run has the steps 1 to {trainer.max_steps}")
    data = load_data(config)
    if data.stream is not None:
        raise ConfigError(f"{folder}: its training data is a stream, of which no single step can be read again")
    seed = config.seed if config.data_seed is None else config.data_seed
    sampler = build_sampler(data, config.model.seq_len, seed, config.sampling)
    assert isinstance(sampler, TrainSampler | RandomWindows)
    n = trainer.micro_batch_size * trainer.grad_accum_steps
    batch, starts = sampler.batch((step - 1) * n, n), sampler.starts((step - 1) * n, n)
    return {
        "file": str(folder),
        "step": step,
        "batch": batch_fingerprint(batch),
        "sequences": [
            {"offset": int(start), "text": _text(row[:SHOWN_TOKENS], data.tokenizer)}
            for start, row in zip(starts, batch, strict=True)
        ],
    }


def _config(folder: Path) -> Any:
    import yaml

    try:
        return from_plain(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / 'config.yaml'} cannot be read: {str(error).splitlines()[0]}") from error


def _block(subject: Subject, path: Path, sample: int) -> dict[str, Any]:
    decoder = subject.tokenizer
    try:
        found = statistics(subject.chunks if decoder is None else _decodable(subject.chunks, decoder, path), sample)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; read as {subject.facts['dtype']}, is it of another --dtype?") from error
    return {
        "file": str(path),
        **subject.facts,
        **{key: value for key, value in found._asdict().items() if key not in ("frequent", "runs")},
        "frequent": [
            {"id": i, "count": count, "text": None if decoder is None else decoder.decode([i])}
            for i, count in found.frequent
        ],
        "sample": _text(subject.head, decoder),
        "repeats": _repeats(found),
    }


def _decodable(chunks: Iterator[np.ndarray], tokenizer: Tokenizer, path: Path) -> Iterator[np.ndarray]:
    """The same chunks; ConfigError with the place of the first id that the tokenizer has not got."""
    before = 0
    for ids in chunks:
        if ids.min() >= 0 and ids.max() >= tokenizer.vocab_size:  # negative ones are of another type: see `statistics`
            at = int(np.argmax(ids >= tokenizer.vocab_size))
            raise ConfigError(
                f"{path}: id {ids[at]:,} at offset {before + at:,} is not in the tokenizer's vocabulary of "
                f"{tokenizer.vocab_size:,}; choose another --tokenizer"
            )
        yield ids
        before += len(ids)


def _repeats(found: Statistics) -> dict[str, Any]:
    longest = sorted(found.runs, key=lambda run: -run.repeats * run.period)[:SHOWN_RUNS]
    tokens = sum(run.repeats * run.period for run in found.runs)
    return {"runs": len(found.runs), "tokens": tokens, "longest": [run._asdict() for run in longest]}


def _text(ids: np.ndarray, decoder: Tokenizer | None) -> str:
    return " ".join(map(str, ids.tolist())) if decoder is None else decoder.decode(ids)


def _chunks(found: Sequence[Region]) -> Iterator[np.ndarray]:
    return itertools.chain.from_iterable(region.chunks() for region in found)


def _head(found: Sequence[Region]) -> np.ndarray:
    return np.array(found[0].map()[:SHOWN_TOKENS])


def _slices(tokens: Tokens) -> Iterator[np.ndarray]:
    for part in tokens.parts if isinstance(tokens, Shards) else [tokens]:
        yield from (part[start : start + CHUNK] for start in range(0, len(part), CHUNK))


def _decoder(name: str | None) -> Tokenizer | None:
    if name is None:
        return None
    if Path(name).is_file():
        return fit_without_text(JsonTokenizer(name))
    if name not in ("bytes", "gpt2"):
        raise ConfigError(f"--tokenizer={name}: must be bytes, gpt2 or a tokenizer.json")
    return ByteTokenizer() if name == "bytes" else Gpt2()


def _prepared_decoder(folder: Path, meta: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that wrote a folder, where its name or its vocabulary says so."""
    for known in (ByteTokenizer(), Gpt2()):
        if known.id == meta["tokenizer"]:
            return known
    if (folder / VOCABULARY).is_file():
        return fit_without_text(Bpe(meta["vocab_size"]), folder / VOCABULARY)
    return None


def _lines(block: Mapping[str, Any]) -> Iterator[str]:
    yield block["file"]
    if "sequences" in block:
        yield f"  step {block['step']:,}, batch {block['batch']}"
        for sequence in block["sequences"]:
            yield f"  {sequence['offset']:>14,}  {sequence['text']!r}"
        return
    width = 16
    for key in ("format", "dtype", "tokenizer", "documents", "vocab_size", "note"):
        if key in block:
            value = block[key]
            yield f"  {key:<{width}}{value:,}" if isinstance(value, int) else f"  {key:<{width}}{value}"
    yield f"  {'tokens':<{width}}{block['tokens']:,}"
    yield f"  {'ids':<{width}}{block['smallest_id']:,} to {block['largest_id']:,}, {block['distinct']:,} different ones"
    yield f"  {'unigram entropy':<{width}}{block['unigram_entropy']:.4f} nats a token"
    of = "" if block["sampled"] == block["tokens"] else f" (of the first {block['sampled']:,} tokens)"
    yield f"  {'bigram entropy':<{width}}{block['bigram_entropy']:.4f} nats a token, the one before being known{of}"
    for entry in block["frequent"]:
        text = "" if entry["text"] is None else f"  {entry['text']!r}"
        yield f"  {'most frequent':<{width}}{entry['id']:>8,}  {entry['count'] / block['tokens']:7.2%}{text}"
    repeats = block["repeats"]
    yield (
        f"  {'repeats':<{width}}{repeats['runs']:,} n-grams of 1 to 13 tokens stand 32 times or more in a row, "
        f"{repeats['tokens']:,} tokens{of}"
    )
    for run in repeats["longest"]:
        yield f"  {'':<{width}}{run['period']} tokens x {run['repeats']:,} at {run['start']:,}"
    yield f"  {'sample':<{width}}{block['sample']!r}"
