"""Errors of a propagation: which node, which line of the user's code stands behind it, what went into it."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch.fx import Node

from understudy import _torch
from understudy.errors import Context, UnderstudyError
from understudy.fake.boundary import hint_for
from understudy.fake.inputs import describe_tensors
from understudy.lines import is_the_users, short_path

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n(?P<source>[^\n]*)')

LIKE_BUILTIN = (TypeError, ValueError, IndexError, KeyError, NotImplementedError, AttributeError, AssertionError)
"""Errors that can be caught under their own names after they were located."""


class PropagationError(UnderstudyError, RuntimeError):
    """A node that could not be run on stand-ins. `node` is the node; the error itself is the `__cause__`.

    It is also an error of the kind that happened: `except ShapeMismatch:` and `except IndexError:` catch it.
    """

    node: Node

    def __str__(self) -> str:
        lines = [self.reason, f"  node:    {described(self.node)}"]
        where = self.node.meta.get("nn_module_stack")
        if where:
            path = [entry[0] for entry in where.values() if entry and entry[0]]
            lines += [f"  in:      {path[-1]}"] if path else []
        return "\n".join([*lines, *self.context.lines()])


def described(node: Node) -> str:
    """`%mm = call_function aten.mm.default`"""
    return f"%{node.name} = {node.op} {_name_of(node.target)}"


def _name_of(target: Any) -> str:
    if isinstance(target, (str, _torch.OpOverload)):
        return str(target)
    return getattr(target, "__name__", None) or str(target)


def at_node(error: Exception, node: Node, inputs: tuple[Any, Any]) -> Exception:
    """The error to raise from `error`, which running this node gave."""
    if isinstance(error, PropagationError):
        return error  # an inner graph knows more
    reason, hint = (error.reason, hint_for(error)) if isinstance(error, UnderstudyError) else (str(error), "")
    context = Context(
        _name_of(node.target),
        describe_tensors(*inputs),
        line_behind(node) or (error.context.line if isinstance(error, UnderstudyError) else ""),
        (error.context.hint if isinstance(error, UnderstudyError) else "") or hint,
    )
    kind: Any = type(error)
    located = _kind_like(kind)(reason or kind.__name__, func=node.target, context=context)
    located.node = node
    return located


@functools.cache
def _kind_like(kind: Any) -> type[PropagationError]:
    """`PropagationError`, as an error of this kind as well."""
    if issubclass(kind, UnderstudyError):
        bases: tuple[type, ...] = (PropagationError, kind)
    else:
        bases = (PropagationError, *[builtin for builtin in LIKE_BUILTIN if issubclass(kind, builtin)][:1])
    if len(bases) == 1 or issubclass(PropagationError, bases[1]):
        return PropagationError
    members = {"__module__": __name__, "__doc__": PropagationError.__doc__, "__str__": PropagationError.__str__}
    return type("PropagationError", bases, members)


def line_behind(node: Node) -> str:
    """The innermost line of the user's code that the node was made from: `model.py:12: y = x @ w`."""
    shown = ""
    for frame in FRAME.finditer(node.stack_trace or ""):
        if is_the_users(frame["file"]):
            place, source = f"{short_path(frame['file'])}:{frame['line']}", frame["source"].strip()
            shown = f"{place}: {source}" if source and not source.startswith('File "') else place
    return shown
