"""Autocast: native on the CPU, our own kernels for devices that are not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fake.sides import assert_like_eager, on_each_device
from understudy import FakeTensorMode, ShapeEnv
from understudy.ops.traits.autocast import casting

LOW = (torch.float16, torch.bfloat16)
low = pytest.mark.parametrize("dtype", LOW, ids=["float16", "bfloat16"])
on_cuda = pytest.mark.parametrize("device", ["cuda", "cuda:3"])


def device_type(device: str) -> str:
    return torch.device(device).type


def x(device: str, *shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*(shape or (4, 4)), device=device, **options)


# What torch documents for CUDA: the dtype of the result for float32 inputs in a region of 16 bit.
TO_LOW: dict[str, Callable[[str], torch.Tensor]] = {
    "matmul": lambda d: x(d) @ x(d),
    "linear": lambda d: F.linear(x(d), x(d), x(d, 4)),
    "bmm": lambda d: torch.bmm(x(d, 2, 3, 4), x(d, 2, 4, 3)),
    "addmm": lambda d: torch.addmm(x(d), x(d), x(d)),
    "baddbmm": lambda d: torch.baddbmm(x(d, 2, 3, 3), x(d, 2, 3, 4), x(d, 2, 4, 3)),
    "einsum": lambda d: torch.einsum("ij,jk->ik", x(d), x(d)),
    "conv2d": lambda d: F.conv2d(x(d, 1, 2, 6, 6), x(d, 3, 2, 3, 3)),
    "conv_transpose1d": lambda d: F.conv_transpose1d(x(d, 1, 2, 6), x(d, 2, 3, 3)),
    "attention": lambda d: F.scaled_dot_product_attention(
        x(d, 1, 2, 5, 8), x(d, 1, 2, 5, 8), x(d, 1, 2, 5, 8)
    ),
    "prelu": lambda d: F.prelu(x(d), x(d, 4)),
    "gru cell": lambda d: nn.GRUCell(4, 4).to(d)(x(d)),
    "mv": lambda d: torch.mv(x(d), x(d, 4)),
    "chain": lambda d: torch.chain_matmul(x(d), x(d), x(d)),
}
TO_FLOAT32: dict[str, Callable[[str, torch.dtype], torch.Tensor]] = {
    "softmax": lambda d, t: x(d, dtype=t).softmax(-1),
    "log_softmax": lambda d, t: F.log_softmax(x(d, dtype=t), -1),
    "layer_norm": lambda d, t: F.layer_norm(x(d, dtype=t), (4,)),
    "group_norm": lambda d, t: F.group_norm(x(d, 2, 4, 3, dtype=t), 2),
    "mse_loss": lambda d, t: F.mse_loss(x(d, dtype=t), x(d, dtype=t)),
    "cross_entropy": lambda d, t: F.cross_entropy(x(d, dtype=t), torch.zeros(4, dtype=torch.int64, device=d)),
    "sum": lambda d, t: x(d, dtype=t).sum(),
    "sum over a dimension": lambda d, t: x(d, dtype=t).sum(1),
    "cumsum": lambda d, t: x(d, dtype=t).cumsum(0),
    "prod": lambda d, t: x(d, dtype=t).prod(),
    "exp": lambda d, t: x(d, dtype=t).exp(),
    "pow": lambda d, t: x(d, dtype=t) ** 2,
    "norm": lambda d, t: x(d, dtype=t).norm(),
    "cdist": lambda d, t: torch.cdist(x(d, dtype=t), x(d, dtype=t)),
}
KEEPS: dict[str, Callable[[str], torch.Tensor]] = {
    "relu": lambda d: x(d).relu(),
    "add": lambda d: x(d) + x(d),
    "batch_norm": lambda d: nn.BatchNorm1d(4).to(d)(x(d)),
    "max_pool": lambda d: F.max_pool1d(x(d, 1, 2, 8), 2),
    "float64 product": lambda d: x(d, dtype=torch.float64) @ x(d, dtype=torch.float64),
    "integers": lambda d: torch.ones(4, 4, dtype=torch.int64, device=d).sum(),
}


@on_cuda
@low
@pytest.mark.parametrize("name", TO_LOW)
def test_products_go_to_16_bit(device: str, dtype: torch.dtype, name: str) -> None:
    with FakeTensorMode():
        with torch.autocast(device_type(device), dtype=dtype):
            inside = TO_LOW[name](device)
        assert inside.dtype is dtype
        assert TO_LOW[name](device).dtype is torch.float32


@on_cuda
@low
@pytest.mark.parametrize("name", TO_FLOAT32)
def test_sums_and_losses_go_to_float32(device: str, dtype: torch.dtype, name: str) -> None:
    with FakeTensorMode(), torch.autocast(device_type(device), dtype=dtype):
        assert TO_FLOAT32[name](device, dtype).dtype is torch.float32


@on_cuda
@pytest.mark.parametrize("name", KEEPS)
def test_the_rest_keeps_its_dtype(device: str, name: str) -> None:
    with FakeTensorMode():
        outside = KEEPS[name](device).dtype
        with torch.autocast("cuda", dtype=torch.float16):
            assert KEEPS[name](device).dtype is outside


@on_cuda
@low
def test_the_widest_wins(device: str, dtype: torch.dtype) -> None:
    with FakeTensorMode(), torch.autocast("cuda", dtype=dtype):
        narrow, wide = x(device, dtype=dtype), x(device)
        assert torch.cat([narrow, wide]).dtype is torch.float32
        assert torch.cat([narrow, narrow]).dtype is dtype
        assert torch.stack([narrow, wide]).dtype is torch.float32
        assert torch.addcmul(narrow, wide, narrow).dtype is torch.float32


def test_cast_are_the_operators_that_torch_casts_on_cuda() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    torchs = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")}
    assert set(casting) == torchs - {"aten::_cudnn_rnn"}  # in builds with cuDNN; no stand-in comes to it


def test_unsafe_losses_are_refused() -> None:
    with FakeTensorMode(), torch.autocast("cuda"), pytest.raises(RuntimeError, match="binary_cross_entropy"):
        F.binary_cross_entropy(x("cuda").sigmoid(), x("cuda"))


@low
def test_native_autocast_of_the_cpu(dtype: torch.dtype) -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to(device)
        given = x(device, 3, 4)
        with torch.autocast("cpu", dtype=dtype):
            out = model(given)
            loss = F.mse_loss(out.float(), torch.zeros(3, 2, device=device))
        loss.backward()
        return out, loss, [p.grad for p in model.parameters()]

    assert_like_eager(program, "cpu")


@on_cuda
@low
def test_training(device: str, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to(device)
        with torch.autocast("cuda", dtype=dtype):
            out = model(x(device, 3, 4))
            loss = F.mse_loss(out, torch.zeros(3, 2, device=device))
        assert (out.dtype, loss.dtype) == (dtype, torch.float32)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad.dtype is torch.float32
            assert parameter.grad.device == parameter.device


@on_each_device
def test_nested_regions(device: str) -> None:
    kind = device_type(device)
    with FakeTensorMode():
        a = x(device)
        with torch.autocast(kind, dtype=torch.bfloat16):
            assert (a @ a).dtype is torch.bfloat16
            with torch.autocast(kind, enabled=False):
                assert (a @ a).dtype is torch.float32
            with torch.autocast(kind, dtype=torch.float16):
                assert (a @ a).dtype is torch.float16
            assert (a @ a).dtype is torch.bfloat16
        assert (a @ a).dtype is torch.float32


def test_a_region_concerns_its_device_only() -> None:
    with FakeTensorMode():
        with torch.autocast("cuda", dtype=torch.float16):
            assert (x("cpu") @ x("cpu")).dtype is torch.float32
            assert (x("xpu") @ x("xpu")).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x("cuda") @ x("cuda")).dtype is torch.float32
            assert (x("cpu") @ x("cpu")).dtype is torch.bfloat16
        with torch.autocast("xpu", dtype=torch.bfloat16):
            assert (x("xpu") @ x("xpu")).dtype is torch.bfloat16


def test_weights_are_cast_once() -> None:
    casts = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                casts.append(args[0])
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Count():
        weight = x("cuda", requires_grad=True)
        given = x("cuda")
        casts.clear()
        with torch.autocast("cuda", dtype=torch.float16):
            first = F.linear(given, weight)
            second = F.linear(given, weight)
        assert sum(cast is weight for cast in casts) == 1
        (first.sum() + second.sum()).backward()
        assert weight.grad.dtype is torch.float32
        casts.clear()
        with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
            F.linear(given, weight)
            F.linear(given, weight)
        assert sum(cast is weight for cast in casts) == 2


def test_a_weight_changed_between_regions_is_cast_again() -> None:
    with FakeTensorMode():
        weight = x("cuda", requires_grad=True)
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                F.linear(x("cuda"), weight).sum().backward()
            with torch.no_grad():
                weight.add_(1)
        assert weight.grad.shape == (4, 4)


def test_no_grad_inside_a_region_then_training() -> None:
    """A cast made without a graph must not serve a later computation that needs one."""
    with FakeTensorMode():
        weight = x("cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                F.linear(x("cuda"), weight)
            F.linear(x("cuda"), weight).sum().backward()
        assert weight.grad is not None


class Amplified(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_autocast_enabled("cuda")
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad @ x.t() + x.t() @ grad


@pytest.mark.parametrize("is_inference", [False, True])
def test_casts_inside_of_kernels(is_inference: bool) -> None:
    def program() -> Any:
        x = torch.randn(4, 3)
        with torch.inference_mode(is_inference):
            plain = torch.linalg.pinv(x), F.bilinear(x, x, torch.randn(5, 3, 3))
            with torch.autocast("cpu", torch.bfloat16):
                cast = torch.linalg.pinv(x), F.bilinear(x, x, torch.randn(5, 3, 3))
            return *plain, *cast, torch.linalg.pinv(x)

    assert_like_eager(lambda device: program(), "cpu")


def test_casts_inside_of_kernels_on_cuda() -> None:
    """There `bilinear` is cast as a whole, to the widest dtype."""
    with FakeTensorMode(), torch.autocast("cuda", torch.bfloat16):
        x = torch.randn(4, 3, device="cuda")
        assert torch.linalg.pinv(x).dtype is torch.bfloat16
        assert F.bilinear(x, x, torch.randn(5, 3, 3, device="cuda")).dtype is torch.float32


def test_custom_functions() -> None:
    with FakeTensorMode():
        a = x("cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = Amplified.apply(a.half())
        assert out.dtype is torch.float32
        out.sum().backward()
        assert a.grad.dtype is torch.float32


@on_cuda
def test_grad_scaler(device: str) -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x(device, 3, 4)).float().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert model.weight.grad.device == model.weight.device
        assert scaler.get_scale() == 2.0**16
        assert model.weight._version > 2, "gradients without data have no infinities: the step is taken"


@on_cuda
@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler_with_adamw(device: str, fused: bool) -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cuda", growth_interval=1)
        scaler.scale(model(x(device, 3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**17
        assert optimizer.state[model.weight]["exp_avg"].device == model.weight.device


def test_under_vmap() -> None:
    with FakeTensorMode(), torch.autocast("cuda", dtype=torch.float16):
        out = torch.vmap(lambda a: a @ a)(x("cuda", 3, 4, 4))
    assert out.dtype is torch.float16
    assert out.shape == (3, 4, 4)


def test_nothing_is_left_behind() -> None:
    with FakeTensorMode(), torch.autocast("cuda", dtype=torch.float16):
        x("cuda") @ x("cuda")
    assert not torch.is_autocast_enabled("cuda")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        torch.autocast("cuda")


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_with_symbolic_sizes(layer: Any, requires_grad: bool) -> None:
    model, x = layer(4, 3, num_layers=2, batch_first=True), torch.randn(2, 3, 4, requires_grad=requires_grad)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake, stand_in = mode.from_module(model), mode.from_tensor(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        real = model(x)[0]
        with mode:
            found = fake(stand_in)[0]
    assert (found.dtype, found.requires_grad, found.shape[2]) == (
        real.dtype,
        real.requires_grad,
        real.shape[2],
    )
