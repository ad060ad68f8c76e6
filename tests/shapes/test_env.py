"""ShapeEnv: symbols, decisions, facts that teach, switches."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

from understudy import (
    FakeTensorMode,
    Settings,
    ShapeEnv,
    dims,
    guard_or_false,
    guard_or_true,
    statically_known_true,
)
from understudy.shapes.algebra.facts import Proof
from understudy.shapes.env import DELEGATES
from understudy.shapes.node import SymNode


def two(env: ShapeEnv, a: int = 8, b: int = 6) -> tuple[Any, Any]:
    return env.create_symint(a, "a"), env.create_symint(b, "b")


def texts(env: ShapeEnv) -> list[str]:
    return [guard.text for guard in env.guards]


# --- symbols -----------------------------------------------------------------------------------------------------


def test_symbols_are_called_after_their_input() -> None:
    env = ShapeEnv(duck_shape=False)
    x = FakeTensorMode(shape_env=env).from_tensor(torch.randn(4, 4), source="x")
    assert str(x.spec) == "f32[x_0, x_1]@cpu"


def test_symbols_without_a_name_are_numbered() -> None:
    env = ShapeEnv()
    assert str(env.create_symbol(5)) == "s0"
    assert str(env.create_symbol(7, "L['x'].size()[0]")) == "s1"


def test_equal_examples_share_a_symbol_unless_told() -> None:
    env = ShapeEnv()
    assert env.create_symbol(5) is env.create_symbol(5)
    env = ShapeEnv(duck_shape=False)
    assert env.create_symbol(5) is not env.create_symbol(5)


def test_a_name_is_one_size() -> None:
    env = ShapeEnv()
    assert env.create_symbol(5, name="batch") is env.create_symbol(5, name="batch")
    with pytest.raises(
        ValueError, match=r"dimension 'batch': expected 5 as in other inputs, got 6 in y.size\(0\)"
    ):
        env.create_symbol(6, "y.size(0)", name="batch")


def test_a_range_holds_the_example() -> None:
    with pytest.raises(ValueError, match=r"n: the example is 5, which is not in 8\.\.16"):
        ShapeEnv().create_symbol(5, name="n", low=8, high=16)


@pytest.mark.parametrize("example", [0, 1])
def test_zero_and_one_stay_numbers_and_that_is_reported(example: int) -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(example, 5), source="x")
    assert x.spec.shape[0] == example and type(x.spec.shape[0]) is int
    (made,) = env.specialisations
    assert str(made).startswith(f"x.size(0) = {example}    because ") and "test_env.py" in made.line
    assert "specialize_zero_one" in str(made)


@pytest.mark.parametrize("example", [0, 1])
def test_zero_and_one_can_stay_dynamic(example: int) -> None:
    for env, context in ((ShapeEnv(specialize_zero_one=False), None), (ShapeEnv(), dims("n", "m"))):
        x = FakeTensorMode(shape_env=env).from_tensor(
            torch.randn(example, 5), source="x", symbolic_context=context
        )
        size = x.spec.shape[0]
        assert type(size) is SymNode and size.hint == example
        assert not env.guards and not env.specialisations
        assert env.facts.interval(size.value) == (0, None)


def test_settings() -> None:
    assert ShapeEnv(settings=Settings(duck_shape=False)).settings.duck_shape is False
    env = ShapeEnv(assume_static_by_default=True)
    x = FakeTensorMode(shape_env=env).from_tensor(torch.randn(4, 5))
    assert str(x.spec) == "f32[4, 5]@cpu"
    with pytest.raises(TypeError):
        ShapeEnv(no_such_option=True)


def test_symintnode() -> None:
    env = ShapeEnv()
    a, _ = two(env)
    assert env.create_symintnode(a.node.value).node is a.node
    assert env.create_symintnode(a.node.expr).node is a.node
    assert env.create_symintnode(4) == 4


# --- decisions ---------------------------------------------------------------------------------------------------


def test_what_is_proved_needs_no_guard() -> None:
    env = ShapeEnv()
    a, b = two(env)
    assert a >= 2 and a * b >= 4 and a + b != 1 and bool(a != 0)
    assert env.prove((a >= 2).node.value if isinstance(a >= 2, torch.SymBool) else True) is Proof.YES
    assert not env.guards


def test_what_the_example_decides_is_a_guard() -> None:
    env = ShapeEnv()
    a, b = two(env)
    assert bool(a > b) and not bool(a * b == 47)
    assert texts(env) == ["a > b", "a*b != 47"]
    assert all("test_env.py" in guard.line and "assert bool(a > b)" in guard.line for guard in env.guards)
    assert str(env.guards[0]) == f"a > b    because {env.guards[0].line}"


def test_what_is_known_is_not_listed_again() -> None:
    env = ShapeEnv()
    a, b = two(env)
    for _ in range(2):
        assert bool(a > b) and bool(a >= b) and bool(a + 1 > b) and bool(a != b) and not bool(b >= a)
    assert texts(env) == ["a > b"]


def test_equality_merges() -> None:
    env = ShapeEnv()
    a, b = two(env, 8, 8)
    assert bool(a == b)
    assert statically_known_true(a * 3 - 2 * b == a) and str(a - b + 1) == "1"
    assert texts(env) == ["a == b"] and not env.specialisations


def test_equality_with_a_number_specialises() -> None:
    env = ShapeEnv()
    a, _ = two(env)
    assert bool(a == 8)
    assert str(a + 1) == "9"
    (made,) = env.specialisations
    assert (made.what, made.number, made.reason) == ("a", 8, "a == 8") and "bool(a == 8)" in made.line


def test_divisibility_and_bounds_teach() -> None:
    env = ShapeEnv()
    a, b = two(env)
    assert bool(a % 4 == 0) and bool(b < 2048)
    assert str(a // 4 * 4) == "a"
    assert statically_known_true(a * b % 4 == 0) and statically_known_true(b + 1 <= 2048)
    assert len(env.guards) == 2


def test_fallbacks() -> None:
    env = ShapeEnv()
    a, _ = two(env)
    u = env.create_unbacked_symint()
    assert guard_or_true(u > 3) and not guard_or_false(u > 3) and not statically_known_true(u > 3)
    assert not env.guards and not env.runtime_asserts
    assert guard_or_false(a > 3) and guard_or_true(a > 3)
    assert texts(env) == ["a >= 4"]
    assert not statically_known_true(a > 7) and texts(env) == ["a >= 4"]


def test_checks_on_data_are_deferred() -> None:
    env = ShapeEnv()
    u = env.create_unbacked_symint()
    torch._check(u >= 3)
    torch._check(u < 10)
    torch._check(u >= 2)
    assert statically_known_true(u > 2) and statically_known_true(u * 2 < 20)
    assert [guard.text for guard in env.runtime_asserts] == ["u0 >= 3", "u0 <= 9"]
    assert "torch._check(u >= 3)" in env.runtime_asserts[0].line


def test_ranges_of_data() -> None:
    env = ShapeEnv()
    u, q = env.create_unbacked_symint(low=4, high=9), env.create_unbacked_symbool()
    assert statically_known_true(u >= 4) and statically_known_true(u <= 9)
    torch._check(q)
    assert bool(q) and str(q.node.add(u.node)) == "u0 + 1"


# --- switches ----------------------------------------------------------------------------------------------------


def test_suppressed_guards() -> None:
    env = ShapeEnv()
    a, b = two(env)
    with env.suppress_guards():
        assert env.suppresses_guards
        assert bool(a > b) and a.node > 3 and int(a) == 8
    assert not env.guards and not env.suppresses_guards and not env.specialisations
    assert a.node > 3
    assert texts(env) == ["a >= 4"]


def test_what_was_answered_without_guards_is_not_kept() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(4, 6), source="x", symbolic_context=dims("n", "m"))
    with mode:
        with env.suppress_guards():
            x.view(-1, 8)
        assert not env.guards
        x.view(-1, 8)
    assert texts(env) == ["n*m % 8 == 0"]


def test_fresh_symbols_are_ignored_on_demand() -> None:
    env = ShapeEnv()
    with env.ignore_fresh_unbacked_symbols():
        env.create_unbacked_symint()
    kept = env.create_unbacked_symint()
    assert env.pending_fresh_unbacked_symbols == [kept.node.value]


# --- copies of stand-ins ---------------------------------------------------------------------------------------------


def test_stand_ins_with_symbols_are_copied_but_not_pickled() -> None:
    env = ShapeEnv()
    x = FakeTensorMode(shape_env=env).from_tensor(
        torch.randn(4, 6), source="x", symbolic_context=dims("n", "m")
    )
    assert copy.deepcopy(x).spec is x.spec and copy.copy(x).spec is x.spec
    with pytest.raises(
        pickle.PicklingError, match=r"f32\[n, m\]@cpu has symbolic sizes, which can't be pickled"
    ):
        pickle.dumps(x)
    assert not env.guards


def test_an_environment_is_pickled_with_its_numbers() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(4, 6), source="x", symbolic_context=dims("n", "m"))
    with mode:
        assert x.shape[0] % 2 == 0 and torch.cat([x, x]).view(-1, 4).shape[1] == 4
    number = x.shape[0] * 3 + x.shape[1]
    other, same_number = pickle.loads(pickle.dumps((env, number)))
    assert same_number.node.shape_env is other is not env
    assert str(same_number) == str(number) and list(map(str, other.guards)) == list(map(str, env.guards))
    assert other.check_source() == env.check_source()
    for rows in (4, 5):
        assert list(map(str, other.check(torch.randn(rows, 6)))) == list(
            map(str, env.check(torch.randn(rows, 6)))
        )
    assert same_number % 2 == 0 and len(env.guards) == 1  # the copy goes on by itself


# --- how it is composed --------------------------------------------------------------------------------------------


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    message = (
        r"ShapeEnv: unknown option duck_shapes \(choose from settings, allow_scalar_outputs, .*duck_shape"
    )
    with pytest.raises(TypeError, match=message):
        ShapeEnv(duck_shapes=False)


def test_options_of_torch_that_are_none_are_the_defaults() -> None:
    assert ShapeEnv(duck_shape=None, specialize_zero_one=False).settings == Settings(
        specialize_zero_one=False
    )
    assert ShapeEnv(settings=Settings(duck_shape=False), specialize_zero_one=False).settings == Settings(
        duck_shape=False, specialize_zero_one=False
    )


def test_the_class_itself_is_small() -> None:
    own = [name for name, value in vars(ShapeEnv).items() if callable(value) or isinstance(value, property)]
    assert ShapeEnv.__mro__ == (ShapeEnv, object) and len(own) <= 60


def test_each_delegate_is_answered_by_its_part() -> None:
    env = ShapeEnv()
    for name, part in DELEGATES.items():
        assert hasattr(getattr(env, part), name), f"{part} has no {name}"
        getattr(env, name)


# --- a long life -----------------------------------------------------------------------------------------------------


def test_an_environment_does_not_grow_with_inputs_that_come_again() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def convert() -> int:
        for _ in range(10):
            mode.from_tensor(torch.randn(4, 1, 6), source="x")
        return len(env.inputs.names) + len(env.inputs.sizes) + len(env.specialisations) + len(env.nodes)

    assert convert() == convert()
    assert env.inputs.names == ["x"]
    assert len(env.specialisations) == 1 and not env.check(torch.randn(4, 1, 6))


def test_an_input_of_the_same_name_with_other_sizes_is_another_input() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    for shape in ((4, 6), (4, 7), (4, 6), (4, 7)):
        mode.from_tensor(torch.randn(shape), source="x")
    assert env.inputs.names == ["x", "x_"]


def test_many_sizes_are_added_in_one_step() -> None:
    """One after the other, there would be as many sums, each of them as long as the number of sizes before it."""
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    reals = [torch.empty(2 + i, 3) for i in range(200)]
    rows = [
        mode.from_tensor(x, source=f"x{i}", symbolic_context=["dynamic", "static"])
        for i, x in enumerate(reals)
    ]
    with mode:
        joined = torch.cat(rows)
    made = sum(len(expr.terms) for expr in env.algebra._interned.values())
    assert len(joined.spec.shape[0].value.terms) == 200
    assert made < 20 * len(rows)


def test_the_facade_is_thin_and_has_names_of_torch_only() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as TorchShapeEnv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's names are deprecated
        env = TorchShapeEnv()
        ours = {name for name in DELEGATES if not hasattr(env, name)}
    assert ours - {"evaluate_symexpr"} == {"to_sympy", "from_sympy"}  # the first is gone since torch 2.15
    assert len(DELEGATES) <= 63
