"""flash_attn: attention by torch's operators of the same kernels; the kernels beside it that it has in Triton.

Tensors are (batch, length, heads, width), or (total length, heads, width) where sequences lie one after the other. The
gradient of packed operands is put together from three, which the package's own kernel writes in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.simulation.library_kernels.launches import launch_kernel
from understudy.simulation.library_kernels.modules import Names, StandIn, refuse

VERSION = "2.8.3"
MULTIPLE = 8
"""Heads are padded to such a width."""


def _attend(
    q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Any, Any], longest: tuple[Any, Any], dropout_p: float,
    scale: float | None, causal: bool, window: tuple[int, int], wants_probabilities: bool,
) -> Any:  # fmt: skip
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if width % MULTIPLE:
        q, k, v = (F.pad(x, (0, MULTIPLE - width % MULTIPLE)) for x in (q, k, v))
    left, right = (None if size < 0 else size for size in window)
    rows, columns = (int(size) for size in longest)
    out, logsumexp, _, _, probabilities = torch.ops.aten._flash_attention_forward(
        q, k, v, *offsets, rows, columns, dropout_p, causal, wants_probabilities and dropout_p > 0,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    if out.shape[-1] != width:
        out = out[..., :width]
    return (out, logsumexp, probabilities) if wants_probabilities else out


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    longest = q.shape[1], k.shape[1]
    return _attend(
        q, k, v, (None, None), longest, dropout_p, softmax_scale, causal, window_size, return_attn_probs
    )


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    return _attend(
        q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal,
        window_size, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Any, *args: Any, **kwargs: Any
) -> Any:
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


# --- sequences without their padding --------------------------------------------------------------------------------


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    offsets = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        offsets,
        lengths.max().item(),
        used,
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    return torch.index_select(x, 0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


# --- kernels in Triton ----------------------------------------------------------------------------------------------


class _Rotary(torch.autograd.Function):
    """Keeps the tables, not its operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.inplace = inplace
        if inplace:
            ctx.mark_dirty(x)
        return _rotate(x, cos, sin, inplace)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.inplace), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, inplace: bool) -> Tensor:
    out = x if inplace else torch.empty_like(x)
    launch_kernel((x, cos, sin, out))
    return out


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    *rest: Any,
    **settings: Any,
) -> Tensor:
    result: Tensor = _Rotary.apply(x, cos, sin, inplace)  # type: ignore[no-untyped-call]
    return result


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits, the targets and a number for each row; the gradient may take the place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, inplace_backward: bool) -> Tensor:
        losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
        logsumexp = torch.empty_like(losses)
        launch_kernel((logits, labels, losses, logsumexp))
        ctx.save_for_backward(logits, labels, logsumexp)
        ctx.inplace_backward = inplace_backward
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, labels, logsumexp = ctx.saved_tensors
        result = logits if ctx.inplace_backward else torch.empty_like(logits)
        launch_kernel((grad, logits, labels, logsumexp, result))
        return result, None, None


class CrossEntropyLoss(torch.nn.Module):
    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0,
        lse_square_scale: float = 0.0, inplace_backward: bool = False, process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if process_group is not None or return_z_loss:
            refuse("flash_attn.losses.cross_entropy.CrossEntropyLoss with process_group or return_z_loss")()
        self.ignore_index, self.reduction, self.inplace_backward = ignore_index, reduction, inplace_backward

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Tensor:
        losses: Tensor = _CrossEntropy.apply(input, target, self.inplace_backward)  # type: ignore[no-untyped-call]
        if self.reduction == "mean":
            return losses.sum() / (target != self.ignore_index).sum()
        return losses.sum() if self.reduction == "sum" else losses


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, hidden_size: int, eps: float = 1e-5, **settings: Any) -> None:
        settings.pop("dropout_p", None)
        super().__init__(hidden_size, eps=eps, **settings)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


# --- the modules ----------------------------------------------------------------------------------------------------

FUNCTIONS = (
    flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func,
)  # fmt: skip
PADDING = unpad_input, pad_input, index_first_axis, index_put_first_axis


def make_modules() -> Mapping[str, Names]:
    functions = {function.__name__: function for function in FUNCTIONS}
    return {
        "flash_attn": functions,
        "flash_attn.flash_attn_interface": functions,
        "flash_attn.bert_padding": {function.__name__: function for function in PADDING},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {
            "apply_rotary_emb": apply_rotary_emb,
            "apply_rotary_emb_func": apply_rotary_emb,
        },
        "flash_attn.losses": {},
        "flash_attn.losses.cross_entropy": {"CrossEntropyLoss": CrossEntropyLoss},
        "flash_attn.ops": {},
        "flash_attn.ops.rms_norm": {"RMSNorm": RMSNorm, "rms_norm": rms_norm},
    }


FLASH_ATTN = StandIn(VERSION, make_modules, refuse)
