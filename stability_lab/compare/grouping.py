"""Which runs form a group, and which groups are compared: config minus seed, found without being told.

Runs are sorted into *cells*. A cell is one *arm* (what is compared: by default the stabilizers) in one *setting* (all
else that varies, such as the learning rate), and holds the runs that differ by seed alone. Arms are only ever compared
within a setting. A key that varies with the arm, and never within one, belongs to the arm: it is a confounder and is
named.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stability_lab.compare.run_record import OPEN_GROUPS, RunRecord, hashable
from stability_lab.config import ConfigError, tells_arms_apart
from stability_lab.text import did_you_mean

STABILIZER = "stabilizer"
LR = "optimizer.lr"
_SHORT = {LR: "lr"}
# Names that people say for keys.
_ALIASES = {"lr": LR, "stabilizers": STABILIZER, "model": "model.name"}


@dataclass(frozen=True, eq=False)
class Cell:
    """Runs of one arm in one setting, one a seed, by seed; `repeats` are further runs of a seed that is there."""

    arm: str
    setting: Mapping[str, Any]
    runs: tuple[RunRecord, ...]
    repeats: tuple[RunRecord, ...] = ()

    @cached_property
    def ended(self) -> tuple[RunRecord, ...]:
        return tuple(run for run in self.runs if run.ended)

    @cached_property
    def finite(self) -> tuple[RunRecord, ...]:
        """Runs that count in a mean."""
        return tuple(run for run in self.ended if not run.diverged)

    @cached_property
    def diverged(self) -> tuple[RunRecord, ...]:
        return tuple(run for run in self.ended if run.diverged)

    def values(self, metric: str) -> dict[str, float]:
        """Finite values of the runs that count in a mean, by seed."""
        values = ((str(seed_of(run)), run.metric(metric)) for run in self.finite)
        return {seed: value for seed, value in values if value is not None and math.isfinite(value)}

    @property
    def unfinished(self) -> tuple[RunRecord, ...]:
        return tuple(run for run in self.runs if not run.ended)


@dataclass(frozen=True, eq=False)
class Grouping:
    """`by`: keys whose values make an arm; `setting`: the other keys that vary; `confounded`: key -> value by arm."""

    by: tuple[str, ...]
    setting: tuple[str, ...]
    arms: tuple[str, ...]  # the baseline first
    baseline: str
    cells: tuple[Cell, ...]  # by setting, then as in `arms`
    confounded: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]

    def settings(self) -> list[tuple[Mapping[str, Any], dict[str, Cell]]]:
        """Each setting with its cells by arm."""
        found: dict[tuple[Any, ...], tuple[Mapping[str, Any], dict[str, Cell]]] = {}
        for cell in self.cells:
            found.setdefault(tuple(cell.setting.values()), (cell.setting, {}))[1][cell.arm] = cell
        return list(found.values())


def group(runs: Sequence[RunRecord], by: Sequence[str] = (), baseline: str | None = None) -> Grouping:
    """Sort runs into cells. ConfigError for a key or a baseline that is not among them."""
    groups = {STABILIZER: stabilizer_labels(runs)}
    groups |= {name: option_labels([run.options_of(name) for run in runs]) for name in OPEN_GROUPS}
    facts = [{**{name: labels[i] for name, labels in groups.items()}, **run.settings} for i, run in enumerate(runs)]
    asked = tuple(_known(key, facts) for key in by)
    apart = (key for key in dict.fromkeys(key for fact in facts for key in fact) if tells_arms_apart(key))
    varying = [key for key in apart if len(_values(facts, key)) > 1]
    keys = asked or _default_by(varying)
    arms = [_label(keys, fact) for fact in facts]
    confounded = {}
    setting = []
    for key in varying:
        if key in keys:
            continue
        within: dict[str, set[Any]] = defaultdict(set)
        for arm, fact in zip(arms, facts, strict=True):
            within[arm].add(fact.get(key))
        if len(within) > 1 and all(len(values) == 1 for values in within.values()):
            confounded[key] = {arm: next(iter(values)) for arm, values in within.items()}
        else:
            setting.append(key)
    names = list(dict.fromkeys(arms))
    chosen, notes = _baseline(baseline, names, keys)
    order = [chosen, *sorted((name for name in names if name != chosen), key=_natural)]
    cells = _cells(runs, facts, arms, setting, order)
    return Grouping(keys, tuple(setting), tuple(order), chosen, cells, confounded, tuple(notes))


def short(key: str, among: Iterable[str] = ()) -> str:
    """A column's name for a key: its last word where that is unambiguous."""
    if key in _SHORT:
        return _SHORT[key]
    last = key.rpartition(".")[2]
    clear = last not in ("name", "_target_") and sum(other.rpartition(".")[2] == last for other in among) <= 1
    return last if clear else key.removesuffix("._target_").removesuffix(".name")


def shown_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}".replace("e+", "e")
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).removeprefix("stability_lab.")


def setting_text(setting: Mapping[str, Any]) -> str:
    """`lr=0.01, d_model=64`; empty where nothing but the arm varies."""
    return ", ".join(f"{short(key, setting)}={shown_value(value)}" for key, value in setting.items())


def stabilizer_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Labels such as `qknorm+zloss` or `none`, with an option where runs with that stabilizer differ in it."""
    return option_labels([run.stabilizer_options for run in runs])


def option_labels(chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """One label for what each run has chosen, name -> its options."""
    seen: dict[str, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for names in chosen:
        for name, options in names.items():
            for key, value in _options(options).items():
                seen[name][key].add(value)
    labels = []
    for names in chosen:
        parts = []
        for name, options in sorted(names.items()):
            known = _options(options)
            telling = [f"{key}={shown_value(known.get(key))}" for key, values in seen[name].items() if len(values) > 1]
            parts.append(f"{name}({', '.join(telling)})" if telling else str(name))
        labels.append("+".join(parts) or "none")
    return labels


def _options(chosen: Any) -> dict[str, Any]:
    if not isinstance(chosen, Mapping):
        return {}
    return {key: hashable(value) for key, value in chosen.items() if key != "_target_"}


def _values(facts: Iterable[Mapping[str, Any]], key: str) -> set[Any]:
    return {fact.get(key) for fact in facts}


def _known(key: str, facts: Sequence[Mapping[str, Any]]) -> str:
    key = _ALIASES.get(key, key)
    known = {name for fact in facts for name in fact}
    if key not in known:
        raise ConfigError(f"--by {key}: no run has this key: {did_you_mean(key, known)}")
    return key


def _default_by(varying: Sequence[str]) -> tuple[str, ...]:
    """Stabilizers if they vary; otherwise all that varies except the learning rate, over which an arm has a ladder."""
    if STABILIZER in varying:
        return (STABILIZER,)
    return tuple(key for key in varying if key != LR) or (STABILIZER,)


def _label(keys: Sequence[str], fact: Mapping[str, Any]) -> str:
    if keys == (STABILIZER,):
        return fact[STABILIZER]
    return ", ".join(
        fact[key] if key == STABILIZER else f"{short(key, keys)}={shown_value(fact.get(key))}" for key in keys
    )


def _baseline(asked: str | None, names: Sequence[str], keys: Sequence[str]) -> tuple[str, list[str]]:
    if asked is not None:
        # `--baseline 0.003` and `--baseline lr=0.003` name the same arm.
        matching = [name for name in names if asked in (name, name.partition("=")[2]) or _same(asked, name)]
        if not matching:
            raise ConfigError(f"--baseline {asked}: no such arm: {did_you_mean(asked, names)}")
        return matching[0], []
    if "none" in names:
        return "none", []
    plain = [name for name in names if name.split(", ")[0] == "none"]
    chosen = min(plain or names, key=_natural)
    note = f"the baseline is {chosen}, the first of {len(names)}; --baseline chooses another"
    return chosen, [note] if keys and len(names) > 1 else []


def _same(asked: str, name: str) -> bool:
    return sorted(asked.replace(" ", "").split("+")) == sorted(name.replace(" ", "").split("+"))


def _natural(name: str) -> tuple[Any, ...]:
    """Sort key that orders numbers by value, so that 0.003 comes before 0.01 and 1e-05 before 0.0001."""
    words = name.replace("(", "=").replace(")", "").split("=")
    return tuple((0, float(word), "") if _is_number(word) else (1, 0.0, word) for word in words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return word.lower() not in ("nan", "inf", "infinity")


def _cells(
    runs: Sequence[RunRecord],
    facts: Sequence[Mapping[str, Any]],
    arms: Sequence[str],
    setting: Sequence[str],
    order: Sequence[str],
) -> tuple[Cell, ...]:
    members: dict[tuple[Any, ...], list[RunRecord]] = defaultdict(list)
    for run, fact, arm in zip(runs, facts, arms, strict=True):
        members[tuple(fact.get(key) for key in setting), arm].append(run)
    cells = []
    for (values, arm), found in members.items():
        first, repeats = _one_a_seed(found)
        cells.append(Cell(arm, dict(zip(setting, values, strict=True)), first, repeats))
    return tuple(sorted(cells, key=lambda c: ([_rank(v) for v in c.setting.values()], order.index(c.arm))))


def _rank(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def seed_of(run: RunRecord) -> tuple[Any, ...]:
    """What makes two runs of different arms a pair: seeds of init and data, which `seed` sets unless given apart."""
    init, data = run.config.get("init_seed"), run.config.get("data_seed")
    return (run.seed if init is None else init, run.seed if data is None else data)


def _one_a_seed(runs: Sequence[RunRecord]) -> tuple[tuple[RunRecord, ...], tuple[RunRecord, ...]]:
    """Keep the latest run with a result for each seed: repeats of one seed are no further evidence."""
    by_seed: dict[Any, list[RunRecord]] = defaultdict(list)
    for run in runs:
        by_seed[str(seed_of(run))].append(run)
    chosen, repeats = [], []
    for same in by_seed.values():
        same.sort(key=lambda run: (run.ended, str(run.manifest.get("created", "")), str(run.path)))
        chosen.append(same[-1])
        repeats += same[:-1]
    chosen.sort(key=lambda run: tuple(_rank(value) for value in seed_of(run)))
    return tuple(chosen), tuple(repeats)


def tally(words: Iterable[str]) -> str:
    """`stable 2, spiky 1`, the commonest first."""
    return ", ".join(f"{word} {n}" for word, n in Counter(words).most_common())
