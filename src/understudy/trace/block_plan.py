"""A recorded block as a plan: what it takes to write it into the graph once more, prepared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import can_be_made_again, make_again, make_new, make_view
from understudy.fake.tensor import FakeTensor

if TYPE_CHECKING:
    from understudy.trace.blocks import Recording
    from understudy.trace.tracer import PythonKeyTracer

NONE = -1
DIFFERING = ("stack_trace", "torch_fn", "val")
AGGREGATES = (list, tuple, dict, slice)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value of the recording is an argument: the number under which this run's node is found."""

    slot: int


@dataclass(slots=True)
class Val:
    """A tensor that a node gives: its spec, and the number of its storage."""

    spec: Any
    storage: int


class Call(NamedTuple):
    """A call of a torch function: how many of its kind come before it in the block."""

    func: Any
    name: str
    kind: str
    before: int


class Step(NamedTuple):
    """A node, without what differs from run to run."""

    slot: int
    own: int
    """Which of the block's own tensors it reads, NONE for a call."""
    name: str
    target: Any
    arguments: Callable[[list[Any]], tuple[Any, ...]]
    """Picks the arguments of the call out of the values of a run."""
    kwargs: dict[str, Any]
    has_places: bool
    """Whether there are any among the kwargs."""
    meta: dict[str, Any]
    trace: int
    call: int
    vals: Any
    spec: Any
    """If it gives one tensor that can be made the short way: its spec, and the number of its storage."""
    storage: int


class Plan:
    """The steps of a block, and how to follow them."""

    def __init__(self, known: Recording) -> None:
        self._known = known
        nodes = dict.fromkeys((*known.inputs, *filter(None, known.own), *known.nodes))
        self._slots = {node: Place(i) for i, node in enumerate(nodes)}
        self._values: list[Any] = [None] * len(nodes)  # behind them, arguments that are the same in every run
        self._storages: dict[int, int] = {}
        self._given = [self._storage(tensor) for tensor in known.tensors]
        self._outside = {self._storage(val): val for val in known.outside}
        self._others = {*self._given, *self._outside}
        self._traces: dict[str, int] = {}
        self._calls: dict[tuple[str, str], int] = {}
        self._functions = {described(func): func for func in known.advance}
        self._call_list: list[Call] = []
        self._own_of = {node: i for i, node in enumerate(known.own) if node is not None}
        inside = set(known.nodes)
        self._read_before = [(self._slots[node].slot, i) for node, i in self._own_of.items() if node not in inside]
        self._steps = list(map(self._step, known.nodes))
        self._cut = len(known.prefix)

    # --- preparing -----------------------------------------------------------------------------------------------

    def _step(self, node: Node) -> Step:
        slot = self._slots[node].slot
        if node.op == "get_attr":
            return Step(slot, self._own_of[node], "", None, _none_at_all, {}, False, {}, NONE, NONE, None, None, NONE)
        val = node.meta.get("val")
        vals: Any = map_aggregate(val, self._val)
        is_short = type(vals) is Val and vals.storage not in self._others and can_be_made_again(vals.spec)
        kwargs = map_aggregate(node.kwargs, self._placed) if node.kwargs else node.kwargs
        return Step(
            slot, NONE, _base_name(node.target), node.target, self._arguments(node.args), kwargs, _has_places(kwargs),
            {name: value for name, value in node.meta.items() if name not in DIFFERING},
            self._number(self._traces, node.meta.get("stack_trace")), self._call(node.meta.get("torch_fn")),
            vals, vals.spec if is_short else None, vals.storage if is_short else NONE,
        )  # fmt: skip

    def _arguments(self, args: tuple[Any, ...]) -> Callable[[list[Any]], tuple[Any, ...]]:
        placed = [map_aggregate(part, self._placed) for part in args]
        if any(isinstance(part, AGGREGATES) and _has_places(part) for part in placed):
            return lambda values: tuple(_filled(placed, values))
        positions = [part.slot if type(part) is Place else self._same_in_all(part) for part in placed]
        if len(positions) == 1:
            (position,) = positions
            return lambda values: (values[position],)
        return itemgetter(*positions) if positions else _none_at_all

    def _same_in_all(self, argument: Any) -> int:
        self._values.append(argument)
        return len(self._values) - 1

    def _placed(self, part: Any) -> Any:
        return self._slots.get(part, part) if type(part) is Node else part

    def _val(self, part: Any) -> Any:
        if type(part) is not FakeTensor:
            return part
        return Val(part._spec, self._storage(part))

    def _storage(self, tensor: torch.Tensor) -> int:
        return self._number(self._storages, _torch.storage_id(tensor))

    @staticmethod
    def _number(numbers: dict[Any, int], key: Any) -> int:
        return NONE if key is None else numbers.setdefault(key, len(numbers))

    def _call(self, call: tuple[str, str] | None) -> int:
        if call is not None and call not in self._calls:
            name, _, number = call[0].rpartition("_")
            func = self._functions.get((name, call[1]))
            before = int(number) - self._known.counts.get(func, 0)
            self._call_list.append(Call(func, name, call[1], before))
        return self._number(self._calls, call)

    # --- following -----------------------------------------------------------------------------------------------

    def follow(
        self, tracer: PythonKeyTracer, mode: FakeTensorMode, given: list[FakeTensor], tensors: list[torch.Tensor]
    ) -> list[Any]:
        """Write the block down for these inputs and tensors of its own; gives the leaves of its result."""
        slots = self._values.copy()
        for node, fake in zip(self._known.inputs, given, strict=True):
            slots[self._slots[node].slot] = tracer.node_of_tensor(fake)
        node_of = tracer.constants.node_of
        for slot, i in self._read_before:
            slots[slot] = node_of(tensors[i])
        bases: list[Any] = [None] * len(self._storages)
        for storage, val in self._outside.items():
            bases[storage] = val
        for storage, tensor in zip(self._given, (*given, *tensors), strict=True):
            bases[storage] = tensor
        traces, calls = self._written_traces(tracer), self._numbered_calls(tracer)
        append, is_inference = tracer.appender().call, torch.is_inference_mode_enabled()
        for slot, own, name, target, arguments, kwargs, has_places, same, trace, call, vals, spec, storage in self._steps:
            if own != NONE:
                slots[slot] = node_of(tensors[own])
                continue
            if has_places:
                kwargs = _filled(kwargs, slots)
            node = slots[slot] = append(name, target, arguments(slots), kwargs)
            meta = node.meta
            meta.update(same)
            if trace != NONE:
                meta["stack_trace"] = traces[trace]
            if call != NONE:
                meta["torch_fn"] = calls[call]
            if spec is not None and not is_inference:
                base = bases[storage]
                fake = meta["val"] = make_again(mode, spec, base)
                if base is None:
                    bases[storage] = fake
            elif vals is not None:
                meta["val"] = _made_all(mode, vals, bases)
        return self._results(tracer, mode, slots, given)

    def _written_traces(self, tracer: PythonKeyTracer) -> list[str]:
        """The lines around a block are its own, those inside are the same each time."""
        prefix = tracer.node_meta.stack_trace()
        return [prefix + trace[self._cut :] for trace in self._traces]

    def _numbered_calls(self, tracer: PythonKeyTracer) -> list[tuple[str, str]]:
        counts = tracer.torch_fn_counts
        calls = [
            (f"{call.name}_{counts.get(call.func, 0) + call.before}", call.kind) for call in self._call_list
        ]
        for func, count in self._known.advance.items():
            counts[func] = counts.get(func, 0) + count
        return calls

    def _results(
        self, tracer: PythonKeyTracer, mode: FakeTensorMode, slots: list[Any], given: list[FakeTensor]
    ) -> list[Any]:
        made: dict[Node, Any] = dict(zip(self._known.inputs, given, strict=True))
        for leaf in self._known.result:
            if isinstance(leaf, Node) and leaf not in made:
                node = slots[self._slots[leaf].slot]
                val = node.meta["val"]
                made[leaf] = make_view(mode, val, val._spec)
                tracer.remember(made[leaf], node)
        return [made[leaf] if isinstance(leaf, Node) else leaf for leaf in self._known.result]


def _made(mode: FakeTensorMode, val: Val, bases: list[Any]) -> FakeTensor:
    """A stand-in on a storage of its own, or of what its storage stands for now."""
    base = bases[val.storage]
    if base is None:
        base = bases[val.storage] = make_new(mode, val.spec)
        return base
    return make_view(mode, base, val.spec)


def _made_all(mode: FakeTensorMode, vals: Any, bases: list[Any]) -> Any:
    def made(part: Any) -> Any:
        return _made(mode, part, bases) if type(part) is Val else part

    return map_aggregate(vals, made)


def _filled(arguments: Any, slots: list[Any]) -> Any:
    """Arguments with the nodes of this run in their places."""

    def filled(part: Any) -> Any:
        return slots[part.slot] if type(part) is Place else part

    return map_aggregate(arguments, filled)


def _has_places(part: Any) -> bool:
    found: list[Any] = []

    def note(leaf: Any) -> None:
        if type(leaf) is Place:
            found.append(leaf)

    map_aggregate(part, note)
    return bool(found)


def _none_at_all(values: list[Any]) -> tuple[Any, ...]:
    return ()


def _base_name(target: Any) -> str:
    return str(target.overloadpacket.__name__ if isinstance(target, _torch.OpOverload) else target.__name__)


def described(func: Any) -> tuple[str, str]:
    """A torch function as nodes name it."""
    name = getattr(func, "__name__", str(func))
    return name, f"{type(func).__name__}.{name}"
