"""Derivatives of higher-order operators, as calls of the same operators on derivatives of their functions.

    cond    the branches backward
    map     row by row
    scan    the carries again, then backward from the last step
    loops   the state before each iteration, then backward from the last one

Every rule consists of calls that have rules themselves, so higher derivatives work as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.capture.higher_order.closures import DerivedFunction
from understudy.capture.higher_order.torch_tracing import current_capture
from understudy.errors import Context, UnsupportedOperatorException
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_line
from understudy.ops import hops

Function = Callable[..., Any]
Values = Sequence[Any]


def differentiable(values: Values) -> list[int]:
    """The positions of the values that can have a derivative."""
    return [
        place for place, value in enumerate(values)
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    ]  # fmt: skip


def at(places: Sequence[int], values: Values) -> list[Any]:
    return [values[place] for place in places]


def replace_at(values: Values, places: Sequence[int], others: Values) -> list[object]:
    """The values, with others at these positions."""
    found = list(values)
    for place, other in zip(places, others, strict=True):
        found[place] = other
    return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: the result of a function must not alias its operands, nor differ in strides between branches."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _copy_results(results: Values, given: Values) -> tuple[object, ...]:
    """The same for all results of a function; those that are new and contiguous are not copied."""
    taken = {_torch.storage_id(value) for value in given if type(value) is FakeTensor}

    def is_new(tensor: torch.Tensor) -> bool:
        if type(tensor) is not FakeTensor or not tensor._spec._is_plainly_contiguous:
            return False
        storage = _torch.storage_id(tensor)
        was_taken = storage in taken
        taken.add(storage)
        return not was_taken

    return tuple([tensor if is_new(tensor) else _copy(tensor) for tensor in results])


def _leaf(value: torch.Tensor) -> torch.Tensor:
    """A leaf for autograd with the same node in the graph."""
    capture = current_capture()
    node = None if capture is None else capture.tracer.find_node(value)
    if capture is None or node is None:
        return value.detach().requires_grad_()
    with _torch.without_recorder():
        leaf = value.detach().requires_grad_()
    capture.tracer.remember(leaf, node)
    return leaf


def _spread_gradients(count: int, places: Sequence[int], gradients: Values) -> list[Any]:
    """Gradients at their positions among `count` operands, None elsewhere."""
    return replace_at([None] * count, places, gradients)


# --- of a function ----------------------------------------------------------------------------------------------------


def backward_of(function: Function, count: int, wanted: Sequence[int], given: Sequence[int]) -> Function:
    """(`count` operands, gradients of the results at positions `given`) → gradients of the operands `wanted`."""

    def run(*values: object) -> tuple[Any, ...]:
        operands, gradients = values[:count], values[count:]

        def of_wanted(*inner: object) -> tuple[object, ...]:
            return tuple(at(given, function(*replace_at(operands, wanted, inner))))

        # An autograd.Function may be of a kind that torch.func does not support.
        pulled = _by_torch_func if _torch.has_transforms() else _by_autograd
        return _copy_results(pulled(of_wanted, at(wanted, operands), gradients), values)

    return run


def _by_torch_func(function: Function, operands: Values, gradients: Values) -> Values:
    pull_back: Any = torch.func.vjp(function, *operands)[1]
    found: Values = pull_back(tuple(gradients))
    return found


def _by_autograd(function: Function, operands: Values, gradients: Values) -> Values:
    is_watched = torch.is_grad_enabled() and any(value.requires_grad for value in (*operands, *gradients))
    with _torch.grad_mode(True):
        leaves = [value.view_as(value) if value.requires_grad else _leaf(value) for value in operands]
        pairs = zip(function(*leaves), gradients, strict=True)
        results = [(result, gradient) for result, gradient in pairs if result.requires_grad]
        if not results:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = torch.autograd.grad(
            [result for result, _ in results], leaves, [gradient for _, gradient in results],
            allow_unused=True, create_graph=is_watched,
        )  # fmt: skip
    return [
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)
    ]


# --- backward ---------------------------------------------------------------------------------------------------------


@hops.backward("cond")
def cond_backward(op: Any, args: Any, results: Values, given: list[int], gradients: list[Any]) -> Any:
    pred, yes, no, operands = args
    wanted = differentiable(operands)
    both = [
        DerivedFunction("backward", backward_of(branch, len(operands), wanted, given)) for branch in (yes, no)
    ]
    found = op(pred, *both, (*operands, *gradients))
    return None, None, None, _spread_gradients(len(operands), wanted, found)


@hops.backward("map_impl")
def map_backward(op: Any, args: Any, results: Values, given: list[int], gradients: list[Any]) -> Any:
    function, xs, others = args
    in_rows, in_rest = differentiable(xs), differentiable(others)
    count = len(xs)
    wanted = [*in_rows, *(count + place for place in in_rest)]
    backward = backward_of(function, count + len(others), wanted, given)

    def of_row(*values: object) -> object:
        rows, grads, rest = values[:count], values[count : count + len(given)], values[count + len(given) :]
        return backward(*rows, *rest, *grads)

    found = op(DerivedFunction("backward", of_row), [*xs, *gradients], list(others))
    rows, rest = found[: len(in_rows)], found[len(in_rows) :]
    return (
        None,
        _spread_gradients(count, in_rows, rows),
        _spread_gradients(len(others), in_rest, [grad.sum(0) for grad in rest]),
    )


@hops.backward("scan")
def scan_backward(op: Any, args: Any, results: Values, given: list[int], gradients: list[Any]) -> Any:
    function, init, xs, others = args
    sizes = [len(init), len(xs), len(others)]
    in_carry, in_rows, in_rest = differentiable(init), differentiable(xs), differentiable(others)
    wanted = [
        *in_carry, *(sizes[0] + place for place in in_rows), *(sizes[0] + sizes[1] + place for place in in_rest)
    ]  # fmt: skip
    backward = backward_of(function, sum(sizes), wanted, given)
    of_carry, of_rows = gradients[: len(in_carry)], gradients[len(in_carry) :]
    ends = [len(in_carry), len(in_rest), *sizes[:2], len(of_rows)]

    def step_back(*values: object) -> object:
        grads, sums, carry, row, row_grads, rest = _parts(values, ends)
        found = backward(*carry, *row, *rest, *grads, *row_grads)
        carry_grads, found_rows, found_rest = _parts(found, [len(in_carry), len(in_rows)])
        sums = [total + part for total, part in zip(sums, found_rest, strict=True)]
        return (*carry_grads, *sums, *found_rows)

    carries = results[-len(init) :] if _returns_carries(function) else _carries(op, args)
    start = [*of_carry, *(torch.zeros_like(value) for value in at(in_rest, others))]
    along = [value.flip(0) for value in (*carries, *xs, *of_rows)]
    found = op(DerivedFunction("backward", step_back), start, along, tuple(others))
    grads, sums, rows = _parts(found, ends[:2])
    return (
        None,
        _spread_gradients(sizes[0], in_carry, grads),
        _spread_gradients(sizes[1], in_rows, [row.flip(0) for row in rows]),
        _spread_gradients(sizes[2], in_rest, sums),
    )


def _parts(values: Values, counts: Sequence[int]) -> list[Values]:
    """Values split into parts of these lengths, and the rest."""
    found, start = [], 0
    for count in counts:
        found.append(values[start : start + count])
        start += count
    return [*found, values[start:]]


class StepWithCarries(DerivedFunction):
    """A step that also returns the carry that it was given."""

    def __init__(self, function: Function, count: int) -> None:
        super().__init__("step", lambda *values: (*function(*values), *map(_copy, values[:count])))


def _returns_carries(function: Function) -> bool:
    return isinstance(function, StepWithCarries)


def _carries(op: Any, args: Any) -> Values:
    """The carry before each step."""
    function, init, xs, others = args
    found: Values = op(StepWithCarries(function, len(init)), list(init), list(xs), tuple(others))
    return found[-len(init) :]


@hops.keep_for_backward("scan")
def scan_with_carries(op: Any, args: Any) -> Any:
    """Also returns the carries, which the backward pass needs."""
    function, init, xs, others = args
    if not init or _returns_carries(function):
        return NotImplemented
    return tuple(op(StepWithCarries(function, len(init)), list(init), list(xs), tuple(others))[: -len(init)])


@hops.keep_for_backward("while_loop")
def loop_with_states(op: object, args: Any) -> tuple[object, ...]:
    """Also returns the state after each iteration, which the backward pass needs."""
    _check_state(op, args[2])
    return tuple([rounds[-1] for rounds in _torch.while_loop_with_all_rounds()(*args[:4])])


def _check_state(op: object, state: Values) -> None:
    if not all(isinstance(value, torch.Tensor) for value in state):
        raise UnsupportedOperatorException(
            f"gradients of {op}: expected loop state of tensors only, got a number",
            func=op,
            context=Context(line=user_line(), hint="make it a tensor: torch.tensor(0)"),
        )


@hops.backward("while_loop", "while_loop_stack_output")
def loop_backward(op: Any, args: Any, results: Values, given: list[int], gradients: list[Any]) -> Any:
    """The backward pass of a loop, with or without stacked outputs."""
    goes_on, body, state, others = args
    is_stacked = op.name() == "while_loop_stack_output"
    _check_state(op, state)
    in_state, in_rest = differentiable(state), differentiable(others)
    wanted = [*in_state, *(len(state) + place for place in in_rest)]
    backward = backward_of(body, len(state) + len(others), wanted, in_state)
    rounds = results if is_stacked else _torch.while_loop_with_all_rounds()(*args[:4])
    by_round = gradients if is_stacked else []
    counts = [1, len(in_state), len(in_rest), len(state), len(state), len(by_round)]

    def back(*values: Any) -> Any:
        (i,), grads, sums, first, after, by_round, rest = _parts(values, counts)
        before = [_row(value, (i - 1).clamp(min=0)) for value in after]
        now = [torch.where(i > 0, value, start) for value, start in zip(before, first, strict=True)]
        if is_stacked:
            grads = [grad + _row(more, i) for grad, more in zip(grads, by_round, strict=True)]
        # In a batch, or if the loop has not run at all, this iteration may not have happened.
        was_run = goes_on(*now, *rest)
        found = backward(*now, *rest, *grads)
        of_state, of_rest = found[: len(in_state)], found[len(in_state) :]
        grads = [torch.where(was_run, new, old) for new, old in zip(of_state, grads, strict=True)]
        more = [torch.where(was_run, part, 0) for part in of_rest]
        return (i - 1, *grads, *(total + part for total, part in zip(sums, more, strict=True)))

    last = torch.full((), rounds[0].shape[0] - 1, dtype=torch.int64, device=rounds[0].device)
    start = [torch.zeros_like(value) for value in at(in_state, state)] if is_stacked else gradients
    totals = [torch.zeros_like(value) for value in at(in_rest, others)]
    found = _torch.while_loop()(
        DerivedFunction("condition", lambda i, *_: i >= 0), DerivedFunction("backward", back), (last, *start, *totals),
        (*state, *rounds, *by_round, *others),
    )  # fmt: skip
    _, of_state, of_rest = _parts(found, [1, len(in_state)])
    return (
        None, None, _spread_gradients(len(state), in_state, of_state), _spread_gradients(len(others), in_rest, of_rest)
    )  # fmt: skip


def _row(stack: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return stack[index.reshape(1)].squeeze(0)
