"""Words for people: what may reach a terminal, and what somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def printable(text: str) -> str:
    """Without control characters: what stands in somebody's files must not steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def did_you_mean(word: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """' Did you mean ...?' with the closest of `known`, or what there is to choose from.

    `elsewhere`: dotted keys of other places, of which the last part may be what was meant.
    """
    known = sorted(known)
    places = {name.casefold(): [name] for name in known}
    for key in sorted(elsewhere):
        places.setdefault(key.rpartition(".")[2].casefold(), []).append(key)
    word = word.casefold()
    meant = places.get(word) or [key for last, keys in places.items() if f"_{word}_" in f"_{last}_" for key in keys]
    for last in get_close_matches(word, places, n=1, cutoff=0.6) if not meant else ():
        meant = places[last]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    return f"known are {', '.join(known)}" if known else "there is none to set"


def shown(text: object) -> str:
    """`text` for a terminal: control characters and others without a picture become escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text))


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of nested groups, joined by dots. An empty group is a value, so that its name is not lost."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat
