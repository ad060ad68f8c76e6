"""`make_fx(pre_dispatch=True)`: recording above autograd and autocast.

Calls that change the state of autograd and autocast are nodes of the graph, and a composite operator is one node. Its
inner operators are recorded as well, for a backward pass inside the traced function, and removed if they are not used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.capture.higher_order.torch_tracing import branches_below_autograd
from understudy.capture.recorder import ProxyTorchDispatchMode
from understudy.capture.tracer import PythonKeyTracer
from understudy.ops.traits.writes import is_pure
from understudy.patching import RECORDING, patch
from understudy.spec.call import flat

BACKWARD = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
"""The operators of these functions are recorded below autograd: they are autograd's own."""


AutocastArguments = tuple[str, torch.dtype, bool, bool]
"""Arguments of `enter_autocast`: device type, dtype, whether it is enabled, whether casts are cached."""


def disabled_autocast(device_types: Iterable[str]) -> list[AutocastArguments]:
    """What disables the autocast that is enabled now."""
    return [
        (device, torch.get_autocast_dtype(device), False, torch.is_autocast_cache_enabled())
        for device in sorted(device_types) if torch.is_autocast_enabled(device)
    ]  # fmt: skip


class PreDispatchTorchFunctionMode(_torch.FunctionMode):
    """Records `torch.no_grad`, `torch.set_grad_enabled`, `torch.autocast` and the like where they begin and end.

    They are torch functions, not operators, so the recorder does not see them.
    """

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self.tracer = tracer
        self.enter_autocast_nodes: list[Node] = []
        self._has_grad_in_graph = torch.is_grad_enabled()
        """Whether grad mode is enabled at this point of the graph, by its recorded nodes."""
        self._handlers: dict[Any, Callable[..., Any]] = {
            _torch.set_grad_enabled: self._set_grad_enabled,
            _torch.enter_autocast: self._enter_autocast,
            _torch.exit_autocast: self._exit_autocast,
        }

    # torch.autocast checks by isinstance whether torch's own class of this name is active.
    def _claimed_class(self) -> type:
        return _torch.torch_state_recorder_class()

    __class__ = property(_claimed_class)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: tuple[object, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        handler = self._handlers.get(func) if _torch.is_recorded_above_autograd() else None
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if func in BACKWARD and _torch.is_recorded_above_autograd():
            regions = [self._record(_torch.enter_autocast, arguments) for arguments in self._find_autocast()]
            with _torch.active_recorder().below_autograd(), branches_below_autograd():
                result = func(*args, **(kwargs or {}))
            for region in reversed(regions):
                self._record(_torch.exit_autocast, (region,))
            return result
        return func(*args, **kwargs) if kwargs else func(*args)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self._record_grad_mode_changes()
        self.tracer.keep_in_step = None

    def _set_grad_enabled(self, enabled: bool) -> Node:
        if self._has_grad_in_graph is not torch.is_grad_enabled():
            # An autograd.Function disables grad mode without a call. Changes inside it end with it.
            self.tracer.keep_in_step = self._record_grad_mode_changes
        _torch.set_grad_enabled(enabled)
        self._has_grad_in_graph = enabled
        return self._record(_torch.set_grad_enabled, (enabled,))

    def _record_grad_mode_changes(self) -> None:
        """Record a change of grad mode that C++ made without a call."""
        if self.tracer.keep_in_step is not None and self._has_grad_in_graph is not torch.is_grad_enabled():
            self._set_grad_enabled(torch.is_grad_enabled())

    def _enter_autocast(self, *args: object) -> Node:
        """`torch.autocast` has entered already."""
        node = self._record(_torch.enter_autocast, args)
        self.enter_autocast_nodes.append(node)
        return node

    def _find_autocast(self) -> list[AutocastArguments]:
        """What disables the autocast that is enabled at this point of the graph: below autograd, it has cast already."""
        return disabled_autocast({str(node.args[0]) for node in self.enter_autocast_nodes})

    def _exit_autocast(self, *args: object) -> Node:
        return self._record(_torch.exit_autocast, (self.enter_autocast_nodes.pop(),))

    def _record(self, function: Any, args: tuple[object, ...]) -> Node:
        node = self.tracer.append_call(function, args, {}, function.__name__)
        node.meta["val"] = None
        return node


def is_grad_mode_recorded() -> bool:
    return _torch.is_recorded_above_autograd() and _torch.active_recorder().records_parts


@patch(
    "torch.autograd.grad_mode.inference_mode.__enter__", "torch.autograd.grad_mode.inference_mode.__exit__",
    during=RECORDING,
)  # fmt: skip
def record_grad_mode_of_inference(original: Callable[..., None]) -> Any:
    """C++ disables grad mode with inference mode, without a call: above autograd, the graph would record gradients there,
    and refuse writes to leaves. Exported programs have no such regions, as torch's have none."""

    def switch(self: object, *exception: object) -> None:
        was_enabled = torch.is_grad_enabled()
        original(self, *exception)
        if torch.is_grad_enabled() is not was_enabled and is_grad_mode_recorded():
            _torch.set_grad_enabled(torch.is_grad_enabled())

    return switch


# --- Above autograd a composite operator is one node; a backward pass needs its inner operators -------------------
# `layer_norm` is recorded as one node, but its derivative reads the mean that was computed inside. So the inner
# operators are recorded as well, before that node. At the end of the trace, `settle` checks their users:
#
#     none (most programs)               the inner nodes are removed, including writes and random numbers
#     some, without effects              both stay
#     some, with writes or random draws  the composite's node is removed: it would write or draw a second time. `dropout`
#                                        becomes `native_dropout`, whose mask the backward pass reads
#
# Autocast has cast the arguments of the whole operator, and leaves alone what runs inside: the inner nodes that stay are
# in a region where it is disabled.


class CompositeParts:
    """The inner nodes of one composite operator, and those among them that produce its results."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer
        self._before = _last(tracer)
        self._nodes: list[Node] = []
        self._results: list[tuple[torch.Tensor, Node | None]] = []
        self._autocast: list[AutocastArguments] = []
        self.can_be_left_out = True

    def close(self, result: object) -> None:
        """Called when the operator has run; its own node comes next."""
        node = _last(self._tracer)
        while node is not self._before:
            if node.op != "get_attr":  # shared by all
                self._nodes.insert(0, node)
            node = node.prev
        self._results = [
            (tensor, self._tracer.find_node(tensor)) for tensor in flat(torch.Tensor, (result,), {})
        ]
        self._autocast = disabled_autocast({tensor.device.type for tensor, _ in self._results})

    def replace_parts(self, whole: Node) -> None:
        """Set the operator's own node, which represents its results from now on."""
        if self._nodes and (self._autocast or not self.can_be_left_out):
            known = [(self._tracer.find_node(tensor), part) for tensor, part in self._results]
            self._tracer.parts.append(
                PartsOfNode(
                    whole, self._nodes, known, self._autocast, replaces_whole=not self.can_be_left_out
                )
            )
        self._results = []


def _last(tracer: PythonKeyTracer) -> Node:
    return _torch.last_node(tracer.graph)


class PartsOfNode:
    """The inner nodes of a composite node, of which only one form may stay in the graph."""

    def __init__(
        self, whole: Node, nodes: list[Node], results: list[tuple[Node | None, Node | None]],
        autocast: list[AutocastArguments], *, replaces_whole: bool,
    ) -> None:  # fmt: skip
        self._whole = whole
        self._nodes = nodes
        self._results = results
        self._autocast = autocast
        self._replaces_whole = replaces_whole

    def settle(self) -> None:
        """Remove either the inner nodes or the composite node."""
        needed = self._find_needed()
        if not needed:
            _erase(self._nodes)
            return
        if self._replaces_whole:
            self._replace_whole()
        ops = [node.target for node in needed if isinstance(node.target, _torch.OpOverload)]
        for arguments in self._autocast:
            if any(_torch.has_autocast_kernel(op, arguments[0]) for op in ops):
                self._disable_autocast(arguments)

    def _find_needed(self) -> set[Node]:
        """The inner nodes that others use, and what these are computed from."""
        inside, needed = set(self._nodes), set[Node]()
        for node in reversed(self._nodes):
            if any(user not in inside or user in needed for user in node.users):
                needed.add(node)
        return needed

    def _disable_autocast(self, arguments: AutocastArguments) -> None:
        graph = self._whole.graph
        with graph.inserting_before(self._nodes[0]):
            region = graph.call_function(_torch.enter_autocast, arguments)
        with graph.inserting_after(self._nodes[-1]):
            end = graph.call_function(_torch.exit_autocast, (region,))
        region.meta["val"] = end.meta["val"] = None

    def _replace_whole(self) -> None:
        for known_by, part in self._results:
            if known_by is not None and part is not None and known_by is not part:
                known_by.replace_all_uses_with(part)
        items = [user for user in self._whole.users if user.target is operator.getitem]
        _erase([self._whole, *items])


def _erase(nodes: list[Node]) -> None:
    for node in reversed(nodes):
        node.graph.erase_node(node)


def settle(tracer: PythonKeyTracer) -> None:
    """Called at the end of the trace: keep one form of each composite operator."""
    for parts in reversed(tracer.parts):
        parts.settle()
    tracer.parts.clear()


class InnerRecorder(ProxyTorchDispatchMode):
    """Records the inner operators of one composite operator, below autograd."""

    def __init__(self, outer: ProxyTorchDispatchMode) -> None:
        allow = outer._allow_fake_constant
        super().__init__(outer.tracer, outer.tracing_mode, _allow_fake_constant=allow, decomposition_table={})
        self.parts = CompositeParts(outer.tracer)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: object = None) -> Any:
        if not is_pure(func, args, kwargs or {}):
            self.parts.can_be_left_out = False
        return super().__torch_dispatch__(func, types, args, kwargs)


def needs_parts(args: Any, kwargs: Any) -> bool:
    """Whether a backward pass could need the inner operators."""
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in flat(torch.Tensor, args, kwargs)
    )
