"""Patches of compilation, higher-order operators, TorchScript and torch.func."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy._torch import active_fake_mode
from understudy.errors import ArgumentError, NoDataError, NotProvidedError
from understudy.fake import higher_order as _higher_order  # noqa: F401  (registers how each is run)
from understudy.fake.tensor import FakeTensor
from understudy.ops import hops
from understudy.patching import (
    ANY_MODE,
    RECORDING,
    SYMBOLS,
    on_replacement,
    patch,
    patch_call,
)
from understudy.spec.error_context import with_line

Function = Callable[..., Any]


@patch_call("torch.compile", during=ANY_MODE)
def skip_compilation(original: Function, model: object = None, **options: object) -> object:
    """torch's compiler does not support our fakes, and would gain nothing: the function runs uncompiled. A module is
    wrapped as torch wraps it, so that programs find `_orig_mod`, and its prefix in the names of parameters. Higher-order
    operators that are called eagerly compile themselves."""
    if active_fake_mode() is None and not _records_branches(_torch.active_recorder()):
        return original(model, **options)
    if model is None:
        return lambda function: skip_compilation(original, function)
    return torch.compiler.disable(model) if isinstance(model, torch.nn.Module) else model


@patch_call("torch.export.export", during=ANY_MODE)
def refuse_strict_export(
    original: Function, *args: object, strict: bool = False, **options: object
) -> object:
    """TorchDynamo, which `strict=True` asks for, knows only torch's own fakes."""
    if strict and active_fake_mode() is not None:
        raise with_line(
            NotProvidedError("torch.export.export: expected strict=False inside a FakeTensorMode, got strict=True"),
            "torch.export.export",
            "strict=True",
            "leave out strict=True, or call it outside of the mode; understudy.export captures without TorchDynamo",
        )  # fmt: skip
    return original(*args, strict=strict, **options)


@patch("torch._ops.HigherOrderOperator.dispatch", during=ANY_MODE)
def run_higher_order_operators(original: Function) -> Function:
    """torch traces the functions passed to such an operator with its own mode and tracer. Under our fake mode they run
    as plain code; our recorder records them itself."""

    def dispatch(self: Any, key: object, /, *args: object, **kwargs: object) -> object:
        key = _torch.key_without_spare(self, key, args, kwargs)
        recorder = _torch.active_recorder()
        if _records_branches(recorder):
            return recorder.call_higher_order(original, self, key, args, kwargs)
        run = hops.higher_order(self).run
        mode = active_fake_mode()
        if (
            run is None
            or mode is None
            or type(mode) is _torch.torch_fake_mode_class()
            or _torch.is_recording()
        ):
            return original(self, key, *args, **kwargs)
        return run(*args, **kwargs)

    return dispatch


def _records_branches(recorder: object) -> bool:
    """Whether this is our recorder: higher-order operators reach it before autograd."""
    return hasattr(type(recorder), "call_higher_order")


@patch_call("torch._higher_order_ops.cond.validate_subgraph_args_types", during=RECORDING)
def accept_structures_in_cond(original: Function, operands: Sequence[object]) -> None:
    """Operands of `cond` may be nested: torch's compiler flattens them first, our recorder flattens them itself."""
    if not _records_branches(_torch.active_recorder()):
        original(operands)


on_replacement.append(_torch.compile_as)


@patch_call("torch.jit.ScriptFunction.__call__", during=ANY_MODE)
def run_python_of_scripted_function(original: Function, self: object, *args: object, **kwargs: object) -> Any:
    """TorchScript reads sizes as integers, and makes real tensors of numbers. The Python function is run instead."""
    is_watched = active_fake_mode() is not None or _torch.active_recorder() is not None
    written = _torch.python_function_of_script(self) if is_watched else None
    return original(self, *args, **kwargs) if written is None else written(*args, **kwargs)


@patch_call("torch.jit.trace", during=ANY_MODE)
def refuse_jit_traces(original: Function, *args: object, **kwargs: object) -> object:
    """TorchScript's tracer runs the function again on its own, and compares values."""
    tensors = [value for value in _torch.tree_leaves((args, kwargs)) if type(value) is FakeTensor]
    module: Any = next((value for value in args if isinstance(value, torch.nn.Module)), None)
    if module is not None:
        tensors += [value for value in module.parameters() if type(value) is FakeTensor]
    if not tensors:
        return original(*args, **kwargs)
    raise with_line(
        NoDataError("torch.jit.trace requires data, which stand-ins do not have"),
        "torch.jit.trace", ", ".join(str(tensor.spec) for tensor in tensors[:3]),
        "trace real tensors outside of the mode; or capture the program: understudy.make_fx(function)(*inputs), "
        "understudy.export(module, inputs)",
    )  # fmt: skip


@patch_call("torch._functorch.vmap._remove_batch_dim", during=ANY_MODE)
def refuse_dims_out_of_bounds(
    original: Function, result: torch.Tensor, level: int, size: object, out_dim: int
) -> object:
    """C++ does not check out_dims for a result that is not mapped, and writes past the list of sizes. With symbolic sizes
    that ends the process."""
    if not _torch.is_batch_of(result, level) and not 0 <= out_dim <= result.dim():
        raise with_line(
            ArgumentError(
                f"vmap: expected out_dims from 0 to {result.dim()} for a result that is not mapped, got {out_dim}"
            ),
            "torch.vmap", f"result of shape {list(result.shape)}",
            "correct out_dims; torch itself reads memory out of bounds here",
        )  # fmt: skip
    return original(result, level, size, out_dim)


class _FunctionalLevels(threading.local):
    """Contexts of the levels of `torch.func.functionalize` in a thread: torch enters and leaves levels by two functions."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []


_LEVELS = _FunctionalLevels()


@patch_call("torch._functorch.eager_transforms._func_increment_nesting", during=SYMBOLS)
def enter_functional_level(original: Function, *args: object) -> Any:
    """C++ tries each write on meta tensors first: only Python implementations of operators keep symbolic sizes there."""
    context = _torch.python_versions()
    context.__enter__()
    _LEVELS.contexts.append(context)
    return original(*args)


@patch_call("torch._functorch.eager_transforms._func_decrement_nesting", during=SYMBOLS)
def leave_functional_level(original: Function) -> Any:
    """The other half of `enter_functional_level`."""
    if _LEVELS.contexts:  # empty if the level was entered before the first mode
        _LEVELS.contexts.pop().__exit__(None, None, None)
    return original()


@patch_call("torch._higher_order_ops.flex_attention.make_fx", during=ANY_MODE)
def trace_fakes_with_our_make_fx(
    original: Function, f: Function, *args: object, **options: object
) -> Function:
    """Flex attention traces a function itself, and torch's tracer does not know our fakes."""
    mode = active_fake_mode()
    if mode is None or type(mode) is _torch.torch_fake_mode_class():
        return original(f, *args, **options)
    public = importlib.import_module("understudy")  # imported late: this package must not import `capture`
    traced: Function = public.make_fx(f, *args, **{"_allow_fake_constant": True, **options})
    return traced
