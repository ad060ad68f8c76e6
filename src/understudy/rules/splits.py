"""Operators that cut a tensor into a list of views."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from understudy.errors import ArgumentError, DimensionError, ShapeMismatch
from understudy.rules.dims import wrap_dim
from understudy.rules.registry import Rule, rule
from understudy.rules.views import narrowed, selected, sliced
from understudy.shapes.sizes import at_hand, at_least_one, has_to_be
from understudy.spec import TensorSpec, View


def pieces(spec: TensorSpec, dim: int, sizes: Sequence[Any]) -> list[View]:
    views, start = [], 0
    for size in sizes:
        views.append(View(0, narrowed(spec, dim, start, size)))
        start = start + size
    return views


def equal_sizes(spec: TensorSpec, dim: int, split_size: Any) -> list[Any]:
    """Sizes of pieces of `split_size`, of which the last may be smaller."""
    length = spec.shape[dim]
    if split_size < 0:
        raise ArgumentError(f"split: the size of a piece must not be negative, got {split_size}")
    if split_size == 0:
        if length != 0:
            raise ArgumentError(f"split: pieces of size 0 never use up dimension {dim} of {spec}")
        return [0]
    # How many pieces there are has to be a number: one question, where the size is a symbol.
    full = _count(length, split_size) - 1
    return [*[split_size] * full, length - full * split_size]


def _count(length: Any, split_size: Any) -> int:
    """How many pieces there are, at least one. Of symbols, what that depends on is asked as plainly as can be."""
    count = -(-length // split_size)
    number = at_hand(count)
    if type(count) is not int and number is not None:
        number = max(number, 1)
        if length <= number * split_size and (number == 1 or length > (number - 1) * split_size):
            return int(number)
    return operator.index(at_least_one(count))


@rule("split.Tensor", "unsafe_split.Tensor")
def split(spec: TensorSpec, split_size: Any, dim: int = 0) -> list[View]:
    if not spec.shape:
        raise ShapeMismatch(f"split: {spec} has no dimension to split")
    dim = wrap_dim(dim, spec.ndim)
    return pieces(spec, dim, equal_sizes(spec, dim, split_size))


@rule("split_with_sizes", "split.sizes", "unsafe_split_with_sizes")
def split_with_sizes(spec: TensorSpec, split_sizes: Sequence[Any], dim: int = 0) -> list[View]:
    if not spec.shape:
        raise ShapeMismatch(f"split_with_sizes: {spec} has no dimension to split")
    dim = wrap_dim(dim, spec.ndim)
    total: Any = 0
    for size in split_sizes:
        if size < 0:
            raise ArgumentError(f"split_with_sizes: {list(split_sizes)} has a negative size")
        total = total + size
    if not has_to_be(total, spec.shape[dim], is_refused_else=True):
        raise ShapeMismatch(
            f"split_with_sizes: {list(split_sizes)} add up to {total}, "
            f"dimension {dim} of {spec} has size {spec.shape[dim]}"
        )
    return pieces(spec, dim, split_sizes)


@rule("unbind.int")
def unbind(spec: TensorSpec, dim: int = 0) -> list[View]:
    if not spec.shape:
        raise DimensionError(f"unbind: {spec} has no dimension to take apart")
    dim = wrap_dim(dim, spec.ndim)
    return [View(0, selected(spec, dim, index)) for index in range(spec.shape[dim])]


@rule("chunk", "unsafe_chunk")
def chunk(spec: TensorSpec, chunks: int, dim: int = 0) -> list[View]:
    if not spec.shape:
        raise ShapeMismatch(f"chunk: {spec} has no dimension to split")
    if chunks <= 0:
        raise ArgumentError(f"chunk: the number of chunks must be positive, got {chunks}")
    dim = wrap_dim(dim, spec.ndim)
    length = spec.shape[dim]
    size = (length + chunks - 1) // chunks
    if length == 0:
        # Nothing to share out: all the chunks that were asked for are there, and empty.
        return pieces(spec, dim, [0] * chunks)
    return pieces(spec, dim, equal_sizes(spec, dim, size))


def sections_of(spec: TensorSpec, sections: Any, dim: int) -> list[View]:
    if not spec.shape:
        raise ShapeMismatch(f"tensor_split: {spec} has no dimension to split")
    if sections <= 0:
        raise ArgumentError(f"tensor_split: the number of sections must be positive, got {sections}")
    dim = wrap_dim(dim, spec.ndim)
    smallest, larger = spec.shape[dim] // sections, spec.shape[dim] % sections
    return pieces(spec, dim, [smallest + 1 if i < larger else smallest for i in range(sections)])


def cut_at(spec: TensorSpec, indices: Sequence[Any], dim: int) -> list[View]:
    if not spec.shape:
        raise ShapeMismatch(f"tensor_split: {spec} has no dimension to split")
    dim = wrap_dim(dim, spec.ndim)
    views, start = [], 0
    for end in (*indices, spec.shape[dim]):
        views.append(View(0, sliced(spec, dim, start, end, 1)))
        start = end
    return views


@rule("tensor_split.sections")
def tensor_split_sections(spec: TensorSpec, sections: Any, dim: int = 0) -> list[View]:
    return sections_of(spec, sections, dim)


@rule("tensor_split.indices")
def tensor_split_indices(spec: TensorSpec, indices: Sequence[Any], dim: int = 0) -> list[View]:
    return cut_at(spec, indices, dim)


# The dimension that each of these splits, and how many dimensions a tensor must have for it.
NAMED_SPLITS = {"hsplit": (1, 1), "vsplit": (0, 2), "dsplit": (2, 3)}


def _named_split(name: str, dim: int, at_least: int) -> tuple[Rule, Rule]:
    def along(spec: TensorSpec) -> int:
        if spec.ndim < at_least:
            raise ShapeMismatch(f"{name}: expected at least {at_least} dimensions, got {spec}")
        return 0 if spec.ndim == 1 else dim

    def split_in_sections(spec: TensorSpec, sections: int) -> list[View]:
        at = along(spec)
        if sections == 0 or spec.shape[at] % sections != 0:
            raise ShapeMismatch(f"{name}: dimension {at} of {spec} can't be split into {sections} equal parts")
        return sections_of(spec, sections, at)

    def split_at(spec: TensorSpec, indices: Sequence[Any]) -> list[View]:
        return cut_at(spec, indices, along(spec))

    return split_in_sections, split_at


for _name, (_dim, _at_least) in NAMED_SPLITS.items():
    _in_sections, _at_indices = _named_split(_name, _dim, _at_least)
    rule(f"{_name}.int")(_in_sections)
    rule(f"{_name}.array")(_at_indices)
