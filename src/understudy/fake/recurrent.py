"""`nn.LSTM` with symbolic sizes, where eager takes oneDNN's layers: their steps stay a symbol, forward and backward.

What torch has written out in Python for symbolic sizes takes those layers only where the input needs no gradient, and never
in the way that training needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.infer.call import flat

LSTM_OF_ONEDNN = 2
LAYER = torch.ops.aten.mkldnn_rnn_layer.default


def takes_onednn(args: Any) -> bool:
    """Of the arguments of `torch.lstm`, for a padded batch."""
    if len(args) != 9 or not isinstance(args[3], bool) or not torch.backends.mkldnn.enabled:
        return False
    x, (hx, cx) = args[0], args[1]
    tensors = flat(torch.Tensor, args[:3], {})
    is_usual = all(
        type(t) is FakeTensor and (t._spec.dtype, t._spec.device.type) == (torch.float32, "cpu")
        for t in tensors
    )
    if not is_usual or x.dim() != 3 or hx.shape[2] != cx.shape[2] or _torch.is_transformed():
        return False
    return not torch.is_autocast_enabled("cpu") and bool(x.numel() != 0)


def layer_by_layer(x: Any, count: int, dropout: float, train: bool, run: Callable[[Any, int], Any]) -> Any:
    """What the last of the layers gives, with dropout between them. `run`: what a layer, by its number, gives."""
    for layer in range(count):
        x = run(x, layer)
        if dropout and train and layer < count - 1:
            x = torch.dropout(x, dropout, train=True)
    return x


def by_onednn(
    x: Any, state: Any, weights: Any, has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> Any:  # fmt: skip
    """Layer by layer, direction by direction, with dropout between the layers, as eager does it."""
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    hx, cx = (part.contiguous() for part in state)
    directions, width = (2 if bidirectional else 1), (4 if has_biases else 2)
    last: list[tuple[Any, Any]] = []

    def run(x: Any, layer: int) -> Any:
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

    x = layer_by_layer(x, num_layers, dropout, train, run)
    hy, cy = (torch.stack(parts, 0) for parts in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, hy, cy
