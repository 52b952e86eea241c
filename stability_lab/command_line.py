"""What the words of a command mean, before Hydra sees them.

What Hydra would accept silently or refuse with a traceback (a sweep without -m, a flag between overrides, two
`+stabilizer=`) becomes either what the user meant or one sentence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Sweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

from stability_lab.config import ConfigError, Parser, config_dir
from stability_lab.config.words import check_dashes, hint_of_data, literal, quoted
from stability_lab.plugins.search_path import register
from stability_lab.plugins.trust import config_folders
from stability_lab.text import did_you_mean, flatten

ROOT = "train"  # configs/train.yaml
STABILIZER = "stabilizer"
STRESSOR = "stressor"
MOST_JOBS = 10_000
# Hydra would make these folders and leave them empty.
_HYDRAS_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir")
# There is one root file, and every job is checked.
_INSTEAD = {
    **dict.fromkeys(("--config-path", "--config-name"), "add a folder of configs with --config-dir"),
    "--experimental-rerun": "resume=RUN goes on with a run, and config.yaml in its folder holds its values",
}
_REFUSED = tuple(_INSTEAD)
_SHOWS_SOMETHING = ("help", "cfg", "info", "shell_completion", "version")


class CommandLine(NamedTuple):
    """Hydra's flags, the overrides in the form that we give to Hydra, and the overrides of every single job."""

    flags: list[str]
    overrides: list[str]
    jobs: list[list[str]]
    swept: list[str]  # keys that take several values
    multirun: bool
    only_shows: bool  # --help, --cfg job and the like: nothing runs


def plugin_installed(package: str) -> bool:
    """Is this package of Hydra's plugins there?"""
    try:
        return find_spec(f"hydra_plugins.{package}") is not None
    except ModuleNotFoundError:  # not one of them is
        return False


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Split flags from overrides, wherever they are, and normalise the overrides; ConfigError for bad ones."""
    check_dashes(argv)
    args = _parser().parse_intermixed_args(list(argv))
    args.overrides = [literal(text, args.multirun) for text in args.overrides]
    argv = [literal(text, args.multirun) for text in argv]
    rest, flags = list(args.overrides), []
    for token in argv:
        if rest and token == rest[0]:
            rest.pop(0)
        else:
            flags.append(token)
    for flag in _REFUSED:
        if getattr(args, flag.lstrip("-").replace("-", "_")) is not None:
            raise ConfigError(f"{flag}: is not supported; {_INSTEAD[flag]}")
    if args.shell_completion:
        raise ConfigError("--shell-completion: is not supported")
    if args.hydra_help:
        raise ConfigError(
            "--hydra-help: is not supported; --help explains the flags, and --cfg hydra shows the section"
        )
    if args.multirun and (args.cfg or args.info):
        flag = "--cfg" if args.cfg else "--info"
        raise ConfigError(f"{flag}: shows one run; leave out -m (plan with the same words shows a sweep)")
    if args.cfg and args.info:
        raise ConfigError("--info: shows something else than --cfg; choose one of the two")
    if args.package is not None:
        raise ConfigError(f"--package {args.package}: is not supported; --cfg job shows the whole configuration")
    if args.run:
        flags = [flag for flag in flags if flag not in ("-r", "--run")]  # the default
    if args.resolve and args.cfg is None:
        raise ConfigError("--resolve: goes with --cfg job, which it makes print resolved values")
    register()
    folders = [config_dir(), *config_folders().values()]
    search_path = []
    if args.config_dir is not None:
        folder = Path(args.config_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {args.config_dir}: there is no such folder")
        folders.append(folder)
        search_path = [f"hydra.searchpath=[{quoted(f'file://{folder}')}]"]
    parsed = parse(args.overrides)
    only_shows = any(getattr(args, name, None) for name in _SHOWS_SOMETHING)
    if not args.multirun:
        for override in parsed:
            if override.is_sweep_override():
                raise ConfigError(
                    f"{override.input_line}: several values need a sweep; add -m, or give one value "
                    f"(a list is written '[a,b]')"
                )
    groups = _groups(folders)
    normal = _normalise(parsed, groups)
    lines = {o.input_line: o for o in parse(normal)}
    choices = [_expand(lines[line], groups) for line in normal]
    _check_options(lines.values(), groups)
    number = math.prod(map(len, choices))
    if not 1 <= number <= MOST_JOBS:
        raise ConfigError(f"-m: these values make {number:,} runs; a sweep has 1 to {MOST_JOBS:,}")
    jobs = [[*search_path, *job] for job in itertools.product(*choices)]
    swept = [lines[line].key_or_group for line, choice in zip(normal, choices, strict=True) if len(choice) > 1]
    for job in jobs:
        _check_recipe(job, folders)
        _check_stressors(job, folders)
    _check_unique({line for job in jobs for line in job}, folders)
    _check_tuned_stabilizers(jobs, groups[STABILIZER], folders)
    return CommandLine(flags, normal, jobs, swept, args.multirun, only_shows)


def _parser() -> Parser:
    """A parser of Hydra's flags, used only to separate them from overrides, wherever they are."""
    parser = Parser(prog="python -m stability_lab train", add_help=False, allow_abbrev=False)
    for flags in ("-m --multirun", "-r --run", "-h --help", "--hydra-help", "--version", "--resolve"):
        parser.add_argument(*flags.split(), action="store_true")
    for flags in ("-p --package", "-cd --config-dir", "-cp --config-path", "-cn --config-name", "--experimental-rerun"):
        parser.add_argument(*flags.split())
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-i", "--info", choices=("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"))
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("overrides", nargs="*")
    return parser


def parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException as error:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"cannot read '{text}': write key=value") from error
            hint = f"write '{key}=\"{value}\"' with both quotes"
            raise ConfigError(f"cannot read '{text}': {hint} ({sentence(error)})") from error
    return parsed


def _groups(folders: Iterable[Path]) -> dict[str, set[str]]:
    """Group -> names of its options, from the folders of YAML files."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            group = path.parent.relative_to(folder).as_posix()
            if group != ".":
                groups.setdefault(group, set()).add(path.stem)
    return groups


def _normalise(overrides: list[Override], groups: Mapping[str, set[str]]) -> list[str]:
    """All `stabilizer=` folded into the first, and every value forced, so that unknown keys reach our own check.

    A sweep runs in the order in which it was written: with the stabilizers last, runs that will be compared follow
    each other, and a machine that is slower for an hour is so for all of them.
    """
    folded: list[list[str]] = []
    lines: list[str] = []
    place = 0
    for override in overrides:
        key = override.key_or_group
        line = override.input_line or ""
        if key == "hydra.searchpath":
            raise ConfigError(f"{line}: add a folder of configs with --config-dir")
        if key in _HYDRAS_FOLDERS:
            raise ConfigError(f"{line}: a run makes its own folder; choose with output_dir, group and run_name")
        if override.package is not None and (key == STABILIZER or key not in groups):
            raise ConfigError(f"{line}: '@{override.package}' has no meaning here; leave it out")
        if key == STABILIZER and not override.is_delete():
            place = place if folded else len(lines)
            folded.append(_stabilizer_lists(override, groups[STABILIZER]))
        elif key in groups or key.split("/")[0].split(".")[0] == "hydra" or override.is_delete():
            lines.append(line)
        else:
            lines.append(f"++{key}={line.partition('=')[2]}")
    if folded:
        combined = {
            ",".join(sorted({name for part in parts for name in part.split(",")} - {"none"})): None
            for parts in itertools.product(*folded)
        }
        values = [f"[{names}]" if names else "none" for names in combined]
        lines.insert(place, f"+{STABILIZER}={','.join(values)}")
    return lines


def _stabilizer_lists(override: Override, options: set[str]) -> list[str]:
    """The alternatives of one `stabilizer=` override, each as comma-separated names."""
    if isinstance(value := override.value(), Glob):
        return value.filter(sorted(options))
    if isinstance(value, Sweep):
        texts = list(override.sweep_iterator())
        if any(isinstance(t, Glob) for t in texts):
            texts = sorted(options)
    else:
        texts = [value]
    alternatives = []
    for text in texts:
        if isinstance(text, str) and text.startswith("["):
            text = [part.strip() for part in text.strip("[]").split(",") if part.strip()]
        names = text if isinstance(text, list) else [text]
        for name in names:
            if str(name) not in options or isinstance(name, bool):
                shown = "null" if name is None else name
                raise ConfigError(f"stabilizer={shown} is not a stabilizer: {did_you_mean(str(shown), options)}")
        alternatives.append(",".join(str(name) for name in names) or "none")
    return alternatives


def _expand(override: Override, groups: Mapping[str, set[str]]) -> list[str]:
    """The overrides, one a job, of one that may take several values."""
    if not override.is_sweep_override():
        return [override.input_line or ""]
    prefix = (override.input_line or "").partition("=")[0]
    shown = (override.input_line or "").lstrip("+")
    if isinstance(value := override.value(), Glob):
        names = value.filter(sorted(groups.get(override.key_or_group, ())))
        if not names:
            raise ConfigError(f"{shown}: matches no option of a group")
        return [f"{prefix}={name}" for name in names]
    if override.is_interval_sweep():
        raise ConfigError(f"{shown}: an interval has no single values to run; list them, or use range(...)")
    values = list(itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1))
    if len(values) > MOST_JOBS:
        raise ConfigError(f"{shown}: a sweep has 1 to {MOST_JOBS:,} runs")
    return [f"{prefix}={value}" for value in values]


def _check_options(overrides: Iterable[Override], groups: Mapping[str, set[str]]) -> None:
    for override in overrides:
        key = override.key_or_group
        if key not in groups or key == STABILIZER or override.is_delete() or isinstance(override.value(), Glob):
            continue
        values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
        for value in itertools.chain.from_iterable(
            v if isinstance(v, list) and key == STRESSOR else [v] for v in values
        ):
            if isinstance(value, list):
                raise ConfigError(
                    f"{key}=[{','.join(map(str, value))}]: choose one; only stabilizers and stressors take a list"
                )
            if not isinstance(value, Glob) and str(value) not in groups[key]:
                shown = "null" if value is None else value
                hint = did_you_mean(str(shown), groups[key])
                if key == "data":
                    hint = hint_of_data(str(shown), hint)
                raise ConfigError(f"{key}={shown} is not an option: {hint}")


def _chosen(job: list[str], group: str) -> set[str]:
    """Names of the options of `group` in the overrides of one job."""
    names: set[str] = set()
    for line in job:
        key, _, value = line.lstrip("+~").partition("=")
        if key == group:
            names |= {part.strip() for part in value.strip("[]").split(",") if part.strip()}
    return names


def _options(folders: Iterable[Path], group: str, name: str) -> dict[str, Any]:
    for folder in folders:
        path = folder / group / f"{name}.yaml"
        if path.is_file():
            return OmegaConf.to_container(OmegaConf.load(path)) or {}  # pyright: ignore[reportReturnType]
    return {}


def _check_recipe(job: list[str], folders: list[Path]) -> None:
    """One recipe a run, and no stabilizer that it brings along with other values than those asked for."""
    recipes = _chosen(job, "recipe")
    if len(recipes) > 1:
        raise ConfigError(f"recipe=[{','.join(sorted(recipes))}]: choose one")
    for recipe in recipes:
        brought = _options(folders, "recipe", recipe).get(STABILIZER, {})
        for name in sorted(_chosen(job, STABILIZER) & set(brought)):
            asked = _options(folders, STABILIZER, name).get(name, {})
            differing = sorted(k for k in {*asked, *brought[name]} if asked.get(k) != brought[name].get(k))
            if differing:
                pairs = ", ".join(f"{k} {brought[name].get(k)} and {asked.get(k)}" for k in differing)
                raise ConfigError(
                    f"stabilizer={name} is reached twice, through recipe={recipe} and by name, with different values "
                    f"({pairs}): drop +stabilizer={name}, and set stabilizer.{name}.{differing[0]} if you want another"
                )


def _check_stressors(job: list[str], folders: list[Path]) -> None:
    """Two stressors that set one key to different values would not both be there."""
    known: dict[str, tuple[str, Any]] = {}
    for name in sorted(_chosen(job, STRESSOR)):
        options = _options(folders, STRESSOR, name)
        groups = {key.split("/")[-1]: value for entry in options.pop("defaults", ()) for key, value in entry.items()}
        for key, value in {**flatten({k: v for k, v in options.items() if k != STRESSOR}), **groups}.items():
            other, its = known.setdefault(key, (name, value))
            if its != value:
                raise ConfigError(f"stressor=[{other},{name}]: both set {key}, to {its} and to {value}; choose one")


def _check_unique(lines: Iterable[str], folders: Sequence[Path]) -> None:
    """An option that is chosen by name has one file: of two Hydra would take the first and say nothing."""
    for line in sorted(lines):
        group, _, names = line.lstrip("+~").partition("=")
        for name in names.strip("[]").split(","):
            files = [path for folder in folders if (path := folder / group / f"{name.strip()}.yaml").is_file()]
            if len(files) > 1:
                raise ConfigError(f"{group}={name}: there are two, {files[0]} and {files[1]}: rename one of them")


def _check_tuned_stabilizers(jobs: list[list[str]], options: set[str], folders: list[Path]) -> None:
    """A value for a stabilizer that no job selects is a mistake; that one job does not select it is a sweep."""
    selected: set[str] = set()
    for job in jobs:
        selected |= _chosen(job, STABILIZER)
        for recipe in _chosen(job, "recipe"):
            selected |= set(_options(folders, "recipe", recipe).get(STABILIZER, {}))
    for line in itertools.chain.from_iterable(jobs):
        key = line.partition("=")[0].lstrip("+~")
        head, _, rest = key.partition(".")
        if head != STABILIZER or not rest:
            continue
        name = rest.split(".")[0]
        if name not in options:
            raise ConfigError(f"{key}: {name} is not a stabilizer: {did_you_mean(name, options)}")
        if name not in selected:
            raise ConfigError(f"{line.lstrip('+')}: no run has {name}; add +stabilizer={name}")


def sentence(error: BaseException) -> str:
    """The first line of an error that has several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
