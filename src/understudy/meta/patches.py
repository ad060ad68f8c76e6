"""What is replaced while a program is traced: calls of modules, and functions that are to be kept whole.

Python has no hook for these that belongs to a thread. So each replacement asks first whether *this* thread traces, and
does what the original does if not. They are counted, and gone when the last trace is over, however it ended.
"""

from __future__ import annotations

import builtins
import functools
import math
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Proxy

from understudy import _torch
from understudy.meta.proxies import SYMBOLIC, DeviceOf
from understudy.shapes.algebra.floats import FUNCTIONS
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

current_tracer: ContextVar[MetaTracer | None] = ContextVar("current_tracer", default=None)
"""Which trace this thread is in."""
OF_SYMBOLS = {getattr(math, name): _torch.symbolic_function(name) for name in FUNCTIONS}
"""Functions of Python that want a number, and those that give a symbolic one for a symbolic one."""
_MISSING: Any = object()
Place = tuple[int, str]


class SharedPatches:
    """Replacements that several threads may want at once: made by the first, taken back by the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Place, tuple[int, Any, Any]] = {}

    def hold(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        with self._lock:
            place = (id(owner), name)
            count, original, mine = self._held.get(place, (0, None, None))
            if not count:
                original = _read(owner, name)
                mine = replacement(_find_builtin(owner, name, original))
                _write(owner, name, mine)
            self._held[place] = (count + 1, original, mine)

    def release(self, owner: Any, name: str) -> None:
        with self._lock:
            place = (id(owner), name)
            count, original, mine = self._held.pop(place)
            if count > 1:
                self._held[place] = (count - 1, original, mine)
            elif _read(owner, name) is mine:  # else somebody replaced it once more, and will restore ours
                _write(owner, name, original)


def _read(owner: Any, name: str) -> Any:
    return owner.get(name, _MISSING) if isinstance(owner, dict) else vars(owner).get(name, _MISSING)


def _find_builtin(owner: Any, name: str, value: Any) -> Any:
    """A name that a module does not define itself is one of Python's own: `len`."""
    return getattr(builtins, name) if value is _MISSING else value


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, MutableMapping):
        if value is _MISSING:
            del owner[name]
        else:
            owner[name] = value
    else:
        setattr(owner, name, value)


PATCHES = SharedPatches()


@contextmanager
def patch_calls(tracer: MetaTracer, functions: list[tuple[Any, str]]) -> Iterator[None]:
    """In this thread, calls of modules and of these functions (namespace, name) go to the tracer."""
    wanted: list[tuple[Any, str, Any]] = [
        (torch.nn.Module, "__call__", _module_call),
        (torch.nn.Parameter, "__new__", _parameter_made),
        (torch.jit.ScriptFunction, "__call__", _script_call),
        (torch.autograd.Function, "apply", _autograd_call),
        (torch.SymInt, "__hash__", _hash),
        (torch.nn.functional, "scaled_dot_product_attention", _with_plain_conditions),
        (*_torch.place_of_vmap(), _vmap_call),
        (*_torch.place_of_differentiation(), _wrap_differentiation),
    ]
    wanted += [(owner, name, _whole_function) for owner, name in functions]
    held: list[tuple[Any, str]] = []
    token = current_tracer.set(tracer)
    try:
        for owner, name, replacement in wanted:
            PATCHES.hold(owner, name, replacement)
            held.append((owner, name))
        yield
    finally:
        current_tracer.reset(token)
        for owner, name in reversed(held):
            PATCHES.release(owner, name)


def _module_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving:
            return original(self, *args, **kwargs)
        return tracer.called_module(self, functools.partial(original, self), args, kwargs)

    return call


def _whole_function(original: Callable[..., Any]) -> Callable[..., Any]:
    of_symbols = OF_SYMBOLS.get(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving:
            return original(*args, **kwargs)
        if tracer.handles(args, kwargs):
            return tracer.called_whole(original, args, kwargs)
        is_symbolic = any(isinstance(argument, SYMBOLIC) for argument in args)
        return (of_symbols if is_symbolic and of_symbols else original)(*args, **kwargs)

    return call


def gen_constructor_wrapper(target: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(a function for the place of `target`, `target`): called with a value of a trace among its arguments, in lists and
    dicts as well, it records the call there; else it calls `target`."""

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxies: list[Proxy] = []

        def note(value: Any) -> Any:
            if isinstance(value, Proxy) or type(value) is DeviceOf:
                proxies.append(value if isinstance(value, Proxy) else value._attribute)
            return value

        torch.fx.node.map_aggregate((args, kwargs), note)
        if not proxies:
            return target(*args, **kwargs)
        return proxies[0].tracer.create_proxy("call_function", target, args, kwargs)

    return call, target


def _hash(original: Callable[..., Any]) -> Callable[..., Any]:
    """A size that is the key of a dict has to be a number: it is the one at hand from there on."""

    def __hash__(self: Any) -> int:
        is_traced = current_tracer.get() is not None and type(self.node) is SymNode
        return hash(int(self)) if is_traced else original(self)

    return __hash__


def _with_plain_conditions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Programs ask `is_causal = length > 1 and …`, which is a condition on symbols if that is false, and C++ takes none."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer.get()
        if tracer is not None and not tracer.is_deriving:
            args = tuple(bool(value) if isinstance(value, torch.SymBool) else value for value in args)
            kwargs = {
                key: bool(value) if isinstance(value, torch.SymBool) else value
                for key, value in kwargs.items()
            }
        return original(*args, **kwargs)

    return call


def _parameter_made(original: Any) -> Any:
    """A parameter that the program makes has no place in a graph: nothing would train it."""

    @functools.wraps(original.__func__)
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        tracer = current_tracer.get()
        if tracer is not None and not tracer.is_deriving and tracer.handles((data,), {}):
            raise tracer.has_made_a_parameter()
        return original.__func__(cls, data, requires_grad)

    return staticmethod(new)


def _script_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """TorchScript runs in C++, and would look into the empty tensors that values of a trace are made of."""

    @functools.wraps(original)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving or not tracer.handles(args, kwargs):
            return original(self, *args, **kwargs)
        return tracer.called_script(self, args, kwargs)

    return call


def _autograd_call(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving or not tracer.handles(args, kwargs):
            return original.__get__(None, cls)(*args, **kwargs)
        return tracer.called_autograd_function(cls, args, kwargs)

    return classmethod(apply)


def _wrap_differentiation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(value: Any, level: int) -> Any:
        tracer = current_tracer.get()
        if tracer is not None and not tracer.is_deriving and tracer.handles((value,), {}):
            raise tracer.refused(
                "torch.func differentiates a function of this value, which can't be recorded", value
            )
        return original(value, level)

    return wrap


def _vmap_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(
        func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tracer = current_tracer.get()
        if tracer is None or tracer.is_deriving:
            return original(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
        return tracer.called_vmap(func, in_dims, out_dims, randomness, chunk_size, args, kwargs)

    return call
