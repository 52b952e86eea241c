"""The command `sync PATH...`: offline runs to W&B, in the right order and each part once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stability_lab.config import ConfigError, Parser
from stability_lab.text import next_command, shown
from stability_lab.tracking.wandb.offline import Segment, UploadError, UploadPlan, find_segments, plan, upload


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab sync",
        description="Uploads the offline W&B runs below each PATH, the oldest first and the parts of a resumed run one "
        "after the other. What is in W&B already is left out, so the command may be repeated.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a run, a sweep or any folder above them")
    parser.add_argument("--project", metavar="P", help="W&B project (default: that of each run)")
    parser.add_argument("--entity", metavar="E", help="W&B user or team (default: that of each run, else yours)")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be uploaded, in order")
    args = parser.parse_args(argv)
    for option in ("project", "entity"):
        if getattr(args, option) == "":
            raise ConfigError(f"--{option} is empty: give a name or leave it out")
    for path in args.paths:
        if not path.exists():
            raise ConfigError(f"{shown(path)} does not exist: give a run or a folder with runs, such as outputs")
    found = plan(find_segments(args.paths))
    if not len(found):
        raise ConfigError(
            f"{', '.join(map(str, args.paths))}: no offline W&B run here (tracking.mode=offline makes one)"
        )
    if args.dry_run:
        for number, segment in enumerate(found.uploads, start=1):
            print(f"{number}  {_shown(segment)}")
    elif found.uploads and (code := _upload_all(found, args)):
        return code
    _last_words(found, args.dry_run)
    if args.dry_run:
        options = [(name, getattr(args, name)) for name in ("project", "entity")]
        words = [word for name, value in options if value is not None for word in (f"--{name}", value)]
        print(next_command("sync", *words, *map(str, args.paths)))
    elif not found.held:
        print(next_command("compare", *map(str, args.paths), "--wandb"))
    return 1 if found.held and not args.dry_run else 0


def _upload_all(found: UploadPlan, args: argparse.Namespace) -> int:
    from stability_lab.tracking.wandb.login import problem

    if trouble := problem():
        print(f"error: nothing was uploaded: {trouble}", file=sys.stderr)
        return 1
    total = len(found.uploads)
    for number, segment in enumerate(found.uploads, start=1):
        print(f"{number} of {total}  {_shown(segment)}", flush=True)
        try:
            upload(segment, args.project, args.entity)
        except UploadError as error:
            print(
                f"error: {number - 1} of {total} uploaded, then {shown(segment.path.name)} failed: {shown(error)}; "
                "the same command goes on from there",
                file=sys.stderr,
            )
            return 1
    return 0


def _last_words(found: UploadPlan, dry_run: bool) -> None:
    for segment, reason in found.held:
        print(f"held back  {_shown(segment)}: {reason}")
    done = f"{len(found.uploads)} {'to upload' if dry_run else 'uploaded'}"
    print(f"{done}, {len(found.uploaded)} uploaded before, {len(found.held)} held back")


def _shown(segment: Segment) -> str:
    here = Path.cwd()
    return shown(segment.path.relative_to(here) if segment.path.is_relative_to(here) else segment.path)
