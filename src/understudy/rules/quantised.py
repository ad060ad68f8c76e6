"""Operators that give quantised tensors: refused, since a quantiser has no place in a spec."""

from __future__ import annotations

from typing import Any, NoReturn

from understudy.errors import UnsupportedFakeTensorException
from understudy.rules.registry import rule

QUANTISING = (
    "quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_tensor.tensors",
    "quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized", "empty_quantized", "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
)  # fmt: skip


def _refused(name: str) -> None:
    @rule(name)
    def refused(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedFakeTensorException(
            f"{name.partition('.')[0]}: quantised tensors carry a quantiser that has no stand-in; "
            "torch.fake_quantize_per_tensor_affine and torch.ops.quantized_decomposed compute with plain tensors"
        )


for _name in QUANTISING:
    _refused(_name)
