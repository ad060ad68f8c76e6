"""Specs of sparse tensors, beside real ones: parts, counts, and a plain tensor with the same metadata."""

from __future__ import annotations

import pytest
import torch

from understudy.spec.sparse import (
    count_bytes,
    count_values,
    is_sparse,
    parts_of,
    sparse_on,
    spec_of_sparse,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
CPU = torch.device("cpu")
DENSE = torch.tensor([[0.0, 1, 0, 2, 0, 0], [0, 0, 0, 0, 0, 3], [0, 0, 4, 0, 0, 0], [5, 0, 0, 0, 6, 0]])
REAL = {
    "coo": DENSE.to_sparse(),
    "coo of rows": DENSE.to_sparse(1),
    "coo without entries": torch.zeros(3, 4).to_sparse(),
    "coo without dimensions": torch.tensor(2.0).to_sparse(),
    "coo, not coalesced": torch.sparse_coo_tensor([[0, 0, 2]], torch.ones(3, 2), (4, 2)),
    "csr": DENSE.to_sparse_csr(),
    "csc": DENSE.to_sparse_csc(),
    "csr, int32": torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32), torch.ones(2), (2, 3)
    ),
    "bsr": DENSE.to_sparse_bsr((2, 3)),
    "bsc": DENSE.to_sparse_bsc((2, 3)),
    "bsr of tall blocks": DENSE.to_sparse_bsr((4, 1)),
    "csr of vectors": torch.sparse_csr_tensor([0, 2, 3], [0, 2, 1], torch.ones(3, 4), (2, 3, 4)),
    "batch of csr": torch.stack([DENSE, DENSE.flip(0)]).to_sparse_csr(),
    "batch of bsc": torch.stack([DENSE, DENSE.flip(0)]).to_sparse_bsc((2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("real", REAL.values(), ids=REAL)
def test_the_spec_counts_what_the_tensor_stores(real: torch.Tensor) -> None:
    spec = spec_of_sparse(real, CPU)
    assert is_sparse(real) and not is_sparse(DENSE)
    assert (spec.shape, spec.dtype, spec.layout) == (real.shape, real.dtype, real.layout)
    assert (spec.sparse.sparse_dim, spec.sparse.dense_dim) == (real.sparse_dim(), real.dense_dim())
    *indices, values = parts_of(real)
    assert count_values(spec) == values.numel()
    assert count_bytes(spec) == sum(part.nbytes for part in (*indices, values))


@pytest.mark.parametrize("real", REAL.values(), ids=REAL)
def test_a_plain_tensor_of_the_spec_is_like_the_real_one(real: torch.Tensor) -> None:
    spec = spec_of_sparse(real, CPU)
    made = sparse_on(spec, CPU)
    assert spec_of_sparse(made, CPU) is spec
    assert [(part.shape, part.dtype) for part in parts_of(made)] == [
        (part.shape, part.dtype) for part in parts_of(real)
    ]
    checked = torch.sparse_coo_tensor if made.layout is torch.sparse_coo else torch.sparse_compressed_tensor
    more = {} if made.layout is torch.sparse_coo else {"layout": made.layout}
    checked(*parts_of(made), size=made.shape, check_invariants=True, **more)  # valid indices
    assert made.to_dense().shape == real.to_dense().shape


def test_text_and_devices() -> None:
    spec = spec_of_sparse(DENSE.to_sparse_csr(), CPU)
    assert str(spec) == "f32[4, 6]:sparse_csr@cpu"
    assert spec.on(torch.device("cuda:0")).sparse is spec.sparse
