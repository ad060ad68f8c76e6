"""The values that a tracer knows, as mappings: `tracer.tensor_tracker`, `tracer.symnode_tracker`.

    tensor            → a slot with its proxy, and its value if that is determined
    symbolic number   → a thunk of its proxy

A stand-in refers to its node itself, so that recording keeps no table. The mappings are views for code that uses torch's
tracer: a look-up costs a look at the tensor, and to list all tensors is a search among all objects that are alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.fx import Node, Proxy

from understudy.fake.tensor import FakeTensor

if TYPE_CHECKING:
    from understudy.capture.tracer import PythonKeyTracer

T = TypeVar("T")


class Thunk(Generic[T]):
    """A value that is computed once, on first access."""

    __slots__ = ("_compute", "_value")

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: Any = None

    def force(self) -> T:
        if self._compute is not None:
            self._value = self._compute()
            self._compute = None
        value: T = self._value
        return value


class ProxyTensor:
    """The slot of a tensor: its proxy, and its value if that is determined."""

    __slots__ = ("constant", "proxy")

    def __init__(self, proxy: Proxy, constant: torch.Tensor | None) -> None:
        self.proxy = proxy
        self.constant = constant


class TensorTracker(MutableMapping[torch.Tensor, ProxyTensor]):
    """Tensor → slot."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer

    def __contains__(self, tensor: Any) -> bool:
        return self._tracer.find_node(tensor) is not None

    def __getitem__(self, tensor: torch.Tensor) -> ProxyTensor:
        node = self._tracer.find_node(tensor)
        if node is None:
            raise KeyError(tensor)
        return ProxyTensor(self._tracer.proxy(node), self._tracer.known_values.get(tensor))

    def __setitem__(self, tensor: torch.Tensor, slot: Any) -> None:
        self._tracer.remember(tensor, slot.proxy.node)

    def __delitem__(self, tensor: torch.Tensor) -> None:
        if tensor not in self:
            raise KeyError(tensor)
        self._tracer.forget(tensor)

    def __iter__(self) -> Iterator[torch.Tensor]:
        graph = self._tracer.graph
        for value in gc.get_objects():
            if type(value) is FakeTensor and isinstance(value._node, Node) and value._node.graph is graph:
                yield value
        yield from self._tracer.tensors_apart()

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SymbolTracker(MutableMapping[Any, Thunk[Proxy]]):
    """Symbolic number → thunk of its proxy. Listed are the numbers that come from somewhere: what is computed from them
    is in the mapping as well."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer

    def __contains__(self, number: Any) -> bool:
        return self._tracer.has_symbol(number)

    def __getitem__(self, number: Any) -> Thunk[Proxy]:
        if number not in self:
            raise KeyError(number)
        tracer = self._tracer
        return Thunk(lambda: tracer.proxy(tracer.argument_of_symbol(number)))

    def __setitem__(self, number: Any, proxy: Any) -> None:
        self._tracer.symbols.bind_later(number, lambda: proxy.force().node)

    def __delitem__(self, number: Any) -> None:
        if number not in self:
            raise KeyError(number)
        self._tracer.symbols.forget(number)

    def __iter__(self) -> Iterator[Any]:
        return (number.symbolic for number in self._tracer.symbols.list_numbers())

    def __len__(self) -> int:
        return len(self._tracer.symbols.list_numbers())
