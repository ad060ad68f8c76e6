"""ShapeEnv: the symbols of a run, and an append-only list of what was assumed about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from understudy.errors import ConstraintViolationError, GuardOnDataDependentSymNode, GuardsFrozen
from understudy.lines import user_line
from understudy.shapes import undecidable
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition, separate
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.facts import Proof
from understudy.shapes.algebra.floats import INTEGER_RELATIONS, FloatExpr
from understudy.shapes.arithmetic import LEAST, MOST
from understudy.shapes.autograd_formulas import whole_question
from understudy.shapes.checking import origins
from understudy.shapes.guards import Guard, Specialisation, SymbolOrigin
from understudy.shapes.input_dims import DUCK, STATIC, UNBACKED, from_torch, name_of, size_of, symbolic_sizes
from understudy.shapes.node import SymNode, value_of
from understudy.shapes.sizes import to_torch
from understudy.shapes.torch_api.environment import TorchSide


class ShapeEnv(TorchSide):
    """Owns symbols and facts. Everything that it answers is true for all sizes that its guards admit.

        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        x = mode.from_tensor(torch.randn(8, 128), source="x", symbolic_context=dims("batch", "seq"))
        y = x.view(-1, 4)
        print(y.spec)         f32[batch*seq//4, 4]@cpu
        print(*env.guards)    batch*seq % 4 == 0    because model.py:12: y = x.view(-1, 4)

    Options are those of `Settings`: `ShapeEnv(duck_shape=False, specialize_zero_one=False)`.
    """

    # --- symbols -------------------------------------------------------------------------------------------

    def create_symbol(
        self, example: int, source: Any = None, dynamic_dim: Any = None, constraint_dim: Any = None,
        positive: bool | None = True, do_not_specialize_zero_one: bool = False, symbolic_context: Any = None, *,
        name: str | None = None, low: int | None = None, high: int | None = None, duck: bool | None = None,
        keep_dynamic: bool = False,
    ) -> Any:  # fmt: skip
        """A size that is `example` at hand: a node, or the number itself if it must not vary.

        A size of 0 or 1 stays a number, unless `specialize_zero_one` is off or `keep_dynamic` asks for a symbol.
        Symbols with the same `name` are the same; without a name, they are called after their source.
        `dynamic_dim` is a `DimDynamic`, `constraint_dim` its range. Without `positive` the number may be negative.
        """
        keep_dynamic = keep_dynamic or do_not_specialize_zero_one
        if not positive and low is None:
            low = LEAST
        if dynamic_dim is not None:
            policy = from_torch(dynamic_dim, constraint_dim)
            if policy.kind in (STATIC, UNBACKED):
                return size_of(self, policy, example, name_of(source))
            duck = (policy.kind == DUCK and self.settings.duck_shape) if duck is None else duck
            low, high = (policy.low if low is None else low), (policy.high if high is None else high)
        if name is not None and name in self._by_name:
            return self._again(name, example, source)
        if self.settings.specialize_zero_one and example in (0, 1) and not keep_dynamic:
            what = str(source) if source is not None else "a size"
            reason = "sizes of 0 and 1 stay numbers: specialize_zero_one"
            self.specialisations.append(Specialisation(what, example, user_line(), reason))
            return example
        shared = self.settings.duck_shape if duck is None else duck
        if shared and name is None and example in self._by_example:
            return self.node(self._by_example[example], int)
        least = low if low is not None else (2 if self.settings.specialize_zero_one and example >= 2 else 0)
        if example < least or (high is not None and example > high):
            called = name if source is None else name_of(source)
            raise ConstraintViolationError(
                f"{called}: the example is {example}, which is not in {least}..{'∞' if high is None else high}"
            )
        symbol = self.algebra.symbol(name or self._name_from(source), least, high)
        self.hints[symbol] = example
        if name is not None:
            self._by_name[name] = symbol
        if shared and name is None:
            self._by_example[example] = symbol
        return self.node(symbol, int)

    def _again(self, name: str, example: int, source: Any) -> SymNode:
        """A dimension whose name was used before is the same size."""
        symbol = self._by_name[name]
        if self.hints[symbol] != example:
            raise ValueError(
                f"dimension {name!r} is {self.hints[symbol]} elsewhere, but {example} in {source}"
            )
        return self.node(symbol, int)

    def create_symintnode(self, symbol: Any, *, hint: int | None = None, source: Any = None) -> Any:
        """The `SymInt` of a symbol, of an expression or of a node; a plain int as it is."""
        return self.node(value_of(self.from_sympy(symbol)), int).symbolic

    def create_symfloatnode(self, symbol: Any, *, hint: float | None = None, source: Any = None) -> Any:
        """The `SymFloat` of a number in sympy's words, or of a node; a plain one as it is."""
        value = value_of(self.from_sympy(symbol))
        return self.node(self.float_expr("to_float", value) if isinstance(value, Expr) else value, float).symbolic

    def create_symint(self, example: int, name: str, **options: Any) -> Any:
        """A number among the inputs that may vary, as a `SymInt`: `n = env.create_symint(16, "n")`."""
        size = self.create_symbol(example, name, name=name, **options)
        self.inputs.add_number(name, size)
        return size.symbolic if type(size) is SymNode else size

    def create_symbolic_sizes_strides_storage_offset(
        self, example: torch.Tensor, source: Any, *, symbolic_context: Any = None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """What stands for the metadata of an input: sizes, strides and offset, as numbers and `SymInt`s."""
        name, shape, stride = symbolic_sizes(self, example, source, symbolic_context)
        self.add_input(name, shape, stride, example.storage_offset())
        return tuple(map(to_torch, shape)), tuple(map(to_torch, stride)), example.storage_offset()

    def create_unspecified_symbol(
        self, example: int, source: Any, dynamic_dim: Any = None, constraint_dim: Any = None, **options: Any
    ) -> Any:
        """As `create_symbol`, for a number of which nothing is known: it may be 0, 1 or negative."""
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
        self, value: int, source: Any, dynamic_dim: Any = None, excluded_value: int | None = None
    ) -> Any:
        """The `SymInt` of such a number."""
        return self.create_symintnode(self.create_unspecified_symbol(value, source, dynamic_dim), hint=value)

    def create_symboolnode(self, condition: Any) -> Any:
        """The `SymBool` of a condition in sympy's words."""
        return self.node(value_of(self.from_sympy(condition)), bool).symbolic

    def create_unbacked_symint(
        self, source: Any = None, *, low: int | None = None, high: int | None = None,
        what: str = "create_unbacked_symint",
    ) -> torch.SymInt:  # fmt: skip
        """A whole number that only data tells, within `low` and `high`."""
        return self.node(self._unbacked("u", LEAST if low is None else low, high, what), int).symbolic

    def create_unbacked_symfloat(
        self, source: Any = None, *, what: str = "create_unbacked_symfloat"
    ) -> torch.SymFloat:
        """A float that only data tells."""
        return self.node(self.float_expr("value", self._unbacked("zuf", None, None, what)), float).symbolic

    def create_unbacked_symbool(
        self, source: Any = None, *, what: str = "create_unbacked_symbool"
    ) -> torch.SymBool:
        """A truth value that only data tells."""
        symbol = self._unbacked("u", 0, 1, what)
        condition = conditions.eq(symbol, 1)
        assert isinstance(condition, Condition)
        self.truths[condition] = symbol
        return self.node(condition, bool).symbolic

    def _unbacked(self, prefix: str, low: int | None, high: int | None, what: str) -> Expr:
        symbol = self.algebra.symbol(self._fresh_name(prefix), low, high)
        self.births[symbol] = SymbolOrigin(what, user_line())
        if not self._ignoring_fresh:
            self.pending_fresh_unbacked_symbols.append(symbol)
        symbol.is_unbacked = True
        return symbol

    def _name_from(self, source: Any) -> str:
        """`x_0` for `x.size(0)`, and for `L['x'].size(0)`, which is how torch says it, if nothing has that name."""
        place = re.fullmatch(r"(?:L\[')?([A-Za-z_]\w*)(?:'\])?\.size\((\d+)\)", source) if isinstance(source, str) else None
        name = f"{place[1]}_{place[2]}" if place else ""
        return name if name and name not in self.algebra.symbols else self._fresh_name("s")

    def _fresh_name(self, prefix: str) -> str:
        while True:
            number = self._named.get(prefix, 0)
            self._named[prefix] = number + 1
            name = f"{prefix}{number}"
            if name not in self.algebra.symbols:
                return name

    def add_input(self, name: str, shape: Any, stride: Any, offset: Any = 0) -> None:
        """What stands for the metadata of an input: needed to check other inputs, and to bind symbols to them."""
        while name in self.inputs.names:
            name += "_"
        self.inputs.add(name, shape, stride, offset)

    def is_unbacked(self, symbol: Expr) -> bool:
        """Whether a symbol has no example value, itself or through what it is computed from."""
        if symbol in self.definitions:
            return any(origin in self.births for origin in origins(symbol, self.definitions))
        return symbol in self.births

    # --- decisions -----------------------------------------------------------------------------------------

    def compare(self, relation: str, a: Any, b: Any) -> bool:
        """Decide a comparison of sizes, for rules."""
        if type(a) is float or type(b) is float:
            return self._decide_for_rule(self.condition(relation, self.node_of(a), self.node_of(b)))
        key = (relation, a, b)
        found = self._decided.get(key)
        if found is None:
            found = self._decide_for_rule(self._comparison(relation, a, b), (relation, a, b))
            if not self._suppressed:
                self._decided[key] = found
        return found

    def _comparison(self, relation: str, a: Any, b: Any) -> Any:
        a, b = self.node_of(a), self.node_of(b)
        if a.kind is int and b.kind is int and (type(b.value) is not int or b.value < MOST):
            return INTEGER_RELATIONS[relation](a.value, b.value)
        return self.condition(relation, a, b)

    def _decide_for_rule(self, condition: Any, asked: tuple[str, Any, Any] | None = None) -> bool:
        """As `decide`; but a size that only data knows is taken for an ordinary one: neither 0 nor 1, and fitting
        the others that it meets. What that takes for granted is checked when the program runs.

        `asked` is the comparison, where it is one. What is computed from such a size is taken for an ordinary one as
        well, if it meets 0 or 1; but u0 - 1 may well be 1, so that nothing is to be checked then."""
        answer = self.if_ordinary(condition)
        if answer is not None:
            return answer
        if not isinstance(condition, Condition) or self.hint_of(condition) is not None:
            return self.decide(condition)
        if asked is not None and (answer := self._if_larger_than_one(*asked)) is not None:
            return answer
        is_equality = condition.kind == "eq"
        self.expect(condition if is_equality else self.negated(condition))
        return is_equality

    def decide_in_kernel(self, condition: Any) -> bool:
        """As `decide`, for the branches of torch's kernels: with sizes that only data knows taken for ordinary ones, and a
        branch that is made of several questions decided as one."""
        answer = self.if_ordinary(condition)
        if answer is None:
            answer = self.known_truth(condition)
        if answer is None:
            answer = self.hint_of(condition)
            whole = None if answer is None else whole_question(condition, answer)
            if whole is None:
                return self.decide(condition)
            self.decide(whole)
        return answer

    def if_ordinary(self, condition: Any) -> bool | None:
        """What is known of a condition without example, if sizes that only data knows are neither 0 nor 1."""
        if not isinstance(condition, Condition) or self.hint_of(condition) is not None:
            return None
        answer = self.known_truth(condition)
        return (
            self.known_truth(condition.substitute(self._ordinary(condition.symbols)))
            if answer is None
            else answer
        )

    def _if_larger_than_one(self, relation: str, a: Any, b: Any) -> bool | None:
        """The answer, if one of the numbers is at most 1 and the other a size, larger than that unless it can't be.

        A remainder is no size: that it is 0 is what its question hopes for."""
        number, size = (a, b) if type(a) is int else (b, a)
        if type(number) is not int or number > 1:
            return None
        value = value_of(size)
        if any(atom.kind == "mod" for atom in getattr(value, "atoms", ())):
            return None
        if self.known_truth(conditions.le(value, 1)):
            return None
        return bool(INTEGER_RELATIONS[relation](a, 2) if number is a else INTEGER_RELATIONS[relation](2, b))

    def _ordinary(self, symbols: frozenset[Expr]) -> dict[Expr, Expr]:
        """For each symbol without example that may be a size: one like it that is at least 2."""
        result = {}
        for symbol in symbols:
            low, high = self.facts.interval(symbol)
            is_size = low is None or low >= 0 or symbol.low == LEAST
            if symbol in self.births and is_size and (high is None or high >= 2):
                if symbol not in self._ordinaries:
                    self._ordinaries[symbol] = self.algebra.symbol(f"{symbol.name}≥2", 2, high)
                result[symbol] = self._ordinaries[symbol]
        return result

    def decide(self, condition: Any, fallback: bool | None = None) -> bool:
        """True or False: by proof, else by the example (recorded as a guard), else the fallback, else an error."""
        answer = self.known_truth(condition)
        if answer is not None:
            return answer
        answer = self.hint_of(condition)
        if answer is None and isinstance(condition, Condition):
            condition = self._without_promised(condition)
            answer = self.hint_of(condition)
        if answer is None:
            if fallback is not None:
                return fallback
            raise self.undecidable(condition)
        self._assume(condition if answer else self.negated(condition))
        return bool(answer)

    def _without_promised(self, condition: Condition) -> Any:
        """With what sizes that only data knows were promised to be, in the place of these: there may be an example."""
        promised = {symbol: self.facts.simplify(symbol) for symbol in condition.symbols if symbol in self.births}
        promised = {symbol: value for symbol, value in promised.items() if value is not symbol}
        return condition.substitute(promised) if promised else condition

    def prove(self, condition: Any) -> Proof:
        """YES or NO for all sizes that are admitted, else UNKNOWN. Asking records nothing."""
        answer = self.known_truth(condition)
        return Proof.UNKNOWN if answer is None else Proof.YES if answer else Proof.NO

    def specialise(self, value: Any) -> Any:
        """The number that a symbolic value has to be from now on."""
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, Expr):
            value = self.facts.simplify(value)
            if isinstance(value, int):
                return value
        elif not isinstance(value, FloatExpr):
            return self.decide(value)
        number = self.hint_of(value)
        if number is None:
            raise self.undecidable(value)
        kind = int if isinstance(value, Expr) else float
        equal = self.condition("==", self.node(value, kind), self.node(number, kind))
        if self.known_truth(equal) is None:
            self._assume(equal, is_specialisation=True)
        return number

    def expect(self, condition: Any, is_refused_else: bool = False) -> bool:
        """`torch._check`: a decision if there is an example, else a fact to be checked when the program runs.

        `is_refused_else`: the operator that asks does so itself, and nobody else has to."""
        answer = self.known_truth(condition)
        if answer is not None:
            return answer
        answer = self.hint_of(condition)
        if answer is not None and not (answer and self.settings.prefer_deferred_runtime_asserts_over_guards):
            self._assume(condition if answer else self.negated(condition))
            return bool(answer)
        self._promise(condition, is_refused_else)
        self._learn(condition)
        return True

    def _promise(self, condition: Any, is_refused_else: bool) -> None:
        if not self.runtime_asserts_frozen:
            line = user_line()
            promise = Guard(condition, line, is_refused_else=is_refused_else, definitions=self.definitions)
            self.runtime_asserts.append(promise)

    def _assume(self, condition: Any, is_specialisation: bool = False) -> None:
        if isinstance(condition, bool) or self._suppressed:
            return
        parts = separate(condition) if isinstance(condition, Condition) else (condition,)
        if len(parts) > 1:
            for part in parts:  # each as far as it says more than those before it
                if self.known_truth(part) is None:
                    self._assume(part, is_specialisation)
            return
        if self._guards_are_errors:
            raise GuardsFrozen(f"it would have to be assumed that {condition}, where nothing more was to be")
        shorter = self.facts.simplify_condition(condition) if isinstance(condition, Condition) else condition
        self._learn(condition)
        if shorter is not condition and shorter.kind == "eq":
            self._learn(shorter)  # said like that, it may teach more
        guard = Guard(shorter, user_line(), is_specialisation, definitions=self.definitions)
        self.guards.append(guard)
        self._report_specialised(guard, condition.symbols)

    def _learn(self, condition: Any) -> None:
        if isinstance(condition, Condition):
            self.facts.learn(condition)
        else:
            self.float_facts[condition] = True
            self.float_facts[self.negated(condition)] = False
        if self.choices:
            self._settle_choices()

    def _settle_choices(self) -> None:
        """What `sym_ite` gave is one of the two, as soon as it is known which."""
        for symbol, choice in list(self.choices.items()):
            condition, then, otherwise = choice.arguments
            answer = self.known_truth(condition)
            if answer is None or symbol not in self.choices:
                continue
            del self.choices[symbol]
            equal = conditions.eq(symbol, then if answer else otherwise)
            if isinstance(equal, Condition):
                self._learn(equal)

    def _report_specialised(self, guard: Guard, symbols: frozenset[Expr]) -> None:
        """Each of the symbols that the guard leaves one value is reported, once."""
        for symbol in sorted(symbols - self._specialised, key=lambda s: s.order):
            number = self.facts.simplify(symbol)
            if isinstance(number, int) and symbol not in self.definitions:
                self._specialised.add(symbol)
                for node in list(self.nodes.values()):
                    if node.kind is int and not node.is_plain and symbol in node.value.symbols:
                        self.tell(node)
                reason = "" if guard.is_specialisation else guard.text
                self.specialisations.append(Specialisation(symbol.name, number, guard.line, reason))

    def undecidable(self, asked: Any) -> GuardOnDataDependentSymNode:
        return undecidable.error(self, asked)

    # --- switches ------------------------------------------------------------------------------------------

    @property
    def suppresses_guards(self) -> bool:
        """Whether decisions go unrecorded just now: what follows from them must not be kept."""
        return self._suppressed > 0

    @contextmanager
    def suppress_guards(self) -> Iterator[None]:
        """Decisions are made, and not recorded."""
        self._suppressed += 1
        try:
            yield
        finally:
            self._suppressed -= 1

    @contextmanager
    def error_on_new_guards(self) -> Iterator[None]:
        """Whatever would have to be assumed is an error."""
        before, self._guards_are_errors = self._guards_are_errors, True
        try:
            yield
        finally:
            self._guards_are_errors = before

    @contextmanager
    def from_memory(self) -> Iterator[None]:
        """Only what was answered before is answered; anything else raises `NotRemembered`."""
        before, self._from_memory = self._from_memory, True
        try:
            yield
        finally:
            self._from_memory = before

    @contextmanager
    def ignore_fresh_unbacked_symbols(self) -> Iterator[None]:
        """Symbols born here are nobody's to bind."""
        self._ignoring_fresh += 1
        try:
            yield
        finally:
            self._ignoring_fresh -= 1
