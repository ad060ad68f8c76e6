"""Kernels of calls on a card: specs without tensors, and some calls that tests share."""

from __future__ import annotations

import torch

from understudy.ops.traits.kernel_families import Kernel, describe_kernels
from understudy.spec import TensorSpec
from understudy.spec.call import Call, flat

aten = torch.ops.aten
CUDA = torch.device("cuda:0")


def spec(
    *shape: int,
    dtype: torch.dtype = torch.float16,
    stride: tuple[int, ...] | None = None,
    device: torch.device = CUDA,
) -> TensorSpec:
    return TensorSpec(shape, stride, dtype=dtype, device=device)


def kernels(op: torch._ops.OpOverload, *args: object, made: object, **kwargs: object) -> list[Kernel]:
    return describe_kernels(Call.of(op, args, kwargs), flat(TensorSpec, (made,), {}))


def product(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Kernel:
    (found,) = kernels(
        aten.mm.default, spec(m, k, dtype=dtype), spec(k, n, dtype=dtype), made=spec(m, n, dtype=dtype)
    )
    return found


def convolution(
    groups: int, channels: int = 256, size: int = 56, batch: int = 64, layout: str = "first", kernel: int = 3
) -> Kernel:
    stride = (size * size * channels, 1, size * channels, channels) if layout == "last" else None
    x = spec(batch, channels, size, size, stride=stride)
    weight = spec(channels, channels // groups, kernel, kernel)
    pad = [kernel // 2, kernel // 2]
    (found,) = kernels(
        aten.convolution.default, x, weight, None, [1, 1], pad, [1, 1], False, [0, 0], groups, made=x
    )
    return found
