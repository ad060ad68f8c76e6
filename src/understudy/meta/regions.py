"""Regions of a program with changed global state: `torch.autocast`, `torch.no_grad` and their like.

Their begin and end are nodes. Without them, a graph would compute in other dtypes, or have gradients where the program
has none. After the region, the state is what it was before, whatever it is when the graph runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect

from understudy import _torch
from understudy.graph.random_state import torch_get_rng_state

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer


@has_side_effect
def begin_grad_mode(enabled: bool) -> bool:
    """Set grad mode; returns the previous state."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return before


@has_side_effect
def end_grad_mode(before: bool) -> None:
    torch.set_grad_enabled(before)


REGIONS = frozenset({_torch.enter_autocast, _torch.exit_autocast, _torch.set_grad_enabled})
"""The functions that begin or end a region."""


class Regions:
    """The regions that the traced program is in."""

    def __init__(self, tracer: MetaTracer) -> None:
        self._tracer = tracer
        self._autocasts: list[Node] = []
        self._before: dict[int, tuple[Any, Node]] = {}
        """By context manager: the node of the grad mode before it."""
        self.handlers: dict[Any, Callable[..., Any]] = {
            _torch.enter_autocast: self._enter_autocast,
            _torch.exit_autocast: self._exit_autocast,
            _torch.set_grad_enabled: self._set_grad_enabled,
        }

    def _enter_autocast(self, *options: object) -> Any:
        """`torch.autocast` has entered already. The code of a graph, which is traced again or read from a pickle, calls
        the function itself."""
        is_called = sys._getframe(3).f_code is _torch.handle_torch_function.__code__
        self._autocasts.append(self._tracer.append_call(_torch.enter_autocast, options, {}))
        return _torch.enter_autocast(*options) if is_called else None

    def _exit_autocast(self, *entered: object) -> None:
        if entered:
            _torch.exit_autocast(*entered)
        self._tracer.append_call(_torch.exit_autocast, (self._autocasts.pop(),), {})

    def _set_grad_enabled(self, enabled: bool) -> None:
        _torch.set_grad_enabled(enabled)
        step, manager = _step_of_manager(sys._getframe(2))
        known = self._before.get(id(manager))
        if step in ENDS and known is not None:
            self._tracer.append_call(end_grad_mode, (known[1],), {})
            return
        has_begun = step == "__enter__" and isinstance(manager, torch.set_grad_enabled) and known is not None
        if has_begun and known is not None and known[1] is self._tracer.last_node():
            return  # `set_grad_enabled` takes effect in `__init__`
        node = self._tracer.append_call(begin_grad_mode, (enabled,), {})
        if manager is not None and not has_begun:
            self._before[id(manager)] = manager, node


def erase_empty_regions(graph: Graph) -> None:
    """Erase regions without nodes, and random states that are not restored: a checkpoint reads one in any case."""
    for node in graph.find_nodes(op="call_function", target=torch_get_rng_state):
        if not node.users:
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=end_grad_mode):
        if node.args[0] is node.prev and len(node.prev.users) == 1:
            began = node.prev
            graph.erase_node(node)
            graph.erase_node(began)


def _step_of_manager(frame: FrameType | None) -> tuple[str, Any]:
    """The context manager (`no_grad` and its like) that changes the state, and whether it is being entered or left."""
    found: tuple[str, Any] = "", None
    while frame is not None:
        name = frame.f_code.co_name
        if name in STEPS and frame.f_globals.get("__name__", "").startswith("torch.autograd."):
            found = name, frame.f_locals.get("self")
        elif found[0] or not _is_of_torch(frame):
            break
        frame = frame.f_back
    return found


ENDS = ("__exit__", "__call__")
"""`torch.set_grad_enabled(False)` also restores the state when it is called to decorate a function."""
STEPS = ("__init__", "__enter__", *ENDS)


def _is_of_torch(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith(("torch.", "understudy."))
