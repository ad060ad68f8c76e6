"""Whether the values of results are determined by the values of inputs, which inputs are read, and which are indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from understudy import _torch
from understudy.errors import DimensionError, OperatorError
from understudy.ops.registry import OpFacts, record_of
from understudy.ops.shared.dtypes import MASKS, WHOLE
from understudy.spec import New, Same, TensorSpec, View
from understudy.spec.call import Call, flat
from understudy.spec.error_context import OperatorLinAlgError

LARGEST = 1 << 20
"""Determined values are tracked for tensors up to this many elements."""

undetermined = OpFacts.undetermined
undetermined.register(
    "uninitialised memory",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "resize_as_",
)  # fmt: skip
undetermined.register("concerns streams", "record_stream")

unread_inputs = OpFacts.unread_inputs
unread_inputs.register(
    1, "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_", "copy_"
)


def specs_in(outcomes: Any) -> list[TensorSpec]:
    """The specs of the tensors that a call makes."""
    kind = type(outcomes)
    if kind is New or kind is View:
        return [outcomes.spec]
    if kind is tuple or kind is list:
        return [spec for part in outcomes for spec in specs_in(part)]
    return []


def count_elements(outcomes: Any, inputs: tuple[TensorSpec, ...]) -> Any:
    """The elements of all results."""
    kind = type(outcomes)
    if kind is New or kind is View:
        return outcomes.spec.numel
    if kind is Same:
        return inputs[outcomes.of].numel
    return sum(count_elements(part, inputs) for part in outcomes) if kind is tuple or kind is list else 0


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
            yield IndexBound(
                position, 0, dim, self.wraps, self.error, is_checked_if_empty=self.is_checked_if_empty
            )


Bounds = Callable[[Call], Iterator[IndexBound]]
index_bounds = OpFacts.index_bounds

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
    bounds = record_of(call.op).index_bounds
    return () if bounds is None else tuple(bounds(call))


# --- other values that operators refuse -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RefusedValues:
    """Values of an argument for which eager raises. `includes` gets the argument as a real tensor."""

    argument: str
    includes: Callable[[Any], bool]
    reason: str
    error: type[OperatorError] = OperatorError


refused_values = OpFacts.refused_values


def _is_outside_of_unit(value: Any) -> bool:
    return not bool(((value >= 0) & (value <= 1)).all())


def _is_false(value: Any) -> bool:
    return not bool(value)


def _has_negative(value: Any) -> bool:
    return bool((value < 0).any())


def _are_weights_unusable(value: Any) -> bool:
    return not bool(((value >= 0) & (value < float("inf"))).all()) or not bool((value.sum(-1) > 0).all())


def _has_errors(value: Any) -> bool:
    return bool((value != 0).any())


def _has_zero(value: Any) -> bool:
    return bool((value == 0).any())


refused_values.register(RefusedValues("self", _is_false, "the assertion is false"), "_assert_async")
refused_values.register(
    RefusedValues("self", _is_outside_of_unit, "expected probabilities between 0 and 1"),
    "bernoulli", "binary_cross_entropy",
)  # fmt: skip
refused_values.register(
    RefusedValues("p", _is_outside_of_unit, "expected probabilities between 0 and 1"), "bernoulli_"
)
refused_values.register(
    RefusedValues("self", _are_weights_unusable, "expected finite weights >= 0 with a positive sum"),
    "multinomial",
)
refused_values.register(RefusedValues("self", _has_negative, "expected rates >= 0"), "poisson")
refused_values.register(RefusedValues("std", _has_negative, "expected standard deviations >= 0"), "normal")
refused_values.register(
    RefusedValues(
        "info", _has_errors, "the matrix is singular, or not positive definite", OperatorLinAlgError
    ),
    "_linalg_check_errors",
)
DIVISIONS = ("div", "div_", "floor_divide", "floor_divide_", "fmod", "fmod_", "remainder", "remainder_")
refused_values.register(RefusedValues("other", _has_zero, "integers can't be divided by 0"), *DIVISIONS)


def refused_values_of(call: Call) -> tuple[int, RefusedValues] | None:
    """The position of the input whose determined values have to be checked, and the values that are refused."""
    refused = record_of(call.op).refused_values
    if refused is None or not isinstance(named_arguments(call).get(refused.argument), TensorSpec):
        return None
    if any(spec.device.type != "cpu" for spec in call.inputs):
        return None  # a GPU raises no error
    if refused.includes is _has_zero and not _divides_integers(call):
        return None
    return position_of(call, refused.argument), refused


def _divides_integers(call: Call) -> bool:
    is_true_division = (
        record_of(call.op).packet.startswith("div") and call.kwargs.get("rounding_mode") is None
    )
    return not is_true_division and all(spec.dtype in WHOLE for spec in call.inputs)
