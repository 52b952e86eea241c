"""The lines that the layout draws: who may import whom, and what `forward` may know."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import stability_lab
from stability_lab.config import config_dir
from stability_lab.seams import ADDITIVE, EXCLUSIVE

PACKAGE = Path(stability_lab.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 400
MOST_AT_THE_TOP = 9

# From the bottom up: each part imports itself and what stands below it, never what stands beside or above it.
LAYERS: tuple[set[str], ...] = (
    {"text", "numerics", "seams", "judge", "disk", "machine"},
    {"config"},
    {"plugins"},
    {"model", "objective", "stabilizers", "data", "tracking", "command_line"},
    {"diagnostics", "compare", "logs", "compose"},
    {"training"},
    {"build"},
    {"run"},
    {"monitoring", "reproduction", "stressors", "testing"},
    {"commands"},
    {"cli"},
    {"__main__", "__init__"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}, line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_parts(path: Path) -> set[str]:
    """Parts of the package that a file imports; the package itself (its version) counts as none."""
    names = (name.split(".") for name in imports(path))
    return {words[1] for words in names if words[0] == "stability_lab" and words[1:] and words[1] != "__version__"}


def importers(library: str) -> set[str]:
    return {
        name_of(path)
        for path in FILES
        if any(name == library or name.startswith(f"{library}.") for name in imports(path))
    }


def test_every_file_has_its_place() -> None:
    unknown = {part_of(path) for path in FILES} - {"__init__"} - LEVEL.keys()
    assert not unknown, f"add {unknown} to LAYERS"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    part = part_of(path)
    wrong = {other for other in own_parts(path) - {part} if LEVEL[other] >= LEVEL.get(part, -1)}
    assert not wrong, f"{name_of(path)} imports {wrong}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "stabilizers").glob("*.py")), ids=name_of)
def test_a_stabilizer_needs_only_the_contract_and_torch(path: Path) -> None:
    assert own_parts(path) <= {"seams", "numerics"}
    libraries = {name.split(".")[0] for name in imports(path)}
    assert libraries - sys.stdlib_module_names <= {"stability_lab", "torch"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "judge").glob("*.py")), ids=name_of)
def test_the_judge_needs_only_numpy_and_scipy(path: Path) -> None:
    assert own_parts(path) <= {"judge"}
    libraries = {name.split(".")[0] for name in imports(path)}
    assert libraries - sys.stdlib_module_names <= {"stability_lab", "numpy", "scipy"}


@pytest.mark.parametrize("part", ["model", "objective"])
def test_model_and_objective_know_neither_stabilizers_nor_each_other(part: str) -> None:
    for path in (PACKAGE / part).glob("*.py"):
        assert own_parts(path) <= {part, "seams", "config", "numerics", "judge"}, name_of(path)


def test_each_service_lives_in_one_file() -> None:
    assert {name.rpartition("/")[0] for name in importers("wandb")} == {"tracking/wandb"}
    assert importers("datasets") <= {"data/sources/hub.py"}
    assert importers("tensorboard") == {"logs/tensorboard.py"}
    assert all(name.startswith("compare/figures/") for name in importers("matplotlib"))
    assert importers("torch.distributed") <= {"training/ranks.py", "training/sharded.py"}
    # For the Trainer's callback; else only tests compare with it.
    assert importers("transformers") == {"monitoring/callback.py"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


def test_the_top_level_is_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP


def twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)


def test_no_two_files_share_a_name() -> None:
    assert twice(path.name for path in FILES if path.name != "__init__.py") == []


def test_no_two_classes_share_a_name() -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in FILES)
    assert twice(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)) == []


def forwards() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted((PACKAGE / "model").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "forward":
                yield f"{name_of(path)}:{node.lineno}", node


def test_forward_decides_at_most_once() -> None:
    """What a model is made of is decided in constructors, by null objects."""
    for place, function in forwards():
        decisions = [node for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp)]
        assert len(decisions) <= 1, f"forward in {place} has {len(decisions)} ifs"


def words(function: ast.FunctionDef) -> set[str]:
    """Names, attributes, arguments and strings of a function, in lower case, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    found = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {word.lower() for word in found}


def test_forward_asks_no_stabilizer() -> None:
    names = {path.stem for path in (config_dir() / "stabilizer").glob("*.yaml")}
    # A seam may carry the name of the one stabilizer that fills it, and "none" is a word of Python's.
    names -= {"none", *EXCLUSIVE, *ADDITIVE}
    assert {"qknorm", "zloss", "rmsnorm"} <= names
    checked = list(forwards())
    assert len(checked) >= 4
    for place, function in checked:
        mentioned = {name for name in (*names, "seams", "owners") for word in words(function) if name in word}
        assert not mentioned, f"forward in {place} mentions {mentioned}"


HEAVY = ("torch", "hydra", "omegaconf", "wandb", "datasets", "matplotlib", "pandas", "numpy", "scipy", "yaml")
HELP = f"""
import json, sys, time
from stability_lab import cli
assert cli.run(["--help"]) == 0
print(json.dumps([time.process_time(), [name for name in {HEAVY!r} if name in sys.modules]]))
"""


COMMANDS = """
import stability_lab.commands.compare, stability_lab.commands.runs, stability_lab.commands.score, sys
print([name for name in ("pandas", "torch", "matplotlib", "wandb") if name in sys.modules])
"""


def test_commands_on_finished_runs_load_what_they_need_when_they_need_it() -> None:
    done = subprocess.run([sys.executable, "-c", COMMANDS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_answers_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    cpu_s, heavy = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    assert cpu_s < 1.0
