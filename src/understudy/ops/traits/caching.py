"""Which plans may be kept, which composite operators are remembered as those that they are made of, and how an operator
appears in a recorded graph, where that is not as it was called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from understudy._torch import OpOverload
from understudy.ops.registry import Trait, record_of
from understudy.shapes.node import Shape
from understudy.spec import TensorSpec

uncacheable: Trait[str] = Trait("why its plans are not kept", of_packets=True)
uncacheable.register(
    "depends on the size of the storage", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"
)

pure: Trait[bool] = Trait("a custom operator whose answers depend on nothing but its arguments")
"""Marked by users: see `understudy.mark_pure`."""

ignores_floats: Trait[bool] = Trait("its outcomes do not depend on the values of plain floats", of_packets=True)
"""Optimizers give such operators other numbers at each step."""
for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"):
    ignores_floats.mark(name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_")
ignores_floats.mark("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")

has_recipe_if_static: Trait[bool] = Trait("composite of several operators, which are remembered for plain sizes")
has_recipe_if_static.mark(
    "linear", "matmul", "scaled_dot_product_attention", "einsum", "tensordot", "repeat_interleave.self_int", "dropout",
    "batch_norm",
)  # fmt: skip


class ViewOfNew(NamedTuple):
    """A result that is a view, by `view`, of a new tensor that nothing else refers to."""

    base: TensorSpec
    shape: Shape


whole_result: Trait[Callable[..., Any]] = Trait("result for ordinary operands, where nobody hears the operators inside it")
"""A function of specs that returns the spec of the new tensor, a `ViewOfNew`, or `NotImplemented`. It has to tell what C++
makes of tensors of one floating-point dtype, and masks, on one device, with plain sizes of at least 1."""

has_recipe: Trait[bool] = Trait("composite whose operators are remembered for symbolic sizes")
"""C++ decomposes them on every device, depending only on their arguments (and on the enabled backends of attention)."""
has_recipe.mark(
    "linear", "matmul", "scaled_dot_product_attention", "einsum", "tensordot", "repeat_interleave.self_int", "dropout",
    "layer_norm", "group_norm", "batch_norm", "cross_entropy_loss",
)  # fmt: skip

has_recipe_if_strided: Trait[bool] = Trait("the same, for tensors that are not contiguous only")
"""For contiguous tensors, C++ asks nothing about the sizes."""
has_recipe_if_strided.mark("reshape")

needs_recipe: Trait[bool] = Trait("composite that asks so much of sizes that replaying it through the dispatcher is quicker")
needs_recipe.mark("matmul", "scaled_dot_product_attention", "einsum", "tensordot", "reshape")


def _why_not_cached(op: OpOverload) -> str | None:
    if not record_of(op).is_builtin and pure.of(op) is None:
        return "custom operator not marked pure"
    if torch.Tag.inplace_view in op.tags:
        return "inplace view"  # the reason that torch's own cache reports
    return uncacheable.of(op)


uncached: Trait[str] = Trait(
    "why its plans are not kept, for any reason", derive=_why_not_cached, derived_from=(pure, uncacheable)
)


# --- recorded graphs

aten = torch.ops.aten

unrecorded: Trait[str] = Trait("why its calls are no nodes")
unrecorded.register(
    "asks for metadata: what it answers is known, and is recorded where it is used",
    "prim::device", "prim::layout", "sym_size.int", "sym_size", "sym_stride.int", "sym_stride", "sym_numel",
    "sym_storage_offset", "size", "stride", "storage_offset",
)  # fmt: skip
unrecorded.register(
    "a mark for a profiler",
    "profiler::_record_function_enter_new", "profiler::_record_function_exit._RecordFunction",
)  # fmt: skip

recorded_as: Trait[OpOverload] = Trait("the operator that its nodes call instead")
recorded_as.register(aten.lift_fresh_copy.default, "lift_fresh")  # copied at each run: no write changes it
