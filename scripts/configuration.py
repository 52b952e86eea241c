"""Fills the tables of docs/configuration.md: every group with its options, every key with default, role and meaning.

python scripts/configuration.py

Values stand in configs/, and so do meanings: a key's is the comment on its line, without the words that it lists.
Types, bounds and roles are the schema's.
"""

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import ROLES, TrainConfig, config_dir, schema_keys
from stability_lab.text import flatten

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
START, END = "<!-- by scripts/configuration.py -->\n", "<!-- /by scripts/configuration.py -->\n"
KINDS = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text", list[str]: "list of text"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
YAML_LINE = re.compile(r"( *)(?:- )?(\w+):[^#]*(?:# (.*))?")


def page() -> str:
    """The whole page, with the tables as they should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    groups = table(("group", "default", "options"), group_rows())
    keys = table(("key", "default", "may be", "role", "meaning"), key_rows())
    return f"{before}{START}\n{groups}\n{keys}\n{END}{after}"


def group_rows() -> Iterator[tuple[str, ...]]:
    folders = sorted({path.parent.name for path in config_dir().glob("*/*.yaml")})
    for group, option in {**chosen(), **{name: "" for name in folders if name not in chosen()}}.items():
        options = (code(path.stem) for path in sorted((config_dir() / group).glob("*.yaml")))
        yield code(group), code(option) if option else "", " ".join(options)


def key_rows() -> Iterator[tuple[str, ...]]:
    """A row for each key of the schema, and for each that an open set has by default."""
    (job,) = compose_jobs(read_command_line([]))
    values, meanings, groups = flatten(job.plain), comments("train"), chosen()
    for group, option in groups.items():
        meanings |= {f"{group}.{key}": text for key, text in comments(f"{group}/{option}").items()} if option else {}
    for key, field, kind in schema_keys(TrainConfig):
        module, _, cls = values.get(f"{key}._target_", "").rpartition(".")
        options = schema_keys(getattr(importlib.import_module(module), cls), f"{key}.") if module else ()
        for name, f, k in options if key in groups else ((key, field, kind),):
            words = " | ".join(f.metadata.get("one_of", ())) or "\n"
            meaning = meanings[name].removeprefix(words).lstrip("; ")
            yield code(name), code(values[name]), may_be(k, f.metadata), ROLES[key], meaning


def chosen() -> dict[str, str]:
    """Group -> its default option, empty where there is none."""
    defaults = yaml.safe_load((config_dir() / "train.yaml").read_text(encoding="utf-8"))["defaults"]
    entries = [entry for entry in defaults if isinstance(entry, dict)]
    return {k: v or "" for entry in entries for k, v in entry.items() if not k.startswith("override")}


def comments(file: str) -> dict[str, str]:
    """Flat key -> the comment on its line."""
    found: dict[str, str] = {}
    path: list[str] = []
    for line in (config_dir() / f"{file}.yaml").read_text(encoding="utf-8").splitlines():
        if match := YAML_LINE.fullmatch(line):
            indent, name, comment = match.groups()
            path[len(indent) // 2 :] = [name]
            found[".".join(path)] = comment or ""
    return found


def may_be(kind: Any, bounds: Mapping[str, Any]) -> str:
    """What the key takes, from its type and bounds."""
    limits = " and ".join(f"{sign} {bounds[name]:g}" for name, sign in SIGNS.items() if name in bounds)
    words: list[str] = []
    for one in get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,):
        if one is type(None):
            words.append(code(None))
        elif get_origin(one) is Literal or "one_of" in bounds:
            words += map(code, bounds.get("one_of", get_args(one)))
        else:
            words.append(f"{KINDS[one]} {limits}".rstrip())
    return ", ".join(words)


def code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else f'{value:g}' if isinstance(value, float) else json.dumps(value)}`"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
