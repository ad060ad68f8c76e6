"""Composites of views, which reach the dispatcher undecomposed only in inference mode; and copying variants of views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.registry import Rule, rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import complete_shape, wrap_dim, wrap_dims
from understudy.ops.shared.layouts import expand_strides, view_strides
from understudy.ops.views import basic, split_and_join
from understudy.ops.views.basic import (
    as_real,
    diagonal_of,
    select_spec,
    transpose_spec,
    view_spec,
    with_dimensions,
)
from understudy.shapes.sizes import from_torch, has_unbacked, to_torch
from understudy.spec import New, Same, TensorSpec, View, broadcast_shapes, product, same_shape, spec_of

Tensor = torch.Tensor
aten = torch.ops.aten

def reshape_spec(spec: TensorSpec, shape: tuple[Any, ...]) -> New | View:
    stride = view_strides(spec, shape)
    return New(spec.like(shape)) if stride is None else View(0, spec.as_view(shape, stride))


@rule("reshape")
def reshape(spec: TensorSpec, shape: Sequence[object]) -> New | View:
    return reshape_spec(spec, complete_shape(spec, shape))


@rule("ravel")
def ravel(spec: TensorSpec) -> New | View | Same:
    if not spec.is_contiguous:
        return New(spec.like((spec.numel,)))
    return reshape_spec(spec, (spec.numel,))


@rule("flatten.using_ints")
def flatten(spec: TensorSpec, start_dim: int = 0, end_dim: int = -1) -> New | View | Same:
    start, end = wrap_dim(start_dim, spec.ndim), wrap_dim(end_dim, spec.ndim)
    if start > end:
        raise ArgumentError(f"flatten: start dimension {start_dim} comes after end dimension {end_dim}")
    if not spec.shape:
        return reshape_spec(spec, (1,))
    if start == end:
        return Same(0)
    shape = spec.shape
    return reshape_spec(spec, (*shape[:start], product(shape[start : end + 1]), *shape[end + 1 :]))


@rule("unflatten.int")
def unflatten(spec: TensorSpec, dim: int, sizes: Sequence[object]) -> View:
    dim = wrap_dim(dim, spec.ndim)
    if not sizes or not spec.shape:
        raise ArgumentError(f"unflatten: can't take {spec} apart into sizes {list(sizes)}")
    filled = complete_shape(spec.like((spec.shape[dim],)), sizes)
    return View(0, view_spec(spec, (*spec.shape[:dim], *filled, *spec.shape[dim + 1 :])))


@rule("expand_as")
def expand_as(spec: TensorSpec, other: TensorSpec) -> View:
    return View(0, spec.as_view(*expand_strides(spec, other.shape)))


@rule("broadcast_tensors")
def broadcast_tensors(tensors: Sequence[TensorSpec]) -> list[View | Same]:
    shape = broadcast_shapes(*(tensor.shape for tensor in tensors))
    return [
        Same(position)
        if same_shape(tensor.shape, shape)
        else View(position, tensor.as_view(*expand_strides(tensor, shape)))
        for position, tensor in enumerate(tensors)
    ]


def _at_least(ndim: int) -> Rule:
    def raise_rank(spec: TensorSpec) -> View | Same:
        if spec.ndim >= ndim:
            return Same(0)
        return View(0, with_dimensions(spec, ndim))

    return raise_rank


for _ndim in (1, 2, 3):
    rule(f"atleast_{_ndim}d")(_at_least(_ndim))


@rule("view_as")
def view_as(spec: TensorSpec, other: TensorSpec) -> View:
    return View(0, view_spec(spec, complete_shape(spec, other.shape)))


@rule("numpy_T")
def numpy_t(spec: TensorSpec) -> View:
    return View(0, spec.as_view(spec.shape[::-1], spec.stride[::-1]))


def _matrix_transpose(spec: TensorSpec) -> View | Same:
    if not spec.shape:
        return Same(0)
    if spec.ndim < 2:
        raise ShapeMismatch(f"transposing matrices takes at least 2 dimensions, {spec} has {spec.ndim}")
    return View(0, transpose_spec(spec, -2, -1))


@rule("mT")
def matrix_transpose(spec: TensorSpec) -> View | Same:
    return _matrix_transpose(spec)


@rule("mH", "adjoint")
def matrix_adjoint(spec: TensorSpec) -> View | Same:
    answer = _matrix_transpose(spec)
    if not spec.is_complex:
        return answer
    turned = answer.spec or spec
    return View(0, turned.as_view(turned.shape, turned.stride, conj=not spec.conj))


def _move_dims(spec: TensorSpec, source: Sequence[int], destination: Sequence[int]) -> View:
    if len(source) != len(destination):
        raise ArgumentError(f"movedim: {len(source)} sources and {len(destination)} destinations")
    sources, destinations = wrap_dims(source, spec.ndim), wrap_dims(destination, spec.ndim)
    if not spec.shape:
        return View(0, spec)
    rest = iter(dim for dim in range(spec.ndim) if dim not in sources)
    placed = dict(zip(destinations, sources, strict=True))
    order = [placed[position] if position in placed else next(rest) for position in range(spec.ndim)]
    return View(0, spec.as_view([spec.shape[d] for d in order], [spec.stride[d] for d in order]))


@rule("movedim.intlist", "moveaxis.intlist")
def movedim(spec: TensorSpec, source: Sequence[int], destination: Sequence[int]) -> View:
    return _move_dims(spec, source, destination)


@rule("movedim.int", "moveaxis.int")
def movedim_one(spec: TensorSpec, source: int, destination: int) -> View:
    return _move_dims(spec, (source,), (destination,))


@rule("linalg_diagonal")
def linalg_diagonal(spec: TensorSpec, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> View:
    return View(0, diagonal_of(spec, offset, dim1, dim2))


@rule("conj")
def conj(spec: TensorSpec) -> View | Same:
    if not spec.is_complex:
        return Same(0)
    return View(0, spec.as_view(spec.shape, spec.stride, conj=not spec.conj))


@rule("real")
def real(spec: TensorSpec) -> View | Same:
    return View(0, select_spec(as_real(spec), -1, 0)) if spec.is_complex else Same(0)


@rule("imag")
def imag(spec: TensorSpec) -> View:
    if not spec.is_complex:
        raise DtypeError(f"imag: {spec} is not complex")
    part = select_spec(as_real(spec), -1, 1)
    return View(0, part.as_view(part.shape, part.stride, neg=part.neg != spec.conj))


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
