"""What comes out of `torch.cond`, whichever branch runs.

Where the branches agree, that is it. Sizes and numbers in which they differ, and those that only the data inside a
branch tells, become new symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from understudy.errors import Context, OperatorError
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_line
from understudy.shapes.bindings import unbacked_symbols_in
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import TensorSpec
from understudy.spec.strides import packed_strides

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

INTEGERS = (int, torch.SymInt)
SAME_IN_BOTH = ("dtype", "device", "layout", "ndim", "conj", "neg")


def merged(
    mode: FakeTensorMode, first: Sequence[Any], second: Sequence[Any], known: set[Any]
) -> tuple[Any, ...]:
    """The outputs of two branches as one; `known` are the symbols that the surrounding program can read."""
    if len(first) != len(second):
        raise mismatch(f"the true branch returns {len(first)} values and the false branch {len(second)}")
    return tuple([_merged(mode, a, b, known) for a, b in zip(first, second, strict=True)])


def mismatch(what: str) -> OperatorError:
    hint = "let both branches return the same structure, with tensors of the same dtype, device and number of dimensions"
    return OperatorError(f"torch.cond: {what}", context=Context(line=user_line(), hint=hint))


def _merged(mode: FakeTensorMode, a: Any, b: Any, known: set[Any]) -> Any:
    if a is None and b is None:
        return None
    if isinstance(a, INTEGERS) and isinstance(b, INTEGERS) and not isinstance(a, bool):
        return to_torch(_number(mode, from_torch(a), from_torch(b), known))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise mismatch(f"one branch returns {described(a)} where the other returns {described(b)}")
    if type(a) is not FakeTensor or type(b) is not FakeTensor:
        return a  # a rehearsal inside of a transform, where nothing depends on it
    return make_new(mode, _spec(mode, a._spec, b._spec, known))


def described(value: Any) -> str:
    return str(value._spec) if type(value) is FakeTensor else f"{type(value).__name__} {value}"


def _spec(mode: FakeTensorMode, a: TensorSpec, b: TensorSpec, known: set[Any]) -> TensorSpec:
    differing = [fact for fact in SAME_IN_BOTH if getattr(a, fact) != getattr(b, fact)]
    if differing:
        raise mismatch(f"one branch returns {a} and the other {b}: they differ in {', '.join(differing)}")
    shape = tuple([_number(mode, x, y, known) for x, y in zip(a.shape, b.shape, strict=True)])
    same_sizes = all(x is y for x, y in zip(shape, a.shape, strict=True))
    if same_sizes and _are_equal(a.stride, b.stride):
        return TensorSpec(
            shape, a.stride, dtype=a.dtype, device=a.device, layout=a.layout, conj=a.conj, neg=a.neg
        )
    order = _order(a)
    if order is None or order != _order(b):
        raise mismatch(
            f"one branch returns {a} with strides {a.stride} and the other {b} with strides {b.stride}; tensors of "
            "different sizes have to be dense and in the same order in memory: return them with .contiguous()"
        )
    return TensorSpec(shape, packed_strides(shape, order), dtype=a.dtype, device=a.device, layout=a.layout)


def _are_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(x is y or (type(x) is int and type(y) is int and x == y) for x, y in zip(a, b, strict=True))


def _order(spec: TensorSpec) -> list[int] | None:
    """The dimensions from the fastest to the slowest, if the tensor is packed in that order."""
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


def _number(mode: FakeTensorMode, a: Any, b: Any, known: set[Any]) -> Any:
    is_same = a is b or (type(a) is int and type(b) is int and a == b)
    if is_same and not (unbacked_in(a) - known):
        return a
    low, high = _bounds(mode, a), _bounds(mode, b)
    least = None if low[0] is None or high[0] is None else min(low[0], high[0])
    most = None if low[1] is None or high[1] is None else max(low[1], high[1])
    return fresh_size(mode, least, most)


def fresh_size(mode: FakeTensorMode, low: int | None = None, high: int | None = None) -> Any:
    """A number that only a run of the branch tells."""
    if mode.shape_env is None:
        raise OperatorError(
            "the branches of a higher-order operator return tensors of different sizes, and this mode has no symbols",
            context=Context(line=user_line(), hint="make it with FakeTensorMode(shape_env=ShapeEnv())"),
        )
    return from_torch(mode.shape_env.create_unbacked_symint(low=low, high=high, what="a branch"))


def unbacked_in(value: Any) -> set[Any]:
    return unbacked_symbols_in(value) if type(value) is SymNode else set()


def _bounds(mode: FakeTensorMode, number: Any) -> tuple[int | None, int | None]:
    if type(number) is int:
        return number, number
    low, high = mode.shape_env.facts.interval(number.value)
    return low, high
