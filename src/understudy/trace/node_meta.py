"""What is written into a recorded node: what it gives, and where in the user's program it comes from."""

from __future__ import annotations

import copy
import operator
import sys
from typing import Any

import torch
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.fx.passes.shape_prop import TensorMetadata

from understudy import _torch
from understudy.fake.convert import spec_of_real
from understudy.fake.helpers import is_fake
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.spec import TensorSpec
from understudy.trace.places import Places
from understudy.trace.prop_values import snapshot, tensor_meta_of, tensor_meta_of_numbers, val_of

has_preserved_node_meta = fx_traceback.has_preserved_node_meta
CARRIED = tuple(
    "stack_trace nn_module_stack torch_fn source_fn_stack recompute ac_graph_id has_backward_hook from_node "
    "quantization_tag _numeric_debug_handle custom partitioner_tag arg_kwarg_vals seq_nr autograd_backward".split()
)
"""What is taken over from the node of another graph that is being run, under `preserve_node_meta`."""


class NodeMeta:
    """Where the program is just now: the user's lines, the torch function, the operator that is being decomposed."""

    def __init__(self) -> None:
        self.torch_call: tuple[Any, int] | None = None
        self._torch_fn: tuple[Any, tuple[str, str]] = (None, ("", ""))
        self.original_aten: Any = None
        self.module_stack: Any = None
        self._places = Places()
        self._tensor_metas: tuple[dict[Any, TensorMetadata], ...] = ({}, {})

    def mark(self, node: Node, frame: Any = None) -> None:
        """Say where a node comes from: from the program that runs in this frame, the caller's if none is given."""
        meta = node.meta
        if has_preserved_node_meta():
            self._carry_over(node)
        if self.original_aten is not None:
            meta["original_aten"] = self.original_aten
        if "stack_trace" not in meta:
            trace = self._places.here(sys._getframe(1) if frame is None else frame)
            if trace:
                meta["stack_trace"] = trace
        call = self.torch_call
        if call is not None and "torch_fn" not in meta:
            meta["torch_fn"] = self._torch_fn[1] if self._torch_fn[0] is call else self._described_call(call)
        if self.module_stack is not None and "nn_module_stack" not in meta:
            stack = self.module_stack()
            if stack:
                meta["nn_module_stack"] = stack

    def _described_call(self, call: tuple[Any, int]) -> tuple[str, str]:
        func, count = call
        name = getattr(func, "__name__", None) or str(func)
        self._torch_fn = call, (f"{name}_{count}", f"{type(func).__name__}.{name}")
        return self._torch_fn[1]

    def _carry_over(self, node: Node) -> None:
        """Under `preserve_node_meta`, a node says what the node says that is being run, and which operator it is of."""
        current = fx_traceback.get_current_meta()
        for name in CARRIED:
            value = current.get(name)
            if value is not None:
                node.meta[name] = copy.copy(value)
        if fx_traceback.GRADIENT_ACC_SPECIAL_STACK in current.get("stack_trace", ""):
            node.meta["is_gradient_acc"] = node.meta["autograd_backward"] = True
        # By the number of autograd's node a call of a backward pass finds the call that it is the gradient of.
        backward = current["grad_fn_seq_nr"] if current.get("in_grad_fn", 0) > 0 else ()
        node.meta["seq_nr"] = backward[-1] if backward else _torch.count_autograd_nodes() - 1
        if isinstance(node.target, _torch.OpOverload):
            node.meta["original_aten"] = node.target
        elif node.target is operator.getitem and "original_aten" in (source := node.args[0]).meta:  # type: ignore[union-attr]
            node.meta["original_aten"] = source.meta["original_aten"]  # type: ignore[union-attr]

    def stack_trace(self) -> str:
        """The user's lines that led here, outermost first."""
        return self._places.here(sys._getframe(2))

    def close(self) -> None:
        """The trace is over: let go of what the program was holding."""
        self._places.forget()

    def tensor_meta(self, fake: FakeTensor, with_gradient: bool = False) -> Any:
        """One for each spec: results of operators need no gradient themselves, parameters may."""
        found = self._tensor_metas[with_gradient].get(fake._spec)
        return self._described_tensor(fake, with_gradient) if found is None else found

    def tensor_meta_of_spec(self, spec: TensorSpec, with_gradient: bool) -> Any:
        """The same for a tensor in strided layout with plain sizes, of which there is no stand-in."""
        metas = self._tensor_metas[with_gradient]
        found = metas.get(spec)
        if found is None:
            found = metas[spec] = tensor_meta_of_numbers(spec, with_gradient)
        return found

    def _described_tensor(self, fake: FakeTensor, with_gradient: bool) -> Any:
        spec = fake._spec
        if not spec.is_symbolic and spec.layout is torch.strided:
            return self.tensor_meta_of_spec(spec, with_gradient)
        found = self._tensor_metas[with_gradient][spec] = tensor_meta_of(fake)
        return found


_FOR_REAL_TENSORS = FakeTensorMode()
"""The mode of the stand-ins that say what a real tensor is."""


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """What `val` says of a tensor: of a stand-in, as it is now; of a real one, all but its data."""
    if type(tensor) is FakeTensor:
        return snapshot(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or is_fake(tensor):
        return tensor.detach()
    if any(isinstance(size, torch.SymInt) for size in tensor.shape):  # one of torch's: no other has its sizes
        return tensor.detach()
    return make_new(_FOR_REAL_TENSORS, spec_of_real(tensor))


def as_val(value: Any) -> Any:
    """What `val` says of a value: the same structure of stand-ins and numbers, None for what is neither."""
    return val_of(value, stand_in)


def set_val(node: Node, value: Any) -> None:
    """`val` and `tensor_meta` of a node that gives this value."""
    if type(value) is FakeTensor:
        node.meta["val"] = snapshot(value)
        node.meta["tensor_meta"] = tensor_meta_of(value)
        return
    val = as_val(value)
    if val is not None or isinstance(value, (bool, str)) or value is None:
        node.meta["val"] = val if val is not None else value
    if isinstance(value, torch.Tensor) and not (value.is_nested and value.layout is torch.strided):
        node.meta["tensor_meta"] = tensor_meta_of(value)  # rows of several lengths have no shape
