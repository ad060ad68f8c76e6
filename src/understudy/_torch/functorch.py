"""The transforms of torch.func: levels, wrappers, batches. Higher-order operators, and the tracer that they ask for."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import ClassMethodDescriptorType
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch import Tensor
from torch._C import DispatchKey

from understudy._torch.identity import torch_recorder_class

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""What an `autograd.Function` is at one level of torch.func."""
unwrap_for_grad, count_autograd_nodes = torch._C._functorch._unwrap_for_grad, torch.autograd._get_sequence_nr
wrap_for_grad: Callable[[Tensor, int], Any] = torch._C._functorch._wrap_for_grad
with_batch_dimension = torch._C._functorch._add_batch_dim
running_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of autograd whose gradients are computed just now, None if there is none."""
running_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is in, -1 if in none."""
BACKWARD = torch.autograd.graph._engine_run_backward.__code__
STARTED_FROM = "t_outputs"
"""Its variable with what the backward pass starts from."""


def number_of_node(node: object) -> int:
    """Nodes of autograd are numbered in the order in which the forward makes them."""
    number: int = node._sequence_nr()
    return number


def attach_to_node(node: object, name: str, value: object) -> None:
    """Kept alive as long as the node of autograd is."""
    node.metadata[name] = value


def apply_function(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(…)`, which torch leaves without annotations."""
    return function.apply(*args)


def shape_of_gradient(node: object, result: int = 0) -> Any:
    return node._input_metadata[result].shape


def over_batches(function: Callable[..., object], in_dims: tuple[int | None, ...], size: int, randomness: str) -> Any:
    """`torch.vmap` of a function of flat operands, which tells of each result where its batch is, None if it is none."""
    from torch._functorch.vmap import restore_vmap  # why: seldom needed

    return restore_vmap(function, in_dims, size, randomness)


def single_level_functions() -> Any:
    """A context in which such functions may be applied."""
    from torch._functorch.autograd_function import enable_single_level_autograd_function  # why: seldom needed

    return enable_single_level_autograd_function()


def innermost_transform(op: object = None) -> tuple[Any, str, bool]:
    """The innermost transform of torch.func, its kind, and whether torch has a rule for the higher-order operator."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter  # why: seldom needed

    interpreter = retrieve_current_functorch_interpreter()
    return interpreter, interpreter.key().name, interpreter.key() in getattr(op, "functorch_table", ())


def take_wrapper_off(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """What is inside of a wrapper of torch.func, and a function that puts another tensor into such a wrapper: one entry of
    a batch, or a tensor whose gradient is asked for."""
    functorch = torch._C._functorch
    level = functorch.maybe_get_level(tensor)
    inner = functorch.get_unwrapped(tensor)
    if functorch.is_batchedtensor(tensor):
        dim = functorch.maybe_get_bdim(tensor)
        return inner, lambda other: with_batch_dimension(other, dim, level)
    if functorch.is_gradtrackingtensor(tensor):
        return inner, lambda other: _let_require_grad(wrap_for_grad(other, level), tensor.requires_grad)
    return inner, lambda other: other


def _let_require_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Inside of a transform, torch refuses it to programs."""
    functorch = torch._C._functorch
    before = functorch.get_inplace_requires_grad_allowed()
    functorch.set_inplace_requires_grad_allowed(True)
    try:
        return tensor.requires_grad_(requires_grad)
    finally:
        functorch.set_inplace_requires_grad_allowed(before)


unwrapped_if_over: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""What is inside of the wrapper of a transform that has ended; any other tensor as it is."""


def with_forward_gradients() -> Any:
    """A context in which forward differentiation goes on, where an autograd.Function has stopped it."""
    return _forward_ad._set_fwd_grad_enabled(True)


def is_inside_jvp() -> bool:
    """Whether torch.func.jvp is running, also where its level has been taken off for the moment."""
    return bool(sys.modules["torch._functorch.eager_transforms"].JVP_NESTING > 0)


TRANSFORMS = DispatchKey.FuncTorchDynamicLayerFrontMode
"""The key on which calls go to the innermost transform."""


def batched_at(value: Any, dim: int, level: int) -> tuple[Any, bool]:
    """What is inside of a tensor that is batched at this level, its batch at this dimension, and whether it is one."""
    is_batch = isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)
    if not is_batch or torch._C._functorch.maybe_get_level(value) != level:
        return value, False
    inner = torch._C._functorch.get_unwrapped(value)
    return inner.movedim(torch._C._functorch.maybe_get_bdim(value), dim), True


def vmap_inputs(in_dims: Any, args: tuple[object, ...], func: Any) -> tuple[list[int | None], list[Any], Any]:
    """The dimension that is mapped of each input (None: none), the inputs as a flat list, and their structure."""
    _, flat_dims, flat, structure = torch._functorch.vmap._process_batched_inputs(in_dims, args, func)
    return flat_dims, flat, structure


def function_of_class_method(method: object) -> Callable[..., Any]:
    """A bound class method as a function that takes the class. In some releases `Function.apply` is written in C++."""
    if hasattr(method, "__func__"):
        return method.__func__
    found = (vars(kind).get(method.__name__) for kind in method.__self__.__mro__)
    descriptor = next(value for value in found if isinstance(value, ClassMethodDescriptorType))
    return lambda cls, *args, **kwargs: descriptor.__get__(None, cls)(*args, **kwargs)


def recording_of(op: object) -> Callable[..., Any] | None:
    """The function by which a higher-order operator says how torch's recorder is to record it."""
    return op.python_key_table.get(torch_recorder_class())


def tracing_functions_of(handler: object, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
    """Which of these functions the handler's module took from torch's tracing module: (its names, name)."""
    import torch.fx.experimental.proxy_tensor as tracing  # why: only to find the names that were taken from it

    while hasattr(handler, "__wrapped__") or hasattr(handler, "__func__"):
        handler = getattr(handler, "__func__", None) or handler.__wrapped__
    space = getattr(handler, "__globals__", {})
    # Another thread may have replaced it just now: what it stands for is behind `__wrapped__`.
    return [
        (space, name) for name in names
        if name in space and inspect.unwrap(space[name]) is inspect.unwrap(getattr(tracing, name))
    ]  # fmt: skip


def indexing_by_tensors() -> Any:
    """A context in which `table[i]`, for a tensor `i` of one element, is an operator and reads no value."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # why: slow to load

    return TransformGetItemToIndex()


def while_loop() -> Any:
    from torch._higher_order_ops.while_loop import while_loop_op  # why: seldom needed

    return while_loop_op


def while_loop_with_all_rounds() -> Any:
    """A loop that gives its state after every round."""
    from torch._higher_order_ops.while_loop import while_loop_stack_output_op  # why: seldom needed

    return while_loop_stack_output_op


def backward_of(function: Callable[..., object], operands: tuple[object, ...]) -> Callable[..., Any]:
    """The function from operands and gradients of the results to the gradients of the operands."""
    import torch._higher_order_ops.utils as utils  # why: loads parts of the compiler when it is called

    return utils.create_bw_fn(function, operands)


def as_graph(function: Callable[..., object], operands: Any, keys: tuple[Any, Any]) -> torch.fx.GraphModule:
    """The graph of a function with gradients in it, made under the dispatch keys of another moment."""
    import torch._higher_order_ops.utils as utils  # why: the same

    return utils.materialize_as_graph(function, operands, *keys, force_enable_grad=True)


def registered_higher_order_fake(op: Any) -> Callable[..., Any] | None:
    import torch._higher_order_ops.utils as utils  # why: slow to load, and seldom needed

    return utils.registered_hop_fake_fns.get(op)


def plain_flex_attention(*args: Any) -> Any:
    """The mathematics of flex attention, written out in operators."""
    from torch._higher_order_ops.flex_attention import _permute_strides, math_attention  # why: slow to load

    out, *rest = math_attention(*args)
    return _permute_strides(out, args[0].stride()), *rest
