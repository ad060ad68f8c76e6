"""Functions with a cache (`functools.lru_cache`) that a traced program calls.

A tensor that was in such a cache before the trace, or in a dict or list of a module, is a constant of the graph. Stand-ins
are useless after the trace: a cache that has stored one is cleared when the trace ends. A size that is a symbol is never
a key of a cache.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from understudy.fake.inputs import LRU_CACHE
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import cell_contents, own_containers, unwrap_member, values_in
from understudy.lines import is_user_file
from understudy.spec.call import flat


class CachePlace(NamedTuple):
    """Where a program has a cached function: an attribute of a module or class, or the cell of a closure."""

    owner: Any
    name: str
    cache: Any
    is_plain: bool
    """Whether the member is the cached function itself, not a staticmethod or property."""


def call_with_sizes(cache: Any) -> Callable[..., object]:
    """A cached function that is called without its cache where a size is a symbol. As a key of the cache, the size would
    have to be a number; and what is kept for it belongs to this trace."""

    @functools.wraps(cache)
    def call(*args: object, **kwargs: object) -> object:
        return (
            cache.__wrapped__(*args, **kwargs) if flat(torch.SymInt, args, kwargs) else cache(*args, **kwargs)
        )

    call.__dict__.update(cache_info=cache.cache_info, cache_clear=cache.cache_clear)
    return call


class CachesOfModules:
    """The cached functions in a Python module, in its classes, and in modules that it imports. A module is searched
    once, and again if names were added to it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, list[CachePlace]]] = {}

    def find(self, names: Iterable[str]) -> Iterator[CachePlace]:
        modules = {name: sys.modules.get(name) for name in names}
        for name, module in modules.items():
            if module is None:
                continue
            size, caches = self._seen.get(name, (-1, []))
            if size != len(vars(module)):
                searched = [module, *_inner_modules(module)] if _is_searched(module) else []
                caches = [cache for inner in searched for cache in _caches_in(inner)]
                self._seen[name] = len(vars(module)), caches
            yield from caches


_CACHES = CachesOfModules()


def _is_searched(module: object) -> bool:
    """Whether it belongs neither to torch nor to Python's standard library."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return isinstance(file, str) and is_user_file(file)


def _inner_modules(module: ModuleType) -> list[ModuleType]:
    return [
        value
        for value in list(vars(module).values())
        if isinstance(value, ModuleType) and _is_searched(value)
    ]


def _caches_in(module: ModuleType) -> Iterator[CachePlace]:
    for name, value in list(vars(module).items()):
        yield from _caches_behind(module, name, value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner, member in list(vars(value).items()):
                yield from _caches_behind(value, inner, member)


def _caches_behind(owner: object, name: str, member: object) -> Iterator[CachePlace]:
    """The cached functions behind a value: the value itself, or those that a wrapper calls."""
    value = unwrap_member(member)
    if type(value) is LRU_CACHE:
        yield CachePlace(owner, name, value, value is member)
    elif isinstance(value, FunctionType) and value.__closure__ and hasattr(value, "__wrapped__"):
        for cell in value.__closure__:
            if type(found := cell_contents(cell)) is LRU_CACHE:
                yield CachePlace(cell, "cell_contents", found, True)


def _surroundings_of(f: Callable[..., object]) -> tuple[list[Any], set[str]]:
    """The cached functions that a function is, wraps, or refers to through closures; and the Python modules in which
    these functions are defined."""
    found: list[Any] = []
    names: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [f]
    while todo:
        value = todo.pop()
        if id(value) in seen or not callable(value):
            continue
        seen.add(id(value))
        if type(value) is LRU_CACHE:
            found.append(value)
        if isinstance(value, MethodType):
            names.add(type(value.__self__).__module__)
            todo.append(value.__func__)
        elif isinstance(value, FunctionType):
            names.add(value.__module__)
            todo += map(cell_contents, value.__closure__ or ())
        todo.append(getattr(value, "__wrapped__", None))
    return found, names


class ProgramCaches:
    """The caches that a traced function may use: cached functions, and dicts and lists of modules."""

    def __init__(
        self, f: Callable[..., object], modules: list[torch.nn.Module], mode: FakeTensorMode
    ) -> None:
        """`modules`: those that the function uses, with all of their submodules."""
        self._mode = mode
        self._modules = modules
        self._around, self._names = _surroundings_of(f)
        kinds = set(map(type, modules))
        self._names |= {base.__module__ for kind in kinds for base in kind.__mro__}
        self._misses = {id(cache): cache.cache_info().misses for cache in self._all()}

    def _all(self) -> Iterable[Any]:
        caches = (*self._around, *(place.cache for place in _CACHES.find(self._names)))
        return {id(cache): cache for cache in caches}.values()

    @contextmanager
    def accept_symbols(self) -> Iterator[None]:
        """Inside, a cached function that is called with symbolic sizes is called without its cache."""
        changed: list[tuple[Any, str, Any, Any]] = []
        try:
            for owner, name, cache, is_plain in list(_CACHES.find(self._names)):
                if is_plain and (before := getattr(owner, name, None)) is not None:
                    changed.append((owner, name, before, call_with_sizes(cache)))
                    setattr(owner, name, changed[-1][-1])
            yield
        finally:
            for owner, name, before, call in reversed(changed):
                if getattr(owner, name, None) is call:
                    setattr(owner, name, before)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor was in a cache before the trace."""
        if any(kept is tensor for cache in self._all() for kept in tensors_cached_by(cache)):
            return True
        containers = (container for module in self._modules for container in own_containers(module))
        in_modules = (kept for container in containers for kept in values_in(container))
        return any(kept is tensor for kept in in_modules)

    def empty(self) -> None:
        """Clear the caches that contain stand-ins of the trace."""
        for cache in self._all():
            if cache.cache_info().misses != self._misses.get(id(cache), 0):
                kept = tensors_cached_by(cache)
                if any(type(value) is FakeTensor and value.fake_mode is self._mode for value in kept):
                    cache.cache_clear()


def tensors_cached_by(cache: Any) -> list[torch.Tensor]:
    """The tensors in the cache of a function, also inside lists, tuples, dicts and plain objects."""
    if not cache.cache_info().currsize:
        return []
    return [tensor for value in gc.get_referents(cache) for tensor in _tensors_in(value)]


def _tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < DEEPEST_RESULT and not isinstance(value, (type, ModuleType, FunctionType, torch.nn.Module)):
        parts = (
            value
            if isinstance(value, (list, tuple, set))
            else value.values()
            if isinstance(value, dict)
            else ()
        )
        for part in parts or getattr(value, "__dict__", {}).values():
            yield from _tensors_in(part, depth + 1)


DEEPEST_RESULT = 4
"""How many levels of a cached result are searched for tensors."""
