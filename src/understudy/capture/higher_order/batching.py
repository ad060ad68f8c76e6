"""Batching rules of higher-order operators, for `torch.func.vmap`.

The same operator, on functions over batches. Where the condition differs between the entries of a batch: both branches
of `cond` and `torch.where`; a loop runs as long as any entry does, and keeps the others unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from understudy import _torch
from understudy.capture.higher_order.closures import DerivedFunction
from understudy.errors import Context, UnsupportedOperatorException
from understudy.lines import user_line
from understudy.ops import hops

Function = Callable[..., Any]
Dims = list[int | None]
"""The batch dimension of each value; None: not a batch."""


class UnexpectedBatch(Exception):
    """A result is a batch at this level, but was expected not to be one."""

    def __init__(self, batch: VmapLevel, dims: Dims | None) -> None:
        super().__init__("expected results without a batch dimension, got a batch")
        self.batch = batch
        self.dims = dims


class VmapLevel:
    """One level of vmap: unwraps values and wraps results."""

    def __init__(self, interpreter: Any) -> None:
        self.level = interpreter.level()
        self.lower = interpreter.lower
        self._size = interpreter.batch_size()
        self._randomness = interpreter.randomness()

    def inside(self, values: Sequence[object], dim: int = 0) -> tuple[list[Any], Dims]:
        """The unwrapped values, and their batch dimensions."""
        found = [_torch.batched_at(value, dim, self.level) for value in values]
        return [value for value, _ in found], [0 if is_batched else None for _, is_batched in found]

    def expand_to(self, values: Sequence[Any], dims: Dims, wanted: Dims) -> list[Any]:
        """The values, expanded to batches where `wanted`."""
        return [
            value.expand(self._size, *value.shape).clone() if dim is None and want == 0 else value
            for value, dim, want in zip(values, dims, wanted, strict=True)
        ]

    def over(self, function: Function, in_dims: Dims, foreseen: Dims) -> Function:
        """A function over batches; `foreseen`: which of its results are expected to be batches."""

        def run(*values: object) -> tuple[Any, ...]:
            results, dims = self.run(function, in_dims, values)
            wanted = [*foreseen, *[None] * (len(dims) - len(foreseen))]
            needed: Dims = [0 if 0 in pair else None for pair in zip(dims, wanted, strict=True)]
            if needed != wanted:
                raise UnexpectedBatch(self, needed)
            return tuple(self.expand_to(results, dims, needed))

        return run

    def run(self, function: Function, in_dims: Dims, values: Sequence[object]) -> tuple[list[Any], Dims]:
        """The results, with batches at dimension 0, and their batch dimensions."""
        results, dims = _torch.over_batches(function, tuple(in_dims), self._size, self._randomness)(*values)
        moved = [value.movedim(dim, 0) if dim else value for value, dim in zip(results, dims, strict=True)]
        return moved, [None if dim is None else 0 for dim in dims]

    def call_until_settled(self, call: Callable[[Any], Any], foreseen: Dims) -> tuple[Any, Any]:
        """Repeat a call, with more results expected to be batches, until the expectation holds. Returns the results and
        dims."""
        try:
            with self.lower():
                return call(foreseen), foreseen
        except UnexpectedBatch as found:
            if found.batch is not self:
                raise
            needed: Any = found.dims
        return self.call_until_settled(call, needed)

    def outside(self, results: Sequence[Any], dims: Dims) -> tuple[Any, ...]:
        return tuple([
            result if dim is None else _torch.with_batch_dimension(result, dim, self.level)
            for result, dim in zip_longest(results, dims)
        ])  # fmt: skip


def at_dimension(place: int, dims: Dims) -> Dims:
    return [None if dim is None else place for dim in dims]


@hops.batched("cond")
def cond(
    interpreter: object, op: Any, pred: object, yes: Function, no: Function, operands: tuple[object, ...]
) -> object:
    batch = VmapLevel(interpreter)
    (pred,), (of_choices,) = batch.inside([pred])
    inner, in_dims = batch.inside(operands)

    def chosen(pred: torch.Tensor, *values: object) -> tuple[Any, ...]:
        return tuple([torch.where(pred, a, b) for a, b in zip(yes(*values), no(*values), strict=True)])

    def one_for_all(dims: Dims) -> object:
        branches = [DerivedFunction("batched", batch.over(branch, in_dims, dims)) for branch in (yes, no)]
        return op(pred, *branches, tuple(inner))

    if of_choices is None:
        return batch.outside(*batch.call_until_settled(one_for_all, []))
    with batch.lower():
        results, dims = batch.run(chosen, [0, *in_dims], [pred, *inner])
    return batch.outside(results, dims)


@hops.batched("map_impl")
def map_impl(
    interpreter: object, op: Any, function: Function, xs: list[object], others: list[object]
) -> object:
    batch = VmapLevel(interpreter)
    rows, row_dims = batch.inside(xs, 1)
    rest, rest_dims = batch.inside(others)

    def mapped_over(dims: Dims) -> object:
        return op(DerivedFunction("batched", batch.over(function, [*row_dims, *rest_dims], dims)), rows, rest)

    results, dims = batch.call_until_settled(mapped_over, [])
    return batch.outside(results, at_dimension(1, dims))


@hops.batched("scan")
def scan(
    interpreter: object,
    op: Any,
    function: Function,
    init: list[object],
    xs: list[object],
    others: tuple[object, ...],
) -> object:
    batch = VmapLevel(interpreter)
    first, first_dims = batch.inside(init)
    rows, row_dims = batch.inside(xs, 1)
    rest, rest_dims = batch.inside(others)
    count = len(first)

    def scan_with(dims: Dims) -> object:
        step = batch.over(function, [*dims[:count], *row_dims, *rest_dims], dims)
        carry = batch.expand_to(first, first_dims, dims[:count])
        return op(DerivedFunction("batched", step), carry, rows, tuple(rest))

    results, dims = batch.call_until_settled(scan_with, first_dims)
    return batch.outside(results, [*dims[:count], *at_dimension(1, dims[count:])])


@hops.batched("associative_scan")
def associative_scan(
    interpreter: object, op: Any, function: Function, xs: tuple[object, ...], others: tuple[object, ...]
) -> object:
    batch = VmapLevel(interpreter)
    inner, dims = batch.inside(xs)
    rest, rest_dims = batch.inside(others)
    all_of_them: Dims = [0] * len(inner)
    with batch.lower():
        rows = [value.movedim(0, 1) for value in batch.expand_to(inner, dims, all_of_them)]
        combine = batch.over(function, [*all_of_them, *all_of_them, *rest_dims], all_of_them)
        results = op(DerivedFunction("batched", combine), rows, tuple(rest))
    return batch.outside(results, at_dimension(1, all_of_them))


@hops.batched("while_loop", "while_loop_stack_output")
def while_loop(
    interpreter: object,
    op: Any,
    goes_on: Function,
    body: Function,
    state: tuple[object, ...],
    others: tuple[object, ...],
    **options: object,
) -> Any:
    batch = VmapLevel(interpreter)
    first, first_dims = batch.inside(state)
    rest, rest_dims = batch.inside(others)

    def loop_with(dims: Dims | None) -> object:
        if dims is None:
            dims = _all_of_them(op, first)
            still, next_round = _each_for_itself(batch, goes_on, body, len(first), [*dims, *rest_dims])
        else:
            still = _one_for_all(batch, goes_on, [*dims, *rest_dims])
            next_round = batch.over(body, [*dims, *rest_dims], dims)
        carry = batch.expand_to(first, first_dims, dims)
        return op(
            DerivedFunction("condition", still),
            DerivedFunction("batched", next_round),
            tuple(carry),
            tuple(rest),
        )

    results, dims = batch.call_until_settled(loop_with, first_dims)
    place = 1 if op.name() == "while_loop_stack_output" else 0
    return batch.outside(results, at_dimension(place, _all_of_them(op, first) if dims is None else dims))


def _one_for_all(batch: VmapLevel, goes_on: Function, in_dims: Dims) -> Function:
    """The condition of a loop if it is the same for the whole batch; raises `UnexpectedBatch` otherwise."""

    def still(*values: object) -> Any:
        (decision,), (dim,) = batch.run(_as_tuple(goes_on), in_dims, values)
        if dim is not None:
            raise UnexpectedBatch(batch, None)
        return decision

    return still


def _all_of_them(op: object, state: Sequence[int | object]) -> Dims:
    if all(isinstance(value, torch.Tensor) for value in state):
        return [0] * len(state)
    raise UnsupportedOperatorException(
        f"torch.func.vmap of {op} with a condition that depends on the batch: expected loop state of tensors only, got a "
        "number",
        func=op,
        context=Context(line=user_line(), hint="make it a tensor: torch.tensor(0)"),
    )


def _each_for_itself(
    batch: VmapLevel, goes_on: Function, body: Function, count: int, in_dims: Dims
) -> tuple[Function, Function]:
    """Condition and body of a loop in which each entry of the batch stops separately."""
    all_of_them: Dims = [0] * count
    each_goes_on = batch.over(_as_tuple(goes_on), in_dims, [0])
    round_of_each = batch.over(body, in_dims, all_of_them)

    def is_any_active(*values: object) -> Any:
        return each_goes_on(*values)[0].any()

    def one_round(*values: Any) -> tuple[Any, ...]:
        (mask,) = each_goes_on(*values)
        after = zip(round_of_each(*values), values[:count], strict=True)
        return tuple([torch.where(_like(mask, new), new, old) for new, old in after])

    return is_any_active, one_round


def _as_tuple(function: Function) -> Function:
    return lambda *values: (function(*values),)


def _like(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The mask with dimensions of size 1 added, to be broadcast with `value`."""
    return mask.reshape(-1, *[1] * (value.ndim - 1))
