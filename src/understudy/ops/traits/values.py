"""Whether the values of results are determined by the values of inputs, which inputs are read, and which are indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import DimensionError, OperatorError
from understudy.ops.registry import Trait, record_of
from understudy.ops.shared.dtypes import MASKS, WHOLE
from understudy.spec import New, Outcomes, Same, TensorSpec, View
from understudy.spec.call import Call, flat

LARGEST = 1 << 20
"""Determined values are tracked for tensors up to this many elements."""

undetermined: Trait[str] = Trait("why the values of its results do not follow from its inputs", of_packets=True)
undetermined.register(
    "memory as it was found",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "resize_as_",
)  # fmt: skip
undetermined.register("concerns streams", "record_stream")

unread_inputs: Trait[int] = Trait("how many of its first inputs it does not read the values of", of_packets=True)
unread_inputs.register(
    1, "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_", "copy_"
)


@_torch.memoise_by_operator
def follows_from_inputs(op: OpOverload) -> bool:
    """Whether the values of its results follow from those of its inputs."""
    return op.namespace in ("aten", "prims") and not record_of(op).is_random and undetermined.of(op) is None


def is_determined(call: Call, outcomes: Outcomes, made: list[TensorSpec]) -> bool:
    """Whether the values of a call's results are determined by those of its inputs, and few enough to be tracked. `made`:
    the specs in the outcomes."""
    if not follows_from_inputs(call.op):
        return False
    for spec in (*call.inputs, *made):
        # A sparse tensor shares memory with the tensors that it is made of: what is written to them is not followed.
        if spec.is_symbolic or spec.sparse is not None:
            return False
    return bool(_count_elements(outcomes, call.inputs) <= LARGEST)


def specs_in(outcomes: Any) -> list[TensorSpec]:
    """The specs of the tensors that a call makes."""
    kind = type(outcomes)
    if kind is New or kind is View:
        return [outcomes.spec]
    if kind is tuple or kind is list:
        return [spec for part in outcomes for spec in specs_in(part)]
    return []


def _count_elements(outcomes: Any, inputs: tuple[TensorSpec, ...]) -> Any:
    kind = type(outcomes)
    if kind is New or kind is View:
        return outcomes.spec.numel
    if kind is Same:
        return inputs[outcomes.of].numel
    return sum(_count_elements(part, inputs) for part in outcomes) if kind is tuple or kind is list else 0


# --- indices: determined ones can be checked ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexBound:
    """`index` and `target` count the tensor inputs of a call; `dim` is None for all elements of the target."""

    index: int
    target: int
    dim: int | None
    wraps: bool = False
    "Whether negative indices count from the end."
    error: type[OperatorError] = DimensionError
    "What eager raises."
    ignored: int | None = None
    "An index that is skipped."
    is_checked_if_empty: bool = False
    "Whether eager looks at indices into a target without elements."

    def size(self, target: TensorSpec) -> Any:
        if self.dim is None:
            return target.numel
        return target.shape[self.dim] if target.shape else 1


@dataclass(frozen=True, slots=True)
class IndexArgument:
    """An argument that indexes a dimension of the first one, which another argument names."""

    name: str = "index"
    wraps: bool = False
    error: type[OperatorError] = DimensionError
    is_checked_if_empty: bool = False

    def __call__(self, call: Call) -> Iterator[IndexBound]:
        arguments = named_arguments(call)
        dim = arguments.get("dim", 0)
        index = arguments.get(self.name)
        if isinstance(index, TensorSpec) and isinstance(dim, int):
            position = position_of(call, self.name)
            yield IndexBound(position, 0, dim, self.wraps, self.error, is_checked_if_empty=self.is_checked_if_empty)


Bounds = Callable[[Call], Iterator[IndexBound]]
index_bounds: Trait[Bounds] = Trait("arguments that are indices", of_packets=True)

index_bounds.register(IndexArgument(is_checked_if_empty=True), "index_select")
for _name in ("index_add", "index_copy", "index_reduce"):
    index_bounds.register(IndexArgument(), _name, f"{_name}_")
index_bounds.register(IndexArgument(wraps=True), "index_fill", "index_fill_")
index_bounds.register(IndexArgument(error=OperatorError), "gather")
for _name in ("scatter", "scatter_add", "scatter_reduce"):
    index_bounds.register(IndexArgument(error=OperatorError), _name, f"{_name}_")


@index_bounds("take", "put", "put_")
def of_elements(call: Call) -> Iterator[IndexBound]:
    yield IndexBound(1, 0, None, wraps=True, is_checked_if_empty=True)


@index_bounds("embedding", "embedding_renorm_")
def of_rows(call: Call) -> Iterator[IndexBound]:
    yield IndexBound(1, 0, 0, is_checked_if_empty=True)


@index_bounds("_embedding_bag", "_embedding_bag_forward_only")
def of_rows_in_bags(call: Call) -> Iterator[IndexBound]:
    yield IndexBound(1, 0, 0, error=OperatorError)


@index_bounds("nll_loss_forward", "nll_loss2d_forward")
def of_classes(call: Call) -> Iterator[IndexBound]:
    scores = call.inputs[0]
    yield IndexBound(1, 0, 1 if len(scores.shape) > 1 else 0, ignored=call.args[4], is_checked_if_empty=True)


@index_bounds("multi_margin_loss")
def of_margins(call: Call) -> Iterator[IndexBound]:
    yield IndexBound(1, 0, -1, error=OperatorError)


@index_bounds("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
def of_dimensions(call: Call) -> Iterator[IndexBound]:
    position, dim = 1, 0
    for index in call.args[1]:
        if index is None:
            dim += 1
        elif index.dtype in MASKS:
            position, dim = position + 1, dim + len(index.shape)
        else:
            yield IndexBound(position, 0, dim, wraps=True)
            position, dim = position + 1, dim + 1


def named_arguments(call: Call) -> dict[str, Any]:
    return {**dict(zip(_torch.argument_names(call.op), call.args, strict=False)), **call.kwargs}


def position_of(call: Call, name: str) -> int:
    """The position of this argument among the tensor inputs."""
    seen = 0
    for other, value in (*zip(_torch.argument_names(call.op), call.args, strict=False), *call.kwargs.items()):
        if other == name:
            return seen
        seen += len(flat(TensorSpec, (value,), {}))
    raise KeyError(name)


def bounds_of(call: Call) -> tuple[IndexBound, ...]:
    bounds = index_bounds.of(call.op)
    return () if bounds is None else tuple(bounds(call))


# --- other values that operators refuse: determined ones can be tried -------------------------------------------------

Names = Callable[[Call], tuple[str, ...] | None]
refused_values: Trait[Names] = Trait("arguments whose values decide whether the call is refused", of_packets=True)


def _always(*names: str) -> Names:
    return lambda call: names


refused_values.register(_always("self"), "_assert_async", "multinomial", "bernoulli", "poisson", "binary_cross_entropy")
refused_values.register(_always("info"), "_linalg_check_errors")
refused_values.register(_always("mask"), "masked_scatter", "masked_scatter_")
refused_values.register(lambda call: ("p",) if len(call.inputs) > 1 else None, "bernoulli_")  # numbers: by its rule
refused_values.register(_always("sorter"), "searchsorted")
refused_values.register(_always("std"), "normal")
refused_values.register(_always("target"), "multilabel_margin_loss_forward")
refused_values.register(_always("zero_point"), "fake_quantize_per_channel_affine_cachemask")


@refused_values("div", "div_", "floor_divide", "floor_divide_", "fmod", "fmod_", "remainder", "remainder_")
def _of_whole_divisors(call: Call) -> tuple[str, ...] | None:
    """Integers can't be divided by 0."""
    divisor = named_arguments(call).get("other")
    is_true_division = record_of(call.op).packet.startswith("div") and call.kwargs.get("rounding_mode") is None
    if is_true_division or not all(spec.dtype in WHOLE for spec in call.inputs) or isinstance(divisor, float):
        return None
    return ("other",) if isinstance(divisor, TensorSpec) or divisor == 0 else None


def deciding_inputs(call: Call) -> tuple[int, ...] | None:
    """The positions of the inputs whose values decide whether the call is refused; None if no value does."""
    find_names = refused_values.of(call.op)
    names = None if find_names is None else find_names(call)
    if names is None:
        return None
    arguments = named_arguments(call)
    if any(arguments.get(name) is None for name in names):
        return None
    return tuple(position_of(call, name) for name in names if isinstance(arguments[name], TensorSpec))
