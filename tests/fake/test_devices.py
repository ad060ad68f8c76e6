"""Devices that are not here: names, factories, moves, mixing, defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.fake.sides import assert_like_eager
from understudy import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    ShapeEnv,
    dims,
)

NAMES = ["cpu", "cuda", "cuda:0", "cuda:3", "xpu", "xpu:1", "mps", "hpu:1", "meta", "mtia:0", "ipu:2"]
each_name = pytest.mark.parametrize("name", NAMES)


def meant(name: str) -> torch.device:
    """The device that a tensor made on `name` says it is on."""
    device = torch.device(name)
    return (
        device if device.type in ("cpu", "meta") or device.index is not None else torch.device(device.type, 0)
    )


FACTORIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "empty": lambda d: torch.empty(2, 3, device=d),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, 3, device=d),
    "full": lambda d: torch.full((2, 3), 1.5, device=d),
    "rand": lambda d: torch.rand(2, 3, device=d),
    "randn": lambda d: torch.randn(2, 3, device=d),
    "randint": lambda d: torch.randint(0, 4, (2, 3), device=d),
    "randperm": lambda d: torch.randperm(4, device=d),
    "arange": lambda d: torch.arange(4, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 4, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "tensor": lambda d: torch.tensor([1.0, 2.0], device=d),
    "scalar": lambda d: torch.tensor(3, device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "hann_window": lambda d: torch.hann_window(4, device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (2, 3), device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.empty(2), device=d),
    "rand_like": lambda d: torch.rand_like(torch.empty(2), device=d),
    "new_zeros": lambda d: torch.empty(2).new_zeros(3, device=d),
    "new_tensor": lambda d: torch.empty(2).new_tensor([1.0], device=d),
    "new_full": lambda d: torch.empty(2).new_full((2,), 1.0, device=d),
    "to": lambda d: torch.empty(2).to(d),
    "to device=": lambda d: torch.empty(2).to(device=d),
    "to with dtype": lambda d: torch.empty(2).to(d, torch.float16),
    "complex": lambda d: torch.complex(torch.zeros(2, device=d), torch.zeros(2, device=d)),
    "sparse": lambda d: torch.sparse_coo_tensor(
        torch.zeros(1, 2, dtype=torch.int64, device=d), torch.zeros(2, device=d), (3,)
    ),
    "Parameter": lambda d: nn.Parameter(torch.empty(2, device=d)),
    "Buffer": lambda d: nn.Buffer(torch.empty(2, device=d)),
    "Linear": lambda d: nn.Linear(2, 2, device=d).weight,
}


@each_name
@pytest.mark.parametrize("factory", FACTORIES)
def test_factories_take_their_device(factory: str, name: str) -> None:
    with FakeTensorMode():
        for device in (name, torch.device(name)):
            made = FACTORIES[factory](device)
            assert made.device == meant(name)


@each_name
def test_what_a_tensor_says_of_its_device(name: str) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, device=name)
    device = meant(name)
    assert x.device == device
    assert x.get_device() == (-1 if device.index is None else device.index)
    assert x.is_cuda is (device.type == "cuda")
    assert x.is_cpu is (device.type == "cpu")
    assert x.is_meta is (device.type == "meta")
    assert x.is_xpu is (device.type == "xpu")
    assert x.is_mps is (device.type == "mps")
    assert name == "cpu" or f"device='{device}'" in repr(x)
    assert x.untyped_storage().nbytes() == 24


@each_name
def test_results_stay_on_the_device(name: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, 3, device=name, requires_grad=True)
        results = [
            x + 1, x @ x, x.sum(), x.view(-1), x[0], x.t(), x.softmax(-1), x > 0, x.max(0)[1], torch.zeros_like(x), x.clone(),
            x.new_empty(2), torch.cat([x, x]), torch.where(x > 0, x, 0.0), x.to(torch.float64), x.detach(), x.long(),
            torch.nn.functional.one_hot(x.argmax(-1), 3), x.cumsum(0), x.sort()[0], x.unbind()[0], x.type_as(x.double()),
        ]  # fmt: skip
        assert {result.device for result in results} == {meant(name)}
        (x @ x).sum().backward()
        assert x.grad.device == meant(name)


@each_name
def test_moves(name: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, requires_grad=True)
        there = x.to(name)
        assert there.device == meant(name)
        assert (there is x) is (name == "cpu")
        assert there.to(name) is there
        back = there.cpu()
        assert back.device.type == "cpu"
        back.sum().backward()
        assert x.grad.device.type == "cpu"


def test_cuda_by_number_and_name() -> None:
    with FakeTensorMode():
        x = torch.zeros(3)
        assert x.cuda().device == torch.device("cuda:0")
        assert x.cuda(2).device == torch.device("cuda:2")
        assert x.cuda("cuda:1").device == torch.device("cuda:1")
        assert x.to(2).device == torch.device("cuda:2")
        assert x.to(x.cuda(3)).device == torch.device("cuda:3")
        assert x.cuda().cuda().device == torch.device("cuda:0")
        assert x.xpu().device == torch.device("xpu:0")
        assert x.cuda(non_blocking=True).device.type == "cuda"
        assert x.type(torch.float16).dtype is torch.float16
        assert x.cuda().type(torch.float16).device.type == "cuda"


def test_copies_across_devices() -> None:
    with FakeTensorMode():
        a, b = torch.zeros(3, device="cuda:0"), torch.zeros(3, device="cuda:1", dtype=torch.float64)
        assert a.copy_(b) is a
        assert a.device == torch.device("cuda:0")
        assert a.copy_(torch.ones(3)).dtype is torch.float32
        a[1:] = torch.zeros(2)
        torch._foreach_copy_([a], [b])


def test_known_values_move_along() -> None:
    with FakeTensorMode():
        assert torch.tensor([1, 2]).cuda().tolist() == [1, 2]
        assert torch.arange(3, device="cuda:1").cpu().tolist() == [0, 1, 2]
        assert (torch.ones(2, device="cuda") * 2).sum().item() == 4.0


# --- mixing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "xpu", "meta"])
def test_zero_dimensional_cpu_tensors_join_any_device(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, device=device)
        scale = torch.tensor(2.0)
        assert (x * scale).device == meant(device)
        assert (scale * x).device == meant(device)
        assert torch.where(x > 0, x, scale).device == meant(device)
        assert x.clamp(max=scale).device == meant(device)
        x.mul_(scale)
        assert (torch.tensor(1) + scale).device.type == "cpu"


def test_nextafter_takes_no_scalars_of_the_cpu() -> None:
    with FakeTensorMode():
        here, there = torch.tensor(1.0), torch.tensor(2.0, device="cuda")
        assert torch.nextafter(there, there).device.type == "cuda"
        for pair in ((here, there), (there, here)):
            with pytest.raises(FakeTensorDeviceMismatchError, match="on the same device"):
                torch.nextafter(*pair)


def test_zero_dimensional_cuda_tensors_do_not_join_the_cpu() -> None:
    with FakeTensorMode(), pytest.raises(FakeTensorDeviceMismatchError):
        torch.randn(3) * torch.tensor(2.0, device="cuda")


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "mm": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "linear": lambda a, b: nn.functional.linear(a, b),
    "add_": lambda a, b: a.add_(b),
    "stack": lambda a, b: torch.stack([a, b]),
    "embedding": lambda a, b: nn.functional.embedding(a.long(), b),
    "gather": lambda a, b: a.gather(0, b.long()),
    "mse_loss": lambda a, b: nn.functional.mse_loss(a, b),
    "layer_norm": lambda a, b: nn.functional.layer_norm(a, (3,), b[0]),
    "conv": lambda a, b: nn.functional.conv1d(a[None], b[:, :, None]),
    "attention": lambda a, b: nn.functional.scaled_dot_product_attention(*(t[None, None] for t in (a, b, b))),
    "index, wrong": lambda a, b: b.index_select(0, a[0].long()),
    "out=": lambda a, b: torch.add(a, a, out=b),
}


TAKES_META = "add_", "embedding"
"""Operators that take a meta tensor beside another one, as under torch's mode."""


@pytest.mark.parametrize(
    "name, pair",
    [
        (name, pair)
        for name in MIXED
        for pair in (("cpu", "cuda"), ("cuda:0", "cuda:1"), ("cuda", "cpu"), ("cuda", "meta"))
        if not (name in TAKES_META and pair == ("cuda", "meta"))
    ],
)
def test_devices_do_not_mix(name: str, pair: tuple[str, str]) -> None:
    with FakeTensorMode():
        a, b = (torch.randn(3, 3, device=device) for device in pair)
        with pytest.raises(FakeTensorDeviceMismatchError) as caught:
            MIXED[name](a, b)
    text = str(caught.value)
    assert str(meant(pair[0])) in text
    assert str(meant(pair[1])) in text
    assert "test_devices.py" in text
    assert isinstance(caught.value, RuntimeError)


def test_indices_may_be_on_the_cpu() -> None:
    with FakeTensorMode():
        x = torch.randn(4, 3, device="cuda:1")
        index = torch.tensor([0, 2])
        assert x[index].device == torch.device("cuda:1")
        assert x[:, index].shape == (4, 2)
        x[index] = 0.0
        x[index] = torch.zeros(2, 3, device="cuda:1")
        assert x[torch.tensor(1)].shape == (3,)
        assert x[torch.tensor([True, False, True, False])].shape == (2, 3)
        with pytest.raises(RuntimeError):
            torch.randn(4)[torch.tensor([0], device="cuda")]


def test_indices_to_write_by_may_be_anywhere() -> None:
    """Eager moves them to the tensor; values it does not move."""
    put = torch.ops.aten.index_put
    with FakeTensorMode():
        x, index = torch.randn(4, 3), torch.tensor([2], device="cuda")
        assert put(x, [index], torch.zeros(3)).device == x.device
        assert put(x.cuda(), [index.cpu()], torch.zeros(3, device="cuda")).device == torch.device("cuda", 0)
        with pytest.raises(FakeTensorDeviceMismatchError):
            put(x, [index], torch.zeros(3, device="cuda"))


SCATTERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "slice": lambda x, part: torch.slice_scatter(x, part[:2], start=1),
    "select": lambda x, part: torch.select_scatter(x, part[0], 0, 1),
    "diagonal": lambda x, part: torch.diagonal_scatter(x, part[0]),
    "strided": lambda x, part: torch.as_strided_scatter(x, part[0], (3,), (3,), 0),
}


@pytest.mark.parametrize("scatter", SCATTERS.values(), ids=SCATTERS)
def test_parts_are_copied_into_a_copy_across_devices(scatter: Callable[..., torch.Tensor]) -> None:
    with FakeTensorMode():
        x, y = torch.randn(3, 3), torch.randn(3, 3, device="cuda")
        assert scatter(x, y).device == x.device and scatter(y, x).device == y.device


@each_name
def test_sizes_may_be_symbols_on_any_device(name: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(4, 6), source="x", symbolic_context=dims("batch", "seq"))
    with mode:
        moved = x.to(name)
        assert str((moved.t() @ moved).spec) == f"f32[seq, seq]@{meant(name)}"
        made = torch.zeros(x.shape[0], 3, device=name).requires_grad_()
        (made * 2).sum().backward()
        assert str(made.grad.spec) == f"f32[batch, 3]@{meant(name)}"  # type: ignore[union-attr]


# --- defaults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "meta", "xpu"])
def test_default_device(name: str) -> None:
    with FakeTensorMode():
        with torch.device(name):
            made = [
                torch.zeros(2),
                torch.tensor([1.0]),
                torch.arange(3),
                nn.Linear(2, 2).weight,
                torch.randn(2),
            ]
            assert {t.device for t in made} == {meant(name)}
            assert torch.zeros(2, device="cpu").device.type == "cpu"
            assert torch.zeros_like(torch.zeros(1, device="cpu")).device.type == "cpu"
        assert torch.zeros(2).device.type == "cpu"
        torch.set_default_device(name)
        try:
            assert torch.zeros(2).device == meant(name)
            assert nn.Linear(2, 2)(torch.randn(3, 2)).device == meant(name)
        finally:
            torch.set_default_device(None)


def test_the_device_context_around_the_mode() -> None:
    with torch.device("cuda:1"), FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        out = model(torch.randn(2, 4))
        out.sum().backward()
        assert {p.device for p in model.parameters()} == {torch.device("cuda:1")}
        assert out.device == torch.device("cuda:1")


def test_default_dtype() -> None:
    def program(device: str) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return (
                torch.zeros(2, device=device),
                torch.tensor([1.0], device=device),
                torch.arange(3, device=device) / 2,
            )
        finally:
            torch.set_default_dtype(torch.float32)

    assert_like_eager(program, "cpu")
    assert_like_eager(program, "cuda")
    assert_like_eager(lambda d: torch.arange(3, device=d) / 2, "cpu")


# --- around tensors ------------------------------------------------------------------------------------------------------


def test_pinned_memory() -> None:
    with FakeTensorMode():
        assert torch.zeros(3, pin_memory=True).device.type == "cpu"
        assert torch.empty(3).pin_memory().shape == (3,)
        assert torch.randn(3, pin_memory=True).to("cuda", non_blocking=True).device.type == "cuda"


def test_generators() -> None:
    with FakeTensorMode():
        generator = torch.Generator().manual_seed(3)
        assert torch.randn(3, generator=generator).shape == (3,)
        assert torch.randperm(3, generator=generator).shape == (3,)
        torch.empty(3).normal_(generator=generator)
        torch.manual_seed(3)


def test_random_numbers_are_not_drawn() -> None:
    state = torch.get_rng_state()
    with FakeTensorMode():
        torch.randn(3)
        nn.Linear(3, 3)
        nn.functional.dropout(torch.randn(3, device="cuda"))
    assert torch.equal(state, torch.get_rng_state())


def test_from_real_to_elsewhere() -> None:
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.randn(3, requires_grad=True))
    with mode:
        moved = fake.to("cuda:2")
    moved.sum().backward()
    assert fake.grad.device.type == "cpu"


def test_a_constructor_with_a_device() -> None:
    mode = FakeTensorMode()
    fake = FakeTensor(mode, torch.empty(2, 3, device="meta"), torch.device("cuda:1"))
    assert (fake.device, fake.shape) == (torch.device("cuda:1"), (2, 3))
    with mode:
        assert (fake + 1).device == torch.device("cuda:1")


class Pipeline(nn.Module):
    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        self.devices = devices
        self.layers = nn.ModuleList(nn.Linear(4, 4, device=device) for device in devices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for device, layer in zip(self.devices, self.layers, strict=True):
            x = layer(x.to(device)).relu()
        return x


def test_a_model_on_many_devices() -> None:
    devices = [f"cuda:{index}" for index in range(8)]
    with FakeTensorMode():
        model = Pipeline(devices)
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(torch.randn(2, 4)).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert loss.device == torch.device("cuda:7")
        assert norm.device == torch.device("cuda:0")
        for device, layer in zip(devices, model.layers, strict=True):
            assert str(layer.weight.grad.device) == device
            assert str(optimizer.state[layer.weight]["exp_avg"].device) == device


def test_storages_and_legacy_constructors() -> None:
    with FakeTensorMode():
        x = torch.zeros(3, device="cuda:1")
        assert x.new(2, 3).shape == (2, 3)
        assert x.new(2, 3).device == x.device
        assert x.new_empty((2,)).device == x.device
        assert torch.Tensor(2, 3).shape == (2, 3)
        assert x.untyped_storage().nbytes() == 12


def test_torch_outside_of_the_mode_is_untouched() -> None:
    with FakeTensorMode():
        torch.zeros(2, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
    assert torch.zeros(2, device="meta").device == torch.device("meta")
    assert type(torch.zeros(2)) is torch.Tensor


def test_a_scalar_on_the_cpu_is_no_place_for_results_of_another_device() -> None:
    with FakeTensorMode():
        count = torch.tensor(1.0)
        with pytest.raises(FakeTensorDeviceMismatchError, match=r"self is on cpu, but other is on cuda:0"):
            count.add_(torch.tensor(1.0, device="cuda"))
        assert count.add(torch.tensor(1.0, device="cuda")).is_cuda
        assert count.copy_(torch.tensor(1.0, device="cuda")).device.type == "cpu"


# --- tensors made of data ------------------------------------------------------------------------------------------------

ARRAY = np.ones((3, 4), np.float32)
DATA: dict[str, Callable[[], object]] = {
    "array": lambda: ARRAY,
    "tensor": lambda: torch.ones(3, 4),
    "numbers": lambda: [1.0, 2.0],
    "number": lambda: 2.5,
    "arrays": lambda: [ARRAY, ARRAY],
    "tensors": lambda: [torch.tensor(1), torch.tensor(2.0)],
    "tensors of one element": lambda: [torch.ones(1), 3, torch.ones(1, 1)],
    "nested tensors": lambda: [[torch.ones(()), 1], [2, torch.zeros((), dtype=torch.float64)]],
}
MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "tensor": lambda *a, **k: torch.tensor(*a, **k),
    "as_tensor": lambda *a, **k: torch.as_tensor(*a, **k),
    "asarray": lambda *a, **k: torch.asarray(*a, **k),
    "new_tensor": lambda *a, **k: torch.ones((), dtype=torch.float64).new_tensor(*a, **k),
}


@pytest.mark.filterwarnings(
    "ignore:To copy construct:UserWarning", "ignore:Creating a tensor from a list:UserWarning"
)
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", torch.device("cuda")], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("maker", MAKERS)
def test_tensors_of_data_on_any_device(maker: str, data: str, dtype: torch.dtype | None, device: Any) -> None:
    real = MAKERS[maker](DATA[data](), dtype=dtype)
    with FakeTensorMode():
        fake = MAKERS[maker](DATA[data](), dtype=dtype, device=device)
    assert type(fake) is FakeTensor
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    expected = torch.device(device)
    assert fake.device == (torch.device("cuda:0") if expected == torch.device("cuda") else expected)


@pytest.mark.parametrize("maker", [name for name in MAKERS if name != "new_tensor"])
def test_arrays_in_the_context_of_a_device(maker: str) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        assert MAKERS[maker](ARRAY).device == torch.device("cuda:0")
        assert MAKERS[maker](ARRAY, device="cpu").device == torch.device("cpu")
        assert torch.from_numpy(ARRAY).device == torch.device("cpu")  # which takes no device


def test_lists_of_tensors_keep_determined_values_and_refusals() -> None:
    with FakeTensorMode():
        assert torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
        unknown = torch.tensor([torch.rand(()), torch.tensor(2.0)])
        with pytest.raises(DataDependentOutputException):
            unknown[0].item()
        x = torch.rand(2, requires_grad=True)
        assert not torch.tensor([x[0], x[1]]).requires_grad
        assert torch.tensor([x.detach()[0], 1.0], requires_grad=True).is_leaf
        with pytest.raises(ValueError, match="only one element tensors"):
            torch.tensor([torch.rand(3), torch.rand(3)])
        with pytest.raises(TypeError, match="must be real number, not list"):
            torch.tensor([torch.rand(()), [1.0]])
        assert torch.as_tensor([torch.rand(()), 1.0], torch.float64, "cuda").dtype is torch.float64
