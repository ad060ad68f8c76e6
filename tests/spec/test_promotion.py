from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.oracle.real import spec_of
from understudy.errors import ShapeMismatch
from understudy.spec import TensorSpec, broadcast_shapes, common_device, default_dtype, result_type

DTYPES = [
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def operands() -> list[Any]:
    tensors: list[Any] = [torch.zeros(shape, dtype=dtype) for dtype in DTYPES for shape in ((), (2,))]
    return [*tensors, True, 3, 2.5, 1j]


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_result_type_is_torchs(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert default_dtype() is default
        for a, b in itertools.product(operands(), repeat=2):
            specs = [spec_of(x) if isinstance(x, torch.Tensor) else x for x in (a, b)]
            assert result_type(*specs) is torch.result_type(a, b), (a, b)
    finally:
        torch.set_default_dtype(before)


def test_three_ranks() -> None:
    for a, b, number in itertools.product(DTYPES, DTYPES, (True, 3, 2.5, 1j)):
        whole, point = torch.zeros(2, dtype=a), torch.zeros((), dtype=b)
        expected = torch.result_type(whole, point)
        if not (
            a.is_complex or expected is torch.bfloat16.to_complex()
        ):  # which torch may have no kernel for
            assert torch.add(whole, point).dtype is expected
        assert result_type(spec_of(whole), spec_of(point)) is expected
        assert result_type(spec_of(point), number) is torch.result_type(point, number)


def test_broadcast_shapes() -> None:
    assert broadcast_shapes() == ()
    assert broadcast_shapes((2, 1), (3,), (1, 1, 1)) == (1, 2, 3)
    assert broadcast_shapes((0,), (1,)) == (0,)
    with pytest.raises(ShapeMismatch, match=r"2 and 3 differ in dimension 1"):
        broadcast_shapes((4, 2), (3,))


def test_common_device() -> None:
    def on(device: str, *shape: int) -> TensorSpec:
        return TensorSpec(shape, dtype=torch.float32, device=torch.device(device))

    assert common_device([on("cpu"), on("cuda:3", 2)]) == torch.device("cuda:3")
    assert common_device([on("cpu", 2), on("cpu")]) == torch.device("cpu")
    assert common_device([on("cuda:1"), on("cpu")]) == torch.device("cuda:1")
    assert common_device([2.0, None]) == torch.device("cpu")
