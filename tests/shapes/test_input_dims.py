"""What becomes of each dimension of an input: by name, by kind, by range, by torch's contexts and marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo import mark_dynamic, mark_static, maybe_mark_dynamic
from torch.export import Dim as ExportDim
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges

from understudy import Dim, FakeTensorMode, ShapeEnv, dims


def spec_of(
    shape: tuple[int, ...], context: Any = None, env: ShapeEnv | None = None, mark: Any = None
) -> str:
    real = torch.randn(*shape)
    if mark is not None:
        mark(real)
    mode = FakeTensorMode(shape_env=env or ShapeEnv())
    return str(mode.from_tensor(real, source="x", symbolic_context=context).spec)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (dims("batch", "seq", "width"), "f32[batch, seq, width]@cpu"),
        (("batch", "seq", "static"), "f32[batch, seq, 8]@cpu"),
        ((Dim("batch"), None, 8), "f32[batch, x_1, 8]@cpu"),
        (("n", "m", "n"), "f32[n, m, n]@cpu"),
        (("duck", "duck", "duck"), "f32[x_0, x_1, x_0]@cpu"),
        (("dynamic", "dynamic", "dynamic"), "f32[x_0, x_1, x_2]@cpu"),
        (("unbacked", "static", "static"), "f32[u0, 6, 8]@cpu"),
        ({1: Dim("seq")}, "f32[8, seq, 8]@cpu"),
        ((ExportDim("batch"), ExportDim.STATIC, ExportDim.DYNAMIC), "f32[batch, 6, x_2]@cpu"),
        ((2 * ExportDim("half"), None, "static"), "f32[2*half, x_1, 8]@cpu"),
        (StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DUCK]), "f32[x_0, 6, x_2]@cpu"),
        (None, "f32[x_0, x_1, x_0]@cpu"),
    ],
)  # fmt: skip
def test_each_way_to_say_it(context: Any, expected: str) -> None:
    assert spec_of((8, 6, 8), context) == expected


def test_the_switch_for_duck_sizing() -> None:
    assert spec_of((8, 6, 8), None, ShapeEnv(duck_shape=False)) == "f32[x_0, x_1, x_2]@cpu"


def interval(env: ShapeEnv, name: str) -> Any:
    return env.facts.interval(env.algebra.symbols[name])


def test_ranges() -> None:
    env = ShapeEnv()
    spec_of((8, 6), (Dim("batch", min=4, max=64), Dim("seq", max=100)), env)
    assert interval(env, "batch") == (4, 64) and interval(env, "seq") == (2, 100)
    assert {"batch >= 4", "batch <= 64", "seq <= 100"} <= {r.text for r in env.requirements()}


def test_ranges_of_torch() -> None:
    env = ShapeEnv()
    spec_of((8, 6), (ExportDim("batch", min=3, max=9), ExportDim("seq")), env)
    assert interval(env, "batch") == (3, 9)
    env = ShapeEnv()
    bound = StrictMinMaxConstraint(vr=ValueRanges(5, 20), warn_only=False)
    spec_of((8, 6), StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2, constraint_sizes=[bound, None]), env)
    assert interval(env, "x_0") == (5, 20)


def test_marks() -> None:
    def mark(real: torch.Tensor) -> None:
        mark_dynamic(real, 0, min=2, max=32)
        mark_static(real, 1)
        maybe_mark_dynamic(real, 2)

    env = ShapeEnv()
    assert spec_of((8, 6, 8), None, env, mark) == "f32[x_0, 6, x_2]@cpu"
    assert interval(env, "x_0") == (2, 32)
    assert (
        spec_of((8, 6), None, ShapeEnv(assume_static_by_default=True), lambda t: mark_dynamic(t, 0))
        == "f32[x_0, 6]@cpu"
    )


def test_a_derived_dimension_has_to_fit() -> None:
    with pytest.raises(ValueError, match=r"x.size\(0\) is 7, which is not 2\*half \+ 0"):
        spec_of((7,), (2 * ExportDim("half"),))


@pytest.mark.parametrize("name", ["batch size", "2", "class", "floor", ""])
def test_names_have_to_be_names(name: str) -> None:
    with pytest.raises(ValueError, match="dimension name must be a Python identifier"):
        Dim(name)


@pytest.mark.parametrize("context", [("batch",), "batch", (1.5, "m"), 7])
def test_a_context_has_an_entry_for_each_dimension(context: Any) -> None:
    with pytest.raises(ValueError, match=r"one entry for each of the 2 dimensions|expected a name"):
        spec_of((4, 5), context)


def test_one_name_in_two_inputs() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    (batch,) = dims("batch")
    x = mode.from_tensor(torch.randn(8, 3), source="x", symbolic_context=(batch, "static"))
    y = mode.from_tensor(torch.randn(8), source="y", symbolic_context=(batch,))
    assert str((x.sum(1) + y).spec) == "f32[batch]@cpu" and not env.guards
    (broken,) = env.check(torch.randn(9, 3), torch.randn(7))
    assert str(broken).startswith("y.size(0) == batch\n    but y.size(0) = 7, batch = 9 (x.size(0))")


@pytest.mark.parametrize("shape", [(4, 6, 8), (2, 3), (5,), ()])
def test_strides_follow_the_sizes(shape: tuple[int, ...]) -> None:
    """In terms of the sizes, whatever the order of the dimensions in memory is."""
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    reals = [torch.randn(shape)]
    if len(shape) > 1:
        reals += [torch.randn(shape).transpose(0, 1), torch.randn((2, *shape))[0]]
    for real in reals:
        fake = mode.from_tensor(real)
        assert not env.guards
        assert [getattr(s, "hint", s) for s in fake.spec.stride] == list(real.stride())


@pytest.mark.parametrize(
    ("context", "complaint"),
    [
        ({5: "n"}, "expected entries for dimensions below 2, got {5: 'n'}"),
        ({"n": 0}, "expected entries for dimensions below 2"),
        (("n", 3), r"x.size\(1\): expected 3, as in symbolic_context, got 8"),
        ({1: 7}, r"x.size\(1\): expected 7, as in symbolic_context, got 8"),
    ],
)
def test_contexts_that_do_not_fit(context: Any, complaint: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with pytest.raises(ValueError, match=complaint):
        mode.from_tensor(torch.randn(4, 8), source="x", symbolic_context=context)


def test_dimensions_from_the_end() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(4, 8), source="x", symbolic_context={-1: "seq"})
    assert str(x.spec) == "f32[4, seq]@cpu"


def test_names_of_dimensions_need_an_environment() -> None:
    with pytest.raises(
        ValueError, match=r"has no ShapeEnv to own them: FakeTensorMode\(shape_env=ShapeEnv\(\)\)"
    ):
        FakeTensorMode().from_tensor(torch.ones(2), symbolic_context=dims("batch"))
