"""A plan: the outcomes of a call, in the form in which a cache hit replays them."""

from __future__ import annotations

from typing import Any

from understudy.spec import New, Outcomes, Same, TensorSpec, View

ONE_NEW, ONE_VIEW, ONE_SAME, MANY_NEW, OTHER = range(5)


class Plan:
    """`kind` names the common shapes of an answer, so that replaying them is one comparison.

    `written` are the positions of the inputs that the call writes to. `determined` says that the values of the
    results follow from the values of the inputs: the operator is no random one and the results are small.
    """

    __slots__ = ("determined", "kind", "of", "outcomes", "plain", "spec", "specs", "written")

    def __init__(
        self, outcomes: Outcomes, written: tuple[int, ...] = (), determined: bool = False, origin: bool = False
    ) -> None:
        self.outcomes = outcomes
        self.written = written
        self.determined = determined
        self.spec: TensorSpec | None = None
        self.specs: tuple[TensorSpec, ...] = ()
        self.of = -1
        self.kind = OTHER
        self._classify(outcomes)
        # What nothing but the tensors themselves has to be made for; values that begin here must be followed.
        self.plain = self.kind != OTHER and not (origin and determined)

    def _classify(self, outcomes: Any) -> None:
        match outcomes:
            case New(spec):
                self.kind, self.spec = ONE_NEW, spec
            case View(of, spec):
                self.kind, self.spec, self.of = ONE_VIEW, spec, of
            case Same(of, None):
                self.kind, self.of = ONE_SAME, of
            case tuple() if outcomes and all(isinstance(part, New) for part in outcomes):
                self.kind, self.specs = MANY_NEW, tuple(part.spec for part in outcomes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and (self.outcomes, self.written) == (other.outcomes, other.written)

    __hash__ = None  # type: ignore[assignment]
