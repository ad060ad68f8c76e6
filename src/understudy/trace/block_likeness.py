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
from understudy.trace.prop_state import EVERY_MODULE_HAS

TABLES = (dict, OrderedDict, set)
"""Of parameters, modules, hooks: most are empty."""
DICTS: dict[Any, type] = {dict: dict, LentTable: dict, Watched: Watched}
"""By type: which of them can be told apart."""
HOLDING = ("_parameters", "_buffers", "_modules")
SILENT = frozenset(name for name, value in EVERY_MODULE_HAS.items() if not value and name not in HOLDING)
"""Attributes of every module that say nothing while they are empty: tables of hooks and the like."""
silent_values = itemgetter(*sorted(SILENT))
END = object()
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
        parts: list[Any] = []
        self._walk(module, parts, seen, states)
        parts += self._state_of_code(type(module), seen, states)
        seen.held, seen.calls = states.held, states.calls
        return tuple(parts)

    def names_of(self, kind: type) -> set[str]:
        """The names that the code of such blocks uses."""
        return self._reaches[kind].names

    # What a module holds is written into one flat list; END says where a module, a table or a list is over.

    def _walk(self, module: torch.nn.Module, parts: list[Any], seen: Seen, states: States) -> None:
        kind: type = type(module)
        parts.append(kind)
        position = len(seen.modules)
        if seen.modules.setdefault(id(module), position) != position:
            parts.append(seen.modules[id(module)])
            return
        seen.kinds[kind] = None
        attributes = vars(module)
        for name in self._telling_names(attributes):
            value = attributes[name]
            kind = type(value)
            if kind in COMPARED:
                parts += (name, kind, value or repr(value))
            elif (kind not in TABLES or value) and id(value) not in self.replaced:
                parts.append(name)
                self._describe(value, parts, seen, states)
        parts.append(END)

    def _telling_names(self, attributes: dict[str, Any]) -> tuple[str, ...]:
        """The attributes of a module that are to be looked at. Tables of hooks are nearly always there and empty."""
        names = tuple(attributes)
        known = self._telling.get(names)
        if known is None:
            known = self._telling[names] = (
                tuple([name for name in names if name not in SILENT]) if attributes.keys() >= SILENT else names
            )
        return names if len(known) < len(names) and any(silent_values(attributes)) else known

    def _describe(self, value: Any, parts: list[Any], seen: Seen, states: States) -> None:
        kind = type(value)
        if kind in DICTS:
            self._describe_table(value, parts, seen, states)
        elif kind in COMPARED:
            parts += (kind, value or repr(value))
        elif kind is FakeTensor:
            if value._known is not None or value._node is not None:
                raise Unlike  # the second: computed or written to by the program
            parts += (seen.position(value), value._spec, value.requires_grad)
            if is_marked(value) or value._kind is not None:
                parts += _marks(value, states)
        elif kind is Lent:
            if value.fake is not None:
                self._describe(value.fake, parts, seen, states)
            else:
                parts += (seen.position(value), value.spec, value.requires_grad)
        elif isinstance(value, torch.nn.Module):
            self._walk(value, parts, seen, states)
        elif kind in CONTAINERS or kind is functools.partial:
            self._describe_list(kind, value, parts, seen, states)
        elif isinstance(value, torch.Tensor):
            raise Unlike
        else:
            parts.append(states.state(value))

    def _describe_table(self, table: Any, parts: list[Any], seen: Seen, states: States) -> None:
        seen.containers.add(id(table))
        parts.append(DICTS[type(table)])
        for key, value in dict.items(table):
            kind = type(value)
            if kind in COMPARED:
                parts += (key or repr(key), kind, value or repr(value))
            elif kind is Lent and value.fake is None:
                parts += (key, seen.position(value), value.spec, value.requires_grad)
            else:
                parts.append(key or repr(key))
                self._describe(value, parts, seen, states)
        parts.append(END)

    def _describe_list(self, kind: type, value: Any, parts: list[Any], seen: Seen, states: States) -> None:
        parts.append(kind)
        if kind is functools.partial:
            value = (value.func, len(value.args), *value.args, *value.keywords, *value.keywords.values())
        else:
            seen.containers.add(id(value))
        for part in value:
            self._describe(part, parts, seen, states)
        parts.append(END)

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
