"""Plans and recipes that environments with different symbols share.

Each capture with symbolic sizes has an environment of its own, and its plans contain symbols of that environment. The
outcomes of a call depend on the facts of the environment and on the patterns of the sizes (see `shapes/patterns.py`).
An answer that added no guards is stored in terms of patterns, and translated to the symbols of the next environment
with the same knowledge. Calls that added guards are inferred again in each environment, so that each has its own
guards and lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from understudy.infer.cache import Cache
from understudy.infer.plan import Plan
from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import SymNode
from understudy.shapes.patterns import Interned, NoPattern, Pattern, Patterns, intern
from understudy.spec import Changed, New, Same, TensorSpec, Value, View

PLAIN_PARTS = (int, float, bool, complex, str, type(None))


class SpecForm(Interned):
    """A spec with symbols replaced by patterns: `content` holds shape, stride, offset, and the other fields."""

    __slots__ = ()


class SharedAnswer(NamedTuple):
    """An answer with symbols replaced by patterns, and the patterns of the atoms that were created with it.

    Atoms print in the order of creation: to print the same text, they have to be created in the same order."""

    content: Any
    atoms: tuple[Pattern, ...]


class SharedQuestion(NamedTuple):
    """The key of a call with symbols replaced by patterns, and the state of the environment before the call."""

    key: tuple[Any, ...]
    marks: tuple[int, ...]
    atoms: int


class SharedPlans:
    """Shared answers, translated to the symbols of one environment and back."""

    def __init__(self, env: ShapeEnv, cache: Cache) -> None:
        self._patterns = Patterns(env)
        self._cache = cache
        self._forms: dict[TensorSpec, SpecForm] = {}
        self._specs: dict[SpecForm, TensorSpec] = {}

    def make_question(self, key: tuple[Any, ...]) -> SharedQuestion | None:
        """A key of the dispatch cache with symbols replaced by patterns; None if it has no such form."""
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

    def find_answer(self, question: SharedQuestion, localise: Callable[[Any], Any]) -> Any:
        """Return the shared answer in the symbols of this environment, or None."""
        shared = self._cache.shared.get(question.key)
        if shared is None:
            return None
        try:
            for atom in shared.atoms:
                self._patterns.expr(atom)
            return localise(shared.content)
        except NoPattern:
            return None

    def share_answer(
        self, question: SharedQuestion, generalise: Callable[[Any], Any], answer: object
    ) -> None:
        """Share an answer, unless guards were added to find it."""
        patterns = self._patterns
        if patterns.knowledge() is not question.key[0] or patterns.marks() != question.marks:
            return
        try:
            content = generalise(answer)
        except NoPattern:
            return
        self._cache.add_shared(question.key, SharedAnswer(content, patterns.atoms_since(question.atoms)))

    def find_plan(self, question: SharedQuestion) -> Plan | None:
        found: Plan | None = self.find_answer(question, self._localise_plan)
        return found

    def share_plan(self, question: SharedQuestion, plan: Plan) -> None:
        self.share_answer(question, self._generalise_plan, plan)

    def _localise_plan(self, plan: Plan) -> Plan:
        return plan.with_outcomes(_replace_specs(plan.outcomes, self.localise))

    def _generalise_plan(self, plan: Plan) -> Plan:
        return plan.with_outcomes(_replace_specs(plan.outcomes, self.generalise))

    # --- specs and numbers ----------------------------------------------------------------------------------------

    def generalise(self, part: object) -> Any:
        """A spec or number with symbols replaced by patterns."""
        if type(part) is TensorSpec:
            return (self._forms.get(part) or self._form(part)) if part.is_symbolic else part
        if type(part) is SymNode:
            return self._patterns.form_of(part)
        if type(part) not in PLAIN_PARTS:
            raise NoPattern
        return part

    def localise(self, part: object) -> Any:
        """A spec or number with patterns replaced by symbols of this environment."""
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
            sizes(shape),
            sizes(stride),
            *sizes(offset),
            dtype=dtype,
            device=device,
            layout=layout,
            conj=conj,
            neg=neg,
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
        return replace(outcomes, spec=change(outcomes.spec))
    if kind is tuple:
        return tuple([_replace_specs(part, change) for part in outcomes])
    if kind is list:
        return [_replace_specs(part, change) for part in outcomes]
    if kind is Same:
        return outcomes if outcomes.spec is None else Same(outcomes.of, change(outcomes.spec))
    if kind is Changed:
        return Changed(_replace_specs(outcomes.inputs, change))
    return Value(change(outcomes.value))
