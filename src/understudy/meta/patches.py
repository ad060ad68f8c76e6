"""What is replaced while a program is traced: calls of modules, and functions that are to be kept whole.

Each replacement asks first whether *this* thread traces, and does what the original does if not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Proxy

from understudy import _torch
from understudy.contexts import contextmanager, to_the_end
from understudy.meta.proxies import SYMBOLIC, DeviceOf, MetaProxy
from understudy.patching import TRACING, Hold, patch, patch_found
from understudy.shapes.algebra.floats import FUNCTIONS

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

current_tracer: ContextVar[MetaTracer | None] = ContextVar("current_tracer", default=None)
"""Which trace this thread is in."""
OF_SYMBOLS = {getattr(math, name): _torch.symbolic_function(name) for name in FUNCTIONS}
"""Functions of Python that want a number, and those that give a symbolic one for a symbolic one."""


@contextmanager
def patch_calls(tracer: MetaTracer, functions: list[tuple[object, str]]) -> Iterator[None]:
    """In this thread, calls of modules and of these functions (namespace, name) go to the tracer.

    The scopes of its fake mode are held as well: the mode is entered for each call, and finds its patches there.
    """
    before = current_tracer.get()
    with to_the_end(lambda: current_tracer.set(before)), Hold() as hold:
        current_tracer.set(tracer)
        hold.enter(TRACING.bit | tracer.derivation.mode.patch_scopes)
        for owner, name in functions:
            hold.replace(owner, name, keep_whole)
        yield


@patch("torch.nn.Module.__call__", during=TRACING)
def record_module_call(original: Callable[..., object]) -> Callable[..., object]:
    """A module is a node, or its calls are recorded under its path."""

    @functools.wraps(original)
    def call(self: torch.nn.Module, /, *args: object, **kwargs: object) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving:
            return original(self, *args, **kwargs)
        return tracer.called_module(self, functools.partial(original, self), args, kwargs)

    return call


@patch_found("functions that torch.fx.wrap, autowrap_modules (math) and autowrap_functions name", during=TRACING)
def keep_whole(original: Callable[..., object]) -> Callable[..., object]:
    """A call with values of the trace is one node, and the function is not entered."""
    of_symbols = OF_SYMBOLS.get(original)

    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving:
            return original(*args, **kwargs)
        if tracer.handles(args, kwargs):
            return tracer.called_whole(original, args, kwargs)
        is_symbolic = any(isinstance(argument, SYMBOLIC) for argument in args)
        return (of_symbols if is_symbolic and of_symbols else original)(*args, **kwargs)

    return call


def gen_constructor_wrapper(target: Callable[..., object]) -> tuple[Callable[..., object], Callable[..., object]]:
    """(a function for the place of `target`, `target`): called with a value of a trace among its arguments, in lists and
    dicts as well, it records the call there; else it calls `target`."""

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxies: list[Proxy | MetaProxy] = []

        def note(value: Any) -> Any:
            if type(value) is DeviceOf:
                proxies.append(value._attribute)
            elif issubclass(type(value), (Proxy, MetaProxy)):
                proxies.append(value)
            return value

        torch.fx.node.map_aggregate((args, kwargs), note)
        if not proxies:
            return target(*args, **kwargs)
        return proxies[0].tracer.create_proxy("call_function", target, args, kwargs)

    return call, target


@patch("torch.nn.functional.scaled_dot_product_attention", during=TRACING)
def decide_conditions(original: Callable[..., object]) -> Callable[..., object]:
    """Programs ask `is_causal = length > 1 and …`, which is a condition on symbols if that is false, and C++ takes none."""

    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> Any:
        tracer = current_tracer.get()
        if tracer is not None and not tracer.is_deriving:
            args = tuple(bool(value) if isinstance(value, torch.SymBool) else value for value in args)
            kwargs = {
                key: bool(value) if isinstance(value, torch.SymBool) else value
                for key, value in kwargs.items()
            }
        return original(*args, **kwargs)

    return call


@patch("torch.nn.Parameter.__new__", during=TRACING)
def refuse_new_parameters(original: Any) -> Any:
    """A parameter that the program makes has no place in a graph: nothing would train it."""

    @functools.wraps(original)
    def new(cls: object, data: Any = None, requires_grad: bool = True) -> Any:
        tracer = current_tracer.get()
        if tracer is not None and not tracer.is_deriving and tracer.handles((data,), {}):
            raise tracer.has_made_a_parameter()
        return original(cls, data, requires_grad)

    return staticmethod(new)


@patch("torch.jit.ScriptFunction.__call__", during=TRACING)
def record_script_call(original: Callable[..., object]) -> Callable[..., object]:
    """TorchScript runs in C++, and would look into the empty tensors that values of a trace are made of."""

    @functools.wraps(original)
    def call(self: object, /, *args: object, **kwargs: object) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving or not tracer.handles(args, kwargs):
            return original(self, *args, **kwargs)
        return tracer.called_script(self, args, kwargs)

    return call


@patch("torch.autograd.Function.apply", during=TRACING)
def record_autograd_function(original: Any) -> Any:
    """The call is one node: `forward` works on a context, which a graph does not have."""

    of_any_class = _torch.function_of_class_method(original)

    @functools.wraps(original)
    def apply(cls: object, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving or not tracer.handles(args, kwargs):
            return of_any_class(cls, *args, **kwargs)
        return tracer.called_autograd_function(cls, args, kwargs)

    return classmethod(apply)


@patch("torch._functorch.eager_transforms._wrap_tensor_for_grad", during=TRACING)
def refuse_differentiation(original: Callable[..., object]) -> Callable[..., object]:
    """Each input of a function that `torch.func` differentiates comes here, and a value of the trace has no gradient."""

    @functools.wraps(original)
    def wrap(value: Any, level: int) -> object:
        tracer = current_tracer.get()
        if tracer is not None and not tracer.is_deriving and tracer.handles((value,), {}):
            raise tracer.make_refusal(
                "torch.func differentiates a function of this value, which can't be recorded", value
            )
        return original(value, level)

    return wrap


@patch("torch._functorch.apis.vmap_impl", during=TRACING)
def record_vmap(original: Callable[..., object]) -> Callable[..., object]:
    """Every function that `torch.vmap` made comes here: it is recorded with its body as a graph of its own."""

    @functools.wraps(original)
    def call(
        func: object, in_dims: object, out_dims: object, randomness: object, chunk_size: object, *args: object,
        **kwargs: object,
    ) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving:
            return original(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
        return tracer.called_vmap(func, in_dims, out_dims, randomness, chunk_size, args, kwargs)

    return call
