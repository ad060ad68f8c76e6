"""Where in the user's program a node comes from: the lines that led there, written out once for each place."""

from __future__ import annotations

import functools
import linecache
from types import CodeType, FrameType
from typing import Any

from understudy import _torch
from understudy.lines import is_the_users

NOWHERE = 0
USERS, BOUNDARY, OTHER = "the user's code", "where a trace begins", "other code"


class Places:
    """Stack traces by number. A place is the place around it and one more line.

    Walking up all frames for each operator would cost as much as recording it. The frames in which modules are called
    are remembered while they last: a walk ends at the first that is still the same, for then all around it is too.
    """

    def __init__(self) -> None:
        self._texts: list[str] = [""]
        self._inner: dict[tuple[int, int, int], int] = {}
        self._kinds: dict[int, str] = {}
        self._code: list[CodeType] = []  # kept alive, so that its identity stays its own
        self._calls: list[tuple[FrameType, int]] = []
        self._depth: dict[int, int] = {}

    def forget(self) -> None:
        self._calls.clear()
        self._depth.clear()

    def here(self, frame: Any) -> str:
        """The text of the place that this frame has come to."""
        kinds, module_call = self._kinds, _torch.MODULE_CALL
        new: list[Any] = []
        place = NOWHERE
        kept = 0
        while frame is not None:
            code = frame.f_code
            if code is module_call:
                depth = self._depth.get(id(frame), -1)
                if depth >= 0 and self._calls[depth][0] is frame:
                    kept, place = depth + 1, self._calls[depth][1]
                    break
                new.append(frame)
            else:
                # By identity: the hash of a code object covers all of its code.
                kind = kinds.get(id(code)) or self._kind_of(code)
                if kind is USERS:
                    new.append(frame)
                elif kind is BOUNDARY:
                    break
            frame = frame.f_back
        if kept < len(self._calls):
            for call, _ in self._calls[kept:]:
                del self._depth[id(call)]
            del self._calls[kept:]
        for frame in reversed(new):
            if frame.f_code is module_call:
                self._depth[id(frame)] = len(self._calls)
                self._calls.append((frame, place))
            else:
                key = (place, id(frame.f_code), frame.f_lasti)
                place = self._inner.get(key) or self._written_out(key, frame)
        return self._texts[place]

    def _kind_of(self, code: CodeType) -> str:
        self._code.append(code)
        kind = USERS if is_the_users(code.co_filename) else BOUNDARY if code in BOUNDARIES else OTHER
        self._kinds[id(code)] = kind
        return kind

    def _written_out(self, key: tuple[int, int, int], frame: FrameType) -> int:
        code = frame.f_code
        outer, text = self._texts[key[0]], _line_of(code.co_filename, frame.f_lineno, code.co_name)
        self._inner[key] = len(self._texts)
        self._texts.append(f"{outer}\n{text}" if outer else text)
        return self._inner[key]


@functools.lru_cache(maxsize=10_000)
def _line_of(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    text = f'File "{file}", line {line}, in {function}'
    return f"{text}\n    {source}" if source else text


BOUNDARIES: set[CodeType] = set()
"""What is outside of these is not part of the program that is recorded."""


def begins_here(function: Any) -> Any:
    """Mark a function that calls the user's program."""
    BOUNDARIES.add(function.__code__)
    return function
