"""FakeTensor as an object: identity, attributes, memos, printing, containers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from understudy import FakeTensor, FakeTensorMode, NoDataError, TensorSpec


@pytest.fixture(autouse=True)
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as active:
        yield active


# --- who it is --------------------------------------------------------------------------------------------------


def test_torch_takes_it_for_its_own() -> None:
    from torch._subclasses import FakeTensor as TorchFakeTensor
    from torch._subclasses.fake_tensor import is_fake

    x = torch.empty(2)
    assert isinstance(x, TorchFakeTensor) and isinstance(x, torch.Tensor) and isinstance(x, FakeTensor)
    assert type(x) is FakeTensor and not issubclass(FakeTensor, TorchFakeTensor)
    assert is_fake(x) and torch.is_tensor(x)


def test_parameters() -> None:
    p = nn.Parameter(torch.empty(2))
    assert type(p) is FakeTensor and isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf
    assert not isinstance(torch.empty(2), nn.Parameter)
    assert not isinstance(p * 1, nn.Parameter)
    assert isinstance(nn.Buffer(torch.empty(2)), nn.Buffer)
    assert not isinstance(p.detach(), nn.Parameter)


def test_spec_and_mode(mode: FakeTensorMode) -> None:
    x = torch.empty(2, 3, device="cuda", dtype=torch.bfloat16)
    assert isinstance(x.spec, TensorSpec) and str(x.spec) == "bf16[2, 3]@cuda:0"
    assert x.fake_mode is mode
    assert x.fake_device == torch.device("cuda:0")
    assert x.real_tensor is None and x.constant is None


DEVICES = {
    "cpu": ("cpu", -1), "cuda": ("cuda:0", 0), "cuda:3": ("cuda:3", 3), "xpu": ("xpu:0", 0), "mps": ("mps:0", 0),
    "meta": ("meta", -1), "hpu:1": ("hpu:1", 1),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "answers"), DEVICES.items(), ids=DEVICES)
def test_devices(asked: str, answers: tuple[str, int]) -> None:
    name, index = answers
    x = torch.empty(2, device=asked)
    assert x.device == torch.device(name) and x.get_device() == index
    kind = name.partition(":")[0]
    assert (x.is_cpu, x.is_cuda, x.is_meta, x.is_xpu, x.is_mps) == tuple(
        kind == other for other in ("cpu", "cuda", "meta", "xpu", "mps")
    )
    assert torch.zeros_like(x).device == x.device
    assert torch.empty(2, device=x.device).device == x.device
    assert x.new_zeros(3).device == x.device
    assert x.new_tensor([1.0]).device == x.device
    assert x.new_tensor([1.0], device="cpu").device == torch.device("cpu")
    assert x.cpu().device == torch.device("cpu")
    assert x.cuda(1).device == torch.device("cuda:1")
    assert x.to(x.device) is x
    if kind != "meta":
        assert torch.zeros(2).to(asked).tolist() == [0, 0]


def test_autograd_attributes() -> None:
    x = torch.empty(2, requires_grad=True)
    y = x * 2
    assert x.is_leaf and x.grad_fn is None and x.requires_grad
    assert not y.is_leaf and y.grad_fn is not None and y.requires_grad
    assert type(y.grad_fn).__name__ == "MulBackward0"
    assert not y.detach().requires_grad
    y.sum().backward()
    assert type(x.grad) is FakeTensor
    x.grad = None
    with pytest.raises(RuntimeError):
        x.grad = torch.empty(3)


def test_versions_are_shared_by_views() -> None:
    x = torch.empty(4, 4)
    view, flat = x[1:], x.view(-1)
    assert flat.untyped_storage()._cdata == x.untyped_storage()._cdata
    version = x._version
    view.add_(1)
    assert x._version == view._version == flat._version == version + 1
    x.zero_()
    assert flat._version == version + 2


def test_versions_stop_wrong_gradients() -> None:
    x = torch.empty(3, requires_grad=True)
    y = x * 1
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


# --- memos --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memo", ["nonzero_memo", "item_memo", "unique_memo"])
def test_memos_hold_until_a_write_or_a_new_epoch(memo: str, mode: FakeTensorMode) -> None:
    x = torch.empty(3)
    assert getattr(x, memo) is None
    setattr(x, memo, 7)
    assert getattr(x, memo) == 7
    x.view(3).add_(1)
    assert getattr(x, memo) is None, "a write through a view counts"
    setattr(x, memo, 8)
    mode.epoch += 1
    assert getattr(x, memo) is None
    setattr(x, memo, 9)
    setattr(x, memo, None)
    assert getattr(x, memo) is None


@pytest.mark.parametrize("memo", ["nonzero_memo", "item_memo", "unique_memo"])
def test_nothing_is_memoised_in_inference_mode(memo: str) -> None:
    with torch.inference_mode():
        x = torch.empty(3)
        setattr(x, memo, 7)
        assert getattr(x, memo) is None


def test_memos_are_separate() -> None:
    x = torch.empty(3)
    x.nonzero_memo, x.item_memo = 1, 2
    assert (x.nonzero_memo, x.item_memo, x.unique_memo) == (1, 2, None)


# --- printing -----------------------------------------------------------------------------------------------------

PRINTED: dict[str, tuple[Callable[[], Any], str]] = {
    "plain": (lambda: torch.empty(2, 3), "FakeTensor((2, 3), dtype=float32, device='cpu')"),
    "scalar": (lambda: torch.tensor(3), "FakeTensor((), dtype=int64, device='cpu')"),
    "cuda": (lambda: torch.empty(2, device="cuda"), "FakeTensor((2,), dtype=float32, device='cuda:0')"),
    "strides": (
        lambda: torch.empty(2, 3).t(),
        "FakeTensor((3, 2), dtype=float32, device='cpu', stride=(1, 3))",
    ),
    "grad": (
        lambda: torch.empty(2, requires_grad=True),
        "FakeTensor((2,), dtype=float32, device='cpu', requires_grad=True)",
    ),
    "result": (
        lambda: torch.empty(2, requires_grad=True) * 2,
        "FakeTensor((2,), dtype=float32, device='cpu', grad_fn=<MulBackward0>)",
    ),
    "parameter": (
        lambda: nn.Parameter(torch.empty(2)),
        "FakeParameter((2,), dtype=float32, device='cpu', requires_grad=True)",
    ),
}


@pytest.mark.parametrize(("make", "text"), PRINTED.values(), ids=PRINTED)
def test_repr(make: Callable[[], Any], text: str) -> None:
    x = make()
    assert repr(x) == str(x) == text
    assert f"{x}" == (text if x.ndim else "3")
    assert text in f"{[x]!r} and {x!s}"


def test_printing_works_outside_of_the_mode_and_inside_of_others(mode: FakeTensorMode) -> None:
    x = torch.empty(2, device="cuda")
    with FakeTensorMode():
        assert "cuda:0" in repr(x)
    with torch.inference_mode(), torch.no_grad():
        assert "cuda:0" in repr(x)


def test_modules_print() -> None:
    model = nn.Linear(2, 3)
    assert "Linear(in_features=2" in repr(model)
    assert "FakeParameter((3, 2)" in repr(list(model.parameters()))


def test_formatting() -> None:
    assert f"{torch.tensor(3.14159):.2f}" == "3.14"
    assert f"{torch.tensor(7):>4d}" == "   7"
    assert f"{torch.tensor(7)} {'{[epoch]}'.format({'epoch': torch.tensor(2)})}" == "7 2"
    assert f"{torch.empty(())}" == "FakeTensor((), dtype=float32, device='cpu')"
    with pytest.raises(RuntimeError, match="no data"):
        f"{torch.empty(()):.2f}"
    with pytest.raises(TypeError):
        f"{torch.empty(3):.2f}"


# --- containers ------------------------------------------------------------------------------------------------------


def test_as_keys_and_members() -> None:
    x, y = torch.empty(2), torch.empty(2)
    assert {x: 1, y: 2}[x] == 1
    assert x in {x} and y not in {x}
    assert hash(x) == hash(x) and len({x, y, x}) == 2
    assert x in [x]
    assert any(x is other for other in [y, x])


def test_weak_references(mode: FakeTensorMode) -> None:
    x = torch.empty(2)
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_weak_dictionaries() -> None:
    from torch.utils.weak import WeakTensorKeyDictionary

    x = torch.empty(2)
    table = WeakTensorKeyDictionary()
    table[x] = 1
    assert table[x] == 1
    del x
    assert len(table) == 0


def test_attributes_can_be_set() -> None:
    x = torch.empty(2)
    x.note = "kept"  # type: ignore[attr-defined]
    assert x.note == "kept"  # type: ignore[attr-defined]
    x.requires_grad = True
    assert x.requires_grad
    x.retain_grad()


def test_iteration_unpacking_and_length() -> None:
    x = torch.empty(2, 3)
    a, b = x
    assert a.shape == b.shape == (3,)
    assert len(x) == 2 and [row.shape for row in x] == [(3,), (3,)]
    assert [row.shape for row in reversed(x)] == [(3,), (3,)]
    with pytest.raises(TypeError):
        len(torch.empty(()))


def test_memory_of_many_fakes() -> None:
    """Two kilobytes each, at most."""
    import resource

    torch.empty(2, 3)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept = [torch.empty(1000, 1000) for _ in range(20_000)]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 / len(kept) < 2048


def test_pinned_and_shared_memory() -> None:
    x = torch.empty(2)
    assert not x.is_pinned() and not x.is_shared()
    assert x.pin_memory().shape == (2,)
    assert not x.untyped_storage().is_shared() and not x.storage().is_shared()
    assert x.share_memory_() is x
    assert x.is_shared() and x[1:].is_shared() and x.untyped_storage().is_shared() and x.storage().is_shared()
    assert not x.clone().is_shared()
    on_card = torch.empty(2, device="cuda")
    assert on_card.is_shared() and on_card.untyped_storage().is_shared()


def test_whether_two_tensors_are_the_same_view() -> None:
    x = torch.empty(2, 3)
    views = {
        "x[:]": x[:],
        "x.view(3, 2)": x.view(3, 2),
        "x.clone()": x.clone(),
        "x[1:]": x[1:],
        "bytes": x.view(torch.int32),
    }
    assert x.is_set_to(x)
    assert [name for name, view in views.items() if x.is_set_to(view)] == ["x[:]", "bytes"]


def test_data_can_be_exchanged() -> None:
    x = torch.empty(2, requires_grad=True)
    other = torch.empty(3, 4, dtype=torch.float64)
    x.data = other
    assert x.shape == (3, 4) and x.dtype is torch.float64 and x.requires_grad
    assert x.untyped_storage()._cdata == other.untyped_storage()._cdata
    with pytest.raises(NoDataError):
        x.data = REAL


REAL = torch.ones(2)


def test_swap_tensors() -> None:
    a, b = torch.empty(2), torch.zeros(3, dtype=torch.long)
    torch.utils.swap_tensors(a, b)
    assert (a.shape, a.dtype, b.shape) == ((3,), torch.int64, (2,))
    assert a.spec.shape == (3,) and a.tolist() == [0, 0, 0]


def test_types() -> None:
    x = torch.empty(2)
    assert x.type() == "torch.FloatTensor"
    assert [x.to(device).half().type() for device in ("cuda", "xpu:1", "meta")] == [
        "torch.cuda.HalfTensor", "torch.xpu.HalfTensor", "torch.meta.HalfTensor",
    ]  # fmt: skip
    assert x.double().dtype is torch.float64
    assert x.type(torch.int32).dtype is torch.int32
    assert x.element_size() == 4 and x.nbytes == 8 and x.numel() == 2 and x.dim() == 1
    assert x.is_floating_point() and not x.is_complex() and x.is_contiguous()
    assert x.itemsize == 4 and x.ndim == 1 and x.layout is torch.strided
