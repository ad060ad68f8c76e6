"""Which operators are matrix products of a BLAS library, which takes a workspace."""

from __future__ import annotations

from understudy.ops.registry import Trait

uses_blas: Trait[bool] = Trait("is computed by cuBLAS on CUDA devices", of_packets=True)
uses_blas.mark(
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot", "vdot", "addbmm", "addbmm_",
    "_addmm_activation", "_scaled_mm", "_int_mm", "_grouped_mm",
)  # fmt: skip
