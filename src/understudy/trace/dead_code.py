"""Nodes that nothing uses and that do nothing besides."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from understudy import _torch
from understudy.trace.effects import is_pure, may_write
from understudy.trace.untold import forget_needless_states


def remove_dead_code(graph: Graph) -> None:
    forget_needless_states(graph)
    pure: dict[Any, bool] = {}
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if _is_pure(node, pure):
            graph.erase_node(node)


def _is_pure(node: Node, known: dict[Any, bool]) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or "unbacked_bindings" in node.meta:
        return False
    target = node.target
    if isinstance(target, _torch.OpOverload) and (
        may_write(target) or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return _target_is_pure(node)
    found = known.get(target)
    if found is None:
        found = known[target] = _target_is_pure(node)
    return found


def _target_is_pure(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, _torch.OpOverload):
        return is_pure(target, node.args, node.kwargs) and not node.is_impure(impure_random=False)
    if target is torch.get_rng_state:
        return True
    is_number = type(node.meta.get("val")) in (torch.SymInt, torch.SymFloat, torch.SymBool)
    return target is operator.getitem or is_number
