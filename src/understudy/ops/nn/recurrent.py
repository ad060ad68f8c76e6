"""Recurrent layers and cells (oneDNN's layers on CPU, torch's fused cells on CUDA), packed and padded sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.errors import DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.dtypes import refuse_cpu
from understudy.ops.traits.caching import uncacheable
from understudy.ops.traits.scratch import host_scratch
from understudy.shapes.node import Size
from understudy.spec import TensorSpec, spec_of
from understudy.spec.call import flat

Maybe = TensorSpec | None


ONEDNN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@rule("mkldnn_rnn_layer")
def mkldnn_layer(
    x: TensorSpec, weight0: TensorSpec, weight1: TensorSpec, weight2: TensorSpec, weight3: TensorSpec,
    hx: TensorSpec, cx: TensorSpec, reverse: bool, batch_sizes: list[object], mode: int,
    hidden_size: Size, *settings: object,
) -> tuple[Maybe, ...]:  # fmt: skip
    """On (length, batch, features). The last result is a workspace, which only the backward of this layer reads: empty where
    sizes are symbols. Where no gradients are recorded, there is none."""
    if x.ndim != 3:
        raise ShapeMismatch(f"mkldnn_rnn_layer: expected (length, batch, features), got {x}")
    bias_dtype = torch.promote_types(weight2.dtype, weight3.dtype)  # they are added up
    alike = x.dtype in ONEDNN_DTYPES and x.dtype is weight0.dtype is weight1.dtype is hx.dtype
    if not alike or not {bias_dtype, cx.dtype} <= {x.dtype, torch.float32}:
        shown = ", ".join(map(str, (x, weight0, weight1, weight2, weight3, hx, cx)))
        raise DtypeError(f"mkldnn_rnn_layer: oneDNN does not support this combination of dtypes: {shown}")
    result = x.like((x.shape[0], x.shape[1], hidden_size))
    workspace = None
    if torch.is_grad_enabled():
        sizes = (*x.shape, hidden_size)
        size = _count_workspace_bytes(*sizes) if all(type(size) is int for size in sizes) else 0
        workspace = x.like((size,), dtype=torch.uint8)
    return result, x.like(hx.shape), cx.like(cx.shape), workspace


PAGE, LINE = 4096, 16
"""oneDNN begins each part of a workspace on a page, and each row of numbers on a line of the processor's cache."""


def _count_workspace_bytes(length: Any, batch: Any, features: Any, hidden: Any) -> int:
    """Gates and outputs of each step; of input and layer, the states of each step and the one before, and those of the
    cells. As oneDNN gives it for float32."""
    states = 2 * (length + 1) * batch
    parts = [length * batch * _align_row(4 * hidden), length * batch * _align_row(hidden)]
    parts += 3 * [states * _align_row(max(features, hidden))] + 2 * [states * hidden]
    return _count_page_bytes(*parts)


def _count_page_bytes(*parts: int) -> int:
    return sum(-(-4 * numbers // PAGE) * PAGE for numbers in parts)


def _align_row(width: int) -> int:
    """Rows of a multiple of 256 numbers would share lines of the cache."""
    aligned = -(-width // LINE) * LINE
    return aligned if aligned % 256 else aligned + LINE


uncacheable.register("depends on whether gradients are recorded", "mkldnn_rnn_layer")


@rule("mkldnn_rnn_layer_backward")
def mkldnn_layer_backward(
    x: TensorSpec, weight1: TensorSpec, weight2: TensorSpec, weight3: TensorSpec, weight4: TensorSpec,
    hx: TensorSpec, cx: TensorSpec, *rest: object,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    return tuple(spec.like(dtype=torch.float32) for spec in (x, weight1, weight2, weight3, weight4, hx, cx))


@host_scratch("mkldnn_rnn_layer")
def layer_scratch(
    results: Sequence[TensorSpec], x: TensorSpec, weight1: TensorSpec, weight2: TensorSpec, *rest: object,
    **out: object,
) -> int:  # fmt: skip
    """Copies of the weights with aligned rows, and the gates of all steps."""
    length, batch, features = map(int, x.shape)
    gates, hidden = map(int, weight2.shape)
    return 4 * (features + hidden + length * batch) * _align_row(gates)


@host_scratch("mkldnn_rnn_layer_backward")
def layer_backward_scratch(
    results: Sequence[TensorSpec], x: TensorSpec, weight1: TensorSpec, weight2: TensorSpec, *rest: object,
    **out: object,
) -> int:  # fmt: skip
    """As forward, for the gradients of the weights; copies of weights whose rows are not aligned."""
    shapes = [tuple(map(int, weight.shape)) for weight in (weight1, weight2)]
    aligned = sum(4 * count * _align_row(width) for count, width in shapes if _align_row(width) != width)
    return aligned + layer_scratch(results, x, weight1, weight2)


@rule("_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: TensorSpec, hidden_gates: TensorSpec, cx: TensorSpec, input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    refuse_cpu("_thnn_fused_lstm_cell", cx)
    return cx.like(), cx.like(), input_gates.like()


@rule("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    grad_hy: Maybe, grad_cy: Maybe, cx: TensorSpec, cy: TensorSpec, workspace: TensorSpec, has_bias: bool
) -> tuple[Maybe, ...]:
    refuse_cpu("_thnn_fused_lstm_cell", cx)
    if grad_hy is None and grad_cy is None:
        return None, None, None
    return workspace.like(), cx.like(), workspace.like(workspace.shape[1:]) if has_bias else None


@rule("_thnn_fused_gru_cell")
def gru_cell(
    input_gates: TensorSpec, hidden_gates: TensorSpec, hx: TensorSpec, input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    refuse_cpu("_thnn_fused_gru_cell", hx)
    batch, width = hx.shape
    return hx.like(), hx.like((batch, 5 * width))


@rule("_thnn_fused_gru_cell_backward")
def gru_cell_backward(grad_hy: TensorSpec, workspace: TensorSpec, has_bias: bool) -> tuple[Maybe, ...]:
    refuse_cpu("_thnn_fused_gru_cell", workspace)
    batch, width = workspace.shape[0], workspace.shape[1] // 5
    gates = workspace.like((batch, 3 * width))
    bias = workspace.like((3 * width,)) if has_bias else None
    return gates, gates, workspace.like((batch, width)), bias, bias


# --- `nn.LSTM` with symbolic sizes, where eager uses oneDNN's layers: the length stays symbolic, forward and backward -----
# torch's decomposition for symbolic sizes uses those layers only if the input requires no grad, and never as training
# needs them.

LSTM_OF_ONEDNN = 2
LAYER = torch.ops.aten.mkldnn_rnn_layer.default


def uses_onednn_layers(args: Any) -> bool:
    """Whether eager uses oneDNN's layers for these arguments of `torch.lstm`, for a padded batch."""
    if len(args) != 9 or not isinstance(args[3], bool) or not torch.backends.mkldnn.enabled:
        return False
    x, (hx, cx) = args[0], args[1]
    specs = [spec_of(tensor) for tensor in flat(torch.Tensor, args[:3], {})]
    is_usual = all(
        spec is not None and (spec.dtype, spec.device.type) == (torch.float32, "cpu") for spec in specs
    )
    if not is_usual or x.dim() != 3 or hx.shape[2] != cx.shape[2] or _torch.has_transforms():
        return False
    return bool(x.numel() != 0)


def run_layers(x: Any, count: int, dropout: float, train: bool, run: Callable[[Any, int], Any]) -> Any:
    """The output of the last layer, with dropout between the layers. `run(x, number)` runs one layer."""
    for layer in range(count):
        x = run(x, layer)
        if dropout and train and layer < count - 1:
            x = torch.dropout(x, dropout, train=True)
    return x


def run_onednn_layers(
    x: Any, state: Any, weights: list[torch.Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Layer by layer, direction by direction, with dropout between the layers, as eager."""
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    hx, cx = (part.contiguous() for part in state)
    directions, width = (2 if bidirectional else 1), (4 if has_biases else 2)
    last: list[tuple[Any, Any]] = []

    def run(x: object, layer: int) -> Any:
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = list(weights[index * width : (index + 1) * width])
            begin = hx[index], cx[index]
            own += [] if has_biases else [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in own]
            output, hy, cy, _ = LAYER(
                x, *own, *begin, direction == 1, [], LSTM_OF_ONEDNN, hx.shape[2], num_layers, has_biases,
                bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(output)
            last.append((hy, cy))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    x = run_layers(x, num_layers, dropout, train, run)
    hy, cy = (torch.stack(parts, 0) for parts in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, hy, cy


# --- Packed sequences, unpacked, and sequences, padded to the longest one -----------------------------------
# C++ writes the lengths into the memory of a new tensor, which inside a mode has no data, and reads the lengths of
# sequences as plain integers. So the same steps are written here as operators.


def pad_packed(
    data: torch.Tensor, counts: list[int], batch_first: bool, value: Any, total_length: int
) -> Any:
    """`counts`: for each time step, the number of sequences that are that long."""
    steps = max(total_length, len(counts))
    if 0 < total_length < len(counts):
        raise ValueError(f"total_length is {total_length}, but the longest sequence has {len(counts)} steps")
    padded = data.new_full((steps, counts[0], *data.shape[1:]), value)
    row = first = 0
    for step, count in enumerate(counts):
        # Time steps with the same number of sequences are copied together.
        if step + 1 == len(counts) or counts[step + 1] != count:
            together = step + 1 - first
            block = data[row : row + together * count].view(together, count, *data.shape[1:])
            padded[first : step + 1, :count].copy_(block)
            row, first = row + together * count, step + 1
    lengths = torch.tensor([sum(count > sequence for count in counts) for sequence in range(counts[0])])
    return (padded.transpose(0, 1) if batch_first else padded), lengths


def pad_sequence(
    sequences: Sequence[torch.Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:
    if not sequences:
        raise RuntimeError("received an empty list of sequences")
    if padding_side not in ("left", "right"):
        raise RuntimeError(f"Expected padding_side to be one of left or right, but got {padding_side}.")
    first = sequences[0]
    longest = functools.reduce(torch.sym_max, (sequence.shape[0] for sequence in sequences))
    outer = (len(sequences), longest) if batch_first else (longest, len(sequences))
    padded = first.new_full((*outer, *first.shape[1:]), padding_value)
    for number, sequence in enumerate(sequences):
        length = sequence.shape[0]
        row = padded.select(0 if batch_first else 1, number)
        (row[:length] if padding_side == "right" else row[longest - length :]).copy_(sequence)
    return padded
