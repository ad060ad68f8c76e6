"""Temporary folders that are removed in any case: those of a killed process by the next one.

The owner of a folder holds a lock on a file in it. A folder whose lock is free has been abandoned.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

PREFIX = "understudy-"
LOCK = ".understudy-lock"


@contextmanager
def make_private_folder(parent: str | None = None) -> Iterator[str]:
    """A new folder, in the temporary one if no other is named."""
    remove_abandoned_folders(parent or tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    name = os.path.join(folder, LOCK)
    lock = os.open(f"{name}-new", os.O_RDWR | os.O_CREAT, 0o600)
    owner = os.getpid()
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(f"{name}-new", name)  # others see it when it is locked
        yield folder
    finally:
        os.close(lock)
        if os.getpid() == owner:
            _remove(folder)


def remove_abandoned_folders(parent: str) -> None:
    """Remove the folders of this user whose process has ended."""
    if fcntl is None:
        return
    for folder in Path(parent).glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(str(folder))
            finally:
                os.close(lock)


def _remove(folder: str) -> None:
    """Also folders without rights, which overlayfs makes."""
    for path, names, _ in os.walk(folder):
        for name in names:
            whole = os.path.join(path, name)
            if not os.path.islink(whole):
                with suppress(OSError):
                    os.chmod(whole, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
