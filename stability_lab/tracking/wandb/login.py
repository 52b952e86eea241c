"""Whether W&B can be used now: a key that wandb itself finds, and a server that answers. Nothing is ever asked for."""

from __future__ import annotations

from stability_lab.machine.reach import no_answer
from stability_lab.tracking.wandb.environment import drop_unusable

NO_KEY = "no W&B key is configured (wandb login, or WANDB_API_KEY)"


def problem(timeout_s: float = 5.0) -> str | None:
    """Why nothing can be sent to W&B or read from it now, as half a sentence; None where it can.

    wandb itself finds the key (environment, netrc, its settings file).
    """
    try:
        import wandb
    except ImportError as error:
        return f"wandb is not installed ({error})"
    drop_unusable()
    wandb.setup(settings=wandb.Settings(mode="online", silent=True))
    try:
        if not wandb.login(prompt=False, verify=False):
            return NO_KEY
    except Exception as error:
        return f"the W&B key cannot be used ({first_line(error)})"
    why = no_answer(wandb.setup().settings.base_url, timeout_s)
    return None if why is None else f"the W&B server cannot be reached ({why})"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
