"""MetaProxy and its relatives: values of a trace whose metadata is unknown, and the arguments of overridden hooks.

A traced program handles stand-ins, which carry their node. It gets a proxy where no stand-in can be made: for an argument
without an example, and for a result that could not be computed. A `MetaTracer` whose subclass overrides `create_proxy` is
called with proxies; one that overrides `proxy` has them in the program as well.
"""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node, Proxy

from understudy import _torch
from understudy.meta.devices import DeviceOf, make_device
from understudy.meta.errors import MetaTraceError

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""The metadata of an unknown value."""
read_own: Any = object.__getattribute__


class MetaProxy(Proxy):
    """The proxy of a node. `_tensor_meta` is the metadata of its value; the attribute does not exist while the metadata is
    unknown."""

    tracer: Any
    _tensor_meta: Any

    def install_tensor_meta(self, tensor_meta: Any) -> None:
        """Set the metadata of the value: `tensor_meta`, a real, meta or fake tensor, is an example of it."""
        install = getattr(self.tracer, "install_meta", None)
        if install is None:
            object.__setattr__(self, "_tensor_meta", tensor_meta)
        else:
            install(self, tensor_meta)

    def size(self, dim: int | None = None) -> Any:
        meta = meta_of_proxy(self)
        if meta is not UNKNOWN:
            return meta.size() if dim is None else meta.size(dim)
        return self.tracer.create_proxy("call_method", "size", (self,) if dim is None else (self, dim), {})

    def dim(self) -> Any:
        meta = meta_of_proxy(self)
        return self.tracer.create_proxy("call_method", "dim", (self,), {}) if meta is UNKNOWN else meta.dim()

    @property
    def shape(self) -> Any:
        return self._fact("shape")

    @property
    def dtype(self) -> Any:
        return self._fact("dtype")

    def _fact(self, name: str) -> Any:
        meta = meta_of_proxy(self)
        if meta is UNKNOWN:
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return getattr(meta, name)

    @property
    def device(self) -> Any:
        return MetaDeviceAttribute(self, "device")

    def __getattr__(self, k: str) -> Any:
        if k in OWN_STATE:
            raise AttributeError(k)
        return MetaAttribute(self, k)

    def __len__(self) -> int:
        meta = meta_of_proxy(self)
        if meta is UNKNOWN:
            raise self.tracer.make_refusal("len() of a value with unknown metadata", self)
        return len(meta)

    def __copy__(self) -> MetaProxy:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self.tracer.create_proxy("call_method", "clone", (self,), {})

    def __reduce_ex__(self, protocol: object) -> Any:
        raise self.tracer.make_refusal("a value of a trace can't be pickled", self)


class MetaAttribute(MetaProxy):
    """`x.foo`: becomes a node once it is used other than by calling it."""

    def __init__(self, root: Any, attr: str) -> None:
        state = read_own(self, "__dict__")
        state.update(root=root, attr=attr, tracer=root.tracer, _node=None)

    @property
    def node(self) -> Node:  # type: ignore[override]
        if self._node is None:
            made = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {})
            read_own(self, "__dict__")["_node"] = made.node
        node: Node = self._node
        return node

    @property
    def _tensor_meta(self) -> Any:
        meta = meta_of_proxy(self.root)
        if meta is UNKNOWN:
            raise AttributeError("_tensor_meta")
        return getattr(meta, self.attr)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class MetaDeviceAttribute(MetaAttribute):
    """`x.device` of a proxy."""


class TensorProxy(MetaProxy, torch.Tensor):  # type: ignore[misc, override]
    """The proxy that a traced program gets: an instance of torch.Tensor as well, so that torch's functions accept it."""

    def __getattribute__(self, name: str) -> Any:
        if name in OWN_STATE or name.startswith("__"):
            return read_own(self, name)
        return read_attribute(self, name)

    def __getattr__(self, k: str) -> Any:
        return read_attribute(self, k)  # which has raised an AttributeError in `__getattribute__`

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    __call__: Any = None
    __hash__ = object.__hash__
    __torch_function__ = Proxy.__torch_function__


class TensorAttribute(MetaAttribute, TensorProxy):  # type: ignore[misc, override]
    """`x.foo` of such a proxy: it may be a tensor, or a method."""

    __call__ = MetaAttribute.__call__


OWN_STATE = frozenset(
    "node tracer _tensor_meta root attr _node install_tensor_meta _fact _claimed_class".split()
)
"""Attributes of the proxy itself. Every other name, `view` or `T`, is an attribute of the value that it stands for."""


def make_proxy(tracer: MetaTracer, node: Node, meta: object = UNKNOWN) -> MetaProxy:
    """The proxy of a node that a traced program gets."""
    proxy: Any = _torch.make_subclass(TensorProxy, tracer.hollow)
    state = read_own(proxy, "__dict__")
    state["node"], state["tracer"] = node, tracer
    if meta is not UNKNOWN:
        state["_tensor_meta"] = meta
    return proxy


def meta_of_proxy(proxy: Any) -> Any:
    """The metadata of a proxy, or `UNKNOWN`."""
    try:
        meta = read_own(proxy, "_tensor_meta")
    except AttributeError:
        return UNKNOWN
    return UNKNOWN if meta is None else meta


def read_attribute(proxy: TensorProxy, name: str) -> Any:
    """`x.foo` of a proxy in a traced program."""
    tracer = read_own(proxy, "tracer")
    if name == "device":
        node = tracer.create_proxy("call_function", getattr, (proxy, "device"), {}).node
        meta = meta_of_proxy(proxy)
        return make_device(node, None if meta is UNKNOWN else meta.device)
    if name in ("size", "dim", "shape", "dtype"):
        return read_own(proxy, name)
    if meta_of_proxy(proxy) is not UNKNOWN:
        return MetaAttribute(proxy, name)
    if name.startswith("_") or name in ("keys", "items"):  # tensors have none of these
        raise AttributeError(f"the metadata of {proxy} is unknown, and so is {name!r}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise AttributeError(f"{name!r} can't be written as an attribute in the code of a graph")
    made: Any = _torch.make_subclass(TensorAttribute, tracer.hollow)
    MetaAttribute.__init__(made, proxy, name)
    return made


def proxys_to_metas(v: Any) -> Any:
    """The metadata of a proxy: its stand-in, or its device. Any other value unchanged."""
    if type(v) is DeviceOf:
        return v.known_device
    if not isinstance(v, Proxy):
        return v
    if not isinstance(v, MetaProxy):
        raise MetaTraceError(f"expected a MetaProxy, got {v}, a {type(v).__name__}")
    meta = meta_of_proxy(v)
    if meta is UNKNOWN:
        raise MetaTraceError(f"the metadata of {v} is unknown; set it with install_tensor_meta(example)")
    return meta
