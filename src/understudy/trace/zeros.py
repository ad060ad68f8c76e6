"""Forward-mode gradients of what does not vary: C++ has tensors without memory for them, which nobody may write to.

Before it writes to a gradient in place, it looks whether it is such a one, and takes a copy. Stand-ins with symbolic sizes
are ordinary zeros there, and no copy is in the graph: then the graph has ordinary zeros, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from understudy import _torch
from understudy.infer.call import flat
from understudy.trace.effects import may_write, written_values

aten = torch.ops.aten
EFFICIENT = aten._efficientzerotensor.default


def make_writable(graph: Graph) -> None:
    """Zeros that a node writes to, or to something computed from them, have memory."""
    zeros = graph.find_nodes(op="call_function", target=EFFICIENT)
    if zeros:
        written = _sources(_written(graph))
        for node in zeros:
            if node in written:
                node.target = aten.zeros.default


def _written(graph: Graph) -> Iterable[Node]:
    for node in graph.nodes:
        if isinstance(node.target, _torch.OpOverload) and may_write(node.target):
            yield from flat(Node, (written_values(node.target, node.args, node.kwargs),), {})


def _sources(nodes: Iterable[Node]) -> set[Node]:
    """All that these are computed from. A copy has memory of its own."""
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if node.target is not aten.clone.default:
                todo += node.all_input_nodes
    return seen
