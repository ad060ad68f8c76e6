"""Rules that raise, each with its reason: the result has a data-dependent size, or is quantised."""

from __future__ import annotations

from typing import NoReturn

from understudy.errors import DynamicOutputShapeException, UnsupportedFakeTensorException
from understudy.ops.registry import Rule, rule

NONZERO = "one row for each element that is not zero; torch.nonzero_static takes the number of rows as size="
UNIQUE = "one element for each value that occurs"

# The size of the result, and what to use instead.
DYNAMIC_SIZES = {
    "nonzero": NONZERO,
    "nonzero_numpy": NONZERO,
    "where": NONZERO,
    "argwhere": NONZERO,
    "masked_select": "one element for each true element of the mask; torch.where and masked_fill keep the shape",
    "_unique": UNIQUE,
    "_unique2": UNIQUE,
    "unique_dim": "one slice for each slice that occurs",
    "unique_consecutive": "one element for each run of equal values",
    "unique_dim_consecutive": "one slice for each run of equal slices",
    "_pack_padded_sequence": "one row for each step of each sequence; give lengths whose values are known",
    "bincount": "one count for each number up to the largest one; torch.histc takes the number of bins",
}


def _refusal(name: str, size: str) -> Rule:
    def refuse(*args: object, **kwargs: object) -> object:
        shown = f" of {args[0]}" if args else ""
        raise DynamicOutputShapeException(f"{name}{shown}: the size of the result depends on data: {size}")

    return refuse


for _name, _size in DYNAMIC_SIZES.items():
    rule(_name)(_refusal(_name, _size))


# --- Operators that return quantised tensors: they raise, because specs have no quantiser ---------------

QUANTISING = (
    "quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_tensor.tensors",
    "quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized", "empty_quantized", "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
)  # fmt: skip


def _refuse(name: str) -> None:
    @rule(name)
    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedFakeTensorException(
            f"{name.partition('.')[0]}: quantised tensors carry a quantiser that has no stand-in; "
            "torch.fake_quantize_per_tensor_affine and torch.ops.quantized_decomposed compute with plain tensors"
        )


for _name in QUANTISING:
    _refuse(_name)
