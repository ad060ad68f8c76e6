"""Manual tracing: the active recorder, a trace with a given tracer, an isolated trace inside another."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from understudy import _torch
from understudy.capture.graph_passes import insert_promises, remove_dead_code
from understudy.capture.make_fx import TracingMode, make_fx, name_of
from understudy.capture.predispatch import settle
from understudy.capture.proxy_slots import track_tensor_tree
from understudy.capture.recorder import Decompositions, ProxyTorchDispatchMode
from understudy.capture.tracer import OPEN, SYMBOLIC, PythonKeyTracer
from understudy.errors import UnderstudyError
from understudy.fake.torch_api import unset_fake_temporarily

# --- the recorder of this thread ------------------------------------------------------------------------------------


def get_proxy_mode() -> ProxyTorchDispatchMode | None:
    """The recorder that is active in this thread, None outside of a trace."""
    recorder: ProxyTorchDispatchMode | None = _torch.active_recorder()
    return recorder


def get_innermost_proxy_mode() -> ProxyTorchDispatchMode | None:
    """The recorder that is active in this thread, None outside of a trace."""
    return get_proxy_mode()


def get_torch_dispatch_modes() -> list[Any]:
    """The dispatch modes of this thread, outermost first."""
    return _torch.dispatch_modes()


@contextmanager
def disable_proxy_modes_tracing(enable_current: bool = False) -> Iterator[ProxyTorchDispatchMode | None]:
    """Inside, nothing is recorded; yields the deactivated recorder."""
    with _torch.without_recorder() as recorder:
        yield recorder


@contextmanager
def maybe_disable_fake_tensor_mode() -> Iterator[Any]:
    """Inside, operators run for real; yields the deactivated fake mode, None if there was none."""
    with unset_fake_temporarily() as mode:
        yield mode


def proxy_call(
    proxy_mode: ProxyTorchDispatchMode,
    func: object,
    pre_dispatch: bool,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Record one operator call, as if the recorder had intercepted it, and return its result."""
    if pre_dispatch is not proxy_mode.pre_dispatch:
        raise UnderstudyError(
            f"proxy_call with pre_dispatch={pre_dispatch}, and a recorder that was made with "
            f"pre_dispatch={proxy_mode.pre_dispatch}: use the same value for both"
        )
    with _torch.without_recorder():
        return proxy_mode.__torch_dispatch__(func, (), args, kwargs)


# --- symbolic numbers -----------------------------------------------------------------------------------------------


class ProxySymDispatchMode:
    """Arithmetic on symbolic numbers for the graph of a tracer.

    Arithmetic is not recorded when it happens: a number is identified by its expression, and becomes a node when an
    operator uses it. So this mode intercepts nothing; with `enable_tracing = False` the tracer does not take over the
    environment of the symbols.
    """

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self.tracer = tracer
        self.enable_tracing = True

    def __enter__(self) -> ProxySymDispatchMode:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __sym_dispatch__(self, func: Any, types: object, args: Any, kwargs: Any) -> Any:
        """Apply `func` to symbolic numbers; a product with the literal 1 is the other factor."""
        if func is operator.mul:
            for one, other in (args, args[::-1]):
                if isinstance(one, int) and one == 1:
                    return other
        result = func(*args, **kwargs)
        if self.enable_tracing and isinstance(result, SYMBOLIC) and self.tracer.shape_env is None:
            self.tracer.shape_env = getattr(result.node, "shape_env", None)
        return result


def handle_sym_dispatch(func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
    """Apply `func` to symbolic numbers of the current trace."""
    recorder = get_proxy_mode()
    if recorder is None:
        raise UnderstudyError(
            "handle_sym_dispatch: expected an active trace, got none; call the function itself"
        )
    return recorder.__sym_dispatch__(func, (), args, kwargs)


def maybe_enable_thunkify() -> AbstractContextManager[None]:
    """Inside a trace, `thunkify` computes a value on first access."""
    return _thunkify_lazily(True)


def maybe_disable_thunkify() -> AbstractContextManager[None]:
    """Inside, `thunkify` computes a value at once."""
    return _thunkify_lazily(False)


@contextmanager
def _thunkify_lazily(is_lazy: bool) -> Iterator[None]:
    recorder = get_proxy_mode()
    if recorder is None:
        yield
        return
    tracer = recorder.tracer
    before, tracer.enable_thunkify = tracer.enable_thunkify, is_lazy
    try:
        yield
    finally:
        tracer.enable_thunkify = before


# --- a trace with a given tracer ---------------------------------------------------------------------------------------


def fake_signature(fn: Callable[..., object], nargs: int) -> Callable[..., Any]:
    """`fn` as a function of exactly `nargs` positional arguments, arg0, arg1, …, for functions of `*args`."""
    names = ", ".join(f"arg{position}" for position in range(nargs))
    made: Callable[..., Any] = eval(f"lambda {names}: fn({names})", {"fn": fn})
    return made


def dispatch_trace(
    root: torch.nn.Module | Callable[..., object], tracer: PythonKeyTracer, concrete_args: object = None
) -> GraphModule:
    """The graph module of what `tracer` records while `root` runs on proxies of its arguments.

    `root` registers the proxies of its tensors (`track_tensor_tree`) and calls the program on the tensors. It has to be
    called inside `ProxyTorchDispatchMode(tracer, …)`, which records the operators. See `wrap_key`.
    """
    graph = tracer.trace(
        root if isinstance(root, torch.nn.Module) else _marked_open(root, tracer), concrete_args
    )
    settle(tracer)
    remove_dead_code(graph)
    insert_promises(graph, tracer.shape_env)
    return _torch.lazy_graph_module(tracer.root, graph, name_of(root))


def _marked_open(root: Callable[..., object], tracer: PythonKeyTracer) -> Callable[..., Any]:
    """While `root` runs, tensors keep their nodes in the tracer's graph, even if another trace uses them."""

    @functools.wraps(root)
    def run(*args: object) -> Any:
        graph = tracer.graph
        OPEN.add(graph)
        try:
            return root(*args)
        finally:
            OPEN.remove(graph)

    return run


def wrap_key(
    f: Callable[..., object], tensors: Any, tracer: PythonKeyTracer, pre_dispatch: bool = False
) -> Callable[..., Any]:
    """A function of proxies that calls `f` on these values: the `root` of `dispatch_trace`."""
    flat, _ = _torch.tree_flatten(tensors)

    @functools.wraps(f)
    def call(*proxies: Any) -> Any:
        flat_proxies, _ = _torch.tree_flatten(proxies)
        with disable_proxy_modes_tracing():
            track_tensor_tree(flat, flat_proxies, constant=None, tracer=tracer)
        given = tensors
        if tracer.proxy_module_inputs:
            given = [
                proxy if isinstance(t, torch.nn.Module) else t
                for t, proxy in zip(tensors, proxies, strict=True)
            ]
        return _torch.tree_map(tracer.unwrap_proxy, f(*given))

    return call


# --- an isolated trace inside another -----------------------------------------------------------------------


def wrapper_and_args_for_make_fx(
    func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """`func(*args, **kwargs)` as a function of one flat list, and that list: make_fx takes no keywords."""
    flat, structure = _torch.tree_flatten((args, kwargs))

    def call(flat_args: list[Any]) -> Any:
        positional, named = _torch.tree_unflatten(flat_args, structure)
        return func(*positional, **named)

    return call, flat


def get_isolated_graphmodule(
    func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any], tracing_mode: TracingMode = "real",
    decomposition_table: Decompositions | None = None,
) -> GraphModule:  # fmt: skip
    """The graph of `func(*args, **kwargs)`; an outer trace records nothing of it."""
    wrapped, flat = wrapper_and_args_for_make_fx(func, args, kwargs)
    with disable_proxy_modes_tracing():
        return make_fx(wrapped, decomposition_table, tracing_mode)(flat)
