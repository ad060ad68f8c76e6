"""`torch.vmap` of operators whose rules in C++ read sizes as plain integers, for symbolic sizes: see `transforms`.

A rule is called at the level of vmap. What is inside of the tensors at that level, with the batch in front, is computed with
below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch

Function = Callable[..., Any]
aten = torch.ops.aten


class Level:
    """One level of vmap, the innermost one."""

    def __init__(self) -> None:
        interpreter, _, _ = _torch.innermost_transform()
        self._level = interpreter.level()
        self._size = interpreter.batch_size()

    @staticmethod
    def below() -> Any:
        """Inside, calls are passed on to the transforms around this level."""
        return _torch.below(_torch.BATCHED_KEYS)

    def is_batch(self, tensor: Any) -> bool:
        return bool(_torch.batched_at(tensor, 0, self._level)[1])

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """With its batch in front."""
        inner, is_batch = _torch.batched_at(tensor, 0, self._level)
        return inner if is_batch else inner.expand(self._size, *inner.shape)

    def around(self, result: torch.Tensor) -> Any:
        return _torch.with_batch_dimension(result, 0, self._level)


def _behind_batch(dim: int, rank: int) -> int:
    """A dimension of one entry, counted in the whole batch."""
    most = max(rank, 1)
    if not -most <= dim < most:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})"
        )
    return dim + 1 if dim >= 0 else dim


def cat(keys: Any, tensors: Any, dim: int = 0) -> Any:
    level = Level()
    rank = max(tensor.dim() for tensor in tensors)
    dim = _behind_batch(dim, rank)
    with level.below():  # what has nothing in it may have another rank
        parts = [level.inside(tensor) for tensor in tensors if tensor.dim() == rank or tensor.numel() != 0]
        result = torch.cat(parts, dim)
    return level.around(result)


def chunk(keys: Any, x: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    level = Level()
    dim = _behind_batch(dim, x.dim())
    with level.below():
        parts = torch.chunk(level.inside(x), chunks, dim)
    return [level.around(part) for part in parts]


def gather(keys: Any, x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Any:
    level = Level()
    dim = _behind_batch(dim, x.dim())
    with level.below():
        inside, places = _in_rows(level, x), _in_rows(level, index)
        result = torch.gather(inside, dim, places, sparse_grad=sparse_grad)
        result = result if index.dim() else result.squeeze(-1)
    return level.around(result)


def _scattering(function: Function) -> Function:
    def rule(keys: Any, x: torch.Tensor, dim: int, index: torch.Tensor, source: Any) -> Any:
        level = Level()
        dim = _behind_batch(dim, x.dim())
        with level.below():
            inside, places = _in_rows(level, x), _in_rows(level, index)
            given = _in_rows(level, source) if isinstance(source, torch.Tensor) else source
            result = function(inside, dim, places, given)
            result = result if x.dim() else result.squeeze(-1)
        return level.around(result)

    return rule


def _in_rows(level: Level, tensor: torch.Tensor) -> torch.Tensor:
    """A number is a row of one."""
    inside = level.inside(tensor)
    return inside if tensor.dim() else inside.unsqueeze(-1)


def native_layer_norm(keys: Any, x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    level = Level()
    has_own = level.is_batch(weight) or level.is_batch(bias)
    with level.below():
        inside = level.inside(x)
        if not has_own:
            return tuple(map(level.around, torch.native_layer_norm(inside, shape, weight, bias, eps)))
        result, *statistics = torch.native_layer_norm(inside, shape, None, None, eps)
        ones = [1] * (x.dim() - len(shape))
        if weight is not None:
            result = result * _between(level, weight, ones)
        if bias is not None:
            result = result + _between(level, bias, ones)
    return tuple(map(level.around, (result, *statistics)))


def _between(level: Level, tensor: torch.Tensor, ones: list[int]) -> torch.Tensor:
    """With dimensions of one between the batch and the others."""
    inside = level.inside(tensor)
    return inside.reshape(inside.shape[0], *ones, *inside.shape[1:])


def native_layer_norm_backward(
    keys: Any, gradient: torch.Tensor, x: torch.Tensor, shape: Any, mean: torch.Tensor, rstd: torch.Tensor, weight: Any,
    bias: Any, wanted: list[bool],
) -> Any:  # fmt: skip
    level = Level()
    has_own = level.is_batch(weight)
    rows = list(range(1, x.dim() - len(shape) + 1))
    results: list[Any] = [None, None, None]
    with level.below():
        given, *others = (level.inside(tensor) for tensor in (gradient, x, mean, rstd))
        if wanted[0]:
            scaled = given * _between(level, weight, [1] * len(rows)) if has_own else given
            affine = (None, None) if has_own else (weight, None)
            backward = aten.native_layer_norm_backward
            results[0] = backward(scaled, others[0], shape, *others[1:], *affine, [True, False, False])[0]
        if wanted[1]:
            results[1] = _summed(given * (others[0] - others[1]) * others[2], rows)
        if wanted[2]:
            results[2] = _summed(given, rows)
    return tuple([None if result is None else level.around(result) for result in results])


def _summed(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return tensor.sum(dims) if dims else tensor.clone()


def gelu_backward(keys: Any, gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> Any:
    level = Level()
    with level.below():
        result = aten.gelu_backward(level.inside(gradient), level.inside(x), approximate=approximate)
    return level.around(result)


def embedding_dense_backward(
    keys: Any, gradient: torch.Tensor, index: torch.Tensor, rows: Any, padding: Any, scaled: bool
) -> Any:
    """One table with the rows of all entries, one after the other."""
    level = Level()
    with level.below():
        inside, places = level.inside(gradient), level.inside(index)
        size = inside.shape[0]
        first = torch.arange(size, device=places.device).mul(rows).reshape(size, *[1] * index.dim())
        table = aten.embedding_dense_backward(inside, places + first, size * rows, -1, scaled)
        table = table.reshape(size, rows, -1)
        if padding >= 0:
            table = table * (torch.arange(rows, device=places.device) != padding).unsqueeze(-1)
    return level.around(table)


def _attention(op: Any, operands: int) -> Function:
    """Attention of one batch more, which is counted among the entries of the batch that there is."""

    def rule(keys: Any, *args: Any, attn_mask: Any = None, **options: Any) -> Any:
        level = Level()
        with level.below():
            tensors = [level.inside(tensor) for tensor in args[:operands]]
            outer, inner = tensors[0].shape[:2]
            if attn_mask is not None:
                mask = _between(level, attn_mask, [1] * (4 - attn_mask.dim()))
                attn_mask = mask.expand(outer, inner, *mask.shape[2:]).flatten(0, 1)
            flat = [tensor.flatten(0, 1) for tensor in tensors]
            results = op(*flat, *args[operands:], attn_mask=attn_mask, **options)
            unfolded = [result.reshape(outer, inner, *result.shape[1:]) for result in results]
        return tuple(map(level.around, unfolded))

    return rule


def convolution(keys: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, *settings: Any) -> Any:
    """One kernel for all: the batch is counted among the entries that there are. A kernel for each: among the groups."""
    level = Level()
    if not level.is_batch(weight) and not level.is_batch(bias):
        with level.below():
            inside = level.inside(x)
            result = aten.convolution(inside.flatten(0, 1), weight, bias, *settings)
            result = result.reshape(*inside.shape[:2], *result.shape[1:])
        return level.around(result)
    *others, groups = settings
    with level.below():
        kernels = level.inside(weight)
        size = kernels.shape[0]
        result = aten.convolution(
            _among_channels(level.inside(x)), kernels.flatten(0, 1), None, *others, size * groups
        )
        result = _from_channels(result, size)
        if bias is not None:
            result = result + level.inside(bias).reshape(size, 1, -1, *[1] * (x.dim() - 2))
    return level.around(result)


def convolution_backward(
    keys: Any, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *settings: Any
) -> Any:
    level = Level()
    *others, groups, wanted = settings
    has_own = level.is_batch(weight)
    results: list[Any] = [None, None, None]
    with level.below():
        given, inside = level.inside(gradient), level.inside(x)
        size = given.shape[0]
        if wanted[0] and not has_own:
            flat = given.flatten(0, 1), inside.flatten(0, 1), weight, None
            found = aten.convolution_backward(*flat, *others, groups, [True, False, False])[0]
            results[0] = found.reshape(inside.shape)
        if wanted[1] or (wanted[0] and has_own):
            kernels = level.inside(weight)
            grouped = _among_channels(given), _among_channels(inside), kernels.flatten(0, 1), None
            mask = [wanted[0] and has_own, wanted[1], False]
            of_x, of_weight, _ = aten.convolution_backward(*grouped, *others, size * groups, mask)
            results[0] = _from_channels(of_x, size) if mask[0] else results[0]
            results[1] = of_weight.reshape(kernels.shape) if mask[1] else None
        if wanted[2]:
            results[2] = given.sum([1, *range(3, given.dim())])
    return tuple([None if result is None else level.around(result) for result in results])


def _among_channels(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).flatten(1, 2)


def _from_channels(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    count, channels, *rest = tensor.shape
    return tensor.reshape(count, size, channels // size, *rest).transpose(0, 1)


def slice_backward(
    keys: Any, gradient: torch.Tensor, sizes: Any, dim: int, start: Any, end: Any, step: Any
) -> Any:
    level = Level()
    dim = _behind_batch(dim, len(sizes))
    with level.below():
        inside = level.inside(gradient)
        result = aten.slice_backward(inside, [inside.shape[0], *sizes], dim, start, end, step)
    return level.around(result)


def _putting(op: Any) -> Function:
    """Of a part of a tensor along one dimension: the part, the dimension, and which part it is."""

    def rule(keys: Any, x: torch.Tensor, part: torch.Tensor, dim: int = 0, *places: Any) -> Any:
        level = Level()
        dim = _behind_batch(dim, x.dim())
        with level.below():
            result = op(level.inside(x), level.inside(part), dim, *places)
        return level.around(result)

    return rule


def _pooling(op: Any) -> Function:
    """Of planes: the batch is counted among the entries that there are, or is those, if there are none."""

    def rule(keys: Any, *args: Any) -> Any:
        level = Level()
        has_entries = args[0].dim() == PLANES_WITH_ENTRIES
        with level.below():
            tensors = [level.inside(arg) if isinstance(arg, torch.Tensor) else None for arg in args]
            outer = tensors[0].shape[:2]  # type: ignore[union-attr]
            if has_entries:
                tensors = [None if tensor is None else tensor.flatten(0, 1) for tensor in tensors]
            given = [arg if tensor is None else tensor for arg, tensor in zip(args, tensors, strict=True)]
            found = op(*given)
            results = found if isinstance(found, tuple) else (found,)
            if has_entries:
                results = tuple([result.reshape(*outer, *result.shape[1:]) for result in results])
        around = tuple(map(level.around, results))
        return around if isinstance(found, tuple) else around[0]

    return rule


PLANES_WITH_ENTRIES = 4
NO_REDUCTION, MEAN = 0, 1


def _loss(op: Any) -> Function:
    """Of the differences of two tensors, each of which is broadcast."""

    def rule(keys: Any, x: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, *settings: Any) -> Any:
        level = Level()
        with level.below():
            losses = op(*_aligned(level, x, target), NO_REDUCTION, *settings)
            if reduction != NO_REDUCTION:
                losses = losses.flatten(1) if losses.dim() > 1 else losses.unsqueeze(1)
                losses = losses.mean(1) if reduction == MEAN else losses.sum(1)
        return level.around(losses)

    return rule


def _loss_backward(op: Any) -> Function:
    def rule(
        keys: Any,
        gradient: torch.Tensor,
        x: torch.Tensor,
        target: torch.Tensor,
        reduction: int,
        *settings: Any,
    ) -> Any:
        level = Level()
        with level.below():
            given, *others = _aligned(level, gradient, x, target)
            if reduction == MEAN:
                count = torch.broadcast_shapes(*[other.shape[1:] for other in others]).numel()
                given = given / count
            result = op(given, *others, NO_REDUCTION, *settings)
        return level.around(result)

    return rule


def _aligned(level: Level, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """With the same number of dimensions, as for broadcasting."""
    rank = max(tensor.dim() for tensor in tensors)
    return [_between(level, tensor, [1] * (rank - tensor.dim())) for tensor in tensors]


def native_group_norm(
    keys: Any,
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    count: Any,
    channels: Any,
    size: Any,
    groups: int,
    eps: float,
) -> Any:
    level = Level()
    has_own = level.is_batch(weight) or level.is_batch(bias)
    with level.below():
        inside = level.inside(x)
        outer = inside.shape[:2]
        affine = (None, None) if has_own else (weight, bias)
        flat = inside.flatten(0, 1).contiguous()
        found = aten.native_group_norm(flat, *affine, flat.shape[0], channels, size, groups, eps)
        result, *statistics = (part.reshape(*outer, *part.shape[1:]) for part in found)
        if has_own:
            result = result if weight is None else result * _for_channels(level, weight, x.dim())
            result = result if bias is None else result + _for_channels(level, bias, x.dim())
    return tuple(map(level.around, (result, *statistics)))


def native_group_norm_backward(
    keys: Any, gradient: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Any, count: Any,
    channels: Any, size: Any, groups: int, wanted: list[bool],
) -> Any:  # fmt: skip
    level = Level()
    has_own = level.is_batch(weight)
    results: list[Any] = [None, None, None]
    with level.below():
        given, inside, *statistics = (level.inside(tensor) for tensor in (gradient, x, mean, rstd))
        if wanted[0]:
            scaled = given * _for_channels(level, weight, x.dim()) if has_own else given
            flat = [part.flatten(0, 1).contiguous() for part in (scaled, inside, *statistics)]
            sizes = (flat[0].shape[0], channels, size, groups)
            found = aten.native_group_norm_backward(
                *flat, None if has_own else weight, *sizes, [True, False, False]
            )
            results[0] = found[0].reshape(inside.shape)
        rows = [1, *range(3, inside.dim())]
        if wanted[1]:
            center, scale = (part[..., None] for part in statistics)
            grouped = inside.reshape(*inside.shape[:2], groups, -1)
            normal = ((grouped - center) * scale).reshape(inside.shape)
            results[1] = (given * normal).sum(rows)
        if wanted[2]:
            results[2] = given.sum(rows)
    return tuple([None if result is None else level.around(result) for result in results])


def _for_channels(level: Level, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    inside = level.inside(tensor)
    return inside.reshape(inside.shape[0], 1, -1, *[1] * (rank - 2))


LOSSES = ("mse", "smooth_l1", "huber")
POOLINGS = (
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward",
)
RULES: dict[str, Function] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention(
        aten._scaled_dot_product_flash_attention_for_cpu.default, 3
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, 6
    ),
    "cat": cat,
    "chunk": chunk,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "embedding_dense_backward": embedding_dense_backward,
    "gather": gather,
    "gelu_backward": gelu_backward,
    **{f"{name}_loss": _loss(getattr(aten, f"{name}_loss")) for name in LOSSES},
    **{f"{name}_loss_backward": _loss_backward(getattr(aten, f"{name}_loss_backward")) for name in LOSSES},
    **{name: _pooling(getattr(aten, name)) for name in POOLINGS},
    "native_group_norm": native_group_norm,
    "native_group_norm_backward": native_group_norm_backward,
    "native_layer_norm": native_layer_norm,
    "native_layer_norm_backward": native_layer_norm_backward,
    "select_scatter": _putting(aten.select_scatter),
    "slice_backward": slice_backward,
    "slice_scatter": _putting(aten.slice_scatter),
    "scatter.src": _scattering(torch.scatter),
    "scatter.value": _scattering(torch.scatter),
    "scatter_add": _scattering(torch.scatter_add),
}
"""By the name of the operator."""
