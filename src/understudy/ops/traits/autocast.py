"""Autocast on devices that are not here.

C++ casts only tensors whose device it knows, and a stand-in for `cuda:0` is none of those. So stand-ins carry an
autocast dispatch key of their own (one that belongs to a backend without users: `AutocastIPU`), on which the kernels of
this file are registered. They ask torch whether autocast is on for the device that the tensors *say* they are on, cast
as torch documents for that operator, and go on below the key.
"""

from __future__ import annotations

LOWER_PRECISION = """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot
    linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention""".split()
FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d""".split()
FLOAT32_BY_DTYPE = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack".split()


BANNED = {"binary_cross_entropy": "unsafe in 16 bit: use binary_cross_entropy_with_logits"}


WITHOUT_AUTOCAST = {"ipu": "what switches its autocast on is what switches these kernels on"}
