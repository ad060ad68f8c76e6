"""Higher-order operators run as plain code; and, for captures, example inputs and results of their functions.

`torch.cond`, `scan` and their like call functions among their arguments. Where nothing records the program, a run with
stand-ins calls these functions as eager would: autograd and the transforms of torch.func see what happens inside.
Where eager would read a value that is not determined, both branches (`cond`) or one iteration (`while_loop`) are run:
torch requires the same metadata for every value. Sizes in which two branches differ become unbacked symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import (
    Context,
    DataDependentOutputException,
    GuardOnDataDependentSymNode,
    OperatorError,
)
from understudy.fake.fused_attention import run_fused_attention
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.data_dependent import is_known
from understudy.lines import user_line
from understudy.ops import hops
from understudy.shapes.bindings import unbacked_symbols_in
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import TensorSpec
from understudy.spec.strides import packed_strides

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

Args = tuple[Any, ...]
INTEGERS = (int, torch.SymInt)
MOST_ITERATIONS = 1 << 14
"""A loop with determined condition is cut off after this many iterations."""


def _decide(predicate: object) -> bool | None:
    """The truth value of a predicate; None if it is not determined."""
    if type(predicate) is FakeTensor and predicate.item_memo is None and not is_known(predicate):
        return None  # asking would create an unused symbol
    try:
        return bool(predicate)
    except (DataDependentOutputException, GuardOnDataDependentSymNode):
        return None


@hops.run("cond")
def cond(pred: object, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    decided = _decide(pred)
    if decided is not None:
        return true_fn(*operands) if decided else false_fn(*operands)
    result, other = true_fn(*operands), false_fn(*operands)
    mode = _torch.active_fake_mode()
    if mode is None or mode.shape_env is None:
        _check_equal_values("torch.cond: the two branches", result, other)
        return result
    (one, structure), (two, _) = _torch.tree_flatten(result), _torch.tree_flatten(other)
    # Where the sizes agree, the result of the first branch is returned, because it has autograd history.
    joint = merge_branches(mode, one, two, set(mode.shape_env.unbacked))
    alike = [_has_spec_of(a, b) for a, b in zip(one, joint, strict=True)]
    return result if all(alike) else _torch.tree_unflatten(list(joint), structure)


@hops.run("while_loop")
def while_loop(cond_fn: Any, body_fn: Any, carried: Any, additional: Any = (), **ignored: object) -> Any:
    carried = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in carried)
    for _ in range(MOST_ITERATIONS):
        decided = _decide(cond_fn(*carried, *additional))
        if decided is False:
            break
        result = tuple(body_fn(*carried, *additional))
        _check_equal_values("while_loop: input and output of the body", carried, result)
        carried = result
        if decided is None:
            break
    return carried


@hops.run("scan")
def scan(combine_fn: Any, init: list[object], xs: Any, additional_inputs: Any = ()) -> tuple[object, ...]:
    carry, steps = list(init), []
    spec: Any = None
    for step in range(xs[0].shape[0]):
        result = combine_fn(*carry, *[x[step] for x in xs], *additional_inputs)
        # Python functions return (carry, output) in any structure; graphs return one flat list.
        nested = (
            isinstance(result, tuple) and len(result) == 2 and not isinstance(combine_fn, torch.nn.Module)
        )
        leaves, spec = _torch.tree_flatten(result)
        before, carry = carry, leaves[: len(init)]
        _check_equal_values("scan: the carry before and after a step", before, carry)
        steps.append(leaves[len(init) :])
    outputs = [_stack_parts(parts) for parts in zip(*steps, strict=True)]
    return _torch.tree_unflatten([*carry, *outputs], spec) if nested else (*carry, *outputs)


@hops.run("map_impl")
def map_impl(f: Any, xs: Any, pos_args: Any, **written: str) -> tuple[object, ...]:
    """`written`: the operands that the function writes to, in releases that pass it; the function runs here, and writes
    to them."""
    flat = [_torch.tree_flatten(f(*[x[step] for x in xs], *pos_args)) for step in range(xs[0].shape[0])]
    outputs = [_stack_parts(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return _torch.tree_unflatten(outputs, flat[0][1])


@hops.run("invoke_subgraph")
def invoke_subgraph(subgraph: Any, identifier: str, *operands: object) -> tuple[object, ...]:
    return subgraph(*operands)


@hops.run("flex_attention")
def flex_attention(*args: Any) -> tuple[object, ...]:
    mode = _torch.active_fake_mode()
    if mode is not None and mode.stands_for_compiled and args[0].device.type != "cpu":
        return run_fused_attention(*args)
    return _torch.plain_flex_attention(*args)


def _has_spec_of(leaf: object, merged: object) -> bool:
    """Whether a value of one branch has the spec of the merged output."""
    if type(leaf) is not FakeTensor or type(merged) is not FakeTensor:
        return leaf is merged
    pairs = zip(
        (*leaf._spec.shape, *leaf._spec.stride), (*merged._spec.shape, *merged._spec.stride), strict=True
    )
    return all(a is b or (type(a) is int and type(b) is int and a == b) for a, b in pairs)


def _stack_parts(parts: Sequence[Any]) -> object:
    return torch.stack(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


def _check_equal_values(what: str, first: object, second: object) -> None:
    one, two = _torch.tree_flatten(first)[0], _torch.tree_flatten(second)[0]
    # Lists and tuples count as the same structure.
    alike = len(one) == len(two) and all(_facts(a) == _facts(b) for a, b in zip(one, two, strict=True))
    if not alike:
        shown = (
            ", ".join(_describe_leaf(leaf) for leaf in one),
            ", ".join(_describe_leaf(leaf) for leaf in two),
        )
        raise OperatorError(
            f"{what} must have the same metadata: [{shown[0]}] and [{shown[1]}]",
            context=Context(line=user_line()),
        )


def _facts(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return type(leaf)


def _describe_leaf(leaf: object) -> str:
    return str(leaf._spec) if type(leaf) is FakeTensor else str(_facts(leaf))


# --- Outputs of `torch.cond`, whichever branch runs ---------------------------------------------------------
# Sizes and numbers in which the branches differ, and those that are data-dependent inside a branch, become new unbacked
# symbols.

SAME_IN_BOTH = ("dtype", "device", "layout", "ndim", "conj", "neg")


def merge_branches(
    mode: FakeTensorMode, first: Sequence[object], second: Sequence[object], known: set[Any]
) -> tuple[object, ...]:
    """Merge the outputs of two branches; `known` are the symbols of the surrounding program."""
    if len(first) != len(second):
        raise mismatch(f"the true branch returns {len(first)} values and the false branch {len(second)}")
    return tuple([_merge_values(mode, a, b, known) for a, b in zip(first, second, strict=True)])


def mismatch(what: str) -> OperatorError:
    hint = "let both branches return the same structure, with tensors of the same dtype, device and number of dimensions"
    return OperatorError(f"torch.cond: {what}", context=Context(line=user_line(), hint=hint))


def _merge_values(mode: FakeTensorMode, a: object, b: object, known: set[Any]) -> Any:
    if a is None and b is None:
        return None
    if isinstance(a, INTEGERS) and isinstance(b, INTEGERS) and not isinstance(a, bool):
        return to_torch(_merge_numbers(mode, from_torch(a), from_torch(b), known))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise mismatch(f"one branch returns {describe_value(a)} where the other returns {describe_value(b)}")
    if type(a) is not FakeTensor or type(b) is not FakeTensor:
        return a  # an example run inside a transform: the value is not used
    return make_new(mode, _merge_specs(mode, a._spec, b._spec, known))


def describe_value(value: object) -> str:
    return str(value._spec) if type(value) is FakeTensor else f"{type(value).__name__} {value}"


def _merge_specs(mode: FakeTensorMode, a: TensorSpec, b: TensorSpec, known: set[Any]) -> TensorSpec:
    differing = [fact for fact in SAME_IN_BOTH if getattr(a, fact) != getattr(b, fact)]
    if differing:
        raise mismatch(f"one branch returns {a} and the other {b}: they differ in {', '.join(differing)}")
    shape = tuple([_merge_numbers(mode, x, y, known) for x, y in zip(a.shape, b.shape, strict=True)])
    same_sizes = all(x is y for x, y in zip(shape, a.shape, strict=True))
    if same_sizes and _are_equal(a.stride, b.stride):
        return TensorSpec(
            shape, a.stride, dtype=a.dtype, device=a.device, layout=a.layout, conj=a.conj, neg=a.neg
        )
    order = _memory_order(a)
    if order is None or order != _memory_order(b):
        raise mismatch(
            f"one branch returns {a} with strides {a.stride} and the other {b} with strides {b.stride}; tensors of "
            "different sizes have to be dense and in the same order in memory: return them with .contiguous()"
        )
    return TensorSpec(shape, packed_strides(shape, order), dtype=a.dtype, device=a.device, layout=a.layout)


def _are_equal(a: Sequence[object], b: Sequence[object]) -> bool:
    return all(x is y or (type(x) is int and type(y) is int and x == y) for x, y in zip(a, b, strict=True))


def _memory_order(spec: TensorSpec) -> list[int] | None:
    """The dimensions in order of stride, smallest first, if the tensor is dense."""
    order: list[int] = []
    expected: Any = 1
    for _ in range(spec.ndim):
        rest = [dim for dim in reversed(range(spec.ndim)) if dim not in order]
        found = next((dim for dim in rest if _are_equal((spec.stride[dim],), (expected,))), None)
        if found is None:
            return None
        order.append(found)
        expected = expected * spec.shape[found]
    return order


def _merge_numbers(mode: FakeTensorMode, a: object, b: object, known: set[object]) -> Any:
    is_same = a is b or (type(a) is int and type(b) is int and a == b)
    if is_same and not (unbacked_in(a) - known):
        return a
    low, high = _bounds(mode, a), _bounds(mode, b)
    least = None if low[0] is None or high[0] is None else min(low[0], high[0])
    most = None if low[1] is None or high[1] is None else max(low[1], high[1])
    return fresh_size(mode, least, most)


def fresh_size(mode: FakeTensorMode, low: int | None = None, high: int | None = None) -> Any:
    """A new unbacked size for a number that depends on the branch."""
    if mode.shape_env is None:
        raise OperatorError(
            "branches of a higher-order operator return tensors of different sizes: expected a mode with a ShapeEnv",
            context=Context(line=user_line(), hint="make it with FakeTensorMode(shape_env=ShapeEnv())"),
        )
    return from_torch(mode.shape_env.create_unbacked_symint(low=low, high=high, what="a branch"))


def unbacked_in(value: object) -> set[Any]:
    return unbacked_symbols_in(value) if type(value) is SymNode else set()


def _bounds(mode: FakeTensorMode, number: Any) -> tuple[int | None, int | None]:
    if type(number) is int:
        return number, number
    low, high = mode.shape_env.facts.interval(number.value)
    return low, high


# --- example inputs of the functions ------------------------------------------------------------------------------


def take_first_slices(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first slice of each tensor along dimension 0, which scan and map iterate over."""
    # torch has no batching rule for `select_copy`.
    return [(torch.select if _torch.is_functorch_wrapped(x) else torch.select_copy)(x, 0, 0) for x in tensors]


def ignore_fresh_symbols(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Symbols created inside stand for inputs of one iteration; the surrounding graph does not bind them."""
    return nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()


def make_carry(mode: FakeTensorMode, values: Sequence[object]) -> list[object]:
    """Example inputs of one iteration: the same metadata, with values that are not determined."""
    found = []
    for value in values:
        if isinstance(value, INTEGERS) and mode.shape_env is not None:
            with ignore_fresh_symbols(mode):
                found.append(to_torch(fresh_size(mode)))
        elif type(value) is FakeTensor:
            fresh = make_new(mode, value._spec)
            found.append(fresh.requires_grad_() if value.requires_grad else fresh)
        else:
            found.append(value.clone() if isinstance(value, torch.Tensor) else value)
    return found


@hops.examples("cond")
def cond_examples(mode: FakeTensorMode, args: Args) -> list[object]:
    return list(args[3])


@hops.examples("while_loop", "while_loop_stack_output")
def while_loop_examples(mode: FakeTensorMode, args: Args) -> list[object]:
    return [*make_carry(mode, args[2]), *args[3]]


@hops.examples("scan")
def scan_examples(mode: FakeTensorMode, args: Args) -> list[object]:
    return [*make_carry(mode, args[1]), *take_first_slices(args[2]), *args[3]]


@hops.examples("map_impl")
def map_examples(mode: FakeTensorMode, args: Args) -> list[object]:
    return [*take_first_slices(args[1]), *args[2]]


@hops.examples("associative_scan")
def associative_scan_examples(mode: FakeTensorMode, args: Args) -> list[object]:
    return [*take_first_slices(args[1]), *take_first_slices(args[1]), *args[2]]


# --- results -----------------------------------------------------------------------------------------------------


@hops.result("cond")
def cond_result(
    mode: FakeTensorMode, args: Args, outputs: list[Sequence[object]]
) -> Sequence[int | torch.SymInt | object | None]:
    first, second = outputs
    return merge_branches(mode, first, second, unbacked_symbols_in(list(args[3])))


@hops.result("while_loop")
def while_loop_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[Any]:
    check_equal_specs("while_loop", "the input of the body", args[2], "its output", outputs[1])
    return [
        to_torch(fresh_size(mode)) if isinstance(value, INTEGERS) else _make_like(mode, value)
        for value in outputs[1]
    ]


@hops.result("while_loop_stack_output")
def stacked_loop_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[object]:
    check_equal_specs("while_loop", "the input of the body", args[2], "its output", outputs[1])
    rounds = fresh_size(mode, 1)
    return [_stack_row(mode, value, rounds) for value in outputs[1]]


@hops.result("scan")
def scan_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[object]]) -> Sequence[object]:
    _, init, xs, _ = args
    carry, rows = outputs[0][: len(init)], outputs[0][len(init) :]
    check_equal_specs("scan", "the carry before a step", init, "the carry after it", carry)
    return [
        *(_make_like(mode, value) for value in carry),
        *(_stack_row(mode, row, _leading_size(xs)) for row in rows),
    ]


@hops.result("map_impl")
def map_result(mode: FakeTensorMode, args: Args, outputs: list[Sequence[Any]]) -> Sequence[object]:
    return [_stack_row(mode, row, _leading_size(args[1])) for row in outputs[0]]


@hops.result("associative_scan")
def associative_scan_result(
    mode: FakeTensorMode, args: Args, outputs: list[Sequence[object]]
) -> Sequence[object]:
    check_equal_specs(
        "associative_scan", "the operands", take_first_slices(args[1]), "the result", outputs[0]
    )
    return [_make_like(mode, value) for value in args[1]]


def _leading_size(xs: Sequence[torch.Tensor]) -> Any:
    return from_torch(xs[0].shape[0])


def _make_like(mode: FakeTensorMode, value: object) -> object:
    return make_new(mode, value._spec) if type(value) is FakeTensor else value


def _stack_row(mode: FakeTensorMode, row: object, length: object) -> object:
    if type(row) is FakeTensor:
        spec = row._spec
        return make_new(mode, TensorSpec((length, *spec.shape), dtype=spec.dtype, device=spec.device))
    return torch.stack([row]) if isinstance(row, torch.Tensor) else row


def check_equal_specs(
    op: str,
    before: str,
    first: Sequence[int | object],
    after: str,
    second: Sequence[int | torch.SymInt | object],
) -> None:
    """Raise if the carried values change their metadata from one iteration to the next."""
    if len(first) == len(second) and all(map(_has_equal_spec, first, second)):
        return
    shown = [", ".join(map(describe_value, values)) for values in (first, second)]
    raise OperatorError(
        f"{op}: {before} and {after} must have the same shape, dtype and device: [{shown[0]}] and [{shown[1]}]",
        context=Context(line=user_line()),
    )


def _has_equal_spec(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return isinstance(a, INTEGERS) == isinstance(b, INTEGERS) and isinstance(a, torch.Tensor) == isinstance(
        b, torch.Tensor
    )
