"""A recorded block as a plan: what it takes to write it into the graph once more, prepared once."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value of the recording is an argument: the number under which this run's node is found."""

    slot: int


@dataclass(slots=True)
class Val:
    """A tensor that a node gives: its spec, the number of its storage, and whether it can be made the short way."""

    spec: Any
    storage: int
    is_short: bool


class Call(NamedTuple):
    """A call of a torch function: how many of its kind come before it in the block."""

    func: Any
    name: str
    kind: str
    before: int


class Step(NamedTuple):
    """A node, with places in the stead of what differs from run to run."""

    slot: int
    own: int
    name: str
    target: Any
    args: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    kwargs: dict[str, Any]
    is_nested: bool
    meta: dict[str, Any]
    trace: int
    call: int
    val: Any


class Plan:
    """The steps of a block, and how to follow them."""

    def __init__(self, known: Recording) -> None:
        self._known = known
        nodes = dict.fromkeys((*known.inputs, *filter(None, known.own), *known.nodes))
        self._slots = {node: Place(i) for i, node in enumerate(nodes)}
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
            return Step(slot, self._own_of[node], "", None, (), (), {}, False, {}, NONE, NONE, None)
        args, kwargs, places = node.args, node.kwargs, []
        for i, part in enumerate(args):
            if type(part) is Node and part in self._slots:
                places.append((i, self._slots[part].slot))
        is_nested = len({args[i] for i, _ in places}) < sum(part in self._slots for part in node.all_input_nodes)
        if is_nested:
            args, kwargs = map_aggregate((args, kwargs), self._placed)
        meta = {name: value for name, value in node.meta.items() if name not in DIFFERING}
        val = node.meta.get("val")
        return Step(
            slot, NONE, _base_name(node.target), node.target, tuple(args), tuple(places), kwargs, is_nested, meta,
            self._number(self._traces, node.meta.get("stack_trace")), self._call(node.meta.get("torch_fn")),
            self._val(val) if type(val) is FakeTensor else map_aggregate(val, self._val),
        )  # fmt: skip

    def _placed(self, part: Any) -> Any:
        return self._slots.get(part, part) if type(part) is Node else part

    def _val(self, part: Any) -> Any:
        if type(part) is not FakeTensor:
            return part
        storage = self._storage(part)
        return Val(part._spec, storage, storage not in self._others and can_be_made_again(part._spec))

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
        slots: list[Any] = [None] * len(self._slots)
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
        for slot, own, name, target, args, places, kwargs, is_nested, same, trace, call, val in self._steps:
            if own != NONE:
                slots[slot] = node_of(tensors[own])
                continue
            if is_nested:
                args, kwargs = _filled((args, kwargs), slots)
            elif places:
                filled = list(args)
                for position, other in places:
                    filled[position] = slots[other]
                args = tuple(filled)
            node = slots[slot] = append(name, target, args, kwargs)
            meta = node.meta
            if trace != NONE:
                meta["stack_trace"] = traces[trace]
            if call != NONE:
                meta["torch_fn"] = calls[call]
            if type(val) is not Val:
                if val is not None:
                    meta["val"] = _made_all(mode, val, bases)
            elif val.is_short and not is_inference:
                base = bases[val.storage]
                fake = meta["val"] = make_again(mode, val.spec, base)
                if base is None:
                    bases[val.storage] = fake
            else:
                meta["val"] = _made(mode, val, bases)
            meta.update(same)
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


def _base_name(target: Any) -> str:
    return str(target.overloadpacket.__name__ if isinstance(target, _torch.OpOverload) else target.__name__)


def described(func: Any) -> tuple[str, str]:
    """A torch function as nodes name it."""
    name = getattr(func, "__name__", str(func))
    return name, f"{type(func).__name__}.{name}"
