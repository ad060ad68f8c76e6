"""The module stack of a node: the modules that were being called, each with the path through which it was reached.

A module that the program can reach by two paths is one object, and which path was taken is lost when it is called:
`a, b = self.x, self.y; a(t); b(t)`. So where a program has such modules, reading a submodule returns a *reached
module*: an object of a temporary subclass, with the same `__dict__`, that knows its path.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import Module

from understudy.patching import MODULE_PATHS, active, patch

Entry = tuple[str, str]
"""A path and the name of a class."""
Stack = OrderedDict[str, Entry]


class ModuleStack:
    """The modules that are being called in one trace, outermost first."""

    def __init__(self, root: Module) -> None:
        self.root = root
        self._entries: Stack = OrderedDict()
        self._calls: dict[str, int] = {}
        self._paths: dict[int, list[str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(original(module)), []).append(
                path
            )  # another thread may be tracing the module
        self.is_ambiguous = any(len(paths) > 1 for paths in self._paths.values())

    def current(self) -> Stack:
        """`{"": ("", "app.Model"), "layers.0": ("layers.0", "app.Layer")}`, as torch writes it into nodes."""
        return self._entries.copy()

    @contextmanager
    def inside(self, module: Module) -> Iterator[None]:
        """Around a call of a module. A second call by the same path has the key `layers.0@1`."""
        path = self._path_of(module)
        if path is None:
            yield
            return
        count = self._calls.get(path, 0)
        self._calls[path] = count + 1
        key = f"{path}@{count}" if count else path
        kind = real_class(module)
        self._entries[key] = (path, f"{kind.__module__}.{kind.__qualname__}")
        try:
            yield
        finally:
            del self._entries[key]

    def _path_of(self, module: Module) -> str | None:
        """The path of a module; None if it is not part of the program."""
        if (path := getattr(type(module), PATH, None)) is not None:
            return str(path)
        paths = self._paths.get(id(module))
        if paths is None:
            return None
        for around, _ in reversed(self._entries.values()):
            for path in paths:
                if path.startswith(f"{around}." if around else ""):
                    return path
        return paths[0]


# --- calls ----------------------------------------------------------------------------------------------------------

ACTIVE: ContextVar[ModuleStack | None] = ContextVar("module_stack", default=None)


@patch("torch.nn.Module.__call__", during=MODULE_PATHS)
def record_module_path(original: Callable[..., object]) -> Callable[..., object]:
    """Records the module stack of each call, including modules that the program calls as functions."""

    @functools.wraps(original)
    def call(self: Module, *args: object, **kwargs: object) -> Any:
        stack = ACTIVE.get()
        if stack is None:
            return original(self, *args, **kwargs)
        with stack.inside(self):
            return original(self, *args, **kwargs)

    return call


@contextmanager
def recorded_modules(root: Module | None) -> Iterator[ModuleStack | None]:
    """Inside, the calls of the modules of `root` in this thread are tracked."""
    if root is None:
        yield None
        return
    stack, before = ModuleStack(root), ACTIVE.get()
    try:
        ACTIVE.set(stack)
        with active(MODULE_PATHS), _GIVEN_OUT.by_path(root) if stack.is_ambiguous else no_context():
            yield stack
    finally:
        ACTIVE.set(before)


@contextmanager
def no_context() -> Iterator[None]:
    yield


def root_of(f: object) -> Module | None:
    """The module of a callable: the callable itself, the one it wraps as `_orig_mod`, or the one it is a method of."""
    for candidate in (getattr(f, "_orig_mod", None), f, getattr(f, "__self__", None)):
        if isinstance(candidate, Module):
            return candidate
    return None


# --- modules that know their path ------------------------------------------------------------------------

PATH = "_understudy_path"
BASE = "_understudy_base"
CHILDREN = "_understudy_children"


class ReachedModule:
    """The mixin of the classes of reached modules."""

    def __init_subclass__(cls, **ignored: object) -> None:
        """Overrides the user's `__init_subclass__`, which must not run for temporary classes."""

    def _real_class(self) -> Any:
        return real_class(self)

    __class__ = property(_real_class)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return reach_module(self, name, value) if isinstance(value, Module) else value

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, original(value))

    @property
    def _modules(self) -> dict[str, Any]:
        return ReachedModules(self, vars(self)["_modules"])


class ReachedModules(dict[str, Any]):
    """The submodules of a reached module, as reached modules. Writes go to the module itself."""

    def __init__(self, owner: object, modules: dict[str, Any]) -> None:
        super().__init__(
            (name, reach_module(owner, name, module) if isinstance(module, Module) else module)
            for name, module in modules.items()
        )
        self._real = modules

    def __setitem__(self, name: str, module: object) -> None:
        super().__setitem__(name, module)
        self._real[name] = original(module)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._real[name]


def real_class(module: object) -> Any:
    """The original class of a module, also of a reached one."""
    kind = type(module)
    return kind.__mro__[2] if issubclass(kind, ReachedModule) else kind


def original(value: object) -> Any:
    """The original module of a reached one; any other value unchanged."""
    return (
        getattr(type(value), BASE)
        if isinstance(value, Module) and issubclass(type(value), ReachedModule)
        else value
    )


def reach_module(owner: object, name: str, module: Module) -> Any:
    """The reached module for a submodule of `owner`: another object with the same `__dict__`, made once."""
    known: dict[str, Any] = getattr(type(owner), CHILDREN)
    module = original(module)
    found = known.get(name)
    if found is None or original(found) is not module:
        path = getattr(type(owner), PATH)
        kind = class_for(module, f"{path}.{name}" if path else name)
        if kind is None:
            return module
        found = known[name] = object.__new__(kind)
        object.__setattr__(found, "__dict__", vars(module))
    return found


def class_for(module: Module, path: str) -> Any:
    """The temporary class of a module with this path; None for classes that can't be subclassed."""
    base: Any = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return None
    names = {
        PATH: path,
        BASE: module,
        CHILDREN: {},
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    try:
        return type(base)(base.__name__, (ReachedModule, base), names)
    except TypeError:
        return None


class _ProgramsWithPaths:
    """The programs, in all threads, whose submodules are currently returned as reached modules."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    @contextmanager
    def by_path(self, root: Module) -> Iterator[None]:
        """Inside, the root has a temporary class. Several traces of the same root share it."""
        with self._lock:
            count = self._counts.get(id(root), 0)
            if count == 0 and (kind := class_for(root, "")) is not None:
                set_class(root, kind)
            self._counts[id(root)] = count + 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[id(root)] -= 1
                if not self._counts[id(root)]:
                    del self._counts[id(root)]
                    set_class(root, real_class(root))


def set_class(module: Module, kind: object) -> None:
    """Without the `__class__` property, and without the `__setattr__` of the class."""
    object.__dict__["__class__"].__set__(module, kind)


_GIVEN_OUT = _ProgramsWithPaths()
