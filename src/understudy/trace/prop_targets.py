"""What is known of the target of a node before it is called."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from understudy import _torch

PURE_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    [
        getattr(operator, name)
        for name in (
            "getitem add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor not_ "
            "invert matmul lshift rshift"
        ).split()
    ]
    + [getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")]
    + [
        torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite, torch.sym_sum,
    ]
)  # fmt: skip
"""Functions that are no operators and write to nothing."""


class Target:
    """`is_direct`: the mode can be asked without a way through C++, which would have nothing to add. `writes`: it may
    write to a tensor. `moves`: it may change a tensor's metadata in place. `lists`: positions where a lone number
    stands for a list.
    """

    __slots__ = ("is_direct", "is_operator", "lists", "moves", "returns_list", "writes")

    def __init__(self, *, writes: bool, moves: bool) -> None:
        self.writes = writes
        self.moves = moves
        self.is_direct = False
        self.is_operator = False
        self.returns_list = False
        self.lists: tuple[int, ...] = ()

    def expects_lists(self, args: tuple[Any, ...]) -> bool:
        """Whether C++ would have to make a list of a number."""
        for position in self.lists:
            if position < len(args) and isinstance(args[position], (int, float, torch.SymInt)):
                return True
        return False


_PURE = Target(writes=False, moves=False)
_UNKNOWN = Target(writes=True, moves=False)
_MOVING = Target(writes=True, moves=True)
_by_operator: dict[int, tuple[Any, Target]] = {}
"""By the operator's identity, as its hash is a Python function; the operator is kept, so that nothing else gets it."""


def target_of(node: Node) -> Target:
    """What is known of the target of this node."""
    if node.op != "call_function":
        if node.op == "call_method":
            return _MOVING if _may_move(str(node.target)) else _UNKNOWN
        return _UNKNOWN if node.op == "call_module" else _PURE
    target: Any = node.target
    found = _by_operator.get(id(target))
    if found is not None:
        return found[1]
    if isinstance(target, _torch.OpOverload):
        known = _of_operator(target)
        _by_operator[id(target)] = target, known
        return known
    if target in PURE_FUNCTIONS:
        return _PURE
    return _MOVING if _may_move(getattr(target, "__name__", "")) else _UNKNOWN


def _of_operator(op: Any) -> Target:
    target = Target(
        writes=_torch.is_mutable(op) or not _torch.is_builtin_namespace(op),
        moves=torch.Tag.inplace_view in op.tags or _torch.has_out(op),
    )
    target.is_operator = True
    target.is_direct = not target.writes and not _torch.has_composite_kernel(op)
    target.lists = _torch.number_list_positions(op)
    target.returns_list = _torch.returns_list(op)
    return target


def _may_move(name: str) -> bool:
    """Whether a function or method of this name changes metadata in place."""
    if not name.endswith("_") or name.startswith("_"):
        return False
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.inplace_view in getattr(packet, overload).tags for overload in packet.overloads()
    )


# --- arguments -----------------------------------------------------------------------------------------------------

ATOMS = frozenset({
    int, float, bool, complex, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


def fetched(value: Any, env: dict[Node, Any]) -> Any:
    """An argument of a node, each node in it replaced by its value."""
    kind = type(value)
    if kind is Node:
        return env[value]
    if kind in ATOMS:
        return value
    if kind is tuple:
        return tuple([fetched(part, env) for part in value])
    if kind is immutable_list or kind is list:
        return [fetched(part, env) for part in value]
    if kind is immutable_dict or kind is dict:
        return {name: fetched(part, env) for name, part in value.items()}
    if kind is slice:
        return slice(fetched(value.start, env), fetched(value.stop, env), fetched(value.step, env))
    return torch.fx.node.map_aggregate(value, lambda part: env[part] if isinstance(part, Node) else part)


def direct_arguments(values: Any, env: dict[Node, Any], odd: set[Node]) -> tuple[Any, ...] | None:
    """Arguments for a call without C++; None if one of them needs its attention."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Node:
            if value in odd:
                return None
            found.append(env[value])
        elif kind in ATOMS:
            found.append(value)
        elif kind is immutable_list or kind is tuple or kind is list:
            parts = direct_arguments(value, env, odd)
            if parts is None:
                return None
            found.append(parts if kind is tuple else list(parts))
        else:
            return None
    return tuple(found)
