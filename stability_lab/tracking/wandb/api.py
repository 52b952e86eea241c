"""Runs from W&B as run directories: what they uploaded of their files, and the rest rebuilt from what W&B knows."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stability_lab.config import ConfigError
from stability_lab.tracking.run_files import EVENTS, METRICS, read_rows
from stability_lab.tracking.wandb.end_files import (
    CONFIG,
    DOCUMENTS,
    FOLDER,
    MANIFEST,
    MOST_BYTES,
    SUMMARY,
    read_document,
)
from stability_lab.tracking.wandb.login import first_line, problem
from stability_lab.tracking.wandb.rebuild import config_of, rows_of, stabilizers_of, summary_of

_log = logging.getLogger("stability_lab")

SCHEME = "wandb://"
# What a folder was made from; a finished run in the same state is not downloaded again.
STATE = "wandb.json"
_DOCUMENT_BYTES, _MOST_ROWS = 2**24, 10**6
_REQUEST_TIMEOUT_S = 30
_WANTED = (*DOCUMENTS, METRICS, f"{METRICS}.gz", EVENTS, f"{EVENTS}.gz")


def fetch(url: str, into: Path, api: Any = None) -> list[Path]:
    """The runs of `wandb://entity/project[/group]` as run directories below `into`, in the order of their start.

    Runs that are still going are fetched as far as they are, and again the next time; runs of the job type `compare`
    are none. `api` stands in for `wandb.Api()`. Raises `ConfigError` for a URL that is none, without a key or a
    network, where W&B refuses, and where there is no run.
    """
    entity, project, group = parse(url)
    if api is None and (trouble := problem()):
        raise ConfigError(f"{url} cannot be read: {trouble}")
    folder = into / _safe(entity) / _safe(project)
    found = []
    with _asking(url), _scratch():
        if api is None:
            import wandb

            api = wandb.Api(timeout=_REQUEST_TIMEOUT_S)
        filters = {"group": group} if group is not None else {}
        # In the order of creation, page by page; config and history of a run are loaded when they are read.
        for run in api.runs(f"{entity}/{project}", filters=filters, order="+created_at", per_page=50, lazy=True):
            if getattr(run, "job_type", None) != "compare":
                found.append(_fetch_run(run, folder / _safe(run.id)))
    if not found:
        raise ConfigError(f"{url} has no run: check the names of project and group (case counts)")
    return found


def parse(url: str) -> tuple[str, str, str | None]:
    """Entity, project and group of a URL; `%20` and the like are read as in any URL."""
    parts = [unquote(part) for part in url.removeprefix(SCHEME).rstrip("/").split("/")]
    if not url.startswith(SCHEME) or len(parts) not in (2, 3) or not all(part.strip() for part in parts):
        raise ConfigError(f"{url} is no W&B address: it must be wandb://ENTITY/PROJECT or wandb://ENTITY/PROJECT/GROUP")
    return parts[0], parts[1], parts[2] if len(parts) == 3 else None


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """Whatever W&B or the network says becomes one sentence; the traceback goes to the debug log."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        _log.debug("W&B request failed", exc_info=error)
        raise ConfigError(f"{url} cannot be read: {first_line(error)}") from error


@contextmanager
def _scratch() -> Iterator[None]:
    """wandb makes an empty folder for each run that it is asked for, in the working directory or in /tmp."""
    before = os.environ.get("WANDB_DIR")
    with tempfile.TemporaryDirectory(prefix="stability-lab-wandb-") as folder:
        os.environ["WANDB_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["WANDB_DIR"]
            else:
                os.environ["WANDB_DIR"] = before


def _safe(name: str) -> str:
    """A folder's name that shows `name` and is that of no other: a hash follows where a character was replaced."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")[:96]
    if slug == name:
        return slug
    return f"{slug or 'run'}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _fetch_run(run: Any, folder: Path) -> Path:
    state = _state(run)
    if state["state"] != "running" and _read_json(folder / STATE) == state:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temporary:
        new = Path(temporary) / "run"
        new.mkdir()
        # A run that goes on has uploaded either nothing or what it had before it was resumed.
        kept = _download(run, Path(temporary)) if state["state"] != "running" else {}
        for name, path in kept.items():
            path.rename(new / name)
        _rebuild(run, new, state)
        _write_json(new / STATE, state)
        _replace(new, folder)
    return folder


def _state(run: Any) -> dict[str, Any]:
    """What changes in W&B when a run does."""
    fields = ("id", "state", "heartbeat_at", "history_line_count", "tags")
    return {name: _plain(getattr(run, name, None)) for name in fields} | {"path": "/".join(run.path)}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else [str(item) for item in value]


def _download(run: Any, folder: Path) -> dict[str, Path]:
    """The uploaded files that are whole, by their name in a run directory."""
    kept = {}
    for file in run.files(names=[f"{FOLDER}/{name}" for name in _WANTED]):
        name = str(file.name).removeprefix(f"{FOLDER}/")
        # The server chooses the names, so that only those that were asked for are taken.
        if file.name != f"{FOLDER}/{name}" or name not in _WANTED:
            continue
        limit = MOST_BYTES if name not in DOCUMENTS else _DOCUMENT_BYTES
        if file.size > limit:
            _log.warning("%s of %s has %d bytes and is left out", name, run.id, file.size)
            continue
        file.download(root=str(folder), replace=True).close()
        try:
            path = _unpacked(folder / FOLDER / name, limit)
            _check(path)
        except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
            _log.warning("%s of %s is damaged and is rebuilt (%s)", name, run.id, first_line(error))
            continue
        kept[path.name] = path
    return kept


def _unpacked(path: Path, limit: int) -> Path:
    """The file, without its compression; `ValueError` where it would be longer than `limit`."""
    if path.suffix != ".gz":
        return path
    plain = path.with_suffix("")
    written = 0
    with gzip.open(path) as read, plain.open("wb") as write:
        while block := read.read(2**20):
            written += len(block)
            if written > limit:
                raise ValueError(f"more than {limit} bytes when unpacked")
            write.write(block)
    return plain


def _check(path: Path) -> None:
    if path.name in DOCUMENTS:
        read_document(path.name, path.read_text(encoding="utf-8"))
    else:
        read_rows(path)


def _rebuild(run: Any, folder: Path, state: Mapping[str, Any]) -> None:
    """Write those files that `folder` does not have yet."""
    missing = [name for name in (*DOCUMENTS, METRICS) if not (folder / name).exists()]
    if CONFIG in missing:
        import yaml

        # Through JSON, for a config may hold objects that safe YAML has no form for.
        config = json.loads(json.dumps(config_of(run.config), default=str))
        (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if SUMMARY in missing:
        _write_json(folder / SUMMARY, summary_of(dict(run.summary_metrics), run.state))
    if METRICS in missing:
        rows = rows_of(_bounded(run.scan_history(), run.id))
        (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if MANIFEST in missing:
        facts = {
            "run": run.name or run.id,
            "group": getattr(run, "group", None),
            "stabilizers": stabilizers_of(run.config),
            "tracker_id": run.id,
            "created": getattr(run, "created_at", None),
            "rebuilt_from_wandb": {"path": state["path"], "files": missing},
        }
        _write_json(folder / MANIFEST, facts)
    (folder / EVENTS).touch()


def _bounded(history: Iterable[Mapping[str, Any]], run_id: str) -> Iterator[Mapping[str, Any]]:
    iterator = iter(history)
    yield from islice(iterator, _MOST_ROWS)
    if next(iterator, None) is not None:
        _log.warning("the history of %s has more than %d rows: the later ones are left out", run_id, _MOST_ROWS)


def _replace(new: Path, folder: Path) -> None:
    if folder.exists():
        if not (folder / STATE).is_file():
            raise ConfigError(f"{folder} was not made from W&B, so it is left alone: move it away")
        shutil.rmtree(folder)
    new.rename(folder)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
