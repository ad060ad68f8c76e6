"""Python numbers in the place of tensors: eager makes a tensor of each, which the dispatcher shows as the number again."""

from __future__ import annotations

import torch

from understudy._torch import OpOverload
from understudy.ops.registry import Trait, record_of

saves_number: Trait[bool] = Trait("autograd keeps the number that is given for its second tensor")
saves_number.mark("mul.Tensor", "mul_.Tensor", "div.Tensor", "div_.Tensor", "div.Tensor_mode", "div_.Tensor_mode")

NUMBER_SIZES: dict[type, int] = {float: 8, int: 8, bool: 1, complex: 16}


def _find_positions(op: OpOverload) -> tuple[int, ...] | None:
    if not record_of(op).is_builtin:
        return ()
    return tuple(
        position
        for position, argument in enumerate(op._schema.arguments)
        if isinstance(argument.type, torch.TensorType) and not argument.kwarg_only
    )


tensor_positions: Trait[tuple[int, ...]] = Trait("positions of arguments that are tensors", derive=_find_positions)
