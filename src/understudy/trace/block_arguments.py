"""The arguments and results of a block: what two calls must have in common, and whether a run has changed them."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_not
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.shapes.node import SymNode
from understudy.trace.block_state import COMPARED, Unlike

if TYPE_CHECKING:
    from understudy.trace.block_likeness import Key, Seen
    from understudy.trace.tracer import PythonKeyTracer

OWN_ATTRIBUTES = frozenset({"_is_param", "_is_buffer", "persistent", *FakeTensor.__annotations__})
"""What a stand-in holds; anything else was put there by the program, and may be read by it."""


SIMPLE = frozenset({FakeTensor, *COMPARED})
"""Arguments that have no parts."""


def taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """What a block was called with: the leaves, and what tells their structure."""
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    if SIMPLE.issuperset(map(type, leaves)):
        return leaves, (len(args), *kwargs)
    leaves, structure = _torch.tree_flatten((args, kwargs))
    return leaves, str(structure)


def key_of(tracer: PythonKeyTracer, mode: FakeTensorMode, leaves: list[Any], structure: Any) -> Key:
    """Equal for calls that a block can't tell apart but by what its tensors hold."""
    is_grad = torch.is_grad_enabled()
    parts: list[Any] = [structure, is_grad, *_torch.settings()]
    first: dict[Any, int] = {}
    for leaf in leaves:
        kind = type(leaf)
        if kind is FakeTensor:
            node, needs_grad = tracer.recorded(leaf), leaf.requires_grad
            if node is None or leaf.fake_mode is not mode or (needs_grad and is_grad) or is_marked(leaf):
                raise Unlike
            if leaf._known is not None:  # the block may look at its values
                parts += [id(leaf), leaf._version]
            # Which of them are the same, and which share memory.
            parts += [
                leaf._spec, needs_grad, first.setdefault(-_torch.storage_id(leaf), len(first)),
                first.setdefault(id(leaf), len(first)), first.setdefault(node, len(first)),
            ]  # fmt: skip
        elif kind in COMPARED:
            parts += [kind, leaf or repr(leaf)]  # zeros have signs, which equality does not see
        elif isinstance(leaf, torch.SymInt) and type(leaf.node) is SymNode:
            parts.append(leaf.node)
        else:
            raise Unlike
    return tuple(parts)


def is_marked(tensor: FakeTensor) -> bool:
    """Whether the program has set attributes of its own on a stand-in."""
    return not vars(tensor).keys() <= OWN_ATTRIBUTES


def check_unchanged(arguments: Any, leaves: list[Any], structure: Any) -> None:
    """After a run: the lists and dicts that a block was given hold what they held before."""
    now, form = taken_apart(*arguments)
    if form != structure or len(now) != len(leaves) or any(map(is_not, now, leaves)):
        raise Unlike
    if any(is_marked(leaf) for leaf in leaves if type(leaf) is FakeTensor):
        raise Unlike


def check_results(result: Any, leaves: list[Any], arguments: Any, seen: Seen) -> None:
    """That the results can be made anew: containers that nobody else has, and tensors that are not the module's."""
    others = {*map(id, _containers(arguments)), *map(id, seen.held), *seen.containers}
    if not others.isdisjoint(map(id, _containers(result))):
        raise Unlike
    own = set(map(id, seen.tensors))
    for leaf in leaves:
        if id(leaf) in own or (type(leaf) is FakeTensor and is_marked(leaf)):
            raise Unlike


def _containers(value: Any) -> Iterator[Any]:
    """The lists and dicts in a structure. One with parts of other kinds may hold what a structure does not show."""
    if isinstance(value, (list, dict)):
        yield value
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)
    elif type(value) not in COMPARED and not isinstance(value, (torch.Tensor, torch.SymInt)):
        raise Unlike
