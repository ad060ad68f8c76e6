"""What autocast does with the arguments of an operator, and which way an operator goes on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from understudy.ops.registry import Trait


class Casting(Enum):
    """What becomes of floating-point arguments while autocast is on."""

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


casting: Trait[Casting] = Trait("autocast")

for _casting, _names in {
    Casting.LOWER: (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv "
    "linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention"
    ),
    Casting.FLOAT32: (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm "
    "frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d"
    ),
    Casting.FLOAT32_BY_DTYPE: (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
    ),
    Casting.WIDEST: (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"
    ),
    Casting.REFUSED: "binary_cross_entropy",
}.items():
    casting.register(_casting, *_names.split())

accelerator_path: Trait[Callable[..., Any]] = Trait("the way it goes on an accelerator")
"""C++ chooses by the device that it sees, which is no accelerator here. A function that returns `NotImplemented` where the
common way is the right one."""

WITHOUT_AUTOCAST = {"ipu": "what switches its autocast on is what switches these kernels on"}
"""Device types."""
