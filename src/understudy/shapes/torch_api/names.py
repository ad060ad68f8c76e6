"""Torch's classes and functions for symbolic sizes. `dims("batch", "seq")` is a shorter way to make symbolic contexts."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from typing import Any, NoReturn

import torch

from understudy.errors import SymbolMismatch
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.node import SymNode, value_of
from understudy.shapes.sympy_reader import is_sympy
from understudy.shapes.torch_api.foreign_symbols import accept_torch_symbols


class DimDynamic(Enum):
    """How a dimension becomes a size."""

    DYNAMIC = 0
    """A symbol of its own."""
    DUCK = 1
    """A symbol shared with all dimensions of the same example size."""
    STATIC = 2
    """A number."""
    UNBACKED = 3
    """An unbacked symbol."""
    INFER_STRIDE = 4
    """For a stride: inferred from the sizes."""


@dataclass(frozen=True)
class Constraint:
    """A constraint on a dimension; with `warn_only` it is never an error."""

    warn_only: bool


@dataclass(frozen=True)
class StrictMinMaxConstraint(Constraint):
    """The size lies within `vr`, an object with `lower` and `upper`."""

    vr: Any


@dataclass(frozen=True)
class RelaxedUnspecConstraint(Constraint):
    """The size must not be specialised; other guards are allowed."""


@dataclass(frozen=True)
class SymbolicContext:
    """How the sizes of one input become symbols."""


@dataclass(frozen=True)
class SymIntSymbolicContext(SymbolicContext):
    """The constraint on a number among the inputs."""

    constraint: Any


@dataclass(frozen=True)
class StatelessSymbolicContext(SymbolicContext):
    """A `DimDynamic` for each size, and for each stride that does not follow from the sizes."""

    dynamic_sizes: Sequence[Any]
    dynamic_strides: Sequence[Any] | None = None
    constraint_sizes: Sequence[Any] | None = None
    constraint_strides: Sequence[Any] | None = None
    specialize_on: Sequence[Any] | None = None
    view_base_context: Any = None
    shape_ids: dict[int, str | None] | None = None
    """By dimension: `UNBACKED` dimensions of the same name share a symbol."""
    unbacked_bounds: dict[int, tuple[int | None, int | None]] | None = None

    def __post_init__(self) -> None:
        rank = len(self.dynamic_sizes)
        defaults: dict[str, Any] = {
            "dynamic_strides": DimDynamic.INFER_STRIDE,
            "constraint_sizes": None,
            "constraint_strides": None,
        }
        if self.specialize_on is None:
            object.__setattr__(self, "specialize_on", [[]] * rank)
        for name, default in defaults.items():
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, [default] * rank)
            elif len(given) != rank:
                raise ValueError(f"{name}: expected one entry per dimension ({rank}), got {len(given)}")


@dataclass(frozen=True, kw_only=True)
class StatefulSymbolicContext(StatelessSymbolicContext):
    """The same for a tensor that may be converted again: its symbols are named after `tensor_source`."""

    tensor_source: Any = None
    shape_env_to_source_to_symbol_cache: dict[int, dict[str, Any]] = field(default_factory=dict)
    excluded_sizes: tuple[int | None, ...] | None = None
    """Sizes for which torch's compiler has compiled already; ignored here."""


@dataclass(frozen=True)
class SubclassSymbolicContext(StatefulSymbolicContext):
    """The same for a wrapper subclass, with a context for each tensor inside it."""

    inner_contexts: dict[str, Any] = field(default_factory=dict)
    track_outer_size_stride: bool = True


# --- Torch's functions on numbers that may be symbolic --------------------------------

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
SymTypes = SYMBOLIC

# --- specialisation to a plain number, with guards ---------------------------------------------


@accept_torch_symbols
def guard_int(a: int | torch.SymInt) -> int:
    """Specialise to the integer for the hints, with a guard."""
    return a.node.guard_int("", 0) if isinstance(a, torch.SymInt) else _plain(a, int)


@accept_torch_symbols
def guard_float(a: float | torch.SymFloat) -> float:
    """Specialise to the float for the hints, with a guard."""
    return a.node.guard_float("", 0) if isinstance(a, torch.SymFloat) else _plain(a, float)


@accept_torch_symbols
def guard_bool(a: bool | torch.SymBool) -> bool:
    """Specialise to the truth value for the hints, with a guard."""
    return a.node.guard_bool("", 0) if isinstance(a, torch.SymBool) else _plain(a, bool)


@accept_torch_symbols
def guard_scalar(a: Any) -> bool | int | float:
    """`guard_bool`, `guard_int` or `guard_float`, by type."""
    if isinstance(a, (bool, torch.SymBool)):
        return guard_bool(a)
    return guard_int(a) if isinstance(a, (int, torch.SymInt)) else guard_float(a)


@accept_torch_symbols
def guard_size_oblivious(expr: bool | torch.SymBool) -> bool:
    """The answer for sizes that are neither 0 nor 1; an error if it is data-dependent."""
    if not isinstance(expr, torch.SymBool):
        return _plain(expr, bool)
    node: Any = expr.node
    answer = node.shape_env.decisions.decide_for_ordinary(node.value) if type(node) is SymNode else None
    return node.guard_bool("", 0) if answer is None else answer


def _plain(value: object, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(
            f"expected {kind.__name__} or the symbol of one, got {type(value).__name__}: {value!r}"
        )
    return value


# --- promises ----------------------------------------------------------------------------------------------------------


@accept_torch_symbols
def expect_true(a: bool | torch.SymBool, skip: int = 0) -> bool:
    """`torch._check`, returning a bool: decided by hints, else a promise that is checked when the program runs."""
    return a.node.expect_true("", 0) if isinstance(a, torch.SymBool) else bool(a)


@accept_torch_symbols
def constrain_range(a: int | torch.SymInt, *, min: int | None, max: int | None = None) -> None:
    """The number lies between `min` and `max`, both included. For unbacked symbols, that is a promise."""
    promise_range(a, min, max)


def promise_range(
    a: int | torch.SymInt, min: int | None, max: int | None, is_checked_by_operator: bool = False
) -> None:
    """`constrain_range`. `is_checked_by_operator`: an operator checks it when the program runs."""
    if min is not None and max is not None and max < min:
        raise ValueError(f"min must not be greater than max, got {min} and {max}")
    if isinstance(a, int):
        if (min is not None and a < min) or (max is not None and a > max):
            raise ValueError(f"{a} is not in the range from {min} to {max}")
        return
    env, value = a.node.shape_env, a.node.value
    wanted = [] if min is None else [conditions.ge(value, min)]
    wanted += [] if max is None else [conditions.le(value, max)]
    if not all(env.expect(condition, is_checked_by_operator) for condition in wanted):
        raise ValueError(f"{a} is not in the range from {min} to {max}")


@accept_torch_symbols
def _constrain_range_for_size(a: torch.SymInt, min: int | None = None, max: int | None = None) -> None:
    """As `constrain_range`, for a size, which is at least 0."""
    if isinstance(a, (torch.SymFloat, torch.SymBool)):
        raise ValueError(f"expected a size, got the {type(a).__name__} {a}")
    constrain_range(a, min=0 if min is None or min < 0 else min, max=max)


def constrain_unify(a: object, b: object) -> None:
    """The two numbers are equal. For unbacked symbols, that is a promise; raises if the hints differ."""
    same = a == b
    holds = expect_true(same) if isinstance(same, torch.SymBool) else same
    if not holds:
        raise SymbolMismatch(f"{a} and {b} are not the same")


def check_consistent(new: object, old: object) -> None:
    """Two tensors have the same sizes, or two numbers are equal, as `constrain_unify`. Other values are not compared."""
    if isinstance(new, torch.Tensor):
        if not isinstance(old, torch.Tensor) or old.dim() != new.dim():
            raise SymbolMismatch(f"{old} and {new} are not the same")
        for before, now in zip(old.shape, new.shape, strict=True):
            constrain_unify(before, now)
    elif isinstance(new, (int, float, *SYMBOLIC[:2])) and not isinstance(new, bool):
        constrain_unify(old, new)


# --- queries, without guards -----------------------------------------------------------------------


def is_symbolic(val: object) -> bool:
    """Whether this is a symbol, or computed from symbols."""
    return isinstance(val, SYMBOLIC) and bool(val.node.is_symbolic())


def is_nested_int(s: object) -> bool:
    """Whether this is a nested int: the ragged size of a jagged tensor."""
    return isinstance(s, torch.SymInt) and bool(s.node.is_nested_int())


def has_symbolic_sizes_strides(elem: torch.Tensor) -> bool:
    """Whether there are symbols in a tensor's sizes, strides or offset."""
    numbers = (*elem.shape, *elem.stride(), elem.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


def is_concrete_int(a: int | torch.SymInt) -> bool:
    """Whether it is a plain integer, or has only one possible value."""
    return _is_concrete(a, int, torch.SymInt)


def is_concrete_float(a: float | torch.SymFloat) -> bool:
    """Whether it is a plain float, or computed from numbers alone."""
    return _is_concrete(a, float, torch.SymFloat)


def is_concrete_bool(a: bool | torch.SymBool) -> bool:
    """Whether it is a plain bool, or provably true or false."""
    return _is_concrete(a, bool, torch.SymBool)


def _is_concrete(a: object, kind: type, symbolic: type) -> bool:
    if not isinstance(a, (kind, symbolic)):
        raise TypeError(f"expected {kind.__name__} or {symbolic.__name__}, got {type(a).__name__}")
    return has_static_value(a)


@accept_torch_symbols
def has_static_value(a: object) -> bool:
    """Whether it is a plain number, or has only one possible value."""
    if not isinstance(a, SYMBOLIC):
        return True
    node = a.node
    if type(node) is not SymNode:
        return bool(node.is_constant())
    if node.is_plain:
        return True
    if node.kind is bool:
        return node.shape_env.decisions.find_truth(node.value) is not None
    if not isinstance(node.value, Expr):
        return False
    low, high = node.shape_env.facts.interval(node.value)
    return low is not None and low == high


@accept_torch_symbols
def has_guarding_hint(a: object) -> bool:
    """Whether it has a hint."""
    return not isinstance(a, SYMBOLIC) or bool(a.node.has_hint())


@accept_torch_symbols
def guarding_hint_or_throw(a: object) -> Any:
    """The hint, for a decision that the caller records; an error if it is unbacked."""
    node = a.node if isinstance(a, SYMBOLIC) else a
    return node.require_hint() if type(node) is SymNode else a


@accept_torch_symbols
def optimization_hint(a: object, fallback: int | None = None) -> Any:
    """The hint, for choices that do not change results; for unbacked symbols, the value for sizes of `fallback`."""
    if not isinstance(a, SYMBOLIC):
        return a
    return a.node.shape_env.torch_api.optimization_hint(value_of(a), fallback)


# --- combinations, without decisions ------------------------------------------------------------------------------


def sym_and(x: object, *others: object) -> Any:
    """All of them, as one condition."""
    return reduce(operator.and_, others, x)


def sym_or(x: object, *others: object) -> Any:
    """Any of them, as one condition."""
    return reduce(operator.or_, others, x)


def cast_symbool_to_symint_guardless(symbool: bool | torch.SymBool) -> int | torch.SymInt:
    """1 where it holds and 0 where it does not."""
    return torch.sym_ite(symbool, 1, 0) if isinstance(symbool, torch.SymBool) else int(symbool)


def sym_eq(x: object, y: object) -> Any:
    """Whether two sizes, or two sequences of them, are equal, as one condition."""
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and sym_and(True, *map(sym_eq, x, y))
    return x == y


# --- Helpers of torch's module of symbolic shapes, for code written for it ---------------------------------------------

aten = torch.ops.aten
METHODS_THAT_READ = ("size", "stride", "storage_offset", "item")
OPERATORS_THAT_READ = (
    aten.sym_size, aten.sym_size.default, aten.sym_size.int, aten.sym_stride, aten.sym_stride.default,
    aten.sym_stride.int, aten.sym_storage_offset, aten.sym_storage_offset.default, aten.sym_numel.default,
)  # fmt: skip


def create_contiguous(shape: Sequence[object]) -> list[object]:
    """The strides of a contiguous tensor of this shape."""
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, size * strides[0])
    return strides


def is_accessor_node(node: Any) -> bool:
    """Whether a node of a graph reads a number from a tensor: a size, a stride, its offset, its value."""
    if node.op == "call_function":
        return node.target in OPERATORS_THAT_READ
    is_method = node.op == "call_method" and node.target in METHODS_THAT_READ
    return is_method and isinstance(getattr(node.args[0], "meta", {}).get("example_value"), torch.Tensor)


def canonicalize_bool_expr(expr: object) -> Any:
    """The canonical form of a sympy condition: `<` or `<=`, positive terms on both sides, no common factor."""
    # why: sympy is slow, and only tools that have expressions of it want this
    import sympy

    if isinstance(expr, (sympy.And, sympy.Or, sympy.Not)):
        expr = sympy.to_cnf(expr)
    if isinstance(expr, (sympy.And, sympy.Or)):
        return type(expr)(*map(canonicalize_bool_expr, expr.args))
    if not isinstance(expr, sympy.Rel):
        return expr
    turned = {sympy.Gt: sympy.Lt, sympy.Ge: sympy.Le}.get(type(expr))
    difference = sympy.expand(expr.lhs - expr.rhs if turned else expr.rhs - expr.lhs)
    terms = sympy.Add.make_args(difference)
    factors = [term.as_coeff_Mul()[0] for term in terms]
    whole = [abs(factor) for factor in factors if factor.is_Integer]
    common = sympy.gcd_list(whole) if whole and len(whole) == len(factors) and any(whole) else 1
    sides = [
        sympy.Add(
            *[sign * term / common for term, factor in zip(terms, factors, strict=True) if factor * sign > 0]
        )
        for sign in (-1, 1)
    ]
    return (turned or type(expr))(*sides, evaluate=False)


class SymIntEqByExpr:
    """A size that compares equal by its expression, without guards, and can be a dict key."""

    __slots__ = ("val",)

    def __init__(self, val: object) -> None:
        self.val = val.node.expr if isinstance(val, torch.SymInt) else val

    def __repr__(self) -> str:
        return repr(self.val)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SymIntEqByExpr):
            raise AssertionError(f"expected SymIntEqByExpr, got {type(other).__name__}")
        return bool(self.val == other.val)

    def __hash__(self) -> int:
        return hash(self.val)


@dataclass(eq=False)
class TrackedFake:
    """An input of a program: its stand-in or symbolic number, its source, and its symbolic context."""

    fake: Any
    source: Any
    symbolic_context: Any

    def __hash__(self) -> int:
        return hash((self.fake, self.source.name))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TrackedFake)
            and self.fake is other.fake
            and self.source.name == other.source.name
        )


def eval_is_non_overlapping_and_dense(sizes: Sequence[Any], strides: Sequence[object]) -> int:
    """1 if a tensor is dense in some order of its dimensions, 0 if not. May add guards."""
    if len(sizes) == 1:
        return int(bool(strides[0] == 1) or bool(sizes[0] < 2))
    step: Any = 1
    for size, stride in sorted(zip(sizes, strides, strict=True), key=operator.itemgetter(1)):
        if size == 1:
            continue
        if stride != step:
            return 0
        step = step * size
    return 1


SYMPY_INTERP: dict[str, Any] = {
    "IsNonOverlappingAndDenseIndicator": lambda *numbers: eval_is_non_overlapping_and_dense(
        numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    ),
    "cast_symbool_to_symint_guardless": cast_symbool_to_symint_guardless,
    "math": math,
    "torch": torch,
}
"""The names that the code of a guard may use: `eval(code, SYMPY_INTERP, sizes)`."""


def safe_expand(r: object) -> Any:
    """A sympy expression with products of sums expanded; any other value unchanged."""
    return r.expand() if is_sympy(r) and hasattr(r, "expand") else r


def uninteresting_files() -> set[str]:
    """The loaded files of torch and of this library, which are skipped in stack traces of a user's program."""
    libraries = [
        m for name, m in list(sys.modules.items()) if name.partition(".")[0] in ("torch", "understudy")
    ]
    return {file for module in libraries if (file := getattr(module, "__file__", None))} | {"<string>"}


def error() -> NoReturn:
    """A function that must not be called."""
    raise AssertionError("unexpected call")
