"""Names of torch that are loaded on demand, and classes that torch and its tools check by `isinstance`: these are only
named, none of their behaviour is used."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from understudy._torch.tensors import is_stand_in

# --- names that are loaded on demand: it takes long, and few programs need them -----------------------------------


def on_demand(module: str, name: str) -> Callable[[], Any]:
    """A function that returns this name of a module, which the first call imports."""

    @functools.cache
    def find() -> Any:
        return getattr(importlib.import_module(module), name)

    return find


def call_on_demand(module: str, name: str) -> Callable[..., Any]:
    """A function that calls this function of a module, which the first call imports."""
    find = on_demand(module, name)
    return lambda *args, **kwargs: find()(*args, **kwargs)


torch_fake_tensor_class = on_demand("torch._subclasses.fake_tensor", "FakeTensor")
torch_fake_mode_class = on_demand("torch._subclasses.fake_tensor", "FakeTensorMode")
torch_recorder_class = on_demand("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode")
torch_state_recorder_class = on_demand("torch.fx.experimental.proxy_tensor", "PreDispatchTorchFunctionMode")
torch_symbol_class = on_demand("torch.fx.experimental.sym_node", "SymNode")
backward_state_class = on_demand("torch.fx.experimental._backward_state", "BackwardState")
data_loader_iterator_class = on_demand("torch.utils.data.dataloader", "_BaseDataLoaderIter")


def is_torch_fake(tensor: object) -> bool:
    """Whether this is a fake of torch's own mode; ours only claim to be."""
    return issubclass(type(tensor), torch_fake_tensor_class())


def function_for_torch_symbols(name: str) -> Callable[..., Any]:
    """The function of this name in torch's own module of symbolic shapes. (Compiled code traces this: no cache.)"""
    import torch.fx.experimental.symbolic_shapes as shapes  # why: symbols of torch's own ShapeEnv are its affair

    return getattr(shapes, name)


# --- sympy, as torch's tools use it: to load it takes long, and only other tools need it --------------------------

sympy_functions: Callable[[], Any] = functools.partial(
    importlib.import_module, "torch.utils._sympy.functions"
)
"""The module of torch's own sympy functions: `FloorDiv`, `Mod`, `PythonMod`, `Max`, `Min`, …"""


def value_range(low: int | None, high: int | None) -> Any:
    """The range from `low` to `high` (None: unbounded) as an object of torch's class."""
    from torch.utils._sympy.numbers import int_oo  # why: loads sympy, which only other tools want
    from torch.utils._sympy.value_ranges import ValueRanges  # why: the same

    return ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)


def keys_of_step(kind: str, key: Any) -> tuple[Any, ...]:
    """One step of a path to a number in a result, as objects of the classes that torch's tools check."""
    import torch.fx.experimental.symbolic_shapes as shapes  # why: only the names of ways are taken from it
    from torch.utils._pytree import MappingKey, SequenceKey  # why: the same

    if kind == "item":
        return (SequenceKey(key) if isinstance(key, int) else MappingKey(key),)
    if kind == "attribute":
        return (shapes.InnerTensorKey(key),)
    if kind == "offset":
        return (shapes.CallMethodKey("storage_offset"),)
    if kind == "divided":
        return (shapes.DivideByKey(key),)
    return shapes.CallMethodKey(kind), SequenceKey(key)


# --- classes checked by isinstance ------------------------------------------------------------------------------


def asks_for_own_class(frame: Any) -> bool:
    """Whether this frame is `nn.Module._apply` checking the class of a tensor, before it may set a stand-in's data,
    `torch.utils.swap_tensors`, which swaps what the class has slots for, or torch's `make_fx`, which makes an object of
    the class that it asks for."""
    if is_module_conversion(frame):
        return is_stand_in(frame.f_locals["tensor"])
    code = frame.f_code
    if code.co_name == _QUESTION:  # asks for others, since torch 2.14
        return frame.f_back is not None and frame.f_back.f_code.co_name == _SNAPSHOT
    if code.co_name == _SNAPSHOT:
        return frame.f_globals["__name__"] == _TRACER
    return code is _APPLY or code is _SWAP


def is_module_conversion(frame: object) -> bool:
    """Whether this frame is the inner function of `nn.Module._apply` that decides whether to set the data."""
    return frame.f_code.co_name == _APPLY_INNER and frame.f_back.f_code is _APPLY


_APPLY = torch.nn.Module._apply.__code__
_SWAP = torch.utils.swap_tensors.__code__
_APPLY_INNER = "compute_should_use_set_data"
_SNAPSHOT, _TRACER, _QUESTION = "snapshot_fake", "torch.fx.experimental.proxy_tensor", "is_fake_tensor"
ASKERS_FOR_CLASS = frozenset({_APPLY.co_name, _SWAP.co_name, _APPLY_INNER, _SNAPSHOT, _QUESTION})
"""The names of functions of which `asks_for_own_class` can be true."""


def has_triton() -> bool:
    """Whether Triton is installed. Torch finds out once in a process."""
    return bool(importlib.import_module("torch.utils._triton").has_triton_package())
