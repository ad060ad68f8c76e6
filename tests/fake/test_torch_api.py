"""The small functions around fakes, through every kind of wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from understudy import (
    FakeTensor,
    FakeTensorMode,
    MixedTensorsError,
    TensorMetadata,
    extract_tensor_metadata,
    get_plain_tensors,
    is_fake,
    maybe_get_fake_mode,
)
from understudy.fake_tensor import (
    is_fake_tensor,
    maybe_get_fake_constant,
    maybe_get_fake_device,
    maybe_get_real_tensor,
)


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode()


def fake(mode: FakeTensorMode) -> torch.Tensor:
    return mode.from_tensor(torch.ones(2, 3))


def test_plain(mode: FakeTensorMode) -> None:
    x = fake(mode)
    assert is_fake(x) and maybe_get_fake_mode(x) is mode
    for other in (torch.ones(2), 3, None, "x", [x]):
        assert not is_fake(other) and maybe_get_fake_mode(other) is None


def test_what_a_stand_in_itself_says(mode: FakeTensorMode) -> None:
    """Names of torch 2.14: they ask the tensor, and never what it wraps."""
    real = torch.ones(2, 3)
    with mode:
        three = torch.tensor(3)
        there = torch.empty(2, device="cuda:1")
    x = FakeTensor(mode, torch.empty(2, 3, device="meta"), torch.device("cpu"), real_tensor=real)
    assert is_fake_tensor(x) and is_fake_tensor(there) and maybe_get_fake_device(there) == torch.device("cuda:1")
    assert maybe_get_real_tensor(x) is real and maybe_get_real_tensor(there) is None
    constant = maybe_get_fake_constant(three)
    assert constant is not None and not is_fake_tensor(constant) and constant.item() == 3
    assert maybe_get_fake_constant(x) is None
    for other in (real, TwoTensor(x, x), 3, None):
        assert not is_fake_tensor(other)
        assert maybe_get_fake_device(other) is maybe_get_fake_constant(other) is maybe_get_real_tensor(other) is None


def test_wrapper_subclasses(mode: FakeTensorMode) -> None:
    pair = TwoTensor(fake(mode), fake(mode))
    nested = TwoTensor(pair, TwoTensor(fake(mode), fake(mode)))
    assert is_fake(pair) and maybe_get_fake_mode(pair) is mode
    assert is_fake(nested) and maybe_get_fake_mode(nested) is mode
    real = TwoTensor(torch.ones(2), torch.ones(2))
    assert not is_fake(real) and maybe_get_fake_mode(real) is None


class WithPlan(TwoTensor):
    """A wrapper that names something else beside its tensors, as a `DTensor` does its mesh."""

    def __tensor_flatten__(self) -> Any:
        self.plan = getattr(self, "plan", "row by row")
        return ["a", "b", "plan"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        made = WithPlan(inner["a"], inner["b"])
        made.plan = inner["plan"]
        return made


def test_wrappers_that_hold_more_than_tensors(mode: FakeTensorMode) -> None:
    assert is_fake(WithPlan(fake(mode), fake(mode))) and not is_fake(WithPlan(torch.ones(2), torch.ones(2)))
    converted: Any = mode.from_tensor(WithPlan(torch.ones(2), torch.ones(2)))
    assert is_fake(converted) and converted.plan == "row by row"


def test_half_fake_is_an_error(mode: FakeTensorMode) -> None:
    half = TwoTensor(fake(mode), torch.ones(2, 3))
    with pytest.raises(MixedTensorsError, match="half"):
        is_fake(half)
    with pytest.raises(MixedTensorsError):
        maybe_get_fake_mode(half)
    two_modes = TwoTensor(fake(mode), fake(FakeTensorMode()))
    with pytest.raises(MixedTensorsError, match="several modes"):
        maybe_get_fake_mode(two_modes)


def test_functional_wrappers(mode: FakeTensorMode) -> None:
    with mode:
        wrapped = torch._to_functional_tensor(torch.empty(2))
    assert is_fake(wrapped) and maybe_get_fake_mode(wrapped) is mode
    real = torch._to_functional_tensor(torch.ones(2))
    assert not is_fake(real) and maybe_get_fake_mode(real) is None


def test_functorch_wrappers(mode: FakeTensorMode) -> None:
    seen: list[object] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        seen.append((is_fake(x), maybe_get_fake_mode(x)))
        return x * 2

    torch.vmap(inside)(fake(mode))
    torch.func.grad(lambda x: inside(x).sum())(fake(mode))
    with mode:
        torch.vmap(torch.vmap(inside))(fake(mode))
    assert seen == [(True, mode)] * 3
    seen.clear()
    torch.vmap(inside)(torch.ones(2, 3))
    assert seen == [(False, None)]


def test_get_plain_tensors(mode: FakeTensorMode) -> None:
    a, b, c = (fake(mode) for _ in range(3))
    nested = TwoTensor(TwoTensor(a, b), TwoTensor(c, a))
    out: list[object] = [1]
    assert get_plain_tensors(nested, out=out) is out
    assert out[0] == 1 and all(x is y for x, y in zip(out[1:], [a, b, c, a], strict=True))
    assert get_plain_tensors(a, out=[])[0] is a


@pytest.mark.parametrize(
    "real",
    [
        torch.ones(2, 3),
        torch.ones(2, 3).t(),
        torch.ones(10)[3:],
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(()),
        torch.empty(0, 2),
    ],
    ids=lambda t: str(tuple(t.shape)),
)
def test_metadata_of_fake_and_real_are_equal(real: torch.Tensor, mode: FakeTensorMode) -> None:
    data = extract_tensor_metadata(real)
    assert isinstance(data, TensorMetadata)
    assert (data.shape, data.stride, data.dtype) == (real.shape, real.stride(), real.dtype)
    assert extract_tensor_metadata(mode.from_tensor(real)) == data
    assert hash(data) == hash(extract_tensor_metadata(real))


def test_metadata_of_sparse_tensors() -> None:
    data = extract_tensor_metadata(torch.eye(3).to_sparse())
    assert data.is_sparse and data.sparse_dim == 2 and data.dense_dim == 0 and data.is_coalesced
    assert extract_tensor_metadata(torch.eye(3).to_sparse_csr()).layout is torch.sparse_csr
