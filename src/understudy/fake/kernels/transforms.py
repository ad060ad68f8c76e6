"""Operators that C++ computes with plain sizes where a transform of `torch.func` is around them.

While a transform runs on stand-ins with symbolic sizes, rules of our own stand in the place of torch's: for every thread,
to the same effect. Batching rules (`ops/shared/batching.py`) are for one level of vmap; those here hear of a call before
any transform does.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from understudy import _torch
from understudy.contexts import contextmanager
from understudy.ops.shared.batching import batching_rule
from understudy.ops.shared.decompositions import has_symbolic_sizes, under_transforms
from understudy.spec.call import flat

log = logging.getLogger(__name__)
Function = Callable[..., Any]
aten = torch.ops.aten


def _by_steps(name: str, function: Function) -> Function:
    """By the steps that stand-ins take without a transform."""
    op = _torch.operator_named(name)

    def rule(keys: object, *args: object, **kwargs: object) -> Any:
        if any(has_symbolic_sizes(tensor) for tensor in flat(torch.Tensor, args, kwargs)):
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return op.decompose(*args, **kwargs)

    return rule


RULES: dict[str, dict[str, Function]] = {
    "FuncTorchBatched": dict(batching_rule.items()),
    "FuncTorchDynamicLayerFrontMode": {
        name: _by_steps(name, function) for name, function in under_transforms.items()
    },
}
"""By dispatch key and the name of the operator."""


class _TransformRules:
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


REGISTERED = _TransformRules()


def with_rules(original: Function) -> Function:
    """Of the context in which torch runs a transform."""

    @contextmanager
    def level(*args: object, **kwargs: object) -> Iterator[Any]:
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
