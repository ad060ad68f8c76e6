"""Recurrent layers as torch has written them out in Python, for symbolic sizes and above autograd.

Between the layers of the real ones there is dropout in training; torch's Python version leaves it out for any number of
layers. Here the layers are called one by one, with dropout between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy._torch import while_active

Function = Callable[..., Any]


@while_active("recurrent layers")
def with_dropout(original: Function) -> Function:
    def layers(
        input: torch.Tensor, hidden: Sequence[Any], params: Sequence[Any], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool, layer_fn: Function,
    ) -> tuple[torch.Tensor, list[Any]]:  # fmt: skip
        directions = 2 if bidirectional else 1
        found: list[Any] = []
        input = input.transpose(0, 1) if batch_first else input
        for layer in range(num_layers):
            own = slice(layer * directions, (layer + 1) * directions)
            input, last = original(
                input, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer_fn
            )
            found += last
            if dropout and train and layer < num_layers - 1:
                input = torch.dropout(input, dropout, train=True)
        return input.transpose(0, 1) if batch_first else input, found

    return layers
