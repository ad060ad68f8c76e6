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
        self._grad_modes: list[Node] = []
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
        if self._grad_modes and _is_leaving(sys._getframe(1)):
            self._tracer.append_call(end_grad_mode, (self._grad_modes.pop(),), {})
        else:
            self._grad_modes.append(self._tracer.append_call(begin_grad_mode, (enabled,), {}))


def erase_empty_regions(graph: Graph) -> None:
    """Regions in which nothing is recorded."""
    for node in list(graph.nodes):
        if node.target is end_grad_mode and node.args[0] is node.prev:
            began = node.prev
            graph.erase_node(node)
            graph.erase_node(began)


def _is_leaving(frame: FrameType | None) -> bool:
    """Whether torch's `no_grad` and its like set the state because they end."""
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_name == "__exit__" and frame.f_globals.get("__name__", "").startswith(
            "torch.autograd."
        ):
            return True
        frame = frame.f_back
    return False
