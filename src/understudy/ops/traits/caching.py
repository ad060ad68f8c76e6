"""Which plans may be cached, which composite operators have recipes, and which operators appear in a recorded graph as
other calls."""

from __future__ import annotations

from typing import NamedTuple

import torch

from understudy.ops.registry import OpFacts, derives
from understudy.shapes.node import Shape
from understudy.spec import TensorSpec

uncacheable = OpFacts.uncacheable
uncacheable.register(
    "depends on the size of the storage", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"
)

pure = OpFacts.pure

ignores_floats = OpFacts.ignores_floats
for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"):
    ignores_floats.mark(name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_")
ignores_floats.mark("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")

has_recipe_if_static = OpFacts.has_recipe_if_static
has_recipe_if_static.mark(
    "linear", "matmul", "scaled_dot_product_attention", "einsum", "tensordot", "repeat_interleave.self_int", "dropout",
    "batch_norm",
)  # fmt: skip


class ViewOfNew(NamedTuple):
    """A result that is a view, by `view`, of a new tensor that nothing else refers to."""

    base: TensorSpec
    shape: Shape


whole_result = OpFacts.whole_result

has_recipe = OpFacts.has_recipe
has_recipe.mark(
    "linear", "matmul", "scaled_dot_product_attention", "einsum", "tensordot", "repeat_interleave.self_int", "dropout",
    "layer_norm", "group_norm", "batch_norm", "cross_entropy_loss",
)  # fmt: skip

has_recipe_if_strided = OpFacts.has_recipe_if_strided
has_recipe_if_strided.mark("reshape")

needs_recipe = OpFacts.needs_recipe
needs_recipe.mark("matmul", "scaled_dot_product_attention", "einsum", "tensordot", "reshape")


@derives(OpFacts.uncached)
def _why_not_cached(record: OpFacts) -> str | None:
    if not record.is_builtin and not record.pure:
        return "custom operator not marked pure"
    if record.changes_metadata:
        return "inplace view"  # the reason that torch's own cache reports
    return record.uncacheable


# --- recorded graphs

aten = torch.ops.aten

unrecorded = OpFacts.unrecorded
unrecorded.register(
    "reads metadata, which is known, and recorded where it is used",
    "prim::device", "prim::layout", "sym_size.int", "sym_size", "sym_stride.int", "sym_stride", "sym_numel",
    "sym_storage_offset", "size", "stride", "storage_offset",
)  # fmt: skip
unrecorded.register(
    "a mark for a profiler",
    "profiler::_record_function_enter_new", "profiler::_record_function_exit._RecordFunction",
)  # fmt: skip

recorded_as = OpFacts.recorded_as
recorded_as.register(aten.lift_fresh_copy.default, "lift_fresh")  # copied at each run: no write changes it

AS_SYMBOLS = {
    aten.size.default: aten.sym_size.default,
    aten.size.int: aten.sym_size.int,
    aten.stride.default: aten.sym_stride.default,
    aten.stride.int: aten.sym_stride.int,
}
"""Operators whose results C++ converts to plain numbers → the operators that return symbols."""
