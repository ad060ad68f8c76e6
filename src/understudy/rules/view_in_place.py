"""Operators that change the shape, stride or offset of their first input in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError
from understudy.rules.copies import clone, strides_in_format
from understudy.rules.layouts import suggested_format
from understudy.rules.registry import Rule, rule
from understudy.rules.views import as_strided, squeeze, squeeze_dim, squeeze_dims, t, transpose, unsqueeze
from understudy.spec import Same, TensorSpec, contiguous_strides, same_shape

VIEWS_IN_PLACE: dict[str, Rule] = {
    "squeeze_": squeeze,
    "squeeze_.dim": squeeze_dim,
    "squeeze_.dims": squeeze_dims,
    "unsqueeze_": unsqueeze,
    "t_": t,
    "transpose_": transpose,
    "swapdims_": transpose,
    "swapaxes_": transpose,
    "as_strided_": as_strided,
}


def changed(before: TensorSpec, after: TensorSpec) -> Same:
    return Same(0) if after is before else Same(0, after)


def _in_place(view_rule: Rule) -> Rule:
    def view_in_place(spec: TensorSpec, *args: Any, **kwargs: Any) -> Same:
        return changed(spec, view_rule(spec, *args, **kwargs).spec)

    return view_in_place


for _name, _view_rule in VIEWS_IN_PLACE.items():
    rule(_name)(_in_place(_view_rule))


@rule("detach_")
def detach_(spec: TensorSpec) -> Same:
    return Same(0)


def resized(spec: TensorSpec, size: Sequence[Any], memory_format: torch.memory_format | None) -> TensorSpec:
    """A tensor of the same shape keeps its strides; another shape, or a format, lays it out anew."""
    if any(s < 0 for s in size):
        raise ArgumentError(f"resize_: {list(size)} has a negative size")
    if not same_shape(tuple(size), spec.shape):
        spec = spec.viewed(size, contiguous_strides(size))
    if memory_format is None:
        return spec
    return spec.viewed(size, strides_in_format(tuple(size), memory_format))


@rule("resize_")
def resize_(spec: TensorSpec, size: Sequence[Any], *, memory_format: torch.memory_format | None = None) -> Same:
    return changed(spec, resized(spec, size, memory_format))


@rule("resize")
def resize(spec: TensorSpec, size: Sequence[Any], *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    return resized(clone(spec), size, memory_format)


@rule("resize_as_")
def resize_as_(
    spec: TensorSpec, the_template: TensorSpec, *, memory_format: torch.memory_format | None = None
) -> Same:
    if memory_format is torch.preserve_format:
        memory_format = suggested_format(the_template)
    return changed(spec, resized(spec, the_template.shape, memory_format))


@rule("set_.source_Tensor")
def set_source(spec: TensorSpec, source: TensorSpec) -> Same:
    if spec.dtype is not source.dtype:
        raise DtypeError(f"set_: {spec} can't take over the storage of {source}, which has another dtype")
    return changed(spec, spec.viewed(source.shape, source.stride, source.offset))
