"""Stand-ins for sparse tensors: torch's own sparse meta tensors, dressed as fakes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.native import canonical
from understudy.fake.tensor import FakeTensor
from understudy.infer.sparse import sparse_on, spec_of_sparse
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

META = torch.device("meta")


def convert_sparse(mode: FakeTensorMode, t: torch.Tensor) -> FakeTensor:
    return make_sparse(mode, spec_of_sparse(t.detach(), canonical(t.device)))


def make_sparse(mode: FakeTensorMode, spec: TensorSpec) -> FakeTensor:
    guard = _torch.NoDispatch()
    try:
        fake: Any = _torch.make_subclass(FakeTensor, sparse_on(spec, META))
    finally:
        del guard
    fake._spec = spec
    fake.fake_mode = mode
    return fake
