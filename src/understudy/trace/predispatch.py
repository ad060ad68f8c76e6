"""Above autograd and autocast: calls that change their state are nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from understudy import _torch
from understudy.trace.subgraph_current import branches_below_autograd
from understudy.trace.tracer import PythonKeyTracer

BACKWARD = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
"""What these run is recorded below autograd: it is part of autograd, and there is nothing above it."""


class PreDispatchTorchFunctionMode(TorchFunctionMode):
    """Records `torch.no_grad`, `torch.set_grad_enabled`, `torch.autocast` and the like where they begin and end.

    They are no operators, so the recorder does not hear of them; functions of torch they are.
    """

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self.tracer = tracer
        self.enter_autocast_nodes: list[Node] = []
        self._told = torch.is_grad_enabled()
        """Whether gradients are on where the graph has got to, by what it says itself."""
        self._handlers: dict[Any, Callable[..., Any]] = {
            _torch.set_grad_enabled: self._set_grad_enabled,
            _torch.enter_autocast: self._enter_autocast,
            _torch.exit_autocast: self._exit_autocast,
        }

    # torch.autocast asks the modes for functions whether one is torch's own class of this name.
    def _claimed_class(self) -> Any:
        return _torch.torch_state_recorder_class()

    __class__ = property(_claimed_class)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func) if _torch.is_recorded_above_autograd() else None
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if func in BACKWARD and _torch.is_recorded_above_autograd():
            with _torch.active_recorder().below_autograd(), branches_below_autograd():
                return func(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if exception[0] is None:
            self._keep_in_step()
        self.tracer.keep_in_step = None

    def _set_grad_enabled(self, enabled: bool) -> Node:
        if self._told is not torch.is_grad_enabled():
            # An autograd.Function runs without gradients, and nobody is told. What is set inside of it ends with it.
            self.tracer.keep_in_step = self._keep_in_step
        _torch.set_grad_enabled(enabled)
        self._told = enabled
        return self._recorded(_torch.set_grad_enabled, (enabled,))

    def _keep_in_step(self) -> None:
        """Say what C++ has changed since the graph has said something."""
        if self.tracer.keep_in_step is not None and self._told is not torch.is_grad_enabled():
            self._set_grad_enabled(torch.is_grad_enabled())

    def _enter_autocast(self, *args: Any) -> Node:
        """`torch.autocast` has entered already."""
        node = self._recorded(_torch.enter_autocast, args)
        self.enter_autocast_nodes.append(node)
        return node

    def _exit_autocast(self, *args: Any) -> Node:
        return self._recorded(_torch.exit_autocast, (self.enter_autocast_nodes.pop(),))

    def _recorded(self, function: Any, args: tuple[Any, ...]) -> Node:
        node = self.tracer.append_call(function, args, {}, function.__name__)
        node.meta["val"] = None
        return node
