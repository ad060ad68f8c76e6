"""Torch's way to say how each dimension of an input becomes a size. `dims("batch", "seq")` is the shorter one."""

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

from understudy.errors import NotProvided, SymbolMismatch
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.node import SymNode, value_of
from understudy.shapes.sympy_reader import is_sympy


class DimDynamic(Enum):
    """What becomes of a dimension."""

    DYNAMIC = 0
    """A symbol of its own."""
    DUCK = 1
    """A symbol that it shares with dimensions whose example has the same size."""
    STATIC = 2
    """A number."""
    UNBACKED = 3
    """A symbol without example."""
    INFER_STRIDE = 4
    """Of a stride: what follows from the sizes."""


@dataclass(frozen=True)
class Constraint:
    """What must hold of a dimension; `warn_only` is taken note of, no more."""

    warn_only: bool


@dataclass(frozen=True)
class StrictMinMaxConstraint(Constraint):
    """The size lies within `vr`, an object with `lower` and `upper`."""

    vr: Any


@dataclass(frozen=True)
class RelaxedUnspecConstraint(Constraint):
    """The size stays a symbol; what is assumed about it is up to the run."""


@dataclass(frozen=True)
class SymbolicContext:
    """How the sizes of one input become symbols."""


@dataclass(frozen=True)
class SymIntSymbolicContext(SymbolicContext):
    """What must hold of a number among the inputs."""

    constraint: Any


@dataclass(frozen=True)
class StatelessSymbolicContext(SymbolicContext):
    """A `DimDynamic` for each size, and for each stride if these do not follow from the sizes."""

    dynamic_sizes: Sequence[Any]
    dynamic_strides: Sequence[Any] | None = None
    constraint_sizes: Sequence[Any] | None = None
    constraint_strides: Sequence[Any] | None = None
    specialize_on: Sequence[Any] | None = None
    view_base_context: Any = None
    shape_ids: dict[int, str | None] | None = None
    """By dimension: those of the same name are one symbol, if they are `UNBACKED`."""
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
                raise ValueError(f"{name} has {len(given)} entries for {rank} dimensions")


@dataclass(frozen=True, kw_only=True)
class StatefulSymbolicContext(StatelessSymbolicContext):
    """The same for a tensor that may be converted again: its sizes are called after `tensor_source`."""

    tensor_source: Any = None
    shape_env_to_source_to_symbol_cache: dict[int, dict[str, Any]] = field(default_factory=dict)
    excluded_sizes: tuple[int | None, ...] | None = None
    """Sizes that torch's compiler has compiled for already: what is asked here is answered for them as well."""


@dataclass(frozen=True)
class SubclassSymbolicContext(StatefulSymbolicContext):
    """The same for a wrapper subclass, with a context for each tensor inside it."""

    inner_contexts: dict[str, Any] = field(default_factory=dict)
    track_outer_size_stride: bool = True


# --- What code asks of numbers that may be symbols, under the names of torch --------------------------------

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
SymTypes = SYMBOLIC

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


def guard_size_oblivious(expr: bool | torch.SymBool) -> bool:
    """The answer for sizes that are neither 0 nor 1; an error where only data tells."""
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


def expect_true(a: bool | torch.SymBool, skip: int = 0) -> bool:
    """`torch._check` as a question: decided at the example's sizes, else promised for the time that the program runs."""
    return a.node.expect_true("", 0) if isinstance(a, torch.SymBool) else bool(a)


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


def constrain_unify(a: object, b: object) -> None:
    """The two numbers are one. Where they depend on data, that is a promise; an error if they differ at hand."""
    same = a == b
    holds = expect_true(same) if isinstance(same, torch.SymBool) else same
    if not holds:
        raise SymbolMismatch(f"{a} and {b} are not the same")


def check_consistent(new: object, old: object) -> None:
    """Two tensors have the same sizes, or two numbers are one: as `constrain_unify`. Of anything else nothing is asked."""
    if isinstance(new, torch.Tensor):
        if not isinstance(old, torch.Tensor) or old.dim() != new.dim():
            raise SymbolMismatch(f"{old} and {new} are not the same")
        for before, now in zip(old.shape, new.shape, strict=True):
            constrain_unify(before, now)
    elif isinstance(new, (int, float, *SYMBOLIC[:2])) and not isinstance(new, bool):
        constrain_unify(old, new)


# --- what is known of it, without assuming anything -----------------------------------------------------------------------


def is_symbolic(val: object) -> bool:
    """Whether this is a symbol, or computed from symbols."""
    return isinstance(val, SYMBOLIC) and bool(val.node.is_symbolic())


def is_nested_int(s: object) -> bool:
    """Whether this is the size of the rows of a jagged tensor, which is a number of its own kind."""
    return isinstance(s, torch.SymInt) and bool(s.node.is_nested_int())


def has_symbolic_sizes_strides(elem: torch.Tensor) -> bool:
    """Whether there are symbols in a tensor's sizes, strides or offset."""
    numbers = (*elem.shape, *elem.stride(), elem.storage_offset())
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


def _is_concrete(a: object, kind: type, symbolic: type) -> bool:
    if not isinstance(a, (kind, symbolic)):
        raise TypeError(f"expected {kind.__name__} or {symbolic.__name__}, got {type(a).__name__}")
    return has_static_value(a)


def has_static_value(a: object) -> bool:
    """Whether it is a plain number, or can be no other than one."""
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


def has_guarding_hint(a: object) -> bool:
    """Whether there is an example value to decide by."""
    return not isinstance(a, SYMBOLIC) or bool(a.node.has_hint())


def guarding_hint_or_throw(a: object) -> Any:
    """The example value, for a decision that the caller records; an error if only data tells."""
    node = a.node if isinstance(a, SYMBOLIC) else a
    return node.require_hint() if type(node) is SymNode else a


def optimization_hint(a: object, fallback: int | None = None) -> Any:
    """The example value, for choices that change no result; if only data tells, one for sizes like `fallback`."""
    if not isinstance(a, SYMBOLIC):
        return a
    return a.node.shape_env.torch_api.optimization_hint(value_of(a), fallback)


# --- combinations, without deciding ----------------------------------------------------------------------------------------


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


# --- Small helpers under the names that torch's own module of symbolic shapes gives them, for code written for that ---

aten = torch.ops.aten
METHODS_THAT_READ = ("size", "stride", "storage_offset", "item")
OPERATORS_THAT_READ = (
    aten.sym_size, aten.sym_size.default, aten.sym_size.int, aten.sym_stride, aten.sym_stride.default,
    aten.sym_stride.int, aten.sym_storage_offset, aten.sym_storage_offset.default, aten.sym_numel.default,
)  # fmt: skip


def create_contiguous(shape: Sequence[object]) -> list[object]:
    """The strides of a tensor of this shape without gaps."""
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, size * strides[0])
    return strides


def is_accessor_node(node: Any) -> bool:
    """Whether a node of a graph reads a number off a tensor: a size, a stride, its offset, its value."""
    if node.op == "call_function":
        return node.target in OPERATORS_THAT_READ
    is_method = node.op == "call_method" and node.target in METHODS_THAT_READ
    return is_method and isinstance(getattr(node.args[0], "meta", {}).get("example_value"), torch.Tensor)


def canonicalize_bool_expr(expr: object) -> Any:
    """A condition in sympy's words, with one form for each: `<` or `<=`, positive terms on both sides, no common factor."""
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
        sympy.Add(*[sign * term / common for term, factor in zip(terms, factors, strict=True) if factor * sign > 0])
        for sign in (-1, 1)
    ]
    return (turned or type(expr))(*sides, evaluate=False)


class SymIntEqByExpr:
    """A size that is equal to what is written the same: nothing is decided, and it can be a key."""

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
    """An input of a program: its stand-in or symbolic number, where it comes from, and how its sizes became symbols."""

    fake: Any
    source: Any
    symbolic_context: Any

    def __hash__(self) -> int:
        return hash((self.fake, self.source.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrackedFake) and self.fake is other.fake and self.source.name == other.source.name


def eval_is_non_overlapping_and_dense(sizes: Sequence[Any], strides: Sequence[object]) -> int:
    """1 if a tensor has its elements side by side in some order of its dimensions, 0 if not. Symbols are decided upon."""
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
"""What the code of a guard may call, by name: `eval(code, SYMPY_INTERP, sizes)`."""


def safe_expand(r: object) -> Any:
    """A sympy expression with products of sums written out as sums of products; anything else as it is."""
    return r.expand() if is_sympy(r) and hasattr(r, "expand") else r


def uninteresting_files() -> set[str]:
    """The files of torch and of this library, as far as they are loaded: in a stack of a user's program, no lines of his."""
    libraries = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in ("torch", "understudy")]
    return {file for module in libraries if (file := getattr(module, "__file__", None))} | {"<string>"}


def error() -> NoReturn:
    """Stands where no call is expected."""
    raise AssertionError("this was not expected to be called")


# --- names for mechanisms that are not needed here ----------------------------------------------------------------------


class DimConstraints(metaclass=NotProvided):
    """A ShapeEnv solves its conditions while they come up: read env.guards, env.specialisations and env.var_to_range."""


class EqualityConstraint(metaclass=NotProvided):
    """Dimensions that are to be equal get one name: symbolic_context=dims("batch", "seq") for each input."""


class Specialization(metaclass=NotProvided):
    """One graph holds for all sizes that its guards admit: read env.specialisations for sizes that became numbers."""


class ValueRangesSLoc(metaclass=NotProvided):
    """The line that made a bound stands in the guard: guard.line for each guard of env.guards."""


class SymExprPrinter(metaclass=NotProvided):
    """Sizes print themselves: use str(size), or str(size.node.expr) for sympy's way to write it."""


class ShapeGuardPythonPrinter(metaclass=NotProvided):
    """Guards print themselves: use env.produce_guards(...) for Python code, env.format_guards() for text, and
    env.check_source() for a function that checks inputs."""


class ShapeGuardPrinter(metaclass=NotProvided):
    """Guards print themselves: use env.produce_guards(...) for Python code, env.format_guards() for text."""


class LoggingShapeGuardPrinter(metaclass=NotProvided):
    """Guards print themselves: use env.format_guards(verbose=True) for text with the lines that made them."""


class DynamicDimConstraintPrinter(metaclass=NotProvided):
    """Guards print themselves: use env.format_guards(), and env.check(*inputs) to see which of them inputs do not meet."""


class lru_cache(metaclass=NotProvided):
    """Use functools.lru_cache: what a ShapeEnv remembers belongs to it, and goes with it."""


class log_lru_cache_stats(metaclass=NotProvided):
    """Use functools.lru_cache and its cache_info(): what a ShapeEnv remembers is not counted."""
