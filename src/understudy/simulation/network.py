"""Processes of a program that communicate: their groups, a log of collectives, and the values that travel.

    network = Network(mode, rank=3, world_size=8)      made by `init_process_group`: see `network_patches`
    network.log                                        every collective of this process, in order
    network.groups                                     its process groups by name

Stand-ins have shapes, so a collective needs no other process. Values do: small tensors of integers on which a program
decides (sizes, counts, ranks), objects, barriers. They are exchanged with `peers`, the other ranks of a rehearsed cluster.
Without peers, one process is rehearsed alone: gathered values are those of this process, others are undetermined, and a note
says so.

Which tensors carry values is decided by their dtype and size alone, so that all processes of a group decide alike.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.fake.collectives import bind_arguments, find_filled, find_sent
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.answers import choose_contents
from understudy.fake.values.determined import replace_contents
from understudy.fake.values.ranges import range_of, store_ranges
from understudy.lines import is_user_file, user_line
from understudy.ops.communication import Collective
from understudy.ops.registry import record_of
from understudy.ops.traits.ranges import ValueRange, range_of_dtype
from understudy.simulation.events import AfterCall, CollectiveEvent, Listener, WaitEvent
from understudy.simulation.steps import EndOfScript
from understudy.simulation.storages import ObservedMode

MOST_VALUES = 1 << 16
"""Elements up to which integers and booleans of a collective are exchanged."""
ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Kinds of collectives in which each process needs what all others send."""
TO_ROOT = ("gather", "reduce")
FIRST_OF_OBJECTS = {"gather": "all_gather", "scatter": "broadcast"}
"""The collective with which an exchange of objects begins, where it has another name: their sizes are sent first."""
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


class NotRehearsedError(UnderstudyError, RuntimeError):
    """A process waits for a value of one that is not rehearsed."""


class Group(NamedTuple):
    """A process group. `backend` as the program has named it, `ranks` as the world counts them."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    description: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


class MeshRecord(NamedTuple):
    """A DeviceMesh that this process is in: names and sizes of its dimensions, and its ranks in order."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(slots=True)
class CollectiveRecord:
    """One collective of one process. `peer`: the rank that sends or receives, of the kinds that have one."""

    kind: str
    group: str
    nbytes: int
    dtype: str
    line: str
    step: int = 0
    phase: str = ""
    peer: int | None = None
    is_async: bool = False
    tag: int = 0
    batch: int = 0
    """The number of the `batch_isend_irecv` that it is a part of; 0 for none."""
    is_blocking: bool = False
    """Whether what follows on the current stream waits for it."""
    operation: str = ""
    """Of a reduction: sum, max, …"""


class CreatedGroup(NamedTuple):
    """A call of `new_group`, also by processes that are not in it."""

    ranks: tuple[int, ...]
    line: str


class Meeting(NamedTuple):
    """Description of an exchange of values: its identity, and the place in the program."""

    group: Group
    key: tuple[Any, ...]
    kind: str
    line: str


class Peers(Protocol):
    """The processes of a rehearsed cluster."""

    def exchange(self, meeting: Meeting, payload: object, wanted: tuple[int, ...]) -> dict[int, Any]:
        """Give `payload` to the others, and wait for those of the `wanted` ranks. Does not wait if none is wanted."""

    def make_store(self) -> Any:
        """A store of torch.distributed that all processes share."""


@dataclass
class Network(Listener):
    """The groups of one process, and its log."""

    mode: ObservedMode
    rank: int
    world_size: int
    peers: Peers | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    log: list[CollectiveRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    created: list[CreatedGroup] = field(default_factory=list)
    outsiders: list[tuple[str, str]] = field(default_factory=list)
    """Calls on groups that this process is not in: the operation, and the line."""
    loaders: list[tuple[str, int]] = field(default_factory=list)
    """Data loaders that were iterated over: the line, and how many batches they have."""
    batch: int = 0
    """The `batch_isend_irecv` that is running."""
    batches: int = 0
    meshes: list[MeshRecord] = field(default_factory=list)
    breaks: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    """Groups along which tensors are sharded in unequal parts: their ranks, and the positions at which the size changes."""
    default_backend: str = "nccl"
    has_bound_device: bool = False
    """Whether `init_process_group` was given a `device_id`: NCCL then connects at once."""
    reduce_op: Any = None
    """The reduction of the running call: operators hold it as an opaque object."""
    handles: weakref.WeakKeyDictionary[Any, range] = field(default_factory=weakref.WeakKeyDictionary)
    """For each handle of an asynchronous call: its entries in the log."""
    card: int = 0
    """The card of the latest communicated tensors."""
    _meetings: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def add_group(self, name: str, ranks: Sequence[int], backend: str, description: str = "") -> None:
        members = tuple(ranks) or tuple(range(self.world_size))
        self.groups[name] = Group(name, members, backend, description or "")
        if name.isdigit():  # others have hashed names, and are made by their members alone
            self.created.append(CreatedGroup(members, user_line()))

    def add_mesh(self, mesh: Any) -> None:
        names, record = mesh.mesh_dim_names, None
        ranks = mesh.mesh.flatten().tolist()
        if self.rank in ranks:
            shape = tuple(mesh.mesh.shape)
            names = tuple(names) if names else tuple(f"dim{i}" for i in range(len(shape)))
            record = MeshRecord(names, shape, tuple(ranks))
        if record is not None and record not in self.meshes:
            self.meshes.append(record)

    def end(self) -> None:
        """Destroy the process groups, if the program has not done so."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def find_group(self, group: Any) -> Group:
        """From a process group of torch, its name, or the object that operators hold."""
        name = group if isinstance(group, str) else _torch.name_of_process_group(group)
        found = self.groups.get(name)
        if found is None:  # made before the network
            found = Group(name, tuple(_torch.ranks_of_process_group(name)), "")
            self.groups[name] = found
        return found

    # --- operators ---------------------------------------------------------------------------------------------------

    def follow_plan(
        self, func: Any, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> AfterCall | None:
        fact = record_of(func).collective
        if fact is None:
            return None
        exchanges = (
            func.namespace != "c10d"
        )  # for those, the handler has exchanged values before it fills tensors

        def end(args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
            self._add_to_log(fact, func, args, kwargs, result)
            if not exchanges:
                return
            filled = find_filled(func, args, kwargs, result)
            if (values := self.exchange_values(func, args, kwargs, result)) is not None:
                replace_contents(filled, values)
            else:
                store_ranges(self.guess_values(func, args, kwargs, filled), filled, is_written=False)

        return end

    def _add_to_log(
        self, fact: Collective, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        given = bind_arguments(func, args, kwargs)
        group = self.find_group(given[fact.group])
        sent, filled = find_sent(func, args, kwargs), find_filled(func, args, kwargs, result)
        sides = (filled,) if fact.kind == "scatter" else (sent, filled)
        tensors = sent or filled
        self.add(
            fact.kind, group,
            max(sum(fake._spec.numel * fake._spec.itemsize for fake in side) for side in sides),
            str(tensors[0]._spec.dtype).removeprefix("torch.") if tensors else "",
            peer=group.ranks[given[fact.root]] if fact.root else None,
            is_async=bool(given.get("async_op", func.namespace == "c10d")),
            tag=given.get("tag", 0), is_functional=func.namespace != "c10d",
            device=tensors[0]._spec.device if tensors else None,
            operation=_operation_name(self._find_operation(given)) if fact.kind in REDUCTIONS else "",
        )  # fmt: skip

    def _find_operation(self, given: dict[str, Any]) -> object:
        return given["reduce_op"] if isinstance(given.get("reduce_op"), str) else self.reduce_op

    def add(
        self,
        kind: str,
        group: Group,
        nbytes: int,
        dtype: str,
        *,
        peer: int | None = None,
        is_async: bool = False,
        tag: int = 0,
        is_functional: bool = False,
        device: torch.device | None = None,
        operation: str = "",
    ) -> None:
        """To the log."""
        if device is not None and device.type == "cuda":
            self.card = device.index or 0
        if self.mode.on_event is not None:
            ranks = group.ranks
            if kind in ("send", "recv") and peer is not None:
                ranks = min(self.rank, peer), max(self.rank, peer)
            self.mode.on_event(
                CollectiveEvent(
                    kind,
                    group.name,
                    ranks,
                    nbytes,
                    is_async,
                    is_functional,
                    len(self.log),
                    peer,
                    tag,
                    self.card,
                )
            )
        places = self.mode.places
        step, phase, _ = (0, "", "") if places is None else places.describe()
        self.log.append(
            CollectiveRecord(
                kind,
                group.name,
                nbytes,
                dtype,
                user_line(),
                step,
                phase,
                peer,
                is_async,
                tag,
                self.batch,
                is_blocking=not (is_async or is_functional),
                operation=operation,
            )
        )

    def wait_for(self, work: object) -> None:
        """The program waits for the collective of this handle."""
        for number in self.handles.pop(work, ()):
            if self.mode.on_event is not None:
                self.mode.on_event(WaitEvent(number, self.card))

    def reduce_bucket(self, group: Any, bucket: FakeTensor) -> None:
        """DistributedDataParallel reduces a bucket of gradients, in C++."""
        self.add(
            "all_reduce", self.find_group(group), bucket._spec.numel * bucket._spec.itemsize,
            str(bucket._spec.dtype).removeprefix("torch."), is_async=True, device=bucket._spec.device,
        )  # fmt: skip
        record = self.mode.find_record(bucket)
        if record is not None:
            record.category = "gradients"

    # --- values of tensors ---------------------------------------------------------------------------------------------

    def exchange_values(
        self, func: Any, args: Any, kwargs: Any, result: object = None
    ) -> list[torch.Tensor] | None:
        """What a collective fills its tensors with; None for undetermined values."""
        fact = record_of(func).collective
        assert fact is not None
        given = bind_arguments(func, args, kwargs)
        sent, filled = find_sent(func, args, kwargs), find_filled(func, args, kwargs, result)
        measured = filled if fact.kind in ("scatter", "recv") else sent
        group = self.find_group(given[fact.group])
        if fact.kind != "barrier" and not _carry_values(measured, group.size == 1) and not _is_flag(measured):
            return None
        if self.rank not in group.ranks or func.name() == "_dtensor::shard_dim_alltoall":
            return None
        root = group.ranks[given[fact.root]] if fact.root else None
        pieces = self._split(fact, given, sent, group, root)
        try:
            payloads = self._exchange(fact.kind, group, root, pieces, given.get("tag", 0))
        except EndOfScript:  # the log says in which call it was ended
            if func.namespace == "c10d":
                self._add_to_log(fact, func, args, kwargs, result)
            raise
        if payloads is None or any(payload is None for payload in payloads.values()) or not filled:
            return None
        if fact.kind in ("broadcast", "scatter", "recv") and not all(payloads.values()):
            return None  # of a root that is not run
        unpacked = {rank: [_unpack(part) for part in payload] for rank, payload in payloads.items()}
        operation = self._find_operation(given)
        with _torch.PastDispatch():
            return _combine(
                fact.kind, unpacked, group.ranks.index(self.rank), len(sent), len(filled), operation
            )

    def guess_values(
        self, func: Any, args: Any, kwargs: Any, filled: list[FakeTensor]
    ) -> tuple[ValueRange, ...]:
        """Likely values of the tensors that a collective fills, from the values that this process sends: the others run the
        same program. Unknown values have no bounds. Must be called before the tensors are filled."""
        fact = record_of(func).collective
        assert fact is not None
        given = bind_arguments(func, args, kwargs)
        if fact.kind in REDUCTIONS:
            operation = self._find_operation(given)
            factors = {"sum": self.find_group(given[fact.group]).size, "max": 1, "min": 1, "avg": 1}
            factor = factors.get(_operation_name(operation))
        else:
            factor = 1 if fact.kind in ("all_gather", "gather", "all_to_all") else None
        if factor is None:
            return ()
        likely = [range_of(fake).likely for fake in find_sent(func, args, kwargs)]
        values = [likely[i * len(likely) // len(filled)] for i in range(len(filled))]
        return tuple(
            range_of_dtype(fake._spec.dtype).expect(None if value is None else value * factor)
            for value, fake in zip(values, filled, strict=True)
        )

    def _split(
        self, fact: Collective, given: dict[str, Any], sent: list[FakeTensor], group: Group, root: int | None
    ) -> list[Any] | None:
        """What this process sends, as plain data; None if it is undetermined."""
        if fact.kind in ("broadcast", "scatter") and root != self.rank:
            return []  # what a process has before it receives is not what it receives
        values = [self._value_to_send(fake) for fake in sent]
        if any(value is None for value in values):
            return None
        with _torch.PastDispatch():
            if fact.kind == "all_to_all" and len(values) == 1 and values[0] is not None:
                sizes = given.get("input_split_sizes")
                values = list(values[0].split(list(sizes)) if sizes else values[0].chunk(group.size))
            return [_pack(value) for value in values if value is not None]

    def _value_to_send(self, fake: FakeTensor) -> torch.Tensor | None:
        value = self.mode.value_of(fake)
        return choose_contents(self.mode, fake, "numpy") if value is None else value

    def _exchange(
        self, kind: str, group: Group, root: int | None, pieces: object, tag: int
    ) -> dict[int, Any] | None:
        if self.peers is not None and group.size > 1:
            return self._meet(kind, group, root, pieces, tag)
        if group.size == 1 or (root == self.rank and kind in ("broadcast", "scatter")):
            return {self.rank: pieces}
        if kind not in ("all_gather", "gather") and not (
            kind in ("all_reduce", "reduce") and _operation_name(self.reduce_op) in ("min", "max")
        ):
            return None
        if pieces is not None and kind != "barrier":
            self.note(
                f"{user_line()}: rank {self.rank} is rehearsed alone: "
                "assuming that other ranks send the values of this one"
            )
        return dict.fromkeys(group.ranks, pieces)

    def _meet(
        self, kind: str, group: Group, root: int | None, payload: object, tag: int = 0
    ) -> dict[int, Any]:
        assert self.peers is not None
        name = (group.name, group.ranks)
        if kind in ("send", "recv"):
            assert root is not None
            pair = (self.rank, root) if kind == "send" else (root, self.rank)
            key: tuple[Any, ...] = ("pair", *name, *pair, tag)
            wanted: tuple[int, ...] = () if kind == "send" else (root,)
        else:
            key = ("all", *name)
            wanted = group.ranks if kind in ALL or (kind in TO_ROOT and root == self.rank) else ()
            if root is not None and kind not in TO_ROOT:
                wanted = (root,) if root != self.rank else ()
        number = self._meetings[key]
        self._meetings[key] += 1
        meeting = Meeting(group, (*key, number), kind, user_line())
        payloads = self.peers.exchange(meeting, payload, wanted)
        if root == self.rank and kind not in TO_ROOT:
            payloads = {self.rank: payload}
        return payloads

    # --- objects -------------------------------------------------------------------------------------------------------

    def exchange_objects(self, kind: str, group: Group, root: int | None, payload: object) -> dict[int, Any]:
        """Exchange pickled objects. Return those of the sending ranks: all, or the root."""
        if group.size == 1:
            return {self.rank: payload}
        if self.peers is not None:
            try:
                return self._meet(kind, group, root, payload)
            except EndOfScript:  # as above
                first = FIRST_OF_OBJECTS.get(kind, kind)
                is_to_all = first == "all_gather"
                self.add(
                    first,
                    group,
                    8 * (group.size if is_to_all else 1),
                    "int64",
                    peer=None if is_to_all else root,
                )
                raise
        if kind in ("recv", "scatter") and root != self.rank:
            raise NotRehearsedError(
                f"rank {self.rank} waits for an object of rank {root}, which is not rehearsed; rehearse all ranks: "
                f"understudy run --nproc-per-node {self.world_size} script.py"
            )
        if kind in ("all_gather", "gather", "broadcast"):
            self.note(
                f"{user_line()}: rank {self.rank} is rehearsed alone: assuming that objects of other ranks equal its own"
            )
        return dict.fromkeys(group.ranks, payload)

    def make_store(self) -> Any:
        store = _torch.make_fake_store()  # registers the fake process group, too
        return store if self.peers is None else self.peers.make_store()


# --- values ----------------------------------------------------------------------------------------------------------


def _carry_values(fakes: list[FakeTensor], is_alone: bool) -> bool:
    """Whether a program may decide by their values: a few integers or booleans; floats, too, in a group of one process."""
    return bool(fakes) and all(
        (is_alone or not (spec.is_floating_point or spec.is_complex)) and not spec.is_symbolic and spec.sparse is None
        for spec in (fake._spec for fake in fakes)
    ) and sum(fake._spec.numel for fake in fakes) <= MOST_VALUES  # fmt: skip


FLAG_SENDERS = ("torch.distributed.algorithms.join", "torch.nn.parallel.distributed")
"""Modules of torch that count ranks with floats: those that have joined, as their data has ended."""


def _is_flag(fakes: list[FakeTensor]) -> bool:
    """Whether this is a float by which torch itself decides. A loss is sent by the program, or by another module."""
    if len(fakes) != 1 or fakes[0]._spec.is_symbolic or fakes[0]._spec.numel != 1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in FLAG_SENDERS:
            return True
        if is_user_file(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return False


def _pack(value: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    whole = value.contiguous().clone()
    return str(whole.dtype).removeprefix("torch."), tuple(whole.shape), _torch.bytes_of(whole)


def _unpack(packed: tuple[str, tuple[int, ...], bytes]) -> torch.Tensor:
    name, shape, data = packed
    with _torch.PastDispatch():
        dtype = getattr(torch, name)
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _operation_name(operation: object) -> str:
    """Return the name of a reduction of torch.distributed or of functional collectives."""
    kind = getattr(operation, "op", operation)
    return str(getattr(kind, "name", kind)).lower()


def _reduce(values: list[torch.Tensor], operation: object) -> torch.Tensor:
    name, stacked = _operation_name(operation), torch.stack(values)
    if name in ("min", "max"):
        return stacked.amin(0) if name == "min" else stacked.amax(0)
    if name in ("band", "bor", "bxor"):
        total = values[0]
        for value in values[1:]:
            total = total & value if name == "band" else total | value if name == "bor" else total ^ value
        return total
    if name == "product":
        return stacked.prod(0).to(values[0].dtype)
    summed = stacked.sum(0)
    return (summed // len(values) if name == "avg" else summed).to(values[0].dtype)


def _combine(
    kind: str,
    payloads: dict[int, list[torch.Tensor]],
    position: int,
    sent: int,
    filled: int,
    operation: object,
) -> list[torch.Tensor] | None:
    """What this process receives, for each tensor that is filled. `position`: of this process in the group."""
    parts = list(payloads.values())
    if kind in ("all_reduce", "reduce"):
        return [_reduce([part[i] for part in parts], operation) for i in range(filled)]
    if kind in ("broadcast", "recv"):
        return parts[0]
    if kind == "scatter":
        return [parts[0][position]]
    if kind in ("all_gather", "gather"):
        if filled == sent:
            return [torch.cat([part[i].flatten() for part in parts]) for i in range(sent)]
        return [part[i] for i in range(sent) for part in parts]
    if kind == "all_to_all":
        received = [part[position] for part in parts]
        return received if filled > 1 else [torch.cat([value.flatten() for value in received])]
    if kind == "reduce_scatter":
        if sent == filled:
            return [
                _reduce([part[i].flatten().chunk(len(parts))[position] for part in parts], operation)
                for i in range(sent)
            ]
        return [_reduce([part[position] for part in parts], operation)]
    return None


class _Cluster:
    """`peers`: the other processes of this one, set in each rank of a rehearsed cluster. `can_start`: whether the runner of
    this program starts ranks that it asks for."""

    peers: Peers | None = None
    can_start = False


CLUSTER = _Cluster()


def network_of(mode: object) -> Network | None:
    """Return the network of the mode in which a program runs, once it has a process group."""
    found = getattr(mode, "network", None)
    return found if isinstance(found, Network) else None
