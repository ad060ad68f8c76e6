"""Attributes in which blocks differ, such as the number of a layer: whether a run of a block reads them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from understudy.trace.block_state import COMPARED, Unlike
from understudy.trace.lent import LentTable
from understudy.trace.prop_state import EVERY_MODULE_HAS

READING = torch.nn.Module.__getattr__.__code__


LOOKING_INSIDE = frozenset({"__dict__", "vars", "__getattribute__"})
"""How code finds attributes without asking for them."""


class Watched(LentTable):
    """A module's table of parameters, with some attributes behind it. Python asks the table for an attribute that the
    module itself does not hold; so a read is heard of, and what is never read makes no difference."""

    def __init__(self, module: torch.nn.Module, reads: set[str]) -> None:
        super().__init__()
        for name in module._parameters:  # what is pending, stays so
            self[name] = dict.__getitem__(module._parameters, name)
        self._attributes = vars(module)
        self._reads = reads
        self.hidden: dict[str, Any] = {}
        self._attributes["_parameters"] = self

    def hide(self, name: str) -> None:
        self.hidden[name] = self._attributes.pop(name)

    def show(self, name: str) -> None:
        self._attributes[name] = self.hidden.pop(name)

    def __contains__(self, name: object) -> bool:
        if name not in self.hidden:
            return super().__contains__(name)
        self._reads.add(str(name))
        if sys._getframe(1).f_code is READING:
            return True
        self.show(str(name))  # somebody sets or deletes it
        return False

    def __missing__(self, name: str) -> Any:
        return self.hidden[name]


class Family:
    """Siblings of one kind. If they are not alike, the attributes in which they differ can be watched."""

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        self._blocks = blocks
        self.is_recorded = False
        self.misses = 0
        """Blocks that were run although one like them should have been known."""
        self._tables: list[Watched] = []
        self._is_watched = False
        self.reads: set[str] = set()

    def watch(self, names: set[str]) -> bool:
        """Hide the attributes in which the blocks differ. Says whether there are any; only once. `names`: those that the
        code of the blocks uses."""
        if self._is_watched or not LOOKING_INSIDE.isdisjoint(names):
            return False
        self._is_watched = True
        for modules in zip(*(block.modules() for block in self._blocks), strict=True):
            self._hide(modules, _differing(modules))
        return bool(self._tables)

    def _hide(self, modules: tuple[torch.nn.Module, ...], names: list[str]) -> None:
        for module in dict.fromkeys(modules) if names else ():
            table = Watched(module, self.reads)
            for name in names:
                table.hide(name)
            self._tables.append(table)

    def begin(self) -> None:
        """Before a block is run and recorded."""
        self.misses += self.is_recorded
        self.is_recorded = True
        self.reads.clear()

    def check_unread(self) -> None:
        """After a run: what was read makes a difference from now on."""
        if self.reads:
            for table in self._tables:
                for name in self.reads & table.hidden.keys():
                    table.show(name)
            raise Unlike


def _differing(modules: tuple[torch.nn.Module, ...]) -> list[str]:
    """The plain attributes that all of them have and that are not the same in all."""
    if any(type(module).__getattr__ is not torch.nn.Module.__getattr__ for module in modules):
        return []
    tables = list(map(vars, modules))
    names = [
        name
        for name, value in tables[0].items()
        if name not in EVERY_MODULE_HAS and type(value) in COMPARED and all(name in table for table in tables)
        and not any(hasattr(type(module), name) for module in modules)  # it would be found there
    ]  # fmt: skip
    return [
        name for name in names if len({(type(table[name]), table[name]) for table in tables}) > 1
        and all(type(table[name]) in COMPARED for table in tables)
    ]  # fmt: skip
