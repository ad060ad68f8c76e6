"""The module stack of a node: the modules that were being called, each with its path.

A module with several paths has the first one inside of the module that is being called.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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
            self._paths.setdefault(id(module), []).append(path)

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
        kind = type(module)
        self._entries[key] = (path, f"{kind.__module__}.{kind.__qualname__}")
        try:
            yield
        finally:
            del self._entries[key]

    def _path_of(self, module: Module) -> str | None:
        """The path of a module; None if it is not part of the program."""
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
        with active(MODULE_PATHS):
            yield stack
    finally:
        ACTIVE.set(before)


def root_of(f: object) -> Module | None:
    """The module of a callable: the callable itself, the one it wraps as `_orig_mod`, or the one it is a method of."""
    for candidate in (getattr(f, "_orig_mod", None), f, getattr(f, "__self__", None)):
        if isinstance(candidate, Module):
            return candidate
    return None
