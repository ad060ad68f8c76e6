"""The origin of a node: stack traces of the user's program, and errors that name a node and its line."""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch.fx import Node

from understudy import _torch
from understudy.errors import Context, UnderstudyError
from understudy.fake.inputs import describe_tensors
from understudy.lines import is_user_file, short_path
from understudy.spec.error_context import hint_for

NOWHERE = 0
USERS, BOUNDARY, OTHER = "the user's code", "where a trace begins", "other code"
REMEMBERED = "a call in which many operators run"


class StackTraces:
    """Stack traces by number. A trace is the number of the trace around it and one more line.

    Walking up all frames for each operator would cost as much as recording it. So the frames in which modules are
    called, and in which backward passes run, are remembered while they are active: a walk ends at the first one that is
    unchanged, because then all outer frames are, too.
    """

    def __init__(self) -> None:
        self._texts: list[str] = [""]
        self._inner: dict[tuple[int, int, int], int] = {}
        self._kinds: dict[int, str] = {}
        self._code: list[CodeType] = []  # kept alive: found by id(), which must not be reused
        self._calls: list[tuple[FrameType, int]] = []
        self._depth: dict[int, int] = {}

    def clear(self) -> None:
        self._calls.clear()
        self._depth.clear()

    def trace_of(self, frame: Any) -> str:
        """The stack trace of this frame as text."""
        calls = self._calls
        if calls and calls[-1][0] is frame:
            return self._texts[calls[-1][1]]
        kinds = self._kinds
        new: list[tuple[FrameType, CodeType, bool]] = []
        place = NOWHERE
        kept = 0
        while frame is not None:
            code = frame.f_code
            # By identity: hashing a code object hashes all of its code.
            kind = kinds.get(id(code)) or self._kind_of(code)
            if kind is REMEMBERED:
                depth = self._depth.get(id(frame), -1)
                if depth >= 0 and calls[depth][0] is frame:
                    kept, place = depth + 1, calls[depth][1]
                    break
                new.append((frame, code, True))
            elif kind is USERS:
                new.append((frame, code, False))
            elif kind is BOUNDARY:
                break
            frame = frame.f_back
        if kept < len(calls):
            for call, _ in calls[kept:]:
                del self._depth[id(call)]
            del calls[kept:]
        for frame, code, is_remembered in reversed(new):
            if is_remembered:
                self._depth[id(frame)] = len(calls)
                calls.append((frame, place))
            else:
                key = (place, id(code), frame.f_lasti)
                place = self._inner.get(key) or self._write_trace(key, frame)
        return self._texts[place]

    def _kind_of(self, code: CodeType) -> str:
        self._code.append(code)
        if code in _torch.CALLS_OF_MANY_OPERATORS:
            kind = REMEMBERED
        else:
            kind = USERS if is_user_file(code.co_filename) else BOUNDARY if code in BOUNDARIES else OTHER
        self._kinds[id(code)] = kind
        return kind

    def _write_trace(self, key: tuple[int, int, int], frame: FrameType) -> int:
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
"""Frames outside of these functions are not part of the recorded program."""


def mark_boundary(function: Callable[..., object]) -> Callable[..., object]:
    """Mark a function that calls the user's program: stack traces of nodes end here."""
    BOUNDARIES.add(function.__code__)
    return function


# --- Errors of a propagation: the node, its line in the user's code, its inputs -----------------------------------

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n(?P<source>[^\n]*)')
LIKE_BUILTIN = (TypeError, ValueError, IndexError, KeyError, NotImplementedError, AttributeError, AssertionError)
"""The located error is also an instance of these classes, so that `except` clauses still match."""


class PropagationError(UnderstudyError, RuntimeError):
    """A node that could not be run on stand-ins. `node` is the node; the error itself is the `__cause__`.

    It is also an error of the kind that happened: `except ShapeMismatch:` and `except IndexError:` catch it.
    """

    node: Node

    def __str__(self) -> str:
        lines = [self.reason, f"  node:    {describe_node(self.node)}"]
        where = self.node.meta.get("nn_module_stack")
        if where:
            path = [entry[0] for entry in where.values() if entry and entry[0]]
            lines += [f"  in:      {path[-1]}"] if path else []
        return "\n".join([*lines, *self.context.lines()])


def describe_node(node: Node) -> str:
    """`%mm = call_function aten.mm.default`"""
    return f"%{node.name} = {node.op} {_name_of(node.target)}"


def _name_of(target: object) -> str:
    if isinstance(target, (str, _torch.OpOverload)):
        return str(target)
    return getattr(target, "__name__", None) or str(target)


def locate_error(error: Exception, node: Node, inputs: tuple[object, object]) -> Exception:
    """The error to raise from `error`, which was raised by running this node."""
    if isinstance(error, PropagationError):
        return error  # located already, in an inner graph
    reason, hint = (error.reason, hint_for(error)) if isinstance(error, UnderstudyError) else (str(error), "")
    context = Context(
        _name_of(node.target),
        describe_tensors(*inputs),
        line_of_node(node) or (error.context.line if isinstance(error, UnderstudyError) else ""),
        (error.context.hint if isinstance(error, UnderstudyError) else "") or hint,
    )
    kind: Any = type(error)
    located = _kind_like(kind)(reason or kind.__name__, func=node.target, context=context)
    located.node = node
    return located


@functools.cache
def _kind_like(kind: Any) -> type[PropagationError]:
    """A class that is both `PropagationError` and this kind of error."""
    if issubclass(kind, UnderstudyError):
        bases: tuple[type, ...] = (PropagationError, kind)
    else:
        bases = (PropagationError, *[builtin for builtin in LIKE_BUILTIN if issubclass(kind, builtin)][:1])
    if len(bases) == 1 or issubclass(PropagationError, bases[1]):
        return PropagationError
    members = {"__module__": __name__, "__doc__": PropagationError.__doc__, "__str__": PropagationError.__str__}
    return type("PropagationError", bases, members)


def line_of_node(node: Node) -> str:
    """The innermost line of the user's code in the node's stack trace: `model.py:12: y = x @ w`."""
    shown = ""
    for frame in FRAME.finditer(node.stack_trace or ""):
        if is_user_file(frame["file"]):
            place, source = f"{short_path(frame['file'])}:{frame['line']}", frame["source"].strip()
            shown = f"{place}: {source}" if source and not source.startswith('File "') else place
    return shown
