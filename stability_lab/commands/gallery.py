"""The command `gallery`: which stabilizer cures which failure, over several seeds of each stressor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability_lab.commands.compare import read_seeds
from stability_lab.commands.reproduce import STOPPED, make, plan_of, show_plans, unwritable
from stability_lab.compare.run_record import RunRecord
from stability_lab.config import ConfigError, Parser
from stability_lab.disk.files import replace_file
from stability_lab.plugins.option_files import options
from stability_lab.reproduction import remedies
from stability_lab.reproduction.catalogue import Part, PartScale, last_of_each_key
from stability_lab.reproduction.datafile import FIGURES, data_path, read
from stability_lab.reproduction.remedies import BASELINE
from stability_lab.stressors.symptom import Stressor, stressors
from stability_lab.text import did_you_mean, next_command, room, shown, text_table

if TYPE_CHECKING:
    from stability_lab.compose import Composed
    from stability_lab.reproduction.jobs import Sweep
    from stability_lab.run.cost import Timing

NAME, SCALE = "gallery", "cpu"
OUT = Path("outputs/gallery")
SEEDS = frozenset(range(5))
_TIMES = 3  # as many seeds without a stabilizer, with which every other arm is compared
_QUIET = ("tracking=local", "trainer.save_weights=false", "trainer.eval_every=null")
_DEVICE = ("trainer.device=cpu", "trainer.threads=1")


def main(argv: Sequence[str]) -> int:
    known = {stressor.name: stressor for stressor in stressors()}
    args = _parser().parse_args(argv)
    chosen = _chosen("--stressors", args.stressors, known)
    arms = [
        BASELINE,
        *(name for name in _chosen("--stabilizers", args.stabilizers, _stabilizers()) if name != BASELINE),
    ]
    code = 0 if args.report_only else _train([known[name] for name in chosen], arms, args.seeds, args.out, args.wide)
    if code in STOPPED:
        return code
    _publish(known, args.out, room(args.wide))
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="stability_lab gallery",
        description="Trains each stressor with each stabilizer and several seeds, and shows which cures which failure: "
        "how many runs have the symptom, with exact intervals and tests, as a table, a page and a figure. Says first "
        "how long it will take; runs that are there are not made again.",
    )
    parser.add_argument("--stressors", metavar="A,B", help="some of them (default: all)")
    parser.add_argument("--stabilizers", metavar="X,Y", help="some of them (default: all); none is always there")
    parser.add_argument(
        "--seeds",
        type=read_seeds,
        default=SEEDS,
        metavar="SEEDS",
        help=f"such as 0-2 or 0,1,5 (default: 0-4); none has {_TIMES} times as many",
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help=f"data, figure; page DIR.md (default: {OUT})"
    )
    parser.add_argument("--report-only", action="store_true", help="only rebuild page and figure from the data in DIR")
    parser.add_wide()
    return parser


def _stabilizers() -> list[str]:
    return [file.stem for file, _ in options("stabilizer")]


def _chosen(option: str, given: str | None, known: Collection[str]) -> list[str]:
    names = list(known) if given is None else given.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {name}: there is none of this name: {did_you_mean(name, known)}")
    return list(dict.fromkeys(names))


def _train(chosen: Sequence[Stressor], arms: Sequence[str], seeds: Collection[int], out: Path, wide: bool) -> int:
    first = sorted(seeds)
    more = range(first[-1] + 1, first[-1] + 1 + (_TIMES - 1) * len(first))
    at = PartScale(None, seeds=tuple(first), more={BASELINE: tuple(more)})
    nodes = _nodes(arms)
    timings: dict[str, Timing] = {}
    parts, plans = [], []
    for stressor in chosen:
        part, made = _part(stressor, at, nodes)
        parts.append(part)
        plans.append(plan_of(part, SCALE, made, timings))
    show_plans(
        f"{len(chosen)} stressors, {len(arms)} stabilizers, seeds {', '.join(map(str, first))}", plans, room(wide)
    )
    symptoms = {stressor.name: stressor.symptom for stressor in chosen}

    def keep(part: Part, run: RunRecord) -> dict[str, Any]:
        return remedies.slim(run, symptoms[part.part].step(run) is not None)

    code, _ = make(parts, SCALE, plans, out, keep)
    return code


def _nodes(arms: Sequence[str]) -> dict[str, dict[str, object]]:
    """What each stabilizer adds to a configuration: composing each with every stressor would take a minute."""
    from stability_lab.command_line import read_command_line
    from stability_lab.compose import compose_jobs

    jobs = compose_jobs(read_command_line(["-m", f"+stabilizer={','.join(arms)}"]))
    return {arm: job.plain["stabilizer"] for arm, job in zip(arms, jobs, strict=True)}


def _part(stressor: Stressor, at: PartScale, nodes: Mapping[str, dict[str, object]]) -> tuple[Part, list[Sweep]]:
    """A stressor as a part of a reproduction, with two sweeps: all arms, and what only the baseline has."""
    from stability_lab.build import check
    from stability_lab.command_line import read_command_line
    from stability_lab.compose import compose_jobs, composed_of

    words = last_of_each_key([*stressor.words, *_QUIET, *_DEVICE])
    (base,) = compose_jobs(read_command_line([*words, f"+stressor={stressor.name}"]))
    its = base.plain["stabilizer"]
    composed: dict[str, Composed] = {}
    excluded: dict[str, str] = {}
    for arm, node in nodes.items():
        if set(node) & set(its):
            excluded[arm] = f"the stressor itself is shown with {arm}"
            continue
        job = composed_of({**base.plain, "stabilizer": {**its, **node}}, ())
        try:
            check([job.config])
        except ConfigError as error:
            if arm == BASELINE:
                raise
            excluded[arm] = str(error)
        else:
            composed[arm] = job
    names = {arm: (f"+stabilizer={arm}",) for arm in composed}
    part = Part(NAME, stressor.name, stressor.summary, {SCALE: at}, names, figures=(), excluded=excluded)
    return part, [
        _sweep(part, words, composed, at.seeds),
        _sweep(part, words, {BASELINE: composed[BASELINE]}, at.more[BASELINE]),
    ]


def _sweep(part: Part, words: Sequence[str], composed: Mapping[str, Composed], seeds: Sequence[int]) -> Sweep:
    from stability_lab.reproduction.jobs import RUNS, Sweep, group_of, job_at

    axes = [f"seed={','.join(map(str, seeds))}", f"+stabilizer={','.join(composed)}"]
    place = [f"output_dir={RUNS}", f"group={group_of(part, SCALE)}"]
    jobs = tuple(job_at(arm, "", None, seed, job) for seed in seeds for arm, job in composed.items())
    return Sweep(("-m", *words, f"+stressor={part.part}", *axes, *place), jobs)


def _publish(known: Mapping[str, Stressor], out: Path, width: int | None) -> None:
    """Write page and figure from the data below `out`, and print the table."""
    gallery = {}
    for name in known:
        part = Part(NAME, name, "", {})
        if (path := data_path(part, SCALE, out)).is_file():
            gallery[name] = read(path, part, SCALE)
    if not gallery:
        raise ConfigError(
            f"--out {shown(out)}: it has no data of the gallery: give the folder that has, or leave out --report-only"
        )
    page, picture = out.with_name(f"{out.name}.md"), out / FIGURES / f"{NAME}.png"
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        remedies.draw(gallery, picture)
        summaries = {name: known[name].summary for name in gallery}
        replace_file(page, remedies.page(gallery, summaries, picture.relative_to(out.parent).as_posix()))
    except OSError as error:
        raise unwritable(out, error) from error
    found = remedies.remedies(gallery)
    print(text_table(remedies.overview(found), width))
    print("\n".join(remedies.sentences(found)))
    print(f"written: {shown(page)}, {shown(picture)}")
    print(next_command("demo"))
