"""`torch.nn.functional.linear_cross_entropy` of symbolic sizes.

torch compares the shape of the targets with that of the logits, to tell probabilities from the numbers of classes. Python
compares sizes one by one before it looks how many there are, and so asks of symbols whether they are equal where no
answer matters. How many dimensions there are tells as much.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn import functional

from understudy import _torch
from understudy.fake.tensor import FakeTensor

Tensor = torch.Tensor
IGNORED = -100
"""The class that counts for nothing, if no other is named."""
REDUCTIONS = ("mean", "sum", "none")
UNCHUNKED = (
    "linear_cross_entropy: all logits are computed at once, whatever `options` say. Chunks are only for targets of dtype "
    "int64, a weight of two dimensions, no label smoothing, and a reduction of 'mean', 'sum' or 'none'."
)


def loss_of_classes(
    x: Any, linear_weight: Any, target: Any, *, linear_bias: Tensor | None = None, weight: Tensor | None = None,
    reduction: str = "mean", ignore_index: int | None = None, label_smoothing: float = 0.0, options: Any = None,
) -> Any:  # fmt: skip
    """The loss, if the targets are numbers of classes; NotImplemented for calls that torch itself should answer."""
    tensors = (x, linear_weight, target)
    if any(type(tensor) is not FakeTensor for tensor in tensors) or not any(t._spec.is_symbolic for t in tensors):
        return NotImplemented
    batch, classes = x.dim() - 1, linear_weight.dim() - 1
    is_sound = batch in (0, 1) and classes >= 1 and (batch == 1 or classes == 1)
    if not is_sound or target.dim() == batch + classes:
        return NotImplemented
    if x.shape[-1] != linear_weight.shape[-1]:
        return NotImplemented
    if linear_bias is not None and (linear_bias.dim() != classes or linear_bias.shape != linear_weight.shape[:-1]):
        return NotImplemented
    ignored = IGNORED if ignore_index is None else ignore_index
    is_plain = classes == 1 and label_smoothing == 0 and target.dtype == torch.int64 and reduction in REDUCTIONS
    if options is None or not is_plain or torch.jit.is_tracing():
        if options is not None:
            warnings.warn(UNCHUNKED, stacklevel=3)
        return functional.cross_entropy(
            _logits(x, linear_weight, linear_bias), target, weight=weight, reduction=reduction, ignore_index=ignored,
            label_smoothing=label_smoothing,
        )  # fmt: skip
    if batch:
        return _torch.chunked_cross_entropy(x, linear_weight, target, linear_bias, weight, reduction, ignored, options)
    rows = x.unsqueeze(0), linear_weight, target.unsqueeze(0)
    return _torch.chunked_cross_entropy(*rows, linear_bias, weight, reduction, ignored, options).squeeze(0)


def _logits(x: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Tensor:
    count, *others, features = linear_weight.shape
    shape = (*x.shape[:-1], count, *others)
    if others:
        total = math.prod(others, start=count)
        linear_weight = linear_weight.reshape((total, features))
        linear_bias = None if linear_bias is None else linear_bias.reshape(total)
    return functional.linear(x, linear_weight, linear_bias).reshape(shape)
