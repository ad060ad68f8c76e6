"""A form of expressions and facts that environments share: symbols are identified by name.

Two captures of a program make the same symbols and guards, but each has its own environment. A `Pattern` is an
expression without its environment. A `KnowledgeStep` represents everything that the answers of an environment depend
on: its settings, its symbols with their ranges and hints, and its facts. Environments with the same knowledge prove the
same conditions: an answer that added no guard in one holds in the other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv


class NoPattern(Exception):
    """The value can't be expressed without its environment."""


class Interned:
    """Objects with equal keys are the same object, while a reference to it exists."""

    __slots__ = ("__weakref__", "content", "key")

    def __init__(self, key: object, content: Any) -> None:
        self.key = key
        self.content = content


class Pattern(Interned):
    """`content` describes the expression: the name of a symbol; the kind of an atom and its arguments; or "sum" and its
    terms, in their order in the environment in which the pattern was made."""

    __slots__ = ()


class KnowledgeStep(Interned):
    """A fact or symbol, linked to the step before it."""

    __slots__ = ()


_interned: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_lock = threading.Lock()


def intern(kind: type[Interned], key: object, content: tuple[object, ...] | None = None) -> Any:
    whole = (kind, key)
    found = _interned.get(whole)
    if found is None:
        with _lock:
            found = _interned.setdefault(whole, kind(whole, content))
    return found


class Patterns:
    """Converts expressions of one environment to patterns and back."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self._forms: dict[Expr, Pattern] = {}
        self._nodes: dict[Pattern, SymNode] = {}
        self._settings: Any = None
        self._knowledge: Any = None
        self._symbols = self._facts = 0

    # --- knowledge ----------------------------------------------------------------------------------------------

    def knowledge(self) -> KnowledgeStep | None:
        """The knowledge of the environment; None if it has other facts than those about integers with hints."""
        env = self.env
        symbols, facts = env.algebra.symbols, env.facts
        if self._settings is not env.settings:
            self._settings = env.settings
            self._knowledge = intern(KnowledgeStep, env.settings)
            self._symbols = self._facts = 0
        if len(symbols) != self._symbols or facts.count != self._facts:
            if self._knowledge is not None:
                self._knowledge = self._extend(self._knowledge)
            self._symbols, self._facts = len(symbols), facts.count
        return self._knowledge if not (env.float_facts or env.choices) else None

    def _extend(self, knowledge: KnowledgeStep) -> KnowledgeStep | None:
        """Extend the knowledge by new facts and symbols. Symbols computed from floats, and unbacked ones, are not
        included."""
        env = self.env
        if env.unbacked or env.definitions:
            return None
        try:
            for symbol in list(env.algebra.symbols.values())[self._symbols :]:
                about = (symbol.name, symbol.low, symbol.high, env.hints.get(symbol))
                knowledge = intern(KnowledgeStep, (knowledge, about))
            for condition in env.facts.conditions[self._facts :]:
                knowledge = intern(KnowledgeStep, (knowledge, self._of_condition(condition)))
        except NoPattern:
            return None
        return knowledge

    def _of_condition(self, condition: Condition) -> object:
        if condition.parts:
            return (condition.kind, *map(self._of_condition, condition.parts))
        return (condition.kind, self.form(condition.expr))

    # --- forms --------------------------------------------------------------------------------------------------

    def form_of(self, node: SymNode) -> Pattern:
        """The pattern of an integer of this environment."""
        value = node.value
        if node.shape_env is not self.env or type(value) is not Expr:
            raise NoPattern
        return self.form(value)

    def form(self, expr: Expr) -> Pattern:
        found = self._forms.get(expr)
        if found is None:
            found = self._forms[expr] = self._new_form(expr)
        return found

    def _new_form(self, expr: Expr) -> Pattern:
        if expr.is_symbol:
            if expr.is_hidden:
                raise NoPattern
            return intern(Pattern, expr.name, ("symbol", expr.name))
        if expr.kind != "sum":
            args = tuple([self.form(arg) if isinstance(arg, Expr) else arg for arg in expr.args])
            return intern(Pattern, (expr.kind, args), (expr.kind, args))
        terms = tuple(
            [
                (tuple([(self.form(atom), exponent) for atom, exponent in monomial]), coefficient)
                for monomial, coefficient in expr.terms
            ]
        )
        # The order of terms and factors depends on the creation of their atoms: it is not part of the key.
        key = frozenset([(frozenset(monomial), coefficient) for monomial, coefficient in terms])
        return intern(Pattern, key, ("sum", terms))

    def node(self, form: Pattern) -> SymNode:
        """The number of this environment with this pattern."""
        found = self._nodes.get(form)
        if found is None:
            found = self._nodes[form] = self.env.node(self.expr(form), int)
        return found

    def expr(self, form: Pattern) -> Expr:
        kind, parts = form.content
        algebra = self.env.algebra
        made: Any
        if kind == "symbol":
            made = algebra.symbols.get(parts)
        elif kind == "sum":
            table = {}
            for factors, coefficient in parts:
                monomial = [(self.expr(factor), exponent) for factor, exponent in factors]
                table[tuple(sorted(monomial, key=lambda item: item[0].order))] = coefficient
            made = algebra.normal(table)
        else:
            made = algebra.atom(kind, tuple([arg if type(arg) is int else self.expr(arg) for arg in parts]))
        if type(made) is not Expr or self.form(made) is not form:
            raise NoPattern
        return made

    # --- changes of the environment ------------------------------------------------------------------------

    def marks(self) -> tuple[int, ...]:
        """Counters that differ after a new guard, promise or specialisation."""
        env = self.env
        return len(env.guards), len(env.runtime_asserts), len(env.specialisations)

    def count_atoms(self) -> int:
        return self.env.algebra.count_atoms()

    def atoms_since(self, count: int) -> tuple[Pattern, ...]:
        """The atoms made since, without hidden ones."""
        made = self.env.algebra.atoms_since(count)
        return tuple(
            [self.form(atom) for atom in made if not any(symbol.is_hidden for symbol in atom.symbols)]
        )
