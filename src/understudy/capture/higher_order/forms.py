"""How each higher-order operator calls the functions that it is given, and what comes out.

One row for each operator in `FORMS`. `examples` are operands for one call of its functions; `result` is what the operator
gives on stand-ins, from what its functions return for the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from understudy import _torch
from understudy.errors import Context, OperatorError
from understudy.fake.higher_order import describe_value, fresh_size, merge_branches
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_line
from understudy.shapes.bindings import unbacked_symbols_in
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import TensorSpec

Args = tuple[Any, ...]
INTEGERS = (int, torch.SymInt)


@dataclass(frozen=True, slots=True)
class Form:
    """One higher-order operator."""

    functions: tuple[tuple[int, str], ...]
    """Position among the arguments, and what the graph is called as a submodule; the one that makes the results last."""
    extra: int
    """Position of the list of operands that takes further ones."""
    examples: Callable[[FakeTensorMode, Args], list[Any]]
    result: Callable[[FakeTensorMode, Args, list[Sequence[Any]]], Sequence[Any]]
    may_write: bool = False
    """Whether its functions may write to their operands where no gradients are recorded."""
    bare: tuple[int, ...] = ()
    """Positions of the functions that return one value as it is."""


# --- one call of the functions ------------------------------------------------------------------------------------------


def slices(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first entry of each along the dimension that is gone through."""
    # torch has no rule for copying selections of batches.
    return [(torch.select if _torch.is_functorch_wrapped(x) else torch.select_copy)(x, 0, 0) for x in tensors]


def no_symbols_to_bind(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Symbols born here stand for what a round, or a rehearsal, is given; nothing in the graph around reads them."""
    return nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()


def make_carry(mode: FakeTensorMode, values: Sequence[Any]) -> list[Any]:
    """What a round of a loop may be given: like this in all but its values."""
    found = []
    for value in values:
        if isinstance(value, INTEGERS) and mode.shape_env is not None:
            with no_symbols_to_bind(mode):
                found.append(to_torch(fresh_size(mode)))
        elif type(value) is FakeTensor:
            fresh = make_new(mode, value._spec)
            found.append(fresh.requires_grad_() if value.requires_grad else fresh)
        else:
            found.append(value.clone() if isinstance(value, torch.Tensor) else value)
    return found


def cond_examples(mode: FakeTensorMode, args: Args) -> list[Any]:
    return list(args[3])


def while_loop_examples(mode: FakeTensorMode, args: Args) -> list[Any]:
    return [*make_carry(mode, args[2]), *args[3]]


def scan_examples(mode: FakeTensorMode, args: Args) -> list[Any]:
    return [*make_carry(mode, args[1]), *slices(args[2]), *args[3]]


def map_examples(mode: FakeTensorMode, args: Args) -> list[Any]:
    return [*slices(args[1]), *args[2]]


def associative_scan_examples(mode: FakeTensorMode, args: Args) -> list[Any]:
    return [*slices(args[1]), *slices(args[1]), *args[2]]


# --- what comes out -----------------------------------------------------------------------------------------------------


def cond_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[Any]:
    first, second = outputs
    return merge_branches(mode, first, second, unbacked_symbols_in(list(args[3])))


def while_loop_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[Any]:
    check_alike("while_loop", "what goes into the body", args[2], "what comes out of it", outputs[1])
    return [
        to_torch(fresh_size(mode)) if isinstance(value, INTEGERS) else _new(mode, value)
        for value in outputs[1]
    ]


def stacked_loop_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[Any]:
    check_alike("while_loop", "what goes into the body", args[2], "what comes out of it", outputs[1])
    rounds = fresh_size(mode, 1)
    return [_stack_row(mode, value, rounds) for value in outputs[1]]


def scan_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[Any]:
    _, init, xs, _ = args
    carry, rows = outputs[0][: len(init)], outputs[0][len(init) :]
    check_alike("scan", "the carry before a step", init, "the carry after it", carry)
    return [*(_new(mode, value) for value in carry), *(_stack_row(mode, row, _length(xs)) for row in rows)]


def map_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[Any]:
    return [_stack_row(mode, row, _length(args[1])) for row in outputs[0]]


def associative_scan_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[Any]:
    check_alike("associative_scan", "what is combined", slices(args[1]), "what comes out", outputs[0])
    return [_new(mode, value) for value in args[1]]


def _length(xs: Sequence[torch.Tensor]) -> Any:
    return from_torch(xs[0].shape[0])


def _new(mode: FakeTensorMode, value: Any) -> Any:
    return make_new(mode, value._spec) if type(value) is FakeTensor else value


def _stack_row(mode: FakeTensorMode, row: Any, length: Any) -> Any:
    if type(row) is FakeTensor:
        spec = row._spec
        return make_new(mode, TensorSpec((length, *spec.shape), dtype=spec.dtype, device=spec.device))
    return torch.stack([row]) if isinstance(row, torch.Tensor) else row


def check_alike(op: str, before: str, first: Sequence[Any], after: str, second: Sequence[Any]) -> None:
    """What is handed from round to round must not change its metadata."""
    if len(first) == len(second) and all(map(_is_alike, first, second)):
        return
    shown = [", ".join(map(describe_value, values)) for values in (first, second)]
    raise OperatorError(
        f"{op}: {before} and {after} must have the same shape, dtype and device: [{shown[0]}] and [{shown[1]}]",
        context=Context(line=user_line()),
    )


def _is_alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return isinstance(a, INTEGERS) == isinstance(b, INTEGERS) and isinstance(a, torch.Tensor) == isinstance(
        b, torch.Tensor
    )


LOOP = ((0, "while_loop_cond_graph"), (1, "while_loop_body_graph"))
FORMS: dict[str, Form] = {
    "cond": Form(((1, "true_graph"), (2, "false_graph")), 3, cond_examples, cond_result, may_write=True),
    "while_loop": Form(LOOP, 3, while_loop_examples, while_loop_result, may_write=True, bare=(0,)),
    "while_loop_stack_output": Form(LOOP, 3, while_loop_examples, stacked_loop_result, bare=(0,)),
    "scan": Form(((0, "scan_combine_graph"),), 3, scan_examples, scan_result),
    "map_impl": Form(((0, "body_graph"),), 2, map_examples, map_result),
    "associative_scan": Form(
        ((0, "associative_scan_combine_graph"),), 2, associative_scan_examples, associative_scan_result
    ),
}  # fmt: skip
