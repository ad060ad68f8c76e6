"""Environments in torch's words: its ways to ask for symbols, and its tables of what is known."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
import torch.fx.experimental.symbolic_shapes as torch_shapes
from torch.distributed.tensor.placement_types import _defer_symbolic_equality_assert
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import key_get
from torch.utils._sympy.functions import FloorDiv, Mod
from torch.utils._sympy.value_ranges import ValueRanges

from understudy import (
    DimDynamic,
    FakeTensorMode,
    FakeTensorProp,
    GuardOnDataDependentSymNode,
    PropagateUnbackedSymInts,
    RelaxedUnspecConstraint,
    ShapeEnv,
    ShapeEnvSettings,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
    SubclassSymbolicContext,
    SymIntEqByExpr,
    canonicalize_bool_expr,
    compute_unbacked_bindings,
    create_contiguous,
    dims,
    expect_true,
    free_symbols,
    fx_placeholder_targets,
    fx_placeholder_vals,
    guard_size_oblivious,
    has_free_symbols,
    is_accessor_node,
    make_fx,
    optimization_hint,
    rebind_unbacked,
    statically_known_true,
)

DYNAMIC, DUCK, STATIC, UNBACKED, INFER = (
    DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.STATIC, DimDynamic.UNBACKED, DimDynamic.INFER_STRIDE,
)  # fmt: skip


class Source:
    """As torch names where a number comes from: by a method in some releases, by a property in others."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


def symint(env: ShapeEnv, example: int, kind: DimDynamic = DUCK, **options: Any) -> Any:
    source = Source("testing")
    symbol = env.create_symbol(example, source=source, dynamic_dim=kind, constraint_dim=None, **options)
    return env.create_symintnode(symbol, hint=example, source=source)


# --- asking for symbols -------------------------------------------------------------------------------------------


def test_kinds_of_symbols() -> None:
    env = ShapeEnv()
    a, b, c = symint(env, 5), symint(env, 5), symint(env, 5, DYNAMIC)
    assert a.node is b.node and c.node is not a.node
    assert symint(env, 5, STATIC) == 5 and type(symint(env, 5, STATIC)) is int
    assert not symint(env, 5, UNBACKED).node.has_hint()
    without_duck = ShapeEnv(duck_shape=False)
    assert symint(without_duck, 5).node is not symint(without_duck, 5).node


def test_zero_and_one_stay_numbers_unless_told() -> None:
    env = ShapeEnv()
    assert type(symint(env, 1)) is int and type(symint(env, 0, DYNAMIC)) is int
    assert type(symint(env, 1, do_not_specialize_zero_one=True)) is torch.SymInt
    free = env.create_unspecified_symint_and_symbol(-3, Source("n"), DYNAMIC)
    assert free.node.hint == -3 and not statically_known_true(free != 0)


def test_constraints_are_ranges() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    bounded = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(4, 16))
    context = StatelessSymbolicContext(
        dynamic_sizes=[DYNAMIC, DYNAMIC], constraint_sizes=[bounded, RelaxedUnspecConstraint(warn_only=False)]
    )
    x = mode.from_tensor(torch.randn(8, 8), symbolic_context=context)
    assert statically_known_true(x.shape[0] >= 4) and statically_known_true(x.shape[0] <= 16)
    assert not statically_known_true(x.shape[1] >= 4) and x.shape[0].node is not x.shape[1].node
    with pytest.raises(ValueError, match=r"expected one entry per dimension \(1\), got 2"):
        StatelessSymbolicContext(dynamic_sizes=[DYNAMIC], constraint_sizes=[None, None])


STRIDES: dict[str, tuple[list[DimDynamic], list[DimDynamic], str]] = {
    "static": ([STATIC, STATIC], [INFER, INFER], "f32[3, 6]@cpu"),
    "inferred": ([DYNAMIC, DYNAMIC], [INFER, INFER], "f32[x_0, x_1]@cpu"),
    "dynamic stride": ([STATIC, STATIC], [DYNAMIC, INFER], "f32[3, 6]~(s0, 1)@cpu"),
    "both": ([DYNAMIC, DYNAMIC], [DYNAMIC, INFER], "f32[x_0, x_1]~(s0, 1)@cpu"),
}


@pytest.mark.parametrize(("sizes", "strides", "shown"), STRIDES.values(), ids=STRIDES)
def test_strides_are_inferred_or_symbols(sizes: Any, strides: Any, shown: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=sizes, dynamic_strides=strides)
    assert str(mode.from_tensor(torch.ones(3, 6), source="x", symbolic_context=context).spec) == shown


def test_a_stateful_context_gives_the_same_symbols_again() -> None:
    env, real = ShapeEnv(), torch.randn(5, 5)
    context = StatefulSymbolicContext(dynamic_sizes=[DYNAMIC, DYNAMIC], tensor_source=Source("x"))
    first, second = (
        FakeTensorMode(shape_env=env).from_tensor(real, symbolic_context=context) for _ in range(2)
    )
    assert first.spec is second.spec and str(first.spec) == "f32[x_0, x_1]@cpu"


def test_sizes_strides_and_offset_alone() -> None:
    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DYNAMIC, STATIC])
    made = env.create_symbolic_sizes_strides_storage_offset(
        torch.randn(5, 4)[1:], "x", symbolic_context=context
    )
    assert str(made) == "((x_0, 4), (4, 1), 4)" and type(made[0][0]) is torch.SymInt
    assert [str(broken.requirement) for broken in env.check(torch.randn(9, 3)[1:])] == [
        "x.size(1) == 4", "x.storage_offset() == 4",
    ]  # fmt: skip


def test_the_sizes_of_wrappers_are_those_of_what_is_inside() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    wrapper: Any = TwoTensor(torch.randn(4, 6), torch.randn(4, 6))
    named: Any = mode.from_tensor(wrapper, source="w", symbolic_context=dims("batch", "seq"))
    assert (
        str(named.a.spec) == str(named.b.spec) == "f32[batch, seq]@cpu"
        and named.shape[0].node is named.a.shape[0].node
    )
    fixed: Any = mode.from_tensor(TwoTensor(wrapper.a, wrapper.b.clone()), static_shapes=True)
    assert str(fixed.b.spec) == "f32[4, 6]@cpu"
    inner = {name: StatelessSymbolicContext(dynamic_sizes=[DYNAMIC, STATIC]) for name in ("a", "b")}
    context = SubclassSymbolicContext(dynamic_sizes=[DYNAMIC, DYNAMIC], inner_contexts=inner)
    other = TwoTensor(torch.randn(4, 6), torch.randn(4, 6))
    apart: Any = mode.from_tensor(other, source="v", symbolic_context=context)
    assert type(apart.a.shape[0]) is torch.SymInt and apart.a.shape[1] == 6 and type(apart.a.shape[1]) is int


def test_jagged_tensors_have_plain_sizes() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    real = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    fake: Any = mode.from_tensor(real)
    assert fake.shape[0] == 2 and fake.shape[2] == 4 and fake.offsets().fake_mode is mode


# --- sympy ----------------------------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "n > 3": ("n >= 4", lambda n, m: n > 3),
    "n == m": ("Eq(n, m)", lambda n, m: n == m),
    "n + 1 < m": ("n + 2 <= m", lambda n, m: n + 1 < m),
    "n // 2": ("(n//2)", lambda n, m: n // 2),
    "n % m": ("Mod(n, m)", lambda n, m: n % m),
    "max": ("Max(m, n)", lambda n, m: torch.sym_max(n, m)),
    "all": ("(n >= 4) & (m >= 3)", lambda n, m: (n > 3) & (m > 2)),
}


@pytest.mark.parametrize(("text", "make"), FORMS.values(), ids=FORMS)
def test_sympy_as_torch_writes_it_and_back(text: str, make: Any) -> None:
    env = ShapeEnv()
    n, m = env.create_symint(6, "n"), env.create_symint(7, "m")
    node = make(n, m).node
    assert sympy.sympify(str(node.expr)) == sympy.sympify(text) or str(node.expr) == text
    again = sympy.sympify(node.expr)
    env.torch_api._from_sympy.clear()
    assert env.from_sympy(again) is node.value


def test_expressions_that_other_tools_made() -> None:
    env = ShapeEnv()
    n = env.create_symint(8, "n").node.expr
    assert env.evaluate_expr(sympy.Eq(Mod(n, 4), 0)) is True
    assert env.simplify(FloorDiv(4 * n + 3, 4)) == n
    assert env.bound_sympy(2 * n + 1).lower == 9
    assert [guard.text for guard in env.guards] == ["n % 4 == 0"]
    with pytest.raises(ValueError, match="k is not a symbol of this ShapeEnv"):
        env.evaluate_expr(sympy.Eq(sympy.Symbol("k"), 0))
    with pytest.raises(ValueError, match="gamma"):
        env.simplify(sympy.gamma(n))


def test_free_symbols_of_sympy() -> None:
    assert free_symbols(sympy.sympify("a + b")) == set(sympy.symbols("a b"))
    assert not has_free_symbols(sympy.S.true) and not has_free_symbols(sympy.Integer(3))


# --- tables ---------------------------------------------------------------------------------------------------------


def test_settings_by_their_names() -> None:
    env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False)
    assert env.settings == ShapeEnvSettings(duck_shape=False, allow_scalar_outputs=False)
    assert (env.duck_shape, env.specialize_zero_one, env.assume_static_by_default) == (False, True, False)
    assert (env.allow_scalar_outputs, env.allow_dynamic_output_shape_ops) == (False, True)
    assert not env.prefer_deferred_runtime_asserts_over_guards


def test_examples_ranges_and_replacements() -> None:
    env = ShapeEnv()
    n, m, u = env.create_symint(8, "n"), env.create_symint(8, "m"), env.create_unbacked_symint(low=0, high=5)
    assert bool(n == m) and bool(m < 10)
    torch._check(u == 3)
    sn, sm, su = n.node._expr, m.node._expr, u.node._expr
    assert env.var_to_val == env.backed_var_to_val == {sn: 8, sm: 8}
    assert (env.var_to_range[sm].lower, env.var_to_range[sm].upper) == (2, 9)
    assert env.replacements in ({sn: sm, su: 3}, {sm: sn, su: 3})


def test_sources() -> None:
    env = ShapeEnv()
    x = FakeTensorMode(shape_env=env).from_tensor(torch.randn(4, 4, 6), source="x")
    found = {str(symbol): [place.name for place in places] for symbol, places in env.var_to_sources.items()}
    assert str(x.spec) == "f32[x_0, x_0, x_2]@cpu"
    assert found == {"x_0": ["x.size(0)", "x.size(1)"], "x_2": ["x.size(2)", "x.stride(1)"]}


def test_guards_unpack() -> None:
    env = ShapeEnv()
    n = env.create_symint(8, "n")
    assert n > 3
    expression, line, leaves_out_zero_and_one = env.guards[0]
    assert expression == env.guards[0][0] == env.guards[0].expr == (n.node.expr >= 4)
    assert "test_torch_names.py" in line and leaves_out_zero_and_one is False
    assert env.format_guards() == " - n >= 4" and "because" in env.format_guards(verbose=True)


def test_promises_by_the_symbol_that_is_known_last() -> None:
    env = ShapeEnv()
    n, u, v = env.create_symint(8, "n"), env.create_unbacked_symint(), env.create_unbacked_symint()
    torch._check(u < n)
    torch._check(u + v == 10)
    env.guard_or_defer_runtime_assert((v >= 2).node.expr, "at least two")
    found = {
        str(symbol): [p.text for p in promises] for symbol, promises in env.deferred_runtime_asserts.items()
    }
    assert found == {"u0": ["n > u0"], "u1": ["u0 + u1 == 10", "u1 >= 2"]}


@pytest.mark.parametrize("is_unbacked", [True, False])
def test_promises_that_torchs_tools_add_in_place(is_unbacked: bool) -> None:
    env = ShapeEnv()
    size = env.create_unbacked_symint() if is_unbacked else env.create_symint(6, "n")
    for _ in range(2):  # it asks whether it has added the same one before
        _defer_symbolic_equality_assert(size, 6, reason="size")
    assert [promise.text for promise in env.runtime_asserts] == [f"{size} == 6"] and env.guards == []
    assert env.num_deferred_runtime_asserts == 1
    symbol = size.node.expr if is_unbacked else None
    env.deferred_runtime_asserts[symbol] = env.deferred_runtime_asserts[symbol]
    env.deferred_runtime_asserts[symbol].extend(
        [torch_shapes.RuntimeAssert(sympy.Ge(size.node.expr, 2), "two", None)] * is_unbacked
    )
    assert len(env.runtime_asserts) == 1 + is_unbacked


def test_attributes_of_an_environment_that_are_set() -> None:
    env = ShapeEnv()
    n = env.create_symint(6, "n")
    env.frozen = True
    assert n > 5 and env.guards == [] and env.frozen
    env.frozen = False
    assert n > 4 and len(env.guards) == 1
    for name in ("duck_shape", "var_to_range", "replacements"):
        with pytest.raises(AttributeError):
            setattr(env, name, {})
    with pytest.raises(AttributeError, match="expected at least 0 runtime asserts, got -1"):
        env.num_deferred_runtime_asserts = -1
    with mock.patch.object(env, "evaluate_expr", lambda *args: 3):
        assert env.evaluate_expr(n.node.expr) == 3
    assert env.evaluate_expr(n.node.expr) == 6


def test_checks_of_sizes_with_an_example_can_be_promises() -> None:
    env = ShapeEnv(prefer_deferred_runtime_asserts_over_guards=True)
    n = env.create_symint(8, "n")
    torch._check(n % 4 == 0)
    assert env.guards == [] and [p.text for p in env.deferred_runtime_asserts[None]] == ["n % 4 == 0"]
    assert n % 2 == 0 and env.guards == [], "it follows"
    assert n > 5 and len(env.guards) == 1, "decisions are guards still"


def test_a_frozen_environment_records_nothing_more() -> None:
    env = ShapeEnv()
    n = env.create_symint(8, "n")
    assert n > 3 and not env.frozen
    env.freeze()
    assert n > 5 and env.frozen and [guard.text for guard in env.guards] == ["n >= 4"]


def test_a_copy_is_an_environment_of_its_own() -> None:
    env = ShapeEnv()
    x = FakeTensorMode(shape_env=env).from_tensor(torch.randn(8, 4), source="x")
    assert x.shape[0] % 2 == 0
    other = copy.deepcopy(env)
    assert other.check(torch.randn(6, 4)) == [] and len(other.check(torch.randn(7, 4))) == 1
    size = other.inputs.sizes[0].size
    assert size.shape_env is other and size.symbolic > 5
    assert (len(env.guards), len(other.guards)) == (1, 2)
    assert copy.deepcopy(x.shape[0]).node is x.shape[0].node, "a size alone stays the size of its environment"


def test_graphs_and_paths_in_torchs_words() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    module = torch.fx.symbolic_trace(lambda x, y: (x.nonzero(), y + 1))
    FakeTensorProp(module, mode).propagate(torch.randn(8), torch.randn(4))
    assert fx_placeholder_targets(module) == ["x", "y"]
    assert [str(val.spec) for val in fx_placeholder_vals(module)] == [
        "f32[input0_0]@cpu",
        "f32[input1_0]@cpu",
    ]
    vals = fx_placeholder_vals(module)
    assert env.produce_guards(vals, ["x", "y"], _simplified=True, input_contexts=None) == []
    guards = env.produce_guards(vals, ["x", "y"], input_contexts=None)
    assert guards == ["2 <= L['x'].size()[0]", "2 <= L['y'].size()[0]"]
    every = env.produce_guards(vals, ["x", "y"], ignore_static=False)
    assert every[:2] == ["L['x'].stride()[0] == 1", "L['x'].storage_offset() == 0"] and every[4:] == guards
    (nonzero,) = (node for node in module.graph.nodes if "unbacked_bindings" in node.meta)
    ((symbol, path),) = nonzero.meta["unbacked_bindings"].items()
    assert key_get(nonzero.meta["val"], path) == nonzero.meta["val"].shape[0] and str(path) == ".size()[0]"
    assert str(symbol) == str(nonzero.meta["val"].shape[0])


# --- small helpers ------------------------------------------------------------------------------------------------


def test_strides_without_gaps() -> None:
    n = symint(ShapeEnv(), 6)
    assert create_contiguous([4, 3, 2]) == [6, 2, 1] and create_contiguous([]) == [1]
    assert str(create_contiguous([2, n, 3])) == f"[3*{n}, 3, 1]"


def test_sizes_as_keys() -> None:
    env = ShapeEnv()
    n, m = symint(env, 6), symint(env, 7)
    table = {SymIntEqByExpr(n + 1): "n", SymIntEqByExpr(m): "m", SymIntEqByExpr(3): "three"}
    assert table[SymIntEqByExpr(1 + n)] == "n" and table[SymIntEqByExpr(3)] == "three"
    assert SymIntEqByExpr(n) != SymIntEqByExpr(m) and not env.guards
    with pytest.raises(AssertionError):
        _ = SymIntEqByExpr(n) == 3


def test_nodes_that_read_a_number() -> None:
    graph = make_fx(lambda x: x.new_zeros(x.shape[0]), tracing_mode="symbolic")(torch.randn(4, 3)).graph
    assert [is_accessor_node(node) for node in graph.nodes if node.op == "call_function"] == [True, False]


def test_a_second_run_has_the_symbols_of_the_first() -> None:
    graph = make_fx(lambda x: x.nonzero() * 2, tracing_mode="symbolic")(torch.randn(4, 3))
    mode = FakeTensorMode(shape_env=graph.shape_env)
    with pytest.raises(AssertionError, match="expected an active FakeTensorMode"):
        PropagateUnbackedSymInts(graph).run(torch.randn(4, 3))
    with mode:
        PropagateUnbackedSymInts(graph).run(mode.from_tensor(torch.randn(4, 3)))
    assert len(graph.shape_env.unbacked_renamings) == 1


def test_ways_are_tuples_of_torch_keys() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        rows = torch.randn(4, 3).nonzero()
    ((symbol, path),) = (compute_unbacked_bindings(env, [rows]) or {}).items()
    assert len(path) == 3 and [str(key) for key in path] == ["[0]", ".size()", "[0]"] and path == tuple(path)
    assert path[1:] == tuple(path)[1:] and hash(path) == hash(tuple(path))
    number = env.create_unbacked_symint()
    ((_, here),) = (compute_unbacked_bindings(env, number) or {}).items()
    assert here == () and len(here) == 0
    with mode:
        again = torch.randn(4, 3).nonzero()
    rebind_unbacked(env, {symbol: tuple(path)}, [again])
    assert statically_known_true(again.shape[0] == rows.shape[0])


def test_sizes_like_a_usual_one() -> None:
    env = ShapeEnv()
    u, v = env.create_unbacked_symint(), env.create_unbacked_symint()
    assert optimization_hint(u + 1) == 8193 and optimization_hint(u, fallback=8) == 8
    torch._check(u <= 100)
    torch._check(v >= 10000)
    assert optimization_hint(u) == 100 and optimization_hint(v, fallback=3) == 10000
    assert optimization_hint(torch.sym_ite(u > 7, u, v)) == 100


def test_sizes_that_are_neither_zero_nor_one() -> None:
    u = ShapeEnv().create_unbacked_symint()
    torch._check(u >= 0)
    assert [guard_size_oblivious(c) for c in (u == 0, u == 1, u != 1, u > 1)] == [False, False, True, True]
    with pytest.raises(GuardOnDataDependentSymNode, match="depends on whether u0 >= 6"):
        guard_size_oblivious(u > 5)


def test_expressions_as_text() -> None:
    env = ShapeEnv()
    n = env.create_symint(6, "n")
    assert env.evaluate_symexpr("n // 4 + Max(n, 2)") == 7
    number = env.deserialize_symexpr(str((n // 4).node.expr))
    assert str(number) == "n//4" and not env.guards


def test_one_form_for_each_condition() -> None:
    a, b = sympy.symbols("a b", integer=True)
    asked = [a > b, a >= b + 2, sympy.Ne(a - b, 3), 2 * a <= 4 * b + 6, sympy.Eq(2 * a, 4), -a <= -3, a * b > 4,
             sympy.And(a > b, b > 3), sympy.Or(a > b, sympy.Not(b > 3)), 3 * a - 6 > 9 * b, sympy.true]  # fmt: skip
    assert [canonicalize_bool_expr(condition) for condition in asked] == [
        torch_shapes.canonicalize_bool_expr(condition) for condition in asked
    ]


def test_arguments_as_torch_takes_them() -> None:
    kinds = [DimDynamic.DYNAMIC, DimDynamic.STATIC]
    assert StatelessSymbolicContext(kinds).dynamic_sizes == kinds
    inner = SubclassSymbolicContext(kinds, tensor_source="x", inner_contexts={}, excluded_sizes=(1, None))
    assert inner.track_outer_size_stride and inner.excluded_sizes == (1, None)
    env = ShapeEnv(
        duck_shape=None, should_record_events=False, tracked_fakes=[], co_fields={}, trace_asserts=False
    )
    assert env.settings.duck_shape
    n, u = env.create_symint(6, "n"), env.create_unbacked_symint()
    assert (
        env.size_hint(n.node.expr, allow_none=True) == 6
        and env.size_hint(u.node.expr, allow_none=True) is None
        and env.size_hint(u.node.expr, 7) == 7
    )
    with pytest.raises(GuardOnDataDependentSymNode):
        env.size_hint(u.node.expr)
    with pytest.raises(
        ValueError, match=r"expected a size that is static, dynamic, duck, unbacked, got .*INFER_STRIDE"
    ):
        env.create_symbol(6, "m", DimDynamic.INFER_STRIDE)
    assert env.simplify(n.node.expr, size_oblivious=True) == n.node.expr
    assert expect_true(n > 2, 1)
