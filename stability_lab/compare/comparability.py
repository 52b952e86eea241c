"""May these runs be compared? What two runs must share, read from their manifests, and what a difference spoils."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from stability_lab.compare.grouping import LR, Cell, Grouping, seed_of, setting_text, short, shown_value
from stability_lab.compare.run_record import RunRecord

LOSS, COST = "loss", "cost"


@dataclass(frozen=True)
class Check:
    """`same` is None where some run does not say. A difference makes columns of the kinds in `spoils` doubtful; with
    `unpairs` runs are no pairs.
    """

    name: str
    same: bool | None
    detail: str
    spoils: tuple[str, ...] = ()
    unpairs: bool = False

    @property
    def word(self) -> str:
        return {True: "same", False: "differs", None: "unknown"}[self.same]


@dataclass(frozen=True)
class _Fact:
    name: str
    key: str  # of the manifest
    spoils: tuple[str, ...]
    unpairs: bool = False
    each_seed: bool = False  # must only agree between runs of the same seed
    unsaid: Hashable = None  # what a run means that does not say


def _told(run: RunRecord, key: str, unsaid: Hashable = None) -> Hashable:
    value = run.facts.get(key, unsaid)
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


FACTS = (
    _Fact("data", "data.fingerprint", (LOSS,), unpairs=True),
    _Fact("first batch", "data.first_batch", (LOSS,), unpairs=True, each_seed=True),
    _Fact("last batch", "data.last_batch", (LOSS,), unpairs=True, each_seed=True),
    _Fact("evaluation windows", "data.validation", (LOSS,), unpairs=True),
    _Fact("precision", "precision", (LOSS, COST)),
    _Fact("compile", "compile", (LOSS, COST)),
    _Fact("implementation", "implementation", (COST,)),
    _Fact("attention back-end", "attention.backend", (COST,)),
    _Fact("threads", "threads", (COST,)),
    _Fact("processes", "ranks", (COST,), unsaid=1),
    _Fact("device", "device", (LOSS, COST)),
    _Fact("platform", "platform", (COST,)),
    _Fact("deterministic kernels", "deterministic", (COST,)),
    _Fact("torch", "versions.torch", (LOSS, COST)),
    _Fact("stability_lab", "versions.stability_lab", (LOSS, COST)),
    _Fact("code revision", "git.revision", (LOSS, COST)),
    _Fact("Python", "versions.python", ()),
    _Fact("numpy", "versions.numpy", ()),
)


def checks(grouping: Grouping) -> list[Check]:
    """Check what the compared runs share.

    Runs are compared within a setting, and across settings that differ in the learning rate alone, over which an arm
    has its ladder.
    """
    families: dict[tuple[Any, ...], list[RunRecord]] = defaultdict(list)
    for cell in grouping.cells:
        families[tuple(value for key, value in cell.setting.items() if key != LR)] += cell.ended
    settings = list(families.values())
    arms = {id(run): cell.arm for cell in grouping.cells for run in cell.runs}
    found = [_init(settings, arms)]
    for fact in FACTS:
        found.append(_check(fact, settings, arms))
    found += _uncommitted(settings, arms)
    found += [_confounder(key, values, grouping) for key, values in grouping.confounded.items()]
    found += _uneven(grouping)
    # The init belongs behind the data.
    found.insert(1, found.pop(0))
    return found


def pairs_hold(found: Sequence[Check]) -> bool:
    """A stream's last batch cannot be known before it was read: unlike the others it may be unknown."""
    return not any(check.unpairs and (check.same is False or _must_be_known(check)) for check in found)


def _must_be_known(check: Check) -> bool:
    return check.same is None and check.name != "last batch"


def spoiled(found: Sequence[Check], kind: str) -> list[Check]:
    return [check for check in found if check.same is False and kind in check.spoils]


def _check(fact: _Fact, settings: Sequence[Sequence[RunRecord]], arms: Mapping[int, str]) -> Check:
    unknown, different = 0, None
    for runs in settings:
        groups: dict[Hashable, list[RunRecord]] = defaultdict(list)
        for run in runs:
            groups[str(seed_of(run)) if fact.each_seed else None].append(run)
        for members in groups.values():
            values = {id(run): _told(run, fact.key, fact.unsaid) for run in members}
            unknown += sum(value is None for value in values.values())
            if len({value for value in values.values() if value is not None}) > 1:
                different = different or _who(members, values, arms)
    if different:
        return Check(fact.name, False, different, fact.spoils, fact.unpairs)
    if unknown:
        return Check(fact.name, None, f"{unknown} runs do not say", fact.spoils, fact.unpairs)
    if fact.each_seed:
        return Check(fact.name, True, "for each seed", fact.spoils, fact.unpairs)
    known = {str(_told(run, fact.key, fact.unsaid)) for runs in settings for run in runs}
    return Check(fact.name, True, _brief(next(iter(known))) if len(known) == 1 else "", fact.spoils, fact.unpairs)


def _who(runs: Sequence[RunRecord], values: Mapping[int, Any], arms: Mapping[int, str]) -> str:
    """Text such as `sdpa (none, qknorm), explicit (softcap)`; it names runs where arms do not separate the values."""
    by_value: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        if values[id(run)] is not None:
            by_value[str(values[id(run)])].add(arms[id(run)])
    overlap = any(a & b for a, b in combinations(by_value.values(), 2))
    if overlap:
        by_value = defaultdict(set)
        for run in runs:
            if values[id(run)] is not None:
                by_value[str(values[id(run)])].add(run.name)
    parts = []
    for value, names in by_value.items():
        listed = sorted(names)
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        parts.append(f"{_brief(value)} ({', '.join(listed[:3])}{more})")
    return ", ".join(parts)


def _brief(value: str) -> str:
    return value[:12] if len(value) > 24 else value


def _init(settings: Sequence[Sequence[RunRecord]], arms: Mapping[int, str]) -> Check:
    """Parameters that runs of one seed have in common must have started from the same values."""
    name, unknown, shared, total, different = "shared initial weights", 0, 0, 0, None
    for runs in settings:
        by_seed: dict[str, list[RunRecord]] = defaultdict(list)
        for run in runs:
            by_seed[str(seed_of(run))].append(run)
        for members in by_seed.values():
            known = [(run, init) for run in members if isinstance(init := run.manifest.get("init"), Mapping) and init]
            unknown += len(members) - len(known)
            values: dict[str, dict[str, str]] = defaultdict(dict)  # parameter -> its fingerprint -> an arm that has it
            held = Counter()
            for run, init in known:
                for parameter, value in init.items():
                    values[parameter].setdefault(str(value), arms[id(run)])
                    held[parameter] += 1
            shared = max(shared, sum(n > 1 for n in held.values()))
            total = max(total, len(held))
            wrong = sorted(parameter for parameter, found in values.items() if len(found) > 1)
            if wrong and different is None:
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                different = f"{wrong[0]}{more} ({' against '.join(list(values[wrong[0]].values())[:2])})"
    if different:
        return Check(name, False, different, (LOSS,), unpairs=True)
    if unknown:
        return Check(name, None, f"{unknown} runs do not say", (LOSS,), unpairs=True)
    detail = f"{shared} of {total} tensors are shared" if shared else "no two runs of one seed"
    return Check(name, True, detail, (LOSS,), unpairs=True)


def _uncommitted(settings: Sequence[Sequence[RunRecord]], arms: Mapping[int, str]) -> list[Check]:
    """A revision does not say which code ran where the checkout had changes of its own."""
    dirty = [run for runs in settings for run in runs if _told(run, "git.dirty")]
    if not dirty:
        return []
    of = sorted({arms[id(run)] for run in dirty})
    return [
        Check("uncommitted code", None, f"{len(dirty)} runs ({', '.join(of[:3])}) had changes beside their revision")
    ]


def _confounder(key: str, values: Mapping[str, Any], grouping: Grouping) -> Check:
    by_value: dict[str, list[str]] = defaultdict(list)
    for arm in grouping.arms:
        by_value[shown_value(values[arm])].append(arm)
    detail = ", ".join(f"{value} ({', '.join(arms)})" for value, arms in by_value.items())
    return Check(short(key), False, f"{detail}: its effect cannot be separated from the arm's", (LOSS, COST))


def _uneven(grouping: Grouping) -> list[Check]:
    """Name arms that are missing from a setting, and seeds that differ between arms."""
    found = []
    missing = Counter()
    unpaired = []
    for setting, cells in grouping.settings():
        for arm in grouping.arms:
            missing[arm] += arm not in cells
        seeds = {arm: {str(seed_of(run)) for run in cell.runs} for arm, cell in cells.items()}
        if len({frozenset(s) for s in seeds.values()}) > 1:
            unpaired.append(setting_text(setting))
    absent = [f"{arm} in {n} of {len(grouping.settings())} settings" for arm, n in missing.items() if n]
    if absent:
        found.append(Check("settings", False, f"no run of {', '.join(absent)}"))
    if unpaired:
        where = f" at {'; '.join(unpaired[:3])}" if unpaired != [""] else ""
        found.append(Check("seeds", False, f"arms have different seeds{where}: pairs are those that both have"))
    return found


def repeated(cells: Sequence[Cell]) -> int:
    return sum(len(cell.repeats) for cell in cells)
