"""Patches while a program is traced: calls of modules, and functions that become one node.

Each replacement checks whether *this* thread traces, and calls the original if not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Proxy

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.graph.random_state import register_tracer_finder
from understudy.meta.devices import DeviceOf
from understudy.meta.errors import make_unregistered_error
from understudy.meta.results import SYMBOLIC
from understudy.meta.vmap import call_vmap
from understudy.patching import ENGINE, TRACING, Hold, patch, patch_call, patch_found
from understudy.shapes.algebra.floats import FUNCTIONS

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode
    from understudy.meta.tracer import MetaTracer

current_tracer: ContextVar[MetaTracer | None] = ContextVar("current_tracer", default=None)
"""The active trace of this thread."""
SYMBOLIC_FUNCTIONS = {getattr(math, name): _torch.symbolic_function(name) for name in FUNCTIONS}
"""Python functions on numbers → functions for symbolic numbers."""


@register_tracer_finder
def recording_tracer() -> MetaTracer | None:
    """The active trace of this thread, if a call of the program is recorded now."""
    tracer = current_tracer.get()
    return None if tracer is None or tracer.is_deriving else tracer


@contextmanager
def patch_calls(
    tracer: MetaTracer, mode: FakeTensorMode, functions: list[tuple[dict[str, Any], str]]
) -> Iterator[None]:
    """In this thread, calls of modules and of these functions (namespace, name) go to the tracer. The scopes of its mode
    are entered in the same step."""
    before = current_tracer.set(tracer)
    try:
        with Hold() as hold:
            listed = [(torch, name) for name in tracer.listed_functions]
            found = ENGINE.find_group([*functions, *listed], record_as_node)
            hold.enter(TRACING.bit | mode.patch_scopes | found)
            if tracer.overrides("getattr"):
                hold.replace(torch.nn.Module, "__getattr__", read_module_attribute)
            yield
    finally:
        current_tracer.reset(before)


@patch_found("torch.nn.Module.__getattr__, where a tracer overrides `getattr`", during=TRACING)
def read_module_attribute(original: Callable[..., object]) -> Callable[..., object]:
    """Parameters, buffers and submodules that the program reads are passed to the tracer."""

    @functools.wraps(original)
    def read(self: torch.nn.Module, name: str) -> Any:
        value = original(self, name)
        tracer = recording_tracer()
        return value if tracer is None else tracer.getattr(name, value, tracer.parameter_proxies)

    return read


@patch(_torch.CHECKPOINT_GENERATOR, during=TRACING)
def record_checkpoint_once(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """A checkpoint computes its function again in the backward pass. The graph computes it once, to the same numbers."""

    @functools.wraps(original)
    def surround(*args: object, **kwargs: object) -> Iterator[None]:
        if recording_tracer() is None:
            yield from original(*args, **kwargs)
        else:
            yield

    return surround


@patch("torch.nn.Module.__call__", during=TRACING)
def record_module_call(original: Callable[..., object]) -> Callable[..., object]:
    """A module call becomes a node, or its inner calls are recorded under its path."""

    @functools.wraps(original)
    def call(self: torch.nn.Module, /, *args: object, **kwargs: object) -> Any:
        tracer = recording_tracer()
        if tracer is None:
            return original(self, *args, **kwargs)
        return tracer.record_module(self, functools.partial(original, self), args, kwargs)

    return call


@patch_found(
    "functions that torch.fx.wrap, autowrap_modules (math) and autowrap_functions name", during=TRACING
)
def record_as_node(original: Callable[..., object]) -> Callable[..., object]:
    """A call with traced values becomes one node; the function is not traced."""
    of_symbols = SYMBOLIC_FUNCTIONS.get(original)

    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> Any:
        tracer = recording_tracer()
        if tracer is None:
            return original(*args, **kwargs)
        if tracer.handles(args, kwargs):
            return tracer.call("call_function", original, args, kwargs)
        is_symbolic = any(isinstance(argument, SYMBOLIC) for argument in args)
        return (of_symbols if is_symbolic and of_symbols else original)(*args, **kwargs)

    return call


def gen_constructor_wrapper(
    target: Callable[..., object],
) -> tuple[Callable[..., object], Callable[..., object]]:
    """(replacement, `target`): the replacement records calls with traced values among the arguments, also in lists and
    dicts; other calls go to `target`."""

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []

        def note(value: Any) -> Any:
            if type(value) in (FakeTensor, DeviceOf) or isinstance(value, Proxy):
                found.append(value)
            return value

        torch.fx.node.map_aggregate((args, kwargs), note)
        proxy = next((value for value in found if isinstance(value, Proxy)), None)
        tracer = recording_tracer()
        if proxy is not None:
            return proxy.tracer.create_proxy("call_function", target, args, kwargs)
        if found and tracer is not None:
            return tracer.call("call_function", target, args, kwargs)
        return target(*args, **kwargs)

    return call, target


@patch_call("torch.nn.functional.scaled_dot_product_attention", during=TRACING)
def decide_conditions(original: Callable[..., object], *args: object, **kwargs: object) -> Any:
    """Programs pass `is_causal = length > 1 and …`, which may be a symbolic condition, and C++ requires a bool."""
    tracer = recording_tracer()
    if tracer is not None:
        args = tuple(bool(value) if isinstance(value, torch.SymBool) else value for value in args)
        kwargs = {
            key: bool(value) if isinstance(value, torch.SymBool) else value for key, value in kwargs.items()
        }
    return original(*args, **kwargs)


@patch("torch.nn.Parameter.__new__", during=TRACING)
def refuse_new_parameters(original: Any) -> Any:
    """A parameter that the program makes can't be in a graph: nothing would train it."""

    @functools.wraps(original)
    def new(cls: object, data: Any = None, requires_grad: bool = True) -> Any:
        tracer = recording_tracer()
        if tracer is not None and tracer.handles((data,), {}):
            raise make_unregistered_error("the program makes a parameter while it is traced", "nn.Parameter")
        return original(cls, data, requires_grad)

    return staticmethod(new)


@patch_call("torch.jit.ScriptFunction.__call__", during=TRACING)
def record_script_call(
    original: Callable[..., object], self: object, /, *args: object, **kwargs: object
) -> Any:
    """TorchScript runs in C++, which has no sizes for stand-ins with symbols, nor for proxies."""
    tracer = recording_tracer()
    if tracer is None or not tracer.handles(args, kwargs):
        return original(self, *args, **kwargs)
    return tracer.call("call_function", call_scripted, (self, *args), kwargs)


def apply_function(function: type[torch.autograd.Function], *args: object, **kwargs: object) -> Any:
    """The target of a node: `function.apply(…)`, which has its own backward."""
    return function.apply(*args, **kwargs)


def call_scripted(function: Any, *args: object, **kwargs: object) -> Any:
    """The target of a node: a call of a TorchScript function, which has no importable name. On stand-ins, its original
    Python function runs, because TorchScript reads sizes as numbers."""
    is_stood_in = any(type(value) is FakeTensor for value in (*args, *kwargs.values()))
    return (_torch.original_python_function(function) if is_stood_in else function)(*args, **kwargs)


@patch("torch.autograd.Function.apply", during=TRACING)
def record_autograd_function(original: Any) -> Any:
    """The call is one node: `forward` needs a context, which a graph does not have."""

    of_any_class = _torch.function_of_class_method(original)

    @functools.wraps(original)
    def apply(cls: object, *args: Any, **kwargs: Any) -> Any:
        tracer = recording_tracer()
        if tracer is None or not tracer.handles(args, kwargs):
            return of_any_class(cls, *args, **kwargs)
        return tracer.call("call_function", apply_function, (cls, *args), kwargs)

    return classmethod(apply)


@patch_call("torch._functorch.eager_transforms._wrap_tensor_for_grad", during=TRACING)
def refuse_differentiation(original: Callable[..., object], value: Any, level: int) -> object:
    """Called for each input of a function that `torch.func` differentiates; traced values have no gradients."""
    tracer = recording_tracer()
    if tracer is not None and tracer.handles((value,), {}):
        raise tracer.make_refusal(
            "torch.func differentiates a function of this value, which is not supported", value
        )
    return original(value, level)


@patch_call("torch._functorch.apis.vmap_impl", during=TRACING)
def record_vmap(
    original: Callable[..., object], func: Callable[..., object], in_dims: object, out_dims: object, randomness: str,
    chunk_size: object, *args: object, **kwargs: object,
) -> Any:  # fmt: skip
    """Called for every function that `torch.vmap` made: it is recorded with its body as a subgraph."""
    tracer = recording_tracer()
    if tracer is None:
        return original(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    return call_vmap(tracer, func, in_dims, out_dims, randomness, chunk_size, args, kwargs)
