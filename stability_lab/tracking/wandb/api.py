"""Runs from W&B as run directories: the files that they uploaded, and the rest rebuilt from what W&B knows."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stability_lab.config import ConfigError
from stability_lab.tracking.run_files import EVENTS, METRICS
from stability_lab.tracking.wandb.login import first_line, problem
from stability_lab.tracking.wandb.rebuild import config_of, rows_of, stabilizers_of, summary_of
from stability_lab.tracking.wandb.wandb_tracker import CONFIG, FILES, FOLDER, MANIFEST, SUMMARY
from stability_lab.tracking.wandb.workspace import JOB_TYPE

_log = logging.getLogger("stability_lab")

SCHEME = "wandb://"
# What a folder was made from; a finished run in the same state is not downloaded again.
STATE = "wandb.json"
_MOST_ROWS = 10**6
_REQUEST_TIMEOUT_S = 30


def fetch(url: str, into: Path, api: Any = None) -> list[Path]:
    """The runs of `wandb://entity/project[/group]` as run directories below `into`, in the order of their start.

    Runs that are still going are fetched as far as they are, and again the next time; the runs that hold the figures of
    comparisons are left out. `api` stands in for `wandb.Api()`. Raises `ConfigError` for a URL that is none, without a
    key or a network, where W&B refuses, and where there is no run.
    """
    entity, project, group = parse(url)
    if api is None and (trouble := problem()):
        raise ConfigError(f"{url} cannot be read: {trouble}")
    folder = into / _safe(entity) / _safe(project)
    filters = {"group": group} if group is not None else {}
    try:
        with _scratch():
            if api is None:
                import wandb

                api = wandb.Api(timeout=_REQUEST_TIMEOUT_S)
            # In the order of creation, page by page; config and history of a run are loaded when they are read.
            runs = api.runs(f"{entity}/{project}", filters=filters, order="+created_at", per_page=50, lazy=True)
            found = [_fetch_run(run, folder / _safe(run.id)) for run in runs if run.job_type != JOB_TYPE]
    except ConfigError:
        raise
    except Exception as error:  # whatever W&B or the network says becomes one sentence
        _log.debug("W&B request failed", exc_info=error)
        raise ConfigError(f"{url} cannot be read: {first_line(error)}") from error
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
def _scratch() -> Iterator[None]:
    """wandb makes an empty folder for each run that it is asked for: in here, and not in the working directory."""
    before = os.environ.get("WANDB_DIR")
    with tempfile.TemporaryDirectory(prefix="stability-lab-wandb-") as folder:
        os.environ["WANDB_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["WANDB_DIR"]
            if before is not None:
                os.environ["WANDB_DIR"] = before


def _safe(name: str) -> str:
    """A folder's name that shows `name` and is that of no other: a hash follows where a character was replaced."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")[:96]
    if slug == name:
        return slug
    return f"{slug or 'run'}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _fetch_run(run: Any, folder: Path) -> Path:
    state = {"path": "/".join(run.path), "state": run.state, "rows": run.history_line_count, "at": run.heartbeat_at}
    ended, mark = run.state != "running", folder / STATE
    if ended and mark.is_file() and mark.read_text(encoding="utf-8") == _json(state):
        return folder
    if folder.exists() and not mark.is_file():
        raise ConfigError(f"{folder} was not made from W&B, so it is left alone: move it away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temporary:
        new = Path(temporary) / "run"
        new.mkdir()
        if ended:  # one that was resumed and goes on has uploaded the files of its first part
            _download(run, new)
        _rebuild(run, new, state["path"])
        (new / STATE).write_text(_json(state), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    return folder


def _download(run: Any, folder: Path) -> None:
    wanted = {f"{FOLDER}/{name}": name for name in FILES}
    for file in run.files(names=list(wanted)):
        if file.name in wanted:  # the server chooses the names
            file.download(root=str(folder.parent), replace=True).close()
            (folder.parent / file.name).rename(folder / wanted[file.name])


def _rebuild(run: Any, folder: Path, path: str) -> None:
    """Write those files that `folder` does not have yet; the manifest last, for it lists them."""
    contents: dict[str, Callable[[], str]] = {
        CONFIG: lambda: _yaml(config_of(run.config)),
        SUMMARY: lambda: _json(summary_of(dict(run.summary_metrics), run.state)),
        METRICS: lambda: "".join(json.dumps(row) + "\n" for row in rows_of(islice(run.scan_history(), _MOST_ROWS))),
        EVENTS: lambda: "",
        MANIFEST: lambda: _json(
            {
                "run": run.name or run.id,
                "group": run.group,
                "stabilizers": stabilizers_of(run.config),
                "tracker_id": run.id,
                "created": run.created_at,
                "rebuilt_from_wandb": {"path": path, "files": missing},
            }
        ),
    }
    missing = [name for name in contents if not (folder / name).exists()]
    for name in missing:
        (folder / name).write_text(contents[name](), encoding="utf-8")


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, default=str) + "\n"


def _yaml(content: Mapping[str, Any]) -> str:
    import yaml

    # Through JSON, for a config may hold objects that safe YAML has no form for.
    return yaml.safe_dump(json.loads(json.dumps(content, default=str)), sort_keys=False, allow_unicode=True)
