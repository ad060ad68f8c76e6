"""manual_meta_overrides: functions that compute the metadata of a call.

    @manual_meta_overrides.register(my_kernel)      # or: manual_meta_overrides[my_kernel] = …
    def _(x, weight):
        return x.new_empty(x.shape[0], weight.shape[1])

The function gets stand-ins for tensors (and the module first, for a type of module) and returns stand-ins.
The entries that the table has at first, under the names of torch's module, compute what running the call computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Override = Callable[..., Any]


class MetaOverrides(dict[Any, Override]):
    """Function or type of module → a function that returns its result on stand-ins. A dict with a decorator."""

    def register(self, target: object) -> Callable[[Override], Override]:
        def remember(override: Override) -> Override:
            self[target] = override
            return override

        return remember


def embedding_override(self: torch.nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    """The result of an embedding: a row for each index."""
    return input.new_empty((*input.shape, self.weight.shape[-1]), dtype=self.weight.dtype)


def nn_layernorm_override(self: torch.nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """The result of a layer normalisation: a contiguous tensor of the shape and dtype of its input."""
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def torch_relu_override(x: torch.Tensor) -> torch.Tensor:
    """The result of `torch.relu`."""
    return torch.empty_like(x)


def torch_nn_relu_override(self: torch.nn.ReLU, x: torch.Tensor) -> torch.Tensor:
    """The result of `torch.nn.ReLU`: its input, if it works in place."""
    return x if self.inplace else torch.empty_like(x)


def functional_relu_override(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """The result of `torch.nn.functional.relu`; not in place."""
    if inplace:
        raise AssertionError(
            "functional_relu_override: expected inplace=False, got True; run torch.nn.functional.relu itself"
        )
    return torch.empty_like(x)


def torch_where_override(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The result of `torch.where`: the broadcast shape, and the promoted dtype of `x` and `y`."""
    return torch.where(condition, x, y)


def torch_abs_override(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The result of `torch.abs`; without `out`."""
    if out is not None:
        raise AssertionError("torch_abs_override: expected out=None; run torch.abs itself")
    return torch.abs(input)


DEFAULTS: dict[Any, Override] = {
    torch.nn.Embedding: embedding_override,
    torch.nn.LayerNorm: nn_layernorm_override,
    torch.relu: torch_relu_override,
    torch.nn.functional.relu: functional_relu_override,
    torch.nn.ReLU: torch_nn_relu_override,
    torch.where: torch_where_override,
    torch.abs: torch_abs_override,
}
manual_meta_overrides = MetaOverrides(DEFAULTS)


def find_override(target: object) -> Override | None:
    """The override of a function or a type of module. A default one is skipped: the call itself computes the same."""
    try:
        found = manual_meta_overrides.get(target)
    except TypeError:  # not hashable
        return None
    return None if found is None or DEFAULTS.get(target) is found else found
