"""Which classes a configuration may name. Nothing else is ever imported on a configuration's word.

Trusted are the classes of this package, those that an installed package offers as an entry point of one of `GROUPS`,
and those below a prefix that the command line names (`--allow mypkg`). The configuration of a run, a checkpoint or a
folder of configs can name none by itself.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from stability_lab import __version__
from stability_lab.config import ConfigError

PACKAGE = "stability_lab"
GROUPS = tuple(f"{PACKAGE}.{kind}" for kind in ("stabilizers", "objectives", "optimizers", "data", "tokenizers"))
_allowed: tuple[str, ...] = ()  # prefixes, for the command that runs


def allowed() -> tuple[str, ...]:
    return _allowed


@contextmanager
def allowing(prefixes: Sequence[str]) -> Iterator[None]:
    """Meanwhile classes below these modules are trusted. ConfigError for a prefix that names no package."""
    global _allowed
    before, path = _allowed, list(sys.path)
    if prefixes and "" not in path and os.getcwd() not in path:
        sys.path.append(os.getcwd())  # a console script has its own folder there instead
    try:
        for prefix in prefixes:
            if not all(word.isidentifier() for word in prefix.split(".")) or spec_of(prefix.split(".")[0]) is None:
                raise ConfigError(
                    f"--allow {prefix}: no package of this name is installed, on PYTHONPATH or in this folder"
                )
        _allowed = (*before, *prefixes)
        yield
    finally:
        _allowed, sys.path[:] = before, path


def load_class(target: Any, key: str) -> Any:
    """The class that `target`, a dotted name, names; ConfigError naming `key` where it is not trusted or not there."""
    shown = f"{key}._target_={target}"
    if not is_trusted(target):
        top = target.partition(".")[0] if isinstance(target, str) else ""
        known = top.isidentifier() and top not in sys.stdlib_module_names
        what = f"add --allow {top} if you trust that package's code" if known else "no other is imported"
        raise ConfigError(
            f"{shown}: must be a class of {PACKAGE}, or of an entry point of an installed package; {what}"
        )
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ConfigError(f"{shown}: there is no such class") from None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{shown}: there is no module {error.name}") from None
        raise ConfigError(f"{shown}: {_import_failed(module, error)}") from error
    except Exception as error:  # code of the user's own may fail in any way
        raise ConfigError(f"{shown}: {_import_failed(module, error)}") from error


def is_trusted(target: Any) -> bool:
    if not isinstance(target, str):
        return False
    return any(target.startswith(f"{prefix}.") for prefix in (PACKAGE, *_allowed)) or target in offered()


def offered() -> dict[str, metadata.EntryPoint]:
    """Class -> entry point, of all installed packages."""
    points = (point for group in GROUPS for point in metadata.entry_points(group=group))
    return {f"{point.module}.{point.attr}": point for point in points}


def config_folders() -> dict[str, Path]:
    """Package -> its folder `configs`, of the installed packages that offer a class and have one."""
    found = {}
    for package in sorted({point.module.partition(".")[0] for point in offered().values()}):
        spec = spec_of(package)
        for place in (spec and spec.submodule_search_locations) or ():
            if (folder := Path(place) / "configs").is_dir():
                found[package] = folder
    return found


def provenance(plain: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Class -> its distribution, that one's version and a hash of the class's file, of all classes that are not ours.

    `plain` is a configuration whose classes are trusted.
    """
    return {target: _origin(target) for target in sorted(set(_targets(plain))) if not target.startswith(f"{PACKAGE}.")}


def code_version(plain: Mapping[str, Any]) -> str:
    """The version of this package and, where classes of others take part, hashes of their files.

    An own stabilizer changes far more often than its version: what was trained with another one is another run.
    """
    others = (f"{target}:{origin['sha256']}" for target, origin in provenance(plain).items())
    return " ".join([__version__, *others])


def _origin(target: str) -> dict[str, Any]:
    module = sys.modules[load_class(target, "_target_").__module__]
    point = offered().get(target)
    distribution = target.partition(".")[0] if point is None or point.dist is None else point.dist.name
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        version = None
    code = Path(module.__file__).read_bytes() if module.__file__ else b""
    return {"package": distribution, "version": version, "sha256": hashlib.sha256(code).hexdigest()[:12]}


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_" and isinstance(value, str):
                yield value
            yield from _targets(value)


def spec_of(package: str) -> ModuleSpec | None:
    """Where a top-level package is; it is not imported."""
    try:
        return importlib.util.find_spec(package)
    except ValueError:  # a module that was not imported from anywhere, such as __main__
        return None


def _import_failed(module: str, error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    return f"importing {module} fails: {place}{type(error).__name__}: {error}"
