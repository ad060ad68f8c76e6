"""What autocast does with the arguments of an operator, and the path of a composite operator on an accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from understudy import _torch
from understudy._torch import OpOverload
from understudy.ops.registry import OpFacts, record_of


class Casting(Enum):
    """What happens to floating-point arguments while autocast is enabled."""

    LOWER = auto()
    """They are cast to the lower precision."""
    FLOAT32 = auto()
    """They are cast to float32."""
    FLOAT32_BY_DTYPE = auto()
    """The operator takes `dtype=`: it computes in float32 without a copy of its input."""
    WIDEST = auto()
    """They are cast to the widest dtype among them."""
    REFUSED = auto()
    """The operator is unsafe in lower precision."""


casting = OpFacts.casting

for _casting, _names in {
    Casting.LOWER: (
        "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
        "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv "
        "linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell "
        "rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention _scaled_dot_product_flash_attention _thnn_fused_lstm_cell "
        "_thnn_fused_gru_cell cudnn_convolution cudnn_convolution_transpose"
    ),
    Casting.FLOAT32: (
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
        "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm "
        "frobenius_norm.dim norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss "
        "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
        "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
        "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    ),
    Casting.FLOAT32_BY_DTYPE: (
        "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord sum sum.dim_IntList"
    ),
    Casting.WIDEST: (
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
    ),
    Casting.REFUSED: "binary_cross_entropy",
}.items():
    casting.register(_casting, *_names.split())
if _torch.has_operator("linalg_matrix_sqrth"):  # since torch 2.14
    casting.register(Casting.FLOAT32, "linalg_matrix_sqrth")

caller_in_kernel = OpFacts.caller_in_kernel
caller_in_kernel.register("linalg_pinv", "linalg_pinv.atol_rtol_tensor")
caller_in_kernel.register("bilinear", "_trilinear")


def is_cast_in_kernel(op: OpOverload, device_types: Iterable[str]) -> bool:
    """Whether autocast, if enabled, casts the operators that the kernel of `op` calls."""
    caller = record_of(op).caller_in_kernel
    if caller is None:
        return False
    return not any(
        _torch.has_autocast_kernel(_torch.operator_named(caller), device_type) for device_type in device_types
    )


WITHOUT_AUTOCAST = {"ipu": "its autocast kernels are switched by the same flag"}
"""Device types."""

# --- Composite operators that take another path on an accelerator ----------------------------------------------
# C++ chooses by the native device, and a stand-in for `cuda:0` is natively a meta tensor. So these functions choose by
# the device that the stand-in reports, as C++ does for real tensors. They return `NotImplemented` where the common path
# is the right one. The kernels of `fake/kernels/autocast.py` call them, because those are first in the dispatch of such
# tensors. The one of attention is in `ops/nn/attention_cuda.py`.

accelerator_path = OpFacts.accelerator_path
aten = torch.ops.aten
FUSED_DROPOUT = frozenset({"cuda", "xpu"})
CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


@accelerator_path("dropout")
def dropout(x: Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1 or x.numel() == 0 or _torch.inner_device(x).type not in FUSED_DROPOUT:
        return NotImplemented
    return aten.native_dropout(x, p, train)[0]


@accelerator_path("softmax.int")
def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return aten._softmax(x, dim, True) if _is_widened(x, dtype) else NotImplemented


@accelerator_path("log_softmax.int")
def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return aten._log_softmax(x, dim, True) if _is_widened(x, dtype) else NotImplemented


def _is_widened(x: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether the kernel itself widens the input, as it does for float16 only."""
    return x.dtype is torch.float16 and dtype is torch.float32 and _torch.inner_device(x).type == "cuda"


@accelerator_path("ctc_loss.Tensor")
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """Lengths may be on the CPU, where C++ reads them; with subclasses, it computes with the tensors unchanged."""
    device = _torch.inner_device(log_probs)
    lengths = input_lengths, target_lengths
    if all(_torch.inner_device(tensor) == device for tensor in lengths):
        return NotImplemented
    moved = (tensor.to(device) for tensor in lengths)
    return aten.ctc_loss.Tensor(log_probs, targets, *moved, blank, reduction, zero_infinity)


# --- RMS normalisation: one kernel, which keeps its input and a number for each row


@accelerator_path("rms_norm")
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Only where memory is observed: the operator is a composite to C++, which sees a meta device, and has no gradient
    formula there."""
    if (
        _torch.inner_device(x).type != "cuda"
        or x.is_complex()
        or (weight is not None and weight.dtype is not x.dtype)
    ):
        return NotImplemented
    if not _is_observed(x) or torch.is_inference_mode_enabled() or _has_channels_last(x):
        return NotImplemented
    apply: Any = RMSNormKernel.apply
    return apply(x, tuple(normalized_shape), weight, eps)


def _is_observed(x: Tensor) -> bool:
    return getattr(_torch.active_fake_mode(), "is_observed", False) and not _torch.is_functorch_wrapped(x)


def _has_channels_last(x: Tensor) -> bool:
    return (
        x.dim() in (4, 5)
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=CHANNELS_LAST[x.dim() - 4])
    )


has_cuda_kernel = OpFacts.has_cuda_kernel
has_cuda_kernel.mark("_fused_rms_norm", "mish_backward")


@accelerator_path("mish_backward")
def mish_backward(grad: Tensor, x: Tensor) -> Any:
    """One kernel, as above, for calls without gradients."""
    if _torch.inner_device(x).type != "cuda" or torch.is_grad_enabled() or not _is_observed(x):
        return NotImplemented
    with _torch.below_autograd():
        return aten.mish_backward(grad, x)


class RMSNormKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        with _torch.below_autograd():
            result, rstd = aten._fused_rms_norm(x, normalized_shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.normalized_shape, ctx.eps = normalized_shape, eps
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient may be differentiated again
            result = _in_steps(x, ctx.normalized_shape, weight, ctx.eps)
            inputs = [tensor for tensor in (x, weight) if tensor is not None and tensor.requires_grad]
            found = iter(torch.autograd.grad(result, inputs, grad, create_graph=True))
            for_x, for_weight = (
                next(found) if t is not None and t.requires_grad else None for t in (x, weight)
            )
        else:
            wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
            for_x, for_weight = aten._fused_rms_norm_backward(
                grad, x, ctx.normalized_shape, rstd, weight, wanted
            )
        return for_x, None, for_weight, None


def _in_steps(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    result = x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + eps)
    return result if weight is None else result * weight
