"""ShapeEnv: the symbols of a run, and the guards on them. The work is done by its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

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


@dataclass(frozen=True)
class Settings:
    """How an environment makes symbols.

    `duck_shape`: equal example sizes share a symbol. `specialize_zero_one`: sizes of 0 and 1 stay numbers.
    `assume_static_by_default`: sizes stay numbers unless a context or a mark requests symbols.
    `allow_scalar_outputs`, `allow_dynamic_output_shape_ops`: data-dependent numbers and sizes become unbacked symbols.
    `prefer_deferred_runtime_asserts_over_guards`: `torch._check` on backed sizes also makes a runtime assert.
    `trace_asserts`: an `assert` of the program about unbacked numbers becomes a runtime assert.
    """

    allow_scalar_outputs: bool = True
    allow_dynamic_output_shape_ops: bool = True
    assume_static_by_default: bool = False
    specialize_zero_one: bool = True
    duck_shape: bool = True
    prefer_deferred_runtime_asserts_over_guards: bool = False
    trace_asserts: bool = False


class ShapeEnv:
    """Owns symbols and facts. Its answers hold for all sizes that satisfy its guards.

        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        x = mode.from_tensor(torch.randn(8, 128), source="x", symbolic_context=dims("batch", "seq"))
        y = x.view(-1, 4)
        print(y.spec)         f32[batch*seq//4, 4]@cpu
        print(*env.guards)    batch*seq % 4 == 0    because model.py:12: y = x.view(-1, 4)

    Options are those of `Settings`: `ShapeEnv(duck_shape=False, specialize_zero_one=False)`.

    The data that its parts share are attributes. The parts:

        symbols      makes symbols, backed and unbacked ones
        numbers      arithmetic and comparisons of nodes
        decisions    decisions on conditions, and their guards
        checks       whether other inputs satisfy the guards
        torch_api    further methods under torch's names, for torch's tools

    The table `DELEGATES` maps the names that torch's tools use to the parts that implement them.
    """

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
            raise TypeError(f"ShapeEnv: unknown option {', '.join(sorted(unknown))} (choose from {known})")
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
        # Options for torch's debugging: stored, without effect.
        self.should_record_events, self.tracked_fakes, self.co_fields = (
            should_record_events,
            tracked_fakes,
            co_fields,
        )
        self.hints: dict[Expr, int] = {}
        self.guards: list[Guard] = []
        self.runtime_asserts: list[Guard] = []
        self.specialisations: list[Specialisation] = []
        self.specialised_symbols: set[Expr] = set()
        self.inputs = InputSizes()
        self.unbacked: dict[Expr, SymbolOrigin] = {}
        """For each unbacked symbol: its origin."""
        self.real_values: dict[Expr, Any] = {}
        """The values of unbacked symbols for the real tensors of a run. They decide conditions that nothing else decides;
        such a decision is a promise, as by `torch._check`."""
        self.definitions: dict[Expr, FloatExpr] = {}
        """The definitions of symbols that are computed from others."""
        self.choices: dict[Expr, FloatExpr] = {}
        """The definitions that are choices by an undecided condition."""
        self.truths: dict[Condition, Expr] = {}
        self.float_facts: dict[AnyCondition, bool] = {}
        self.pending_fresh_unbacked_symbols: list[Expr] = []
        # Torch's tools put symbols here that need no binding; `ignore_fresh_unbacked_symbols` adds none.
        self.ignorable_fresh_unbacked_symbols: list[Any] = []
        self.unbacked_renamings: dict[Expr, Expr] = {}
        self.computed: dict[tuple[object, ...], Any] = {}
        self.nodes: dict[tuple[type, Operand], SymNode] = {}
        self._frozen = self.runtime_asserts_frozen = False
        # the cache of nodes of torch's own class, since 2.15
        self._symop_cache: dict[Any, Any] = {}

    # Most captures have no symbols: the parts are made on first use.

    @cached_property
    def algebra(self) -> Algebra:
        return Algebra()

    @cached_property
    def facts(self) -> Facts:
        return Facts(self.algebra, self.hints)

    @cached_property
    def symbols(self) -> Symbols:
        return Symbols(self)

    @cached_property
    def numbers(self) -> Arithmetic:
        return Arithmetic(self)

    @cached_property
    def decisions(self) -> Decisions:
        return Decisions(self)

    @cached_property
    def checks(self) -> InputChecks:
        return InputChecks(self)

    @cached_property
    def torch_api(self) -> TorchFacade:
        return TorchFacade(self)

    # --- symbols and nodes -----------------------------------------------------------------------------------

    def node(self, value: Operand, kind: type) -> SymNode:
        """The node of a value; equal values have the same node."""
        return self.numbers.node(value, kind)

    def create_symint(self, example: int, name: str, **options: Any) -> int | torch.SymInt:
        """A number among the inputs that may vary, as a `SymInt`: `n = env.create_symint(16, "n")`."""
        return self.symbols.create_symint(example, name, **options)

    def create_symbol(self, example: int, source: object = None, *args: Any, **options: Any) -> Size:
        """A size with this hint; the arguments are those of `Symbols.create_symbol`."""
        return self.symbols.create_symbol(example, source, *args, **options)

    def create_unbacked_symint(
        self, source: object = None, *, low: int | None = None, high: int | None = None,
        what: str = "create_unbacked_symint",
    ) -> torch.SymInt:  # fmt: skip
        """An unbacked integer within `low` and `high`."""
        return self.symbols.create_unbacked_symint(source, low=low, high=high, what=what)

    def create_unbacked_symfloat(
        self, source: object = None, *, low: int | None = None, high: int | None = None,
        what: str = "create_unbacked_symfloat",
    ) -> torch.SymFloat:  # fmt: skip
        """An unbacked float; with bounds, it is not NaN."""
        return self.symbols.create_unbacked_symfloat(source, low=low, high=high, what=what)

    def create_unbacked_symbool(
        self, source: object = None, *, what: str = "create_unbacked_symbool"
    ) -> torch.SymBool:
        """An unbacked bool."""
        return self.symbols.create_unbacked_symbool(source, what=what)

    def add_input(self, name: str, shape: Sequence[Size], stride: Sequence[Size], offset: Size = 0) -> None:
        """Register the metadata of an input, to check other inputs and to bind symbols to them."""
        self.symbols.add_input(name, shape, stride, offset)

    def is_unbacked(self, symbol: Expr) -> bool:
        """Whether a symbol has no hint, itself or through its definition."""
        return self.symbols.is_unbacked(symbol)

    def ignore_fresh_unbacked_symbols(self) -> AbstractContextManager[None]:
        """Inside, new unbacked symbols need no binding."""
        return self.symbols.ignore_fresh_unbacked_symbols()

    # --- decisions -------------------------------------------------------------------------------------------

    def decide(self, condition: Truth, fallback: bool | None = None) -> bool:
        """True or False: by proof, else by the hints (recorded as a guard), else the fallback, else an error."""
        return self.decisions.decide(condition, fallback)

    def expect(self, condition: Truth, is_checked_by_operator: bool = False) -> bool:
        """`torch._check`: a decision if there are hints, else a promise, which is checked when the program runs."""
        return self.decisions.expect(condition, is_checked_by_operator)

    def prove(self, condition: Truth) -> Proof:
        """YES or NO if it is proved for all sizes that satisfy the guards, else UNKNOWN. Adds no guard."""
        return self.decisions.prove(condition)

    def is_known(self, condition: Truth) -> bool:
        """Whether it can be proved. Adds no guard."""
        return self.decisions.is_known(condition)

    def get_hint(self, value: Operand) -> Any:
        """The value for the hints, None if it depends on an unbacked symbol."""
        return self.decisions.get_hint(value)

    def simplify(self, expr: Any, size_oblivious: bool = False) -> object:
        """The simplified value; a sympy expression for a sympy expression."""
        if is_sympy(expr):
            return self.to_sympy(self.decisions.simplify(self.from_sympy(expr)))
        return self.decisions.simplify(expr)

    @property
    def frozen(self) -> bool:
        """Whether decisions are made without recording guards, for good: `freeze()`. Torch's tools set it."""
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.decisions.suppressions += bool(frozen) - self._frozen
        self._frozen = bool(frozen)

    @property
    def suppresses_guards(self) -> bool:
        """Whether guards are suppressed: results of decisions must not be cached then."""
        return self.decisions.suppressions > 0

    def suppress_guards(self) -> AbstractContextManager[None]:
        """Inside, decisions are made without recording guards."""
        return self.decisions.suppress_guards()

    # --- other inputs ----------------------------------------------------------------------------------------

    def check(self, *given: object, **named: object) -> list[BrokenGuard]:
        """The guards that these inputs violate; the inputs are given in the order of the run, or by name."""
        return self.checks.check(*given, **named)

    def evaluate_guards(self, *given: object, **named: object) -> bool:
        """Whether these inputs satisfy the guards."""
        return not self.checks.check(*given, **named)

    def requirements(self, inputs: InputSizes | None = None) -> list[Requirement]:
        """All conditions on the inputs: their static sizes, the ranges of the symbols, the guards."""
        return self.checks.list_requirements(inputs)

    def check_source(self, name: str = "check") -> str:
        """The source of a function of the inputs that raises ValueError with the guards that they violate."""
        return self.checks.write_function(name)

    # --- sympy -----------------------------------------------------------------------------------------------

    def to_sympy(self, value: Operand) -> Any:
        """The value as an object of sympy."""
        return self.torch_api.to_sympy(value)

    def from_sympy(self, expression: object) -> Any:
        """A sympy expression in our terms; any other value unchanged."""
        return self.torch_api.from_sympy(expression)


OUR_NAMES = frozenset(
    {
        "merge_symbols", "_choose_inputs", "_write_guards", "_replace_known", "_evaluate_like", "add_runtime_assert",
    }
)  # fmt: skip
"""Names of the façade that are not delegated."""
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
"""The names that torch's tools use, and the parts that implement them."""


class Delegate:
    """A descriptor for an attribute of a part. (`__getattr__` would slow down every attribute.)"""

    def __init__(self, part: str, name: str) -> None:
        self._part, self._name = part, name

    def __get__(self, env: ShapeEnv | None, kind: type) -> Any:
        return self if env is None else getattr(getattr(env, self._part), self._name)

    def __set__(self, env: ShapeEnv, value: object) -> None:
        setattr(getattr(env, self._part), self._name, value)

    def __delete__(self, env: ShapeEnv) -> None:
        delattr(getattr(env, self._part), self._name)


for _name, _part in DELEGATES.items():
    if _name not in vars(ShapeEnv):
        setattr(ShapeEnv, _name, Delegate(_part, _name))
