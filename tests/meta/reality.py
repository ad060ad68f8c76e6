"""A traced module beside the program that it was traced from: numbers, and each node's metadata."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
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
    return str(facts_of(part)) if isinstance(part, torch.Tensor) else None


def _has_tensors(facts: Any) -> bool:
    leaves: list[Any] = []
    map_aggregate(facts, leaves.append)
    return any(leaf is not None for leaf in leaves)


def wrong_nodes(module: GraphModule, inputs: dict[str, Any]) -> list[str]:
    """Nodes whose metadata is not that of the real value, or that have none for a tensor."""
    names = [node for node in module.graph.nodes if node.op == "placeholder"]
    given = [inputs.get(node.target, *node.args) for node in names]
    run = RealRun(module)
    run.run(*given)
    found = []
    for node, facts in run.facts.items():
        if not _has_tensors(facts) or node.op == "output":
            continue
        if (
            getattr(node.target, "__module__", "").startswith(("transformers", "understudy"))
            and "val" not in node.meta
        ):
            continue  # a structure that is made of nodes before it
        val = node.meta.get("val")
        assert not isinstance(val, torch.Tensor) or type(val) is FakeTensor
        said = map_aggregate(val, _facts)
        if said != facts:
            found.append(f"{node.format_node()}: real {facts}, derived {said}")
    return found


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The tensors in an output, by where they are: in dicts, lists, outputs and caches of models."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, dict):
        parts = {f"{path}.{key}": part for key, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {f"{path}[{position}]": part for position, part in enumerate(value)}
    else:
        parts = (
            {f"{path}.{key}": part for key, part in vars(value).items()} if hasattr(value, "__dict__") else {}
        )
    found: dict[str, Any] = {}
    for inner, part in parts.items():
        found.update(leaves(part, inner))
    return found


def assert_same(real: Any, traced: Any) -> None:
    """The same classes, the same tensors, bit by bit."""
    assert type(real) is type(traced)
    expected, given = leaves(real), leaves(traced)
    assert list(expected) == list(given)
    for path, value in expected.items():
        assert torch.equal(value, given[path]) or value.isnan().any(), path
        assert value.stride() == given[path].stride(), path


def run_both(model: nn.Module, traced: GraphModule, inputs: dict[str, Any], fixed: dict[str, Any]) -> None:
    with torch.no_grad():
        torch.manual_seed(1)
        real = model(**inputs, **fixed)
        torch.manual_seed(1)
        assert_same(real, traced(**inputs))
