"""Whether the Hugging Face hub can be reached, found out in seconds; what is cached serves without it."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from stability_lab.config import ConfigError
from stability_lab.machine.reach import no_answer

WAIT_S = 3.0
ENDPOINT = "https://huggingface.co"
_NETWORK_ERRORS = {"ConnectionError", "LocalEntryNotFoundError", "TimeoutError", "TransportError", "ProtocolError"}
_NETWORK_ERRORS |= {"Timeout", "ClientConnectionError"}


def use_hub() -> bool:
    """Prepare the hub's libraries; False where they are to use their cache only, because there is no network.

    Without this they would try again and again for half a minute. Call it before they are imported.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    offline = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    if any(value in ("1", "ON", "YES", "TRUE") for value in offline):
        return False
    if no_answer(os.environ.get("HF_ENDPOINT", ENDPOINT), WAIT_S) is None:
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True  # where it was imported before
    return False


def hub_error(key: str, error: BaseException, instead: str) -> ConfigError:
    """One sentence for whatever a library of the hub raised; an access token in it is blotted out."""
    if _is_about_the_network(error) or not use_hub():
        return ConfigError(
            f"{key}: the hub cannot be reached (no network leads there, or HF_HUB_OFFLINE is set), and its cache has "
            f"not got it; connect, copy a filled cache here and set HF_HOME, or use {instead}"
        )
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ConfigError(
        f"{key}: the hub does not give it ({without_tokens(reason)}); check the name and your access, or try again"
    )


def _is_about_the_network(error: BaseException) -> bool:
    """Libraries wrap such an error several times over. The names are base classes of theirs, or of Python's."""
    seen: BaseException | None = error
    while seen is not None:
        if _NETWORK_ERRORS & {cls.__name__ for cls in type(seen).__mro__}:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def without_tokens(text: str) -> str:
    """The text, with what is or looks like an access token of the hub blotted out: of the environment or a login."""
    import huggingface_hub

    known = [os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")]
    for token in filter(None, [*known, huggingface_hub.get_token()]):
        text = text.replace(token, "***")
    return re.sub(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{16,}", "***", text)


@functools.cache
def commit_of(dataset: str, revision: str | None) -> str | None:
    """The commit that a dataset's branch or tag means, asked once a process; None where nobody knows.

    Without a network it is the one in the hub's cache.
    """
    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    online = use_hub()
    import huggingface_hub

    try:
        if online:
            return huggingface_hub.HfApi().dataset_info(dataset, revision=revision, timeout=WAIT_S).sha
        cached = huggingface_hub.snapshot_download(
            dataset, repo_type="dataset", revision=revision, local_files_only=True
        )
        return Path(cached).name
    except Exception:  # whatever it is, opening the dataset will meet it again and say so
        return None
