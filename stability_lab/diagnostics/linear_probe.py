"""A linear classifier on a frozen model's features: has pre-training made something of texts that can be read off?

A text's feature is the mean of the model's last hidden states over its tokens; of a text longer than the context a few
windows count, spread over it. The classifier is a logistic regression on standardised features (scikit-learn), trained
and judged in 5 folds that never divide a group. Intervals are those of 95 % under resampling whole groups, because
texts of one group (speeches of one president) are not independent.
"""

from __future__ import annotations

import csv
import importlib.metadata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stability_lab.config import ConfigError
from stability_lab.data.source import TokenData
from stability_lab.data.sources.corpus import Sotu
from stability_lab.diagnostics.probe import evaluating
from stability_lab.model.transformer import GPT

FOLDS = 5
WINDOWS = 8  # of a long text
RESAMPLES = 2000
SOTU = "sotu"
"""The embedded examples: annual messages of the two parties of today, by party; groups are presidents."""


class Examples(NamedTuple):
    texts: Sequence[str]
    labels: Sequence[str]
    groups: Sequence[str]


def read_examples(source: str) -> Examples:
    """`sotu`, or a CSV file with the columns text and label and, if texts belong together, group."""
    if source == SOTU:
        return _parties()
    try:
        with Path(source).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--probe={source}: cannot be read ({reason}); give a CSV file, or sotu") from error
    if not rows or not {"text", "label"} <= rows[0].keys() or any(not row["text"] or not row["label"] for row in rows):
        raise ConfigError(f"--probe={source}: every row must have a text and a label, in columns of these names")
    groups = [row.get("group") or f"row {i}" for i, row in enumerate(rows)]
    return Examples([row["text"] for row in rows], [row["label"] for row in rows], groups)


def _parties() -> Examples:
    texts = {name.removesuffix(".txt"): text.decode() for name, text in Sotu().documents()}
    found = importlib.metadata.distribution("sotu").locate_file("sotu/data/metadata.csv")
    with Path(str(found)).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["party"] in ("Democratic", "Republican")]
    return Examples(
        [texts[row["fileid"]] for row in rows], [row["party"] for row in rows], [row["president_id"] for row in rows]
    )


@torch.no_grad()
def text_features(model: GPT, data: TokenData, texts: Sequence[str], batch_size: int) -> NDArray[np.float64]:
    """(texts, D). An encoder reads [CLS] text [SEP]; what is shorter than the context is padded, and padding unseen."""
    if data.tokenizer is None:
        raise ConfigError("--probe: the ids of this run's data have no known text, so no text can be read with them")
    frame = ([], []) if data.special is None else ([data.special.cls], [data.special.sep])
    room = model.config.seq_len - len(frame[0]) - len(frame[1])
    rows, owners = [], []
    for owner, text in enumerate(texts):
        ids = data.tokenizer.encode(text.encode()).astype(np.int64)
        last = max(len(ids) - room, 0)
        for start in dict.fromkeys(np.linspace(0, last, min(WINDOWS, -(-len(ids) // room))).astype(int).tolist()):
            rows.append(np.array([*frame[0], *ids[start : start + room], *frame[1]], dtype=np.int64))
            owners.append(owner)
    device, pad = model.embed.weight.device, 0 if data.special is None else data.special.pad
    sums, counts = np.zeros((len(texts), model.config.d_model)), np.zeros(len(texts))
    with evaluating(model):
        for first in range(0, len(rows), batch_size):
            part = rows[first : first + batch_size]
            length = max(map(len, part))
            tokens = torch.from_numpy(
                np.stack([np.pad(row, (0, length - len(row)), constant_values=pad) for row in part])
            )
            padding = torch.tensor([[place >= len(row) for place in range(length)] for row in part])
            x_BTD, _ = model.features(tokens.to(device), None, padding.to(device) if padding.any() else None)
            sum_BD = x_BTD.double().cpu().masked_fill(padding[..., None], 0.0).sum(1).numpy()
            np.add.at(sums, owners[first : first + len(part)], sum_BD)
            np.add.at(counts, owners[first : first + len(part)], [len(row) for row in part])
    return sums / np.maximum(counts, 1)[:, None]


def right_answers(features: NDArray[np.float64], examples: Examples) -> NDArray[np.bool_]:
    """Which texts a classifier that did not see their group gives their label."""
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise ConfigError("--probe: needs scikit-learn: pip install 'stability-lab[probe]'") from error
    labels, groups = np.array(examples.labels), np.array(examples.groups)
    fewest = min((len(set(groups[labels == label])) for label in set(examples.labels)), default=0)
    if len(set(examples.labels)) < 2 or fewest < 2:
        raise ConfigError("--probe: there must be two labels or more, each in two groups of texts or more")
    folds = StratifiedGroupKFold(min(FOLDS, fewest), shuffle=True, random_state=0)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return cross_val_predict(classifier, features, labels, groups=groups, cv=folds) == labels


def linear_probe(trained: GPT, initial: GPT, data: TokenData, examples: Examples, batch_size: int) -> dict[str, Any]:
    """Accuracy of the trained model and of the same one at initialisation, `[value, low, high]`, their difference, and
    the share of the most frequent label."""
    right = [
        right_answers(text_features(model, data, examples.texts, batch_size), examples).astype(float)
        for model in (trained, initial)
    ]
    return {
        "texts": len(examples.texts),
        "groups": len(set(examples.groups)),
        "majority": Counter(examples.labels).most_common(1)[0][1] / len(examples.labels),
        "trained": _interval(right[0], examples.groups),
        "initial": _interval(right[1], examples.groups),
        "difference": _interval(right[0] - right[1], examples.groups),
    }


def _interval(values: NDArray[np.float64], groups: Sequence[str]) -> list[float]:
    """Mean, and the 2.5th and 97.5th percentile of the means of resampled groups."""
    _, group = np.unique(groups, return_inverse=True)
    sums, sizes = np.bincount(group, values), np.bincount(group)
    drawn = np.random.default_rng(0).integers(0, len(sizes), (RESAMPLES, len(sizes)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    return [float(values.mean()), *(float(q) for q in np.percentile(means, (2.5, 97.5)))]
