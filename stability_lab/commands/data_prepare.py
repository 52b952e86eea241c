"""The command `data prepare`: tokenise the text of a configuration once, into a folder that training maps."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from stability_lab.config import ConfigError, Parser
from stability_lab.machine.cores import cores
from stability_lab.plugins.trust import allowed
from stability_lab.text import next_command


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab data prepare",
        description="Tokenise text once, with several processes, into shards with a sidecar. An interrupted call goes "
        "on where it was, a finished one answers at once, and the bytes do not depend on the number of workers.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="data=..., tokenizer=... as for train")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of configs of your own, as for train")
    parser.add_argument("--allow", metavar="PACKAGE", help="a package of your own in which its classes are")
    parser.add_argument("--out", type=Path, help="folder (default: in the cache, where training finds it)")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--shard-tokens", type=int, metavar="N", help="tokens of a shard (default 100,000,000)")
    parser.add_argument(
        "--ngram-filter",
        action="store_true",
        help="drop documents that repeat an n-gram of 1 to 13 tokens 32 times or more in a row (arXiv:2501.00656)",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_intermixed_args(argv)
    workers = cores() if args.workers is None else args.workers
    if not 1 <= workers <= 1024:
        raise ConfigError(f"--workers={workers}: must be 1 to 1024")
    if args.shard_tokens is not None and args.shard_tokens < 1:
        raise ConfigError(f"--shard-tokens={args.shard_tokens}: must be 1 or more")

    from stability_lab.command_line import read_command_line
    from stability_lab.compose import compose_jobs
    from stability_lab.data.source import TextSource
    from stability_lab.data.tokens.prepare import SHARD_TOKENS, default_folder, prepare
    from stability_lab.plugins.instantiate import instantiate

    folder = [] if args.config_dir is None else ["--config-dir", args.config_dir]
    (job,) = compose_jobs(read_command_line([*folder, *args.overrides]))
    source, tokenizer = instantiate(job.config.data, "data"), instantiate(job.config.tokenizer, "tokenizer")
    if not isinstance(source, TextSource):
        name = type(source).__name__
        raise ConfigError(f"data: {name} has ids already; prepare text, such as data=text or data=hub")
    folder = default_folder(source, tokenizer) if args.out is None else args.out
    started = time.perf_counter()
    try:
        meta = prepare(
            source,
            tokenizer,
            folder,
            workers=workers,
            ngram_filter=args.ngram_filter,
            shard_tokens=args.shard_tokens or SHARD_TOKENS,
        )
    except BrokenProcessPool:
        print("failed: a worker was killed, probably for memory; the same command with fewer --workers goes on")
        return 1
    if args.format == "json":
        print(json.dumps({"folder": str(folder), **meta}))
        return 0
    train, val = meta["train"], meta["val"]
    print(
        f"{folder}: {train['tokens']:,} training and {val['tokens']:,} validation tokens of "
        f"{train['documents'] + val['documents']:,} documents, {meta['dropped_documents']:,} dropped; "
        f"tokenizer {meta['tokenizer']} ({time.perf_counter() - started:.1f} s)"
    )
    if val["tokens"] > train["tokens"]:
        print("validation has more tokens than training: is a giant document among the first?")
    packages = [word for package in allowed() for word in ("--allow", package)]
    same = [word for word in args.overrides if word.lstrip("+").startswith("tokenizer")]
    place = ["--config-dir", args.config_dir] if args.config_dir else []
    print(next_command("train", *packages, *place, "data=tokens", f"data.path={folder}", *same))
    return 0
