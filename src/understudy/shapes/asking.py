"""What code asks of numbers that may be symbols, under the names of torch."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch

from understudy.errors import SymbolMismatch
from understudy.shapes import conditions
from understudy.shapes.expr import Expr
from understudy.shapes.node import SymNode, value_of

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

# --- a plain number from here on: whatever it depends on becomes a guard ---------------------------------------------


def guard_int(a: int | torch.SymInt) -> int:
    """The integer that it is at the example's sizes, and has to be from now on."""
    return a.node.guard_int("", 0) if isinstance(a, torch.SymInt) else _plain(a, int)


def guard_float(a: float | torch.SymFloat) -> float:
    """The float that it is at the example's sizes, and has to be from now on."""
    return a.node.guard_float("", 0) if isinstance(a, torch.SymFloat) else _plain(a, float)


def guard_bool(a: bool | torch.SymBool) -> bool:
    """Whether it is true at the example's sizes, and has to be from now on."""
    return a.node.guard_bool("", 0) if isinstance(a, torch.SymBool) else _plain(a, bool)


def guard_scalar(a: Any) -> bool | int | float:
    """`guard_bool`, `guard_int` or `guard_float`, whichever it takes."""
    if isinstance(a, (bool, torch.SymBool)):
        return guard_bool(a)
    return guard_int(a) if isinstance(a, (int, torch.SymInt)) else guard_float(a)


def guard_size_oblivious(condition: bool | torch.SymBool) -> bool:
    """The answer for sizes that are neither 0 nor 1; an error where only data tells."""
    if not isinstance(condition, torch.SymBool):
        return _plain(condition, bool)
    node: Any = condition.node
    answer = node.shape_env.if_ordinary(node.value) if type(node) is SymNode else None
    return node.guard_bool("", 0) if answer is None else answer


def _plain(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(
            f"expected {kind.__name__} or the symbol of one, got {type(value).__name__}: {value!r}"
        )
    return value


# --- promises ----------------------------------------------------------------------------------------------------------


def expect_true(condition: bool | torch.SymBool, skip: int = 0) -> bool:
    """`torch._check` as a question: decided at the example's sizes, else promised for the time that the program runs."""
    return condition.node.expect_true("", 0) if isinstance(condition, torch.SymBool) else bool(condition)


def constrain_range(a: int | torch.SymInt, *, min: int | None, max: int | None = None) -> None:
    """The number lies between `min` and `max`, both included. Where it depends on data, that is a promise."""
    if min is not None and max is not None and max < min:
        raise ValueError(f"there is no number from {min} to {max}")
    if isinstance(a, int):
        if (min is not None and a < min) or (max is not None and a > max):
            raise ValueError(f"{a} is not in the range from {min} to {max}")
        return
    env, value = a.node.shape_env, a.node.value
    wanted = [] if min is None else [conditions.ge(value, min)]
    wanted += [] if max is None else [conditions.le(value, max)]
    if not all(map(env.expect, wanted)):
        raise ValueError(f"{a} is not in the range from {min} to {max}")


def constrain_unify(a: Any, b: Any) -> None:
    """The two numbers are one. Where they depend on data, that is a promise; an error if they differ at hand."""
    same = a == b
    holds = expect_true(same) if isinstance(same, torch.SymBool) else same
    if not holds:
        raise SymbolMismatch(f"{a} and {b} are not the same")


def check_consistent(new: Any, old: Any) -> None:
    """Two tensors have the same sizes, or two numbers are one: as `constrain_unify`. Of anything else nothing is asked."""
    if isinstance(new, torch.Tensor):
        if not isinstance(old, torch.Tensor) or old.dim() != new.dim():
            raise SymbolMismatch(f"{old} and {new} are not the same")
        for before, now in zip(old.shape, new.shape, strict=True):
            constrain_unify(before, now)
    elif isinstance(new, (int, float, *SYMBOLIC[:2])) and not isinstance(new, bool):
        constrain_unify(old, new)


# --- what is known of it, without assuming anything -----------------------------------------------------------------------


def is_symbolic(value: Any) -> bool:
    """Whether this is a symbol, or computed from symbols."""
    return isinstance(value, SYMBOLIC) and bool(value.node.is_symbolic())


def is_nested_int(value: Any) -> bool:
    """Whether this is the size of the rows of a jagged tensor, which is a number of its own kind."""
    return isinstance(value, torch.SymInt) and bool(value.node.is_nested_int())


def has_symbolic_sizes_strides(tensor: torch.Tensor) -> bool:
    """Whether there are symbols in a tensor's sizes, strides or offset."""
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


def is_concrete_int(a: int | torch.SymInt) -> bool:
    """Whether it is a plain integer, or nothing else is left for it to be."""
    return _is_concrete(a, int, torch.SymInt)


def is_concrete_float(a: float | torch.SymFloat) -> bool:
    """Whether it is a plain float, or computed from numbers alone."""
    return _is_concrete(a, float, torch.SymFloat)


def is_concrete_bool(a: bool | torch.SymBool) -> bool:
    """Whether it is a plain truth value, or decided for all sizes that are admitted."""
    return _is_concrete(a, bool, torch.SymBool)


def _is_concrete(a: Any, kind: type, symbolic: type) -> bool:
    if not isinstance(a, (kind, symbolic)):
        raise TypeError(f"expected {kind.__name__} or {symbolic.__name__}, got {type(a).__name__}")
    return has_static_value(a)


def has_static_value(a: Any) -> bool:
    """Whether it is a plain number, or can be no other than one."""
    if not isinstance(a, SYMBOLIC):
        return True
    node = a.node
    if type(node) is not SymNode:
        return bool(node.is_constant())
    if node.is_plain:
        return True
    if node.kind is bool:
        return node.shape_env.known_truth(node.value) is not None
    if not isinstance(node.value, Expr):
        return False
    low, high = node.shape_env.facts.interval(node.value)
    return low is not None and low == high


def has_guarding_hint(a: Any) -> bool:
    """Whether there is an example value to decide by."""
    return not isinstance(a, SYMBOLIC) or bool(a.node.has_hint())


def guarding_hint_or_throw(a: Any) -> Any:
    """The example value, for a decision that the caller records; an error if only data tells."""
    node = a.node if isinstance(a, SYMBOLIC) else a
    return node.require_hint() if type(node) is SymNode else a


def optimization_hint(a: Any, fallback: int | None = None) -> Any:
    """The example value, for choices that change no result; if only data tells, one for sizes like `fallback`."""
    if not isinstance(a, SYMBOLIC):
        return a
    return a.node.shape_env.optimization_hint(value_of(a), fallback)


# --- combinations, without deciding ----------------------------------------------------------------------------------------


def sym_and(first: Any, *others: Any) -> Any:
    """All of them, as one condition."""
    return reduce(operator.and_, others, first)


def sym_or(first: Any, *others: Any) -> Any:
    """Any of them, as one condition."""
    return reduce(operator.or_, others, first)


def cast_symbool_to_symint_guardless(condition: bool | torch.SymBool) -> int | torch.SymInt:
    """1 where it holds and 0 where it does not."""
    return torch.sym_ite(condition, 1, 0) if isinstance(condition, torch.SymBool) else int(condition)


def sym_eq(x: Any, y: Any) -> Any:
    """Whether two sizes, or two sequences of them, are equal, as one condition."""
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and sym_and(True, *map(sym_eq, x, y))
    return x == y
