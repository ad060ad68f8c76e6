"""Which module of the program a node comes from: the modules that were being called, each by the path it was reached by.

A module that the program can reach by two paths is one object, and which path was taken is lost when it is called:
`a, b = self.x, self.y; a(t); b(t)`. So where a program has such modules, attributes and items that are modules are given
out as *reached modules*: objects of a subclass made for the occasion, on the same `__dict__`, that know their path.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from understudy.contexts import contextmanager
from understudy.patching import MODULE_PATHS, active, patch

Entry = tuple[str, str]
"""A path and the name of a class."""
Stack = OrderedDict[str, Entry]


class ModuleStack:
    """The modules of one program that are being called in one trace, outermost first."""

    def __init__(self, root: Module) -> None:
        self.root = root
        self._entries: Stack = OrderedDict()
        self._calls: dict[str, int] = {}
        self._paths: dict[int, list[str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(original(module)), []).append(
                path
            )  # another thread may be tracing it by path
        self.is_ambiguous = any(len(paths) > 1 for paths in self._paths.values())

    def current(self) -> Stack:
        """`{"": ("", "app.Model"), "layers.0": ("layers.0", "app.Layer")}`, as torch writes it into nodes."""
        return self._entries.copy()

    @contextmanager
    def inside(self, module: Module) -> Iterator[None]:
        """While a module is called. A second call by the same path has a key of its own, `layers.0@1`."""
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
        """How the program reached a module; None if it is no part of it."""
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

    # --- layers that are written down without being called ---------------------------------------------------

    def place_of(self, layer: Module) -> LayerPlace | None:
        """Where a layer is being called; None if it can be reached by several paths."""
        paths = self._paths.get(id(layer), ())
        if self.is_ambiguous or len(paths) != 1:
            return None
        return LayerPlace(paths[0], self._entries.copy(), self._calls.copy())

    def count_calls(self, place: LayerPlace, calls: dict[str, int]) -> None:
        """The modules inside of a layer have been called so often, though nobody did."""
        for inner, count in calls.items():
            path = place.path + inner
            self._calls[path] = self._calls.get(path, 0) + count


RelativeStack = tuple[tuple[str, int, str], ...]
"""For each module inside of a layer: its path below the layer, how often it had been called there, its class."""


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer was called: its path, the modules around it, and how often each module had been called before."""

    path: str
    around: Stack
    calls: dict[str, int]

    def relative(self, stack: Stack) -> RelativeStack | None:
        """The modules of a stack that are inside of the layer; None if there are others that are not around it."""
        entries = list(stack.items())
        if entries[: len(self.around)] != list(self.around.items()):
            return None
        inner = entries[len(self.around) :]
        if not all(path.startswith(f"{self.path}.") for _, (path, _) in inner):
            return None
        return tuple(
            (path[len(self.path) :], int(key.rpartition("@")[2]) - self.calls.get(path, 0) if "@" in key else 0, kind)
            for key, (path, kind) in inner
        )

    def absolute(self, relative: RelativeStack) -> Stack:
        """The same in this place."""
        stack = self.around.copy()
        for inner, number, kind in relative:
            path = self.path + inner
            count = self.calls.get(path, 0) + number
            stack[f"{path}@{count}" if count else path] = (path, kind)
        return stack

    def calls_inside(self, after: LayerPlace) -> dict[str, int]:
        """How often each module inside of the layer was called in between, by its path below the layer."""
        return {
            path[len(self.path) :]: count - self.calls.get(path, 0)
            for path, count in after.calls.items()
            if path.startswith(f"{self.path}.") and count != self.calls.get(path, 0)
        }


# --- calls ----------------------------------------------------------------------------------------------------------

ACTIVE: ContextVar[ModuleStack | None] = ContextVar("module_stack", default=None)


@patch("torch.nn.Module.__call__", during=MODULE_PATHS)
def record_module_path(original: Callable[..., object]) -> Callable[..., object]:
    """Nodes say which modules were being called, also those that the program calls as functions."""

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
    """While it runs, the calls of the modules of `root` in this thread are followed."""
    if root is None:
        yield None
        return
    stack, before = ModuleStack(root), ACTIVE.get()
    try:
        ACTIVE.set(stack)
        with active(MODULE_PATHS), _GIVEN_OUT.by_path(root) if stack.is_ambiguous else nothing():
            yield stack
    finally:
        ACTIVE.set(before)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def root_of(f: object) -> Module | None:
    """The module whose program a function is: what it wraps as `_orig_mod`, what it is, what it is a method of."""
    for candidate in (getattr(f, "_orig_mod", None), f, getattr(f, "__self__", None)):
        if isinstance(candidate, Module):
            return candidate
    return None


# --- modules that know how they were reached ------------------------------------------------------------------------

PATH = "_understudy_path"
BASE = "_understudy_base"
CHILDREN = "_understudy_children"


class ReachedModule:
    """What the class of a reached module adds to the class of the module."""

    def __init_subclass__(cls, **ignored: object) -> None:
        """The user's own `__init_subclass__` is not told of classes that are made for a trace."""

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
    """The submodules of a reached module, each by its path. What is put in is put into the module itself."""

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
    """The class of a module, of a reached one too."""
    kind = type(module)
    return kind.__mro__[2] if issubclass(kind, ReachedModule) else kind


def original(value: object) -> Any:
    """The module itself, if this is one that knows how it was reached."""
    return (
        getattr(type(value), BASE)
        if isinstance(value, Module) and issubclass(type(value), ReachedModule)
        else value
    )


def reach_module(owner: object, name: str, module: Module) -> Any:
    """The module as it is reached from another by this name: another object on the same attributes, always the same."""
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
    """The class of a module that is reached by this path; None for classes that nothing can be derived from."""
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
    """Programs whose modules are given out by path just now, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    @contextmanager
    def by_path(self, root: Module) -> Iterator[None]:
        """The class of the root is another one meanwhile; paths do not depend on who asks, so traces can share it."""
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
    """Past the property, and past what classes make of an assignment."""
    object.__dict__["__class__"].__set__(module, kind)


_GIVEN_OUT = _ProgramsWithPaths()
