"""The transforms of torch.func: levels, wrappers, batches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch import Tensor
from torch._C import DispatchKey

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


def number_of_node(node: Any) -> int:
    """Nodes of autograd are numbered in the order in which the forward makes them."""
    number: int = node._sequence_nr()
    return number


def shape_of_gradient(node: Any, result: int = 0) -> Any:
    return node._input_metadata[result].shape


def over_batches(function: Callable[..., Any], in_dims: tuple[int | None, ...], size: int, randomness: str) -> Any:
    """`torch.vmap` of a function of flat operands, which tells of each result where its batch is, None if it is none."""
    from torch._functorch.vmap import restore_vmap  # why: seldom needed

    return restore_vmap(function, in_dims, size, randomness)


def single_level_functions() -> Any:
    """A context in which such functions may be applied."""
    from torch._functorch.autograd_function import enable_single_level_autograd_function  # why: seldom needed

    return enable_single_level_autograd_function()


def innermost_transform(op: Any = None) -> tuple[Any, str, bool]:
    """The innermost transform of torch.func, its kind, and whether torch has a rule for the higher-order operator."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter  # why: seldom needed

    interpreter = retrieve_current_functorch_interpreter()
    return interpreter, interpreter.key().name, interpreter.key() in getattr(op, "functorch_table", ())


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


def vmap_inputs(in_dims: Any, args: tuple[Any, ...], func: Any) -> tuple[list[int | None], list[Any], Any]:
    """The dimension that is mapped of each input (None: none), the inputs as a flat list, and their structure."""
    _, flat_dims, flat, structure = torch._functorch.vmap._process_batched_inputs(in_dims, args, func)
    return flat_dims, flat, structure
