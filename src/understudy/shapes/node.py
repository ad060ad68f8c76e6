"""SymNode: a symbolic number, as torch's `SymInt`, `SymFloat` and `SymBool` hold it, and as specs and rules use it.

To torch it is a node: C++ and torch's shape functions call its methods (`add`, `eq`, `guard_bool`, …) with other nodes.
To our rules it is a number: `size * 2`, `size == 1`, `max(a, b)`. A comparison returns True or False; the environment
decides it, by proof or by hints, and records guards.

These methods are called a million times, mostly with the same arguments: each looks first for a memoised result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.fx.experimental.sym_node import SymNode as TorchSymNode

from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import FUNCTIONS
from understudy.shapes.layouts import CHANNELS_LAST_2D, CHANNELS_LAST_3D, is_dense, order_by_hints

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

YES, NO, NOTHING = (1).__bool__, (0).__bool__, {}.clear
"""Functions that return True, False and None. Called from C++, they cost half of a Python function."""
SETTLED: tuple[Callable[[Any, Any], bool], Callable[[Any, Any], bool]] = (operator.eq, operator.ne)
"""The same for methods with the arguments (file, line), which are never equal: always False, always True."""
OF_TRUTHS = {
    "expect_true": "_expect_true", "guard_bool": "_guard_bool", "guard_or_false": "_guard_or_false",
    "guard_or_true": "_guard_or_true", "guard_size_oblivious": "_guard_or_false",
    "statically_known_true": "_statically_known_true",
}  # fmt: skip
"""Questions about a truth value, and the methods that answer them until the answer is final."""
SYMBOLIC: dict[type, Callable[[Any], Any]] = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}
Method = Callable[["SymNode", "SymNode"], "SymNode"]
FILES_THAT_NEED_NO_GUARD = ("input_metadata.cpp", "Contiguity.h")
"""C++ files whose questions need no guard: an unproved condition may be answered with no.

Autograd asks whether a size is 1, to sum a gradient that was broadcast. If it was broadcast, there is a guard already;
if not, the gradient has the size of its input, and the answer does not matter. Contiguity is asked about twice: what
can't be proved size by size becomes one condition, which is decided when the answer is needed.
"""
SUMS_TO_SIZES = "ExpandUtils.h"
"""Where gradients are summed to the size of a broadcast operand: the same question, among others that need a guard."""


def _binary(operation: str) -> Method:
    def method(self: SymNode, other: SymNode) -> SymNode:
        env = self.shape_env
        found = env.computed.get((operation, self, other))
        return env.numbers.apply(operation, self, other) if found is None else found

    return method


def _relation(relation: str) -> Method:
    def method(self: SymNode, other: SymNode) -> SymNode:
        env = self.shape_env
        found = env.computed.get((relation, self, other))
        return env.numbers.compare(relation, self, other) if found is None else found

    return method


def _rounding(operation: str) -> Callable[[SymNode], SymNode]:
    return lambda self: self.shape_env.numbers.round_to_integer(operation, self)


def _on_numbers(operation: str, swapped: bool = False) -> Callable[[SymNode, Any], Any]:
    """A Python operator for rules, on numbers and nodes."""

    def method(self: SymNode, other: int | SymNode) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        return self.shape_env.numbers.compute(operation, self, other)

    def swapped_method(self: SymNode, other: Any) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        return self.shape_env.numbers.compute(operation, other, self)

    return swapped_method if swapped else method


def _comparison(relation: str) -> Callable[[SymNode, Any], Any]:
    def method(self: SymNode, other: int | SymNode) -> Any:
        if type(other) not in _NUMBERS:
            return NotImplemented
        return self.shape_env.decisions.compare(relation, self, other)

    return method


class Equalities(dict["SymNode", "SymNode"]):
    """Memoised conditions that a node equals others. Autograd asks for them at every size of a gradient."""

    __slots__ = ("node",)

    def __init__(self, node: SymNode) -> None:
        self.node = node

    def __missing__(self, other: SymNode) -> SymNode:
        found = self[other] = self.node.shape_env.numbers.compare("==", self.node, other)
        return found


class SymNode:
    """A symbolic number of an environment; equal values have the same node."""

    __slots__ = (
        "__weakref__", "_example", "_symbolic", "constant", "eq", "expect_true", "guard_bool", "guard_or_false",
        "guard_or_true", "guard_size_oblivious", "is_bool", "is_constant", "is_float", "is_int", "is_plain", "kind",
        "maybe_as_int", "shape_env", "statically_known_true", "value",
    )  # fmt: skip

    # Called very often by torch: each is one of the functions `YES`, `NO` and `NOTHING`.
    is_constant: Callable[[], bool]
    """Torch unwraps constant nodes. Numbers never are: torch would turn an integer into a float in divisions."""
    is_int: Callable[[], bool]
    is_float: Callable[[], bool]
    is_bool: Callable[[], bool]
    maybe_as_int: Callable[[], int | None]

    # Questions to bools: `OF_TRUTHS`, replaced by functions of `SETTLED` once the answer is final.
    expect_true: Callable[[Any, Any], bool]
    guard_bool: Callable[[Any, Any], bool]
    guard_or_false: Callable[[Any, Any], bool]
    guard_or_true: Callable[[Any, Any], bool]
    guard_size_oblivious: Callable[[Any, Any], bool]
    statically_known_true: Callable[[Any, Any], bool]

    eq: Callable[[SymNode], SymNode]

    def __init__(self, shape_env: ShapeEnv, value: Any, kind: type) -> None:
        self.shape_env = shape_env
        self.value = value
        self.kind = kind
        self._symbolic: Any = None
        self._example: Any = None
        self._derive()

    def _derive(self) -> None:
        """Set the attributes that follow from value and kind."""
        value, kind = self.value, self.kind
        self.is_plain = isinstance(value, (int, float))
        # Torch treats a node with a constant as a plain number; floats have to stay nodes.
        self.constant = value if self.is_plain and kind is not float else None
        self.is_constant = YES if self.is_plain and kind is bool else NO
        self.is_int = YES if kind is int else NO
        self.is_float = YES if kind is float else NO
        self.is_bool = YES if kind is bool else NO
        self.maybe_as_int = value.__index__ if kind is int and self.is_plain else NOTHING
        if kind is not float:
            self.eq = Equalities(self).__getitem__
        if kind is bool:
            self.guard_bool, self.expect_true = self._guard_bool, self._expect_true
            self.guard_or_false = self.guard_size_oblivious = self._guard_or_false
            self.guard_or_true, self.statically_known_true = self._guard_or_true, self._statically_known_true

    def __getattr__(self, name: str) -> Any:
        """The methods that nodes of another kind have as attributes: rarely called, they are not bound to each node."""
        if name == "eq":
            return Equalities(self).__getitem__
        if name in OF_TRUTHS:
            return getattr(self, OF_TRUTHS[name])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    # torch checks `isinstance(node, <its own class>)` in `sym_ite` and when it unwraps constants. C++ reads the class
    # of every node: a property would be a call each time.
    __class__: Any = TorchSymNode
    _optimized_summation = False  # read by torch's own nodes when they add this one

    # --- value and kind --------------------------------------------------------------------------------------

    @property
    def symbolic(self) -> Any:
        """The `SymInt`, `SymFloat` or `SymBool` of this node; the number itself if it is constant."""
        found = self._symbolic
        if found is None:
            found = self._symbolic = self.value if self.is_plain else SYMBOLIC[self.kind](self)
        return found

    @property
    def is_number(self) -> bool:
        """Sympy's question, which torch's own nodes ask."""
        return self.is_plain

    is_Number = is_number  # asked since torch 2.14
    is_Boolean = False

    def unwrap(self) -> Any:
        """The plain number if it is one, else the node."""
        return self.value if self.is_plain else self

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def nested_int_coeff(self) -> None:
        return None

    def is_symbolic(self) -> bool:
        return True

    @property
    def pytype(self) -> type:
        return self.kind

    def maybe_as_float(self) -> float | None:
        return self.value if self.kind is float and self.is_plain else None

    def maybe_as_bool(self) -> bool | None:
        return self.constant if self.kind is bool else None

    def constant_int(self) -> int | None:
        return self.maybe_as_int()

    constant_bool = maybe_as_bool

    @property
    def hint(self) -> Any:
        """The value for the hints, None if it depends on an unbacked symbol."""
        found = self._example
        if found is None:
            found = self._example = self.shape_env.decisions.get_hint(self.value)
        return found

    _hint = hint

    def has_hint(self) -> bool:
        return self.hint is not None

    def require_hint(self, fallback: Any = None) -> Any:
        hint = fallback if self.hint is None else self.hint
        if hint is None:
            raise self.shape_env.decisions.make_error(self.value)
        return hint

    @property
    def expr(self) -> Any:
        """A sympy expression, for torch's tools, in which specialised and merged symbols are replaced."""
        return self.shape_env.to_sympy(self.shape_env.torch_api.merge_symbols(self.value))

    @property
    def _expr(self) -> Any:
        """The sympy expression without these replacements."""
        return self.shape_env.to_sympy(self.value)

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

    def _value_eq(self, other: SymNode) -> bool:
        return self is other

    def _value_hash(self) -> int:
        return hash(self)

    def wrap_int(self, number: int) -> SymNode:
        env = self.shape_env
        found = env.nodes.get((int, number))
        return env.node(number, int) if found is None else found

    def wrap_float(self, number: float) -> SymNode:
        env = self.shape_env
        found = env.nodes.get((float, number))
        return env.node(number, float) if found is None else found

    def wrap_bool(self, number: bool) -> SymNode:
        return self.shape_env.node(number, bool)

    # --- arithmetic, for torch ---------------------------------------------------------------------------

    add = _binary("add")
    sub = _binary("sub")
    mul = _binary("mul")
    mod = _binary("mod")
    floordiv = int_floordiv = _binary("floordiv")
    truediv = int_truediv = float_truediv = _binary("truediv")
    pow = pow_by_natural = float_pow = _binary("pow")
    sym_min = _binary("min")
    sym_max = _binary("max")
    and_ = sym_and = bitwise_and = _binary("and")
    or_ = sym_or = bitwise_or = _binary("or")
    xor = bitwise_xor = _binary("xor")

    def neg(self) -> SymNode:
        return self.shape_env.numbers.negate(self)

    def abs(self) -> SymNode:
        return self.shape_env.numbers.take_absolute(self)

    def pos(self) -> SymNode:
        return self

    def lshift(self, other: SymNode) -> SymNode:
        return self.mul(self._shift("<<", other))

    def rshift(self, other: SymNode) -> SymNode:
        return self.floordiv(self._shift(">>", other))

    def _shift(self, operator: object, places: SymNode) -> SymNode:
        if self.kind is float or places.kind is float:
            names = [part.kind.__name__ for part in (self, places)]
            raise TypeError(f"unsupported operand type(s) for {operator}: {names[0]!r} and {names[1]!r}")
        if self.shape_env.decisions.is_known(conditions.lt(places.value, 0)) or (places.hint or 0) < 0:
            raise ValueError("negative shift count")
        return self.wrap_int(2).pow(places)

    def sym_sum(self, parts: list[SymNode]) -> SymNode:
        if all(part.kind is not float for part in parts):
            return self.shape_env.numbers.add_all(parts)
        total = self.wrap_int(0)
        for part in parts:
            total = total.add(part)
        return total

    floor = _rounding("floor")
    ceil = _rounding("ceil")
    trunc = sym_int = _rounding("trunc")

    def round(self, digits: int | None = None) -> SymNode:
        if digits is None or (self.kind is not float and digits >= 0):
            return self.shape_env.numbers.round_to_integer("round", self)
        if self.kind is not float:
            numbers = self.shape_env.numbers
            return numbers.define(numbers.make_float("round", self.value, digits))
        return self.shape_env.numbers.apply_function("round", self, digits)

    def sym_float(self) -> SymNode:
        return self.shape_env.numbers.to_float(self)

    def is_integer(self) -> SymNode:
        return self.wrap_bool(True) if self.kind is not float else self.eq(self.floor().sym_float())

    # --- comparisons, for torch --------------------------------------------------------------------------

    ne = _relation("!=")
    lt = _relation("<")
    le = _relation("<=")
    gt = _relation(">")
    ge = _relation(">=")

    def sym_not(self) -> SymNode:
        return self.shape_env.node(self.shape_env.numbers.negate_condition(self.value), bool)

    def sym_ite(self, then: SymNode, otherwise: SymNode) -> SymNode:
        chosen = self.shape_env.numbers.choose(self, then, otherwise)
        if chosen.constant is None:
            return chosen
        # Torch expects a node, not a number.
        number = SymNode(self.shape_env, chosen.value, chosen.kind)
        number.constant = None
        return number

    # --- decisions ---------------------------------------------------------------------------------------

    def _settle(self, answer: bool) -> bool:
        """Return an answer. If it is final, also replace the methods that ask for it."""
        truth = self.shape_env.decisions.recall_truth(self.value)
        if truth is not None:
            self.guard_bool = self.statically_known_true = self.guard_or_true = SETTLED[truth]
            self.guard_or_false = self.guard_size_oblivious = SETTLED[truth]
            if truth:
                self.expect_true = SETTLED[True]
        return answer

    def _guard_bool(self, file: object, line: object) -> bool:
        """Called by C++; Python's `if` calls `bool_`."""
        return self._settle(bool(self.shape_env.decisions.decide_in_kernel(self.value)))

    def bool_(self) -> bool:
        asked = self if self.kind is bool else self.ne(self.shape_env.node(self.kind(0), self.kind))
        return bool(self.shape_env.decisions.decide(asked.value))

    def guard_int(self, file: object = "", line: int = 0) -> int:
        return int(self.shape_env.decisions.specialise(self.value))

    guard_as_int = guard_int

    def int_(self) -> int:
        return self.guard_int()

    def guard_float(self, file: Any = "", line: int = 0) -> float:
        return float(self.shape_env.decisions.specialise(self.value))

    def evaluate(self, size_oblivious: bool = False) -> Any:
        return self.shape_env.torch_api.evaluate_sym_node(self, size_oblivious)

    def _guard_or_false(self, file: object, line: object) -> bool:
        if type(file) is str and (
            file.endswith(FILES_THAT_NEED_NO_GUARD)
            or (file.endswith(SUMS_TO_SIZES) and conditions.is_about_one(self.value))
        ):
            found = self._statically_known_true(file, line)
            if self.guard_or_false not in SETTLED and self.shape_env.decisions.fails_at_hints(self.value):
                self.guard_or_false = self._guard_or_false_where_it_fails
            return found
        return self._settle(bool(self.shape_env.decisions.decide(self.value, fallback=False)))

    def _guard_or_false_where_it_fails(self, file: object, line: object) -> bool:
        """As `_guard_or_false`, for a condition that is false for the hints, and so can't be proved."""
        if type(file) is str and file.endswith(FILES_THAT_NEED_NO_GUARD):
            return False
        return self._guard_or_false(file, line)

    def _guard_or_true(self, file: object, line: object) -> bool:
        if type(file) is str and file.endswith(FILES_THAT_NEED_NO_GUARD):
            return self._settle(
                not self.shape_env.decisions.is_known(self.shape_env.numbers.negate_condition(self.value))
            )
        return self._settle(bool(self.shape_env.decisions.decide(self.value, fallback=True)))

    def _statically_known_true(self, file: object, line: object) -> bool:
        return self._settle(self.shape_env.decisions.is_known(self.value))

    def _expect_true(self, file: object, line: object) -> bool:
        return self._settle(self.shape_env.decisions.expect(self.value))

    def expect_size(self, file: Any = "", line: int = 0) -> bool:
        return self.shape_env.decisions.expect(conditions.ge(self.value, 0))

    # --- layout queries of C++ ----------------------------

    def is_contiguous(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_bool(is_dense(sizes, strides, range(len(sizes) - 1, -1, -1), empty_is_packed=True))

    def is_channels_last_contiguous_2d(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_bool(len(sizes) == 4 and is_dense(sizes, strides, CHANNELS_LAST_2D))

    def is_channels_last_contiguous_3d(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_bool(len(sizes) == 5 and is_dense(sizes, strides, CHANNELS_LAST_3D))

    is_channels_last_strides_2d = is_channels_last_contiguous_2d
    is_channels_last_strides_3d = is_channels_last_contiguous_3d

    def is_non_overlapping_and_dense(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_bool(is_dense(sizes, strides, order_by_hints(strides)))

    def is_non_overlapping_and_dense_indicator(self, sizes: list[SymNode], strides: list[SymNode]) -> SymNode:
        return self.wrap_int(int(is_dense(sizes, strides, order_by_hints(strides))))

    # --- Python operators, for our rules -------------------------------------------------------------------------

    __add__ = __radd__ = _on_numbers("add")
    __sub__ = _on_numbers("sub")
    __rsub__ = _on_numbers("sub", swapped=True)
    __mul__ = __rmul__ = _on_numbers("mul")
    __floordiv__ = _on_numbers("floordiv")
    __rfloordiv__ = _on_numbers("floordiv", swapped=True)
    __mod__ = _on_numbers("mod")
    __rmod__ = _on_numbers("mod", swapped=True)
    __pow__ = _on_numbers("pow")
    __rpow__ = _on_numbers("pow", swapped=True)
    __truediv__ = _on_numbers("truediv")
    __rtruediv__ = _on_numbers("truediv", swapped=True)
    __lt__ = _comparison("<")
    __le__ = _comparison("<=")
    __gt__ = _comparison(">")
    __ge__ = _comparison(">=")

    def __divmod__(self, other: object) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: object) -> Any:
        return other // self, other % self

    def __lshift__(self, other: Any) -> Any:
        return self * 2**other

    def __rshift__(self, other: Any) -> Any:
        return self // 2**other

    def __neg__(self) -> Any:
        return self.shape_env.numbers.compute("sub", 0, self)

    def __pos__(self) -> SymNode:
        return self

    def __abs__(self) -> Any:
        return self.abs().unwrap()

    def __round__(self, digits: int | None = None) -> Any:
        return self.round(digits).unwrap()

    def __floor__(self) -> Any:
        return self.floor().unwrap()

    def __ceil__(self) -> Any:
        return self.ceil().unwrap()

    def __trunc__(self) -> Any:
        return self.trunc().unwrap()

    def __eq__(self, other: Any) -> Any:
        if other is self:
            return True
        if type(other) not in _NUMBERS:
            return NotImplemented
        return self.shape_env.decisions.compare("==", self, other)

    def __ne__(self, other: Any) -> Any:
        if other is self:
            return False
        if type(other) not in _NUMBERS:
            return NotImplemented
        return not self.shape_env.decisions.compare("==", self, other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        if self.kind is bool:
            return bool(self.shape_env.decisions.decide(self.value))
        return self != 0

    def __int__(self) -> int:
        return self.guard_int()

    __index__ = __int__

    def __float__(self) -> float:
        return self.guard_float()

    # --- copies ------------------------------------------------------------------------------------------

    def __copy__(self) -> SymNode:
        return self

    def __deepcopy__(self, memo: Any) -> SymNode:
        """A node is not copied, unless its environment is."""
        if id(self.shape_env) not in memo:
            return self
        twin = memo[id(self)] = SymNode.__new__(SymNode)
        for name in ("shape_env", "value", "kind", "_example"):
            setattr(twin, name, deepcopy(getattr(self, name), memo))
        twin._symbolic = None
        twin._derive()
        return twin

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickled with its environment, of which it is a part."""
        return SymNode.__new__, (SymNode,), (self.shape_env, self.value, self.kind, self._example)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.shape_env, self.value, self.kind, self._example = state
        self._symbolic = None
        self._derive()


def _function(name: str) -> Callable[[SymNode], SymNode]:
    return lambda self: self.shape_env.numbers.apply_function(name, self)


for _name in FUNCTIONS:
    setattr(SymNode, f"sym_{_name}", _function(_name))
    setattr(SymNode, f"_sym_{_name}", _function(_name))
_NUMBERS = frozenset({int, bool, float, SymNode})


Size: TypeAlias = int | SymNode
"""A size, a stride or an offset of a tensor: a plain number, or a symbolic one."""
Shape: TypeAlias = tuple[Size, ...]
Sizes: TypeAlias = Sequence[Size]
Scalar: TypeAlias = Size | float
"""Any number, plain or symbolic."""


def value_of(number: object) -> Any:
    """The value of a node, of a symbolic number, or of a plain one."""
    if type(number) is SymNode:
        return number.value
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return adopt(number.node).value
    return number


def adopt(node: Any) -> Any:
    """The node itself; of torch's own nodes that a program has made of symbols of ours, the node of the same value."""
    if type(node) is SymNode:
        return node
    env: Any = getattr(node, "shape_env", None)
    if not hasattr(env, "from_sympy"):
        return node
    value = env.from_sympy(node.expr)
    is_written_as_integer = node.pytype is float and isinstance(value, (int, Expr))
    return (
        env.numbers.to_float(env.node(value, int)) if is_written_as_integer else env.node(value, node.pytype)
    )


def is_size(value: object) -> bool:
    return type(value) is SymNode or isinstance(value, Expr)
