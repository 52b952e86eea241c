"""What W&B's variables of the environment ask for; one that W&B cannot use costs a warning, and nothing else."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from stability_lab.text import shown

PROJECT = "stability_lab"
NO_PROJECT = "/\\#?%:"  # characters that the name of a project cannot have
_MODES = {"online": "online", "offline": "offline", "disabled": "disabled"}
_MODES |= {"run": "online", "shared": "online", "dryrun": "offline"}  # older words
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_RIGHT = {
    "WANDB_MODE": "online, offline or disabled",
    "WANDB_BASE_URL": "an address such as https://api.wandb.ai",
    "WANDB_PROJECT": "a name without / \\ # ? % :",
}
_OURS = frozenset(("WANDB_ERROR_REPORTING",))  # variables that we set
_log = logging.getLogger("stability_lab")


def asked_mode(environ: Mapping[str, str]) -> str:
    """`disabled` by WANDB_DISABLED, else the mode of WANDB_MODE, else `auto`.

    Any other word means `offline`, so that nothing is sent and nothing is lost.
    """
    if environ.get("WANDB_DISABLED", "").strip().lower() in _YES:
        return "disabled"
    word = environ.get("WANDB_MODE", "").strip().lower()
    return _MODES.get(word, "offline") if word else "auto"


def is_set_up(environ: Mapping[str, str]) -> bool:
    """Whether anything shows that W&B is used here: a variable of its own, a key, or settings.

    The package itself, which knows better, takes seconds to load and to start.
    """
    if any(value for name, value in environ.items() if name.startswith("WANDB_") and name not in _OURS):
        return True
    home = Path(environ.get("HOME", "~")).expanduser()
    settings = (home / ".config" / "wandb" / "settings", Path("wandb") / "settings")
    try:
        netrc = Path(environ.get("NETRC") or home / ".netrc").read_text(encoding="utf-8", errors="replace")
    except OSError:
        netrc = ""
    return "wandb" in netrc or any(path.is_file() for path in settings)


def project_of(environ: Mapping[str, str]) -> str:
    """WANDB_PROJECT, where W&B can use it."""
    name = environ.get("WANDB_PROJECT", "")
    return name if name and not set(name) & set(NO_PROJECT) else PROJECT


def drop_unusable() -> None:
    """Take what W&B would not start with out of this process's environment, with one warning each.

    An empty variable counts as one that is not set. Whether a run goes on is said by `resume=RUN` alone.
    """
    for name, why in unusable(os.environ).items():
        value = os.environ.pop(name)
        if value and name == "WANDB_MODE":
            os.environ[name] = asked_mode({name: value})  # for the next run of this process, too
        if value:
            _log.warning("%s=%s is ignored: %s", name, shown(value), why)


def unusable(environ: Mapping[str, str]) -> dict[str, str]:
    """Variable -> what would be right, of those that wandb itself refuses or that we know better."""
    import wandb

    found = {}
    for name, value in environ.items():
        if not name.startswith("WANDB_"):
            continue
        right = f"it must be {_RIGHT[name]}" if name in _RIGHT else f"wandb {wandb.__version__} takes no such value"
        if name == "WANDB_RESUME":
            found[name] = "a run goes on by resume=RUN"
        elif name == "WANDB_DISABLED" and value.strip().lower() not in (*_YES, *_NO):
            found[name] = "it must be true or false"
        elif not value or (name == "WANDB_PROJECT" and project_of(environ) != value):
            found[name] = right
        else:
            try:
                wandb.Settings().update_from_env_vars({name: value})
            except Exception:  # pydantic's and wandb's own
                found[name] = right
    return found
