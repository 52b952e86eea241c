"""Token cache: a small corpus is encoded once, then memory-mapped by every run that uses it."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from stability_lab.config import ConfigError
from stability_lab.data.source import Documents
from stability_lab.data.tokenizer import Tokenizer
from stability_lab.data.tokens.formats import Region, numpy_region
from stability_lab.disk.files import replacing

logger = logging.getLogger("stability_lab")


def cache_dir() -> Path:
    """$STABILITY_LAB_CACHE, else $XDG_CACHE_HOME/stability_lab, else ~/.cache/stability_lab; made if missing.

    If that cannot be written, it is a temporary folder that lives as long as the process, with a logged warning.
    """
    own, xdg = os.environ.get("STABILITY_LAB_CACHE"), os.environ.get("XDG_CACHE_HOME")
    wanted = Path(own) if own else Path(xdg or "~/.cache") / "stability_lab"
    try:
        folder = wanted.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return _temporary_cache(str(wanted), str(error))


@functools.cache
def _temporary_cache(wanted: str, reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="stability_lab-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning("Cache folder %s cannot be written (%s); tokens go to %s.", wanted, reason, folder)
    return folder


def ids_dtype(vocab_size: int) -> np.dtype:
    """Two bytes an id, or four where ids above 65,535 exist."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def entropy(counts: npt.NDArray[np.integer]) -> float:
    """Entropy of the frequencies, in nats."""
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def encoded(path: Path, documents: Documents, tokenizer: Tokenizer) -> Region:
    """The ids of the documents, each followed by the end-of-document id; written to `path` (.npy) if not yet there.

    Two processes that do so at once write the same, and each file appears whole.
    """
    try:
        return numpy_region(path)
    except ConfigError:  # missing, or damaged
        dtype, tokens = ids_dtype(tokenizer.vocab_size), 0
        with replacing(path) as file:
            npy.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (0,)})
            for _, text in documents:
                ids = np.append(tokenizer.encode(text), tokenizer.eos_id).astype(dtype)
                file.write(ids.tobytes())
                tokens += len(ids)
            file.seek(0)  # numpy leaves room in a header, so that an array can grow
            npy.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)})
        return numpy_region(path)
