"""Values that are made on first access: most metadata of a large graph, and most stand-ins of parameters, are never read.

    LazyMeta            the metadata of a node; pending values are made by a source on first access
    ArgumentSlots       the arguments of recorded nodes, with slots for what differs when they are written again
    RecordedCalls       the torch functions behind recorded nodes, counted again when they are written again
    LazyParameterDict   the parameters of a borrowed module; each stand-in is made on first access
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch.fx import Node

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import snapshot
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.capture.constants import Constants


from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from torch.fx.node import map_aggregate

NOT_GIVEN: Any = object()


class LazyDict(dict[str, Any]):
    """A dict in which some values are pending: every access makes the value first.

    It overrides every method that returns values. `__iter__` is overridden because Python copies a dict (`dict(table)`,
    `{**table}`, `update`) without calling any method, unless its class overrides `__iter__`.
    """

    __slots__ = ()
    pending: type
    """The type of the placeholders of pending values."""

    def _make(self, pending: Any) -> Any:
        raise NotImplementedError

    def make_all(self) -> None:
        """Make all values."""
        for key, value in list(dict.items(self)):
            if type(value) is self.pending:
                self[key] = self._make(value)

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if type(value) is self.pending:
            value = self[key] = self._make(value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = dict.get(self, key, default)
        return self[key] if type(value) is self.pending else value

    def pop(self, key: str, default: object = NOT_GIVEN) -> Any:
        self.make_all()
        return dict.pop(self, key) if default is NOT_GIVEN else dict.pop(self, key, default)

    def popitem(self) -> tuple[str, object]:
        self.make_all()
        return dict.popitem(self)

    def setdefault(self, key: str, default: object = None) -> Any:
        self.make_all()
        return dict.setdefault(self, key, default)

    def values(self) -> Any:
        self.make_all()
        return dict.values(self)

    def items(self) -> Any:
        self.make_all()
        return dict.items(self)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __eq__(self, other: object) -> bool:
        self.make_all()
        return dict.__eq__(self, other)

    __hash__ = None

    def __repr__(self) -> str:
        self.make_all()
        return dict.__repr__(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def copy(self) -> Any:
        return dict(self)

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickled and deep-copied as a plain dict."""
        return dict, (dict(self),)


class Pending:
    """The placeholder of a metadata entry, such as `val`: its kind, and its number among those of its kind."""

    __slots__ = ("kind", "number")

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.number = number


class LazySource(Protocol):
    """Makes pending values."""

    def make(self, pending: Pending) -> Any:
        """Returns the same object each time, if it is a tensor."""


class LazyMeta(LazyDict):
    """The `meta` of a node, with pending values."""

    __slots__ = ("source",)
    pending = Pending
    source: LazySource

    def _make(self, pending: Pending) -> Any:
        return self.source.make(pending)

    def copy(self) -> Any:
        """A dict that shares the values, including pending ones."""
        other = LazyMeta()
        for key in self:
            dict.__setitem__(other, key, dict.__getitem__(self, key))
        other.source = self.source
        return other


# --- Recorded nodes as templates: their arguments, with slots for what differs when they are written again ------------

AGGREGATES = (list, tuple, dict, slice)
PLAIN = frozenset({int, bool, float, type(None)})


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """Marks an argument that is a node of the recording: the slot of this run's node."""

    slot: int


class ArgumentSlots:
    """The nodes whose counterparts differ between runs, each with a slot in the list of a run's values."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._slots = {node: ArgumentSlot(i) for i, node in enumerate(nodes)}
        self.values: list[Any] = [None] * len(self._slots)
        """To be copied for each run. The slots are followed by the arguments that are the same in every run."""

    def __getitem__(self, node: Node) -> int:
        return self._slots[node].slot

    def select(self, args: tuple[Any, ...]) -> Callable[[list[Any]], tuple[Any, ...]]:
        """A function that selects these arguments of a call from the values of a run."""
        positions = []
        for part in args:
            place = self._slots.get(part) if type(part) is Node else None
            if place is not None:
                positions.append(place.slot)
            elif isinstance(part, AGGREGATES) and self._holds_nodes(part):
                placed = map_aggregate(args, self._mark)
                return lambda values: tuple(fill_slots(placed, values))
            else:  # the same in all runs
                positions.append(len(self.values))
                self.values.append(part)
        if len(positions) == 1:
            (position,) = positions
            return lambda values: (values[position],)
        return itemgetter(*positions) if positions else no_arguments

    def mark(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Keyword arguments with slots in the place of nodes, and whether there are any."""
        if not kwargs:
            return kwargs, False
        marked: Any = map_aggregate(kwargs, self._mark)
        return marked, _has_slots(marked)

    def _holds_nodes(self, aggregate: Any) -> bool:
        is_flat = isinstance(aggregate, (list, tuple)) and PLAIN.issuperset(map(type, aggregate))
        return not is_flat and _has_slots(map_aggregate(aggregate, self._mark))

    def _mark(self, part: object) -> Any:
        return self._slots.get(part, part) if type(part) is Node else part


def fill_slots(arguments: Any, values: list[Any]) -> Any:
    """Arguments with the nodes of this run in their slots."""

    def fill(part: object) -> Any:
        return values[part.slot] if type(part) is ArgumentSlot else part

    return map_aggregate(arguments, fill)


def _has_slots(part: Any) -> bool:
    found: list[Any] = []

    def note(leaf: object) -> None:
        if type(leaf) is ArgumentSlot:
            found.append(leaf)

    map_aggregate(part, note)
    return bool(found)


def no_arguments(values: list[Any]) -> tuple[Any, ...]:
    return ()


def base_name(target: Any) -> str:
    """The name of a node that calls this function, before it is numbered."""
    return str(target.overloadpacket.__name__ if isinstance(target, _torch.OpOverload) else target.__name__)


# --- `torch_fn` of nodes: the torch function behind a call, and how often it was called before ----------------------------


def describe_function(func: object) -> tuple[str, str]:
    """The name of a torch function in node metadata."""
    name = getattr(func, "__name__", str(func))
    return name, f"{type(func).__name__}.{name}"


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a torch function, and the number of calls of that function before it in the recording."""

    func: Any
    name: str
    kind: str
    before: int

    def number(self, counts: dict[Any, int]) -> tuple[str, str]:
        """The metadata of this call, where each function was called so often before."""
        return f"{self.name}_{counts.get(self.func, 0) + self.before}", self.kind


def count_since(before: dict[Any, int], after: dict[Any, int]) -> dict[Any, int]:
    """How often each function was called in between."""
    return {func: count - before.get(func, 0) for func, count in after.items() if count != before.get(func, 0)}


class RecordedCalls:
    """How often each torch function was called before a recording, and in it."""

    def __init__(self, before: dict[Any, int], advance: dict[Any, int]) -> None:
        self._before, self.advance = before, advance
        self._functions = {describe_function(func): func for func in advance}

    def read(self, call: tuple[str, str]) -> FunctionCall:
        """The call of a node of the recording, from its metadata."""
        name, _, number = call[0].rpartition("_")
        func = self._functions.get((name, call[1]))
        return FunctionCall(func, name, call[1], int(number) - self._before.get(func, 0))

    def count_again(self, counts: dict[Any, int]) -> dict[Any, int]:
        """Count the calls of the recording once more; returns the counts before."""
        before = counts.copy()
        for func, count in self.advance.items():
            counts[func] = counts.get(func, 0) + count
        return before


# --- Parameters of borrowed modules: each stand-in is made on first access ----------------------------------

VAL = Pending("val", 0)


@final
class LazyParameter:
    """A tensor of a module, with its spec but without a stand-in. Replayed layers need no more than that."""

    __slots__ = ("_owner", "_val", "fake", "node", "real", "requires_grad", "spec")

    def __init__(self, owner: LazyParameters, real: torch.Tensor, spec: TensorSpec) -> None:
        self._owner = owner
        self.real = real
        self.spec = spec
        self.requires_grad = real.requires_grad
        self.fake: FakeTensor | None = None
        self._val: torch.Tensor | None = None
        self.node: Node | None = None
        """The node that reads it, if that was recorded before there was a stand-in."""

    def stand_in(self) -> FakeTensor:
        if self.fake is None:
            self.fake = self._owner.make(self)
        return self.fake

    def make(self, pending: Pending) -> torch.Tensor:
        """The `val` of the node that reads it."""
        if self._val is None:
            self._val = snapshot(self.stand_in())
        return self._val


class LazyParameterDict(LazyDict):
    """The parameters or buffers of a borrowed module."""

    __slots__ = ()
    pending = LazyParameter

    def _make(self, pending: LazyParameter) -> FakeTensor:
        return pending.stand_in()


class LazyParameters:
    """Decides which tensors of a trace can be lazy."""

    def __init__(self, mode: FakeTensorMode, constants: Constants, allows_gradients: bool) -> None:
        self._mode = mode
        self._constants: Constants | None = constants
        self._is_grad = torch.is_grad_enabled() and not allows_gradients
        self._by_storage: dict[int, LazyParameter] = {}
        self._lent: dict[int, LazyParameter] = {}

    def make_lazy(self, real: torch.Tensor) -> LazyParameter | None:
        """None for a tensor that can't be lazy: it requires grad, shares memory, or is not a plain tensor."""
        found = self._lent.get(id(real))
        if found is not None:
            return found
        simple = self._mode.fake_tensor_converter.spec_if_simple(real)
        if simple is None or simple[1] in self._by_storage or (self._is_grad and real.requires_grad):
            self.make_fake_on_storage(real)
            return None
        spec, storage = simple
        lazy = self._lent[id(real)] = self._by_storage[storage] = LazyParameter(self, real, spec)
        return lazy

    def make_fake_on_storage(self, real: torch.Tensor) -> None:
        """Make the stand-in of the lazy tensor on this storage, because another tensor on it needs the fake storage."""
        if (
            self._by_storage
            and real.layout is torch.strided
            and not _torch.is_traceable_wrapper_subclass(real)
        ):
            first = self._by_storage.get(_torch.storage_id(real))
            if first is not None:
                first.stand_in()

    def make(self, lazy: LazyParameter) -> FakeTensor:
        with _torch.NoFunctionModes(), _torch.inference_mode(False):
            if self._constants is None:  # after the trace the real tensor may have changed: the spec is used
                return make_new(self._mode, lazy.spec)
            fake = self._mode.fake_tensor_converter.convert_simple(self._mode, lazy.real)
        self._constants.register_fake(lazy, fake)
        return fake

    def close(self) -> None:
        """Called at the end of the trace: drop references to it."""
        self._constants = None
        while self._lent:
            del self._lent.popitem()[1].real
        self._by_storage.clear()


def resolve_parameters(tensors: Iterable[object]) -> list[Any]:
    """The tensors, with lazy parameters replaced by their stand-ins where these exist."""
    return [part.fake if type(part) is LazyParameter and part.fake is not None else part for part in tensors]
