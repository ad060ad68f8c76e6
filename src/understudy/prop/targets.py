"""Facts about the targets of nodes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from understudy import _torch
from understudy._torch import OpOverload
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import storages_of
from understudy.graph.random_state import torch_set_default_dtype
from understudy.ops.hops import higher_order
from understudy.ops.registry import record_of

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
"""Python functions that write to nothing."""


class Target:
    """`is_direct`: the mode can be called directly, because C++ would add nothing. `writes`: it may write to a tensor.
    `changes_metadata`: it may change the metadata of a tensor in place, or of results of later nodes. `lists`: positions
    where a single number stands for a list.
    """

    __slots__ = ("changes_metadata", "is_direct", "is_operator", "lists", "returns_list", "writes")

    def __init__(self, *, writes: bool, changes_metadata: bool) -> None:
        self.writes = writes
        self.changes_metadata = changes_metadata
        self.is_direct = False
        self.is_operator = False
        self.returns_list = False
        self.lists: tuple[int, ...] = ()

    def expects_lists(self, args: tuple[object, ...]) -> bool:
        """Whether C++ would have to convert a number to a list."""
        for position in self.lists:
            if position < len(args) and isinstance(args[position], (int, float, torch.SymInt)):
                return True
        return False


_PURE = Target(writes=False, changes_metadata=False)
_UNKNOWN = Target(writes=True, changes_metadata=False)
_CHANGES_METADATA = Target(writes=True, changes_metadata=True)
_by_operator: dict[int, tuple[Any, Target]] = {}
"""By the operator's id(), because hashing it is slow; the operator is kept alive, so that the id is not reused."""


def target_of(node: Node) -> Target:
    """The facts about the target of this node."""
    if node.op != "call_function":
        if node.op == "call_method":
            return _CHANGES_METADATA if _may_move(str(node.target)) else _UNKNOWN
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
    changes_metadata = target in CHANGES_OF_DTYPES or _may_move(getattr(target, "__name__", ""))
    return _CHANGES_METADATA if changes_metadata else _UNKNOWN


def _of_operator(op: OpOverload) -> Target:
    record = record_of(op)
    target = Target(
        writes=record.is_mutable or not record.is_builtin,
        changes_metadata=record.changes_metadata or record.has_out,
    )
    target.is_operator = True
    target.is_direct = not target.writes and not record.is_composite
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


# --- global settings ------------------------------------------------------------------------------------------------

CHANGES_OF_DTYPES = frozenset({_torch.enter_autocast, _torch.exit_autocast, torch_set_default_dtype})
"""The results of later nodes depend on these calls, which are not among their inputs."""


@contextmanager
def restore_settings(interpreter: Interpreter) -> Iterator[None]:
    """At the end, restore the settings that the nodes of a graph change, and leave regions whose end was not reached."""
    is_grad_enabled, default_dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        for node, value in reversed(interpreter.env.items()):
            if node.target is _torch.enter_autocast and not any(
                user in interpreter.env for user in node.users
            ):
                _torch.exit_autocast(value)
        torch.set_grad_enabled(is_grad_enabled)
        if torch.get_default_dtype() is not default_dtype:
            torch.set_default_dtype(default_dtype)


# --- arguments -----------------------------------------------------------------------------------------------------

ATOMS = frozenset({
    int, float, bool, complex, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


def fetch(value: Any, env: dict[Node, Any]) -> Any:
    """An argument of a node, each node in it replaced by its value."""
    kind = type(value)
    if kind is Node:
        return env[value]
    if kind in ATOMS:
        return value
    if kind is tuple:
        return tuple([fetch(part, env) for part in value])
    if kind is immutable_list or kind is list:
        return [fetch(part, env) for part in value]
    if kind is immutable_dict or kind is dict:
        return {name: fetch(part, env) for name, part in value.items()}
    if kind is slice:
        return slice(fetch(value.start, env), fetch(value.stop, env), fetch(value.step, env))
    return torch.fx.node.map_aggregate(value, lambda part: env[part] if isinstance(part, Node) else part)


def direct_arguments(values: Any, env: dict[Node, object], odd: set[Node]) -> tuple[object, ...] | None:
    """Arguments for a direct call of the mode; None if one of them needs C++."""
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


# --- Subgraphs of higher-order operators are propagated too, so that their nodes have values ------------------------

Propagate = Callable[[torch.fx.GraphModule, tuple[Any, ...]], Any]


class PropagatedSubgraph(torch.nn.Module):
    """Replaces a graph module among the arguments of a higher-order operator: calling it propagates."""

    def __init__(self, inner: torch.fx.GraphModule, propagate: Propagate) -> None:
        super().__init__()
        self._inner = (inner,)  # in a tuple, so that it is not registered as a submodule
        self._propagate = propagate

    def forward(self, *args: object) -> Any:
        return self._propagate(*self._inner, args)


def takes_graphs(target: object) -> bool:
    """Whether this is a higher-order operator that runs as plain code, and calls its graphs."""
    return isinstance(target, _torch.HigherOrderOperator) and higher_order(target).run is not None


def wrap_subgraphs(args: tuple[object, ...], propagate: Propagate) -> tuple[object, ...]:
    """The arguments, graph modules replaced by ones that propagate."""
    return tuple(
        [
            PropagatedSubgraph(value, propagate) if isinstance(value, torch.fx.GraphModule) else value
            for value in args
        ]
    )


class SubgraphAnswers:
    """Memoised results of `invoke_subgraph`, by the subgraph's identifier and the specs of the operands."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self._specs: dict[Any, tuple[type, list[Any]]] = {}

    def recall(self, mode: FakeTensorMode, identifier: object, operands: tuple[object, ...]) -> Any:
        """New tensors like those of the first call, or None if there was none with such operands."""
        key = self._key(mode, identifier, operands)
        found = self._specs.get(key) if key is not None else None
        if found is None:
            return None
        kind, specs = found
        return kind([make_new(mode, spec) for spec in specs])

    def remember(
        self, mode: FakeTensorMode, identifier: object, operands: tuple[object, ...], result: Any
    ) -> None:
        """Only results that are all new tensors are stored: these can be made again from specs."""
        self.seen.add(identifier)
        key = self._key(mode, identifier, operands)
        if (
            key is None
            or type(result) not in (tuple, list)
            or not all(_is_plain(mode, part) for part in result)
        ):
            return
        storages = storages_of(result)
        if len(set(storages)) == len(result) and not set(storages) & set(storages_of(operands)):
            self._specs[key] = type(result), [part._spec for part in result]

    @staticmethod
    def _key(mode: FakeTensorMode, identifier: object, operands: tuple[Any, ...]) -> Any:
        if not all(type(value) is int or _is_plain(mode, value) for value in operands):
            return None
        return identifier, *[value if type(value) is int else value._spec for value in operands]


def _is_plain(mode: FakeTensorMode, value: object) -> bool:
    return (
        type(value) is FakeTensor
        and value.fake_mode is mode
        and value._determined is None
        and not value.requires_grad
        and not value._spec.is_symbolic
        and value._spec.layout is torch.strided
    )
