"""Plans, and other answers about calls, that captures with different symbols share.

A capture with symbolic sizes begins with an environment of its own, in whose terms its plans are said. What a call does
depends on what the environment knows and on the forms of the sizes (see `shapes/patterns.py`): an answer that was found
without assuming anything is kept in these terms, and put into those of the next environment that knows the same. Calls
that made the environment assume something are inferred again in each, with guards and lines of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from understudy.infer.cache import Cache
from understudy.infer.plan import Plan
from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import SymNode
from understudy.shapes.patterns import Interned, NoPattern, Pattern, Patterns, intern
from understudy.spec import Changed, New, Same, TensorSpec, Value, View

SAME_EVERYWHERE = (int, float, bool, complex, str, type(None))


class SpecForm(Interned):
    """A spec without its environment: `content` holds shape, stride and offset, and the other fields by name."""

    __slots__ = ()


class SharedAnswer(NamedTuple):
    """An answer with forms in the place of specs and numbers, and the forms of atoms that were made on the way.

    Atoms are written in the order of their birth: for the same text, they have to be born in the same one."""

    content: Any
    atoms: tuple[Pattern, ...]


class SharedQuestion(NamedTuple):
    """A call in these terms, and what was there before it was answered."""

    key: tuple[Any, ...]
    marks: tuple[int, ...]
    atoms: int


class SharedPlans:
    """The shared plans in the terms of one environment."""

    def __init__(self, env: ShapeEnv, cache: Cache) -> None:
        self._patterns = Patterns(env)
        self._cache = cache
        self._forms: dict[TensorSpec, SpecForm] = {}
        self._specs: dict[SpecForm, TensorSpec] = {}

    def question(self, key: tuple[Any, ...]) -> SharedQuestion | None:
        """A key of the dispatch cache without its environment; None if it means nothing elsewhere."""
        knowledge = self._patterns.knowledge()
        if knowledge is None:
            return None
        parts: list[Any] = [knowledge]
        forms, patterns = self._forms, self._patterns
        try:
            for part in key:
                kind = type(part)
                if kind is TensorSpec and part.is_symbolic:
                    parts.append(forms.get(part) or self._form(part))
                elif kind is SymNode:
                    parts.append(patterns.form_of(part))
                else:
                    parts.append(part)
        except NoPattern:
            return None
        return SharedQuestion(tuple(parts), patterns.marks(), patterns.count_atoms())

    def answer(self, question: SharedQuestion, said_here: Callable[[Any], Any]) -> Any:
        """The answer to such a question, as it is said here; None if none is known."""
        shared = self._cache.shared.get(question.key)
        if shared is None:
            return None
        try:
            for atom in shared.atoms:
                self._patterns.expr(atom)
            return said_here(shared.content)
        except NoPattern:
            return None

    def keep(self, question: SharedQuestion, said_anywhere: Callable[[Any], Any], answer: object) -> None:
        """Share an answer, if nothing was assumed to find it."""
        patterns = self._patterns
        if patterns.knowledge() is not question.key[0] or patterns.marks() != question.marks:
            return
        try:
            content = said_anywhere(answer)
        except NoPattern:
            return
        self._cache.add_shared(question.key, SharedAnswer(content, patterns.atoms_since(question.atoms)))

    def plan(self, question: SharedQuestion) -> Plan | None:
        """The plan of such a call, if one is known."""
        found: Plan | None = self.answer(question, self._plan_here)
        return found

    def keep_plan(self, question: SharedQuestion, plan: Plan) -> None:
        self.keep(question, self._plan_anywhere, plan)

    def _plan_here(self, plan: Plan) -> Plan:
        return plan.with_outcomes(_replace_specs(plan.outcomes, self.here))

    def _plan_anywhere(self, plan: Plan) -> Plan:
        return plan.with_outcomes(_replace_specs(plan.outcomes, self.anywhere))

    # --- specs and numbers ----------------------------------------------------------------------------------------

    def anywhere(self, part: object) -> Any:
        """A spec or a number without its environment."""
        if type(part) is TensorSpec:
            return (self._forms.get(part) or self._form(part)) if part.is_symbolic else part
        if type(part) is SymNode:
            return self._patterns.form_of(part)
        if type(part) not in SAME_EVERYWHERE:
            raise NoPattern
        return part

    def here(self, part: object) -> Any:
        """And in this one."""
        if type(part) is SpecForm:
            return self._specs.get(part) or self._spec(part)
        return self._patterns.node(part) if type(part) is Pattern else part

    def _form(self, spec: TensorSpec) -> SpecForm:
        if spec.sparse is not None:
            raise NoPattern
        form_of = self._patterns.form_of

        def forms(sizes: Any) -> tuple[Any, ...]:
            return tuple([size if type(size) is int else form_of(size) for size in sizes])

        content = (
            forms(spec.shape), forms(spec.stride), forms((spec.offset,)),
            spec.dtype, spec.device, spec.layout, spec.conj, spec.neg,
        )  # fmt: skip
        found: SpecForm = intern(SpecForm, content, content)
        self._forms[spec] = found
        self._specs[found] = spec
        return found

    def _spec(self, form: SpecForm) -> TensorSpec:
        node = self._patterns.node

        def sizes(forms: Any) -> tuple[Any, ...]:
            return tuple([size if type(size) is int else node(size) for size in forms])

        shape, stride, offset, dtype, device, layout, conj, neg = form.content
        found = TensorSpec(
            sizes(shape), sizes(stride), *sizes(offset), dtype=dtype, device=device, layout=layout, conj=conj, neg=neg
        )
        self._forms[found] = form
        self._specs[form] = found
        return found


def _replace_specs(outcomes: Any, change: Callable[[Any], Any]) -> Any:
    """Outcomes with their specs and numbers changed."""
    kind = type(outcomes)
    if kind is New:
        return New(change(outcomes.spec))
    if kind is View:
        return View(outcomes.of, change(outcomes.spec))
    if kind is tuple:
        return tuple([_replace_specs(part, change) for part in outcomes])
    if kind is list:
        return [_replace_specs(part, change) for part in outcomes]
    if kind is Same:
        return outcomes if outcomes.spec is None else Same(outcomes.of, change(outcomes.spec))
    if kind is Changed:
        return Changed(_replace_specs(outcomes.inputs, change))
    return Value(change(outcomes.value))
