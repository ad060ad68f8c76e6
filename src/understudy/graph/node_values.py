"""The metadata of a node: its value (`val`, a snapshot), `tensor_meta`, and its origin in the program.

set_val, snapshot    the value of a node, as it was when it was recorded
has_equal_metadata             whether two runs of a graph have the same metadata
tensor_meta          as torch's `ShapeProp` writes it
NodeMeta             writes all metadata while a graph is recorded
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.fx.node import map_aggregate
from torch.fx.passes.shape_prop import TensorMetadata

from understudy import _torch
from understudy.fake.convert import spec_of_real
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new, make_snapshot
from understudy.fake.tensor import FakeTensor
from understudy.fake.torch_api import is_fake
from understudy.graph.node_origins import StackTraces
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import is_provably_equal
from understudy.spec import TensorSpec
from understudy.spec.call import flat

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
NUMBERS = (*SYMBOLIC, int, float)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's current metadata: another stand-in on the same storage, without gradient."""
    return make_snapshot(tensor.fake_mode, tensor) if type(tensor) is FakeTensor else tensor.detach()


def return_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def val_of(value: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with its tensors and numbers, and None for everything else; None if it has neither."""
    if type(value) is FakeTensor:
        return of_tensor(value)
    is_empty = True

    def leaf(part: object) -> Any:
        nonlocal is_empty
        if isinstance(part, torch.Tensor):
            is_empty = False
            return of_tensor(part)
        if isinstance(part, NUMBERS):
            is_empty = False
            return part
        return None

    val = map_aggregate(value, leaf)
    return None if is_empty else val


def convert_to_fakes(mode: FakeTensorMode, value: object) -> Any:
    """The value with each real tensor converted to a stand-in, with static shapes."""

    def convert(part: object) -> object:
        if not isinstance(part, torch.Tensor) or is_fake(part):
            return part
        return mode.from_tensor(part, static_shapes=True)

    if type(value) is FakeTensor or type(value) in NUMBERS:
        return value
    if isinstance(value, torch.Tensor):
        return convert(value)
    leaves, _ = _torch.tree_flatten(value)
    if all(convert(leaf) is leaf for leaf in leaves):
        return value
    return _torch.tree_map(convert, value)


def spec_of_val(val: Any) -> Any:
    """The same structure with tensors replaced by their specs."""

    def leaf(part: object) -> Any:
        return part._spec if type(part) is FakeTensor else part

    return map_aggregate(val, leaf)


def is_complete(mode: FakeTensorMode, val: object) -> bool:
    """Whether a `val` is the whole value: only stand-ins of this mode and numbers."""
    if isinstance(val, (list, tuple)):
        return all(is_complete(mode, part) for part in val)
    if isinstance(val, dict):
        return all(is_complete(mode, part) for part in val.values())
    return mode.is_our_fake(val) or isinstance(val, NUMBERS)


def needs_dispatch(mode: FakeTensorMode, value: object) -> tuple[bool, bool]:
    """Whether calls with this value have to go through autograd, and whether through other C++ dispatch (subclasses, …)."""
    if type(value) is FakeTensor:
        spec = value._spec
        return value.requires_grad, spec.conj or spec.neg or value.fake_mode is not mode
    if isinstance(value, (list, tuple)):
        parts = [needs_dispatch(mode, part) for part in value]
        return any(grad for grad, _ in parts), any(odd for _, odd in parts)
    is_strange = isinstance(value, (torch.Tensor, dict))
    return is_strange, is_strange


# --- comparing two runs ---------------------------------------------------------------------------------------------


def has_equal_metadata(old: Any, new: Any) -> bool:
    """Whether everything computed from one is the same when computed from the other."""
    if type(old) is not type(new):
        return False
    if type(old) is FakeTensor:
        # Determined values may affect later results, so they count as different.
        return (
            old._spec is new._spec
            and old._determined is None
            and new._determined is None
            and old.requires_grad == new.requires_grad
        )
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(map(has_equal_metadata, old, new))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(has_equal_metadata(old[key], new[key]) for key in old)
    if isinstance(old, SYMBOLIC):
        return type(old.node) is SymNode and old.node is new.node
    if isinstance(
        old, (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    ):
        return old == new
    return old is new


def storages_of(value: object) -> list[int]:
    """The storages of the tensors in a value, in order."""
    if type(value) is FakeTensor:
        return [_torch.storage_id(value)]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    nested = [list(part.values()) if isinstance(part, dict) else part for part in values]
    return [_torch.storage_id(fake) for fake in flat(FakeTensor, nested, {})]


# --- tensor_meta ----------------------------------------------------------------------------------------------------

ORDERS = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
"""The order of the dimensions in channels-last formats, innermost first."""
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def tensor_meta_of(value: Any) -> Any:
    """As `torch.fx`'s shape propagation: a `TensorMetadata` for each tensor; None without tensors."""
    from torch.fx.passes.shape_prop import TensorMetadata  # why: only on request

    if type(value) is FakeTensor and value._spec.is_symbolic and value._spec.layout is torch.strided:
        spec, strides = value._spec, value.stride()
        return TensorMetadata(
            value.shape,
            spec.dtype,
            value.requires_grad,
            strides,
            _provable_format(spec),
            is_quantized=False,
            qparams={},
        )
    is_empty = True

    def leaf(part: object) -> Any:
        nonlocal is_empty
        if not isinstance(part, torch.Tensor):
            return part
        is_empty = False
        strided = part.layout is torch.strided
        return TensorMetadata(
            shape=part.shape,
            dtype=part.dtype,
            requires_grad=part.requires_grad,
            stride=part.stride() if strided else (),
            memory_format=_memory_format(part) if strided else None,
            is_quantized=False,
            qparams={},
        )

    meta = map_aggregate(value, leaf)
    return None if is_empty else meta


@functools.lru_cache(maxsize=4096)
def tensor_meta_of_numbers(spec: TensorSpec, requires_grad: bool) -> Any:
    """The `TensorMetadata` of a tensor in strided layout whose sizes are numbers."""
    from torch.fx.passes.shape_prop import TensorMetadata  # why: only on request

    memory_format = torch.contiguous_format if spec.numel == 0 else _provable_format(spec)
    shape, stride, _ = spec.numbers
    return TensorMetadata(
        torch.Size(shape), spec.dtype, requires_grad, stride, memory_format, is_quantized=False, qparams={}
    )


def _memory_format(tensor: torch.Tensor) -> torch.memory_format | None:
    if type(tensor) is FakeTensor and tensor._spec.is_symbolic:
        return _provable_format(tensor._spec)
    for memory_format, dims in zip(FORMATS, (None, 4, 5), strict=True):
        if (dims is None or tensor.ndim == dims) and tensor.is_contiguous(memory_format=memory_format):
            return memory_format
    return None


def _provable_format(spec: TensorSpec) -> torch.memory_format | None:
    """For symbolic sizes: the format if it can be proved. Writing metadata must not add guards."""
    if _is_provably_packed(spec, range(spec.ndim - 1, -1, -1)):
        return torch.contiguous_format
    if spec.ndim in ORDERS and _is_provably_packed(spec, ORDERS[spec.ndim]):
        return FORMATS[spec.ndim - 3]
    return None


def _is_provably_packed(spec: TensorSpec, order: Sequence[int]) -> bool:
    expected: Any = 1
    for dim in order:
        if is_provably_equal(spec.shape[dim], 1):
            continue
        if not is_provably_equal(spec.stride[dim], expected):
            return False
        expected = expected * spec.shape[dim]
    return True


# --- Metadata of recorded nodes: value and origin -----------------------------------------------------------

COPIED_META = tuple(
    "stack_trace nn_module_stack torch_fn source_fn_stack recompute ac_graph_id has_backward_hook from_node "
    "quantization_tag _numeric_debug_handle custom partitioner_tag arg_kwarg_vals seq_nr autograd_backward".split()
)
"""Metadata that is copied from the node of another graph that is being run, under `preserve_node_meta`."""


class NodeMeta:
    """The current position in the program: the user's lines, the torch function, the operator that is being decomposed."""

    def __init__(self) -> None:
        self.torch_call: tuple[Any, int] | None = None
        self._torch_fn: tuple[Any, tuple[str, str]] = (None, ("", ""))
        self._function_names: dict[Any, tuple[str, str]] = {}
        self.original_aten: Any = None
        self.shared_trace: str | None = None
        """The stack trace of all nodes that are made now: those that compute one number."""
        self.module_stack: Any = None
        self._stack_traces = StackTraces()
        self.trace_of = self._stack_traces.trace_of
        self._tensor_metas: tuple[dict[Any, TensorMetadata], ...] = ({}, {})
        self.tensor_metas = self._tensor_metas[False]
        """The `TensorMetadata` of stand-ins without gradient, by spec."""

    def mark(self, node: Node, frame: object = None) -> dict[str, Any]:
        """Write the origin of a node into its metadata, which is returned: the program in this frame, by default the
        caller's."""
        meta = node.meta
        if fx_traceback.should_preserve_node_meta:
            self._copy_current_meta(node)
        if self.original_aten is not None:
            meta["original_aten"] = self.original_aten
        if "stack_trace" not in meta:
            trace = self.shared_trace
            if trace is None:
                trace = self.trace_of(sys._getframe(1) if frame is None else frame)
            if trace:
                meta["stack_trace"] = trace
        call = self.torch_call
        if call is not None and "torch_fn" not in meta:
            if self._torch_fn[0] is not call:
                func, count = call
                name, kind_and_name = self._function_names.get(func) or self._name_function(func)
                self._torch_fn = call, (f"{name}_{count}", kind_and_name)
            meta["torch_fn"] = self._torch_fn[1]
        if self.module_stack is not None and "nn_module_stack" not in meta:
            stack = self.module_stack()
            if stack:
                meta["nn_module_stack"] = stack
        return meta

    def _name_function(self, func: object) -> tuple[str, str]:
        name = getattr(func, "__name__", None) or str(func)
        names = self._function_names[func] = name, f"{type(func).__name__}.{name}"
        return names

    def _copy_current_meta(self, node: Node) -> None:
        """Under `preserve_node_meta`, copy the metadata of the node that is being run."""
        current = fx_traceback.get_current_meta()
        for name in COPIED_META:
            value = current.get(name)
            if value is not None:
                node.meta[name] = copy.copy(value)
        if fx_traceback.GRADIENT_ACC_SPECIAL_STACK in current.get("stack_trace", ""):
            node.meta["is_gradient_acc"] = node.meta["autograd_backward"] = True
        # The sequence number of autograd's node links a call of the backward pass to its forward call.
        backward = current["grad_fn_seq_nr"] if current.get("in_grad_fn", 0) > 0 else ()
        node.meta["seq_nr"] = backward[-1] if backward else _torch.count_autograd_nodes() - 1
        if isinstance(node.target, _torch.OpOverload):
            node.meta["original_aten"] = node.target
        elif node.target is operator.getitem:
            source = node.args[0]
            if isinstance(source, Node) and "original_aten" in source.meta:
                node.meta["original_aten"] = source.meta["original_aten"]

    def stack_trace(self) -> str:
        """The stack trace of the user's program, outermost line first."""
        return self._stack_traces.trace_of(sys._getframe(2))

    def close(self) -> None:
        """Called at the end of a trace: drop references to frames and values."""
        self._stack_traces.clear()

    def tensor_meta(self, fake: FakeTensor, with_gradient: bool = False) -> Any:
        """The `TensorMetadata` of a stand-in, one object for each spec."""
        spec, metas = fake._spec, self._tensor_metas[with_gradient]
        found = metas.get(spec)
        if found is None:
            is_plain = not spec.is_symbolic and spec.layout is torch.strided
            found = tensor_meta_of_numbers(spec, with_gradient) if is_plain else tensor_meta_of(fake)
            metas[spec] = found
        return found


_FOR_REAL_TENSORS = FakeTensorMode()
"""The mode of the stand-ins that describe real tensors in `val`."""


def make_val(tensor: torch.Tensor) -> torch.Tensor:
    """The `val` of a tensor: a snapshot of a stand-in; for a real tensor, a stand-in."""
    if type(tensor) is FakeTensor:
        return snapshot(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or is_fake(tensor):
        return tensor.detach()
    if any(
        isinstance(size, torch.SymInt) for size in tensor.shape
    ):  # a fake of torch's own, with its own symbols
        return tensor.detach()
    return make_new(_FOR_REAL_TENSORS, spec_of_real(tensor))


def as_val(value: object) -> Any:
    """The `val` of a value: the same structure of stand-ins and numbers, and None for everything else."""
    return val_of(value, make_val)


def is_constant(node: Node) -> bool:
    """Whether a node reads a constant, not the state of a module: captures give constants this name."""
    return node.op == "get_attr" and str(node.target).startswith("_tensor_constant")


def set_val(node: Node, value: object) -> None:
    """Set `val` and `tensor_meta` of a node that produced this value."""
    if type(value) is FakeTensor:
        spec = value._spec
        is_plain = not spec.is_symbolic and spec.layout is torch.strided
        node.meta["val"] = make_snapshot(value.fake_mode, value)
        node.meta["tensor_meta"] = (
            tensor_meta_of_numbers(spec, value.requires_grad) if is_plain else tensor_meta_of(value)
        )
        return
    if type(value) in SYMBOLIC:
        node.meta["val"] = value
        return
    val = as_val(value)
    if val is not None or isinstance(value, (bool, str)) or value is None:
        node.meta["val"] = val if val is not None else value
    if isinstance(value, torch.Tensor) and not (value.is_nested and value.layout is torch.strided):
        node.meta["tensor_meta"] = tensor_meta_of(value)  # nested tensors have no shape
