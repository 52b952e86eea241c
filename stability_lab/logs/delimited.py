"""Tables of text: comma, semicolon or tab, with or without comments above, and names that occur twice."""

from __future__ import annotations

import csv
import io
from collections import Counter
from typing import Any

from stability_lab.logs.cells import number

Row = dict[str, Any]


def read_table(text: str) -> tuple[list[Row], list[str]]:
    """Rows by the names in the header, and what is to be said of them; ValueError for what is no table."""
    header, body, notes = _split(text)
    delimiter = max(",;\t", key=header.count)
    names, doubled = _unique([name.strip() for name in next(csv.reader([header], delimiter=delimiter))])
    notes += doubled
    try:
        records = [record for record in csv.reader(io.StringIO(body, newline=""), delimiter=delimiter) if record]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if len(records) > 1 and len(records[-1]) < len(names) == len(records[-2]) and not body.endswith("\n"):
        notes.append("The last line is unfinished and left out.")
        records.pop()
    # A record that is too long has cells without a name, and one that is too short lacks some.
    return [dict(zip(names, record, strict=False)) for record in records], notes


def _split(text: str) -> tuple[str, str, list[str]]:
    """The line with the names, what follows it, and a note where comments (`#`) stood above."""
    comments = []
    rest = text.lstrip()
    while rest.startswith("#"):
        comment, _, rest = rest.partition("\n")
        comments.append(comment.lstrip("# ").strip())
        rest = rest.lstrip()
    header, _, body = rest.partition("\n")
    note = f"{len(comments)} lines of comments above the table are left out." if len(comments) > 1 else ""
    note = note or "A comment above the table is left out."
    if not comments:
        return header, body, []
    if _is_data(header) and not _is_data(comments[-1]):
        # The names themselves stand in a comment, as numpy.savetxt writes them.
        return comments[-1], rest, [note] if len(comments) > 1 else []
    return header, body, [note]


def _is_data(line: str) -> bool:
    delimiter = max(",;\t", key=line.count)
    return all(not cell.strip() or number(cell) is not None for cell in line.split(delimiter))


def _unique(names: list[str]) -> tuple[list[str], list[str]]:
    """The names, numbered from the second of equal ones on: otherwise one column would hide the other."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    notes = [
        f"The header names {name} {many} times: the first is {name}, the next {name} (2)."
        for name, many in seen.items()
        if many > 1 and name
    ]
    return unique, notes
