"""Finds the modules that a traced function refers to, and replaces their tensors during the trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from understudy.capture.constant_values import ConstantValues
from understudy.capture.constants import Constants
from understudy.fake.inputs import LRU_CACHE
from understudy.fake.mode import FakeTensorMode
from understudy.graph.borrowed_state import (
    PLAIN,
    BorrowedState,
    cell_contents,
    has_same_form,
    named_parts,
    names_used_in,
    write_assigned,
)

Named = tuple[torch.nn.Module, bool]
"""A module, and whether it is the traced one: its tensors then keep their names in the graph module."""


def modules_of(f: Callable[..., object]) -> list[Named]:
    """The modules that a callable is, is bound to, wraps, or refers to by name."""
    found: dict[int, Named] = {}
    for module, is_root in _modules_of(f, set()):
        found.setdefault(id(module), (module, is_root))
    return list(found.values())


def _modules_of(f: object, seen: set[int]) -> Iterator[Named]:
    if id(f) in seen:
        return
    seen.add(id(f))
    if isinstance(f, torch.nn.Module):
        yield f, True
        return
    for name in ("_orig_mod", "__self__"):
        owner = getattr(f, name, None)
        if isinstance(owner, torch.nn.Module):
            yield owner, True
    if isinstance(f, functools.partial):
        yield from _modules_of(f.func, seen)
    wrapped = getattr(f, "__wrapped__", None)
    if wrapped is not None:
        yield from _modules_of(wrapped, seen)
    for value in _references_of(f):
        yield from _modules_in(value, seen)


def _modules_in(value: object, seen: set[int], depth: int = 0) -> Iterator[Named]:
    """The modules in a value: the value itself, in containers and objects, or those that a function refers to."""
    if isinstance(value, torch.nn.Module):
        yield value, False
    elif isinstance(value, FUNCTIONS):
        yield from ((module, False) for module, _ in _modules_of(value, seen))
    elif depth < DEEPEST and id(value) not in seen and len(seen) < MOST:
        parts = _parts(value)
        if parts:
            seen.add(id(value))
        if not PLAIN.issuperset(map(type, parts)):  # as in a vocabulary
            for part in parts:
                yield from _modules_in(part, seen, depth + 1)


DEEPEST, MOST = 4, 10_000
"""Limits of the search: the depth, and the number of values."""


def _parts(value: object) -> list[Any]:
    if isinstance(value, CONTAINERS):
        return list(value.values() if isinstance(value, dict) else value)
    if type(value).__module__.partition(".")[0] in WITHOUT_MODULES:
        return [value.module] if isinstance(value, torch.fx.Interpreter) else []
    slots = [
        name for kind in type(value).__mro__ for name, slot in vars(kind).items() if isinstance(slot, SLOT)
    ]
    parts = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return parts + [getattr(value, name, None) for name in slots]


CONTAINERS = (list, tuple, dict, set, frozenset)
WITHOUT_MODULES = frozenset({"builtins", "torch", "numpy", "types", "functools", "understudy"})
"""Packages whose objects are not searched for modules."""
SLOT = MemberDescriptorType
FUNCTIONS = (FunctionType, MethodType, functools.partial, LRU_CACHE)


def _references_of(f: object) -> Iterator[Any]:
    """The values that a function refers to: closure, defaults, bound object, and the globals that it names."""
    if isinstance(f, functools.partial):
        yield from (*f.args, *f.keywords.values())
    yield from map(cell_contents, getattr(f, "__closure__", None) or ())
    yield from getattr(f, "__defaults__", None) or ()
    yield from (getattr(f, "__kwdefaults__", None) or {}).values()
    if isinstance(f, MethodType) and not isinstance(f.__self__, (type, torch.nn.Module)):
        yield f.__self__
    elif not isinstance(f, (*FUNCTIONS, type)):  # a callable object
        yield from (*_parts(f), type(f).__call__)
    code = getattr(f, "__code__", None)
    names = getattr(f, "__globals__", {})
    for name in names_used_in(code) if code is not None else ():
        value = names.get(name)
        # Functions of other files are not followed: they refer to too many values.
        is_of_here = getattr(value, "__globals__", names) is names
        if not isinstance(value, (type, ModuleType)) and (is_of_here or isinstance(value, MethodType)):
            yield value


class BorrowedModules:
    """Puts stand-ins into modules during a trace, and restores the modules afterwards."""

    def __init__(self, mode: FakeTensorMode | None, constant_values: ConstantValues | None = None) -> None:
        self._mode = mode
        self._constant_values = constant_values
        self._borrowed: BorrowedState | None = None
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """If the program runs on real tensors: the buffers of modules, and their previous values."""

    def borrow(self, modules: list[Named], constants: Constants) -> None:
        if self._mode is not None:
            self._borrowed = BorrowedState(self._mode)
        for module, is_root in modules:
            named = named_parts(module) if self._borrowed is None else self._borrowed.borrow_parts(module)
            for path, part in named:
                if self._borrowed is None and isinstance(
                    part._buffers, dict
                ):  # of scripted modules they are in C++
                    self._buffers.append((part._buffers, dict(part._buffers)))
                tensors = self._tensors(part)
                for name, real, tensor in tensors:
                    path_of_tensor = f"{path}.{name}" if path and is_root else name
                    constants.expect(tensor, real, path_of_tensor if is_root else None)
                if constants.knows_values and self._constant_values is not None and part._buffers:
                    self._constant_values.register_buffers(part, path, tensors)

    @property
    def parts(self) -> list[torch.nn.Module]:
        """The borrowed modules, with all of their submodules."""
        return [] if self._borrowed is None else list(self._borrowed.replaced)

    def _tensors(self, module: torch.nn.Module) -> list[tuple[str, torch.Tensor, Any]]:
        """For each tensor of a module: its name, the tensor, and its stand-in."""
        if self._borrowed is not None:
            return self._borrowed.replaced[module]
        tables = (module._parameters, module._buffers, vars(module))
        items = [item for table in tables for item in table.items()]
        return [(name, value, value) for name, value in items if isinstance(value, torch.Tensor)]

    def record_assigned(self) -> None:
        """Write assigned values into buffers: `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`."""
        assigned = [
            (buffer, value)
            for now, before in self._buffers
            for name, buffer in before.items()
            if (value := now.get(name)) is not buffer and buffer is not None and value is not None
        ]
        if self._borrowed is not None:
            assigned = self._borrowed.list_assigned()
        if assigned:
            write_assigned([pair for pair in assigned if has_same_form(*pair)])

    def give_back(self) -> None:
        if self._borrowed is not None:
            self._borrowed.give_back()
        for now, before in self._buffers:
            now.update(before)
