"""Stand-ins for sparse tensors: torch's own sparse meta tensors, dressed as fakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.native import canonical
from understudy.fake.tensor import FakeTensor
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


@dataclass(frozen=True, slots=True)
class SparseParts:
    """What a sparse layout adds to a spec."""

    sparse_dim: int
    dense_dim: int
    nnz: int
    is_coalesced: bool = True
    index_dtype: torch.dtype = torch.int64
    block: tuple[int, ...] = ()


def is_sparse(t: torch.Tensor) -> bool:
    return t.layout is torch.sparse_coo or t.layout in COMPRESSED


def parts_of(t: torch.Tensor) -> SparseParts:
    if t.layout is torch.sparse_coo:
        return SparseParts(t.sparse_dim(), t.dense_dim(), t._nnz(), t.is_coalesced())
    by_row = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer = t.crow_indices() if by_row else t.ccol_indices()
    values = t.values()
    block = tuple(values.shape[outer.ndim : outer.ndim + 2]) if t.layout in (torch.sparse_bsr, torch.sparse_bsc) else ()
    return SparseParts(t.sparse_dim(), t.dense_dim(), t._nnz(), True, outer.dtype, block)


def convert_sparse(mode: FakeTensorMode, t: torch.Tensor) -> FakeTensor:
    with torch.no_grad():
        return dress(mode, t.detach().to("meta"), canonical(t.device))


def dress(mode: FakeTensorMode, sparse_meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """A fake around a sparse meta tensor."""
    spec = TensorSpec(
        tuple(sparse_meta.shape), (), dtype=sparse_meta.dtype, device=device, layout=sparse_meta.layout,
        sparse=parts_of(sparse_meta),
    )  # fmt: skip
    guard = _torch.NoDispatch()
    try:
        fake: Any = _torch.make_subclass(FakeTensor, sparse_meta)
    finally:
        del guard
    fake._spec = spec
    fake.fake_mode = mode
    return fake  # type: ignore[no-any-return]
