"""Rules for operators that C++ computes with plain integers inside a transform of `torch.func`.

While a transform runs on stand-ins with symbolic sizes, our rules replace torch's, in all threads, with the same
results. Batching rules (`ops/shared/batching.py`) handle one level of vmap; the rules here are called before any
transform.
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
from understudy.ops.shared.batching import batching_rule, random_batching_rule
from understudy.ops.shared.decompositions import has_symbolic_sizes, on_meta_tensors, under_transforms
from understudy.spec.call import flat

log = logging.getLogger(__name__)
Function = Callable[..., Any]
aten = torch.ops.aten


def _by_decomposition(name: str, function: Function) -> Function:
    """A rule that runs the decomposition for symbolic sizes."""
    op = _torch.operator_named(name)

    def rule(keys: object, *args: object, **kwargs: object) -> Any:
        if any(has_symbolic_sizes(tensor) for tensor in flat(torch.Tensor, args, kwargs)):
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _torch.decompose(op, *args, **kwargs)

    return rule


def _without_keys(function: Function) -> Function:
    return lambda keys, *args, **kwargs: function(*args, **kwargs)


RULES: dict[str, dict[str, Function]] = {
    "FuncTorchBatched": dict(batching_rule.items()),
    "FuncTorchVmapMode": dict(random_batching_rule.items()),
    "FuncTorchDynamicLayerFrontMode": {
        name: _by_decomposition(name, function) for name, function in under_transforms.items()
    },
    "Meta": {name: _without_keys(function) for name, function in on_meta_tensors.items()},
}
"""By dispatch key and the name of the operator."""


class _TransformRules:
    """Registers the rules while any transform needs them. torch removes them when the library object is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._library: torch.library.Library | None = None

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                library = self._library = torch.library.Library("aten", "IMPL")
                with warnings.catch_warnings():  # about overriding a rule of torch
                    warnings.simplefilter("ignore")
                    for key, rules in RULES.items():
                        for name, rule in rules.items():
                            _register_rule(library, name, rule, key)

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._library = None


def _register_rule(library: torch.library.Library, name: str, rule: Function, key: str) -> None:
    try:
        library.impl(name, rule, key, with_keyset=True, allow_override=False)
    except RuntimeError as error:  # the program has registered its own
        log.debug("no rule for %s inside of transforms: %s", name, error)


RULES_IN_USE = _TransformRules()


def add_rules_to_transform(original: Function) -> Function:
    """Wrap the context manager in which torch runs a transform."""

    @contextmanager
    def level(*args: object, **kwargs: object) -> Iterator[Any]:
        if not _needs_rules():
            with original(*args, **kwargs) as depth:
                yield depth
            return
        were_kept = _torch.are_view_operators_kept()
        RULES_IN_USE.begin()
        try:
            # A write to a view gives its base a tangent: C++ takes the view again, by as_strided with plain integers
            # unless it has kept the operator.
            _torch.keep_view_operators(True)
            with original(*args, **kwargs) as depth:
                yield depth
        finally:
            _torch.keep_view_operators(were_kept)
            RULES_IN_USE.end()

    return level


def _needs_rules() -> bool:
    mode = _torch.active_fake_mode()
    return mode is not None and mode.shape_env is not None and not mode.static_shapes


class _FunctionalLevels(threading.local):
    """The levels of `torch.func.functionalize` of a thread, which torch enters and leaves by two functions."""

    def __init__(self) -> None:
        self.have_rules: list[bool] = []


_LEVELS = _FunctionalLevels()


def begin_functional_level() -> None:
    _LEVELS.have_rules.append(_needs_rules())
    if _LEVELS.have_rules[-1]:
        RULES_IN_USE.begin()


def end_functional_level() -> None:
    if _LEVELS.have_rules and _LEVELS.have_rules.pop():  # empty where the level was entered before the first mode
        RULES_IN_USE.end()
