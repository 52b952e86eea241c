"""The look of an arm, the same in every figure: each stabilizer has its own colour and marker, wherever it is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from zlib import crc32

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow, which is too pale for lines;
# and darker ones of Paul Tol's for combinations.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
COMBINED_COLOURS = ("#332288", "#999933", "#8C564B", "#882255", "#707070")
# Markers and dashes repeat the distinction for print in black and white. Spikes (v) and divergence (x) have their own.
MARKERS, COMBINED_MARKERS = ("s", "^", "D", "P", "p"), ("*", "<", ">", "d", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1.2, 1, 1.2)), (0, (8, 2)))
# The place in this list makes the look, so that a new name goes to its end; first what is often compared.
STABILIZERS = (
    *("qknorm", "softcap", "zloss", "final_softcap", "rmsnorm", "reordered_norm", "layernorm", "perinorm"),
    *("postnorm", "dynamic_scaling", "attn_scale", "ln_scaling", "embed_scale"),
)
_PLACES = len(COLOURS) * len(MARKERS)  # that differ in colour or marker; those after the list are free
_FREE = _PLACES - len(STABILIZERS)


@dataclass(frozen=True)
class Look:
    """How one arm is drawn in every figure."""

    colour: str
    marker: str
    dashes: Any

    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dashes}

    def point(self, filled: bool = True) -> dict[str, Any]:
        return {
            "color": self.colour,
            "linestyle": "none",
            "marker": self.marker,
            "markerfacecolor": self.colour if filled else "white",
            "markeredgewidth": 0.9,
        }


BASELINE = Look("#000000", "o", DASHES[0])


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """By arm, the baseline first. No two are alike; only arms of other names and keys depend on which others there are.

    `none` is black, and so is a baseline that is no stabilizer.
    """
    found: dict[str, Look] = {}
    for arm in sorted(arms, key=lambda arm: (arm not in ("none", *STABILIZERS), "+" not in arm)):
        found[arm] = next(look for look in _wanted(arm, arm == arms[0]) if look not in found.values())
    return {arm: found[arm] for arm in arms}


def _wanted(arm: str, is_baseline: bool) -> Iterator[Look]:
    """Its own look, where its name has one, and then the free ones."""
    parts = arm.split("+")
    if arm in STABILIZERS:
        yield _single(_place(arm))
    elif len(parts) > 1 and all(map(str.isidentifier, parts)):
        row, column = divmod(sum(1 << _place(part) for part in parts), len(COMBINED_COLOURS))
        marker = COMBINED_MARKERS[row % len(COMBINED_MARKERS)]
        yield Look(COMBINED_COLOURS[column], marker, DASHES[(row + column) % len(DASHES)])
    elif arm == "none" or is_baseline:
        yield BASELINE
    # A stabilizer of one's own begins at a place that its name chooses; values of a key take their turns.
    start = _place(arm) if arm.isidentifier() else len(STABILIZERS)
    for turn in count():
        place = len(STABILIZERS) + (start - len(STABILIZERS) + turn) % _FREE
        yield _single(place, turn // _FREE)


def _place(name: str) -> int:
    return STABILIZERS.index(name) if name in STABILIZERS else len(STABILIZERS) + crc32(name.encode()) % _FREE


def _single(place: int, other_dashes: int = 0) -> Look:
    """Six colours and five markers meet only once in thirty places."""
    dashes = DASHES[(1 + place + other_dashes) % len(DASHES)]
    return Look(COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)], dashes)
