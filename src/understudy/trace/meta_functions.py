"""Calls of torch's functions while a program is traced.

A mode for torch functions sees them all, of this thread alone: nothing in torch is replaced. What happens to a call
depends on what is in its arguments:

    a value of the trace, or a symbolic size    recorded
    a tensor of the root                        recorded, unless it is only asked for a fact
    tensors that are constants                  run for real
    no tensor, and one comes out: a factory     recorded
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from understudy import _torch
from understudy.errors import OperatorError, UnderstudyError
from understudy.fake.tensor import FakeTensor
from understudy.trace.meta_proxies import DeviceOf, MetaProxy, attribute
from understudy.trace.meta_regions import Regions
from understudy.trace.meta_structures import holds, leaves_in
from understudy.trace.meta_values import SYMBOLIC, is_fact

if TYPE_CHECKING:
    from understudy.trace.meta_tracer import MetaTracer

Function = Callable[..., Any]
Target = tuple[str, Any]
"""The kind of a node, and what it calls."""


class Recording(TorchFunctionMode):
    """Hands the torch functions of a thread to its tracer."""

    def __init__(self, tracer: MetaTracer) -> None:
        super().__init__()
        self.tracer = tracer
        self._regions = Regions(tracer).handlers

    # torch.autocast tells only a mode of torch's own class of its begin and end.
    def _claimed_class(self) -> Any:
        return _torch.torch_state_recorder_class()

    __class__ = property(_claimed_class)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tracer.is_deriving:
            return func(*args, **(kwargs or {}))
        region = self._regions.get(func)
        return region(*args) if region is not None else called(self.tracer, func, args, kwargs or {})


def called(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """A torch function is called in the traced program."""
    has_traced, has_roots, has_tensors = _looked_through(tracer, args, kwargs)
    if has_traced:
        return _recorded(tracer, func, args, kwargs)
    if has_roots:
        return _on_root_tensors(tracer, func, args, kwargs)
    if has_tensors:
        return func(*args, **kwargs)
    return _without_tensors(tracer, func, args, kwargs)


def _looked_through(tracer: MetaTracer, args: Any, kwargs: Any) -> tuple[bool, bool, bool]:
    has_traced = has_roots = has_tensors = False
    for leaf in leaves_in((args, kwargs)):
        if isinstance(leaf, (MetaProxy, *SYMBOLIC)) or type(leaf) is DeviceOf:
            has_traced = True
        elif isinstance(leaf, torch.Tensor):
            has_tensors = True
            has_roots = has_roots or tracer.name_of(leaf) is not None
    return has_traced, has_roots, has_tensors


def _recorded(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    accessed = _property_of(func)
    if accessed is not None:
        return _access(tracer, accessed, func.__name__, args)
    kind, target = target_of(func)
    return tracer.create_proxy(kind, target, args, kwargs)


def target_of(func: Any) -> Target:
    """How a torch function is written in a graph: `x + 1`, `x.view(2)`, `torch.relu(x)`."""
    name = getattr(func, "__name__", "")
    if is_tensor_method_or_property(func):
        as_operator = getattr(operator, name, None) if name.startswith("__") else None
        return ("call_function", as_operator) if as_operator is not None else ("call_method", name)
    return "call_function", func


def _property_of(func: Any) -> str | None:
    """The name of the property that `func` reads or writes."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__") or owner is None:
        return None
    name: str = getattr(owner, "__name__", "") or getattr(getattr(owner, "fget", None), "__name__", "")
    return name


def _access(tracer: MetaTracer, name: str, how: str, args: Any) -> Any:
    owner = args[0] if isinstance(args[0], MetaProxy) else tracer.proxy_of(args[0])
    if how == "__get__":
        return attribute(owner, name)
    if how == "__set__":
        return tracer.create_proxy("call_function", setattr, (owner, name, args[1]), {})
    return tracer.create_proxy("call_function", delattr, (owner, name), {})


# --- tensors of the root, which are there ------------------------------------------------------------------------------

READ = frozenset("__bool__ __int__ __float__ __complex__ __index__ __contains__ item tolist".split())
"""What reads the data of a tensor."""
ABOUT_THE_OBJECT = frozenset(
    "__len__ __repr__ __str__ __format__ __hash__ __deepcopy__ __copy__ "
    "__reduce_ex__ __reduce__ __dir__ __array__ __dlpack__ __dlpack_device__ __setstate__ "
    "numpy data_ptr untyped_storage storage backward register_hook "
    "register_post_accumulate_grad_hook share_memory_ is_shared is_pinned __cuda_array_interface__".split()
)
"""Asked of a tensor that is there, these are answered by the tensor that is there."""


def _on_root_tensors(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    accessed = _property_of(func)
    name = accessed or getattr(func, "__name__", "")
    if name in ABOUT_THE_OBJECT or (accessed is None and name == "__iter__"):
        return func(*args, **kwargs)
    if name in READ:
        return _read(tracer, func, args, kwargs)
    if accessed is not None:
        if func.__name__ == "__get__":
            value = func(*args)
            if value is None or is_fact(value) or not isinstance(value, (torch.Tensor, torch.device)):
                return value
        return _access(tracer, accessed, func.__name__, args)
    return _recorded(tracer, func, args, kwargs)


def _read(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """The data of a tensor of the root, which is a constant of the trace, unless the program has written to it."""
    if not tracer.derivation.is_written(args[0]):
        return func(*args, **kwargs)
    try:
        with tracer.derivation.running():
            return func(tracer.derivation.stand_in(args[0]), *args[1:], **kwargs)
    except UnderstudyError as error:
        name = tracer.name_of(args[0])
        raise tracer.refused(
            f"{name} was written to, and is read now: {error.reason}", tracer.proxy_of(args[0])
        ) from error


# --- factories -----------------------------------------------------------------------------------------------------------


def _without_tensors(tracer: MetaTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """A factory is what makes a tensor of none. Anything else has been run by asking."""
    try:
        with tracer.derivation.running():
            result = func(*args, **kwargs)
    except UnderstudyError as error:
        if isinstance(error, OperatorError):
            raise
        return func(*args, **kwargs)
    if not holds(result, lambda part: type(part) is FakeTensor):
        return result
    return tracer.proxy_for("call_function", func, args, kwargs, result)
