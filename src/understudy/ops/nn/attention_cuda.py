"""Fused attention kernels of CUDA devices, and how composite operators choose between them.

None of them runs on CPU, so their outcomes follow torch's source, not experiments. Undefined outputs are None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from understudy import _torch
from understudy.errors import FakeTensorDeviceMismatchError, ShapeMismatch
from understudy.ops.nn.attention import heads_inside, without_gradient_none
from understudy.ops.registry import rule
from understudy.ops.traits.autocast import accelerator_path
from understudy.shapes.node import Shape, Size
from understudy.spec import TensorSpec, preserved_copy, same_shape
from understudy.spec.device_facts import DeviceFacts
from understudy.spec.error_context import with_line

Maybe = TensorSpec | None


def _check_heads(query: TensorSpec, key: TensorSpec, value: TensorSpec) -> None:
    for operand in (query, key, value):
        if operand.ndim != 4:
            raise ShapeMismatch(f"attention: expected (batch, heads, length, width), got {operand}")
    if query.shape[3] != key.shape[3]:
        raise ShapeMismatch(f"attention: {query} and {key} differ in width")
    if key.shape[2] != value.shape[2]:
        raise ShapeMismatch(f"attention: {key} and {value} differ in length")


def _float(query: TensorSpec, shape: Shape) -> TensorSpec:
    return query.like(shape, dtype=torch.float32)


def _seed(query: TensorSpec) -> TensorSpec:
    return query.like((), dtype=torch.int64)


def _seed_on_cpu(query: TensorSpec) -> TensorSpec:
    """Outside of CUDA graphs, the state of the generator stays on the CPU."""
    return query.like((), dtype=torch.int64, device=torch.device("cpu"))


def _random_state(query: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """Flash attention stores seed and offset in one tensor, and returns an empty second one."""
    return query.like((2,), dtype=torch.uint64), query.like((), dtype=torch.uint64)


def _pad_size(size: Any, multiple: int) -> Any:
    return (size + multiple - 1) // multiple * multiple


def _debug_mask(
    query: TensorSpec, batch: object, heads: object, rows: Any, columns: Any, wanted: bool
) -> TensorSpec:
    if not wanted:
        return query.like((0,))
    block = 128 if query.shape[-1] > 64 else 256
    if columns <= 128:
        width: Any = 128
    elif columns <= 256:
        width = 256
    else:
        width = (rows + block - 1) // block
    return query.like((batch, heads, rows, width))


# --- flash


@rule("_scaled_dot_product_flash_attention")
def flash(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[object, ...]:  # fmt: skip
    _check_heads(query, key, value)
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    mask = _debug_mask(query, batch, heads, rows, columns, return_debug_mask)
    logsumexp = _float(query, (batch, heads, rows))
    return (preserved_copy(query), logsumexp, None, None, rows, columns, *_random_state(query), mask)


@rule("_flash_attention_forward")
def flash_forward(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, cum_seq_q: Maybe, cum_seq_k: Maybe, max_q: Size,
    max_k: Size, dropout_p: float, is_causal: bool, return_debug_mask: bool, **settings: object,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """On (batch, length, heads, width), or on (total length, heads, width) with offsets."""
    heads = query.shape[-2]
    if cum_seq_q is None:
        batch, rows, columns = query.shape[0], query.shape[1], key.shape[1]
        logsumexp = _float(query, (batch, heads, rows))
    else:
        batch, rows = cum_seq_q.numel - 1, max_q
        columns = max_k if cum_seq_k is not None else key.shape[1]
        logsumexp = _float(query, (heads, query.shape[0]))
    mask = _debug_mask(query, batch, heads, rows, columns, return_debug_mask)
    return (preserved_copy(query), logsumexp, *_random_state(query), mask)


@rule(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_flash_attention_backward",
)
@without_gradient_none(results=3)
def flash_backward(
    grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, *rest: object, **settings: object
) -> tuple[TensorSpec, ...]:
    return preserved_copy(query), preserved_copy(key), preserved_copy(value)


# --- flex attention, compiled


@rule("understudy::flex_attention")
def flex(query: TensorSpec, key: TensorSpec, value: TensorSpec) -> tuple[TensorSpec, ...]:
    """The result in the order of the query's dimensions, and the logarithms of the sums of scores."""
    _check_heads(query, key, value)
    batch, heads, rows, _ = query.shape
    shape = (batch, heads, rows, value.shape[3])
    result = preserved_copy(query) if shape == query.shape else heads_inside(query, shape)
    return result, _float(query, (batch, heads, rows))


@rule("understudy::flex_attention_backward")
def flex_backward(
    grad: TensorSpec,
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    out: TensorSpec,
    logsumexp: TensorSpec,
) -> tuple[TensorSpec, ...]:
    return preserved_copy(query), preserved_copy(key), preserved_copy(value)


# --- memory-efficient


@rule("_scaled_dot_product_efficient_attention")
def efficient(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_bias: Maybe, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    _check_heads(query, key, value)
    batch, heads, rows, _ = query.shape
    result = heads_inside(query, (batch, heads, rows, value.shape[3]))
    kept = _pad_size(rows, 32) if compute_log_sumexp else 0
    return result, _float(query, (batch, heads, kept)), _seed_on_cpu(query), _seed_on_cpu(query)


@rule("_scaled_dot_product_efficient_attention_backward")
@without_gradient_none(results=4)
def efficient_backward(
    grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_bias: Maybe, out: TensorSpec,
    logsumexp: TensorSpec, philox_seed: TensorSpec, philox_offset: TensorSpec, dropout_p: float,
    grad_input_mask: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Maybe, ...]:  # fmt: skip
    for_bias = _gradient_of_bias(attn_bias) if attn_bias is not None and grad_input_mask[3] else None
    return heads_inside(query), heads_inside(key), heads_inside(value), for_bias


def _gradient_of_bias(bias: TensorSpec) -> TensorSpec:
    """A slice of a buffer whose rows are padded to a multiple of 16 elements."""
    padded = bias.like((*bias.shape[:-1], _pad_size(bias.shape[-1], 16)))
    return bias.like(stride=padded.stride)


@rule("_efficient_attention_forward")
def efficient_forward(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, bias: Maybe, cu_seqlens_q: Maybe, cu_seqlens_k: Maybe,
    max_seqlen_q: object, max_seqlen_k: object, dropout_p: float, custom_mask_type: int,
    compute_log_sumexp: bool = False, **settings: object,
) -> tuple[object, ...]:  # fmt: skip
    batch, rows, heads, _ = query.shape
    result = query.like((batch, rows, heads, value.shape[3]))
    longest = rows if cu_seqlens_q is None else max_seqlen_q
    sequences = batch if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    kept = _pad_size(longest, 32) if compute_log_sumexp else 0
    logsumexp = _float(query, (sequences, heads, kept))
    columns = key.shape[1] if max_seqlen_k is None else max_seqlen_k
    return result, logsumexp, _seed_on_cpu(query), _seed_on_cpu(query), longest, columns


@rule("_efficient_attention_backward")
@without_gradient_none(results=4)
def efficient_attention_backward(
    grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, bias: Maybe, *rest: object,
    shared_storage_dqdkdv: bool = False, **settings: object,
) -> Any:  # fmt: skip
    if shared_storage_dqdkdv:
        return NotImplemented  # three views of one new storage
    for_bias = query.like((), dtype=torch.float32) if bias is None else _gradient_of_bias(bias)
    return preserved_copy(query), preserved_copy(key), preserved_copy(value), for_bias


# --- cuDNN, and devices that bring their own


def _laid_out_like(query: TensorSpec, shape: Shape) -> TensorSpec:
    """A dense tensor with the memory order of the query."""
    if same_shape(query.shape, shape):
        return preserved_copy(query)
    order = sorted(range(len(shape)), key=lambda dim: query.stride[dim], reverse=True)
    stride: list[Any] = [0] * len(shape)
    step: Any = 1
    for dim in reversed(order):
        stride[dim] = step
        step = step * shape[dim]
    return query.like(shape, stride=stride)


@rule("_scaled_dot_product_cudnn_attention")
def cudnn(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_bias: Maybe, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
) -> tuple[object, ...]:  # fmt: skip
    _check_heads(query, key, value)
    batch, heads, rows, _ = query.shape
    result = _laid_out_like(query, (batch, heads, rows, value.shape[3]))
    logsumexp = _float(query, (batch, heads, rows, 1))
    return result, logsumexp, None, None, rows, key.shape[2], _seed(query), _seed(query), None


@rule("_scaled_dot_product_fused_attention_overrideable")
def overrideable(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_bias: Maybe = None, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[object, ...]:  # fmt: skip
    if query.ndim not in (3, 4):
        raise ShapeMismatch(f"attention: expected 3 or 4 dimensions, got {query}")
    heads, rows = query.shape[-3:-1]
    batch = query.shape[0] if query.ndim == 4 else 1
    result = _laid_out_like(query, (*query.shape[:-1], value.shape[-1]))
    logsumexp = _float(query, (batch, heads, rows))
    return result, logsumexp, None, None, rows, key.shape[-2], _seed(query), _seed(query), None


@rule("_scaled_dot_product_fused_attention_overrideable_backward")
def overrideable_backward(
    grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_bias: Maybe, *rest: object,
    **settings: object,
) -> tuple[Maybe, ...]:  # fmt: skip
    for_bias = None if attn_bias is None else preserved_copy(attn_bias)
    return preserved_copy(query), preserved_copy(key), preserved_copy(value), for_bias


# --- which of them a call gets: see `accelerator_path`

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WIDEST_FLASH_HEAD = 256


class AttentionCall(NamedTuple):
    """The arguments of attention, by the names of torch's `SDPAParams`, which the `…_takes` functions take as well."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False


@accelerator_path("scaled_dot_product_attention")
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The kernels in torch's order: cuDNN where it is preferred, flash, memory-efficient, math."""
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    _check_devices(query=query, key=key, value=value)
    if not _fused_attention_takes(call):
        return NotImplemented
    facts = find_facts(query)
    if _cudnn_takes(call, facts):
        return _cudnn(call, scale)
    if not (is_causal and query.shape[2] != key.shape[2]) and flash_takes(call, facts):
        return _flash(call, scale)
    return _efficient(call, scale) if efficient_takes(call, facts) else NotImplemented


def _check_devices(**tensors: torch.Tensor) -> None:
    """The error of C++ would name the meta devices that stand for others."""
    devices = {name: _torch.inner_device(tensor) for name, tensor in tensors.items()}
    (first, device), *others = devices.items()
    for name, other in others:
        if other != device:
            error = FakeTensorDeviceMismatchError(
                f"attention: {first} is on {device}, but {name} is on {other}"
            )
            raise with_line(error, "scaled_dot_product_attention", ", ".join(map(str, devices.values())))


def _fused_attention_takes(call: AttentionCall) -> bool:
    query, key, value, mask, *_ = call
    if _torch.inner_device(query).type != "cuda" or (
        mask is not None and (call.is_causal or mask.stride(-1) != 1)
    ):
        return False
    alike = query.dtype is key.dtype is value.dtype and query.dim() == key.dim() == value.dim() == 4
    return alike and all(
        t.shape[0] == query.shape[0] and t.shape[2] > 0 and t.stride(-1) == 1 for t in (query, key, value)
    )


RECENT_CARD = DeviceFacts(kind="cuda", capability=(8, 0))
"""The facts of an unknown CUDA device."""
CUDNN_FIRST_ON = (9, 10)
"""Major numbers of the capabilities on which cuDNN's kernel is the first choice, after this version of cuDNN."""
CUDNN_FIRST_AFTER = 91500
CUDNN_MOST = 65_535
"""Sequences, and heads of each."""
FIRST_WITH_FLASH = (8, 0)
FIRST_WITH_BFLOAT16 = (8, 0)


def find_facts(tensor: torch.Tensor) -> DeviceFacts:
    """The facts of the simulated device that a tensor is on."""
    facts = _torch.simulated_facts(tensor)
    return facts if isinstance(facts, DeviceFacts) else RECENT_CARD


def _heads_fit(call: AttentionCall) -> bool:
    heads, of_keys, of_values = (t.shape[1] for t in (call.query, call.key, call.value))
    return heads == of_keys == of_values or (
        call.enable_gqa and of_keys == of_values and heads % of_keys == 0
    )


def _needs_gradient(call: AttentionCall) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in (call.query, call.key, call.value))


def _cudnn_takes(call: AttentionCall, facts: DeviceFacts) -> bool:
    query, key, value, mask, dropout, *_ = call
    if facts.kind != "cuda" or facts.capability[0] not in CUDNN_FIRST_ON or facts.cudnn <= CUDNN_FIRST_AFTER:
        return False
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    widths = (query.shape[3], value.shape[3])
    widest = 256 if facts.capability == (9, 0) else 128
    if facts.capability[0] == 10 and widths == (192, 128):
        widest = 192
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if is_deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    return (
        query.dtype in HALF
        and query.shape[3] == key.shape[3]
        and all(width <= widest and width % 8 == 0 for width in widths)
        and key.shape[2] > 1
        and not (query.shape[2] == 1 and dropout > 0)
        and 16 * dropout % 1 == 0  # distinct for cuDNN
        and max(query.shape[:2]) <= CUDNN_MOST
        and _heads_fit(call)
        and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
    )


def _cudnn(call: AttentionCall, scale: float | None) -> torch.Tensor:
    query, key, value, mask, dropout, is_causal, _ = call
    if mask is not None:
        mask = _as_bias(mask, query).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, _needs_gradient(call), dropout, is_causal, False, scale=scale
    )[0]


def flash_takes(call: AttentionCall, facts: DeviceFacts) -> bool:
    query, width = call.query, call.query.shape[3]
    if facts.kind == "cuda" and facts.capability < FIRST_WITH_FLASH:
        return False
    has_little_shared_memory = (8, 6) <= facts.capability <= (8, 9) or facts.capability >= (12, 0)
    has_no_backward = 192 < width <= 224 or (width > 224 and call.dropout > 0)
    if has_little_shared_memory and has_no_backward and _needs_gradient(call):
        return False
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and call.attn_mask is None
        and query.dtype in HALF
        and width == call.key.shape[3] == call.value.shape[3] <= WIDEST_FLASH_HEAD
        and _heads_fit(call)
    )


def _flash(call: AttentionCall, scale: float | None) -> torch.Tensor:
    """Heads are padded to a multiple of 8; the scale is that of the unpadded width."""
    query, key, value, _, dropout, is_causal, _ = call
    width = query.shape[3]
    scale = width**-0.5 if scale is None else scale
    missing = -width % 8
    if missing:
        query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[
        0
    ]
    return out[..., :width] if missing else out


def efficient_takes(call: AttentionCall, facts: DeviceFacts) -> bool:
    query, key, value = call.query, call.key, call.value
    is_old = facts.kind == "cuda" and facts.capability < FIRST_WITH_BFLOAT16
    dtypes = (torch.float16, torch.float32) if is_old else (*HALF, torch.float32)
    multiple = _head_multiple(query.dtype, facts)
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in dtypes
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[3] == key.shape[3]
        and query.shape[3] % multiple == 0
        and value.shape[3] % multiple == 0
        and (is_old or all(tensor.storage_offset() % multiple == 0 for tensor in (query, key, value)))
    )


def _head_multiple(dtype: torch.dtype, facts: DeviceFacts) -> int:
    """The width of a head must be a multiple of this, because matrix units read 16 bytes at a time."""
    is_half = dtype in HALF
    has_units = facts.capability >= (8, 0) or (facts.capability >= (7, 0) and is_half)
    return (8 if is_half else 4) if has_units else 1


def _efficient(call: AttentionCall, scale: float | None) -> torch.Tensor:
    query, key, value, mask, dropout, is_causal, _ = call
    bias = None if mask is None else _bias(mask, query, key)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, _needs_gradient(call), dropout, is_causal, scale=scale
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What is added to the scores, its rows beginning at multiples of 8 elements."""
    mask = _as_bias(mask, query)
    if mask.stride(-1) != 1 or any(step % 8 for step in mask.stride()[:-1]):
        mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:3], key.shape[2])


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    nothing = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, nothing, float("-inf"))
