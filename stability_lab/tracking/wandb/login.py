"""Whether W&B can be used now: a key that wandb itself finds, and a server that answers. Nothing is ever asked for."""

from __future__ import annotations

from stability_lab.machine.reach import no_answer


class BadKey(Exception):
    """A key is configured that wandb refuses to use."""


def problem(timeout_s: float = 5.0) -> str | None:
    """Why nothing can be sent to W&B or read from it now, as half a sentence; None where it can."""
    try:
        import wandb
    except ImportError as error:
        return f"wandb is not installed ({error})"
    try:
        if not has_key():
            return "no W&B key is configured (wandb login, or WANDB_API_KEY)"
    except BadKey as error:
        return f"the W&B key cannot be used ({error})"
    why = no_answer(wandb.setup().settings.base_url, timeout_s)
    return None if why is None else f"the W&B server cannot be reached ({why})"


def has_key() -> bool:
    """Whether wandb finds a key (environment, netrc, its settings file); never asks and never connects.

    Raises `BadKey` for one that it does not take.
    """
    import wandb

    wandb.setup(settings=wandb.Settings(mode="online", silent=True))
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except Exception as error:
        raise BadKey(first_line(error)) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
