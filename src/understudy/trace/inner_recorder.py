"""Above autograd an operator is one node, whatever it is made of; a backward pass needs what it is made of.

`layer_norm` is recorded whole, but its derivative reads the mean that was computed inside. So what an operator runs is
recorded as well, before its own node. When the trace is over, `settle` looks who uses it:

    nobody, as in most programs             it goes with the rest of the dead code, writes and random numbers too
    somebody, and it could be left out      both stay
    somebody, and it could not              the operator's own node goes: two draws of random numbers, as two writes, are
                                            not one. `dropout` becomes `native_dropout`, whose mask the backward pass reads
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.infer.call import flat
from understudy.trace.effects import is_pure
from understudy.trace.recorder import ProxyTorchDispatchMode

if TYPE_CHECKING:
    from understudy.trace.tracer import PythonKeyTracer


class Parts:
    """What one operator runs, as nodes, and which of them give what the operator gives."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer
        self._before = _last(tracer)
        self._nodes: list[Node] = []
        self._results: list[tuple[torch.Tensor, Node | None]] = []
        self.can_be_left_out = True

    def close(self, result: Any) -> None:
        """The operator has run; its own node comes next."""
        node = _last(self._tracer)
        while node is not self._before:
            if node.op != "get_attr":  # of which there is one for all
                self._nodes.insert(0, node)
            node = node.prev
        self._results = [
            (tensor, self._tracer.recorded(tensor)) for tensor in flat(torch.Tensor, (result,), {})
        ]

    def belong_to(self, whole: Node) -> None:
        """This is the operator's own node, by which its results are known from now on."""
        if self._nodes and not self.can_be_left_out:
            known = [(self._tracer.recorded(tensor), part) for tensor, part in self._results]
            self._tracer.parts.append(PartsOf(whole, self._nodes, known))
        self._results = []


def _last(tracer: PythonKeyTracer) -> Node:
    return _torch.last_node(tracer.graph)


class PartsOf:
    """The parts of a node that can't be in a graph together with it."""

    def __init__(
        self, whole: Node, nodes: list[Node], results: list[tuple[Node | None, Node | None]]
    ) -> None:
        self._whole = whole
        self._nodes = nodes
        self._results = results

    def settle(self) -> None:
        """Either the parts go, or the node that stands for them all."""
        inside = set(self._nodes)
        is_used = any(user not in inside for node in self._nodes for user in node.users)
        if is_used:
            self._take_the_place()
        else:
            _erase(self._nodes)

    def _take_the_place(self) -> None:
        for known_by, part in self._results:
            if known_by is not None and part is not None and known_by is not part:
                known_by.replace_all_uses_with(part)
        items = [user for user in self._whole.users if user.target is operator.getitem]
        _erase([self._whole, *items])


def _erase(nodes: list[Node]) -> None:
    for node in reversed(nodes):
        node.graph.erase_node(node)


def settle(tracer: PythonKeyTracer) -> None:
    """The trace is over: of each operator with parts, one or the other stays."""
    for parts in reversed(tracer.parts):
        parts.settle()
    tracer.parts.clear()


class InnerRecorder(ProxyTorchDispatchMode):
    """Records what one operator runs, below autograd."""

    def __init__(self, outer: ProxyTorchDispatchMode) -> None:
        allow = outer._allow_fake_constant
        super().__init__(outer.tracer, outer.tracing_mode, _allow_fake_constant=allow, decomposition_table={})
        self.parts = Parts(outer.tracer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_pure(func, args, kwargs or {}):
            self.parts.can_be_left_out = False
        return super().__torch_dispatch__(func, types, args, kwargs)


def needs_its_parts(args: Any, kwargs: Any) -> bool:
    """Whether a backward pass could ask for what an operator computes inside."""
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in flat(torch.Tensor, args, kwargs)
    )
