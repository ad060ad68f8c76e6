"""Tensors of wrapper classes that a program makes and returns.

Operators on their inner tensors are recorded; the graph rebuilds the wrapper when it runs. Traceable classes define how
(`__tensor_flatten__`, `__tensor_unflatten__`); for other classes, the attributes are copied.
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
    """A wrapper without its inner tensors and sizes."""

    kind: Any
    names: tuple[str, ...]
    context: Any
    """The context of `__tensor_flatten__`; for a class without it, the other attributes."""
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    def __repr__(self) -> str:
        return f"Recipe({self.kind.__name__}: {', '.join(self.names)})"


def rebuild_wrapper(
    recipe: WrapperParts, parts: list[torch.Tensor], size: list[Any], stride: list[Any]
) -> torch.Tensor:
    """Make the wrapper around these tensors."""
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
    """A value as an output of a graph."""
    if type(value) is FakeTensor or not isinstance(value, torch.Tensor) or not _is_wrapper(tracer, value):
        return tracer.argument(value)
    return _node_of(tracer, value)


def _is_wrapper(tracer: PythonKeyTracer, tensor: torch.Tensor) -> bool:
    """Whether it is a wrapper of which only the inner tensors have nodes."""
    kind = type(tensor)
    is_own = _torch.uses_python_dispatch(kind) and not _torch.is_functional_wrapper(kind)
    return is_own and tracer.find_node(tensor) is None and bool(_has_computed_parts(tracer, tensor))


def _has_computed_parts(tracer: PythonKeyTracer, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [part for part in _parts(tensor)[0].values() if _is_computed(tracer, part)]


def _is_computed(tracer: PythonKeyTracer, part: torch.Tensor) -> bool:
    return tracer.find_node(part) is not None or (type(part) is not FakeTensor and _is_wrapper(tracer, part))


def _parts(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """The inner tensors by name, and the rest."""
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
    node = tracer.append_call(rebuild_wrapper, (made_of, parts, *numbers), {})
    if any(isinstance(size, torch.SymInt) for size in tensor.shape):
        node.meta["val"] = tensor  # a stand-in could not represent its sizes
    else:
        set_val(node, tensor)
    tracer.remember(tensor, node)
    return node


def _number(tracer: PythonKeyTracer, number: object) -> Any:
    """A size or stride as an argument; None for a nested int, which follows from the inner tensors."""
    is_jagged = isinstance(number, torch.SymInt) and number.node.is_nested_int()
    return None if is_jagged else tracer.argument(number)
