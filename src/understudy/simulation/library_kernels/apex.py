"""NVIDIA's Apex: its norms, and the kernels in C++ that Megatron imports beside it.

    apex.normalization                       FusedLayerNorm, FusedRMSNorm and their autograd functions
    scaled_softmax_cuda and two more         softmax of scores: a result forward, none backward
    fused_weight_gradient_mlp_cuda           the gradient of a weight, added to a buffer by the product itself

Other modules of Apex are missing, as where it is not installed: a program that tries them takes its other way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from understudy.simulation.library_kernels.launches import launch_kernel
from understudy.simulation.library_kernels.modules import Names, StandIn

VERSION = "0.1"
PARTS = 16
"""Partial sums of the gradients of a norm's weight and bias."""


def report_missing(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    raise AttributeError(f"module {module!r} has no attribute {attribute!r}")


# --- norms ----------------------------------------------------------------------------------------------------------


def _normalize(
    ctx: Any, input: Tensor, parameters: Sequence[Tensor | None], shape: Sequence[int], saves_result: bool,
    has_mean: bool,
) -> Tensor:  # fmt: skip
    """Keeps the input, or the result, and one or two numbers for each row."""
    input = input.contiguous()
    rows = input.numel() // math.prod(shape)
    result = torch.empty_like(input)
    means = [input.new_empty(rows, dtype=torch.float32)] if has_mean and not saves_result else []
    scales = input.new_empty(rows, dtype=torch.float32)
    launch_kernel((input, *parameters, result, *means, scales))
    ctx.save_for_backward(result if saves_result else input, *parameters, *means, scales)
    ctx.parameters = len(parameters)
    return result


def _backpropagate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    kept, *rest = ctx.saved_tensors
    parameters = rest[: ctx.parameters]
    result = torch.empty_like(kept)
    found = [None if parameter is None else torch.empty_like(parameter) for parameter in parameters]
    sums = [
        torch.empty(PARTS, part.numel(), dtype=torch.float32, device=part.device)
        for part in parameters
        if part is not None
    ]
    launch_kernel((gradient.contiguous(), kept, *rest, result, *found, *sums))
    return result, *found


class FusedLayerNormAffineFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Sequence[int], eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        return _normalize(ctx, input, (weight, bias), normalized_shape, memory_efficient, has_mean=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *_backpropagate(ctx, gradient), None, None, None


class FusedRMSNormAffineFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        return _normalize(ctx, input, (weight,), normalized_shape, memory_efficient, has_mean=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *_backpropagate(ctx, gradient), None, None, None


class FusedLayerNorm(torch.nn.LayerNorm):
    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        if self.weight is None:
            return super().forward(input)
        result: Tensor = FusedLayerNormAffineFunction.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )
        return result


class FusedRMSNorm(torch.nn.RMSNorm):
    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return super().forward(x)
        result: Tensor = FusedRMSNormAffineFunction.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.normalized_shape, self.eps, self.memory_efficient
        )
        return result


# --- kernels without a package --------------------------------------------------------------------------------------


def softmax_forward(scores: Tensor, *mask_and_scale: object) -> Tensor:
    result = torch.empty_like(scores)
    launch_kernel((scores, *mask_and_scale, result))
    return result


def softmax_backward(gradient: Tensor, result: Tensor, scale: float) -> Tensor:
    launch_kernel((gradient, result))
    return gradient


def get_batch_per_block(queries: int, keys: int, batch: int, heads: int) -> int:
    """Rows of scores in a block of 128 threads: a warp takes one row, or two short ones."""
    width = 1 << max(keys - 1, 0).bit_length()
    return 128 // min(width, 32) * (2 if width <= 128 else 1)


def add_weight_gradient(input: Tensor, gradient: Tensor, total: Tensor) -> None:
    rows, columns = input.flatten(0, -2), gradient.flatten(0, -2)
    if total.dtype is input.dtype:
        torch.addmm(total, columns.t(), rows, out=total)
    else:
        torch.addmm(total, columns.t(), rows, out_dtype=total.dtype, out=total)


# --- the modules ----------------------------------------------------------------------------------------------------

NORMS = FusedLayerNorm, FusedRMSNorm
FUNCTIONS = FusedLayerNormAffineFunction, FusedRMSNormAffineFunction
SOFTMAX = {
    "forward": softmax_forward,
    "backward": softmax_backward,
    "get_batch_per_block": get_batch_per_block,
}
ADDED = {"wgrad_gemm_accum_fp32": add_weight_gradient, "wgrad_gemm_accum_fp16": add_weight_gradient}


def make_modules() -> Mapping[str, Names]:
    norms = {norm.__name__: norm for norm in NORMS}
    mixed = {f"Mixed{norm.__name__}": norm for norm in NORMS}
    functions = {function.__name__: function for function in FUNCTIONS}
    return {
        "apex": {},
        "apex.normalization": {**norms, **mixed},
        "apex.normalization.fused_layer_norm": {**norms, **mixed, **functions},
    }


def _make_extension(name: str, functions: Names) -> StandIn:
    return StandIn(VERSION, lambda: {name: functions}, report_missing, for_installed_packages=False)


APEX = {
    "apex": StandIn(VERSION, make_modules, report_missing, for_installed_packages=False),
    **{
        name: _make_extension(name, SOFTMAX)
        for name in (
            "scaled_softmax_cuda",
            "scaled_masked_softmax_cuda",
            "scaled_upper_triang_masked_softmax_cuda",
        )
    },
    "fused_weight_gradient_mlp_cuda": _make_extension("fused_weight_gradient_mlp_cuda", ADDED),
}
"""By package. Packages that look for it, and do without it, do not find it."""
