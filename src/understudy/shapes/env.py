"""ShapeEnv: the symbols of a run, and what was assumed about them. The parts that it is composed of do the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.facts import Facts, Proof
from understudy.shapes.algebra.floats import AnyCondition, FloatExpr, Operand, Truth
from understudy.shapes.arithmetic import Arithmetic
from understudy.shapes.checking import BrokenGuard, InputChecks, Requirement
from understudy.shapes.decisions import Decisions
from understudy.shapes.guards import Guard, InputSizes, Specialisation, SymbolOrigin
from understudy.shapes.node import Size, SymNode
from understudy.shapes.symbols import Symbols
from understudy.shapes.sympy_reader import is_sympy
from understudy.shapes.torch_api.environment import TorchFacade

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Settings:
    """How an environment makes symbols.

    `duck_shape`: equal example sizes share a symbol. `specialize_zero_one`: sizes of 0 and 1 stay numbers.
    `assume_static_by_default`: sizes stay numbers unless a context or a mark says otherwise.
    `allow_scalar_outputs`, `allow_dynamic_output_shape_ops`: data-dependent numbers and sizes become unbacked symbols.
    `prefer_deferred_runtime_asserts_over_guards`: what `torch._check` says of backed sizes is a runtime assert as well.
    `trace_asserts` is torch's, and means nothing here: what is to be checked is in `runtime_asserts`.
    """

    allow_scalar_outputs: bool = True
    allow_dynamic_output_shape_ops: bool = True
    assume_static_by_default: bool = False
    specialize_zero_one: bool = True
    duck_shape: bool = True
    prefer_deferred_runtime_asserts_over_guards: bool = False
    trace_asserts: bool = False


class ShapeEnv:
    """Owns symbols and facts. Everything that it answers is true for all sizes that its guards admit.

        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        x = mode.from_tensor(torch.randn(8, 128), source="x", symbolic_context=dims("batch", "seq"))
        y = x.view(-1, 4)
        print(y.spec)         f32[batch*seq//4, 4]@cpu
        print(*env.guards)    batch*seq % 4 == 0    because model.py:12: y = x.view(-1, 4)

    Options are those of `Settings`: `ShapeEnv(duck_shape=False, specialize_zero_one=False)`.

    The data that the parts share are attributes here. The parts:

        symbols      makes symbols, backed and unbacked ones
        numbers      arithmetic and comparisons of nodes
        decisions    answers to conditions, and the guards that they leave
        checks       whether other inputs meet the guards
        torch_api    what else torch's tools ask of an environment, under torch's names

    What else torch's tools ask for by name is in the table `DELEGATES`: each name with the part that answers.
    """

    symbols: Symbols
    numbers: Arithmetic
    decisions: Decisions
    checks: InputChecks
    torch_api: TorchFacade

    def __init__(
        self, *, settings: Settings | None = None, allow_scalar_outputs: bool | None = None,
        allow_dynamic_output_shape_ops: bool | None = None, assume_static_by_default: bool | None = None,
        specialize_zero_one: bool | None = None, duck_shape: bool | None = None,
        prefer_deferred_runtime_asserts_over_guards: bool | None = None, trace_asserts: bool | None = None,
        should_record_events: bool | None = None, tracked_fakes: Sequence[object] | None = None,
        co_fields: Mapping[str, str] | None = None, **unknown: object,
    ) -> None:  # fmt: skip
        if unknown:
            known = ", ".join(("settings", *(f.name for f in fields(Settings))))
            raise TypeError(f"ShapeEnv has no option {', '.join(sorted(unknown))}; its options are {known}")
        given = {
            "allow_scalar_outputs": allow_scalar_outputs,
            "allow_dynamic_output_shape_ops": allow_dynamic_output_shape_ops,
            "assume_static_by_default": assume_static_by_default,
            "specialize_zero_one": specialize_zero_one,
            "duck_shape": duck_shape,
            "prefer_deferred_runtime_asserts_over_guards": prefer_deferred_runtime_asserts_over_guards,
            "trace_asserts": trace_asserts,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        self.settings = replace(settings or Settings(), **changes) if changes else settings or Settings()
        # For torch's own debugging, and kept for whoever gave them.
        self.should_record_events, self.tracked_fakes, self.co_fields = should_record_events, tracked_fakes, co_fields
        self.algebra = Algebra()
        self.hints: dict[Expr, int] = {}
        self.facts = Facts(self.algebra, self.hints)
        self.guards: list[Guard] = []
        self.runtime_asserts: list[Guard] = []
        self.specialisations: list[Specialisation] = []
        self.specialised_symbols: set[Expr] = set()
        self.inputs = InputSizes()
        self.births: dict[Expr, SymbolOrigin] = {}
        """For each unbacked symbol: what made it."""
        self.definitions: dict[Expr, FloatExpr] = {}
        """For each symbol that is computed from others: how."""
        self.choices: dict[Expr, FloatExpr] = {}
        """Those of the definitions that choose by a condition that is not decided."""
        self.truths: dict[Condition, Expr] = {}
        self.float_facts: dict[AnyCondition, bool] = {}
        self.pending_fresh_unbacked_symbols: list[Expr] = []
        self.unbacked_renamings: dict[Expr, Expr] = {}
        self.computed: dict[tuple[object, ...], Any] = {}
        self.nodes: dict[tuple[type, Operand], SymNode] = {}
        self.frozen = self.runtime_asserts_frozen = False
        self._compose()

    def _compose(self) -> None:
        self.numbers = Arithmetic(self)
        self.decisions = Decisions(self)
        self.symbols = Symbols(self)
        self.checks = InputChecks(self)
        self.torch_api = TorchFacade(self)

    def fork(self, hints: dict[Expr, int], facts: Facts) -> ShapeEnv:
        """An environment with the same symbols, but these hints and facts. What it assumes, it keeps to itself."""
        other = ShapeEnv(settings=self.settings)
        other.algebra, other.hints, other.facts = self.algebra, hints, facts
        other._compose()
        return other

    # --- symbols and nodes -----------------------------------------------------------------------------------

    def node(self, value: Operand, kind: type) -> SymNode:
        """The node of a value: equal values have the same one."""
        return self.numbers.node(value, kind)

    def create_symint(self, example: int, name: str, **options: object) -> int | torch.SymInt:
        """A number among the inputs that may vary, as a `SymInt`: `n = env.create_symint(16, "n")`."""
        return self.symbols.create_symint(example, name, **options)

    def create_symbol(self, example: int, source: object = None, *args: Any, **options: Any) -> Size:
        """A size that is `example` at hand; the arguments are those of `Symbols.create_symbol`."""
        return self.symbols.create_symbol(example, source, *args, **options)

    def create_unbacked_symint(
        self, source: object = None, *, low: int | None = None, high: int | None = None,
        what: str = "create_unbacked_symint",
    ) -> torch.SymInt:  # fmt: skip
        """An integer that only data tells, within `low` and `high`."""
        return self.symbols.create_unbacked_symint(source, low=low, high=high, what=what)

    def create_unbacked_symfloat(
        self, source: object = None, *, what: str = "create_unbacked_symfloat"
    ) -> torch.SymFloat:
        """A float that only data tells."""
        return self.symbols.create_unbacked_symfloat(source, what=what)

    def create_unbacked_symbool(
        self, source: object = None, *, what: str = "create_unbacked_symbool"
    ) -> torch.SymBool:
        """A truth value that only data tells."""
        return self.symbols.create_unbacked_symbool(source, what=what)

    def add_input(self, name: str, shape: Sequence[Size], stride: Sequence[Size], offset: Size = 0) -> None:
        """The metadata of an input: needed to check other inputs, and to bind symbols to them."""
        self.symbols.add_input(name, shape, stride, offset)

    def is_unbacked(self, symbol: Expr) -> bool:
        """Whether a symbol has no hint, itself or through what it is computed from."""
        return self.symbols.is_unbacked(symbol)

    def ignore_fresh_unbacked_symbols(self) -> AbstractContextManager[None]:
        """Symbols made here are bound by nobody."""
        return self.symbols.ignore_fresh_unbacked_symbols()

    # --- decisions -------------------------------------------------------------------------------------------

    def decide(self, condition: Truth, fallback: bool | None = None) -> bool:
        """True or False: by proof, else by the hints (recorded as a guard), else the fallback, else an error."""
        return self.decisions.decide(condition, fallback)

    def expect(self, condition: Truth, is_refused_else: bool = False) -> bool:
        """`torch._check`: a decision if there are hints, else a fact to be checked when the program runs."""
        return self.decisions.expect(condition, is_refused_else)

    def prove(self, condition: Truth) -> Proof:
        """YES or NO for all sizes that are admitted, else UNKNOWN. Asking records nothing."""
        return self.decisions.prove(condition)

    def is_known(self, condition: Truth) -> bool:
        """Whether it is proved to hold. Asking records nothing."""
        return self.decisions.is_known(condition)

    def get_hint(self, value: Operand) -> Any:
        """The value at the example's sizes, None if it depends on an unbacked symbol."""
        return self.decisions.get_hint(value)

    def simplify(self, expr: Any, size_oblivious: bool = False) -> object:
        """The value with all that is known; a sympy expression for a sympy expression."""
        if is_sympy(expr):
            return self.to_sympy(self.decisions.simplify(self.from_sympy(expr)))
        return self.decisions.simplify(expr)

    @property
    def suppresses_guards(self) -> bool:
        """Whether decisions go unrecorded just now: what follows from them must not be kept."""
        return self.decisions.suppressions > 0

    def suppress_guards(self) -> AbstractContextManager[None]:
        """Decisions are made, and not recorded."""
        return self.decisions.suppress_guards()

    # --- other inputs ----------------------------------------------------------------------------------------

    def check(self, *given: object, **named: object) -> list[BrokenGuard]:
        """What these inputs break, in the order of the run's or by name; nothing if its answers hold for them."""
        return self.checks.check(*given, **named)

    def evaluate_guards(self, *given: object, **named: object) -> bool:
        """Whether the recorded answers hold for these inputs."""
        return not self.checks.check(*given, **named)

    def requirements(self, inputs: InputSizes | None = None) -> list[Requirement]:
        """All that inputs must be: their static sizes, the ranges of the symbols, the guards."""
        return self.checks.list_requirements(inputs)

    def check_source(self, name: str = "check") -> str:
        """The source of a function of the inputs that raises ValueError with the guards that they break."""
        return self.checks.write_function(name)

    # --- sympy -----------------------------------------------------------------------------------------------

    def to_sympy(self, value: Operand) -> Any:
        """The value as an object of sympy."""
        return self.torch_api.to_sympy(value)

    def from_sympy(self, expression: object) -> Any:
        """What a sympy expression stands for here; anything else as it is."""
        return self.torch_api.from_sympy(expression)


OUR_NAMES = frozenset({"merge_symbols", "_choose_inputs", "_replace_known", "_evaluate_like"})
"""What the façade has for itself and for our rooms."""
DELEGATES: dict[str, str] = {
    **{name: "torch_api" for name in vars(TorchFacade) if not name.startswith("__") and name not in OUR_NAMES},
    **dict.fromkeys((f.name for f in fields(Settings)), "settings"),
    "error_on_new_guards": "decisions",
    **dict.fromkeys(
        (
            "create_symintnode", "create_symfloatnode", "create_symboolnode", "create_unspecified_symbol",
            "create_symbolic_sizes_strides_storage_offset", "create_unspecified_symint_and_symbol",
        ),
        "symbols",
    ),
    **dict.fromkeys(
        ("evaluate_guards_for_args", "evaluate_guards_expression", "produce_guards_expression"), "checks"
    ),
}  # fmt: skip
"""The names under which torch's tools ask an environment, and the parts that answer."""


class Delegate:
    """An attribute that one of the parts has. (With `__getattr__`, every attribute of an environment would be slower.)"""

    def __init__(self, part: str, name: str) -> None:
        self._part, self._name = part, name

    def __get__(self, env: ShapeEnv | None, kind: type) -> Any:
        return self if env is None else getattr(getattr(env, self._part), self._name)


for _name, _part in DELEGATES.items():
    if _name not in vars(ShapeEnv):
        setattr(ShapeEnv, _name, Delegate(_part, _name))
