"""Recurrent layers and cells: oneDNN's layers on CPU, torch's fused cells on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.rules.registry import rule
from understudy.spec import TensorSpec

Maybe = TensorSpec | None


@rule("mkldnn_rnn_layer")
def mkldnn_layer(
    x: TensorSpec, weight0: TensorSpec, weight1: TensorSpec, weight2: TensorSpec, weight3: TensorSpec,
    hx: TensorSpec, cx: TensorSpec, reverse: bool, batch_sizes: Any, mode: int, hidden_size: Any, *settings: Any,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """Of (length, batch, features). How large the workspace (the last result) is, oneDNN alone knows; it is
    given as empty, and read by nobody but the backward of this layer."""
    if x.ndim != 3:
        raise ShapeMismatch(f"mkldnn_rnn_layer: expected (length, batch, features), got {x}")
    result = x.like((x.shape[0], x.shape[1], hidden_size))
    return result, x.like(hx.shape), x.like(cx.shape), x.like((0,), dtype=torch.uint8)


@rule("mkldnn_rnn_layer_backward")
def mkldnn_layer_backward(
    x: TensorSpec, weight1: TensorSpec, weight2: TensorSpec, weight3: TensorSpec, weight4: TensorSpec,
    hx: TensorSpec, cx: TensorSpec, *rest: Any,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    return tuple(spec.like(dtype=torch.float32) for spec in (x, weight1, weight2, weight3, weight4, hx, cx))


def _check_gpu(what: str, spec: TensorSpec) -> None:
    if spec.device.type == "cpu":
        raise ArgumentError(f"{what}: there is no CPU kernel")


@rule("_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: TensorSpec, hidden_gates: TensorSpec, cx: TensorSpec, input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    _check_gpu("_thnn_fused_lstm_cell", cx)
    return cx.like(), cx.like(), input_gates.like()


@rule("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    grad_hy: Maybe, grad_cy: Maybe, cx: TensorSpec, cy: TensorSpec, workspace: TensorSpec, has_bias: bool
) -> tuple[Maybe, ...]:
    _check_gpu("_thnn_fused_lstm_cell", cx)
    if grad_hy is None and grad_cy is None:
        return None, None, None
    return workspace.like(), cx.like(), workspace.like(workspace.shape[1:]) if has_bias else None


@rule("_thnn_fused_gru_cell")
def gru_cell(
    input_gates: TensorSpec, hidden_gates: TensorSpec, hx: TensorSpec, input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    _check_gpu("_thnn_fused_gru_cell", hx)
    batch, width = hx.shape
    return hx.like(), hx.like((batch, 5 * width))


@rule("_thnn_fused_gru_cell_backward")
def gru_cell_backward(grad_hy: TensorSpec, workspace: TensorSpec, has_bias: bool) -> tuple[Maybe, ...]:
    _check_gpu("_thnn_fused_gru_cell", workspace)
    batch, width = workspace.shape[0], workspace.shape[1] // 5
    gates = workspace.like((batch, 3 * width))
    bias = workspace.like((3 * width,)) if has_bias else None
    return gates, gates, workspace.like((batch, width)), bias, bias
