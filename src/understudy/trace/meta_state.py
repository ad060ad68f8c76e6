"""What the traced program assigns to its modules: `self.count = self.count + 1`.

Values of a trace must not stay in a module when the trace is over. A buffer that was assigned something new gets it in
the graph, by `copy_`; every other attribute is as it was.
"""

from __future__ import annotations

from typing import Any

import torch

from understudy.trace.meta_proxies import MetaProxy
from understudy.trace.meta_structures import holds

Table = dict[str, Any]


class ModuleState:
    """The attributes of all modules of a root, as they are when it is made."""

    def __init__(self, root: torch.nn.Module) -> None:
        modules = list(root.modules())
        self._buffers: list[tuple[Table, Table]] = [
            (module._buffers, dict(module._buffers)) for module in modules
        ]
        others = [table for module in modules for table in (module._parameters, module.__dict__)]
        self._others = [(table, dict(table)) for table in others]

    def assigned_buffers(self) -> list[tuple[torch.Tensor, MetaProxy]]:
        """Buffers that the program has assigned a value of the trace, and that value."""
        return [
            (original, value)
            for table, before in self._buffers
            for name, value in table.items()
            if isinstance(value, MetaProxy) and isinstance(original := before.get(name), torch.Tensor)
        ]

    def restore(self) -> None:
        for table, before in (*self._buffers, *self._others):
            changed = [name for name, value in table.items() if value is not before.get(name)]
            for name in changed:
                if holds(table[name], _is_traced):
                    del table[name]
                    if name in before:
                        table[name] = before[name]


def _is_traced(value: Any) -> bool:
    return isinstance(value, MetaProxy)
