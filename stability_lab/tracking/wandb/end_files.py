"""The small files of a run that its mirror keeps as well, so that the run can be rebuilt from W&B alone."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

from stability_lab.tracking.manifest import redact
from stability_lab.tracking.run_files import EVENTS, METRICS

# W&B writes a config.yaml of its own beside this folder.
FOLDER = "stability_lab"
CONFIG, MANIFEST, SUMMARY = "config.yaml", "manifest.json", "summary.json"
DOCUMENTS = (CONFIG, MANIFEST, SUMMARY)
ROWS = (METRICS, EVENTS)
# Longer rows are compressed; what is longer still stays on disk only, for W&B has the history itself.
PLAIN_BYTES, MOST_BYTES = 2**20, 2**28


def stage(run: Path, into: Path) -> list[Path]:
    """Copy what there is of a run's small files to the folder `into`; their paths there.

    The copies need nothing outside `into`, so that an offline run may be moved. They are byte for byte those of the
    run, except where a document holds a credential, which is left out. Raises `OSError`, as on a full disk, after
    removing the copies.
    """
    try:
        into.mkdir(parents=True, exist_ok=True)
        staged = [_document(run / name, into / name) for name in DOCUMENTS] + [_rows(run / name, into) for name in ROWS]
        return [path for path in staged if path is not None]
    except OSError:
        shutil.rmtree(into, ignore_errors=True)
        raise


def _document(source: Path, copy: Path) -> Path | None:
    try:
        text = source.read_text(encoding="utf-8")
        content = read_document(source.name, text)
    except (FileNotFoundError, ValueError):
        return None
    clean = redact(content)
    copy.write_text(text if clean == content else _dump(source.name, clean), encoding="utf-8")
    return copy


def read_document(name: str, text: str) -> dict[str, Any]:
    """The mapping that a document holds; `ValueError` where it holds none."""
    import yaml

    try:
        content = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds no mapping")
    return content


def _dump(name: str, content: dict[str, Any]) -> str:
    if name.endswith(".json"):
        return json.dumps(content, indent=2) + "\n"
    import yaml

    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _rows(source: Path, into: Path) -> Path | None:
    try:
        size = source.stat().st_size
    except FileNotFoundError:
        return None
    if size > MOST_BYTES:
        return None
    copy = into / (source.name if size <= PLAIN_BYTES else f"{source.name}.gz")
    # A level of 3 takes a third of the time of the default for nearly the same size.
    with source.open("rb") as read, copy.open("wb") if copy.suffix != ".gz" else gzip.open(copy, "wb", 3) as write:
        shutil.copyfileobj(read, write, 2**20)
    return copy
