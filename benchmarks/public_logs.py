"""What `score` says of logs in public repositories: docs/public_logs.md is its output.

    python -m benchmarks.public_logs FOLDER > docs/public_logs.md

FOLDER holds the files of public_logs.json as `OWNER/NAME/PATH`, each at the commit that is named there. A file that is
missing or differs by its hash ends the script: a table of other files would be another table.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from stability_lab import cli

MANIFEST = Path(__file__).with_suffix(".json")
# Notes that every log of its kind has: the page says them once.
USUAL = ("One value every", "The log has no gradient norm", "transformers leaves NaN", "The loss is ")
PAGE = """# Public logs: what `score` says of them

{files} files of {repositories} public repositories, in {formats} formats. The files are not part of this
repository: what follows are facts about them, made by [public_logs.py](../benchmarks/public_logs.py). The
[manifest](../benchmarks/public_logs.json) has the commit and the hash of each file, so that whoever has the files
gets the same table. Rows and steps of most were counted a second time without this package, and the curves were
looked at.

Rows are all that the file holds, with those left out in brackets: rows of validation, or of an earlier attempt.
Where a file holds several runs, steps are those of the longest. A note that all logs of its kind have (strides, no
gradient norm, what transformers leaves out) is not repeated.

| file | format | rows | steps | verdict | notes |
|---|---|---|---|---|---|
{table}

Right refusals among them: losses of validation alone, a table of one row a run, a pointer of Git LFS, output that
ends before the first step, iterations that were all skipped. What `score` could not use: lines without a step
(`Epoch 1 - Batch loss: 2.5`), a step and its loss on different lines, columns without a known name. Three of the
eight runs of one W&B export did diverge (3.7 to 6.0, 3.9 to 6.7 and 8.0 to 11.8 nats). The golden values and the
Keras CSV had been judged wrongly until steps that were only planned, and trainings below each other, were told
apart.

No public file was found of nanotron, Lightning's progress bar, OLMo's and torchtitan's output: these are tested with
lines of their documented form alone.
"""


def scored(path: Path) -> list[dict[str, Any]] | str:
    """The blocks of a file, or the sentence by which it is refused. It is read under its name in the manifest."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = cli.run(["score", str(path), "--format", "json"])
    return (
        json.loads(out.getvalue())
        if code == 0
        else error.getvalue().strip().removeprefix(f"error: {path}").lstrip(": ")
    )


def cells(blocks: list[dict[str, Any]]) -> tuple[str, str, str, str, str]:
    longest = max(blocks, key=lambda block: block["steps"]["values"])
    steps, runs = longest["steps"], f"{len(blocks)} runs: " if len(blocks) > 1 else ""
    rows, left = (
        sum(values) for values in zip(*((b["rows"], sum(b["left_out"].values())) for b in blocks), strict=True)
    )
    verdicts = Counter(block["verdict"] for block in blocks)
    if runs:
        verdict = runs + ", ".join(f"{n} {word}" for word, n in verdicts.most_common())
    else:
        verdict = f"{longest['verdict']}. {re.split(r'(?<=[a-z0-9])[;:] ', longest['reason'])[0].rstrip('.')}"
    notes = dict.fromkeys(note for block in blocks for note in block["notes"] if not note.startswith(USUAL))
    stride = "" if steps["stride"] == 1 else f", every {steps['stride']}"
    return (
        longest["format"],
        f"{rows:,}" + (f" ({left:,})" if left else ""),
        f"{steps['first']:,} to {steps['last']:,}{stride}",
        verdict,
        " ".join(list(notes)[:3]),
    )


def main(folder: Path) -> None:
    files = json.loads(MANIFEST.read_text(encoding="utf-8"))
    os.chdir(folder)  # the answers name files as the manifest does
    lines, formats = [], set()
    for file in files:
        path = Path(file["repository"], file["path"])
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != file["sha256"]:
            sys.exit(f"{folder / path} is missing, or not the file of commit {file['commit']}")
        found = scored(path)
        row = (
            ("-", "-", "-", f"refused: {re.split(', it begins|: give ', found)[0][:160]}", "")
            if isinstance(found, str)
            else cells(found)
        )
        formats.add(row[0])
        name = f"{file['repository']}: {file['path']}"
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", *row)) + " |")
    repositories = len({file["repository"] for file in files})
    print(
        PAGE.format(files=len(files), repositories=repositories, formats=len(formats - {"-"}), table="\n".join(lines)),
        end="",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
