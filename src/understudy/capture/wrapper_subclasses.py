"""Tensors of wrapper classes that a program makes and returns.

What is computed inside of them is recorded; the wrapper is made anew around it when the graph runs. A class that can be
taken apart and put together says how (`__tensor_flatten__`, `__tensor_unflatten__`); of any other, the attributes are
carried over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import set_val

if TYPE_CHECKING:
    from understudy.capture.tracer import PythonKeyTracer

@dataclass(frozen=True, eq=False)
class WrapperParts:
    """All of a wrapper but the tensors inside of it and its sizes."""

    kind: Any
    names: tuple[str, ...]
    context: Any
    """What `__tensor_flatten__` gave; of a class without it, the other attributes."""
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    def __repr__(self) -> str:
        return f"Recipe({self.kind.__name__}: {', '.join(self.names)})"


def wrapped_again(
    recipe: WrapperParts, parts: list[torch.Tensor], size: list[Any], stride: list[Any]
) -> torch.Tensor:
    """The wrapper around these tensors."""
    inner = dict(zip(recipe.names, parts, strict=True))
    if hasattr(recipe.kind, "__tensor_unflatten__"):
        put_together: torch.Tensor = recipe.kind.__tensor_unflatten__(
            inner, recipe.context, tuple(size), tuple(stride)
        )
        return put_together
    wrapper: torch.Tensor = _torch.make_wrapper(
        recipe.kind, size, stride, dtype=recipe.dtype, device=recipe.device, layout=recipe.layout
    )
    for name, value in {**recipe.context, **inner}.items():
        setattr(wrapper, name, value)
    return wrapper


def output(tracer: PythonKeyTracer, value: object) -> Any:
    """What stands for a value among the outputs of a graph."""
    if type(value) is FakeTensor or not isinstance(value, torch.Tensor) or not _is_wrapper(tracer, value):
        return tracer.argument(value)
    return _node_of(tracer, value)


def _is_wrapper(tracer: PythonKeyTracer, tensor: torch.Tensor) -> bool:
    """Whether it is a wrapper of which the graph only knows what is inside."""
    kind = type(tensor)
    is_own = _torch.uses_python_dispatch(kind) and not _torch.is_functional_wrapper(kind)
    return is_own and tracer.find_node(tensor) is None and bool(_computed_inside(tracer, tensor))


def _computed_inside(tracer: PythonKeyTracer, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [part for part in _parts(tensor)[0].values() if _is_computed(tracer, part)]


def _is_computed(tracer: PythonKeyTracer, part: torch.Tensor) -> bool:
    return tracer.find_node(part) is not None or (type(part) is not FakeTensor and _is_wrapper(tracer, part))


def _parts(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors inside by name, and the rest."""
    if _torch.is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}, context
    slots = [name for kind in type(tensor).__mro__ for name in getattr(kind, "__slots__", ())]
    state = {name: getattr(tensor, name) for name in slots if hasattr(tensor, name)} | vars(tensor)
    inner = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return inner, {name: value for name, value in state.items() if name not in inner}


def _node_of(tracer: PythonKeyTracer, tensor: torch.Tensor) -> Node:
    inner, context = _parts(tensor)
    recipe = WrapperParts(type(tensor), tuple(inner), context, tensor.dtype, tensor.device, tensor.layout)
    parts = [output(tracer, part) for part in inner.values()]
    numbers = [[_number(tracer, number) for number in given] for given in (tensor.shape, tensor.stride())]
    made_of = tracer.constants.node_of_object(recipe, "_wrapper")
    node = tracer.append_call(wrapped_again, (made_of, parts, *numbers), {})
    if any(isinstance(size, torch.SymInt) for size in tensor.shape):
        node.meta["val"] = tensor  # no stand-in of another kind has its sizes
    else:
        set_val(node, tensor)
    tracer.remember(tensor, node)
    return node


def _number(tracer: PythonKeyTracer, number: object) -> Any:
    """A size or stride; None where it is that of a jagged dimension, which is a matter of the tensors inside."""
    is_jagged = isinstance(number, torch.SymInt) and number.node.is_nested_int()
    return None if is_jagged else tracer.argument(number)
