"""SymNode: a symbolic number, as torch's `SymInt`, `SymFloat` and `SymBool` hold it, and as specs and rules use it.

To torch it is a node: C++ and torch's shape functions call its methods (`add`, `eq`, `guard_bool`, …) with other nodes.
To our rules it is a number: `size * 2`, `size == 1`, `max(a, b)`. A comparison answers True or False; the environment
decides it, by proof or by the example at hand, and records what was assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy.shapes import conditions
from understudy.shapes.expr import Expr

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

_SYMBOLIC = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}


class SymNode:
    """One for each value of an environment: equal values are the same node."""

    __slots__ = ("__weakref__", "_symbolic", "kind", "shape_env", "value")

    def __init__(self, shape_env: ShapeEnv, value: Any, kind: type) -> None:
        self.shape_env = shape_env
        self.value = value
        self.kind = kind
        self._symbolic: Any = None

    # --- what it is --------------------------------------------------------------------------------------

    @property
    def symbolic(self) -> Any:
        """The `SymInt`, `SymFloat` or `SymBool` of this node; the number itself if it is constant."""
        if self._symbolic is None:
            self._symbolic = self.value if self.is_constant() else _SYMBOLIC[self.kind](self)
        return self._symbolic

    def is_int(self) -> bool:
        return self.kind is int

    def is_float(self) -> bool:
        return self.kind is float

    def is_bool(self) -> bool:
        return self.kind is bool

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return isinstance(self.value, (int, float))

    @property
    def constant(self) -> Any:
        return self.value if self.is_constant() else None

    @property
    def pytype(self) -> type:
        return self.kind

    def maybe_as_int(self) -> int | None:
        return self.value if isinstance(self.value, int) else None

    def maybe_as_float(self) -> float | None:
        return self.value if isinstance(self.value, float) else None

    def maybe_as_bool(self) -> bool | None:
        return self.value if isinstance(self.value, bool) else None

    @property
    def hint(self) -> Any:
        """The value at the example's sizes, None if it depends on a symbol without example."""
        return self.shape_env.hint_of(self.value)

    def has_hint(self) -> bool:
        return self.hint is not None

    @property
    def expr(self) -> Any:
        """As a sympy expression, for tools of torch that want one."""
        return self.shape_env.to_sympy(self.value)

    @property
    def _expr(self) -> Any:
        return self.expr

    @property
    def _hint(self) -> Any:
        return self.hint

    @property
    def fx_node(self) -> None:
        return None

    def clone(self) -> SymNode:
        return self

    def with_shape_env(self, shape_env: ShapeEnv) -> SymNode:
        return shape_env.node(self.value, self.kind)

    def str(self) -> str:
        return str(self.shape_env.simplify(self.value))

    def _graph_repr(self) -> Any:
        return self.str()

    def __str__(self) -> Any:
        return self.str()

    __repr__ = __str__

    def __format__(self, spec: Any) -> Any:
        return format(self.str(), spec)

    def wrap_int(self, number: int) -> SymNode:
        return self.shape_env.node(number, int)

    def wrap_float(self, number: float) -> SymNode:
        return self.shape_env.node(number, float)

    def wrap_bool(self, number: bool) -> SymNode:
        return self.shape_env.node(number, bool)

    # --- arithmetic, for torch ---------------------------------------------------------------------------

    def _new(self, value: Any, kind: type) -> SymNode:
        return self.shape_env.node(value, kind)

    def add(self, other: SymNode) -> SymNode:
        return self.shape_env.arithmetic("add", self, other)

    def sub(self, other: SymNode) -> SymNode:
        return self.shape_env.arithmetic("sub", self, other)

    def mul(self, other: SymNode) -> SymNode:
        return self.shape_env.arithmetic("mul", self, other)

    def mod(self, other: SymNode) -> SymNode:
        return self.shape_env.arithmetic("mod", self, other)

    def floordiv(self, other: SymNode) -> SymNode:
        return self.shape_env.arithmetic("floordiv", self, other)

    int_floordiv = floordiv

    def pow(self, other: SymNode) -> SymNode:
        return self.shape_env.arithmetic("pow", self, other)

    pow_by_natural = pow
    float_pow = pow

    def truediv(self, other: SymNode) -> SymNode:
        return self.shape_env.quotient(self, other)

    int_truediv = truediv
    float_truediv = truediv

    def sym_min(self, other: SymNode) -> SymNode:
        return self.shape_env.arithmetic("min", self, other)

    def sym_max(self, other: SymNode) -> SymNode:
        return self.shape_env.arithmetic("max", self, other)

    def neg(self) -> SymNode:
        return self.shape_env.unary("neg", self)

    def abs(self) -> SymNode:
        return self.shape_env.unary("abs", self)

    def pos(self) -> SymNode:
        return self

    def lshift(self, other: SymNode) -> SymNode:
        return self.mul(self.wrap_int(2).pow(other))

    def rshift(self, other: SymNode) -> SymNode:
        return self.floordiv(self.wrap_int(2).pow(other))

    def sym_sum(self, parts: list[SymNode]) -> SymNode:
        total = self.wrap_int(0)
        for part in parts:
            total = total.add(part)
        return total

    def floor(self) -> SymNode:
        return self.shape_env.rounded("floor", self)

    def ceil(self) -> SymNode:
        return self.shape_env.rounded("ceil", self)

    def trunc(self) -> SymNode:
        return self.shape_env.rounded("trunc", self)

    sym_int = trunc

    def round(self, digits: int | None = None) -> SymNode:
        return self.shape_env.rounded("round", self) if digits is None else self.shape_env.unary("round", self, digits)

    def sym_float(self) -> SymNode:
        return self.shape_env.to_float(self)

    def is_integer(self) -> SymNode:
        return self if self.kind is not float else self.eq(self.floor().sym_float())

    # --- comparisons, for torch --------------------------------------------------------------------------

    def eq(self, other: SymNode) -> SymNode:
        return self.shape_env.comparison("==", self, other)

    def ne(self, other: SymNode) -> SymNode:
        return self.shape_env.comparison("!=", self, other)

    def lt(self, other: SymNode) -> SymNode:
        return self.shape_env.comparison("<", self, other)

    def le(self, other: SymNode) -> SymNode:
        return self.shape_env.comparison("<=", self, other)

    def gt(self, other: SymNode) -> SymNode:
        return self.shape_env.comparison(">", self, other)

    def ge(self, other: SymNode) -> SymNode:
        return self.shape_env.comparison(">=", self, other)

    def and_(self, other: SymNode) -> SymNode:
        return self._new(conditions.both(self.value, other.value), bool)

    def or_(self, other: SymNode) -> SymNode:
        return self._new(conditions.either(self.value, other.value), bool)

    sym_and = and_
    sym_or = or_
    bitwise_and = and_
    bitwise_or = or_

    def sym_not(self) -> SymNode:
        return self._new(conditions.negated(self.value), bool)

    def sym_ite(self, then: SymNode, otherwise: SymNode) -> SymNode:
        return then if self.shape_env.decide(self.value) else otherwise

    # --- decisions ---------------------------------------------------------------------------------------

    def guard_bool(self, file: Any = "", line: int = 0) -> bool:
        return bool(self.shape_env.decide(self.value))

    def bool_(self) -> bool:
        return self.guard_bool()

    def guard_int(self, file: Any = "", line: int = 0) -> int:
        return int(self.shape_env.specialise(self.value))

    def int_(self) -> int:
        return self.guard_int()

    def guard_float(self, file: Any = "", line: int = 0) -> float:
        return float(self.shape_env.specialise(self.value))

    def guard_size_oblivious(self, file: Any = "", line: int = 0) -> bool:
        return bool(self.shape_env.decide(self.value, fallback=False))

    def guard_or_false(self, file: Any = "", line: int = 0) -> bool:
        return bool(self.shape_env.decide(self.value, fallback=False))

    def guard_or_true(self, file: Any = "", line: int = 0) -> bool:
        return bool(self.shape_env.decide(self.value, fallback=True))

    def statically_known_true(self, file: Any = "", line: int = 0) -> bool:
        return self.shape_env.is_known(self.value)

    def expect_true(self, file: Any = "", line: int = 0) -> bool:
        return self.shape_env.expect(self.value)

    def expect_size(self, file: Any = "", line: int = 0) -> bool:
        return self.shape_env.expect(conditions.ge(self.value, 0))

    def guard_as_int(self) -> int:
        return self.guard_int()

    # --- layouts: C++ asks when it derives what a tensor's sizes and strides mean ----------------------------

    def is_contiguous(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_bool(_is_dense(sizes, strides, range(len(sizes) - 1, -1, -1)))

    def is_channels_last_contiguous_2d(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_bool(len(sizes) == 4 and _is_dense(sizes, strides, (1, 3, 2, 0)))

    def is_channels_last_contiguous_3d(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_bool(len(sizes) == 5 and _is_dense(sizes, strides, (1, 4, 3, 2, 0)))

    def is_channels_last_strides_2d(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.is_channels_last_contiguous_2d(sizes, strides)

    def is_channels_last_strides_3d(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.is_channels_last_contiguous_3d(sizes, strides)

    def is_non_overlapping_and_dense(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        order = sorted(range(len(sizes)), key=lambda i: (_example(strides[i]), -i))
        return self.wrap_bool(_is_dense(sizes, strides, order))

    def is_non_overlapping_and_dense_indicator(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_int(int(self.is_non_overlapping_and_dense(sizes, strides).value))

    # --- a number, for our rules -------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        return self.shape_env.size("add", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.shape_env.size("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.shape_env.size("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self.shape_env.size("mul", self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self.shape_env.size("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.shape_env.size("floordiv", other, self)

    def __mod__(self, other: Any) -> Any:
        return self.shape_env.size("mod", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self.shape_env.size("mod", other, self)

    def __pow__(self, other: Any) -> Any:
        return self.shape_env.size("pow", self, other)

    def __neg__(self) -> Any:
        return self.shape_env.size("sub", 0, self)

    def __abs__(self) -> Any:
        return self if self.shape_env.decide(conditions.ge(self.value, 0)) else -self

    def __eq__(self, other: Any) -> Any:
        if other is self:
            return True
        if type(other) not in _NUMBERS:
            return NotImplemented
        return self.shape_env.compare("==", self, other)

    def __ne__(self, other: Any) -> Any:
        if other is self:
            return False
        if type(other) not in _NUMBERS:
            return NotImplemented
        return not self.shape_env.compare("==", self, other)

    def __lt__(self, other: Any) -> Any:
        return self.shape_env.compare("<", self, other)

    def __le__(self, other: Any) -> Any:
        return self.shape_env.compare("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return self.shape_env.compare(">", self, other)

    def __ge__(self, other: Any) -> Any:
        return self.shape_env.compare(">=", self, other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.shape_env.decide(conditions.ne(self.value, 0)))

    def __int__(self) -> int:
        return self.guard_int()

    __index__ = __int__

    def __deepcopy__(self, memo: Any) -> SymNode:
        return self


_NUMBERS = frozenset({int, bool, SymNode})


def _is_dense(sizes: list[SymNode], strides: list[SymNode], order: Any) -> bool:
    """Whether the dimensions, taken from the fastest to the slowest, leave no gaps. Unknown counts as no."""
    expected: Any = 1
    for i in order:
        env = sizes[i].shape_env
        if env.decide(conditions.eq(sizes[i].value, 1), fallback=False):
            continue
        if not env.decide(conditions.eq(strides[i].value, expected), fallback=False):
            return False
        expected = env.algebra.mul(sizes[i].value, expected)
    return True


def _example(node: SymNode) -> Any:
    hint = node.hint
    return float("inf") if hint is None else hint


def value_of(number: Any) -> Any:
    """The value of a node, of a symbolic number, or of a plain one."""
    if type(number) is SymNode:
        return number.value
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number.node.value
    return number


def is_size(value: object) -> bool:
    return type(value) is SymNode or isinstance(value, Expr)
