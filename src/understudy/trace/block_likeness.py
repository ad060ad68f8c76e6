"""Which blocks are alike: all that the forward of a module can read, besides its arguments."""

from __future__ import annotations

import functools
from collections import OrderedDict
from operator import itemgetter
from types import MethodType
from typing import Any

import torch

from understudy.fake.tensor import FakeTensor
from understudy.trace.block_arguments import OWN_ATTRIBUTES, is_marked
from understudy.trace.block_code import Reach, found_at, is_own
from understudy.trace.block_state import COMPARED, Readers, States, Unlike
from understudy.trace.block_watch import Watched
from understudy.trace.lent import Lent, LentTable

TABLES = (dict, OrderedDict, set)
"""Of parameters, modules, hooks: most are empty."""
DICTS: dict[Any, type] = {dict: dict, LentTable: dict, Watched: Watched}
"""By type: which of them can be told apart."""
HOLDING = ("_parameters", "_buffers", "_modules")
SILENT = frozenset(name for name, value in vars(torch.nn.Module()).items() if not value and name not in HOLDING)
"""Attributes of every module that say nothing while they are empty: tables of hooks and the like."""
silent_values = itemgetter(*sorted(SILENT))
CONTAINERS = (tuple, list, set, frozenset, torch.Size)
Key = tuple[Any, ...]


class Seen:
    """What a signature was made from."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        """The tensors of a module and of what is in it, in an order that siblings share."""
        self.held: list[Any] = []
        """What is in the signature by its identity: while it is held, nothing else has that identity."""
        self.calls: dict[int, int] = {}
        """For functions that keep their results: how often they had been called."""
        self._positions: dict[int, int] = {}
        self.containers: set[int] = set()
        """The lists, dicts and sets among its attributes, by identity."""
        self.kinds: dict[type, None] = {}
        self.modules: dict[int, int] = {}
        """The modules that were met, by identity, and in which order."""

    def position(self, tensor: Any) -> int:
        """The same for one that was met before: tied weights."""
        position = self._positions.setdefault(id(tensor), len(self.tensors))
        self.tensors.append(tensor)
        return position


class Likeness:
    """Compares modules by signatures. For one trace: what code reaches is looked up once."""

    def __init__(self) -> None:
        self._reaches: dict[type, Reach] = {}
        self._readers = Readers()
        self._telling: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.replaced: set[int] = set()
        """Functions that stand in for a module's own forward for the time of the trace, by identity."""

    def signature(self, module: torch.nn.Module, seen: Seen) -> Key:
        """Equal for modules whose forwards do the same."""
        states = States(self._readers, type(module))
        parts = self._walked(module, seen, states)
        code = self._state_of_code(type(module), seen, states)
        seen.held, seen.calls = states.held, states.calls
        return parts, code

    def names_of(self, kind: type) -> set[str]:
        """The names that the code of such blocks uses."""
        return self._reaches[kind].names

    def _walked(self, module: torch.nn.Module, seen: Seen, states: States) -> Key:
        kind = type(module)
        position = len(seen.modules)
        if seen.modules.setdefault(id(module), position) != position:
            return kind, seen.modules[id(module)]
        seen.kinds[kind] = None
        parts: list[Any] = [kind]
        attributes = vars(module)
        for name in self._telling_names(attributes):
            value = attributes[name]
            kind = type(value)
            if kind in COMPARED:
                parts += (name, kind, value or repr(value))
            elif (kind not in TABLES or value) and id(value) not in self.replaced:
                parts += (name, self._described(value, seen, states))
        return tuple(parts)

    def _telling_names(self, attributes: dict[str, Any]) -> tuple[str, ...]:
        """The attributes of a module that are to be looked at. Tables of hooks are nearly always there and empty."""
        names = tuple(attributes)
        known = self._telling.get(names)
        if known is None:
            known = self._telling[names] = (
                tuple([name for name in names if name not in SILENT]) if attributes.keys() >= SILENT else names
            )
        return names if len(known) < len(names) and any(silent_values(attributes)) else known

    def _described(self, value: Any, seen: Seen, states: States) -> Any:
        kind = type(value)
        if kind in COMPARED:
            return kind, value or repr(value)
        if kind is FakeTensor:
            if value._known is not None or value._node is not None:
                raise Unlike  # the second: computed or written to by the program
            facts = seen.position(value), value._spec, value.requires_grad
            return (*facts, *_marks(value, states)) if is_marked(value) or value._kind is not None else facts
        if kind is Lent:
            if value.fake is not None:
                return self._described(value.fake, seen, states)
            return seen.position(value), value.spec, value.requires_grad
        if isinstance(value, torch.nn.Module):
            return self._walked(value, seen, states)
        if kind in DICTS:
            seen.containers.add(id(value))
            held: list[Any] = [DICTS[kind]]
            for key, part in dict.items(value):
                if type(part) is Lent and part.fake is None:
                    held += (key, (seen.position(part), part.spec, part.requires_grad))
                else:
                    held += (key or repr(key), self._described(part, seen, states))
            return tuple(held)
        if kind in CONTAINERS:
            seen.containers.add(id(value))
            return kind, tuple([self._described(part, seen, states) for part in value])
        if kind is functools.partial:
            parts = (value.func, *value.args, *value.keywords, *value.keywords.values())
            return kind, tuple([self._described(part, seen, states) for part in parts])
        if isinstance(value, torch.Tensor):
            raise Unlike
        return states.state(value)

    def _state_of_code(self, kind: type, seen: Seen, states: States) -> Key:
        """What the code of a block finds in globals, closures, classes and objects: counters and tables are kept there."""
        reach = self._reaches.get(kind)
        if reach is None or reach.is_stale:
            reach = self._reaches[kind] = Reach()
        strange: list[Any] = [met for met in seen.kinds if not reach.knows(met)]
        if strange:
            reach.add(strange, is_module=True)
        while not reach.is_open:
            found = list(map(states.state, found_at(reach.states)))
            strange = [
                value for value in states.functions.values() if not reach.knows(value) and is_own(value)
            ]
            if not strange:
                tables = map(states.contents, found_at(reach.tables))
                return *found_at(reach.members), *found, *tables, *map(len, reach.spaces)
            reach.add(strange)
        raise Unlike


def _marks(tensor: FakeTensor, states: States) -> list[Any]:
    """What a program may ask of a stand-in besides its spec."""
    marks = [(name, value) for name, value in vars(tensor).items() if name not in OWN_ATTRIBUTES]
    if any(isinstance(value, MethodType) for _, value in marks):
        raise Unlike
    return [tensor._kind, *[(name, states.state(value)) for name, value in marks]]
