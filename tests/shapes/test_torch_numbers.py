"""Symbolic numbers and environments where code that was written for torch's asks more of them than operators do."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch.fx.experimental.sym_node import SymNode as TorchSymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic as TorchDimDynamic,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode as TorchGuardOnDataDependentSymNode,
)
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv as TorchShapeEnv,
)

from understudy import (
    DimDynamic,
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
    ShapeEnv,
    cast_symbool_to_symint_guardless,
    check_consistent,
    compute_unbacked_bindings,
    constrain_range,
    constrain_unify,
    find_symbol_binding_fx_nodes,
    free_symbols,
    free_unbacked_symbols,
    guard_or_false,
    guard_or_true,
    guard_scalar,
    guarding_hint_or_throw,
    has_static_value,
    has_symbolic_sizes_strides,
    is_concrete_int,
    is_nested_int,
    make_fx,
    optimization_hint,
    statically_known_true,
)


def sizes(*shape: int) -> tuple[ShapeEnv, Any]:
    env = ShapeEnv(duck_shape=False)
    return env, FakeTensorMode(shape_env=env).from_tensor(torch.empty(shape), source="x")


def test_floats_are_true_or_not() -> None:
    env, x = sizes(6)
    assert torch.sym_float(x.shape[0]) and not torch.sym_not(x.shape[0] / 2)
    with pytest.raises(RuntimeError, match=r"whether zuf0 != 0\.0"):
        bool(env.create_unbacked_symfloat())


def test_a_choice_between_numbers_that_is_known() -> None:
    _, x = sizes(6)
    chosen = torch.sym_ite(x.shape[0] >= 2, 2, 3)
    assert chosen == 2 and torch.sym_ite(x.shape[0] < 2, 2, 3) == 3


def test_truth_as_a_number_without_a_guard() -> None:
    env, x = sizes(6, 4)
    a, b = x.shape
    assert str(torch.sym_float(a > b)) == "(1.0 if x_0 > x_1 else 0.0)"
    assert str(cast_symbool_to_symint_guardless(a > b)) == "(1 if x_0 > x_1 else 0)"
    assert cast_symbool_to_symint_guardless(True) == 1
    assert not env.guards


def test_each_kind_of_symbol_is_counted_for_itself() -> None:
    env = ShapeEnv()
    made = [env.create_symbol(5), env.create_symbol(6), env.create_unbacked_symint(), env.create_unbacked_symfloat(),
            env.create_unbacked_symbool()]  # fmt: skip
    assert [str(number) for number in made] == ["s0", "s1", "u0", "zuf0", "u1 == 1"]


def test_expressions_say_what_became_of_symbols() -> None:
    _, x = sizes(8, 6, 6)
    a, b, c = x.shape
    assert b == c and int(a) == 8
    assert str((b + c).node.expr) == "2*x_1" and str((b + c).node._expr) == "x_1 + x_2"
    assert (a * 2).node.expr == 16 and (a * 2).node.maybe_as_int() == 16 and a.node.maybe_as_int() == 8
    assert str(torch.sym_float(a)) == "8.0"


def test_expressions_are_in_the_symbols_of_the_environment() -> None:
    env, x = sizes(8, 6)
    a, b = x.shape
    numbers = [
        a & 3,
        a | b,
        a ^ 1,
        torch.sym_ite(a > b, a, b),
        math.trunc(a / b),
        round(a / 3),
        math.floor(a * 0.3) + 1,
    ]
    for number in numbers:
        expression = number.node.expr
        assert expression.free_symbols <= set(env.var_to_val)
        assert expression.subs(env.var_to_val) == number.node.hint
    assert (a & 3) == 0
    assert str(env.guards[-1].expr) == "Eq(BitwiseFn_bitwise_and(x_0, 3), 0)"


def test_numbers_that_are_to_be_one() -> None:
    env, x = sizes(4, 4)
    u, v = env.create_unbacked_symint(), env.create_unbacked_symint()
    constrain_unify(u, v)
    constrain_unify(u, 7)
    assert u == v and v == 7
    check_consistent(x, x.t())
    assert [guard.text for guard in env.guards] == ["x_0 == x_1"]
    for wrong in ((3, 4), (v, 8)):
        with pytest.raises(AssertionError, match="are not the same"):
            constrain_unify(*wrong)
    with pytest.raises(ValueError, match="not in the range from 30 to 80"):
        constrain_range(x.shape[0], min=30, max=80)


def test_questions_about_values() -> None:
    env, x = sizes(4)
    u = env.create_unbacked_symint()
    assert has_symbolic_sizes_strides(x) and not has_symbolic_sizes_strides(torch.empty(3))
    assert not is_nested_int(u) and not is_nested_int(3)
    assert free_unbacked_symbols((u + x.shape[0]).node.expr) == {u.node.expr}
    assert env.has_guarding_hint(x.shape[0].node.expr) and not env.has_guarding_hint(u.node.expr)
    assert env.size_like == set()
    torch._check(u >= 0)
    assert env.size_like == {u.node.expr} and env.num_deferred_runtime_asserts == 1
    env.constrain_symbol_range(u.node.expr, 3, 9)
    assert statically_known_true(u <= 9) and statically_known_true(u >= 3)


def test_no_more_guards() -> None:
    env, x = sizes(4)
    with env.error_on_new_guards():
        assert x.shape[0] > 1  # it is known
        with pytest.raises(RuntimeError, match="guards are frozen, but the run needs a new one: x_0 >= 4"):
            bool(x.shape[0] > 3)
    assert x.shape[0] > 3 and len(env.guards) == 1
    env.freeze_runtime_asserts()
    torch._check(env.create_unbacked_symint() > 3)
    assert not env.runtime_asserts


def test_a_symbol_that_is_lost() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        torch.randn(4).nonzero()
        with pytest.raises(
            PendingUnbackedSymbolNotFound,
            match=r"u0 \(made by aten\.nonzero.* can't be computed from the result",
        ):
            compute_unbacked_bindings(env, torch.empty(3))


def test_which_nodes_know_symbols() -> None:
    graph = make_fx(lambda x: torch.zeros(x.item()), tracing_mode="symbolic")(torch.tensor([3]))
    ((symbol, node),) = find_symbol_binding_fx_nodes(graph.graph).items()
    assert str(symbol) == "u0" and node.target is torch.ops.aten._local_scalar_dense.default


def test_nothing_in_nothing() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        empty = torch.empty(0, 3)
        assert (
            empty.nonzero().shape == (0, 2)
            and empty[empty > 0].shape == (0,)
            and torch.unique(empty).shape == (0,)
        )


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["unique_dim", "unique_dim_consecutive", "unique_consecutive"])
def test_what_kernels_give_besides_distinct_slices(name: str, flags: tuple[bool, bool]) -> None:
    """With a dimension, they give where each went and how often it was there whether that is asked for or not."""
    real = torch.tensor([[1, 2], [1, 2], [3, 4]])

    def run(x: torch.Tensor) -> list[int]:
        by_name = {
            "unique_dim": lambda: torch.ops.aten.unique_dim(x, 0, True, *flags),
            "unique_dim_consecutive": lambda: torch.ops.aten.unique_dim_consecutive(x, 0, *flags),
            "unique_consecutive": lambda: torch.ops.aten.unique_consecutive(x, *flags, 0),
        }
        return [result.shape[0] for result in by_name[name]()]

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        found = run(mode.from_tensor(real, static_shapes=True))
    assert [str(size).replace("u0", "2") for size in found] == [str(size) for size in run(real)]
    with mode, pytest.raises(RuntimeError, match="expected slices with elements"):
        run(torch.empty(3, 0))


def test_truth_of_a_tensor() -> None:
    _, x = sizes(4)
    with x.fake_mode, pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        bool(x)


def test_complex_numbers_are_two() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        number = torch.randn((), dtype=torch.complex64)
        with pytest.raises(RuntimeError, match=r"x\.real\.item\(\)"):
            number.item()
        assert str(number.imag.item()) == "zuf0"


@pytest.mark.parametrize("divisor", [2.5, -1.0])
def test_a_plain_number_in_a_symbol_made_by_hand(divisor: float) -> None:
    number = torch.SymInt(ShapeEnv().node(5, int))
    assert float(number / divisor) == 5 / divisor
    assert float(divisor / number) == divisor / 5
    assert number + 1 == 6 and is_concrete_int(number)


# --- nodes of torch's class, made of our symbols --------------------------------------------------------------------------


def own_number(env: ShapeEnv, example: int) -> Any:
    """A number as tests and tools of torch make it: torch's node around a symbol of the environment."""
    source = ConstantSource(f"n{len(env.backed_var_to_val)}")
    symbol = env.create_symbol(example, source=source, dynamic_dim=DimDynamic.DUCK, constraint_dim=None)
    return torch.SymInt(TorchSymNode(symbol, env, int, hint=example))


ARITHMETIC: dict[str, Any] = {
    "sums and products": lambda a, b: a * b + a - 3 * b,
    "quotients": lambda a, b: (a * b + 1) // b % 4,
    "powers": lambda a, b: a**2 - 2**b,
    "of floats": lambda a, b: (a / 2) * 3.5 + b**0.5,
    "rounding": lambda a, b: math.floor(a / 2) * 100 + math.ceil(a / 2) * 10 + round(b / 4),
    "decimals": lambda a, b: round(a / 3, 1),
    "largest and least": lambda a, b: torch.sym_max(a, b) * 10 + torch.sym_min(a, b),
    "a choice": lambda a, b: torch.sym_ite(a > b, a, b + 1) if isinstance(a, torch.SymInt) else b + 1,
    "functions": lambda a, b: torch._sym_sqrt(a) + torch._sym_cos(b),
    "bits": lambda a, b: (a & b) + (a | 8),
    "comparisons": lambda a, b: torch.sym_not(a == b),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_torch_nodes_compute_in_our_environment(name: str) -> None:
    compute, env = ARITHMETIC[name], ShapeEnv()
    found, wanted = compute(own_number(env, 5), own_number(env, 7)), compute(5, 7)
    assert type(found) in (torch.SymInt, torch.SymFloat, torch.SymBool)
    assert type(wanted)(found) == pytest.approx(wanted)


def test_torch_nodes_make_guards_in_our_environment() -> None:
    env = ShapeEnv()
    a, b = own_number(env, 5), own_number(env, 7)
    names = f"{a} < {b}"
    assert a < b and statically_known_true(b > a) and not statically_known_true(a == 5)
    assert [guard.text for guard in env.guards] == [names]
    assert a == 5 and a.node.maybe_as_int() == 5


def test_torch_nodes_beside_ours() -> None:
    env = ShapeEnv()
    theirs, ours = own_number(env, 5), env.create_symint(7, "n")
    assert free_symbols(theirs * ours) == free_symbols([theirs, ours]) and len(free_symbols(theirs)) == 1
    assert [int(n) for n in (theirs + ours, ours + theirs, ours - theirs, ours // theirs)] == [12, 12, 2, 1]


def test_torch_nodes_as_sizes() -> None:
    env = ShapeEnv()
    n = own_number(env, 5)
    with FakeTensorMode(shape_env=env):
        x = torch.empty(n, 3)
        assert (
            str(x.view(-1).shape[0]) == f"3*{n}"
            and str((x + torch.ones(n, 1)).shape) == f"torch.Size([{n}, 3])"
        )
    assert not env.specialisations


# --- symbols of torch's own environment, and compiled code ---------------------------------------------------------------


def test_names_of_symbols_with_a_source_of_torch() -> None:
    """They have the names that torch's own symbols have: a hash of the source, the next free number if that is taken."""
    sources = [ConstantSource(f"x{n}") for n in range(30)]
    names = [
        [str(env.create_symbol(5 + n, source, dynamic_dim=kind.DYNAMIC)) for n, source in enumerate(sources)]
        for env, kind in ((ShapeEnv(), DimDynamic), (TorchShapeEnv(), TorchDimDynamic))
    ]
    assert names[0] == names[1]


def test_functions_on_symbols_of_torch() -> None:
    env = TorchShapeEnv()
    unknown, known = (
        env.create_unbacked_symint(),
        env.create_symintnode(
            env.create_symbol(5, ConstantSource("n"), dynamic_dim=TorchDimDynamic.DYNAMIC), hint=5
        ),
    )
    assert (
        not guard_or_false(unknown == 3)
        and guard_or_true(unknown == 3)
        and guarding_hint_or_throw(known) == 5
    )
    assert optimization_hint(unknown, 7) == 7 and not has_static_value(unknown) and guard_scalar(known) == 5
    with pytest.raises(TorchGuardOnDataDependentSymNode):
        guarding_hint_or_throw(unknown)


def test_functions_on_symbols_in_compiled_code() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        number = x.sum().item()
        if guard_or_false(number == 3) or not guard_or_true(number == 3):
            return x * 2
        return x * 3

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="eager")
    with dynamo_config.patch(capture_scalar_outputs=True):
        assert compiled(torch.tensor([1, 2])).tolist() == [3, 6]


def test_a_context_of_torch_around_a_mode() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(3, 4), source="x")
    with tracing(TracingContext(mode)), mode:
        rows = (x + 1).shape[0]
    assert rows == 3


def test_hints_that_the_program_sets() -> None:
    env = ShapeEnv()
    size = env.create_unbacked_symint(low=0)
    assert optimization_hint(2 * size, 5) == 10
    torch._dynamo.override_optimization_hint(size, 16)
    assert optimization_hint(2 * size, 5) == env.optimization_hint((2 * size).node.expr) == 32
    assert env.var_to_hint_override == {size.node.expr: 16}


def test_guards_of_a_number_that_has_only_one_value_left() -> None:
    env = ShapeEnv()
    number = env.create_symint(6, "n")
    assert number > 5 and number < 7
    code = env.produce_guards_expression([number])
    assert env.evaluate_guards_expression(code, [6]) and not env.evaluate_guards_expression(code, [7])


def test_torch_nodes_without_hint() -> None:
    env = ShapeEnv()
    u = env.create_unbacked_symint()
    again = torch.SymInt(TorchSymNode(u.node.expr, env, int, hint=None))
    torch._check(again >= 3)
    assert statically_known_true(u >= 3) and free_unbacked_symbols(again) == free_unbacked_symbols(u)
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(again == 4)


@pytest.mark.parametrize("is_torch_node", [False, True])
@pytest.mark.parametrize(
    "compare", [operator.gt, operator.lt, operator.ge, operator.le, operator.eq, operator.ne]
)
def test_floats_with_a_hint_are_not_rounded(compare: Any, is_torch_node: bool) -> None:
    for number in (2, 2.4, 2.5, 3):
        env = ShapeEnv()
        symbol = env.create_symbol(2.5, source=ConstantSource("f"), dynamic_dim=DimDynamic.DYNAMIC)
        node = (
            TorchSymNode(symbol, env, float, hint=2.5)
            if is_torch_node
            else env.create_symfloatnode(symbol).node
        )
        value = torch.SymFloat(node)
        assert bool(compare(value, number)) is compare(2.5, number)
        assert len(env.guards) == 1 and math.floor(value) == 2 and float(value * 2 + 1) == 6.0
