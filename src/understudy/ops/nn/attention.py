"""Scaled dot-product attention on CPU, and the math path of any device; encoders with padding.

The shapes of attention are (batch, heads, length, width).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from understudy._torch import attention_backends
from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.random import check_probability
from understudy.ops.registry import rule
from understudy.ops.shared.dtypes import HALVES, check_dtype, check_one_dtype
from understudy.ops.traits.caching import whole_result
from understudy.shapes.node import Shape
from understudy.spec import TensorSpec, broadcast_shapes, check_expandable, preserved_copy, same_shape
from understudy.spec.call import Value

Function = Callable[..., object]
aten = torch.ops.aten

Maybe = TensorSpec | None


def heads_inside(spec: TensorSpec, shape: Shape | None = None) -> TensorSpec:
    """A new tensor with the memory order (batch, length, heads, width)."""
    batch, heads, length, width = spec.shape if shape is None else shape
    stride = (length * heads * width, width, heads * width, 1)
    return spec.like((batch, heads, length, width), stride=stride)


def without_gradient_none(results: int) -> Callable[[Function], Function]:
    """For the rule of a backward pass: where no gradient reaches the output, it gives none back."""

    def wrap(backward: Function) -> Function:
        @functools.wraps(backward)
        def backward_or_none(grad: Maybe, *rest: object, **settings: object) -> object:
            return (None,) * results if grad is None else backward(grad, *rest, **settings)

        return backward_or_none

    return wrap


@rule("_scaled_dot_product_flash_attention_for_cpu")
def flash_on_cpu(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Maybe = None, scale: float | None = None,
) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
    _check_flash(query, key, value, dropout_p)
    if attn_mask is not None:
        _check_mask(attn_mask, query, key)
    batch, heads, length, _ = query.shape
    dtype = torch.float32 if query.dtype in HALVES else query.dtype
    logsumexp = query.like((batch, heads, length), stride=(length * heads, 1, heads), dtype=dtype)
    return preserved_copy(query), logsumexp


def _check_flash(query: TensorSpec, key: TensorSpec, value: TensorSpec, dropout_p: float) -> None:
    what = "scaled_dot_product_attention"
    for operand in (query, key, value):
        if operand.ndim != 4:
            raise ShapeMismatch(f"{what}: expected (batch, heads, length, width), got {operand}")
        if operand.shape[3] != query.shape[3]:
            raise ShapeMismatch(f"{what}: {query} and {operand} differ in width")
    if dropout_p != 0:
        raise ArgumentError(f"{what}: the CPU kernel has no dropout")
    check_one_dtype(what, query, key, value)
    check_dtype(what, query.dtype, "f")


def _check_mask(mask: TensorSpec, query: TensorSpec, key: TensorSpec) -> None:
    if mask.dtype not in (query.dtype, torch.float32):
        raise DtypeError(
            f"scaled_dot_product_attention: expected a mask of bool or {query.dtype}, got {mask}"
        )
    if mask.ndim not in (2, 4):
        raise ShapeMismatch(f"scaled_dot_product_attention: expected a mask of 2 or 4 dimensions, got {mask}")
    scores = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    check_expandable(mask.shape, scores, "scaled_dot_product_attention")


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
@without_gradient_none(results=3)
def flash_on_cpu_backward(
    grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, out: TensorSpec,
    logsumexp: TensorSpec, dropout_p: float, is_causal: bool, *, attn_mask: Maybe = None,
    scale: float | None = None,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    _check_flash(query, key, value, dropout_p)
    if not same_shape(grad.shape, out.shape):
        raise ShapeMismatch(
            f"scaled_dot_product_attention backward: gradient shape {grad} does not match output {out}"
        )
    return heads_inside(query), heads_inside(key), heads_inside(value)


@rule("_scaled_dot_product_attention_math")
def math_attention(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_mask: Maybe = None, dropout_p: float = 0.0,
    is_causal: bool = False, dropout_mask: Maybe = None, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if query.ndim < 2 or dropout_mask is not None:
        return NotImplemented
    if dropout_p > 0:
        check_probability(dropout_p)
    what = "scaled_dot_product_attention"
    check_one_dtype(what, query, key, value)
    if query.shape[-1] != key.shape[-1]:
        raise ShapeMismatch(f"{what}: {query} and {key} differ in width")
    if key.shape[-2] != value.shape[-2]:
        raise ShapeMismatch(f"{what}: {key} and {value} differ in length")
    lead = _lead_of_groups(query, key, value) if enable_gqa else None
    if lead is None:
        lead = broadcast_shapes(query.shape[:-2], key.shape[:-2])
    weights = query.like((*lead, query.shape[-2], key.shape[-2]))
    if attn_mask is not None:
        check_expandable(attn_mask.shape, weights.shape, what)  # eager adds it to the weights in place
    if not enable_gqa:
        lead = broadcast_shapes(lead, value.shape[:-2])
    return query.like((*lead, query.shape[-2], value.shape[-1])), weights


@rule("_native_multi_head_attention")
def without_weights(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, embed_dim: int, num_head: int, qkv_weight: TensorSpec,
    qkv_bias: TensorSpec, proj_weight: TensorSpec, proj_bias: TensorSpec, mask: Maybe = None,
    need_weights: bool = True, average_attn_weights: bool = True, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """Without need_weights the weights are None. Torch's meta kernel returns an empty tensor for them."""
    is_plain = query is key is value and query.layout is torch.strided and query.ndim == 3
    if (
        need_weights
        or not is_plain
        or query.shape[2] != embed_dim
        or qkv_weight.shape != (3 * embed_dim, embed_dim)
    ):
        return NotImplemented
    check_one_dtype("multi-head attention", query, qkv_weight, qkv_bias, proj_weight, proj_bias)
    return query.like(), Value(None)


def _lead_of_groups(query: TensorSpec, key: TensorSpec, value: TensorSpec) -> Shape:
    """Each head of key and value serves a group of heads of the query."""
    if query.ndim < 3:
        raise ShapeMismatch(
            f"scaled_dot_product_attention: enable_gqa needs at least 3 dimensions, got {query}"
        )
    heads = query.shape[-3]
    for operand in (key, value):
        if operand.shape[-3] == 0 or heads % operand.shape[-3] != 0:
            raise ShapeMismatch(
                f"scaled_dot_product_attention: the heads of {query} can't be grouped by {operand}"
            )
    return (*broadcast_shapes(query.shape[:-3], key.shape[:-3]), heads)


@rule("scaled_dot_product_attention")
def attention(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_mask: Maybe = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Reaches the dispatcher undecomposed in inference mode. The kernels differ only in the strides of the result, so
    where all have the same ones (a contiguous query on CPU), the rule can answer."""
    if (
        query.device.type != "cpu"
        or query.ndim != 4
        or not query.is_contiguous
        or not same_shape(query.stride, query.like().stride)
    ):
        return NotImplemented
    if value.ndim != 4 or value.shape[3] != query.shape[3] or (attn_mask is not None and attn_mask.ndim < 2):
        return NotImplemented
    if query.is_empty:
        return NotImplemented  # which strides it has depends on the kernel
    result = math_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
    return result if result is NotImplemented else result[0]


@whole_result("scaled_dot_product_attention")
def whole_attention(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_mask: Maybe = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The fused kernel of the CPU takes heads of one shape whose elements lie side by side. It does not support
    dropout, which uses the math path with a contiguous result."""
    if query.device.type != "cpu" or query.ndim != 4 or enable_gqa or not all(attention_backends()):
        return NotImplemented
    if is_causal and attn_mask is not None:
        return NotImplemented
    if (
        not query.shape == key.shape == value.shape
        or not 0 <= dropout_p < 1
        or (dropout_p and query.dtype in HALVES)
    ):
        return NotImplemented
    result, weights = math_attention(query, key, value, attn_mask, dropout_p)
    if weights.numel >= MOST_WEIGHTS or (attn_mask is not None and attn_mask.ndim not in (2, 4)):
        return NotImplemented
    if dropout_p:
        return result
    are_rows = query.stride[3] == key.stride[3] == value.stride[3] == 1
    return flash_on_cpu(query, key, value)[0] if are_rows and query.shape[3] > 1 else NotImplemented


MOST_WEIGHTS = 1 << 50
"""Far more than there is memory for, and few enough to be counted in bytes."""


# --- `nn.TransformerEncoder` with padding, where eager removes the padding from the batch -------------------
# In eval mode and without gradients, eager converts the batch to a nested tensor, runs the layers on it, and puts zeros
# where the padding was. The lengths are data-dependent. Here the layers run on the padded batch, with the padding
# masked in attention, and the padding is then set to zero: the same values, except for the rounding of the fused
# kernels.

DEVICES = ("cpu", "cuda", "xpu")


def drops_padding(encoder: Any, src: torch.Tensor, mask: object, padding: object) -> bool:
    """Whether eager may remove the padding. It does so only if the padding comes last in each row, which is
    data-dependent."""
    if padding is None or mask is not None or not getattr(encoder, "use_nested_tensor", False):
        return False
    first = encoder.layers[0]
    is_off = first.training or torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled()
    if is_off or src.dim() != 3 or src.is_nested or src.device.type not in DEVICES:
        return False
    parts = (first.self_attn, first.norm1, first.norm2, first.linear1, first.linear2)
    tensors = [src, *(parameter for part in parts for parameter in part.parameters())]
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def encode(encoder: Any, src: Any, padding: Any) -> Any:
    """The result of eager. In a mask of numbers, every non-zero element is padding."""
    kept = padding.logical_not()
    if getattr(encoder, "mask_check", True):
        dropped = kept.logical_not() & (kept.cumprod(1) == kept).all()
    else:  # unchecked by eager: only the number of elements counts
        padding = dropped = torch.arange(src.shape[1], device=src.device) >= kept.sum(1, keepdim=True)
    output = src
    for layer in encoder.layers:
        output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=padding)
    output = output.masked_fill(dropped.unsqueeze(-1), 0.0)
    return output if encoder.norm is None else encoder.norm(output)
