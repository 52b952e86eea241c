"""Figures of a comparison, each drawn where the runs hold what it shows. matplotlib is imported below this folder only.

It is imported with the first figure that is drawn: `compare` without figures does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stability_lab.compare.comparison import Comparison
from stability_lab.config import ConfigError
from stability_lab.text import shown

FORMATS = ("png", "svg", "pdf")


def draw(
    comparison: Comparison,
    folder: Path,
    formats: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    option: str = "--figures",
) -> list[Path]:
    """Draw the figures that the runs allow into `folder`, which is made, and return their files.

    Each is drawn in each of `formats` (default png), or those of `only`; a file of the same name is replaced.
    ConfigError where the folder cannot be made or written, which names the `option` that gave it.
    """
    # Made first: that it cannot be is said before minutes of drawing.
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _fault(option, folder, "made", error) from error
    from stability_lab.compare.figures import (
        attention_logits,
        curves,
        decision_panels,
        differences,
        learning_rate,
        style,
    )

    figures = {
        "decision": decision_panels.decision,
        "loss_over_lr": learning_rate.loss_over_lr,
        "curves": curves.curves,
        "attention_logits": attention_logits.attention_logits,
        "differences": differences.differences,
    }
    written = []
    for name in figures if only is None else only:
        with style.applied():
            figure = figures[name](comparison)
            if figure is None:
                continue
            for kind in dict.fromkeys(formats or FORMATS[:1]):
                path = folder / f"{name}.{kind}"
                try:
                    style.save(figure, path)
                except OSError as error:
                    raise _fault(option, path, "written", error) from error
                written.append(path)
    return written


def _fault(option: str, path: Path, what: str, error: OSError) -> ConfigError:
    return ConfigError(f"{option}: {shown(path)} cannot be {what} ({error.strerror or error}): give another folder")
