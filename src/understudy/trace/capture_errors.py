"""Errors inside a traced function say how far the trace had come."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from understudy.trace import show

SHOWN = 4
"""Recorded nodes that an error shows."""


def with_last_nodes(error: Exception, graph: Graph) -> None:
    """Add the last recorded nodes to an error, once."""
    notes = getattr(error, "__notes__", [])
    if any(note.startswith(HEAD) for note in notes):
        return
    nodes = [node for node in graph.nodes if node.op != "output"][-SHOWN:]
    if not nodes:
        return
    text = "\n".join(
        [f"{HEAD} {len(graph.nodes)} nodes, the last of them:", *(f"    {line_of(node)}" for node in nodes)]
    )
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.__notes__ = [*notes, text]  # type: ignore[attr-defined]


HEAD = "while make_fx was tracing: it had recorded"


def line_of(node: Node) -> str:
    """`mul = aten.mul.Tensor(x_1, 2)    f32[2, 3]@cpu`"""
    shown = ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])
    call = (
        f"{node.name} = {node.target}({shown})" if node.op == "call_function" else f"{node.name}  ({node.op})"
    )
    return f"{call}    {described(node.meta.get('val'))}".rstrip()


def described(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return show.described(val)
    if isinstance(val, (list, tuple)):
        return ", ".join(map(described, val))
    return "" if val is None else str(val)
