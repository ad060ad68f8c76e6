"""Which plans may be kept, and which composite operators are remembered as the operators that they are made of."""

from __future__ import annotations

import torch

from understudy._torch import OpOverload
from understudy.ops.registry import Trait, record_of

uncacheable: Trait[str] = Trait("why its plans are not kept", of_packets=True)
uncacheable.register("depends on the size of the storage", "as_strided", "as_strided_")

pure: Trait[bool] = Trait("a custom operator whose answers depend on nothing but its arguments")
"""Marked by users: see `understudy.mark_pure`."""

remembered: Trait[bool] = Trait("composite whose operators are remembered for symbolic sizes")
"""C++ breaks them up on every device, without looking at more than their arguments (and the backends of attention)."""
remembered.mark(
    "linear", "matmul", "scaled_dot_product_attention", "einsum", "tensordot", "repeat_interleave.self_int", "dropout",
    "layer_norm", "group_norm", "batch_norm", "cross_entropy_loss",
)  # fmt: skip

remembered_if_strided: Trait[bool] = Trait("the same, for tensors that are not contiguous only")
"""C++ has nothing to ask of a contiguous one."""
remembered_if_strided.mark("reshape")

asks_much: Trait[bool] = Trait("composite that asks so much of sizes that replaying it through the dispatcher is quicker")
asks_much.mark("matmul", "scaled_dot_product_attention", "einsum", "tensordot", "reshape")


def why_not_cached(op: OpOverload) -> str | None:
    """The reason not to keep the plans of this operator, or None."""
    if not record_of(op).is_builtin and pure.of(op) is None:
        return "custom operator not marked pure"
    if torch.Tag.inplace_view in op.tags:
        return "inplace view"  # what torch's own cache calls it
    return uncacheable.of(op)
