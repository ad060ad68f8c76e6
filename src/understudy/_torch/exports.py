"""Exported programs of torch: what `torch.export` keeps to itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "WholeComposites",
    "below_autograd",
    "bind_arguments",
    "broken_guards",
    "check_dynamic_shapes",
    "flatten_shapes",
    "flatten_with_paths",
    "key_text",
    "materialise_table",
    "rename_nodes",
    "training_verifier",
    "verifier",
    "wrap_autocast",
    "wrap_set_grad",
]  # fmt: skip


def bind_arguments(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names of `forward`, those given by keyword in their order."""
    signature = inspect.signature(model.forward)
    signature.bind(*args, **kwargs)
    return {**signature.bind_partial(*args).arguments, **kwargs}


def flatten_with_paths(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return pytree.tree_flatten_with_path(tree)[0]


def key_text(path: Sequence[Any]) -> str:
    """`['x'][0]`"""
    return pytree.keystr(tuple(path))


def check_dynamic_shapes(arguments: dict[str, Any], dynamic_shapes: Any) -> None:
    """Raises torch's own error for a request that does not fit the arguments."""
    from torch.export.dynamic_shapes import _check_dynamic_shapes  # why: private, and slow to import

    _check_dynamic_shapes(arguments, dynamic_shapes)


def flatten_shapes(arguments: dict[str, Any], dynamic_shapes: Any) -> list[Any]:
    """For each leaf of the arguments, what is asked for it."""
    from torch.export.dynamic_shapes import _tree_map_with_path  # why: private, and slow to import

    found: list[Any] = []

    def note(path: Any, leaf: Any, asked: Any) -> None:
        found.append(asked)

    tree: Any = arguments
    if isinstance(dynamic_shapes, (tuple, list)):
        tree = type(dynamic_shapes)(arguments.values())
    else:
        dynamic_shapes = {name: dynamic_shapes.get(name) for name in arguments}
    _tree_map_with_path(note, tree, dynamic_shapes, tree_name="inputs")
    return found


def training_verifier() -> Any:
    from torch._export.verifier import TrainingIRVerifier  # why: private, and slow to import

    return TrainingIRVerifier


def verifier() -> Any:
    from torch._export.verifier import Verifier  # why: private, and slow to import

    return Verifier


def broken_guards(guards: torch.nn.Module, leaves: Sequence[Any]) -> list[str]:
    """Which of the checks of a module that checks inputs fail: it ends at the first."""
    found: list[str] = []

    def note(condition: Any, message: str) -> None:
        if not condition:
            found.append(message)

    inner: Any = guards.forward
    while inner.__closure__:  # torch has wrapped it, so that its compiler looks inside
        inner = next(cell.cell_contents for cell in inner.__closure__ if inspect.isfunction(cell.cell_contents))
    code = type(inner)(inner.__code__, {**inner.__globals__, "torch": _Asserts(note)}, inner.__name__)
    code(*leaves)
    return found


class _Asserts:
    """Stands for torch in code that calls nothing but `torch._assert`."""

    def __init__(self, note: Callable[[Any, str], None]) -> None:
        self._assert = note


def wrap_set_grad() -> Any:
    from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled  # why: private

    return wrap_with_set_grad_enabled


def wrap_autocast() -> Any:
    from torch._higher_order_ops.wrap import wrap_with_autocast  # why: private

    return wrap_with_autocast


def materialise_table(table: Any) -> dict[Any, Callable[..., Any]]:
    """A table of decompositions as a dict; torch's own are filled when they are asked to."""
    made = table.materialize() if hasattr(table, "materialize") else table
    return dict(made)


def below_autograd() -> Any:
    """A context in which autograd does not hear of operators: composite ones arrive whole."""
    return torch._C._AutoDispatchBelowAutograd()


class WholeComposites:
    """The composite operators that a table of decompositions leaves whole: those that torch can, and that are not in it."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        self._table = table
        self._known: dict[Any, bool] = {}

    def __contains__(self, op: object) -> bool:
        found = self._known.get(op)
        if found is None:
            from torch._export.utils import _is_preservable_cia_op  # why: private, and slow to import

            is_operator = isinstance(op, torch._ops.OpOverload)
            found = self._known[op] = is_operator and op not in self._table and _is_preservable_cia_op(op)
        return found


def rename_nodes(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str]) -> None:
    """These nodes get exactly these names; others that have one of them get another."""
    space = graph._graph_namespace
    for table in (space._used_names, space._obj_to_name, space._base_count):
        table.clear()
    for node, name in names.items():
        chosen = space.create_name(name, node)
        node.name = chosen
        if node.op == "placeholder":
            node.target = chosen
    for node in graph.nodes:
        if node not in names:
            node.name = space.create_name(node.name, node)
