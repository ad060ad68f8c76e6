"""Higher-order operators as plain code.

`torch.cond`, `scan` and their like call functions that they are given. Where nothing records the program, a run with
stand-ins calls these functions as eager would: autograd and the transforms of torch.func see what happens inside.
Where eager would ask a value that nobody knows, both ways (`cond`) or one round (`while_loop`) show what comes out:
torch demands that it has the same metadata whatever the value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.errors import (
    Context,
    DataDependentOutputException,
    GuardOnDataDependentSymNode,
    OperatorError,
)
from understudy.fake import branches
from understudy.fake.from_values import is_known
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_line

RUNS: dict[str, Callable[..., Any]] = {}
"""By the operator's name."""

MOST_ROUNDS = 1 << 14
"""Rounds of a loop with known values, after which the rest is taken to be alike."""


def runs(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RUNS[name] = function
        return function

    return register


def _decided(predicate: Any) -> bool | None:
    """The truth of a predicate, None if nobody knows it."""
    if type(predicate) is FakeTensor and predicate.item_memo is None and not is_known(predicate):
        return None  # to ask would make a symbol that nobody reads
    try:
        return bool(predicate)
    except (DataDependentOutputException, GuardOnDataDependentSymNode):
        return None


@runs("cond")
def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    decided = _decided(pred)
    if decided is not None:
        return true_fn(*operands) if decided else false_fn(*operands)
    result, other = true_fn(*operands), false_fn(*operands)
    mode = _torch.active_fake_mode()
    if mode is None or mode.shape_env is None:
        _check_alike("torch.cond: the two branches", result, other)
        return result
    (one, structure), (two, _) = _torch.tree_flatten(result), _torch.tree_flatten(other)
    # Sizes in which they differ are symbols; where they do not, what autograd knows of the first branch is worth more.
    merged = branches.merged(mode, one, two, set(mode.shape_env.births))
    alike = [_has_spec_of(a, b) for a, b in zip(one, merged, strict=True)]
    return result if all(alike) else _torch.tree_unflatten(list(merged), structure)


@runs("while_loop")
def while_loop(cond_fn: Any, body_fn: Any, carried: Any, additional: Any = (), **ignored: Any) -> Any:
    carried = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in carried)
    for _ in range(MOST_ROUNDS):
        decided = _decided(cond_fn(*carried, *additional))
        if decided is False:
            break
        result = tuple(body_fn(*carried, *additional))
        _check_alike("while_loop: what goes into the body and what comes out", carried, result)
        carried = result
        if decided is None:
            break
    return carried


@runs("scan")
def scan(combine_fn: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    carry, steps = list(init), []
    spec: Any = None
    for step in range(xs[0].shape[0]):
        result = combine_fn(*carry, *[x[step] for x in xs], *additional_inputs)
        # Functions of users return (carry, output) in any structure; graphs return one flat list.
        nested = (
            isinstance(result, tuple) and len(result) == 2 and not isinstance(combine_fn, torch.nn.Module)
        )
        leaves, spec = _torch.tree_flatten(result)
        before, carry = carry, leaves[: len(init)]
        _check_alike("scan: the carry before and after a step", before, carry)
        steps.append(leaves[len(init) :])
    outputs = [_stacked(parts) for parts in zip(*steps, strict=True)]
    return _torch.tree_unflatten([*carry, *outputs], spec) if nested else (*carry, *outputs)


@runs("map_impl")
def map_impl(f: Any, xs: Any, pos_args: Any) -> Any:
    flat = [_torch.tree_flatten(f(*[x[step] for x in xs], *pos_args)) for step in range(xs[0].shape[0])]
    outputs = [_stacked(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return _torch.tree_unflatten(outputs, flat[0][1])


@runs("invoke_subgraph")
def invoke_subgraph(subgraph: Any, identifier: Any, *operands: Any) -> Any:
    return subgraph(*operands)


@runs("flex_attention")
def flex_attention(*args: Any) -> Any:
    return _torch.plain_flex_attention(*args)


def _has_spec_of(leaf: Any, merged: Any) -> bool:
    """Whether a value of one branch is what comes out of both."""
    if type(leaf) is not FakeTensor or type(merged) is not FakeTensor:
        return leaf is merged
    pairs = zip((*leaf._spec.shape, *leaf._spec.stride), (*merged._spec.shape, *merged._spec.stride), strict=True)
    return all(a is b or (type(a) is int and type(b) is int and a == b) for a, b in pairs)


def _stacked(parts: Sequence[Any]) -> Any:
    return torch.stack(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


def _check_alike(what: str, first: Any, second: Any) -> None:
    one, two = _torch.tree_flatten(first)[0], _torch.tree_flatten(second)[0]
    # Lists and tuples are as good as each other.
    alike = len(one) == len(two) and all(_facts(a) == _facts(b) for a, b in zip(one, two, strict=True))
    if not alike:
        shown = ", ".join(_described(leaf) for leaf in one), ", ".join(_described(leaf) for leaf in two)
        raise OperatorError(
            f"{what} must have the same metadata: [{shown[0]}] and [{shown[1]}]",
            context=Context(line=user_line()),
        )


def _facts(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return type(leaf)


def _described(leaf: Any) -> str:
    return str(leaf._spec) if type(leaf) is FakeTensor else str(_facts(leaf))
