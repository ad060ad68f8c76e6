"""Operators that C++ computes with plain sizes where a transform of `torch.func` is around them.

While a transform runs on stand-ins with symbolic sizes, rules of our own stand in the place of torch's: for every thread,
to the same effect. Those of `batching` are for one level of vmap; those here hear of a call before any transform does.
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from understudy import _torch
from understudy.fake import batching, composites, composites_numeric
from understudy.infer.call import flat

log = logging.getLogger(__name__)
Function = Callable[..., Any]
aten = torch.ops.aten


def linear(keys: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Contiguous rows are multiplied as one matrix."""
    if (
        bias is None
        or input.dim() < 3
        or weight.dim() != 2
        or not _has_symbols(input)
        or not input.is_contiguous()
    ):
        return aten.linear.default.decompose(input, weight, bias)
    transposed = weight.t()
    result = torch.addmm(bias, input.reshape(-1, input.shape[-1]), transposed)
    return result.view(*input.shape[:-1], result.shape[1])


def group_norm(
    keys: Any, input: torch.Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    is_usual = input.dim() > 2 and input.device.type == "cpu" and input.is_contiguous()
    if not _has_symbols(input) or not is_usual or input.shape[1] % groups:
        return aten.group_norm.default.decompose(input, groups, weight, bias, eps, cudnn_enabled)
    count, channels, *rest = input.shape
    return torch.native_group_norm(input, weight, bias, count, channels, math.prod(rest), groups, eps)[0]


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _by_steps(name: str, function: Function) -> Function:
    """By the steps that stand-ins take without a transform."""
    op = _torch.operator_named(name)

    def rule(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_has_symbols(tensor) for tensor in flat(torch.Tensor, args, kwargs)):
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return op.decompose(*args, **kwargs)

    return rule


STEPS: dict[str, Function] = {
    "corrcoef": composites.corrcoef,
    "cov": composites.cov,
    "kron": composites.kron,
    "take_along_dim": composites.take_along_dim,
    "unsafe_chunk": composites.unsafe_chunk,
    "gradient.scalarint": composites_numeric.gradient,
    "gradient.scalararray": composites_numeric.gradient_along,
    "gradient.array": composites_numeric.gradient_of_one,
}
RULES: dict[str, dict[str, Function]] = {
    "FuncTorchBatched": batching.RULES,
    "FuncTorchDynamicLayerFrontMode": {
        "group_norm": group_norm,
        "linear": linear,
        **{name: _by_steps(name, function) for name, function in STEPS.items()},
    },
}
"""By dispatch key and the name of the operator."""


class _Registered:
    """The rules, for as long as any transform needs them. torch takes them back when nobody holds the library any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._library: torch.library.Library | None = None

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                library = self._library = torch.library.Library("aten", "IMPL")
                with warnings.catch_warnings():  # that there was a rule before is known
                    warnings.simplefilter("ignore")
                    for key, rules in RULES.items():
                        for name, rule in rules.items():
                            _put(library, name, rule, key)

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._library = None


def _put(library: torch.library.Library, name: str, rule: Function, key: str) -> None:
    try:
        library.impl(name, rule, key, with_keyset=True, allow_override=False)
    except RuntimeError as error:  # the program has put one there itself, and keeps it
        log.debug("no rule for %s inside of transforms: %s", name, error)


REGISTERED = _Registered()


def with_rules(original: Function) -> Function:
    """Of the context in which torch runs a transform."""

    @contextmanager
    def level(*args: Any, **kwargs: Any) -> Iterator[Any]:
        mode = _torch.active_fake_mode()
        if mode is None or mode.shape_env is None or mode.static_shapes:
            with original(*args, **kwargs) as depth:
                yield depth
            return
        REGISTERED.begin()
        try:
            with original(*args, **kwargs) as depth:
                yield depth
        finally:
            REGISTERED.end()

    return level
