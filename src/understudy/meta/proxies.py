"""What is known of a value while a program is traced."""

from __future__ import annotations

import dis
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node, Proxy

from understudy import _torch

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""The metadata of a value of which nothing is known."""
FACTS = (int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.qscheme, *SYMBOLIC)


def is_fact(value: Any) -> bool:
    """A plain answer about a tensor: numbers, a dtype, sizes. In a graph it is a constant, or computed from sizes."""
    if isinstance(value, (tuple, list)):
        return all(is_fact(part) for part in value)
    return isinstance(value, FACTS)


# --- The values that a traced program handles: each stands for a node, and knows what that node will give ---
# A proxy is an `fx.Proxy` that carries metadata: a stand-in, or a structure with stand-ins in it. One that stands for a
# tensor *is* a tensor as well (an empty one, that nobody looks at), so that `isinstance(x, torch.Tensor)` says what it
# says in the program that is traced.
#
#     x.shape            answered from the metadata
#     x.device           a text that is a device to torch, and `x.device` in the graph
#     x.foo              a node only when it is used other than by calling it
#     x.foo(y)           a `call_method` node
#     bool(x), int(x)    answered if the metadata knows, else an error with the line


class MetaProxy(Proxy):
    """Stands for the value of a node. `_meta` is what is known of that value, or `UNKNOWN`."""

    tracer: MetaTracer
    _meta: Any

    def __init__(self, node: Node, tracer: MetaTracer, meta: Any = UNKNOWN) -> None:
        self.node = node
        self.tracer = tracer
        self._meta = meta

    def __repr__(self) -> str:
        return f"MetaProxy({self.node.name}: {self.tracer.shown(self._meta)})"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    __hash__ = object.__hash__

    def install_tensor_meta(self, tensor_meta: torch.Tensor) -> None:
        """Say what the value is: `tensor_meta`, real, meta, fake or of this trace, is an example of it."""
        self._meta = self.tracer.derivation.meta_of(tensor_meta)
        self.tracer.write_meta(self.node, self._meta)

    def __copy__(self) -> MetaProxy:
        return self

    def __deepcopy__(self, memo: Any) -> MetaProxy:
        # A copy of a value that nobody has yet is a node like any other.
        if isinstance(self._meta, torch.Tensor):
            return self.tracer.create_proxy("call_method", "clone", (self,), {})
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.tracer.refused("a value of a trace can't be pickled", self)

    # --- attributes ------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN_STATE:
            object.__setattr__(self, name, value)
        else:
            self.tracer.create_proxy("call_function", setattr, (self, name, value), {})

    # --- what Python asks of values ----------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self.tracer.to_bool(self))

    def __int__(self) -> int:
        return int(self.tracer.number(self, int))

    def __float__(self) -> float:
        return float(self.tracer.number(self, float))

    def __complex__(self) -> complex:
        return complex(self.tracer.number(self, complex))

    def __index__(self) -> int:
        return operator.index(self.tracer.number(self, operator.index))

    def __len__(self) -> int:
        meta = self._meta
        if meta is UNKNOWN:
            raise self.tracer.refused("len() was asked of a value of which nothing is known", self)
        return len(meta)

    def __iter__(self) -> Iterator[Any]:
        return self.tracer.iter(self)

    def __contains__(self, item: Any) -> bool:
        if self._meta is UNKNOWN or isinstance(self._meta, torch.Tensor):
            return bool(self.tracer.create_proxy("call_function", operator.contains, (self, item), {}))
        return item in self._meta

    def __getitem__(self, item: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, item), {})

    def __setitem__(self, item: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, item, value), {})

    def keys(self) -> Any:
        return self.tracer.keys(self)

    # --- torch functions outside of the trace's own mode --------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, orig_method: Callable[..., Any], types: Any, args: Any = None, kwargs: Any = None
    ) -> Any:
        args, kwargs = args or (), kwargs or {}
        proxy = next(iter(proxies_in((args, kwargs))), None)
        if proxy is None:  # torch's classes ask, without an object, whether they are overridden
            return super().__torch_function__(orig_method, types, args, kwargs)
        return proxy.tracer.called(orig_method, args, kwargs)


def _in_place(name: str) -> Callable[[MetaProxy, Any], Any]:
    target = getattr(operator, name)

    def method(self: MetaProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in "iadd iand ifloordiv ilshift imod imul imatmul ior ipow irshift isub itruediv ixor".split():
    setattr(MetaProxy, f"__{_name}__", _in_place(_name))


class TensorProxy(MetaProxy, torch.Tensor):  # type: ignore[misc]
    """A proxy that is a tensor to whoever asks for its class. Make it with `make_proxy`."""

    def __getattribute__(self, name: str) -> Any:
        if name in OWN or name.startswith("__"):
            return object.__getattribute__(self, name)
        return attribute(self, name)

    __hash__ = object.__hash__


class MetaAttribute(MetaProxy):
    """`x.foo`: a node once it is used other than by calling it, in the place where it was read."""

    _owner: MetaProxy
    _name: str
    _made: Node | None
    _place: tuple[Node, str]

    @property
    def node(self) -> Node:  # type: ignore[override]
        if self._made is None:
            owner = self._owner.node
            before, line = self._place
            if isinstance(self._owner, MetaAttribute) and self._owner._place[0] is before:
                before = owner  # an attribute of an attribute comes after it
            with self.tracer.within(before.graph), before.graph.inserting_after(before):
                self._made = self.tracer.node_for(
                    "call_function", getattr, (self._owner, self._name), {}, self._meta
                )
            if line:
                self._made.meta["stack_trace"] = line
        return self._made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.tracer.create_proxy("call_method", self._name, (self._owner, *args), kwargs)


class TensorAttribute(MetaAttribute, TensorProxy):  # type: ignore[misc]
    """`x.T`: an attribute that is a tensor."""


OWN_STATE = frozenset({"node", "tracer", "_meta", "_owner", "_name", "_made", "_place"})
OWN = frozenset({*OWN_STATE, "keys", "install_tensor_meta"})
"""What a tensor's proxy answers itself. Every other name, `view` or `T`, is one of the tensor that it stands for."""
MAPPING_QUESTIONS = frozenset({"keys", "items", "values", "get"})
"""The keys of a known mapping are known; what stands under them is a value of the trace."""


class DeviceOf(str):
    """The device of a value. Torch takes texts for devices everywhere; in the graph, it is `x.device`."""

    _attribute: MetaProxy
    device: torch.device

    # `isinstance(x.device, torch.device)` is what programs ask; torch's C++ goes by the type alone.
    def _claimed_class(self) -> Any:
        return torch.device

    __class__ = property(_claimed_class)

    @property
    def type(self) -> str:
        return self.device.type

    @property
    def index(self) -> Any:
        return self.device.index

    def __eq__(self, other: object) -> bool:
        return self.device == (other.device if type(other) is DeviceOf else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.device, (str(self.device),)

    def __enter__(self) -> Any:
        return self.device.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self.device.__exit__(*error)


def make_proxy(tracer: MetaTracer, node: Node, meta: Any) -> MetaProxy:
    if meta is UNKNOWN or isinstance(meta, torch.Tensor):
        proxy: Any = _torch.make_subclass(TensorProxy, tracer.hollow)
        MetaProxy.__init__(proxy, node, tracer, meta)
        tracer.tensors.append(weakref.ref(proxy))
        return proxy
    return MetaProxy(node, tracer, meta)


def _make_attribute(owner: MetaProxy, name: str, meta: Any, is_tensor: bool) -> MetaAttribute:
    tracer = owner.tracer
    made: Any = (
        _torch.make_subclass(TensorAttribute, tracer.hollow)
        if is_tensor
        else MetaAttribute.__new__(MetaAttribute)
    )
    made.tracer, made._meta, made._owner, made._name, made._made = tracer, meta, owner, name, None
    made._place = (tracer.last_node(), tracer.node_meta.stack_trace() if is_tensor else "")
    return made


def device_of(owner: MetaProxy, device: torch.device) -> DeviceOf:
    return as_device(_make_attribute(owner, "device", device, is_tensor=False), device)


def as_device(proxy: MetaProxy, device: torch.device) -> DeviceOf:
    """A value of the trace that is a device."""
    stand_in = DeviceOf(device)
    stand_in.device = device
    stand_in._attribute = proxy
    return stand_in


NEVER_TENSORS = frozenset({"device", "dtype", "layout"})


def attribute(proxy: MetaProxy, name: str) -> Any:
    """`x.foo`: a fact if it is known and no tensor, else something that becomes a node if it is used."""
    meta = proxy._meta
    if meta is UNKNOWN:
        if name.startswith("_"):
            raise AttributeError(f"nothing is known of {proxy!r}, and so nothing of its {name!r}")
        return _make_attribute(proxy, name, UNKNOWN, is_tensor=name not in NEVER_TENSORS)
    if isinstance(meta, Mapping) and name in MAPPING_QUESTIONS:
        return getattr({key: proxy[key] for key in meta}, name)
    if isinstance(meta, torch.Tensor) and not hasattr(torch.Tensor, name):
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")
    value = proxy.tracer.attribute_of(meta, name)
    if isinstance(value, torch.device):
        return device_of(proxy, value)
    if is_fact(value) or value is None:
        return value
    return _make_attribute(proxy, name, value, isinstance(value, torch.Tensor))


def proxies_in(value: Any) -> Iterator[MetaProxy]:
    """The proxies in arguments: in lists, tuples, dicts and slices."""
    if isinstance(value, MetaProxy):
        yield value
    elif type(value) is DeviceOf:
        yield value._attribute
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from proxies_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from proxies_in(part)
    elif isinstance(value, slice):
        yield from proxies_in((value.start, value.stop, value.step))


def parts_in_turn(proxy: MetaProxy) -> Iterator[Any]:
    """What a loop over a value goes over."""
    meta = proxy._meta
    if isinstance(meta, Mapping):
        return iter(list(meta))
    count = len(meta) if meta is not UNKNOWN else _unpacked_into(_who_iterates())
    if count is None:
        raise proxy.tracer.refused("a loop goes over a value of which nothing is known", proxy)
    return iter([proxy[position] for position in range(count)])


def _who_iterates() -> FrameType:
    """The frame of the program that asked a proxy for its parts."""
    frame: Any = sys._getframe(1)
    while frame.f_code is not MetaProxy.__iter__.__code__:
        frame = frame.f_back
    asking: FrameType = frame.f_back
    return asking


def _unpacked_into(frame: FrameType) -> int | None:
    """How many names the line that runs assigns to: 2 for `a, b = x`."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None
    return None
