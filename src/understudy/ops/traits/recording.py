"""How an operator appears in a recorded graph, where that is not as it was called."""

from __future__ import annotations

import torch

from understudy._torch import OpOverload
from understudy.ops.registry import Trait

aten = torch.ops.aten

unrecorded: Trait[str] = Trait("why its calls are no nodes")
unrecorded.register(
    "asks for metadata: what it answers is known, and is recorded where it is used",
    "prim::device", "sym_size.int", "sym_size", "sym_stride.int", "sym_stride", "sym_numel", "sym_storage_offset", "size",
    "stride", "storage_offset",
)  # fmt: skip
unrecorded.register(
    "a mark for a profiler",
    "profiler::_record_function_enter_new", "profiler::_record_function_exit._RecordFunction",
)  # fmt: skip

recorded_as: Trait[OpOverload] = Trait("the operator that its nodes call instead")
recorded_as.register(aten.lift_fresh_copy.default, "lift_fresh")  # a constant is copied at each run: no write can spoil it
