"""Composite operators that go another way on an accelerator.

C++ chooses by the device that it sees, and a stand-in for `cuda:0` shows it a meta device. So these functions choose,
for tensors that *say* they are on such a device, as C++ does for real ones. They return `NotImplemented` where the
common way is the right one. The kernels of `autocast.py` ask them, because those see every call on such tensors first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from understudy import _torch
from understudy.errors import FakeTensorDeviceMismatchError
from understudy.fake.boundary import with_line

aten = torch.ops.aten

FUSED_DROPOUT = frozenset({"cuda", "xpu"})
HALF = (torch.float16, torch.bfloat16)
WIDEST_FLASH_HEAD = 256


def dropout(x: torch.Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1 or x.numel() == 0 or _torch.inner_device(x).type not in FUSED_DROPOUT:
        return NotImplemented
    return aten.native_dropout(x, p, train)[0]


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The kernels of a recent CUDA device, in torch's order: flash, memory-efficient, plain mathematics."""
    _check_devices(query=query, key=key, value=value)
    if not _fused_attention_takes(query, key, value, is_causal, attn_mask):
        return NotImplemented
    if _flash_takes(query, key, value, attn_mask, enable_gqa):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _efficient_takes(query, key, value):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return NotImplemented


def _check_devices(**tensors: torch.Tensor) -> None:
    """C++ would name the devices that stand for others."""
    devices = {name: _torch.inner_device(tensor) for name, tensor in tensors.items()}
    (first, device), *others = devices.items()
    for name, other in others:
        if other != device:
            error = FakeTensorDeviceMismatchError(
                f"attention: {first} is on {device}, but {name} is on {other}"
            )
            raise with_line(error, "scaled_dot_product_attention", ", ".join(map(str, devices.values())))


def _fused_attention_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None
) -> bool:
    if _torch.inner_device(query).type != "cuda" or (is_causal and mask is not None):
        return False
    alike = query.dtype is key.dtype is value.dtype and query.dim() == key.dim() == value.dim() == 4
    return alike and all(
        t.shape[0] == query.shape[0] and t.shape[2] > 0 and t.stride(-1) == 1 for t in (query, key, value)
    )


def _flash_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, enable_gqa: bool
) -> bool:
    heads, width = query.shape[1], query.shape[3]
    same_heads = heads == key.shape[1] == value.shape[1]
    grouped = enable_gqa and key.shape[1] == value.shape[1] and heads % key.shape[1] == 0
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and query.dtype in HALF
        and width == key.shape[3] == value.shape[3] <= WIDEST_FLASH_HEAD
        and (same_heads or grouped)
    )


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Heads are padded to a multiple of 8, and scaled as if they were not."""
    width = query.shape[3]
    scale = width**-0.5 if scale is None else scale
    missing = -width % 8
    if missing:
        query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :width] if missing else out


def _efficient_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*HALF, torch.float32)
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[3] == key.shape[3]
    )


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    bias = None if mask is None else _bias(mask, query, key)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, training, dropout_p, is_causal, scale=scale
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What is added to the scores, its rows laid out in multiples of 16 elements."""
    if mask.dtype is torch.bool:
        nothing = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, nothing, float("-inf"))
    missing = -mask.shape[-1] % 16
    if missing:
        mask = F.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


PATHS: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "scaled_dot_product_attention": attention,
}
