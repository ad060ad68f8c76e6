"""Branches of autograd's formulas, each decided with one guard.

C++ decides them by several comparisons: whether one stride is 1, and then whether another is the number of rows. Each
would become a guard, although the branch depends on all of them together. Autograd tells which formula is running, and
what was saved of its operands: so one guard is recorded for the condition of the whole branch, and the single
comparisons are answered by the hints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from math import prod
from types import FrameType
from typing import Any

from torch import Tensor

from understudy import _torch
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.floats import Truth
from understudy.shapes.node import value_of
from understudy.shapes.sizes import from_torch

UNSIGNED = 1 << 64
"""Autograd returns -1 as an unsigned 64-bit number."""
Formula = Callable[[Any, Truth, bool], Truth | None]
"""From an autograd node, the condition that C++ asks, and its value by hints: the condition of the whole branch. None
if that is the condition that C++ asks."""


def find_branch_condition(asked: Truth, answer: bool) -> Truth | None:
    """The condition to decide in the place of the one that C++ asks, whose value by hints is `answer`; None for the
    same one."""
    running = _torch.running_node()
    formula = None if running is None else FORMULAS.get(running.name())
    return formula(running, asked, answer) if formula is not None and _is_called_by_engine() else None


def _is_called_by_engine() -> bool:
    """Whether autograd's C++ formula asks, and not a mode that it calls: then no Python frame is running inside the
    backward pass."""
    frame = _caller()
    return frame is None or frame.f_code is _torch.BACKWARD


def _caller() -> FrameType | None:
    """The innermost frame outside of this package. None in a thread of the autograd engine."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        frame = frame.f_back
    return frame


def _of_product(*operands: str) -> Formula:
    """The gradient of a matrix is column-major if the matrix is: if one stride is 1 and the other one the number of
    rows."""

    def formula(node: object, asked: Truth, answer: bool) -> Truth | None:
        for name in operands:
            strides = _sizes(getattr(node, f"_saved_{name}_sym_strides"))
            if not strides:  # nobody asks for the gradient of this operand
                continue
            rows = _sizes(getattr(node, f"_saved_{name}_sym_sizes"))[0]
            down, along = strides
            questions = [conditions.eq(down, 1), conditions.eq(along, rows)]
            if asked in questions:
                return conditions.join("and", questions)
        return None

    return formula


def _of_trace(node: Any, asked: Truth, answer: bool) -> Truth | None:
    """For a matrix with more rows than columns, the indices of the diagonal are cut off after the last column. With
    equally many rows, or one more, both branches give the same."""
    rows, columns = _sizes(node._saved_self_sym_sizes)
    if asked is not conditions.gt(rows, columns):
        return None
    return conditions.ge(rows, columns) if answer else conditions.le(rows, columns + 1)


def _of_running_sum(node: Any, asked: Truth, answer: bool) -> Truth | None:
    """For at most one element, or size 1 along the dimension, the gradient is passed through."""
    shape = _sizes(_torch.shape_of_gradient(node))
    dim = node._saved_dim
    questions = [
        conditions.le(prod(shape), 1),
        conditions.eq(shape[dim if dim < len(shape) else dim - UNSIGNED], 1),
    ]
    return conditions.join("or", questions) if asked in questions else None


def _of_singular_vectors(node: object, asked: Truth, answer: bool) -> Truth | None:
    """With a gradient of U, matrices with more rows than columns are a special case, for which C++ asks first. Without
    one, only whether there are at least as many rows as columns matters."""
    rows = value_of(from_torch(_torch.shape_of_gradient(node, 0)[-2]))
    columns = value_of(from_torch(_torch.shape_of_gradient(node, 2)[-1]))
    if asked is not conditions.gt(rows, columns) or _may_have_gradient(node, 0):
        return None
    return conditions.ge(rows, columns)


def _may_have_gradient(node: object, result: int) -> bool:
    """Whether the current backward pass may have a gradient for this result of a node: only if a root of the pass
    depends on it."""
    caller = _caller()
    if caller is None or caller.f_code is not _torch.BACKWARD:
        return True
    with _torch.NoFunctionModes():
        edges = [
            (root.grad_fn if isinstance(root, Tensor) else root.node, root.output_nr)
            for root in caller.f_locals[_torch.STARTED_FROM]
        ]
    seen: set[Any] = set()
    while edges:
        user, position = edges.pop()
        if user is node and position == result:
            return True
        if user is not None and user not in seen:
            seen.add(user)
            edges.extend(user.next_functions)
    return node not in seen  # the pass came here on a path that is not visible


def _sizes(numbers: Iterable[object]) -> list[Any]:
    return [value_of(from_torch(number)) for number in numbers]


FORMULAS: dict[str, Formula] = {
    "MmBackward0": _of_product("self", "mat2"),
    "AddmmBackward0": _of_product("mat1", "mat2"),
    "TraceBackward0": _of_trace,
    "CumsumBackward0": _of_running_sum,
    "LinalgSvdBackward0": _of_singular_vectors,
}
"""By the name of the node."""
