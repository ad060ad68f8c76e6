"""Reads of data that no operator tells of, while real tensors are traced.

`x.tolist()`, `x.numpy()` and their like read memory in C++. The graph would hold what they found fixed; so they are
refused as `x.item()` is, if what is read depends on what the graph is given, on its parameters or on chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.errors import Context, DataDependentOutputException
from understudy.infer.call import flat
from understudy.lines import user_line

if TYPE_CHECKING:
    from understudy.trace.tracer import PythonKeyTracer

HINT = (
    'trace it with tracing_mode="symbolic", where such a value is a symbol; or let it be fixed: '
    "make_fx(..., _error_on_data_dependent_ops=False)"
)


def refused(what: Any, tensors: Iterable[torch.Tensor], hint: str = HINT) -> DataDependentOutputException:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return DataDependentOutputException(
        f"{what} is data-dependent: a value of a tensor that is being traced was asked for, and the graph would hold it "
        "fixed",
        func=what,
        context=Context(str(what), shapes, user_line(), hint),
    )


# --- which functions read, and what ---------------------------------------------------------------------------------


def _first(args: Any, kwargs: Any) -> list[Any]:
    return list(args[:1])


def _places(args: Any, kwargs: Any) -> list[Any]:
    return [value for value in (*args[1:2], *kwargs.values()) if isinstance(value, torch.Tensor)]


def _within_lists(args: Any, kwargs: Any) -> list[Any]:
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    return list(flat(torch.Tensor, (given,), {}))


def _past_dispatch(args: Any, kwargs: Any) -> list[Any]:
    """C++ reads a number, for `torch.Tensor([x[0], x[1]])`; in a call of the program, an operator tells of it."""
    return list(args[:1]) if _torch.is_past_dispatch() else []


STACK = "torch.stack makes a tensor of tensors, and is recorded"
READS: dict[Any, tuple[str, Callable[[Any, Any], list[Any]], str]] = {
    torch.Tensor.tolist: ("Tensor.tolist", _first, HINT),
    torch.Tensor.numpy: ("Tensor.numpy", _first, HINT),
    torch.Tensor.__array__: ("Tensor.__array__", _first, HINT),
    torch.Tensor.__dlpack__: ("Tensor.__dlpack__", _first, HINT),
    torch.tensor_split: ("torch.tensor_split", _places, HINT),
    torch.Tensor.tensor_split: ("Tensor.tensor_split", _places, HINT),
    torch.tensor: ("torch.tensor of a list of tensors", _within_lists, STACK),
    torch.as_tensor: ("torch.as_tensor of a list of tensors", _within_lists, STACK),
    torch.asarray: ("torch.asarray of a list of tensors", _within_lists, STACK),
    torch.Tensor.new_tensor: ("Tensor.new_tensor of a list of tensors", _within_lists, STACK),
    torch.Tensor.new: ("Tensor.new of a list of tensors", _within_lists, STACK),
    torch.sparse_coo_tensor: ("torch.sparse_coo_tensor of a list of tensors", _within_lists, STACK),
    torch.sparse_csr_tensor: ("torch.sparse_csr_tensor of a list of tensors", _within_lists, STACK),
    torch.sparse_compressed_tensor: (
        "torch.sparse_compressed_tensor of a list of tensors",
        _within_lists,
        STACK,
    ),
    torch.Tensor.__float__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
    torch.Tensor.__int__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
    torch.Tensor.__index__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
    torch.Tensor.__bool__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
    torch.Tensor.__complex__: ("a tensor made of a list of tensors", _past_dispatch, STACK),
}
"""Function → its name, the tensors whose values it reads, what to do."""


def check(tracer: PythonKeyTracer, func: Any, args: Any, kwargs: Any) -> None:
    """Refuse a read of what is not determined."""
    recorder = _torch.active_recorder()
    if _torch.active_fake_mode() is not None or not getattr(recorder, "_error_on_data_dependent_ops", False):
        return
    name, reads, hint = READS[func]
    tensors = [value for value in reads(args, kwargs) if isinstance(value, torch.Tensor)]
    if any(varies(tracer, tensor) for tensor in tensors):
        raise refused(name, tensors, hint)


def varies(tracer: PythonKeyTracer, tensor: torch.Tensor) -> bool:
    """Whether a run of the graph may find another value: it depends on inputs, parameters or chance."""
    tensor = _torch.innermost(tensor)  # inside of a transform
    node = tracer.recorded(tensor) if tensor.numel() else None
    todo = [] if node is None or tensor in tracer.known_values else [node]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" or _is_parameter(node) or _is_drawn(node):
            return True
        todo += node.all_input_nodes
    return False


def _is_parameter(node: Node) -> bool:
    return node.op == "get_attr" and not str(node.target).startswith("_tensor_constant")


def _is_drawn(node: Node) -> bool:
    return (
        isinstance(node.target, _torch.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    )
