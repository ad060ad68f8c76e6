from __future__ import annotations

from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import filled, layouts
from tests.oracle.real import real_outcomes, spec_of
from understudy import FakeTensorMode
from understudy.ops.variants import rule_of
from understudy.spec import TensorSpec, normal

aten = torch.ops.aten


def answer(op: Any, *specs: Any) -> Any:
    found = rule_of(op)
    assert found is not None
    return found(*specs)


def test_onednn_layers() -> None:
    """All results but the workspace, whose size is oneDNN's own affair."""
    weights = (filled((16, 3)), filled((16, 4)), filled((16,)), filled((16,)))
    state = filled((2, 4))
    for x in layouts((5, 2, 3), few=True):
        args = (x, *weights, state, state, False, [], 2, 4, 1, True, False, False, True)
        expected, specs, _ = real_outcomes(aten.mkldnn_rnn_layer.default, *args)
        assert normal(answer(aten.mkldnn_rnn_layer.default, *specs))[:3] == expected[:3]  # type: ignore[index]
        out, hy, cy, workspace = aten.mkldnn_rnn_layer.default(*args)
        backward = aten.mkldnn_rnn_layer_backward.default
        rest = (out, hy, cy, out, None, None, False, 2, 4, 1, True, True, False, [], False, workspace)
        expected, specs, _ = real_outcomes(backward, x, *weights, state, state, *rest)
        assert normal(answer(backward, *specs)) == expected


DTYPES = {"f": torch.float32, "b": torch.bfloat16, "d": torch.float64}


@pytest.mark.parametrize("dtypes", [
    "fffffff", "bffffff", "fbfffff", "ffbffff", "fffbfff", "ffffbff", "fffbbff", "fffffbf", "ffffffb", "ddddddd", "fdddddd",
    "fffdfff", "ffffffd", "bbbbbbb", "bbbffbb", "bbbfbbb", "bbbbbbf", "bbbbbff", "bbfbbbb",
])  # fmt: skip
def test_which_dtypes_onednn_layers_take_together(dtypes: str) -> None:
    shapes = [(5, 2, 3), (16, 3), (16, 4), (16,), (16,), (2, 4), (2, 4)]

    def find_dtypes() -> Any:
        operands = [
            torch.zeros(shape, dtype=DTYPES[name]) for shape, name in zip(shapes, dtypes, strict=True)
        ]
        try:
            results = torch.ops.aten.mkldnn_rnn_layer(
                *operands, False, [], 2, 4, 1, True, False, False, False
            )
        except RuntimeError:
            return "refused"
        return [result.dtype for result in results[:3]]

    expected = find_dtypes()
    if expected == "refused" and dtypes[:3] + dtypes[5] == "bbbb":
        pytest.skip("whether oneDNN has a kernel for bfloat16 depends on the processor")
    with FakeTensorMode():
        assert find_dtypes() == expected


@pytest.mark.parametrize(
    "sizes", [(1, 1, 16, 32), (10, 4, 64, 32), (10, 4, 20, 30), (10, 8, 16, 64), (7, 3, 128, 256)]
)
@pytest.mark.parametrize("train", [True, False])
def test_the_size_of_onednns_workspace(sizes: tuple[int, int, int, int], train: bool) -> None:
    length, batch, features, hidden = sizes

    def program() -> Any:
        weights = [torch.zeros(4 * hidden, n) for n in (features, hidden)] + [torch.zeros(4 * hidden)] * 2
        state, x = torch.zeros(1, batch, hidden), torch.zeros(length, batch, features)
        return torch.ops.aten.mkldnn_rnn_layer(
            x, *weights, state, state, False, [], 2, hidden, 1, True, False, False, train
        )[3]

    with FakeTensorMode():
        fake = program()
    assert fake.shape == program().shape


def test_cells_on_cuda() -> None:
    gates, state = (spec_of(filled(shape)).on(torch.device("cuda:0")) for shape in ((2, 16), (2, 4)))
    results: tuple[TensorSpec, ...] = answer(aten._thnn_fused_lstm_cell.default, gates, gates, state)
    assert [str(spec) for spec in results] == ["f32[2, 4]@cuda:0", "f32[2, 4]@cuda:0", "f32[2, 16]@cuda:0"]
    results = answer(aten._thnn_fused_gru_cell.default, gates, gates, state)
    assert [str(spec) for spec in results] == ["f32[2, 4]@cuda:0", "f32[2, 20]@cuda:0"]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_workspace_of_a_layer_without_gradients(is_recorded: bool) -> None:
    def program() -> Any:
        weights = [torch.zeros(16, n) for n in (3, 4)] + [torch.zeros(16)] * 2
        state = torch.zeros(2, 4)
        return torch.ops.aten.mkldnn_rnn_layer(
            torch.zeros(5, 2, 3), *weights, state, state, False, [], 2, 4, 1, True, False, False, False
        )

    with torch.set_grad_enabled(is_recorded):
        real = program()
        with FakeTensorMode():
            program()
            fake = program()
    assert (
        [value is None for value in fake]
        == [value is None for value in real]
        == [False] * 3 + [not is_recorded]
    )
