"""Calls without tensors: inputs in order, names of arguments, text."""

from __future__ import annotations

import torch

from understudy.ops.traits.writes import written_inputs
from understudy.spec import TensorSpec
from understudy.spec.call import Call, describe, flat, map_structure

aten = torch.ops.aten
CPU = torch.device("cpu")


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, dtype=torch.float32, device=CPU)


def test_inputs_in_the_order_in_which_they_are_written() -> None:
    a, b, c = spec(1), spec(2), spec(3)
    call = Call.of(aten.cat.out, ([a, b], 0), {"out": c})
    assert call.inputs == (a, b, c)
    assert [call.argument_of(position) for position in range(3)] == ["tensors[0]", "tensors[1]", "out"]
    assert written_inputs(call) == (2,)


def test_written_inputs() -> None:
    a, b = spec(1), spec(2)
    assert written_inputs(Call.of(aten.add.Tensor, (a, b), {})) == ()
    assert written_inputs(Call.of(aten.add_.Tensor, (a, b), {})) == (0,)
    assert written_inputs(Call.of(aten._foreach_add_.List, ([a, a], [b, b]), {})) == (0, 1)
    assert written_inputs(Call.of(aten.max.dim_max, (a, 0), {"max": a, "max_values": b})) == (1, 2)


def test_text() -> None:
    call = Call.of(aten.add.Tensor, (spec(2, 3), 1.5), {"alpha": 2})
    assert str(call) == "aten.add.Tensor(f32[2, 3]@cpu, 1.5, alpha=2)"
    assert describe([[spec(1)] * 10], {}) == "[" + ", ".join(["f32[1]@cpu"] * 6) + ", … 10 in all]"
    assert len(describe(["x" * 5000], {})) < 700


def test_flat_and_mapped() -> None:
    nested = ((1, [2, "a"]), {"k": [3, (4,)]})
    assert flat(int, nested[0], nested[1]) == [1, 2, 3, 4]
    assert map_structure(lambda n: n + 1, int, nested) == ((2, [3, "a"]), {"k": [4, (5,)]})
