"""What is asked of dimensions, and what a check of other inputs says, whatever the inputs are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.source import EphemeralSource, LocalSource
from torch.utils._sympy.value_ranges import ValueRanges

from understudy import (
    ConstraintViolationError,
    DimDynamic,
    FakeTensorMode,
    RelaxedUnspecConstraint,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)


def converted(
    shape: tuple[int, ...], source: Any = "x", context: Any = None, **options: Any
) -> tuple[ShapeEnv, Any]:
    env = ShapeEnv(**options)
    return env, FakeTensorMode(shape_env=env).from_tensor(
        torch.empty(shape), source=source, symbolic_context=context
    )


def test_the_switches_are_independent() -> None:
    assert str(converted((1, 0, 4, 4), duck_shape=False)[1].spec) == "f32[1, 0, x_2, x_3]@cpu"
    assert str(converted((1, 4, 4), specialize_zero_one=False)[1].spec).startswith("f32[x_0, x_1, x_1]")
    both = converted((1, 4, 4), duck_shape=False, specialize_zero_one=False)[1]
    assert str(both.spec).startswith("f32[x_0, x_1, x_2]")


def constrained(constraint: Any, program: Callable[[Any], Any], shape: tuple[int, ...] = (4, 6)) -> list[str]:
    context = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC] * 2, constraint_sizes=[constraint, None]
    )
    env, x = converted(shape, context=context)
    program(x)
    return env.produce_guards([x], [LocalSource("x")], input_contexts=[context])


def within(low: int, high: int, warn_only: bool = False) -> StrictMinMaxConstraint:
    return StrictMinMaxConstraint(vr=ValueRanges(low, high), warn_only=warn_only)


KEPT: list[tuple[Any, Callable[[Any], Any], tuple[int, int]]] = [
    (RelaxedUnspecConstraint(warn_only=False), lambda x: x.shape[0] > 3, (4, 6)),
    (RelaxedUnspecConstraint(warn_only=True), lambda x: int(x.shape[0]), (4, 6)),
    (RelaxedUnspecConstraint(warn_only=False), lambda x: int(x.shape[1]), (4, 6)),
    (within(2, 64), lambda x: bool(x.shape[0] > 1), (4, 6)),
    (within(2, 64, warn_only=True), lambda x: bool(x.shape[0] > 3), (4, 6)),
]
BROKEN: list[tuple[Any, Callable[[Any], Any], str]] = [
    (
        RelaxedUnspecConstraint(warn_only=False),
        lambda x: int(x.shape[0]),
        r"to be dynamic, but it was specialised to 4",
    ),
    (
        within(2, 64),
        lambda x: bool(x.shape[0] > 3),
        r"any number in 2\.\.64, but the run assumed x_0 >= 4",
    ),
    (within(2, 64), lambda x: bool(x.shape[0] % 2 == 0), r"x_0 % 2 == 0    because .*test_constraints.py"),
]


@pytest.mark.parametrize(("constraint", "program", "shape"), KEPT)
def test_what_is_kept(constraint: Any, program: Callable[[Any], Any], shape: tuple[int, int]) -> None:
    assert constrained(constraint, program, shape)


@pytest.mark.parametrize(("constraint", "program", "message"), BROKEN)
def test_what_is_broken(constraint: Any, program: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConstraintViolationError, match=message) as caught:
        constrained(constraint, program)
    assert "L['x'].size(0)" in str(caught.value) and isinstance(caught.value, RuntimeError)


def test_an_example_outside_of_its_range() -> None:
    with pytest.raises(
        ConstraintViolationError, match=r"x\.size\(0\): the example is 4, which is not in 8\.\.64"
    ):
        converted((4,), context=StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[within(8, 64)]
        ))  # fmt: skip


def test_a_context_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match="one entry for each of the 2 dimensions"):
        converted((4, 5), context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]))


def test_marked_unbacked_with_bounds_and_a_name() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    first, second = torch.empty(4, 3), torch.empty(5, 4)
    mark_unbacked(first, 0, min=2, max=9, shape_id="rows")
    mark_unbacked(second, 1, shape_id="rows")
    a, b = mode.from_tensor(first, source="a"), mode.from_tensor(second, source="b")
    assert str(a.shape[0]) == str(b.shape[1]) == "u0"
    assert str(env.var_to_range[a.shape[0].node.expr]) == "VR[2, 9]"


NAMES = [
    ("x", None), (LocalSource("x"), None), ("self.weight", None), ("lambda", None), ('p["x"]', None), (None, None),
    ("x", ("x", "y")), ("batch", ("batch", "seq")), ("x", ("guards", "broken")), ("guard", ("holds", "fine")),
]  # fmt: skip


@pytest.mark.parametrize(("source", "context"), NAMES, ids=str)
def test_checks_whatever_things_are_called(source: Any, context: Any) -> None:
    env, x = converted((4, 6), source, context)
    with x.fake_mode:
        x.view(-1, 8)
    fits, breaks, strided = torch.empty(8, 5), torch.empty(3, 5), torch.empty(5, 8).t()
    assert env.evaluate_guards(fits) and not env.evaluate_guards(breaks) and not env.evaluate_guards(strided)
    found: dict[str, Any] = {}
    exec(env.check_source(), found)
    found["check"](fits)
    for wrong, text in ((breaks, "% 8 == 0"), (strided, r"\.stride\(0\) == ")):
        with pytest.raises(ValueError, match=text):
            found["check"](wrong)
    code = env.produce_guards_expression([x])
    assert code is not None
    assert env.evaluate_guards_expression(code, [fits]) and not env.evaluate_guards_expression(code, [breaks])
    assert env.evaluate_guards_expression("L['t0'].size()[0] == 8", [fits])


def test_produced_guards_are_python_where_a_dimension_is_called_as_its_input() -> None:
    env, _ = converted((4, 6), "x", ("x", "y"))
    assert "x.stride(0) == x.size(1)" in env.produce_guards()


def test_symbols_are_called_after_sources_of_torch() -> None:
    assert str(converted((4, 6), LocalSource("image"))[1].spec) == "f32[image_0, image_1]@cpu"


def test_promises_about_inputs_are_checked() -> None:
    env, x = converted((4, 6), context=("unbacked", "static"))
    with x.fake_mode:
        torch._check(x.shape[0] % 2 == 0)
    (broken,) = env.check(torch.empty(3, 6))
    assert str(broken).startswith("u0 % 2 == 0    because ") and str(broken).endswith(
        "but u0 = 3 (x.size(0))"
    )
    assert not env.check(torch.empty(8, 6))


def test_a_number_is_shown_once() -> None:
    env = ShapeEnv()
    n = env.create_symint(3, "n")
    assert n < 5
    assert str(env.check(7)[0]).endswith("\n    but n = 7")


def test_guards_in_torchs_other_words() -> None:
    env, x = converted((4, 6))
    with x.fake_mode:
        x.view(-1, 8)
    plain, verbose = env.produce_guards_verbose([x], [LocalSource("x")])
    assert plain.exprs == env.produce_guards([x], [LocalSource("x")])
    (found,) = (text for text in verbose.exprs if "#" in text)
    assert found.startswith("L['x'].size()[0]*L['x'].size()[1] % 8 == 0  # ") and "x.view(-1, 8)" in found
    assert env.get_pruned_guards([x.shape[0]]) == []
    assert env.get_pruned_guards(list(x.shape)) == env.guards
    assert env.source_to_var["x.size(1)"] == x.shape[1].node.expr


def test_sources_that_nobody_can_be_asked_for_come_last() -> None:
    env = ShapeEnv()
    for source in (EphemeralSource(), "x"):
        env.create_symbolic_sizes_strides_storage_offset(torch.empty(4), source=source)
    ((first, second),) = env.var_to_sources.values()
    assert not first.is_ephemeral() and second.is_ephemeral()
