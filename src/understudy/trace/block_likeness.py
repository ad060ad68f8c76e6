"""Which blocks are alike: all that the forward of a module can read, besides its arguments."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from understudy.fake.tensor import FakeTensor
from understudy.lines import is_the_users
from understudy.trace.module_state import cell_contents

TABLES = (dict, OrderedDict, set)
"""Of parameters, modules, hooks: most are empty."""
COMPARED = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""What is the same if it is equal."""
IDENTICAL = (FunctionType, BuiltinFunctionType, ModuleType, type)
"""What is the same if it is the same object, and has no state that a forward would change."""
CONTAINERS = (tuple, list, set, frozenset, torch.Size)
Key = tuple[Any, ...]


class Unlike(Exception):
    """A module, an argument or a recording that can't be compared."""


@dataclass
class Seen:
    """What a signature was made from."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    """The tensors of a module and of what is in it, in an order that siblings share."""
    held: list[Any] = field(default_factory=list)
    """What is in the signature by its identity: while it is held, nothing else has that identity."""

    _positions: dict[int, int] = field(default_factory=dict)

    def position(self, tensor: torch.Tensor) -> int:
        """The same for one that was met before: tied weights."""
        position = self._positions.setdefault(id(tensor), len(self.tensors))
        self.tensors.append(tensor)
        return position

    def identity(self, value: Any) -> int:
        self.held.append(value)
        return id(value)

    _states: dict[int, Any] = field(default_factory=dict)

    def state(self, value: Any) -> Any:
        """Which object it is, and what it holds just now."""
        if type(value) in COMPARED:
            return type(value), value
        if isinstance(value, IDENTICAL):
            return self.identity(value)
        found = self._states.get(id(value))
        if found is None:
            found = self._states[id(value)] = self._looked_at(value)
            self.held.append(value)
        return found

    def _looked_at(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return self.identity(value.func), *map(self._part, (*value.args, *value.keywords.values()))
        if isinstance(value, torch.Tensor):
            return self.identity(value), value._version
        parts: Any = getattr(value, "__dict__", {}).values()
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            parts = value.values() if isinstance(value, dict) else value
        return self.identity(value), *map(self._part, parts)

    def _part(self, value: Any) -> Any:
        return value if type(value) in COMPARED else self.identity(value)


class Likeness:
    """Compares modules by signatures. For one trace: which code a class has is looked up once."""

    def __init__(self) -> None:
        self._reached: dict[type, list[tuple[Any, Any]]] = {}
        self.replaced: set[int] = set()
        """Functions that stand in for a module's own forward for the time of the trace, by identity."""

    def signature(self, module: torch.nn.Module, seen: Seen) -> Key:
        """Equal for modules whose forwards do the same."""
        attributes = vars(module)
        parts: list[Any] = [type(module), self._state_of_code(type(module), seen)]
        for name, value in attributes.items():
            kind = type(value)
            if kind in COMPARED:
                parts += (name, kind, value)
            elif (kind not in TABLES or value) and id(value) not in self.replaced:
                parts += (name, self._described(value, seen))
        return tuple(parts)

    def _described(self, value: Any, seen: Seen) -> Any:
        kind = type(value)
        if kind in COMPARED:
            return kind, value
        if kind is FakeTensor:
            if value._known is not None:
                raise Unlike
            return seen.position(value), value._spec, value.requires_grad
        if isinstance(value, torch.nn.Module):
            return self.signature(value, seen)
        if isinstance(value, dict) and kind is not OrderedDict:  # ordered ones are hooks
            return dict, tuple([(key, self._described(part, seen)) for key, part in value.items()])
        if kind in CONTAINERS:
            return kind, tuple([self._described(part, seen) for part in value])
        if isinstance(value, torch.Tensor):
            raise Unlike
        return seen.state(value)

    def _state_of_code(self, kind: type, seen: Seen) -> Key:
        """What the methods of a class find in globals and closures: counters and tables are kept there."""
        reached = self._reached.get(kind)
        if reached is None:
            reached = self._reached[kind] = list(_reached_by(kind))
        return tuple([seen.state(place.get(name) if name else cell_contents(place)) for place, name in reached])


def _reached_by(kind: type) -> Iterator[tuple[Any, Any]]:
    """The names in globals, and the cells, that the code of a class refers to, itself or through functions."""
    waiting = [
        function
        for owner in kind.__mro__
        if owner is not torch.nn.Module and owner is not object
        for function in vars(owner).values()
        if isinstance(function, FunctionType) and is_the_users(function.__code__.co_filename)
    ]
    seen = set(map(id, waiting))
    while waiting:
        function = waiting.pop()
        found: list[tuple[Any, Any, Any]] = [(cell, None, cell_contents(cell)) for cell in function.__closure__ or ()]
        names = function.__globals__
        found += [(names, name, names.get(name)) for name in function.__code__.co_names if name in names]
        for place, name, value in found:
            if isinstance(value, FunctionType):
                if id(value) not in seen and is_the_users(value.__code__.co_filename):
                    seen.add(id(value))
                    waiting.append(value)
            elif not isinstance(value, IDENTICAL):
                yield place, name
