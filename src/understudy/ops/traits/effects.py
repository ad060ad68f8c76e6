"""What a call does besides giving its result."""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch

TELLING_TAGS = (torch.Tag.data_dependent_output,)
"""A value that is not read may not be checked."""
STATISTICS = ("running_mean", "running_var")
WRITES_STATISTICS = {
    "batch_norm": "training",
    "native_batch_norm": "training",
    "cudnn_batch_norm": "training",
    "miopen_batch_norm": "training",
    "_batch_norm_impl_index": "training",
    "instance_norm": "use_input_stats",
}
"""Operators that write to their statistics although their schemas do not say so, and the argument that lets them."""
CHANCE = "dropout_p"
"""Operators with such an argument draw no random numbers if it is zero, which it is by default."""


def written_values(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a call writes to."""
    values = [_argument(position, name, args, kwargs) for position, name in _torch.written_arguments(op)]
    switch = WRITES_STATISTICS.get(_name(op)) if _torch.is_builtin_namespace(op) else None
    if switch is not None and _argument_named(op, switch, args, kwargs):
        values += [_argument_named(op, name, args, kwargs) for name in STATISTICS]
    return [value for value in values if value is not None]


def may_write(op: Any) -> bool:
    """Whether there are calls of this operator that write to an argument."""
    return _torch.is_mutable(op) or (_torch.is_builtin_namespace(op) and _name(op) in WRITES_STATISTICS)


def is_pure(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether nothing but its result tells that a call was made."""
    return (
        isinstance(op, _torch.OpOverload)
        and _torch.is_builtin_namespace(op)
        and not _torch.is_mutable(op)
        and not any(tag in op.tags for tag in TELLING_TAGS)
        and not draws_numbers(op, args, kwargs)
        and not (may_write(op) and written_values(op, args, kwargs))
    )


def draws_numbers(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers: one that is not drawn changes those after it."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    return CHANCE not in _torch.argument_names(op) or _argument_named(op, CHANCE, args, kwargs) not in (None, 0)


def _name(op: Any) -> str:
    return str(op.overloadpacket.__name__)


def _argument_named(op: Any, name: str, args: Any, kwargs: Any) -> Any:
    return _argument(_torch.argument_names(op).index(name), name, args, kwargs)


def _argument(position: int, name: str, args: Any, kwargs: Any) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)
