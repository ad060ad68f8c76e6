"""The origin of a node: stack traces of the user's program, and errors that name a node and its line."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.errors import Context, UnderstudyError
from understudy.fake.inputs import describe_tensors
from understudy.lines import is_user_file, short_path
from understudy.spec.error_context import hint_for

NOWHERE = 0
CAN_BE_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""The frame of a generator may be resumed on another line of its caller: it is not remembered."""
USERS, OPTIMIZER = "the user's code", "an optimizer of torch"
MAY_BEGIN = "code in which a trace may begin"
OTHER = ""
OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep


class StackTraces:
    """Stack traces by number. A trace is the number of the trace around it and one more line.

    Walking up all frames for each operator would cost as much as recording it. What is around a frame does not change while
    the frame runs: so the frames of the user's code, and of torch's optimizers, which call many operators, are remembered
    with the trace around them, and a walk ends at the first one that is known.
    """

    def __init__(self) -> None:
        self._texts: list[str] = [""]
        self._inner: dict[tuple[int, int, int], int] = {}
        self._code: list[CodeType] = []  # kept alive: found by id(), which must not be reused
        self._running: list[FrameType] = []
        """The remembered frames that were running at the last call, outermost first."""
        self._around: dict[FrameType, int] = {}
        """The trace around each of them."""
        self._backward: tuple[FrameType | None, str] = None, ""
        """The frame in which a backward pass runs, and its trace: all operators of the pass have it."""

    def clear(self) -> None:
        self._running.clear()
        self._around.clear()
        self._backward = None, ""

    def trace_of(self, frame: Any) -> str:
        """The stack trace of this frame as text."""
        if frame is self._backward[0]:
            return self._backward[1]
        first, kinds, around, running = frame, KINDS, self._around, self._running
        new: list[Any] = []
        place = None
        while frame is not None:
            kind = kinds[frame.f_code.co_filename]
            if kind:  # most frames are of other code
                if kind is not MAY_BEGIN:
                    place = around.get(frame)
                    if place is not None:
                        break
                    new.append(frame)
                elif id(frame.f_code) in BOUNDARIES:
                    frame = None
                    break
            frame = frame.f_back
        while running and running[-1] is not frame:  # these have returned
            del around[running.pop()]
        if place is None:
            place = NOWHERE
        elif kind is USERS:
            place = self._inner.get((place, id(frame.f_code), frame.f_lasti)) or self._inside(place, frame)
        for frame in reversed(new):
            code = frame.f_code
            if not code.co_flags & CAN_BE_RESUMED:
                around[frame] = place
                running.append(frame)
            if kinds[code.co_filename] is USERS:
                place = self._inside(place, frame)
        text = self._texts[place]
        if first.f_code is RUNS_BACKWARD:
            self._backward = first, text
        return text

    def _inside(self, around: int, frame: FrameType) -> int:
        """The trace with one more line: the current one of this frame."""
        key = around, id(frame.f_code), frame.f_lasti
        return self._inner.get(key) or self._write_trace(key, frame)

    def _write_trace(self, key: tuple[int, int, int], frame: FrameType) -> int:
        code = frame.f_code
        self._code.append(code)
        outer, text = self._texts[key[0]], _line_of(code.co_filename, frame.f_lineno, code.co_name)
        self._inner[key] = len(self._texts)
        self._texts.append(f"{outer}\n{text}" if outer else text)
        return self._inner[key]


@functools.lru_cache(maxsize=10_000)
def _line_of(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    text = f'File "{file}", line {line}, in {function}'
    return f"{text}\n    {source}" if source else text


RUNS_BACKWARD = _torch.engine_code
BOUNDARIES: dict[int, CodeType] = {}
"""Frames outside of these functions are not part of the recorded program. By identity: hashing a code object hashes all of
its code."""


class Kinds(dict[str, str]):
    """The kind of code in each file, found when it is first asked for."""

    def __missing__(self, file: str) -> str:
        kind = USERS if is_user_file(file) else OPTIMIZER if file.startswith(OPTIMIZERS) else OTHER
        return self.setdefault(file, kind)


KINDS = Kinds()


def mark_boundary(function: Callable[..., object]) -> Callable[..., object]:
    """Mark a function that calls the user's program: stack traces of nodes end here."""
    BOUNDARIES[id(function.__code__)] = function.__code__
    KINDS[function.__code__.co_filename] = MAY_BEGIN
    return function


# --- Errors of a propagation: the node, its line in the user's code, its inputs -----------------------------------

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n(?P<source>[^\n]*)')
LIKE_BUILTIN = (
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    NotImplementedError,
    AttributeError,
    AssertionError,
)
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
    members = {
        "__module__": __name__,
        "__doc__": PropagationError.__doc__,
        "__str__": PropagationError.__str__,
    }
    return type("PropagationError", bases, members)


def line_of_node(node: Node) -> str:
    """The innermost line of the user's code in the node's stack trace: `model.py:12: y = x @ w`."""
    shown = ""
    for frame in FRAME.finditer(node.stack_trace or ""):
        if is_user_file(frame["file"]):
            place, source = f"{short_path(frame['file'])}:{frame['line']}", frame["source"].strip()
            shown = f"{place}: {source}" if source and not source.startswith('File "') else place
    return shown
