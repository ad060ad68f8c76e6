"""Which line of the user's code is running."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_WRAPPERS = ("typing_extensions.py",)  # torch wraps functions by it that it advises against
_NOT_THE_USERS = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _OURS, "<frozen ")


@functools.cache
def is_the_users(file: str) -> bool:
    """Neither torch's, nor ours, nor Python's own library (but packages that are installed inside it)."""
    if file.startswith(_NOT_THE_USERS):
        return False
    if os.path.basename(file) in _WRAPPERS:
        return False
    return not file.startswith(_LIBRARY) or file[len(_LIBRARY) :].split(os.sep)[0].endswith("-packages")


def user_frames() -> Iterator[FrameType]:
    """The frames of code that is neither torch's nor ours, from the innermost outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_the_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def user_line() -> str:
    """The innermost line of code that is neither torch's nor ours: `train.py:88: y = x @ w`."""
    for frame in user_frames():
        name = frame.f_code.co_filename
        source = linecache.getline(name, frame.f_lineno).strip()
        place = f"{short_path(name)}:{frame.f_lineno}"
        return f"{place}: {source}" if source else place
    return ""


_SHAPES = os.path.join(_OURS, "shapes", "")


def is_asked_by_operator() -> bool:
    """Whether a question about sizes comes from what this library knows of an operator, and not from code that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_SHAPES, __file__)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def short_path(name: str) -> str:
    relative = os.path.relpath(name) if os.path.isabs(name) else name
    return name if relative.startswith("..") else relative
