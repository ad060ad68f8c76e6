"""What an environment knows: the state that its parts share, and the decisions that they ask of each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from understudy.errors import GuardOnDataDependentSymNode
from understudy.shapes.conditions import Condition
from understudy.shapes.expr import Algebra, Expr
from understudy.shapes.facts import Facts
from understudy.shapes.floats import FloatExpr
from understudy.shapes.guards import Birth, Guard, Inputs, Specialisation

if TYPE_CHECKING:
    from understudy.shapes.node import SymNode


@dataclass(frozen=True)
class Settings:
    """How an environment makes symbols.

    `duck_shape`: equal example sizes share a symbol. `specialize_zero_one`: sizes of 0 and 1 stay numbers.
    `assume_static_by_default`: sizes stay numbers unless a context or a mark says otherwise.
    `allow_scalar_outputs`, `allow_dynamic_output_shape_ops`: data-dependent numbers and sizes become symbols.
    `prefer_deferred_runtime_asserts_over_guards`: what `torch._check` says of sizes with an example is promised as well.
    `trace_asserts` is torch's, and means nothing here: what is to be checked is in `runtime_asserts`.
    """

    allow_scalar_outputs: bool = True
    allow_dynamic_output_shape_ops: bool = True
    assume_static_by_default: bool = False
    specialize_zero_one: bool = True
    duck_shape: bool = True
    prefer_deferred_runtime_asserts_over_guards: bool = False
    trace_asserts: bool = False


class NotRemembered(Exception):
    """A question came up that was not answered before, where no new answers were wanted."""


class State:
    """The base of `ShapeEnv`, below `Arithmetic`, `Checking` and `TorchSide`."""

    def __init__(
        self, *, settings: Settings | None = None, duck_shape: bool | None = None, should_record_events: Any = None,
        tracked_fakes: Any = None, co_fields: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        if duck_shape is not None:
            options["duck_shape"] = duck_shape
        self.settings = replace(settings or Settings(), **options)
        # For torch's own debugging, and kept for whoever gave them.
        self.should_record_events, self.tracked_fakes, self.co_fields = should_record_events, tracked_fakes, co_fields
        self.algebra = Algebra()
        self.hints: dict[Expr, int] = {}
        self.facts = Facts(self.algebra, self.hints)
        self.guards: list[Guard] = []
        self.runtime_asserts: list[Guard] = []
        self.specialisations: list[Specialisation] = []
        self.inputs = Inputs()
        self.births: dict[Expr, Birth] = {}
        self.definitions: dict[Expr, FloatExpr] = {}
        self.choices: dict[Expr, FloatExpr] = {}  # definitions of which it is open what they choose
        self.truths: dict[Condition, Expr] = {}
        self.float_facts: dict[Any, bool] = {}
        self.pending_fresh_unbacked_symbols: list[Expr] = []
        self.unbacked_renamings: dict[Expr, Expr] = {}
        self.computed: dict[tuple[Any, ...], Any] = {}
        self.nodes: dict[Any, SymNode] = {}
        self._floats: dict[Any, Any] = {}
        self._sympy: dict[Any, Any] = {}
        self._from_sympy: dict[Any, Any] = {}
        self._decided: dict[Any, bool] = {}
        self._failing: dict[Condition, bool] = {}
        self._ordinaries: dict[Expr, Expr] = {}
        self._by_example: dict[int, Expr] = {}
        self._by_name: dict[str, Expr] = {}
        self.unbacked_by_name: dict[str, SymNode] = {}
        self._specialised: set[Expr] = set()
        self.frozen = False
        self.runtime_asserts_frozen = False
        self._guards_are_errors = False
        self._suppressed = 0
        self._from_memory = False
        self._ignoring_fresh = 0
        self._named: dict[str, int] = {}

    # --- answered by ShapeEnv ----------------------------------------------------------------------------------

    def decide(self, condition: Any, fallback: bool | None = None) -> bool:
        raise NotImplementedError

    def specialise(self, value: Any) -> Any:
        raise NotImplementedError

    def expect(self, condition: Any, is_refused_else: bool = False) -> bool:
        raise NotImplementedError

    def undecidable(self, asked: Any) -> GuardOnDataDependentSymNode:
        raise NotImplementedError
