from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.grid import DTYPES, MORE_DTYPES, check_all, flat, layouts, overloads, pairs
from tests.oracle.real import check_rule

NUMBERS: dict[str, tuple[Any, ...]] = {
    "mish_backward": (),
    "hardswish_backward": (),
    "hardsigmoid_backward": (),
    "hardtanh_backward": (-1, 1),
    "softplus_backward": (1, 20),
    "softshrink_backward": (0.5,),
    "hardshrink_backward": (0.5,),
    "logit_backward": (0.1,),
    "sigmoid_backward": (),
    "tanh_backward": (),
    "silu_backward": (),
    "threshold_backward": (0,),
    "leaky_relu_backward": (0.1, False),
    "gelu_backward": (),
}
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
          "binary_cross_entropy_with_logits")  # fmt: skip
GRADIENTS: dict[str, tuple[Any, ...]] = {
    "mse_loss_backward": (),
    "smooth_l1_loss_backward": (1.0,),
    "huber_loss_backward": (1.0,),
    "soft_margin_loss_backward": (),
}


def same_shape(dtype: torch.dtype) -> Any:
    """Pairs of one shape, in different layouts."""
    data = flat(dtype)
    dense = data[:24].view(2, 3, 4)
    permuted = data[:24].view(4, 2, 3).permute(1, 2, 0)
    sliced = data[:96].view(4, 4, 6).permute(2, 1, 0)[:2, :3]
    expanded = data[:3].view(1, 3, 1).expand(2, 3, 4)
    odd = data.as_strided((2, 1, 3), (3, 7, 1))
    empty = data[:0].view(2, 0, 3).permute(2, 1, 0)
    yield from itertools.product((dense, permuted, sliced, expanded), repeat=2)
    yield odd, odd
    yield odd, data[:6].view(2, 1, 3)
    yield empty, empty
    yield data[0], data[0]


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_gradients(name: str) -> None:
    (op,) = overloads(name)
    for dtype in MORE_DTYPES:
        check_all(op, ((*pair, *NUMBERS[name]) for pair in same_shape(dtype)))
    for x, y in pairs(torch.float32, torch.float32):
        if name != "gelu_backward" or x.shape == y.shape:
            check_rule(op, x, y, *NUMBERS[name])


def test_elu_backward() -> None:
    (op,) = overloads("elu_backward")
    for dtype in MORE_DTYPES:
        check_all(op, ((x, 1, 1, 1, False, y) for x, y in same_shape(dtype)))


def test_prelu() -> None:
    forward, backward = overloads("_prelu_kernel", "_prelu_kernel_backward")
    for dtype in MORE_DTYPES:
        check_all(forward, same_shape(dtype))
        check_all(backward, ((x, y, x) for x, y in same_shape(dtype)))
    x = torch.ones(2, 3, 4).transpose(0, 2)
    check_rule(forward, x, torch.ones(3, 1))
    check_rule(backward, x, x, torch.ones(3, 1))


def test_log_sigmoid() -> None:
    forward, backward = overloads("log_sigmoid_forward", "log_sigmoid_backward")
    for dtype in MORE_DTYPES:
        check_all(forward, ((x,) for x in layouts(dtype)))
        check_all(backward, ((x, y, y) for x, y in same_shape(dtype)))


@pytest.mark.parametrize("training", [True, False])
def test_rrelu(training: bool) -> None:
    forward, backward = overloads("rrelu_with_noise", "rrelu_with_noise_backward")
    for dtype in MORE_DTYPES:
        check_all(forward, ((x.clone(), y.clone(), 0.1, 0.3, training) for x, y in same_shape(dtype)))
        check_all(backward, ((x, y, y, 0.1, 0.3, training, False) for x, y in same_shape(dtype)))


def test_glu() -> None:
    forward, backward = overloads("glu", "glu_backward")
    for dtype in MORE_DTYPES:
        for x in layouts(dtype):
            for dim in range(-1, x.ndim + 1):
                check_rule(forward, x, dim)
                if x.ndim and dim < x.ndim and x.shape[dim] % 2 == 0:
                    check_rule(backward, x.narrow(dim, 0, x.shape[dim] // 2), x, dim)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, reduction: int) -> None:
    (op,) = overloads(name)
    rest = (None, reduction) if name == "binary_cross_entropy" else (reduction,)
    if name == "binary_cross_entropy_with_logits":
        rest = (None, None, reduction)
    for dtype in MORE_DTYPES:
        check_all(op, ((*pair, *rest) for pair in same_shape(dtype)))
    if name in ("mse_loss", "smooth_l1_loss"):
        for a, b in itertools.product(DTYPES, repeat=2):
            check_all(op, ((*pair, *rest) for pair in pairs(a, b)))


@pytest.mark.parametrize("reduction", [0, 1])
@pytest.mark.parametrize("name", sorted(GRADIENTS))
def test_loss_gradients(name: str, reduction: int) -> None:
    (op,) = overloads(name)
    for dtype in MORE_DTYPES:
        for x, y in same_shape(dtype):
            if y.numel() == 0 and not dtype.is_floating_point:
                continue  # eager stumbles over dividing by 0 elements in integers
            grad = x if reduction == 0 else flat(dtype)[0]
            check_all(op, [(grad, y, x, reduction, *GRADIENTS[name])])


def test_binary_cross_entropy_backward() -> None:
    (op,) = overloads("binary_cross_entropy_backward")
    for dtype in MORE_DTYPES:
        check_all(op, ((x, y, x, None, 0) for x, y in same_shape(dtype)))
        check_all(op, ((flat(dtype)[0], y, x, None, 1) for x, y in same_shape(dtype)))
