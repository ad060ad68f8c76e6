"""Batching rules for symbolic sizes, for operators whose rules in C++ read sizes as plain integers. `batching_rule`
registers them for `fake/kernels/transforms.py`.

A rule is called at one level of vmap. It unwraps the tensors of that level, with the batch dimension in front, and
computes with them below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.ops.registry import Trait

Function = Callable[..., object]


class BatchLevel:
    """One level of vmap, the innermost one."""

    def __init__(self) -> None:
        self._interpreter, _, _ = _torch.innermost_transform()
        self._level = self._interpreter.level()
        self._size = self._interpreter.batch_size()

    @staticmethod
    def below() -> Any:
        """Inside, calls go to the transforms around this level."""
        return _torch.below(_torch.BATCHED_KEYS)

    @property
    def randomness(self) -> str:
        return str(self._interpreter.randomness())

    def is_batch(self, tensor: object) -> bool:
        return bool(_torch.batched_at(tensor, 0, self._level)[1])

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor inside the wrapper, with its batch dimension in front."""
        inner, is_batch = _torch.batched_at(tensor, 0, self._level)
        return inner if is_batch else inner.expand(self._size, *inner.shape)

    def around(self, result: torch.Tensor) -> Any:
        return _torch.with_batch_dimension(result, 0, self._level)


def at_one_level(function: Function) -> Function:
    """Make a batching rule of a function that takes the level in front of the operator's arguments. It is called below the
    level, and its results are wrapped: one tensor, or a list or tuple of them, in which some may be None."""

    def rule(keys: object, *args: object, **kwargs: object) -> Any:
        level = BatchLevel()
        with level.below():
            results: Any = function(level, *args, **kwargs)
        if isinstance(results, torch.Tensor):
            return level.around(results)
        wrapped = [None if result is None else level.around(result) for result in results]
        return wrapped if type(results) is list else tuple(wrapped)

    return rule


batching_rule: Trait[Function] = Trait("batching rule for symbolic sizes")
"""At one level of `torch.vmap`."""

random_batching_rule: Trait[Function] = Trait("batching rule of a random operator for symbolic sizes")
"""The same for operators that draw numbers, whether they are given a batch or not."""


def dim_behind_batch(dim: int, rank: int) -> int:
    """A dimension of one entry as a dimension of the batched tensor."""
    most = max(rank, 1)
    if not -most <= dim < most:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})"
        )
    return dim + 1 if dim >= 0 else dim


def as_rows(level: BatchLevel, tensor: torch.Tensor) -> torch.Tensor:
    """Unwrapped, with 0-dimensional entries as rows of one element."""
    inside = level.inside(tensor)
    return inside if tensor.dim() else inside.unsqueeze(-1)


def with_dims_between(level: BatchLevel, tensor: torch.Tensor, ones: list[int]) -> torch.Tensor:
    """Unwrapped, with dimensions of size 1 between the batch and the others."""
    inside = level.inside(tensor)
    return inside.reshape(inside.shape[0], *ones, *inside.shape[1:])


def align_ranks(level: BatchLevel, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Unwrapped, with the same number of dimensions, as for broadcasting."""
    rank = max(tensor.dim() for tensor in tensors)
    return [with_dims_between(level, tensor, [1] * (rank - tensor.dim())) for tensor in tensors]
