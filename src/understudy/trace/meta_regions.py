"""Regions of a program with a state of torch of their own: `torch.autocast`, `torch.no_grad` and their like.

Their begin and end are nodes. A graph that left them out would compute in other dtypes, or send gradients where the
program sends none. Whatever the state was when the graph is run, it is the same again after the region.
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

if TYPE_CHECKING:
    from understudy.trace.meta_tracer import MetaTracer


@has_side_effect
def begin_grad_mode(enabled: bool) -> bool:
    """Gradients are on, or off, from here on. Gives what it was before."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    return before


@has_side_effect
def end_grad_mode(before: bool) -> None:
    torch.set_grad_enabled(before)


class Regions:
    """The regions that the traced program is in."""

    def __init__(self, tracer: MetaTracer) -> None:
        self._tracer = tracer
        self._autocasts: list[Node] = []
        self._before: dict[int, tuple[Any, Node]] = {}
        """By context manager: the node that gives what gradients were when it began."""
        self.handlers: dict[Any, Callable[..., None]] = {
            _torch.enter_autocast: self._enter_autocast,
            _torch.exit_autocast: self._exit_autocast,
            _torch.set_grad_enabled: self._set_grad_enabled,
        }

    def _enter_autocast(self, *options: Any) -> None:
        """`torch.autocast` has entered already."""
        self._autocasts.append(self._tracer.append_call(_torch.enter_autocast, options, {}))

    def _exit_autocast(self) -> None:
        self._tracer.append_call(_torch.exit_autocast, (self._autocasts.pop(),), {})

    def _set_grad_enabled(self, enabled: bool) -> None:
        _torch.set_grad_enabled(enabled)
        step, manager = _step_of_manager(sys._getframe(1))
        known = self._before.get(id(manager))
        if step in ENDS and known is not None:
            self._tracer.append_call(end_grad_mode, (known[1],), {})
            return
        has_begun = step == "__enter__" and isinstance(manager, torch.set_grad_enabled) and known is not None
        if has_begun and known is not None and known[1] is self._tracer.last_node():
            return  # this one begins when it is made
        node = self._tracer.append_call(begin_grad_mode, (enabled,), {})
        if manager is not None and not has_begun:
            self._before[id(manager)] = manager, node


def erase_empty_regions(graph: Graph) -> None:
    """Regions in which nothing is recorded."""
    for node in list(graph.nodes):
        if node.target is end_grad_mode and node.args[0] is node.prev and len(node.prev.users) == 1:
            began = node.prev
            graph.erase_node(node)
            graph.erase_node(began)


def _step_of_manager(frame: FrameType | None) -> tuple[str, Any]:
    """Which of torch's context managers (`no_grad` and its like) sets the state, and whether it begins or ends."""
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
"""`torch.set_grad_enabled(False)` ends as well when it is called, to decorate a function."""
STEPS = ("__init__", "__enter__", *ENDS)


def _is_of_torch(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith(("torch.", "understudy."))
