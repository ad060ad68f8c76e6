"""The proxies of values, under the names of torch's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx import Proxy

from understudy import _torch
from understudy.capture.tracer import SYMBOLIC, PythonKeyTracer
from understudy.capture.trackers import ProxyTensor, Thunk
from understudy.errors import UntrackedValueError
from understudy.graph.node_values import as_val, set_val
from understudy.shapes.bindings import compute_unbacked_bindings
from understudy.shapes.torch_api.names import guard_scalar, has_static_value

T = TypeVar("T")
NOTHING: Any = object()
py_sym_types = SYMBOLIC
"""The classes of symbolic numbers."""
PySymType = torch.SymInt | torch.SymFloat | torch.SymBool
"""The same for annotations."""


def thunkify(tracer: PythonKeyTracer, f: Callable[..., T], *args: object, **kwargs: object) -> Thunk[T]:
    """A thunk of `f(*args, **kwargs)`: lazy if `tracer.enable_thunkify` is set, computed now otherwise."""
    thunk = Thunk(functools.partial(f, *args, **kwargs))
    if not tracer.enable_thunkify:
        thunk.force()
    return thunk


# --- slots --------------------------------------------------------------------------------------------------------


def get_proxy_slot(
    obj: object,
    tracer: PythonKeyTracer,
    default: object = NOTHING,
    transform: Callable[[Any], Any] = lambda slot: slot,
) -> Any:
    """The slot of a value, passed through `transform`: for a tensor an object with `.proxy` and `.constant`, for a
    symbolic number a thunk of its proxy, for a script object its proxy. `default` if it has none; without a default an
    error."""
    slot = _slot(obj, tracer)
    if slot is not None:
        return transform(slot)
    if default is not NOTHING:
        return default
    raise UntrackedValueError(
        f"{_describe_object(obj)} has no node in the graph of this tracer; register it with "
        "track_tensor_tree(value, proxy, constant=None, tracer=tracer)"
    )


def _slot(obj: object, tracer: PythonKeyTracer) -> Any:
    if isinstance(obj, torch.Tensor):
        return tracer.tensor_tracker.get(obj)
    if isinstance(obj, SYMBOLIC):
        return tracer.symnode_tracker.get(obj)
    return tracer.script_object_tracker.get(obj)


def _describe_object(obj: object) -> str:
    if isinstance(obj, torch.Tensor):
        return f"a {type(obj).__name__} of shape {tuple(obj.shape)}"
    return f"{obj} ({type(obj).__name__})"


def set_proxy_slot(obj: object, tracer: PythonKeyTracer, proxy: Any) -> None:
    """Set the slot of a value: for a tensor an object with `.proxy` and `.constant`, for a symbolic number a thunk of
    its proxy, for a script object its proxy. The first proxy of a symbol is kept."""
    if isinstance(obj, torch.Tensor):
        tracer.remember(obj, proxy.proxy.node)
        if proxy.constant is not None:
            tracer.known_values[obj] = proxy.constant
    elif isinstance(obj, SYMBOLIC):
        tracer.symnode_tracker[obj] = proxy
    else:
        tracer.script_object_tracker[obj] = proxy


def has_proxy_slot(obj: object, tracer: PythonKeyTracer) -> bool:
    """Whether a tensor or a symbolic number has a slot."""
    return _slot(obj, tracer) is not None


def fetch_object_proxy(tracer: PythonKeyTracer, t: object) -> Any:
    """The slot of a value, as `get_proxy_slot`; the value itself if it has none."""
    return get_proxy_slot(t, tracer, t)


def fetch_sym_proxy(tracer: PythonKeyTracer) -> Callable[[Any], Any]:
    """A function that returns the proxy of a symbolic number; a plain number if it is constant."""

    def fetch(number: object) -> Any:
        return guard_scalar(number) if has_static_value(number) else get_proxy_slot(number, tracer).force()

    return fetch


# --- tracking -----------------------------------------------------------------------------------------------------


def track_tensor(
    tensor: torch.Tensor, proxy: Proxy, *, constant: torch.Tensor | None, tracer: PythonKeyTracer
) -> None:
    """Register the proxy of a tensor, and of its symbolic sizes."""
    set_proxy_slot(tensor, tracer, ProxyTensor(proxy, constant))
    tracer.symbols.bind_symbols_of(tensor, proxy.node)


def track_tensor_tree(inner_res: T, proxy_res: object, *, constant: object, tracer: PythonKeyTracer) -> T:
    """Register the proxies of tensors, symbols and script objects in nested lists, tuples and dicts. Where one proxy
    stands for a structure, a part of it gets that proxy's item."""
    mode = _torch.active_fake_mode()
    env = getattr(mode, "shape_env", None)
    if env is not None and isinstance(proxy_res, Proxy):
        tracer.shape_env = tracer.shape_env or env
        bindings = compute_unbacked_bindings(env, inner_res)
        if bindings:
            proxy_res.node.meta["unbacked_bindings"] = bindings
    _track(inner_res, proxy_res, constant, tracer)
    return inner_res


def _track(value: object, proxy: Any, constant: Any, tracer: PythonKeyTracer) -> None:
    if isinstance(value, torch.Tensor):
        track_tensor(value, proxy, constant=constant, tracer=tracer)
        set_meta(proxy, value)
    elif isinstance(value, SYMBOLIC):
        set_meta(proxy, value)
        tracer.symbols.bind(value, proxy.node)
    elif isinstance(value, (list, tuple, dict)):
        if isinstance(proxy, Proxy):
            set_meta(proxy, value)
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if _is_tracked(part):
                _track(part, proxy[key], None if constant is None else constant[key], tracer)
    elif isinstance(value, torch.ScriptObject):
        set_proxy_slot(value, tracer, proxy)
        set_meta(proxy, value)
    elif isinstance(value, _torch.backward_state_class()):
        value.proxy = proxy


def _is_tracked(part: object) -> bool:
    """Plain numbers and the like are written as literals: they need no node."""
    kinds = (torch.Tensor, *SYMBOLIC, list, tuple, dict, torch.ScriptObject)
    return isinstance(part, kinds) or type(part) is _torch.backward_state_class()


# --- metadata of nodes --------------------------------------------------------------------------------


def set_meta(proxy: Proxy, val: object) -> Proxy:
    """Set `val` and `tensor_meta` of a proxy's node."""
    set_val(proxy.node, val)
    return proxy


def extract_val(val: object, include_real: bool = False) -> Any:
    """The `node.meta["val"]` of a value: snapshots of stand-ins, stand-ins of real tensors, numbers, in the same
    structure."""
    return as_val(val)


def snapshot_fake(val: torch.Tensor, include_real: bool = False) -> torch.Tensor:
    """A snapshot of a tensor: another stand-in on the same storage, without gradient, unaffected by later changes of
    metadata."""
    snapshot: torch.Tensor = as_val(val) if _torch.is_stand_in(val) else val.detach()
    real = getattr(val, "real_tensor", None)
    if include_real and real is not None:
        vars(snapshot)["real_tensor"] = real.detach()
    return snapshot


def is_sym_node(node: Any) -> bool:
    """Whether the value of a node is a symbolic number."""
    return isinstance(node.meta.get("val"), SYMBOLIC)
