"""The data files hang together: every claim names what is there, every preset composes at every scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from stability_lab import __version__
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import ConfigError, config_dir
from stability_lab.reproduction.catalogue import (
    Claim,
    Part,
    claims,
    claims_of,
    find,
    last_of_each_key,
    reproductions,
)
from stability_lab.reproduction.claims import _RULES
from stability_lab.reproduction.jobs import sweeps
from stability_lab.tracking.manifest import fingerprint

PARTS = [part for reproduction in reproductions().values() for part in reproduction.parts.values()]
RUN = [(part, scale) for part in PARTS for scale in part.scales if part.arms]
KINDS = {"printed", "not_built", *_RULES}
DERIVED = {
    "grad_level",
    "grad_growth",
    "log_injected_ratio",
    "abs_log_z",
    "rms_growth",
    "loss_peak",
    "log_tokens_per_s",
    *(f"ln_failing_lr/{level}" for level in ("2.6", "2.8", "3")),
}
MEASURED = {"val/loss", "val/ppl", "attn/max_logit", "attn/entropy", "attn/qk_gain", "weight/rms/embed", "tokens_per_s"}
MEASURED |= {"max_attn_logit", "clip_fraction", "attn/score_mod/share/touched", "attn/score_mod/share/saturated"}
METRICS = DERIVED | MEASURED | {"spike_events", "log10_max_attn_logit", "act/rms/*", "attn/entropy/*"}


def label(value: object) -> str:
    return (
        f"{value.name}-{value.part}"
        if isinstance(value, Part)
        else value.id
        if isinstance(value, Claim)
        else str(value)
    )


def test_ids_are_unique_and_belong_to_a_part() -> None:
    ids = [claim.id for claim in claims()]
    assert len(ids) == len(set(ids))
    for claim in claims():
        assert set(claim.parts) <= set(find(claim.name).parts), claim.id
    assert all(claims_of(part) for part in PARTS)


@pytest.mark.parametrize("claim", claims(), ids=label)
def test_a_claim_says_what_where_and_how(claim: Claim) -> None:
    test = claim.test
    assert test["kind"] in KINDS
    assert claim.statement
    assert claim.source.keys() & {"paper", "text"}
    assert claim.caveats or not claim.own, "a reading says of what"
    assert claim.own or "derived here" not in claim.source.get("text", "")
    assert claim.source.keys() <= {"paper", "text", "where"}  # an unquoted comma makes another key, or another caveat
    assert all(caveat[0].isupper() and caveat[-1] == "." for caveat in map(str.strip, claim.caveats))
    assert claim.values
    assert not isinstance(test.get("direction"), bool)
    if test["kind"] not in ("exact", "equivalence", "spikes", "not_built"):
        assert test["direction"] in (1, -1)
    if test["kind"] == "equivalence":
        assert test["margin"] > 0
    if test["kind"] == "printed":
        assert {test["a"], test["b"]} <= claim.values.keys()
        assert claim.uncertainty
        return
    for part in (find(claim.name).parts[name] for name in claim.parts):
        for arm in arms_of(test) if part.arms else ():
            name, _, setting = arm.partition("@")
            assert name in part.arms
            assert setting in (part.settings or {"": ()})
        assert {test.get("metric", part.metric), test.get("needs", {}).get("metric", part.metric)} <= METRICS


def arms_of(test: Mapping[str, Any]) -> Iterator[str]:
    for side in (test.get("a"), test.get("b"), test.get("needs", {}).get("arm")):
        yield from [side] if isinstance(side, str) else side or ()


@pytest.mark.parametrize("part", PARTS, ids=label)
def test_a_part_is_whole(part: Part) -> None:
    assert bool(part.arms) != bool(part.compute)
    assert {part.metric, *part.show} <= METRICS
    assert len(part.pair) in (0, 2)
    assert set(part.pair) <= part.arms.keys()
    assert f"{part.delta:g}" in ("0.5", "1", "2")
    assert set(part.figures) <= {"decision", "loss_over_lr", "curves", "attention_logits", "differences"}
    assert "log_injected_ratio" not in (part.metric, *part.show) or part.injected
    for scale, size in part.scales.items():
        if scale == "cpu":
            assert size.minutes is not None
            assert size.minutes <= 40
        if scale == "h200":
            assert size.minutes is not None
            assert size.minutes <= 10
        assert all(isinstance(lr, float) for lr in size.lrs), "an int would be another run by its fingerprint"
        if part.arms and scale != "full":
            assert len(size.seeds) >= 3, "a claim rests on a mean"


@pytest.mark.slow
@pytest.mark.parametrize(("part", "scale"), RUN, ids=label)
def test_every_run_of_a_preset_composes(part: Part, scale: str) -> None:
    made = sweeps(part, scale)
    size = part.scales[scale]
    jobs = [job for sweep in made for job in sweep.jobs]
    assert len(jobs) == len(part.arms) * len(part.settings_at(scale)) * max(1, len(size.lrs)) * len(size.seeds)
    # An arm that is no other than another, or an axis that changes nothing, would give a run twice.
    assert len({job.digest for job in jobs}) == len(jobs)
    for job in jobs:
        assert not job.composed.config.stability.stop_on_divergence
        assert job.lr in (size.lrs or (None,))
        assert (job.composed.config.trainer.device == "cpu") == (scale == "cpu")


@pytest.mark.slow
def test_rates_and_seeds_are_set_as_composing_sets_them() -> None:
    part = find("small_scale_proxies").parts["lr_sensitivity"]
    (sweep,) = [
        sweep for sweep in sweeps(part, "cpu") if (sweep.jobs[0].arm, sweep.jobs[0].setting) == ("both", "small")
    ]
    command = read_command_line(sweep.words)
    assert len(command.jobs) == len(sweep.jobs) == 21
    for job, overrides in list(zip(sweep.jobs, command.jobs, strict=True))[::3]:
        (composed,) = compose_jobs(command._replace(jobs=[overrides]))
        assert job.digest == fingerprint(composed.plain, __version__)
        assert (job.lr, job.seed) == (composed.config.lr, composed.config.seed)


def test_each_preset_is_used() -> None:
    used = {word.lstrip("+") for part, scale in RUN for word in part.scales[scale].overrides}
    for group in ("experiment", "scale"):
        presets = {f"{group}={path.stem}" for path in (config_dir() / group).glob("*.yaml")}
        assert {word for word in used if word.startswith(f"{group}=")} == presets


def test_a_part_may_set_what_all_parts_have_at_a_scale() -> None:
    """A key occurs once in the command; the part's own value wins, and so does its sweep of rates."""
    words = find("olmo2").parts["init"].scales["h200"].overrides
    assert [word for word in words if word.startswith("trainer.max_steps=")] == ["trainer.max_steps=4000"]
    assert [word for word in words if word.startswith("model.init.std=")] == ["model.init.std=0.0566"]
    assert "optimizer.lr=6e-3" in words
    assert not any("optimizer.lr=" in word for word in find("nvidia").parts["cap"].scales["full"].overrides)
    assert last_of_each_key(["a=1", "+b=2", "a=3"]) == ["a=3", "+b=2"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean nvidia"):
        find("nvida")
    with pytest.raises(ConfigError, match=r"--part normz: textbook has no such part: did you mean norms"):
        find("textbook").select("normz", "cpu")
    with pytest.raises(ConfigError, match=r"--scale full: olmo2 growth: not made at this scale, but --part init has"):
        find("olmo2").select("growth", "full")
    parts, lacking = find("olmo2").select(None, "full")
    assert [part.part for part in parts][:3] == ["init", "norm", "reordered"]
    assert lacking == ["growth", "ngrams", "spikes", "usual"]


def test_a_published_value_is_printed_with_its_uncertainty() -> None:
    (claim,) = [claim for claim in claims() if claim.id == "nvidia-ppl-cap-qknorm"]
    assert claim.printed == "QK-norm: 10.84, QK-norm with cap 50: 11.00 ±0.1 (perplexity)"
    assert claim.where == "arXiv:2410.16682, table 4"


def test_the_methods_that_are_not_built_stand_there() -> None:
    names = {claim.id for claim in claims() if claim.test["kind"] == "not_built"}
    assert names == {
        f"nvidia-{name}"
        for name in ("soft-temp", "soft-clip", "sigma-reparam", "layer-scale", "qkv-norm", "qk-fc-norm")
    }
