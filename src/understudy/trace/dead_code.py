"""Nodes that nothing uses and that do nothing besides."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from understudy import _torch

EFFECTS_BY_TAG = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)
"""A random number that is not drawn changes those after it; a value that is not read may not be checked."""


def remove_dead_code(graph: Graph) -> None:
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
    found = known.get(target)
    if found is None:
        found = known[target] = _target_is_pure(node)
    return found


def _target_is_pure(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, _torch.OpOverload):
        return (
            not _torch.is_mutable(target)
            and not any(tag in target.tags for tag in EFFECTS_BY_TAG)
            and _torch.is_builtin_namespace(target)
            and not _torch.has_effect(node)
        )
    is_number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
    return target is operator.getitem or is_number
