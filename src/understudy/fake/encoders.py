"""`nn.TransformerEncoder` with padding, where eager takes the padding out of the batch.

In eval mode and without gradients, eager makes rows of their own lengths of a batch, runs the layers on them, and puts
zeros where the padding was. Which rows those are is data. Here the layers run on the whole batch, with the padding masked
out of their attention, and the same places are made zero: the same numbers, but for the rounding of the fused kernels.
"""

from __future__ import annotations

from typing import Any

import torch

DEVICES = ("cpu", "cuda", "xpu")


def drops_padding(encoder: Any, src: Any, mask: Any, padding: Any) -> bool:
    """Whether eager takes the padding out. It does so only if the padding comes last in each row, which is data."""
    if padding is None or mask is not None or not getattr(encoder, "use_nested_tensor", False):
        return False
    first = encoder.layers[0]
    is_off = first.training or torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled()
    if is_off or src.dim() != 3 or src.is_nested or src.device.type not in DEVICES:
        return False
    parts = (first.self_attn, first.norm1, first.norm2, first.linear1, first.linear2)
    tensors = [src, *(parameter for part in parts for parameter in part.parameters())]
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def encoded(encoder: Any, src: Any, padding: Any) -> Any:
    """What eager gives. A mask of numbers marks as padding whatever is not zero."""
    kept = padding.logical_not()
    if getattr(encoder, "mask_check", True):
        dropped = kept.logical_not() & (kept.cumprod(1) == kept).all()
    else:  # taken on trust: only how many there are is looked at
        padding = dropped = torch.arange(src.shape[1], device=src.device) >= kept.sum(1, keepdim=True)
    output = src
    for layer in encoder.layers:
        output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=padding)
    output = output.masked_fill(dropped.unsqueeze(-1), 0.0)
    return output if encoder.norm is None else encoder.norm(output)
