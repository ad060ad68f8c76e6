"""A graph run for real, node by node, beside what was propagated into it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from tests.oracle.compare import facts_of
from understudy import FakeTensor


class RealRun(torch.fx.Interpreter):
    """Notes the metadata of each node's value when it is made."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.facts: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.facts[n] = map_aggregate(value, _facts)
        return value


def _facts(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return str(facts_of(part))
    return part if isinstance(part, (int, float, bool)) else None


def _fake_facts(part: Any) -> Any:
    assert not isinstance(part, torch.Tensor) or type(part) is FakeTensor
    return _facts(part)


def differences(module: GraphModule, *args: Any) -> list[str]:
    """Nodes whose `val` is not what the real value was."""
    real = RealRun(module)
    real.run(*args)
    found = []
    for node, facts in real.facts.items():
        said = map_aggregate(node.meta.get("val"), _fake_facts)
        if _without_nothing(facts) != said:
            found.append(f"{node.format_node()}: real {facts}, fake {said}")
    return found


def _without_nothing(facts: Any) -> Any:
    leaves: list[Any] = []
    map_aggregate(facts, leaves.append)
    return None if all(leaf is None for leaf in leaves) else facts


def aliasing(module: GraphModule) -> list[list[str]]:
    """Which nodes' values stand on the same storage: groups of names, in the order of the graph."""
    groups: dict[int, list[str]] = {}
    for node in module.graph.nodes:
        leaves: list[Any] = []
        map_aggregate(node.meta.get("val"), leaves.append)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                names = groups.setdefault(leaf.untyped_storage()._cdata, [])
                if node.name not in names:
                    names.append(node.name)
    return sorted(names for names in groups.values())


def account(module: GraphModule) -> dict[str, Any]:
    """What is written in each node, as text."""
    return {node.name: map_aggregate(node.meta.get("val"), _fake_facts) for node in module.graph.nodes}
