"""What an edit of a graph reaches.

A node is run again because it was edited, because a value that it reads has other specs than before, or because its own
value stands on a storage that was replaced. Nothing else is looked at: the cost is that of the nodes that are run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_view
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import is_alike, storages_of
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.floats import FloatExpr
from understudy.shapes.bindings import rebind_unbacked
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec
from understudy.spec.call import map_structure

MISSING = object()


class EditedNodes:
    """The nodes that are to be run again, in the order of the graph."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._heap: list[Node] = []
        self._queued: set[Node] = set()
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> None:
        if node not in self._queued and not node._erased:
            self._queued.add(node)
            heapq.heappush(self._heap, node)

    def spread(
        self, values: dict[Node, object], compute: Callable[[Node], Any], record: Callable[[Node, Any], None]
    ) -> list[Node]:
        """Run them, and what they reach. Gives the nodes that were run."""
        done: list[Node] = []
        while self._heap:
            node = heapq.heappop(self._heap)
            self._queued.discard(node)
            unknown = [other for other in node.all_input_nodes if other not in values]
            if unknown:
                for other in (*unknown, node):
                    self.add(other)
                continue
            old, new = values.get(node, MISSING), compute(node)
            done.append(node)
            self._compare(node, old, new, values, record)
        return done

    def _compare(
        self, node: Node, old: object, new: object, values: dict[Node, object], record: Callable[[Node, Any], None]
    ) -> None:
        before = set(storages_of(old))
        if not is_alike(old, new):
            record(node, new)
            for user in node.users:
                self.add(user)
        elif storages_of(old) != storages_of(new):
            record(node, new)
            for user in node.users:  # those that give views of it, or it itself
                if user in values and not before.isdisjoint(storages_of(values[user])):
                    self.add(user)


# --- Values under the names that their symbols had in an earlier run ----------------------------------------

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def rename_symbols(mode: FakeTensorMode, value: Any) -> Any:
    """The same tensors and numbers, with each symbol that was renamed under its new name."""
    env = mode.shape_env

    def rename_value(value: object) -> Any:
        if isinstance(value, FloatExpr):
            return env.numbers.make_float(value.operation, *map(rename_value, value.arguments))
        return env.torch_api.merge_symbols(value) if isinstance(value, Condition) else env.simplify(value)

    def rename(size: object) -> Any:
        return env.node(rename_value(size.value), size.kind) if type(size) is SymNode else size

    def of_spec(spec: TensorSpec) -> TensorSpec:
        shape, stride = tuple(map(rename, spec.shape)), tuple(map(rename, spec.stride))
        return spec.as_view(shape, stride, rename(spec.offset))

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            node = leaf.node
            return rename(node).symbolic if type(node) is SymNode else leaf
        if type(leaf) is not FakeTensor or not leaf._spec.is_symbolic or leaf._spec.sparse is not None:
            return leaf
        spec = of_spec(leaf._spec)
        return leaf if spec is leaf._spec else make_view(mode, leaf, spec)

    return map_structure(of_leaf, (torch.Tensor, *SYMBOLIC), value)


# --- A graph run again on stand-ins, whose data-dependent sizes are those of the first run ------------------


class PropagateUnbackedSymInts(torch.fx.Interpreter):
    """Runs a graph inside a fake mode; what its nodes have in `meta["unbacked_bindings"]` tells new symbols from old."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        mode = _torch.active_fake_mode()
        if mode is None:
            raise AssertionError("there is no fake mode: run the graph inside one, with mode: …")
        rebind_unbacked(mode.shape_env, n, result)
        return result
