"""Functions that keep their results (`functools.lru_cache`), while a program is traced on stand-ins.

What such a function has kept from before is a tensor of the program like any other: a constant of the graph. What it keeps
from the trace is nothing without it: a cache that has taken up a stand-in of the trace is emptied when the trace ends.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from understudy.capture.borrowed_modules import cell_contents
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import parts_in
from understudy.lines import is_the_users

CACHED: Any = type(functools.lru_cache(len))
"""The type of a function that keeps its results."""


class CachesOfNamespaces:
    """The functions with a cache that stand in a module of Python, in its classes, and in modules that it names. A module
    is looked through once, and again if it has got more names."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, list[Any]]] = {}

    def find(self, names: Iterable[str]) -> Iterator[Any]:
        modules = {name: sys.modules.get(name) for name in names}
        for name, module in modules.items():
            if module is None or not _is_looked_through(module):
                continue
            size, caches = self._seen.get(name, (-1, []))
            if size != len(vars(module)):
                caches = [*_caches_in(module), *(cache for inner in _modules_in(module) for cache in _caches_in(inner))]
                self._seen[name] = len(vars(module)), caches
            yield from caches


_CACHES = CachesOfNamespaces()


def _is_looked_through(module: Any) -> bool:
    """Whether it is neither torch's nor of Python's own library."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return isinstance(file, str) and is_the_users(file)


def _modules_in(module: ModuleType) -> list[ModuleType]:
    return [value for value in list(vars(module).values()) if isinstance(value, ModuleType) and _is_looked_through(value)]


def _caches_in(module: ModuleType) -> Iterator[Any]:
    for value in list(vars(module).values()):
        if type(value) is CACHED:
            yield value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            yield from (part for part in map(_unwrap, list(vars(value).values())) if type(part) is CACHED)


def _unwrap(member: Any) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _surroundings_of(f: Callable[..., Any]) -> tuple[list[Any], set[str]]:
    """The functions with a cache that a function is, wraps, or refers to in its closure, by any number of steps; and the
    names of the modules of Python in which it and the functions in its closure stand."""
    found: list[Any] = []
    names: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [f]
    while todo:
        value = todo.pop()
        if id(value) in seen or not callable(value):
            continue
        seen.add(id(value))
        if type(value) is CACHED:
            found.append(value)
        if isinstance(value, MethodType):
            names.add(type(value.__self__).__module__)
            todo.append(value.__func__)
        elif isinstance(value, FunctionType):
            names.add(value.__module__)
            todo += map(cell_contents, value.__closure__ or ())
        todo.append(getattr(value, "__wrapped__", None))
    return found, names


class CachedFunctions:
    """The caches that a traced function may use."""

    def __init__(self, f: Callable[..., Any], modules: Iterable[torch.nn.Module], mode: FakeTensorMode) -> None:
        self._mode = mode
        self._around, self._names = _surroundings_of(f)
        kinds = {type(part) for module in modules for part in parts_in(module)}
        self._names |= {base.__module__ for kind in kinds for base in kind.__mro__}
        self._misses = {id(cache): cache.cache_info().misses for cache in self._all()}

    def _all(self) -> Iterable[Any]:
        return {id(cache): cache for cache in (*self._around, *_CACHES.find(self._names))}.values()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a function has kept this tensor."""
        return any(kept is tensor for cache in self._all() for kept in tensors_kept_by(cache))

    def empty(self) -> None:
        """Empty the caches that have taken up stand-ins of the trace. May be called again, after an interrupt."""
        for cache in self._all():
            if cache.cache_info().misses != self._misses.get(id(cache), 0):
                kept = tensors_kept_by(cache)
                if any(type(value) is FakeTensor and value.fake_mode is self._mode for value in kept):
                    cache.cache_clear()


def tensors_kept_by(cache: Any) -> list[torch.Tensor]:
    """The tensors among the results that a function keeps, also in lists, tuples, dicts and plain objects."""
    if not cache.cache_info().currsize:
        return []
    return [tensor for value in gc.get_referents(cache) for tensor in _tensors_in(value)]


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < DEEPEST and not isinstance(value, (type, ModuleType, FunctionType, torch.nn.Module)):
        parts = value if isinstance(value, (list, tuple, set)) else value.values() if isinstance(value, dict) else ()
        for part in parts or getattr(value, "__dict__", {}).values():
            yield from _tensors_in(part, depth + 1)


DEEPEST = 4
"""How far into a result tensors are looked for."""
