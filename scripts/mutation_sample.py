"""A random sample of mutants and the share that the tests notice (started by scripts/mutation_sample.sh).

cosmic-ray makes the mutants of judge, statistics, training and model: other operators, comparisons, numbers, branches.
Lines are drawn first and then one mutant of each, so that a line with many operators counts once. Mutants that change
annotations alone, or that no test can miss (bit operations on floats), are left out. Each is tried with the quick tests
of its area, those of its own file first.
"""

import argparse
import ast
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cosmic_ray.ast  # pyright: ignore[reportMissingImports]
import cosmic_ray.plugins  # pyright: ignore[reportMissingImports]
from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
from mutation import ROOT, Mutant, run

AREAS = {
    "judge": ("judge/*.py", "tests/judge"),
    "statistics": ("compare/statistics.py", "tests/compare/test_statistics.py"),
    "training": ("training/*.py", "tests/training"),
    "model": ("model/*.py", "tests/model"),
}
QUICK = ("-m", "not slow and not gpu")
# Operators that need arguments, that test identity for equality, or that mix bits with numbers: no test can miss these.
LEFT_OUT = re.compile(r"Variable|_(Is|IsNot|Invert)$|(Add|Sub|Mul|Div|Mod|Pow)_(Bit|[RL]Shift)|(Bit\w+|Shift)_(?!Bit)")


def files_of(areas: list[str]) -> list[tuple[Path, str]]:
    """Source files with the tests of their area."""
    found = []
    for area in areas:
        pattern, tests = AREAS[area]
        found += [
            (path, tests) for path in sorted((ROOT / "stability_lab").glob(pattern)) if path.name != "__init__.py"
        ]
    return found


def places(source: str) -> Iterator[tuple[int, str, int]]:
    """Line, operator and number of each mutant of a file."""
    tree = cosmic_ray.ast.get_ast(source)
    for name in cosmic_ray.plugins.operator_names():
        if LEFT_OUT.search(name):
            continue
        operator = cosmic_ray.plugins.get_operator(name)()
        starts = (start for node in cosmic_ray.ast.ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, (line, _) in enumerate(starts):
            yield line, name, occurrence


class Stripper(ast.NodeTransformer):
    """Takes annotations away."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node


def computed(source: str) -> str:
    """What a module computes; equal for sources that differ in their layout or annotations alone."""
    return ast.dump(Stripper().visit(ast.parse(source)))


def sample(areas: list[str], number: int, seed: int) -> list[Mutant]:
    rng = random.Random(seed)
    lines: dict[tuple[Path, str, int], list[tuple[str, int]]] = {}
    for path, tests in files_of(areas):
        for line, name, occurrence in places(path.read_text(encoding="utf-8")):
            lines.setdefault((path, tests, line), []).append((name, occurrence))
    print(f"{sum(map(len, lines.values())):,} mutants in {len(lines):,} lines; seed {seed}")
    mutants: list[Mutant] = []
    for (path, tests, line), choices in rng.sample(list(lines.items()), len(lines)):
        name, occurrence = rng.choice(choices)
        source = path.read_text(encoding="utf-8")
        changed = mutate_code(source, cosmic_ray.plugins.get_operator(name)(), occurrence)
        if len(mutants) == number:
            break
        try:
            if changed is None or computed(changed) == computed(source):
                continue
        except SyntaxError:  # taking a sign away can break a number in a list
            continue
        own = Path(tests, f"test_{path.name}")
        first = (own.as_posix(),) if (ROOT / own).is_file() else ()
        words = f"line {line}, {name.removeprefix('core/')}: {changed.splitlines()[line - 1].strip()}"
        mutants.append(Mutant(path.relative_to(ROOT).as_posix(), changed, (*first, tests, *QUICK), words))
    return mutants


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="mutation_sample.sh", description="Tries a random sample of mutants and prints the survivors."
    )
    parser.add_argument("areas", nargs="*", choices=[*AREAS, []], metavar="AREA", help=f"of {', '.join(AREAS)}")
    parser.add_argument("--number", type=int, default=60, help="mutants to try (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--list", action="store_true", help="only show the sample")
    args = parser.parse_args()
    mutants = sample(args.areas or list(AREAS), args.number, args.seed)
    if args.list:
        print("\n".join(f"{mutant.file}: {mutant.words}" for mutant in mutants))
        return 0
    results = run(mutants)
    counts = Counter("killed" if result == "timeout" or result.startswith("error") else result for result in results)
    print(f"\n{counts['killed']} of {len(results)} mutants killed ({counts['killed'] / len(results):.0%}); survivors:")
    print("\n".join(f"{m.file}: {m.words}" for m, result in zip(mutants, results, strict=True) if result == "survived"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
