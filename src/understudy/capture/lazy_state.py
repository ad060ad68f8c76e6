"""What is made when somebody reads it: most of what a large graph says, and most stand-ins of parameters, nobody asks for.

    LazyMeta            the metadata of a node; values that are pending are made by a source on the first read
    LazyParameterDict   the parameters of a borrowed module; each stand-in is made when somebody asks for it
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

NOT_GIVEN: Any = object()


class LazyDict(dict[str, Any]):
    """A dict in which some values are pending: nobody who asks for one gets anything else than the value.

    It hears of every way in which a dict gives its values away. `__iter__` is among them because Python copies a dict
    with another `__iter__` (`dict(table)`, `{**table}`, `update`) by asking for each value, and any other past all methods.
    """

    __slots__ = ()
    pending: type
    """The type of what stands for a value until it is read."""

    def _make(self, pending: Any) -> Any:
        raise NotImplementedError

    def settle(self) -> None:
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
        self.settle()
        return dict.pop(self, key) if default is NOT_GIVEN else dict.pop(self, key, default)

    def popitem(self) -> tuple[str, object]:
        self.settle()
        return dict.popitem(self)

    def setdefault(self, key: str, default: object = None) -> Any:
        self.settle()
        return dict.setdefault(self, key, default)

    def values(self) -> Any:
        self.settle()
        return dict.values(self)

    def items(self) -> Any:
        self.settle()
        return dict.items(self)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __eq__(self, other: object) -> bool:
        self.settle()
        return dict.__eq__(self, other)

    __hash__ = None

    def __repr__(self) -> str:
        self.settle()
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
        """Copied deeply and pickled as the dict that it looks like."""
        return dict, (dict(self),)


class Pending:
    """Stands for something that a node says, such as its `val`: what it is, and its number among those of its kind."""

    __slots__ = ("kind", "number")

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.number = number


class LazySource(Protocol):
    """Knows what is pending."""

    def make(self, pending: Pending) -> Any:
        """The same object each time, if it is a tensor."""


class LazyMeta(LazyDict):
    """The `meta` of a node, in which some of what it says is pending."""

    __slots__ = ("source",)
    pending = Pending
    source: LazySource

    def _make(self, pending: Pending) -> Any:
        return self.source.make(pending)

    def copy(self) -> Any:
        """A dict that shares the values, also those that nobody has asked for yet."""
        other = LazyMeta()
        for key in self:
            dict.__setitem__(other, key, dict.__getitem__(self, key))
        other.source = self.source
        return other


# --- Parameters that a module is lent with: the stand-in of each is made when somebody asks for it ----------

VAL = Pending("val", 0)


@final
class LazyParameter:
    """A tensor of a module, and what is known of it without a stand-in. Layers that are written down again without being
    run need no more than that."""

    __slots__ = ("_lender", "_val", "fake", "node", "real", "requires_grad", "spec")

    def __init__(self, lender: LazyParameters, real: torch.Tensor, spec: TensorSpec) -> None:
        self._lender = lender
        self.real = real
        self.spec = spec
        self.requires_grad = real.requires_grad
        self.fake: FakeTensor | None = None
        self._val: torch.Tensor | None = None
        self.node: Node | None = None
        """What reads it in the graph, if that was written down before there was a stand-in."""

    def stand_in(self) -> FakeTensor:
        if self.fake is None:
            self.fake = self._lender.make(self)
        return self.fake

    def make(self, pending: Pending) -> torch.Tensor:
        """The `val` of the node that reads it."""
        if self._val is None:
            self._val = snapshot(self.stand_in())
        return self._val


class LazyParameterDict(LazyDict):
    """The parameters or buffers of a module, while it is lent."""

    __slots__ = ()
    pending = LazyParameter

    def _make(self, pending: LazyParameter) -> FakeTensor:
        return pending.stand_in()


class LazyParameters:
    """Says for the tensors of a trace which of them can wait."""

    def __init__(self, mode: FakeTensorMode, constants: Constants, allows_gradients: bool) -> None:
        self._mode = mode
        self._constants: Constants | None = constants
        self._is_grad = torch.is_grad_enabled() and not allows_gradients
        self._by_storage: dict[int, LazyParameter] = {}
        self._lent: dict[int, LazyParameter] = {}

    def lend(self, real: torch.Tensor) -> LazyParameter | None:
        """None for a tensor that can't wait: gradients may go to it, others share its memory, or it is no plain one."""
        found = self._lent.get(id(real))
        if found is not None:
            return found
        spec = self._mode.fake_tensor_converter.spec_of_simple(real)
        if spec is None:
            self.settle_storage_of(real)
            return None
        storage = _torch.storage_id(real)
        if storage in self._by_storage or (self._is_grad and real.requires_grad):
            self.settle_storage_of(real)
            return None
        lent = self._lent[id(real)] = self._by_storage[storage] = LazyParameter(self, real, spec)
        return lent

    def settle_storage_of(self, real: torch.Tensor) -> None:
        """Another tensor on its storage: it finds it by the stand-in of the first."""
        if (
            self._by_storage
            and real.layout is torch.strided
            and not _torch.is_traceable_wrapper_subclass(real)
        ):
            first = self._by_storage.get(_torch.storage_id(real))
            if first is not None:
                first.stand_in()

    def make(self, lent: LazyParameter) -> FakeTensor:
        with _torch.NoFunctionModes(), torch.inference_mode(False):
            if self._constants is None:  # the tensor may be another one by now; it is to be as it was in the trace
                return make_new(self._mode, lent.spec)
            fake = self._mode.fake_tensor_converter.from_simple(self._mode, lent.real)
        self._constants.has_stand_in(lent, fake)
        return fake

    def close(self) -> None:
        """The trace is over: all that belongs to it is let go of."""
        self._constants = None
        while self._lent:
            del self._lent.popitem()[1].real
        self._by_storage.clear()


def resolve_parameters(tensors: Iterable[object]) -> list[Any]:
    """The stand-ins that there are in the place of what was lent."""
    return [part.fake if type(part) is LazyParameter and part.fake is not None else part for part in tensors]
