"""The small functions around fakes, through every kind of wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TorchFakeTensorProp
from torch.testing._internal.two_tensor import TwoTensor

from understudy import (
    FakeTensor,
    FakeTensorMode,
    MixedTensorsError,
    ShapeEnv,
    TensorMetadata,
    extract_tensor_metadata,
    get_plain_tensors,
    is_fake,
    maybe_get_fake_mode,
)
from understudy.fake_tensor import (
    FakeTensorConverter,
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
    assert (
        is_fake_tensor(x) and is_fake_tensor(there) and maybe_get_fake_device(there) == torch.device("cuda:1")
    )
    assert maybe_get_real_tensor(x) is real and maybe_get_real_tensor(there) is None
    constant = maybe_get_fake_constant(three)
    assert constant is not None and not is_fake_tensor(constant) and constant.item() == 3
    assert maybe_get_fake_constant(x) is None
    for other in (real, TwoTensor(x, x), 3, None):
        assert not is_fake_tensor(other)
        assert (
            maybe_get_fake_device(other)
            is maybe_get_fake_constant(other)
            is maybe_get_real_tensor(other)
            is None
        )


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
    with pytest.raises(MixedTensorsError, match="expected stand-ins or real tensors inside, got both"):
        is_fake(half)
    with pytest.raises(MixedTensorsError):
        maybe_get_fake_mode(half)
    two_modes = TwoTensor(fake(mode), fake(FakeTensorMode()))
    with pytest.raises(MixedTensorsError, match="expected parts of one FakeTensorMode, got parts of several"):
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


# --- torch's own tools on stand-ins -----------------------------------------------------------------------------------


def test_aot_function_inside_a_mode(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.rand(3, requires_grad=True)
        y = aot_function(lambda x: x.sin().cos(), fw_compiler=nop)(x)
        y.sum().backward()
    assert is_fake(y) and y.shape == (3,)
    assert x.grad is not None and x.grad.shape == (3,)


def test_aot_export_of_stand_ins_with_symbols() -> None:
    x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(4, 3))
    gm = aot_export_joint_simple(lambda x: (x.sin() + x.shape[0],), (x,), trace_joint=False)
    real = torch.randn(5, 3)
    torch.testing.assert_close(gm(real)[0], real.sin() + 5)


def test_torch_make_fx_writes_stand_ins_into_its_nodes(mode: FakeTensorMode) -> None:
    gm = torch_make_fx(lambda x: x.sin() + 1)(fake(mode))
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "call_function"]
    assert [type(value) for value in values] == [FakeTensor, FakeTensor] and all(
        v.fake_mode is mode for v in values
    )


def test_torch_propagation_in_a_mode_of_ours(mode: FakeTensorMode) -> None:
    gm = torch.fx.symbolic_trace(lambda x: x.sin() @ x.t())
    result = TorchFakeTensorProp(gm, mode).propagate(torch.ones(2, 3))
    assert type(result) is FakeTensor and result.shape == (2, 2)


# --- attributes of torch's ----------------------------------------------------------------------------------------------


def test_fake_device_can_be_set(mode: FakeTensorMode) -> None:
    x = fake(mode)
    x.fake_device = torch.device("cuda")
    assert x.device == (x + 1).device == FakeTensorMode().from_tensor(x).device == torch.device("cuda:0")


def test_unique_consecutive_has_a_memo_of_its_own() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.rand(5)
        size = x.unique_consecutive().shape[0]
    assert str(x.unique_consecutive_memo) == str(size) and x.unique_memo is None


def test_memos_of_a_converter(mode: FakeTensorMode) -> None:
    converter = FakeTensorConverter()
    x, y = torch.ones(2, 4), torch.ones(2)
    y.set_(x.untyped_storage(), 0, (8,))
    fakes = [converter.from_real_tensor(mode, x, False, None), converter.from_real_tensor(mode, y)]
    assert len(converter.meta_converter.tensor_memo) == 2
    assert [s._cdata for s in converter.meta_converter.storage_memo.values()] == [
        fakes[0].untyped_storage()._cdata
    ]
    del x, y, fakes
    assert not converter.meta_converter.tensor_memo and not converter.meta_converter.storage_memo
