"""Where a run came from: versions, code, machine and command, and a fingerprint of what it computes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import stability_lab
from stability_lab.config import by_value, in_fingerprint, typed
from stability_lab.text import flatten

_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "wandb")
_GIT_TIMEOUT_S = 2.0

_HIDDEN = "[redacted]"
_SECRET_ENV = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_CREDENTIAL = re.compile(
    r"wandb_v1_[A-Za-z0-9_-]{16,}|(?<![A-Za-z0-9])hf_[A-Za-z0-9]{16,}|(?<![A-Za-z0-9])[0-9a-fA-F]{40}(?![A-Za-z0-9])"
)
_SECRET_WORDS = frozenset(
    {"secret", "secrets", "password", "passwd", "passphrase", "apikey", "credential", "credentials"}
)
# Before `key` or `token` these make a credential of it; before others, as in `sort_key` or `pad_token`, it is one only
# if it looks like one.
_SECRET_KINDS = frozenset({"api", "access", "auth", "private", "bearer", "hf", "hub", "wandb", "github", "refresh"})
_KEY_WORDS = frozenset({"key", "token"})
# A pinned revision is 40 hex digits too, and the run cannot be repeated without it.
_REVISION_WORDS = frozenset({"revision", "commit", "sha", "hash", "fingerprint"})


def manifest(argv: Sequence[str] | None = None, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Versions, git state, platform, command line without secrets, and time; `extra` is merged as it is."""
    return {
        "versions": versions(),
        "git": git_state(Path(stability_lab.__file__).parent),
        "platform": platform.platform(),
        "argv": redact(list(sys.argv if argv is None else argv)),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **(extra or {}),
    }


def versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "stability_lab": stability_lab.__version__,
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """`revision` and `dirty` of the checkout that tracks `folder`, or None where none does or git fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        ).stdout.strip()

    try:
        # An installed package inside somebody else's checkout is not tracked by it.
        if not git("ls-files", "--", "."):
            return None
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def fingerprint(config: Mapping[str, Any], version: str) -> str:
    """12 hex digits that two runs share when package version and all that they compute are the same.

    `config` is the resolved config as plain values; of its keys those count that `in_fingerprint` names, by their
    values, however they were written.
    """
    computed = {key: value for key, value in by_value(flatten(typed(config))).items() if in_fingerprint(key)}
    canonical = json.dumps({"config": computed, "version": version}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def redact(value: Any, key: str = "") -> Any:
    """A copy of nested mappings, lists and strings (`argv` too) without credentials; all else stays as it is.

    Hidden are all values of keys such as `api_key`, `access_token` or `password`, those of other keys and tokens that
    look like a credential, every W&B key or hub token inside any string, and the ones that are set in the environment.
    """
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact(item, key) for item in value)
    if not isinstance(value, str):
        return _HIDDEN if isinstance(value, (int, float)) and _is_secret(_words(key)) else value
    name, equals, right = value.partition("=")
    if equals and re.fullmatch(r"[\w.+~/@-]+", name):
        return name + equals + _redact_text(right, name)
    return _redact_text(value, key)


def _redact_text(text: str, key: str) -> str:
    for variable in _SECRET_ENV:
        secret = os.environ.get(variable, "")
        if len(secret) >= 8:
            text = text.replace(secret, _HIDDEN)
    words = _words(key)
    if text and _is_secret(words):
        return _HIDDEN
    # Special tokens such as <|begin_of_text|> are no credentials.
    if words & _KEY_WORDS and re.fullmatch(r"[\w.+/=~:-]{16,}", text):
        return _HIDDEN
    if words & _REVISION_WORDS:
        return text
    return _CREDENTIAL.sub(_HIDDEN, text)


def _words(key: str) -> set[str]:
    last = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key.rpartition(".")[2]).lower()
    return set(re.split(r"[^a-z]+", last))


def _is_secret(words: set[str]) -> bool:
    """Whether a key of these words names a credential, whatever its value looks like."""
    return bool(words & _SECRET_WORDS or (words & _KEY_WORDS and words & _SECRET_KINDS))
