"""A lock that keeps a second process out of a run's folder. The kernel frees it when its holder dies, however."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

_log = logging.getLogger("stability_lab")
LOCK = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class Held(Exception):
    """Another process holds the lock; the text says which, where and since when."""


class Lock:
    """A held lock on `folder`."""

    def __init__(self, folder: Path, descriptor: int):
        self.folder, self._descriptor = folder, descriptor

    def release(self) -> None:
        """Give it free and remove its file; a second call does nothing."""
        if self._descriptor < 0:
            return
        # Removed while it is held: whoever has it open already will find that its name is gone, and try again.
        with suppress(OSError):
            (self.folder / LOCK).unlink()
        os.close(self._descriptor)
        self._descriptor = -1


def acquire(folder: Path) -> Lock:
    """Lock a folder that exists, without waiting. Raises `Held`, or `OSError` where no file can be made there.

    The file of a dead holder is taken over: what counts is the kernel's lock and not that the file exists.
    """
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise Held(holder) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                raise
            _log.warning("%s: this file system has no locks (%s), so a second process is not kept out", folder, error)
        if _is_current(path, descriptor):
            break
        os.close(descriptor)
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with suppress(OSError):  # a full disk has no place for the words, but the lock holds
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
    return Lock(folder, descriptor)


def abandoned(folder: Path) -> bool:
    """Whether a process of this machine died while it held the lock: its file is there, and nobody has it locked.

    Of another machine's process nothing is known, for not every network file system shares its locks.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return json.loads(os.pread(descriptor, 1000, 0))["host"] == socket.gethostname()
    except (OSError, ValueError, KeyError, TypeError):
        return False
    finally:
        os.close(descriptor)


def _is_current(path: Path, descriptor: int) -> bool:
    """Whether the locked file still stands at its path; its last holder may have removed it in the meantime."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    try:
        content = json.loads(os.pread(descriptor, 1000, 0))
        words = f"process {int(content['pid'])} on {content['host']}, since {content['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
    return "".join(c if c.isprintable() else "?" for c in words)
