"""Sparse layouts: their part of a spec, and plain sparse tensors for a spec."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from understudy.shapes.node import Shape
from understudy.spec import TensorSpec

BY_ROW = frozenset({torch.sparse_csr, torch.sparse_bsr})
BLOCKED = frozenset({torch.sparse_bsr, torch.sparse_bsc})
COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, *BLOCKED})


@dataclass(frozen=True, slots=True)
class SparseParts:
    """The part of a spec for sparse layouts. `block` is () for layouts without blocks."""

    sparse_dim: int
    dense_dim: int
    nnz: int
    is_coalesced: bool
    index_dtype: torch.dtype
    block: tuple[Any, ...] = ()


def is_sparse(t: torch.Tensor) -> bool:
    return t.layout is torch.sparse_coo or t.layout in COMPRESSED


def spec_of_sparse(t: torch.Tensor, device: torch.device) -> TensorSpec:
    return TensorSpec(tuple(t.shape), (), dtype=t.dtype, device=device, layout=t.layout, sparse=_parts(t))


def _parts(t: torch.Tensor) -> SparseParts:
    if t.layout is torch.sparse_coo:
        return SparseParts(t.sparse_dim(), t.dense_dim(), t._nnz(), t.is_coalesced(), torch.int64)
    outer = t.crow_indices() if t.layout in BY_ROW else t.ccol_indices()
    block = tuple(t.values().shape[outer.ndim : outer.ndim + 2]) if t.layout in BLOCKED else ()
    return SparseParts(t.sparse_dim(), t.dense_dim(), t._nnz(), True, outer.dtype, block)


def sparse_on(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """A plain sparse tensor with this spec's metadata: valid indices, and zeros as values."""
    parts: SparseParts = spec.sparse
    shape = spec.numbers.shape
    dense = shape[spec.ndim - parts.dense_dim :]
    if spec.layout is torch.sparse_coo:
        indices = _coordinates(shape[: parts.sparse_dim], parts.nnz).to(device)
        values = torch.zeros((parts.nnz, *dense), dtype=spec.dtype, device=device)
        return torch.sparse_coo_tensor(
            indices, values, size=shape, is_coalesced=parts.is_coalesced, check_invariants=False
        )
    rows, columns = shape[-2 - parts.dense_dim], shape[-1 - parts.dense_dim]
    batch = shape[: spec.ndim - 2 - parts.dense_dim]
    if parts.block:
        rows, columns = rows // parts.block[0], columns // parts.block[1]
    lines, length = (rows, columns) if spec.layout in BY_ROW else (columns, rows)
    outer, inner = _compress(lines, length, parts.nnz)
    values = torch.zeros((*batch, parts.nnz, *parts.block, *dense), dtype=spec.dtype, device=device)
    return torch.sparse_compressed_tensor(
        outer.to(parts.index_dtype).expand(*batch, -1).to(device),
        inner.to(parts.index_dtype).expand(*batch, -1).to(device),
        values, size=shape, layout=spec.layout, device=device, check_invariants=False,
    )  # fmt: skip


def count_values(spec: TensorSpec) -> int:
    """The stored numbers of a sparse tensor."""
    parts: SparseParts = spec.sparse
    shape = spec.numbers.shape
    batch = shape[: spec.ndim - parts.sparse_dim - parts.dense_dim]
    return prod((*batch, parts.nnz, *parts.block, *shape[spec.ndim - parts.dense_dim :]))


def count_bytes(spec: TensorSpec) -> int:
    """The indices and values together."""
    parts: SparseParts = spec.sparse
    shape = spec.numbers.shape
    if spec.layout is torch.sparse_coo:
        indices = parts.sparse_dim * parts.nnz
    else:
        line = -2 if spec.layout in BY_ROW else -1
        lines = shape[line - parts.dense_dim] // (parts.block[line] if parts.block else 1)
        indices = prod(shape[: spec.ndim - 2 - parts.dense_dim]) * (lines + 1 + parts.nnz)
    return indices * parts.index_dtype.itemsize + count_values(spec) * spec.itemsize


def parts_of(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The component tensors of a sparse tensor."""
    if t.layout is torch.sparse_coo:
        return t._indices(), t._values()
    if t.layout in BY_ROW:
        return t.crow_indices(), t.col_indices(), t.values()
    return t.ccol_indices(), t.row_indices(), t.values()


def _coordinates(shape: Shape, count: int) -> torch.Tensor:
    """The first `count` positions in a tensor of this shape, in order."""
    flat = torch.arange(count)
    rows = []
    for size in reversed(shape):
        rows.append(flat % max(size, 1))
        flat = flat // max(size, 1)
    return torch.stack(rows[::-1]) if rows else torch.empty((0, count), dtype=torch.int64)


def _compress(lines: int, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row starts and column positions for `count` entries that fill row after row."""
    starts = (torch.arange(lines + 1) * length).clamp(max=count)
    return starts, torch.arange(count) % max(length, 1)
