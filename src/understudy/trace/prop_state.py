"""The tensors of a module, replaced by stand-ins for the time of a run."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch

from understudy.fake.helpers import is_fake
from understudy.fake.mode import FakeTensorMode

TABLES = ("_parameters", "_buffers")
NO_TENSORS = frozenset({bool, int, float, str, dict, set, list, tuple, type(None), OrderedDict})
"""What most attributes of a module are: told by their type at a tenth of what `isinstance` costs."""


_LENDING = threading.RLock()
"""A module has its tensors once: what would give back the stand-ins of another thread waits for that thread."""


class BorrowedState:
    """While modules are lent, their parameters, buffers and tensor attributes are stand-ins.

    `give_back` leaves every module as it was, whatever its forward did to it meanwhile.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._before: dict[torch.nn.Module, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        self.replaced: dict[torch.nn.Module, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        """For each module: name, real tensor and stand-in of what it was lent with."""

    def borrow(self, module: torch.nn.Module) -> torch.nn.Module:
        if module not in self._before:
            if not self._before:
                _LENDING.acquire()
            for part in module.modules():
                if part not in self._before:
                    self._borrow_one(part)
        return module

    def _borrow_one(self, module: torch.nn.Module) -> None:
        attributes = vars(module)
        tables = [attributes[name] for name in TABLES]
        self._before[module] = dict(attributes), [dict(table) for table in tables]
        replaced = self.replaced[module] = []
        for table in (*tables, attributes):
            for name, value in table.items():
                if type(value) in NO_TENSORS or not isinstance(value, torch.Tensor):
                    continue
                fake = value if is_fake(value) else self._mode.from_tensor(value, static_shapes=True)
                table[name] = fake
                replaced.append((name, value, fake))

    def give_back(self) -> None:
        if not self._before:
            return
        for module, (attributes, tables) in self._before.items():
            now = vars(module)
            now.clear()
            now.update(attributes)
            for name, table in zip(TABLES, tables, strict=True):
                now[name].clear()
                now[name].update(table)
        self._before.clear()
        self.replaced.clear()
        _LENDING.release()
