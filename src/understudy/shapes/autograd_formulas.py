"""Branches of autograd's formulas, each asked as one question.

C++ decides them by several: whether one stride is 1, and then whether another is the number of rows. Each alone would be
assumed, also where the branch depends on all of them together. Autograd tells which formula it is in, and what it has
kept of its operands: so what is assumed is that the branch leads to what it led to at hand, and the questions that it is
made of are answered by the example.
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
"""Autograd shows -1 as the largest number of 64 bits."""
Formula = Callable[[Any, Truth, bool], Truth | None]
"""From a node of autograd, what C++ asks there, and the answer at hand: the question on which it depends how gradients
are computed. None if that is what C++ asks."""


def find_whole_question(asked: Truth, answer: bool) -> Truth | None:
    """What is to be decided in the place of what C++ asks, whose answer at hand is this one; None if it is that itself."""
    running = _torch.running_node()
    formula = None if running is None else FORMULAS.get(running.name())
    return formula(running, asked, answer) if formula is not None and _is_asked_by_engine() else None


def _is_asked_by_engine() -> bool:
    """Whether it is the formula that asks, and no mode that it calls, which may have the same question on its own account:
    then nothing of Python's is running inside of the backward pass."""
    frame = _caller()
    return frame is None or frame.f_code is _torch.BACKWARD


def _caller() -> FrameType | None:
    """Who asks: the innermost frame outside of here. None in a thread of the engine's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        frame = frame.f_back
    return frame


def _of_product(*operands: str) -> Formula:
    """The gradient of a matrix is laid out in columns if the matrix was: if one stride is 1 and the other one the number
    of rows."""

    def formula(node: object, asked: Truth, answer: bool) -> Truth | None:
        for name in operands:
            rows = _sizes(getattr(node, f"_saved_{name}_sym_sizes"))[0]
            down, along = _sizes(getattr(node, f"_saved_{name}_sym_strides"))
            questions = [conditions.eq(down, 1), conditions.eq(along, rows)]
            if asked in questions:
                return conditions.join("and", questions)
        return None

    return formula


def _of_trace(node: Any, asked: Truth, answer: bool) -> Truth | None:
    """Of a matrix with more rows than columns, the places of the diagonal are cut off behind the last column. With as
    many rows, or one more, all are taken either way."""
    rows, columns = _sizes(node._saved_self_sym_sizes)
    if asked is not conditions.gt(rows, columns):
        return None
    return conditions.ge(rows, columns) if answer else conditions.le(rows, columns + 1)


def _of_running_sum(node: Any, asked: Truth, answer: bool) -> Truth | None:
    """Of one element at most, and of one along the dimension, the gradient is the one that came."""
    shape = _sizes(_torch.shape_of_gradient(node))
    dim = node._saved_dim
    questions = [
        conditions.le(prod(shape), 1),
        conditions.eq(shape[dim if dim < len(shape) else dim - UNSIGNED], 1),
    ]
    return conditions.join("or", questions) if asked in questions else None


def _of_singular_vectors(node: object, asked: Truth, answer: bool) -> Truth | None:
    """Where gradients of U are wanted, matrices with more rows than columns are treated apart, and C++ asks for these
    first. Where none are, whatever the answer, it depends on whether there are at least as many rows."""
    rows = value_of(from_torch(_torch.shape_of_gradient(node, 0)[-2]))
    columns = value_of(from_torch(_torch.shape_of_gradient(node, 2)[-1]))
    if asked is not conditions.gt(rows, columns) or _may_have_gradient(node, 0):
        return None
    return conditions.ge(rows, columns)


def _may_have_gradient(node: object, result: int) -> bool:
    """Whether the backward pass at hand may have a gradient for this result of a node: if none of what it goes through
    was computed from it, there is none, and no hook can make one up."""
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
    return node not in seen  # then the pass came here on a way that can't be seen


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
