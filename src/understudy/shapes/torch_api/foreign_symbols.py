"""Functions on symbols that are given symbols of torch's own `ShapeEnv`, as in code that `torch.compile` compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from understudy import _torch

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
Function = TypeVar("Function", bound=Callable[..., Any])


def accept_torch_symbols(function: Function) -> Function:
    """A decorator: a call with a symbol of torch's own, or in compiled code, is a call of torch's function of this name."""
    name = function.__name__

    @functools.wraps(function)
    def call(a: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or (isinstance(a, SYMBOLIC) and is_torch_symbol(a)):
            return _torch.function_for_torch_symbols(name)(a, *args, **kwargs)
        return function(a, *args, **kwargs)

    return call  # type: ignore[return-value]


def is_torch_symbol(number: Any) -> bool:
    """Whether it belongs to an environment of torch. Its class may also be a node of ours, or a constant."""
    node = number.node
    return type(node) is _torch.torch_symbol_class() and not hasattr(node.shape_env, "torch_api")
