"""What follows from the role of a key: six questions, one line each.

They are asked of flat keys (`trainer.threads`), for configurations are read from the disk too, those of other versions
and of somebody's own training loop among them; and of overrides, which may also choose an option (`data`,
`hydra/launcher`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from stability_lab.config.schema import Role, TrainConfig, typed_fields

# They say how many steps there are, and of which kind, but not how long one takes.
_COUNTS_OF_STEPS = ("trainer.max_steps", "trainer.eval_every", "diagnostics.probe_every", "schedule.warmup_steps")
# Resuming checks what they lead to: not fewer steps than were done, and data of the same fingerprint.
_CHECKED_ON_RESUME = ("trainer.max_steps", "data.path", "data.dtype")


def schema_keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Flat name, field and type of each key; an open set is one key."""
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for name, kind in typed_fields(schema).items():
        if dataclasses.is_dataclass(kind):
            yield from schema_keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, fields[name], kind


# Hydra's own keys say where the jobs of a sweep run.
ROLES: Mapping[str, Role] = {**{key: f.metadata["role"] for key, f, _ in schema_keys(TrainConfig)}, "hydra": "place"}


def role_of(key: str) -> Role:
    """The role of a key or of what an override names; what the schema does not know may change a result."""
    for name in accumulate(key.replace("/", ".").split("."), "{}.{}".format):
        if name in ROLES:
            return ROLES[name]
    return "result"


def in_fingerprint(key: str) -> bool:
    """Two runs that differ here are two runs. The machine counts: one and two threads round differently."""
    return role_of(key) in ("result", "seed", "machine")


def in_run_name(override: str) -> bool:
    """The entries `recipe` and `stressor` are only written down, but the overrides that choose them set keys that
    count."""
    return in_fingerprint(override) or override in ("recipe", "stressor")


def may_change_on_resume(key: str) -> bool:
    """A run may go on with another value; with another machine it does so under a notice."""
    return role_of(key) in ("machine", "place", "writing") or key in _CHECKED_ON_RESUME


def tells_arms_apart(key: str) -> bool:
    """`compare` averages over seeds, and reads in the manifest which machine it really was."""
    return role_of(key) == "result"


def in_suggestion(override: str) -> bool:
    """A suggested command repeats it; where its runs lie and which seeds they have it says itself."""
    return role_of(override) in ("result", "machine", "writing")


def in_speed_key(key: str) -> bool:
    """Steps of two jobs that differ here may take another time."""
    return role_of(key) in ("result", "machine") and key not in _COUNTS_OF_STEPS
