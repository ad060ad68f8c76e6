"""The values that a traced program handles, and their metadata."""

from __future__ import annotations

import dis
import enum
import functools
import keyword
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node, Proxy

from understudy import _torch
from understudy.fake.tensor import FakeTensor

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""The metadata of an unknown value."""
FACTS = (int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.qscheme, *SYMBOLIC)


ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that contain no traced values, and are literals in nodes."""
CONSTANTS = (*FACTS, type(None), bytes, range, enum.Enum, type(...), type, FunctionType, BuiltinFunctionType)


def is_fact(value: object) -> bool:
    """Whether this is a plain fact about a tensor: a number, a dtype, sizes. In a graph it is a constant, or computed
    from sizes."""
    if type(value) is FakeTensor:
        return False
    if isinstance(value, (tuple, list)):
        return all(is_fact(part) for part in value)
    return isinstance(value, FACTS)


def is_constant(value: Any) -> bool:
    """Whether no part of a value needs a node: the program gets the value itself, so that `is None` works."""
    kind = type(value)
    if kind is FakeTensor:
        return False
    if kind in (tuple, list, torch.Size, set, frozenset):
        return all(map(is_constant, value))
    if kind is dict:
        return all(map(is_constant, value.values()))
    return isinstance(value, CONSTANTS) and kind is not DeviceOf


# --- Proxies: the values that a traced program handles; each has a node and its metadata -----------------------
# A proxy has metadata: a stand-in, or an object with stand-ins in it. The proxy of a tensor *is* a tensor as well (an
# empty one), so that `isinstance(x, torch.Tensor)` and `callable(x)` give the same answers as without a trace. Proxies
# do not inherit from `fx.Proxy`, whose instances are callable and have `keys`; they only claim that class, for programs
# that check whether they are traced. Numbers, tuples and dicts are passed to the program as such (see `arguments`).
#
#     x.shape            answered from the metadata
#     x.device           a text that is a device to torch, and `x.device` in the graph
#     x.foo              a node, unless it is only called
#     x.foo(y)           a `call_method` node
#     bool(x), int(x)    answered if the value is determined, else an error with the line


read_own: Callable[[Any, str], Any] = object.__getattribute__
"""Reads the state of a proxy without the `__getattribute__` of tensor proxies, which is slower."""


class MetaProxy:
    """Stands for the value of a node. `_meta` is the metadata of that value, or `UNKNOWN`."""

    node: Node
    tracer: MetaTracer
    _meta: Any

    def __init__(self, node: Node, tracer: MetaTracer, meta: object = UNKNOWN) -> None:
        state = read_own(self, "__dict__")
        state["node"], state["tracer"], state["_meta"] = node, tracer, meta

    # Programs check `isinstance(value, Cache)`.
    def _claimed_class(self) -> Any:
        return type(self._meta)

    __class__ = property(_claimed_class)

    def __repr__(self) -> str:
        return f"MetaProxy({self.node.name}: {self.tracer.describe(self._meta)})"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    __hash__ = object.__hash__

    def install_tensor_meta(self, tensor_meta: torch.Tensor) -> None:
        """Set the metadata of the value: `tensor_meta`, real, meta, fake or of this trace, is an example of it."""
        self._meta = self.tracer.derivation.meta_of(tensor_meta)
        self.tracer.write_meta(self.node, self._meta)

    def __copy__(self) -> MetaProxy:
        return self

    def __deepcopy__(self, memo: object) -> MetaProxy:
        # A copy of a traced value is a node.
        if isinstance(self._meta, torch.Tensor):
            return self.tracer.create_proxy("call_method", "clone", (self,), {})
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise self.tracer.make_refusal("a value of a trace can't be pickled", self)

    # --- attributes ------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return attribute(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in OWN_STATE:
            object.__setattr__(self, name, value)
        else:
            self.tracer.create_proxy("call_function", setattr, (self, name, value), {})

    # --- conversions and containers ----------------------------------------------------------------------------

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
            raise self.tracer.make_refusal("len() was asked of a value of which nothing is known", self)
        return len(meta)

    def __iter__(self) -> Iterator[Any]:
        return self.tracer.iter(self)

    def __contains__(self, item: object) -> bool:
        if self._meta is UNKNOWN or isinstance(self._meta, torch.Tensor):
            return bool(self.tracer.create_proxy("call_function", operator.contains, (self, item), {}))
        return item in self._meta

    def __getitem__(self, item: object) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, item), {})

    def __setitem__(self, item: object, value: object) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, item, value), {})

    # --- torch functions outside of the trace's function mode --------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, orig_method: Callable[..., object], types: object, args: object = None, kwargs: object = None
    ) -> Any:
        args, kwargs = args or (), kwargs or {}
        proxy = next(iter(proxies_in((args, kwargs))), None)
        if proxy is None:  # torch's classes call it without an object, to check for overrides
            tensor: Any = torch.Tensor
            return tensor.__torch_function__(orig_method, types, args, kwargs)
        return proxy.tracer.call_torch_function(orig_method, args, kwargs)


def _operator_method(target: Callable[..., object], is_reflected: bool = False) -> Callable[..., object]:
    def method(self: MetaProxy, *other: object) -> object:
        arguments = (*other, self) if is_reflected else (self, *other)
        return self.tracer.create_proxy("call_function", target, arguments, {})

    return method


ARITHMETIC = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split()
OTHER_OPERATORS = "neg pos invert eq ne lt le gt ge".split()
for _name in (*ARITHMETIC, *OTHER_OPERATORS, *[f"i{name}" for name in ARITHMETIC]):
    setattr(MetaProxy, f"__{_name}__", _operator_method(getattr(operator, f"__{_name}__")))
for _name in ARITHMETIC:
    setattr(MetaProxy, f"__r{_name}__", _operator_method(getattr(operator, f"__{_name}__"), is_reflected=True))


class TracedTensor(Proxy, torch.Tensor):  # type: ignore[misc]
    """The class that tensor proxies claim; it has no instances."""

    __call__ = None  # type: ignore[assignment]


class TensorProxy(MetaProxy, torch.Tensor):  # type: ignore[misc]
    """A proxy that is an instance of torch.Tensor. Made by `make_proxy`."""

    def _claimed_class(self) -> Any:
        return TracedTensor

    __class__ = property(_claimed_class)

    def __getattribute__(self, name: str) -> Any:
        if name in OWN_STATE or name.startswith("__"):
            return read_own(self, name)
        return attribute(self, name)

    __hash__ = object.__hash__


class CallableProxy(MetaProxy):
    """Stands for a callable: a function, an object with `__call__`."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.tracer.create_proxy("call_method", "__call__", (self, *args), kwargs)


class MetaAttribute(MetaProxy):
    """`x.foo`: becomes a node, at the position where it was read, once it is used other than by calling it."""

    _owner: MetaProxy
    _source: Node | None
    _name: str
    _made: Node | None
    _moved: Node | None
    _place: tuple[Node, str]

    @property
    def node(self) -> Node:  # type: ignore[override]
        return self._moved or self._first_node

    @property
    def _first_node(self) -> Node:
        """The node that reads the attribute, from the owner's node at the time of the read."""
        if self._made is None:
            owner = self._source or self._owner._first_node
            before, line = self._place
            if isinstance(self._owner, MetaAttribute) and self._owner._place[0] is before:
                before = owner  # a nested attribute comes after its owner
            tracer = self.tracer
            with tracer.record_into(before.graph), before.graph.inserting_after(before):
                arguments = (tracer.node_in_graph(owner), self._name)
                self._made = tracer.create_node("call_function", getattr, arguments, {})
                tracer.write_meta(self._made, self._meta)
            if line:
                self._made.meta["stack_trace"] = line
        return self._made


class MethodAttribute(MetaAttribute):
    """`x.view`: an attribute that can be called."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._owner.tracer.create_proxy("call_method", self._name, (self._owner, *args), kwargs)


class TensorAttribute(MetaAttribute, TensorProxy):  # type: ignore[misc]
    """`x.T`: an attribute that is a tensor."""


class UnknownAttribute(MethodAttribute, TensorProxy):  # type: ignore[misc]
    """`x.foo` of an unknown value: it may be a tensor, or callable."""


OWN_STATE = frozenset(
    "node tracer _meta _owner _source _name _made _moved _place _first_node install_tensor_meta".split()
)
"""Attributes of the proxy itself. Every other name, `view` or `T`, is an attribute of the tensor that it stands for."""
MAPPING_QUESTIONS = frozenset({"keys", "items", "values", "get"})
"""Methods of mappings: the keys of a known mapping are known, its values are traced."""


class DeviceOf(str):
    """The device of a value: a str, which torch accepts as a device; in the graph, it is `x.device`."""

    _attribute: MetaProxy
    device: torch.device

    # Programs check `isinstance(x.device, torch.device)`; torch's C++ uses the type only.
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

    def __reduce_ex__(self, protocol: object) -> Any:
        return torch.device, (str(self.device),)

    def __enter__(self) -> Any:
        return self.device.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self.device.__exit__(*error)


def make_proxy(tracer: MetaTracer, node: Node, meta: object) -> MetaProxy:
    if meta is UNKNOWN or type(meta) is FakeTensor or isinstance(meta, torch.Tensor):
        proxy: Any = _torch.make_subclass(TensorProxy, tracer.hollow)
        MetaProxy.__init__(proxy, node, tracer, meta)
        tracer.tensors.append(weakref.ref(proxy))
        return proxy
    return (CallableProxy if callable(meta) else MetaProxy)(node, tracer, meta)


def _make_attribute(owner: MetaProxy, name: str, meta: object, is_tensor: bool) -> MetaAttribute:
    tracer = owner.tracer
    made: Any
    if is_tensor:
        made = _torch.make_subclass(UnknownAttribute if meta is UNKNOWN else TensorAttribute, tracer.hollow)
    else:
        made = object.__new__(MethodAttribute if callable(meta) else MetaAttribute)
    is_read_later = isinstance(owner, MetaAttribute) and owner._moved is None
    read_own(made, "__dict__").update(
        tracer=tracer, _meta=meta, _owner=owner, _name=name, _made=None, _moved=None,
        _source=None if is_read_later else read_own(owner, "node"),
        _place=(tracer.last_node(), tracer.node_meta.stack_trace() if is_tensor else ""),
    )  # fmt: skip
    return made


def move_to_node(proxy: MetaProxy, node: Node) -> None:
    """From now on this node is the value's node, because it returns the same tensor: `x.add_(1)` returns `x`."""
    object.__setattr__(proxy, "_moved" if isinstance(proxy, MetaAttribute) else "node", node)


def device_of(owner: MetaProxy, device: torch.device) -> DeviceOf:
    return as_device(_make_attribute(owner, "device", device, is_tensor=False), device)


def as_device(proxy: MetaProxy, device: torch.device) -> DeviceOf:
    """A traced value that is a device."""
    stand_in = DeviceOf(device)
    stand_in.device = device
    stand_in._attribute = proxy
    return stand_in


NEVER_TENSORS = frozenset({"device", "dtype", "layout"})


def attribute(proxy: MetaProxy, name: str) -> Any:
    """`x.foo`: a fact if it is known and not a tensor, else a proxy that becomes a node if it is used."""
    meta = read_own(proxy, "_meta")
    if meta is UNKNOWN:
        if name.startswith("_") or name in ("keys", "items"):  # tensors have none of these
            raise AttributeError(f"nothing is known of {proxy!r}, and so nothing of its {name!r}")
        if not name.isidentifier() or keyword.iskeyword(name):
            raise AttributeError(f"{name!r} can't be written as an attribute in the code of a graph")
        return _make_attribute(proxy, name, UNKNOWN, is_tensor=name not in NEVER_TENSORS)
    if name == "shape" and type(meta) is FakeTensor and not meta._spec.is_symbolic:
        shape: Any = meta._spec.shape
        return torch.Size(shape)  # without asking C++
    is_tensor = type(meta) is FakeTensor or isinstance(meta, torch.Tensor)
    if not is_tensor and name in MAPPING_QUESTIONS and isinstance(meta, Mapping):
        return getattr({key: proxy[key] for key in meta}, name)
    if is_tensor and not hasattr(torch.Tensor, name):
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")
    is_method = type(meta) is FakeTensor and _is_method(name)
    value = getattr(meta, name) if is_method else proxy.tracer.attribute_of(meta, name)
    if value is meta:  # `x.real` of a tensor that is not complex
        return proxy
    if isinstance(value, torch.device):
        return device_of(proxy, value)
    if is_fact(value) or value is None:
        return value
    return _make_attribute(proxy, name, value, isinstance(value, torch.Tensor))


@functools.cache
def _is_method(name: str) -> bool:
    """Whether this is a method of tensors, which is read without a torch function."""
    return callable(getattr(FakeTensor, name))


def proxies_in(value: object) -> Iterator[MetaProxy]:
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


def iterate(proxy: MetaProxy) -> Iterator[object]:
    """The elements over which a loop over a value iterates."""
    meta = proxy._meta
    if isinstance(meta, Mapping):
        return iter(list(meta))
    count = len(meta) if meta is not UNKNOWN else _count_unpacked_names(_iterating_frame())
    if count is None:
        raise proxy.tracer.make_refusal("a loop goes over a value of which nothing is known", proxy)
    return iter([proxy[position] for position in range(count)])


def _iterating_frame() -> FrameType:
    """The frame of the program that iterates over a proxy."""
    frame: Any = sys._getframe(1)
    while frame.f_code is not MetaProxy.__iter__.__code__:
        frame = frame.f_back
    asking: FrameType = frame.f_back
    return asking


def _count_unpacked_names(frame: FrameType) -> int | None:
    """The number of names to which the current line unpacks: 2 for `a, b = x`."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None
    return None
