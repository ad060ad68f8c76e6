"""The transforms of torch.func: levels, wrappers, batches. Higher-order operators, and the tracer that they ask for."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from types import ClassMethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from understudy._torch.identity import call_on_demand, on_demand, torch_recorder_class

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""The base class of an `autograd.Function` at one level of torch.func."""
unwrap_for_grad, count_autograd_nodes = torch._C._functorch._unwrap_for_grad, torch.autograd._get_sequence_nr
wrap_for_grad: Callable[[Tensor, int], Any] = torch._C._functorch._wrap_for_grad
with_batch_dimension = torch._C._functorch._add_batch_dim
running_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the running autograd node, or None."""
number_of_node: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The sequence number of an autograd node: the order in which the forward made it."""
BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def apply_function(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(…)`, which torch leaves without annotations."""
    return function.apply(*args)


single_level_functions = call_on_demand(
    "torch._functorch.autograd_function", "enable_single_level_autograd_function"
)
"""A context in which such functions may be applied."""


def innermost_transform(op: object = None) -> tuple[Any, str, bool]:
    """The innermost transform of torch.func, its kind, and whether torch has a rule for this higher-order operator."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter  # why: seldom needed

    interpreter = retrieve_current_functorch_interpreter()
    return interpreter, interpreter.key().name, interpreter.key() in getattr(op, "functorch_table", ())


def split_wrapper(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The tensor inside a wrapper of torch.func, and a function that wraps another tensor likewise: as an entry of a
    batch, or as a tensor that requires grad."""
    functorch = torch._C._functorch
    level = functorch.maybe_get_level(tensor)
    inner = functorch.get_unwrapped(tensor)
    if functorch.is_batchedtensor(tensor):
        dim = functorch.maybe_get_bdim(tensor)
        return inner, lambda other: with_batch_dimension(other, dim, level)
    if functorch.is_gradtrackingtensor(tensor):
        return inner, lambda other: _set_requires_grad(wrap_for_grad(other, level), tensor.requires_grad)
    return inner, lambda other: other


def _set_requires_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Set requires_grad, which torch does not allow inside a transform."""
    functorch = torch._C._functorch
    before = functorch.get_inplace_requires_grad_allowed()
    functorch.set_inplace_requires_grad_allowed(True)
    try:
        return tensor.requires_grad_(requires_grad)
    finally:
        functorch.set_inplace_requires_grad_allowed(before)


unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""Unwraps a wrapper of a transform that has ended; returns any other tensor unchanged."""


def is_inside_jvp() -> bool:
    """Whether torch.func.jvp is running, even if its level is temporarily removed."""
    return bool(sys.modules["torch._functorch.eager_transforms"].JVP_NESTING > 0)


def has_transforms() -> bool:
    """Whether a transform of torch.func is active in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class no_transforms:
    """Deactivates all transforms of torch.func of this thread."""

    __slots__ = ("_taken",)

    def __enter__(self) -> None:
        depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        self._taken = [torch._C._functorch.pop_dynamic_layer_stack() for _ in range(depth)]

    def __exit__(self, *exception: object) -> None:
        for layer in reversed(self._taken):
            torch._C._functorch.push_dynamic_layer_stack(layer)


TRANSFORMS = DispatchKey.FuncTorchDynamicLayerFrontMode
"""The dispatch key of the innermost transform."""


def is_batch_of(value: Any, level: int) -> bool:
    is_batch = isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)
    return is_batch and torch._C._functorch.maybe_get_level(value) == level


def vmap_inputs(in_dims: Any, args: tuple[object, ...], func: Any) -> tuple[list[int | None], list[Any], Any]:
    """The mapped dimension of each input (None: not mapped), the inputs as a flat list, and their structure."""
    _, flat_dims, flat, structure = torch._functorch.vmap._process_batched_inputs(in_dims, args, func)
    return flat_dims, flat, structure


def function_of_class_method(method: object) -> Callable[..., Any]:
    """A class method as a function that takes the class. In some releases `Function.apply` is a C++ function."""
    if hasattr(method, "__func__"):
        return method.__func__
    found = (vars(kind).get(method.__name__) for kind in method.__self__.__mro__)
    descriptor = next(value for value in found if isinstance(value, ClassMethodDescriptorType))
    return lambda cls, *args, **kwargs: descriptor.__get__(None, cls)(*args, **kwargs)


def recording_of(op: object) -> Callable[..., Any] | None:
    """The function with which torch's recorder records a higher-order operator."""
    return op.python_key_table.get(torch_recorder_class())


def tracing_functions_of(handler: object, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
    """The functions with these names that the handler's module imported from torch's tracing module: (namespace, name)."""
    import torch.fx.experimental.proxy_tensor as tracing  # why: only to find the names that were taken from it

    while hasattr(handler, "__wrapped__") or hasattr(handler, "__func__"):
        handler = getattr(handler, "__func__", None) or handler.__wrapped__
    space = getattr(handler, "__globals__", {})
    # Another thread may have patched it: then the original is `__wrapped__`.
    return [
        (space, name) for name in names
        if name in space and inspect.unwrap(space[name]) is inspect.unwrap(getattr(tracing, name))
    ]  # fmt: skip


indexing_by_tensors = call_on_demand(
    "torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex"
)
"""A context in which `table[i]`, for a tensor `i` with one element, is an operator that reads no value."""
while_loop = on_demand("torch._higher_order_ops.while_loop", "while_loop_op")
while_loop_with_all_rounds = on_demand("torch._higher_order_ops.while_loop", "while_loop_stack_output_op")
"""A loop that returns its state after every iteration."""
backward_of = call_on_demand("torch._higher_order_ops.utils", "create_bw_fn")
"""backward_of(function, operands): a function from operands and gradients of the results to gradients of the operands."""


def as_graph(function: Callable[..., object], operands: Any, keys: tuple[Any, Any]) -> torch.fx.GraphModule:
    """The graph of a function with gradients, traced under given dispatch keys."""
    import torch._higher_order_ops.utils as utils  # why: the same

    return utils.materialize_as_graph(function, operands, *keys, force_enable_grad=True)


def registered_higher_order_fake(op: Any) -> Callable[..., Any] | None:
    import torch._higher_order_ops.utils as utils  # why: slow to load, and seldom needed

    return utils.registered_hop_fake_fns.get(op)


def plain_flex_attention(*args: Any) -> Any:
    """The math implementation of flex attention."""
    from torch._higher_order_ops.flex_attention import _permute_strides, math_attention  # why: slow to load

    out, *rest = math_attention(*args)
    return _permute_strides(out, args[0].stride()), *rest
