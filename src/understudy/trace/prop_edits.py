"""What an edit of a graph reaches.

A node is run again because it was edited, because a value that it reads has other specs than before, or because its own
value stands on a storage that was replaced. Nothing else is looked at: the cost is that of the nodes that are run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from understudy.trace.prop_values import is_alike, storages_of

MISSING = object()


class Edits:
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
        self, values: dict[Node, Any], compute: Callable[[Node], Any], record: Callable[[Node, Any], None]
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
        self, node: Node, old: Any, new: Any, values: dict[Node, Any], record: Callable[[Node, Any], None]
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
