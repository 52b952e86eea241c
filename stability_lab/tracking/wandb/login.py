"""Whether W&B can be used now: a key that wandb itself finds, and a server that answers. Nothing is ever asked for."""

from __future__ import annotations

import ssl
import threading
import urllib.error
import urllib.request


class BadKey(Exception):
    """A key is configured that wandb refuses to use."""


class Unreachable(Exception):
    """The server gave no answer."""


def problem(timeout_s: float = 5.0) -> str | None:
    """Why nothing can be sent to W&B or read from it now, as half a sentence; None where it can."""
    try:
        import wandb
    except ImportError as error:
        return f"wandb is not installed ({error})"
    try:
        if not has_key():
            return "no W&B key is configured (wandb login, or WANDB_API_KEY)"
        reach(wandb.setup().settings.base_url, timeout_s)
    except BadKey as error:
        return f"the W&B key cannot be used ({error})"
    except Unreachable as error:
        return f"the W&B server cannot be reached ({error})"
    return None


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


def reach(url: str, timeout_s: float) -> None:
    """Raise `Unreachable` unless the server gives an answer of any kind within `timeout_s`."""
    outcome: list[str] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError as answer:
            answer.close()
        except Exception as error:
            reason = getattr(error, "reason", error)
            # A certificate that Python does not know is for wandb, which has its own settings, to judge.
            if not isinstance(reason, ssl.SSLError):
                outcome.append(f"{url}: {reason}")
                return
        outcome.append("")

    # Looking up a name has no timeout of its own, hence the thread.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    trouble = outcome[0] if outcome else f"{url}: no answer within {timeout_s:g} s"
    if trouble:
        raise Unreachable(trouble)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
