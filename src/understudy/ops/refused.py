"""Rules that raise, each with its reason: the result has a data-dependent size, is quantised, or nested."""

from __future__ import annotations

from typing import NoReturn

from understudy.errors import DynamicOutputShapeException, UnsupportedFakeTensorException
from understudy.ops.registry import Rule, rule

NONZERO = "one row per non-zero element; torch.nonzero_static takes the number of rows as size="
UNIQUE = "one element per distinct value"

# The size of the result, and what to use instead.
DYNAMIC_SIZES = {
    "nonzero": NONZERO,
    "nonzero_numpy": NONZERO,
    "where": NONZERO,
    "argwhere": NONZERO,
    "masked_select": "one element per true element of the mask; torch.where and masked_fill keep the shape",
    "_unique": UNIQUE,
    "_unique2": UNIQUE,
    "unique_dim": "one slice per distinct slice",
    "unique_consecutive": "one element per run of equal values",
    "unique_dim_consecutive": "one slice per run of equal slices",
    "_pack_padded_sequence": "one row per step of each sequence; pass lengths with known values",
    "bincount": "one count per integer up to the maximum; torch.histc takes the number of bins",
}


def _refusal(name: str, size: str) -> Rule:
    def refuse(*args: object, **kwargs: object) -> object:
        shown = f" of {args[0]}" if args else ""
        raise DynamicOutputShapeException(f"{name}{shown}: the size of the result depends on data: {size}")

    return refuse


for _name, _size in DYNAMIC_SIZES.items():
    rule(_name)(_refusal(_name, _size))


# --- Operators that return quantised or nested tensors: they raise, because specs have no quantiser and no ragged sizes ---

QUANTISING = (
    "quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_tensor.tensors",
    "quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized", "empty_quantized", "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
)  # fmt: skip


NO_QUANTISER = (
    "quantised tensors are not supported; use torch.fake_quantize_per_tensor_affine or "
    "torch.ops.quantized_decomposed, which compute with plain tensors"
)
NESTING = (
    "_nested_tensor_from_tensor_list", "_nested_tensor_from_mask", "_nested_from_padded", "_nested_view_from_buffer",
    "_nested_view_from_buffer_copy", "_nested_from_padded_and_nested_example",
)  # fmt: skip
NO_RAGGED_SIZES = (
    "nested tensors of strided layout are not supported: use layout=torch.jagged, or a padded tensor"
)


def _refuse(name: str, reason: str) -> None:
    @rule(name)
    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedFakeTensorException(f"{name.partition('.')[0]}: {reason}")


for _name in QUANTISING:
    _refuse(_name, NO_QUANTISER)
for _name in NESTING:
    _refuse(_name, NO_RAGGED_SIZES)
