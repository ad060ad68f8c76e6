"""The symbols of an environment: backed ones, which have a hint, and unbacked ones, which are data-dependent."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from understudy.errors import ConstraintViolationError
from understudy.lines import user_line
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.arithmetic import LEAST
from understudy.shapes.checking import origins
from understudy.shapes.guards import Specialisation, SymbolOrigin
from understudy.shapes.input_dims import (
    DUCK,
    STATIC,
    UNBACKED,
    SizeSource,
    from_torch,
    name_of,
    size_of,
    symbolic_sizes,
)
from understudy.shapes.node import Size, SymNode, value_of
from understudy.shapes.sizes import from_torch as from_torch_number
from understudy.shapes.sizes import to_torch

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv


class Symbols:
    """Makes symbols, and records their origins."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env, self.numbers = env, env.numbers
        self.algebra, self.facts = env.algebra, env.facts
        self.hints, self.unbacked, self.definitions = env.hints, env.unbacked, env.definitions
        self.truths, self.inputs, self.pending = env.truths, env.inputs, env.pending_fresh_unbacked_symbols
        self.by_hint: dict[int, Expr] = {}
        self.by_name: dict[str, Expr] = {}
        self.unbacked_by_name: dict[str, SymNode] = {}
        self._ignores_fresh = 0
        self._counters: dict[str, int] = {}
        self._reported: set[Specialisation] = set()

    def create_symbol(
        self, example: float, source: object = None, dynamic_dim: object = None, constraint_dim: object = None,
        positive: bool | None = True, do_not_specialize_zero_one: bool = False, symbolic_context: object = None, *,
        name: str | None = None, low: int | None = None, high: int | None = None, duck: bool | None = None,
        keep_dynamic: bool = False,
    ) -> Size:  # fmt: skip
        """A size with the hint `example`: a node, or the number itself if it is static.

        A size of 0 or 1 stays a number, unless `specialize_zero_one` is off or `keep_dynamic` asks for a symbol.
        Symbols with the same `name` are the same; without a name, they are called after their source.
        `dynamic_dim` is a `DimDynamic`, `constraint_dim` its range. Without `positive` the number may be negative.
        """
        if isinstance(example, float):
            return self._create_float(example)
        keep_dynamic = keep_dynamic or do_not_specialize_zero_one
        if not positive and low is None:
            low = LEAST
        if dynamic_dim is not None:
            policy = from_torch(dynamic_dim, constraint_dim)
            if policy.kind in (STATIC, UNBACKED):
                return size_of(self.env, policy, example, name_of(source))
            duck = (policy.kind == DUCK and self.env.settings.duck_shape) if duck is None else duck
            low, high = (policy.low if low is None else low), (policy.high if high is None else high)
        if name is not None and name in self.by_name:
            return self._reuse(name, example, source)
        if self.env.settings.specialize_zero_one and example in (0, 1) and not keep_dynamic:
            self._report_number(example, source)
            return example
        shared = self.env.settings.duck_shape if duck is None else duck
        if shared and name is None and example in self.by_hint:
            return self.numbers.node(self.by_hint[example], int)
        least = (
            low if low is not None else (2 if self.env.settings.specialize_zero_one and example >= 2 else 0)
        )
        if example < least or (high is not None and example > high):
            shown = name if source is None else name_of(source)
            raise ConstraintViolationError(
                f"{shown}: the example is {example}, which is not in {least}..{'∞' if high is None else high}"
            )
        # A symbol without a name of the user's may be called so already.
        called = self._choose_name(source) if name is None or name in self.algebra.symbols else name
        symbol = self.algebra.symbol(called, least, high)
        self.hints[symbol] = example
        if name is not None:
            self.by_name[name] = symbol
        if shared and name is None:
            self.by_hint[example] = symbol
        return self.numbers.node(symbol, int)

    def _report_number(self, example: int, source: object) -> None:
        what = str(source) if source is not None else "a size"
        reason = "sizes of 0 and 1 stay numbers: specialize_zero_one"
        specialisation = Specialisation(what, example, user_line(), reason)
        if specialisation not in self._reported:
            self._reported.add(specialisation)
            self.env.specialisations.append(specialisation)

    def _create_float(self, example: float) -> SymNode:
        """A float with this hint. Its symbol is not an integer: comparisons of integers would round."""
        symbol = self.algebra.symbol(self._make_fresh_name("zf"), None, None)
        self.hints[symbol] = cast(Any, example)  # all other hints are integers
        return self.numbers.node(self.numbers.make_float("value", symbol), float)

    def _reuse(self, name: str, example: int, source: object) -> SymNode:
        """The symbol of a name that was used before."""
        symbol = self.by_name[name]
        if self.hints[symbol] != example:
            raise ValueError(
                f"dimension {name!r}: expected {self.hints[symbol]} as in other inputs, got {example} in {source}"
            )
        return self.numbers.node(symbol, int)

    def create_symintnode(self, symbol: object, *, hint: int | None = None, source: object = None) -> Any:
        """The `SymInt` of a symbol, an expression or a node; a plain int unchanged."""
        return self.numbers.node(value_of(self.env.from_sympy(symbol)), int).symbolic

    def create_symfloatnode(self, symbol: object, *, hint: float | None = None, source: object = None) -> Any:
        """The `SymFloat` of a sympy number or a node; a plain float unchanged."""
        value = value_of(self.env.from_sympy(symbol))
        number = self.numbers.make_float("to_float", value) if isinstance(value, Expr) else value
        return self.numbers.node(number, float).symbolic

    def create_symint(
        self, example: int, name: str, *, is_named: bool = True, **options: Any
    ) -> int | torch.SymInt:
        """A number among the inputs that may vary, as a `SymInt`: `n = env.create_symint(16, "n")`.

        `is_named`: it is the dimension of that name, if there is one.
        """
        options.setdefault("positive", example >= 0)  # a number that is not a size may be negative
        size = self.create_symbol(example, name, name=name if is_named else None, **options)
        self.inputs.add_number(name, size)
        return size if isinstance(size, int) else cast(torch.SymInt, size.symbolic)

    def create_symbolic_sizes_strides_storage_offset(
        self, example: torch.Tensor, source: object, *, symbolic_context: object = None
    ) -> tuple[tuple[int | torch.SymInt, ...], tuple[int | torch.SymInt, ...], int | torch.SymInt]:
        """The symbolic metadata of an input: sizes, strides and offset, as numbers and `SymInt`s."""
        name, shape, stride = symbolic_sizes(self.env, example, source, symbolic_context)
        self.add_input(name, shape, stride, from_torch_number(example.storage_offset()))
        return tuple(map(to_torch, shape)), tuple(map(to_torch, stride)), example.storage_offset()

    def create_unspecified_symbol(
        self,
        example: int,
        source: object,
        dynamic_dim: object = None,
        constraint_dim: object = None,
        **options: Any,
    ) -> Any:
        """As `create_symbol`, for a number that may be 0, 1 or negative."""
        return self.create_symbol(
            example,
            source,
            dynamic_dim,
            constraint_dim,
            positive=None,
            do_not_specialize_zero_one=True,
            **options,
        )

    def create_unspecified_symint_and_symbol(
        self, value: int, source: object, dynamic_dim: object = None, excluded_value: int | None = None
    ) -> Any:
        """The `SymInt` of such a number."""
        return self.create_symintnode(self.create_unspecified_symbol(value, source, dynamic_dim), hint=value)

    def create_symboolnode(self, condition: object) -> Any:
        """The `SymBool` of a sympy condition."""
        return self.numbers.node(value_of(self.env.from_sympy(condition)), bool).symbolic

    def create_unbacked_symint(
        self, source: object = None, *, low: int | None = None, high: int | None = None,
        what: str = "create_unbacked_symint",
    ) -> torch.SymInt:  # fmt: skip
        """An unbacked integer within `low` and `high`."""
        return self.numbers.node(
            self._make_unbacked("u", LEAST if low is None else low, high, what), int
        ).symbolic

    def create_unbacked_symfloat(
        self, source: object = None, *, low: int | None = None, high: int | None = None,
        what: str = "create_unbacked_symfloat",
    ) -> torch.SymFloat:  # fmt: skip
        """An unbacked float; with bounds, it is not NaN."""
        symbol = self._make_unbacked("zuf", low, high, what)
        return self.numbers.node(self.numbers.make_float("value", symbol), float).symbolic

    def create_unbacked_symbool(
        self, source: object = None, *, what: str = "create_unbacked_symbool"
    ) -> torch.SymBool:
        """An unbacked bool."""
        symbol = self._make_unbacked("u", 0, 1, what)
        condition = conditions.eq(symbol, 1)
        assert isinstance(condition, Condition)
        self.truths[condition] = symbol
        return self.numbers.node(condition, bool).symbolic

    def _make_unbacked(self, prefix: str, low: int | None, high: int | None, what: str) -> Expr:
        symbol = self.algebra.symbol(self._make_fresh_name(prefix), low, high)
        self.unbacked[symbol] = SymbolOrigin(what, user_line())
        if not self._ignores_fresh:
            self.pending.append(symbol)
        symbol.is_unbacked = True
        return symbol

    def _choose_name(self, source: object) -> str:
        """`x_0` for `x.size(0)`, if that name is free; for a source of torch's, the name that torch's own symbol has."""
        if isinstance(source, SizeSource):
            name = source.symbol_name
            return name if name and name not in self.algebra.symbols else self._make_fresh_name("s")
        named = getattr(source, "name", None)
        if not isinstance(named, str):
            return self._make_fresh_name("s")
        number = int(hashlib.sha256(named.encode()).hexdigest(), 16) % 100
        return next(name for n in itertools.count(number) if (name := f"s{n}") not in self.algebra.symbols)

    def _make_fresh_name(self, prefix: str) -> str:
        while True:
            number = self._counters.get(prefix, 0)
            self._counters[prefix] = number + 1
            name = f"{prefix}{number}"
            if name not in self.algebra.symbols:
                return name

    def add_input(self, name: str, shape: Sequence[Size], stride: Sequence[Size], offset: Size = 0) -> None:
        """Register the metadata of an input, to check other inputs and to bind symbols to them."""
        while name in self.inputs.metadata:
            if self.inputs.is_same(name, shape, stride, offset):
                return  # the same input was converted again
            name += "_"
        self.inputs.add(name, shape, stride, offset)

    def is_unbacked(self, symbol: Expr) -> bool:
        """Whether a symbol has no hint, itself or through its definition."""
        if symbol in self.definitions:
            return any(origin in self.unbacked for origin in origins(symbol, self.definitions))
        return symbol in self.unbacked

    @contextmanager
    def ignore_fresh_unbacked_symbols(self) -> Iterator[None]:
        """Inside, new unbacked symbols need no binding."""
        self._ignores_fresh += 1
        try:
            yield
        finally:
            self._ignores_fresh -= 1

    def rename_unbacked(self, new: Expr, old: Expr) -> None:
        """Unify the symbol of a second run of a program with that of the first run."""
        if new is old:
            return
        self.env.unbacked_renamings[old] = new
        equal = conditions.eq(new, old)
        if not isinstance(equal, bool):
            self.facts.learn(equal)
        if new in self.pending:
            self.pending.remove(new)

    def list_visible(self) -> list[Expr]:
        """The symbols that users see: without hidden ones, and without those that have definitions."""
        return [s for s in (*self.hints, *self.unbacked) if s not in self.definitions]
