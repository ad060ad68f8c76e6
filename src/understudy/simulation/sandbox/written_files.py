"""What was written, read off the upper layers of overlayfs: files, folders, links, and what was deleted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

MOST_ENTRIES = 10_000
"""A data set that is unpacked may have millions of files: so many are listed."""


@dataclass(frozen=True)
class OverlayLayer:
    """The upper layer of one overlay and the folder of the machine below it, both open, and the path that they have."""

    upper: int
    lower: int
    path: str

    def close(self) -> None:
        os.close(self.upper)
        os.close(self.lower)


def list_written(layers: list[OverlayLayer]) -> list[tuple[str, str]]:
    """List pairs of an action (write, mkdir, remove, link) and a path."""
    found: list[tuple[str, str]] = []
    for layer in layers:
        for entry in _walk(layer, layer.upper, ""):
            found.append(entry)
            if len(found) == MOST_ENTRIES:
                return found
    return found


def _walk(layer: OverlayLayer, folder: int, path: str) -> Iterator[tuple[str, str]]:
    """`path` is that of the folder, in the layer."""
    for name in sorted(os.listdir(folder)):
        inside = os.path.join(path, name)
        whole = os.path.join(layer.path, inside)
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISCHR(about.st_mode) and about.st_rdev == 0:
            yield "remove", whole
        elif stat.S_ISLNK(about.st_mode):
            yield "link", whole
        elif stat.S_ISDIR(about.st_mode):
            yield from _walk_folder(layer, folder, name, inside)
        else:
            yield "write", whole


def _walk_folder(layer: OverlayLayer, parent: int, name: str, path: str) -> Iterator[tuple[str, str]]:
    whole = os.path.join(layer.path, path)
    is_new = not _is_folder(layer.lower, path)
    if is_new:
        yield "mkdir", whole
    try:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError:  # the script has taken its own rights away
        return
    try:
        if not is_new and _is_opaque(folder):
            yield "remove", whole
            yield "mkdir", whole
        yield from _walk(layer, folder, path)
    finally:
        os.close(folder)


def _is_folder(lower: int, path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path, dir_fd=lower, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _is_opaque(folder: int) -> bool:
    """Whether the folder was deleted and made again: it hides the one below."""
    try:
        return os.getxattr(folder, "user.overlay.opaque") == b"y"
    except OSError:
        return False
