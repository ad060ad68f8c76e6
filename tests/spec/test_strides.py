from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.real import spec_of
from tests.spec.layouts import broadcastable, tensor_of_shape
from understudy.spec import (
    broadcast_shapes,
    channels_last_strides,
    elementwise,
    elementwise_strides,
    is_channels_last_contiguous,
    is_dense,
    preserved_strides,
)

MANY = settings(max_examples=500, deadline=None)


def predicted(*tensors: torch.Tensor, numbers: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    specs = [spec_of(t) for t in tensors]
    shape = broadcast_shapes(*(s.shape for s in specs))
    return shape, elementwise_strides(shape, specs, numbers)


@MANY
@given(broadcastable(2))
def test_two_operands(tensors: list[torch.Tensor]) -> None:
    result = torch.add(*tensors)
    assert predicted(*tensors) == (tuple(result.shape), result.stride())


@MANY
@given(broadcastable(3))
def test_three_operands(tensors: list[torch.Tensor]) -> None:
    result = torch.addcmul(*tensors)
    assert predicted(*tensors) == (tuple(result.shape), result.stride())


@MANY
@given(broadcastable(3))
def test_where(tensors: list[torch.Tensor]) -> None:
    condition, *others = tensors
    mask = torch.empty_strided(condition.shape, condition.stride(), dtype=torch.bool).fill_(True)
    result = torch.where(mask, *others)
    assert predicted(mask, *others) == (tuple(result.shape), result.stride())


@MANY
@given(broadcastable(1))
def test_tensor_and_number(tensors: list[torch.Tensor]) -> None:
    result = torch.add(tensors[0], 2)
    assert predicted(tensors[0], numbers=True) == (tuple(result.shape), result.stride())
    result = torch.exp(tensors[0])
    assert predicted(tensors[0]) == (tuple(result.shape), result.stride())


@MANY
@given(st.lists(st.integers(0, 3), min_size=4, max_size=5).flatmap(lambda s: tensor_of_shape(tuple(s))))
def test_channels_last(tensor: torch.Tensor) -> None:
    memory_format = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    shape, stride = tuple(tensor.shape), tensor.stride()
    assert is_channels_last_contiguous(shape, stride) == tensor.is_contiguous(memory_format=memory_format)
    assert channels_last_strides(shape) == torch.empty(shape, memory_format=memory_format).stride()


@MANY
@given(broadcastable(1))
def test_dense(tensors: list[torch.Tensor]) -> None:
    tensor = tensors[0]
    assert is_dense(tuple(tensor.shape), tensor.stride()) == torch.ops.aten.is_non_overlapping_and_dense(
        tensor
    )


@MANY
@given(broadcastable(1))
def test_preserved(tensors: list[torch.Tensor]) -> None:
    tensor = tensors[0]
    assert preserved_strides(tuple(tensor.shape), tensor.stride()) == torch.empty_like(tensor).stride()
    assert preserved_strides(tuple(tensor.shape), tensor.stride()) == tensor.clone().stride()


@MANY
@given(broadcastable(2))
def test_operands_that_are_cast(tensors: list[torch.Tensor]) -> None:
    a, b = tensors[0].to(torch.float64), tensors[1]
    b_int = torch.empty_strided(b.shape, b.stride(), dtype=torch.int32).fill_(1)
    result = elementwise([spec_of(a), spec_of(b_int)], torch.float64, torch.float64)
    assert result is spec_of(torch.add(a, b_int))
    result = elementwise([spec_of(b_int), spec_of(b_int)], torch.float32, torch.float32)
    assert result is spec_of(torch.div(b_int, b_int))
