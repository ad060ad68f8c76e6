"""`reshape` and `broadcast_tensors`, which reach the dispatcher whole only in inference mode; copying variants of views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy.ops.registry import Rule, rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import complete_shape, wrap_dim
from understudy.ops.shared.layouts import check_storage_size, expand_strides, view_strides
from understudy.ops.views import basic, split_and_join
from understudy.shapes.sizes import from_torch, has_unbacked, to_torch
from understudy.spec import New, Same, TensorSpec, View, broadcast_shapes, same_shape, spec_of

Tensor = torch.Tensor
aten = torch.ops.aten


def reshape_spec(spec: TensorSpec, shape: tuple[Any, ...]) -> New | View:
    stride = view_strides(spec, shape)
    return New(spec.like(shape)) if stride is None else View(0, spec.as_view(shape, stride))


@rule("reshape")
def reshape(spec: TensorSpec, shape: Sequence[object]) -> New | View:
    return reshape_spec(spec, complete_shape(spec, shape))


@rule("broadcast_tensors")
def broadcast_tensors(tensors: Sequence[TensorSpec]) -> list[View | Same]:
    shape = broadcast_shapes(*(tensor.shape for tensor in tensors))
    return [
        Same(position)
        if same_shape(tensor.shape, shape)
        else View(position, tensor.as_view(*expand_strides(tensor, shape)))
        for position, tensor in enumerate(tensors)
    ]


# --- Copying variants of views (`permute_copy` of `permute`, …): a new contiguous tensor of the view's shape ---

COPIES: dict[str, Callable[..., New | View | list[View]]] = {
    "_conj_copy": basic.conj,
    "_neg_view_copy": basic.neg_view,
    "_reshape_alias_copy": basic.reshape_alias,
    "_reshape_copy": reshape,
    "alias_copy": basic.alias,
    "as_strided_copy": basic.as_strided,
    "detach_copy": basic.alias,
    "diagonal_copy": basic.diagonal,
    "expand_copy": basic.expand,
    "narrow_copy": basic.narrow,
    "permute_copy": basic.permute,
    "select_copy.int": basic.select,
    "slice_copy.Tensor": basic.slice_,
    "split_copy.Tensor": split_and_join.split,
    "split_with_sizes_copy": split_and_join.split_with_sizes,
    "squeeze_copy": basic.squeeze,
    "squeeze_copy.dim": basic.squeeze_dim,
    "squeeze_copy.dims": basic.squeeze_dims,
    "t_copy": basic.t,
    "transpose_copy.int": basic.transpose,
    "unbind_copy.int": split_and_join.unbind,
    "unfold_copy": basic.unfold,
    "unsqueeze_copy": basic.unsqueeze,
    "view_as_complex_copy": basic.view_as_complex,
    "view_as_real_copy": basic.view_as_real,
    "view_copy": reshape,
    "view_copy.dtype": basic.view_dtype,
}


def _copy_of(view_rule: Callable[..., New | View | list[View]]) -> Rule:
    def view_copy(spec: TensorSpec, *args: object, **kwargs: object) -> TensorSpec | list[TensorSpec]:
        answer = view_rule(_resolve_bits(spec), *args, **kwargs)
        if isinstance(answer, list):
            return [_fresh(view) for view in answer]
        return _fresh(answer)

    return view_copy


def _resolve_bits(spec: TensorSpec) -> TensorSpec:
    """Copying operators resolve the conjugation and negation bits first; some views raise for them."""
    return spec.as_view(spec.shape, spec.stride, conj=False, neg=False) if spec.conj or spec.neg else spec


def _fresh(view: New | View) -> TensorSpec:
    check_storage_size(view.spec)  # eager makes the view first
    return view.spec.like()


for _name, _view_rule in COPIES.items():
    rule(_name)(_copy_of(_view_rule))


@decomposition("reshape")
def decompose_reshape(x: Tensor, shape: Sequence[object]) -> torch.Tensor:
    """C++ adds a guard for each size to find out how the new dimensions fill the old ones, even where products suffice."""
    spec = spec_of(x)
    if spec is None or spec.layout is not torch.strided:
        return NotImplemented
    given = [from_torch(size) for size in shape]
    if has_unbacked(*spec.shape, *spec.stride, *given):
        return NotImplemented
    sizes = complete_shape(spec, given)
    new = [to_torch(size) for size in sizes]
    if view_strides(spec, sizes) is not None:
        return aten.view.default(x, new)
    return aten._unsafe_view.default(x.clone(memory_format=torch.contiguous_format), new)


@decomposition("flatten.using_ints")
def decompose_flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor:
    if x.dim() == 0:
        return NotImplemented
    start, end = wrap_dim(start_dim, x.dim()), wrap_dim(end_dim, x.dim())
    if start >= end:
        return NotImplemented
    shape = x.shape
    return x.reshape([*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])
