"""Nodes as torch's SymInt, SymFloat and SymBool use them, and as numbers for rules: each result against plain numbers."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.sym_node import SymNode as TorchSymNode

from understudy import FakeTensorMode, ShapeEnv
from understudy.shapes.decisions import Decisions
from understudy.shapes.node import SymNode

Numbers = tuple[Any, Any]
EXAMPLE = (12, 5)
OTHERS = [(3, 7), (8, 8), (100, 2), (49, 13)]


def symbols(env: ShapeEnv) -> Numbers:
    return tuple(env.create_symint(size, name, low=2) for size, name in zip(EXAMPLE, "ab", strict=True))  # type: ignore[return-value]


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "add a number": lambda a, b: a + 3,
    "number minus": lambda a, b: 3 - a,
    "number times": lambda a, b: 3 * a,
    "number over": lambda a, b: 100 // a,
    "number modulo": lambda a, b: 100 % a,
    "number divided": lambda a, b: 100 / a,
    "power": lambda a, b: a**2 + b**3,
    "power of two": lambda a, b: 2**b,
    "root": lambda a, b: a**0.5,
    "inverse": lambda a, b: a**-1,
    "neg": lambda a, b: -a,
    "pos": lambda a, b: +a,
    "abs": lambda a, b: abs(b - a),
    "left shift": lambda a, b: a << 3,
    "right shift": lambda a, b: a >> 1,
    "bits and": lambda a, b: a & 6,
    "bits or": lambda a, b: a | 1,
    "bits xor": lambda a, b: a ^ b,
    "floor": lambda a, b: math.floor(a / 4),
    "ceil": lambda a, b: math.ceil(a / 7),
    "trunc": lambda a, b: math.trunc(a / 7),
    "round": lambda a, b: round(a / 7),
    "round to digits": lambda a, b: round(a / 7, 2),
    "round an integer": lambda a, b: round(a),
    "int of a product": lambda a, b: torch.sym_int(a * 0.5),
    "int of an inexact product": lambda a, b: torch.sym_int(a * 0.3),
    "int of an inexact quotient": lambda a, b: torch.sym_int(a / 49 * 49),
    "float": lambda a, b: torch.sym_float(a) * 1.5,
    "sym_max": lambda a, b: torch.sym_max(a, b),
    "sym_min": lambda a, b: torch.sym_min(a, b),
    "sym_min of a float": lambda a, b: torch.sym_min(a, 4.5),
    "sym_sum": lambda a, b: torch.sym_sum([a, b, 1]),
    "sym_ite": lambda a, b: torch.sym_ite(a > b, a, b + 1),
    "sym_not": lambda a, b: torch.sym_not(a > b),
    "sym_sqrt": lambda a, b: torch._sym_sqrt(a),
    "sym_log2": lambda a, b: torch._sym_log2(a),
    "float floordiv": lambda a, b: (a * 0.3) // 2,
    "float mod": lambda a, b: (a * 0.3) % 2,
    "float neg": lambda a, b: -(a * 0.3),
    "float abs": lambda a, b: abs(a * -0.3),
    "equal": operator.eq,
    "differ": operator.ne,
    "less": operator.lt,
    "at most": operator.le,
    "more": operator.gt,
    "at least": operator.ge,
    "equals a float": lambda a, b: a == 8.0,
    "half is more": lambda a, b: a / 2 > 3.5,
    "part is more": lambda a, b: a * 0.3 > 2,
    "and": lambda a, b: (a > b) & (b > 3),
    "or": lambda a, b: (a > b) | (b * 0.7 > 3),
    "same truth": lambda a, b: (a > b) == (b > 3),
    "is_integer": lambda a, b: (a / 4).is_integer(),
}


def value_at(result: Any, env: ShapeEnv, sizes: Numbers) -> Any:
    if not isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return result
    values = {env.algebra.symbols[name]: size for name, size in zip("ab", sizes, strict=True)}
    for symbol, definition in env.definitions.items():
        values[symbol] = int(definition.evaluate(values))
    return result.node.value.evaluate(values)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_of_torch(name: str) -> None:
    """One symbolic result is right at every size, and nothing had to be assumed for it."""
    env = ShapeEnv()
    result = FUNCTIONS[name](*symbols(env))
    assert not env.guards
    for sizes in [EXAMPLE, *OTHERS]:
        expected = FUNCTIONS[name](*sizes)
        found = value_at(result, env, sizes)
        assert found == expected, (sizes, result)
        kind = type(result)
        assert isinstance(expected, bool) == (kind is torch.SymBool)
        assert isinstance(expected, float) == (kind is torch.SymFloat)


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda a, b: (a + b) * 3 - 2 * b + 7 - a,
    "division": lambda a, b: (a // 3) + (100 // b) + a % 3 + 100 % b,
    "divmod": lambda a, b: divmod(a, 3)[0] + divmod(100, b)[1],
    "powers": lambda a, b: a**2 + 2**b,
    "shifts": lambda a, b: (a << 2) + (b >> 1),
    "signs": lambda a, b: +a - (-b) + abs(b - a),
    "quotient": lambda a, b: math.floor(a / 2) + math.ceil(a / 3) + math.trunc(a / 4) + round(a / 1),
    "a float": lambda a, b: math.floor(a * 0.5),
    "choice": lambda a, b: max(a, b) - min(a, b),
    "compare": lambda a, b: (a < b, a <= b, a > b, a >= b, a == b, a != b, a == 12, bool(a)),
}


@pytest.mark.parametrize("name", RULES)
def test_operators_of_rules(name: str) -> None:
    env = ShapeEnv()
    a, b = (symbol.node for symbol in symbols(env))
    assert isinstance(a, SymNode)
    result, expected = RULES[name](a, b), RULES[name](*EXAMPLE)
    found = result.hint if type(result) is SymNode else result
    assert found == expected


def test_divmod_of_sizes() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        a, b = symbols(env)
        assert divmod(a, 3)[0].node is (a // 3).node and divmod(a, b)[1].node is (a % b).node
        assert divmod(100, b)[0].node is (100 // b).node
    assert not env.guards


def test_equal_values_are_the_same_node() -> None:
    env = ShapeEnv()
    a, b = symbols(env)
    assert (a * b).node is (b * a).node
    assert (a + a).node is (2 * a).node
    assert ((a + b) * (a - b)).node is (a * a - b * b).node
    assert (a - a) == 0 and type((a - a).node.value if isinstance(a - a, torch.SymInt) else 0) is int


def test_a_float_is_not_taken_for_the_equal_integer() -> None:
    env = ShapeEnv()
    a, _ = symbols(env)
    assert type((a.node * 2).value.evaluate(env.hints)) is int
    assert isinstance((a.node * 2.0).symbolic, torch.SymFloat)
    assert isinstance((a.node * 2).symbolic, torch.SymInt)


@pytest.mark.parametrize("ask", [int, lambda a: list(range(a)), operator.index, lambda a: [0] * a, float])
def test_a_number_is_a_specialisation_with_its_line(ask: Any) -> None:
    env = ShapeEnv()
    a, b = symbols(env)
    ask(a)
    (guard,) = env.guards
    assert guard.text == "a == 12" and "test_nodes.py" in guard.line
    (made,) = env.specialisations
    assert str(made).startswith("a = 12    because ") and made.line == guard.line
    assert str(a + b) == "b + 12"


def test_constants_are_plain_numbers() -> None:
    env = ShapeEnv()
    node = env.node(3, int)
    assert node.constant == 3 and node.maybe_as_int() == 3 and node.symbolic == 3
    assert env.node(True, bool).maybe_as_int() is None and env.node(1.5, float).maybe_as_float() == 1.5
    symbol = symbols(env)[0].node
    assert (
        symbol.maybe_as_int() is None and not symbol.is_constant() and symbol.has_hint() and symbol.hint == 12
    )


def test_torch_takes_it_for_its_own() -> None:
    env = ShapeEnv()
    node = symbols(env)[0].node
    assert isinstance(node, TorchSymNode) and type(node) is SymNode
    assert not [name for name in vars(TorchSymNode) if not name.startswith("_") and not hasattr(node, name)]


def test_either_condition_and_not_both() -> None:
    a, b = symbols(ShapeEnv())
    for x, y in itertools.product((a > 7, a < 7), (b > 3, b < 3)):
        assert bool(torch.SymBool(x.node.xor(y.node))) is (bool(x) is not bool(y))


def test_sympy_on_demand() -> None:
    env = ShapeEnv()
    a, b = symbols(env)
    assert str((a * b + 1).node.expr) == "a*b + 1"
    assert str((a * 0.5 + b).node.expr) == "0.5*a + b"
    assert str((a > b).node.expr) == "a > b"
    assert str((a * 0.3 > b).node.expr) == "0.3*a > b"


def test_shifts_refuse_what_python_refuses() -> None:
    env = ShapeEnv()
    a, b = symbols(env)
    for shift in (operator.lshift, operator.rshift):
        for places in (-1, -b):
            with pytest.raises(ValueError, match="negative shift count"):
                shift(a, places)
        for x, y in ((a, 1.0), (1.0, a), (a, b * 0.5)):
            with pytest.raises(TypeError, match="unsupported operand"):
                shift(x, y)


def test_copies() -> None:
    env = ShapeEnv()
    a, _ = symbols(env)
    assert copy.deepcopy(a.node) is a.node and copy.copy(a.node) is a.node
    assert copy.deepcopy(a).node is a.node
    twin = pickle.loads(pickle.dumps(a))
    assert str(twin) == "a" and twin.node.shape_env is not env and twin.node is not a.node


def test_other_types_are_left_to_python() -> None:
    env = ShapeEnv()
    a, _ = symbols(env)
    with pytest.raises(TypeError):
        a.node + "x"
    assert a.node != "x" and a.node != None  # noqa: E711
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)
    assert a.node in {a.node}


def test_what_is_settled_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ShapeEnv()
    a, b = (size.node for size in symbols(env))
    one = a.wrap_int(1)
    proved, refuted, assumed = a.ge(one), a.eq(one), a.gt(b)
    assert proved.guard_bool("x.cpp", 1) and not refuted.guard_or_false("x.cpp", 1)
    assert not refuted.expect_true("x.cpp", 1)
    answer = assumed.guard_bool("x.cpp", 1)
    assert [str(guard.condition) for guard in env.guards] == ["a > b" if answer else "a <= b"]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    for name in ("decide", "decide_in_kernel", "is_known"):
        monkeypatch.setattr(Decisions, name, refuse)
    for node, truth in ((proved, True), (refuted, False), (assumed, answer)):
        questions = (node.guard_bool, node.guard_or_false, node.guard_or_true, node.statically_known_true)
        assert {ask("y.cpp", 2) for ask in questions} == {truth}
    assert proved.expect_true("y.cpp", 2) and not refuted.expect_true("y.cpp", 2)


def test_what_is_open_is_asked_again() -> None:
    env = ShapeEnv()
    a, b = (size.node for size in symbols(env))
    condition = a.gt(b)
    assert not condition.statically_known_true("x.cpp", 1)
    env.expect(condition.value)
    assert condition.statically_known_true("x.cpp", 1) is condition.guard_bool("x.cpp", 1)


def test_an_example_to_the_contrary_spares_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ShapeEnv()
    a, b = symbols(env)
    condition = (a < b).node.value if a.node.hint > b.node.hint else (a > b).node.value
    monkeypatch.setattr(type(env.facts), "prove", lambda *_: pytest.fail("a search in vain"))
    assert not env.is_known(condition)


def test_floats_answer_the_questions_of_truth_values() -> None:
    """The methods of truth values are not bound to the nodes of floats, which have them all the same."""
    number = ShapeEnv().create_unbacked_symfloat(low=1, high=4).node
    zero = number.wrap_float(0.0)
    assert number.eq(zero) is number.eq(zero) and not number.eq(zero).guard_bool("", 0)
    for question in ("guard_bool", "expect_true", "guard_or_false", "guard_or_true", "statically_known_true"):
        assert callable(getattr(number, question))
    with pytest.raises(AttributeError, match="has no attribute 'guards'"):
        _ = number.guards
