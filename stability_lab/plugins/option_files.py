"""The options of a group and what their classes say of themselves, read from YAML and source: nothing is imported, so
a list of them needs neither torch nor trust."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stability_lab.config import ConfigError, config_dir
from stability_lab.disk.files import why_unreadable
from stability_lab.plugins.trust import config_folders, spec_of


def options(group: str, folder: Path | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """File and node of each option that a file holds under its own name: ours, those of installed packages and those
    of `folder`. ConfigError for a file that is no YAML."""
    import yaml

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: there is no such folder")
    for source in (config_dir(), *config_folders().values(), *([] if folder is None else [folder])):
        for file in sorted((source / group).glob("*.yaml")):
            try:
                content = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError(f"{file} cannot be read: {why_unreadable(error)}") from error
            node = content.get(file.stem) if isinstance(content, dict) else None
            yield file, node if isinstance(node, dict) else {}


class ClassText(NamedTuple):
    docstring: str  # of the module
    constants: dict[str, str]  # words that the class holds, such as `paper` and `summary`

    def seams(self) -> list[str]:
        """Those that the docstring's sentence `Seam: ...` names."""
        found = re.search(r"^Seams?: ([^.;]*)", self.docstring, re.MULTILINE)
        return re.findall(r"`(\w+)`", found[1]) if found else []


def class_text(target: str) -> ClassText:
    """Empty where the file is not found or is no Python."""
    module, _, name = target.rpartition(".")
    file = _file_of(module)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return ClassText("", {})
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
    values = {ast.unparse(node.target): node.value for node in body if isinstance(node, ast.AnnAssign)}
    words = {key: v.value for key, v in values.items() if isinstance(v, ast.Constant) and isinstance(v.value, str)}
    return ClassText(ast.get_docstring(tree) or "", words)


def _file_of(module: str) -> Path | None:
    top, *rest = module.split(".")
    spec = spec_of(top)
    if spec is None or not rest:
        return Path(spec.origin) if spec is not None and spec.origin is not None else None
    places = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in files if file.is_file()), None)
