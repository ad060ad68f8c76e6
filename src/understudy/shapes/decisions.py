"""Decisions on conditions: by proof, by hints (with a guard), or by a promise (with a runtime assert).

At the end: the error for a data-dependent decision, with the condition, the origin of its symbols, and what to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from understudy.errors import Context, GuardOnDataDependentSymNode, GuardsFrozen
from understudy.lines import find_asserted_truth, is_asked_by_operator, user_frames, user_line
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition, separate
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.facts import Proof
from understudy.shapes.algebra.floats import (
    INTEGER_RELATIONS,
    AnyCondition,
    Combination,
    Comparison,
    FloatExpr,
    Operand,
    Truth,
    bounds_of,
    compared_by_bounds,
    evaluate,
)
from understudy.shapes.algebra.writers import TorchWriter
from understudy.shapes.arithmetic import LEAST, MOST, NUMBERS, NotMemoised
from understudy.shapes.checking import origins
from understudy.shapes.guards import Guard, Specialisation
from understudy.shapes.node import Scalar, SymNode, value_of

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

KNOWN: dict[str, bool | None] = {"YES": True, "NO": False, "UNKNOWN": None}


class Decisions:
    """Decides conditions. Assumptions are recorded as guards or runtime asserts."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env, self.numbers = env, env.numbers
        self.algebra, self.facts, self.hints = env.algebra, env.facts, env.hints
        self.unbacked, self.definitions, self.choices = env.unbacked, env.definitions, env.choices
        self.float_facts = env.float_facts
        self.suppressions = 0
        """If above 0, nothing is recorded."""
        self.refuses_guards = False
        self._decided: dict[tuple[str, Scalar, Scalar], bool] = {}
        self._failing: dict[Condition, bool] = {}
        self._ordinary_symbols: dict[Expr, Expr] = {}

    def compare(self, relation: str, a: Scalar, b: Scalar) -> bool:
        """Decide a comparison of sizes, for rules."""
        if type(a) is float or type(b) is float:
            return self._decide_for_rule(self._build_comparison(relation, a, b))
        key = (relation, a, b)
        found = self._decided.get(key)
        if found is None:
            found = self._decide_for_rule(self._build_comparison(relation, a, b), (relation, a, b))
            if not self.suppressions:
                self._decided[key] = found
        return found

    def _build_comparison(self, relation: str, x: Scalar, y: Scalar) -> Truth:
        a, b = self.numbers.as_node(x), self.numbers.as_node(y)
        if a.kind is int and b.kind is int and (type(b.value) is not int or b.value < MOST):
            return INTEGER_RELATIONS[relation](a.value, b.value)
        return self.numbers.build_condition(relation, a, b)

    def _decide_for_rule(self, condition: Truth, asked: tuple[str, Scalar, Scalar] | None = None) -> bool:
        """As `decide`; but an unbacked size is assumed to be neither 0 nor 1, and to match the sizes it is compared
        with. These assumptions are checked when the program runs.

        `asked` is the comparison, where it is one. An expression of unbacked sizes is also assumed not to be 0 or 1;
        but u0 - 1 may well be 1, so that is not checked."""
        answer = self.decide_for_ordinary(condition)
        if answer is not None:
            return answer
        if not isinstance(condition, Condition) or self.get_hint(condition) is not None:
            return self.decide(condition)
        if asked is not None and (answer := self._decide_if_larger_than_one(*asked)) is not None:
            return answer
        is_equality = condition.kind == "eq"
        self.expect(condition if is_equality else self.numbers.negate_condition(condition))
        return is_equality

    def decide_in_kernel(self, condition: Truth) -> bool:
        """As `decide`, for branches in torch's kernels: unbacked sizes are assumed to be neither 0 nor 1."""
        answer = self.decide_for_ordinary(condition)
        return self.decide(condition) if answer is None else answer

    def decide_for_ordinary(self, condition: Truth) -> bool | None:
        """The value of a condition without hint, if it can be proved for unbacked sizes of at least 2; else None."""
        if not isinstance(condition, Condition) or self.get_hint(condition) is not None:
            return None
        answer = self.find_truth(condition)
        return (
            self.find_truth(condition.substitute(self._find_ordinary(condition.symbols)))
            if answer is None
            else answer
        )

    def _decide_if_larger_than_one(self, relation: str, a: Scalar, b: Scalar) -> bool | None:
        """The answer if one side is at most 1 and the other an unbacked size, which is assumed to be larger.

        Not for remainders, which are usually compared with 0 because they often are."""
        number, size = (a, b) if type(a) is int else (b, a)
        if type(number) is not int or number > 1:
            return None
        value = value_of(size)
        if any(atom.kind == "mod" for atom in getattr(value, "atoms", ())):
            return None
        if self.find_truth(conditions.le(value, 1)):
            return None
        return bool(INTEGER_RELATIONS[relation](*((number, 2) if number is a else (2, number))))

    def _find_ordinary(self, symbols: frozenset[Expr]) -> dict[Expr, Expr]:
        """For each unbacked symbol that may be a size: a symbol that is at least 2."""
        result = {}
        for symbol in symbols:
            low, high = self.facts.interval(symbol)
            is_size = low is None or low >= 0 or symbol.low == LEAST
            if symbol in self.unbacked and is_size and (high is None or high >= 2):
                if symbol not in self._ordinary_symbols:
                    self._ordinary_symbols[symbol] = self.algebra.symbol(f"{symbol.name}≥2", 2, high)
                result[symbol] = self._ordinary_symbols[symbol]
        return result

    def decide(self, condition: Truth, fallback: bool | None = None) -> bool:
        """True or False: by proof, else by hints (recorded as a guard), else the fallback, else an error."""
        answer = self.find_truth(condition)
        if answer is not None:
            return answer
        answer = self.get_hint(condition)
        if answer is None and isinstance(condition, Condition):
            condition = self._replace_promised(condition)
            answer = self.get_hint(condition)
        if answer is None:
            if fallback is not None:
                return fallback
            assert not isinstance(condition, bool)  # handled before
            asserted = find_asserted_truth() if self.env.settings.trace_asserts else None
            if asserted is not None:
                self.expect(condition if asserted else self.numbers.negate_condition(condition))
                return asserted
            real = self.get_real_value(condition) if self.env.real_values else None
            if real is None:
                raise self.make_error(condition)
            self.expect(condition if real else self.numbers.negate_condition(condition))
            return bool(real)
        self._assume(condition if answer else self.numbers.negate_condition(condition))
        return bool(answer)

    def _replace_promised(self, condition: Condition) -> bool | Condition:
        """Replace unbacked sizes by what `torch._check` has promised them to equal, which may have a hint."""
        promised = {
            symbol: self.facts.simplify(symbol) for symbol in condition.symbols if symbol in self.unbacked
        }
        promised = {symbol: value for symbol, value in promised.items() if value is not symbol}
        return condition.substitute(promised) if promised else condition

    def prove(self, condition: Truth) -> Proof:
        """YES or NO if it is proved for all sizes that satisfy the guards, else UNKNOWN. Adds no guard."""
        answer = self.find_truth(condition)
        return Proof.UNKNOWN if answer is None else Proof.YES if answer else Proof.NO

    def specialise(self, value: Operand) -> float:
        """Specialise a symbolic value to its hint, with a guard."""
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, Expr):
            value = self.facts.simplify(value)
            if isinstance(value, int):
                return value
        elif not isinstance(value, FloatExpr):
            return self.decide(value)
        number = self.get_hint(value)
        has_hint = number is not None
        if not has_hint and self.env.real_values:
            number = self.get_real_value(value)
        if number is None:
            raise self.make_error(value)
        kind = int if isinstance(value, Expr) else float
        equal = self.numbers.build_condition(
            "==", self.numbers.node(value, kind), self.numbers.node(number, kind)
        )
        if not has_hint:
            self.expect(equal)
        elif self.find_truth(equal) is None:
            self._assume(equal, is_specialisation=True)
        return number

    def expect(self, condition: Truth, is_checked_by_operator: bool = False) -> bool:
        """`torch._check`: a decision if there are hints, else a promise, which is checked when the program runs.

        `is_checked_by_operator`: the operator checks it itself when it runs."""
        answer = self.find_truth(condition)
        if answer is not None or isinstance(condition, bool):
            return bool(answer)
        answer = self.get_hint(condition)
        if answer is not None and not (
            answer and self.env.settings.prefer_deferred_runtime_asserts_over_guards
        ):
            self._assume(condition if answer else self.numbers.negate_condition(condition))
            return bool(answer)
        self.record_assert(condition, is_checked_by_operator)
        self._learn(condition)
        return True

    def record_assert(self, condition: AnyCondition, is_checked_by_operator: bool = False) -> None:
        """Record a condition that is checked when the program runs, without concluding anything from it."""
        if not self.env.runtime_asserts_frozen:
            line = user_line()
            promise = Guard(
                condition, line, is_checked_by_operator=is_checked_by_operator, definitions=self.definitions
            )
            self.env.runtime_asserts.append(promise)

    def _assume(self, condition: Truth, is_specialisation: bool = False) -> None:
        if isinstance(condition, bool) or self.suppressions:
            return
        parts = separate(condition) if isinstance(condition, Condition) else (condition,)
        if len(parts) > 1:
            for part in parts:  # each part, simplified by the ones before it
                if self.find_truth(part) is None:
                    self._assume(part, is_specialisation)
            return
        if self.refuses_guards:
            raise GuardsFrozen(f"guards are frozen, but the run needs a new one: {condition}")
        shorter: AnyCondition = condition
        if isinstance(condition, Condition):
            shorter = self.facts.simplify_condition(condition)
        self._learn(condition)
        if shorter is not condition and isinstance(shorter, Condition) and shorter.kind == "eq":
            self._learn(shorter)  # the simplified form may have more consequences
        guard = Guard(
            shorter,
            user_line(),
            is_specialisation,
            is_of_operator=is_asked_by_operator(),
            definitions=self.definitions,
        )
        self.env.guards.append(guard)
        self._report_specialisations(guard, condition.symbols)

    def _learn(self, condition: AnyCondition) -> None:
        if isinstance(condition, Condition):
            self.facts.learn(condition)
        else:
            self.float_facts[condition] = True
            self.float_facts[self.numbers.negate_float_condition(condition)] = False
        if self.choices:
            self._settle_choices()

    def _settle_choices(self) -> None:
        """Unify the results of `sym_ite` with one of their operands, once the condition is known."""
        for symbol, choice in list(self.choices.items()):
            condition, then, otherwise = choice.choice
            answer = self.find_truth(condition)
            if answer is None or symbol not in self.choices:
                continue
            del self.choices[symbol]
            equal = conditions.eq(symbol, then if answer else otherwise)
            if isinstance(equal, Condition):
                self._learn(equal)

    def _report_specialisations(self, guard: Guard, symbols: frozenset[Expr]) -> None:
        """Report each symbol that the guard specialises, once."""
        for symbol in sorted(symbols - self.env.specialised_symbols, key=lambda s: s.order):
            number = self.facts.simplify(symbol)
            if isinstance(number, int) and symbol not in self.definitions:
                self.env.specialised_symbols.add(symbol)
                for node in list(self.env.nodes.values()):
                    if node.kind is int and not node.is_plain and symbol in node.value.symbols:
                        self.numbers.update_constant(node)
                reason = "" if guard.is_specialisation else guard.text
                self.env.specialisations.append(Specialisation(symbol.name, number, guard.line, reason))

    def make_error(self, asked: Question) -> GuardOnDataDependentSymNode:
        return make_error(self.env, asked)

    # --- without guards ------------------------------------------------------------------------------------

    def find_truth(self, condition: Truth) -> bool | None:
        """True or False if it is proved, else None."""
        if isinstance(condition, bool):
            return condition
        if self.numbers.is_limited_to_memory:
            return self._require_truth(condition)
        if isinstance(condition, Condition):
            return KNOWN[self.facts.prove(condition).name]
        if condition in self.float_facts:
            return self.float_facts[condition]
        if isinstance(condition, Comparison):
            sides = [bounds_of(side, self.facts.interval) for side in (condition.left, condition.right)]
            return compared_by_bounds(condition.relation, *sides)
        known = [self.find_truth(part) for part in condition.parts]
        decisive = condition.kind == "or"
        if decisive in known:
            return decisive
        return None if None in known else not decisive

    def recall_truth(self, condition: Truth) -> bool | None:
        """True or False if that was proved before; else None."""
        if isinstance(condition, bool):
            return condition
        return KNOWN[self.facts.recall(condition).name] if isinstance(condition, Condition) else None

    def _require_truth(self, condition: AnyCondition) -> bool:
        found = self.recall_truth(condition)
        if found is None:
            raise NotMemoised
        return found

    def is_known(self, condition: Truth) -> bool:
        """Whether it can be proved. Adds no guard."""
        if self.fails_at_hints(condition):
            return False  # no proof is possible
        return self.find_truth(condition) is True

    def fails_at_hints(self, condition: Truth) -> bool:
        """Whether a condition is false for the hints."""
        if not isinstance(condition, Condition):
            return False
        found = self._failing.get(condition)
        if found is None:
            try:
                hint = self.get_hint(condition)
            except ArithmeticError:  # it can't be computed for the hints
                hint = True
            if hint is None:
                return False
            found = self._failing[condition] = not hint
        return found

    # --- hints ------------------------------------------------------------------------------------------

    def get_hint(self, value: Operand) -> Any:
        """The value for the hints, None if it depends on an unbacked symbol."""
        if isinstance(value, NUMBERS):
            return value
        if any(symbol not in self.hints for symbol in value.symbols):
            return None
        return evaluate(value, self.hints)

    def get_real_value(self, value: Operand) -> Any:
        """The value for the hints, and for the real values of unbacked symbols; None if one of these is not known."""
        if isinstance(value, NUMBERS):
            return value
        known = {**self.hints, **self.env.real_values}
        return evaluate(value, known) if all(symbol in known for symbol in value.symbols) else None

    def simplify(self, value: Operand) -> Operand:
        if isinstance(value, Expr):
            return self.facts.simplify(value)
        if isinstance(value, FloatExpr) and value.operation != "value":
            known = {symbol: self.facts.simplify(symbol) for symbol in value.symbols}
            numbers = {symbol: number for symbol, number in known.items() if isinstance(number, int)}
            if len(numbers) == len(known):
                return float(value.evaluate(numbers))
        return value

    # --- switches ------------------------------------------------------------------------------------------

    @contextmanager
    def suppress_guards(self) -> Iterator[None]:
        """Inside, decisions are made without recording guards."""
        self.suppressions += 1
        try:
            yield
        finally:
            self.suppressions -= 1

    @contextmanager
    def error_on_new_guards(self) -> Iterator[None]:
        """Inside, every new guard is an error."""
        before, self.refuses_guards = self.refuses_guards, True
        try:
            yield
        finally:
            self.refuses_guards = before

    @contextmanager
    def limit_to_memo(self) -> Iterator[None]:
        """Inside, only memoised results are used; everything else raises `NotMemoised`."""
        numbers = self.numbers
        before, numbers.is_limited_to_memory = numbers.is_limited_to_memory, True
        try:
            yield
        finally:
            numbers.is_limited_to_memory = before


Question = Expr | FloatExpr | AnyCondition
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
CONDITIONS = (Condition, Comparison, Combination)
PLAIN_NUMBERS_ONLY = "int(), range(), len(), a list index or math.sqrt (** 0.5 works)"
OURS = "understudy."
MANY = 64
"""Larger lists, dicts and objects are not searched for names of symbols."""


def make_error(env: ShapeEnv, asked: Question) -> GuardOnDataDependentSymNode:
    symbols = {s for symbol in asked.symbols for s in origins(symbol, env.definitions)}
    unbacked = sorted((s for s in symbols if s in env.unbacked), key=lambda s: s.order)
    names = find_names(env, symbols)
    is_condition = isinstance(asked, CONDITIONS)
    question = f"whether {asked}" if is_condition else f"the value of {asked}"
    born = "; ".join(f"{symbol.name} was made by {env.unbacked[symbol]}" for symbol in unbacked)
    line = user_line()
    if strangers := sorted(s.name for s in symbols if s not in env.unbacked and s not in env.hints):
        return GuardOnDataDependentSymNode(
            f"the program depends on {question}, but {', '.join(strangers)} belongs to another ShapeEnv",
            context=Context(evaluating=str(asked), line=line, hint="convert all inputs with one mode"),
        )
    made = GuardOnDataDependentSymNode(
        f"the program depends on {question}, which is data-dependent: {born}",
        context=Context(
            evaluating=str(asked),
            line=line,
            hint=advise_on_loops(line)
            + advise_on_names(env, [s for s in unbacked if s not in names])
            + advise(env, asked, names),
        ),
    )
    made.cond = asked
    return made


def advise(env: ShapeEnv, asked: Question, names: dict[Expr, str]) -> str:
    """The line of code to add, in terms of the user's variables."""
    if isinstance(asked, CONDITIONS):
        holds, fails = (write_check(env, c, names) for c in (asked, env.numbers.negate_condition(asked)))
        return f"state the condition before it is used: {holds} or {fails}"
    paste = f"torch._check({TorchWriter(names, env.definitions).write(asked).text} == <number>)"
    return f"state the value before it is used: {paste}; or keep it a symbol: do not pass it to {PLAIN_NUMBERS_ONLY}"


def advise_on_loops(line: str) -> str:
    """For `for row in rows:`: the number of iterations is data-dependent, and a graph contains every iteration."""
    loop = line.rpartition(": for ")
    if not loop[1] or "range(" in loop[2]:
        return ""
    grouped = (
        "; for a mixture of experts, use the grouped implementation, in transformers "
        "model.set_experts_implementation('grouped_mm')"
    )
    return (
        "the iteration count depends on data; loop over the maximum instead, and mask with torch.where, or replace "
        f"the loop by one batched call{grouped if 'expert' in line else ''}; if the count is known, "
    )


def advise_on_names(env: ShapeEnv, unnamed: list[Expr]) -> str:
    """Advice for symbols that no variable holds."""
    if not unnamed:
        return ""
    read = {
        symbol: "(…).item()" if env.unbacked[symbol].what.startswith(".item()") else "(…).shape[…]"
        for symbol in unnamed
    }
    kept = ", ".join(f"{symbol.name} = {how}" for symbol, how in read.items())
    return f"assign it to a variable, {kept}, use that one, and "


def write_check(env: ShapeEnv, condition: Truth, names: dict[Expr, str]) -> str:
    for truth, symbol in env.truths.items():
        if condition is truth or condition is env.numbers.negate_condition(truth):
            name = names.get(symbol, symbol.name)
            return f"torch._check({name})" if condition is truth else f"torch._check(torch.sym_not({name}))"
    return f"torch._check({TorchWriter(names, env.definitions).write(condition).text})"


def find_names(env: ShapeEnv, symbols: set[Expr]) -> dict[Expr, str]:
    """For each symbol, an expression for it in the user's current frame: `n`, `kept.shape[0]`, `self.lengths[0]`."""
    found: dict[Expr, str] = {}
    for frame in user_frames():
        held = [(name, value) for name, value in frame.f_locals.items() if not name.startswith("_")]
        inside = [part for name, value in held for part in list_parts(name, value)]
        deeper = [part for name, value in inside for part in list_parts(name, value)]
        for name, value in (*held, *inside, *deeper):
            for symbol, text in list_symbols(env, name, value):
                if symbol in symbols:
                    found.setdefault(symbol, text)
        if len(found) == len(symbols):
            break
    return found


def list_parts(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """The parts of a variable (items of lists, tuples and dicts, attributes of objects), each with its expression."""
    if type(value) in (list, tuple):
        pairs = [(f"{name}[{position}]", part) for position, part in enumerate(value[:MANY])]
    elif isinstance(value, dict):
        pairs = [(f"{name}[{key!r}]", part) for key, part in value.items() if isinstance(key, (str, int))]
    elif isinstance(value, (torch.Tensor, type, ModuleType, FunctionType)) or type(
        value
    ).__module__.startswith(OURS):
        return
    else:
        held = getattr(value, "__dict__", {})
        pairs = [(f"{name}.{key}", part) for key, part in held.items() if not key.startswith("_")]
    if len(pairs) <= MANY:
        yield from pairs


def list_symbols(env: ShapeEnv, name: str, value: object) -> Iterator[tuple[Expr, str]]:
    """The symbols in a variable, each with its expression."""
    if isinstance(value, SYMBOLIC):
        yield from find_symbol(env, value.node, name)
    elif isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)
        for dim, size in enumerate(spec.shape if spec is not None else ()):
            yield from find_symbol(env, size, f"{name}.shape[{dim}]")
        read = getattr(value, "item_memo", None)
        if isinstance(read, SYMBOLIC):
            yield from find_symbol(env, read.node, f"{name}.item()")


def find_symbol(env: ShapeEnv, node: int | SymNode, text: str) -> Iterator[tuple[Expr, str]]:
    if type(node) is not SymNode or node.shape_env is not env:
        return
    value = node.value
    if isinstance(value, Expr) and value.is_symbol:
        yield value, text
    elif value in env.truths:
        yield env.truths[value], text
    elif isinstance(value, FloatExpr) and value.unbacked_symbol is not None:
        yield value.unbacked_symbol, text
