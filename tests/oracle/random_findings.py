"""Single calls that random programs have found to differ, and their relatives: what is done, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[..., Any]
F8 = torch.float8_e4m3fn
C64 = torch.complex64
LARGEST = 2**63 - 1


def gaps(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2, *shape, dtype=dtype)[1]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


CALLS: dict[str, tuple[Call, list[Tensor]]] = {
    "an empty tensor that begins later": (lambda x, y: (x + 1, y), [ones(2, 0, 3).as_strided((0, 3), (3, 1), 3), ones(0, 3)]),
    "out= without elements, by columns": (
        lambda a, tau, x, out: torch.ormqr(a, tau, x, out=out), [ones(3, 3), ones(3), ones(3, 2), ones(0)]),
    "out= that is conjugated by a bit": (
        lambda a, p, b, out: torch.linalg.lu_solve(a, p, b, left=False, out=out),
        [ones(2, 2, dtype=C64), ones(2, dtype=torch.int32), ones(3, 2, dtype=C64), ones(3, 2, dtype=C64)]),
    "out= that is resized, conjugated by a bit": (
        lambda a, b, out: torch.linalg.solve(a, b, left=False, out=out),
        [torch.eye(2, dtype=C64), ones(3, 2, dtype=C64), ones(5, dtype=C64)]),
    "out= that a conjugated result is copied into": (
        lambda a, b, out: torch.linalg.solve(a, b, left=False, out=out),
        [torch.eye(2, dtype=C64), ones(3, 2, dtype=C64), ones(2, 3, dtype=C64).t()]),
    "out= of statistics that are not computed": (
        lambda x, w, a, b, c: torch.native_batch_norm(x, w, w, w, w, False, 0.1, 1e-5, out=(a, b, c)),
        [ones(3, 2, 4), ones(2), ones(3, 2, 4), ones(3), ones(0)]),
    "out= of statistics that are computed": (
        lambda x, w, a, b, c: torch.native_batch_norm(x, w, w, w, w, True, 0.1, 1e-5, out=(a, b, c)),
        [ones(3, 2, 4), ones(2), ones(3, 2, 4), ones(3), ones(0)]),
    "gradient of distances of nothing, with gaps": (
        lambda x, y: torch.autograd.grad(torch.cdist(x.requires_grad_(), y, 0.0).sum(), x),
        [ones(2, 4, 5)[::2][:0].data, ones(3, 5)]),
    "gradient of distances to nothing, with gaps": (
        lambda x, y: torch.autograd.grad(torch.cdist(x.requires_grad_(), y, 0.0).sum(), x), [ones(4, 4, 5)[::2].data, ones(0, 5)]),
    "a tolerance for each of many": (lambda x, tol: torch.linalg.pinv(x, rtol=tol), [torch.eye(4)[:, :3].clone(), ones(2, 1)]),
    "a tolerance for each of nothing": (lambda x, tol: torch.linalg.pinv(x, rtol=tol), [ones(0, 3), ones(2, 1)]),
    "a list of out= that is resized": (lambda x, a, b: torch.unbind_copy(x, out=[a, b]), [ones(2, 3), ones(4), ones(0)]),
    "a list of out= that fits": (lambda x, a, b: torch.unbind_copy(x, out=[a, b]), [ones(2, 3), ones(3), ones(3)]),
    "sizes of out= that fits": (
        lambda x, a, b: torch.split_with_sizes_copy(x, [1, 2], out=[a, b]), [ones(3, 3), ones(1, 3), ones(2, 3)]),
    "gradient of a softmax of no integers": (
        lambda x: torch.ops.aten._softmax_backward_data(x, x, 0, torch.float32), [ones(0, 2, dtype=torch.int64)]),
    "counts of nothing, with weights": (lambda x, w: torch.bincount(x, w, 4), [ones(0, dtype=torch.int64), ones(3)]),
    "one tensor for all of a list": (lambda x, a, b: torch.unbind_copy(x, out=[a, b, a]), [ones(3, 2), ones(0), ones(2)]),
    "one tensor for parts of different sizes": (
        lambda x, a: torch.split_with_sizes_copy(x, [1, 2], out=[a, a]), [ones(3, 2), ones(2, 2)]),
    "one tensor for parts of different sizes, the smaller last": (
        lambda x, a: torch.split_with_sizes_copy(x, [2, 1], out=[a, a]), [ones(3, 2), ones(1, 2)]),
    "statistics of nothing in a vector": (
        lambda x, m: torch.nn.functional.batch_norm(x, m, m, training=True), [ones(0), ones(0)]),
    "distances of one row of 16 bits": (torch.pdist, [ones(1, 5, dtype=torch.bfloat16)]),
    "a system of no equations of 16 bits": (
        torch.linalg.lu_solve, [ones(0, 0, dtype=torch.bfloat16), ones(0, dtype=torch.int32), ones(0, 0, dtype=torch.bfloat16)]),
    "a copy from beyond an expanded tensor": (lambda x: torch.as_strided_copy(x[:1].expand(3, 3), (2, 2), (1, 2)), [
        ones(3, 3, dtype=torch.bool)]),
    "out= by columns, and another that fits": (lambda x, a, b: torch.geqrf(x, out=(a, b)), [ones(3, 5), ones(0), ones(3)]),
    "a transposed kernel that makes nothing of nothing": (
        lambda x, w: torch.nn.functional.conv_transpose1d(x, w, padding=1), [ones(0, 2, 1), ones(2, 2, 2)]),
    "a transposed kernel of a batch that makes nothing": (
        lambda x, w: torch.nn.functional.conv_transpose1d(x, w, padding=1), [ones(2, 2, 1), ones(2, 2, 2)]),
    "indices of 32 bits, of all elements": (torch.take_along_dim, [ones(2, 3), ones(4, dtype=torch.int32)]),
    "windows that fit": (
        lambda x: torch.nn.functional.fractional_max_pool3d(x, 2, output_size=2, _random_samples=torch.zeros(1, 1, 3)),
        [ones(1, 1, 4, 4, 4)]),
    "bags that begin at 8-bit positions": (
        torch._embedding_bag_forward_only, [ones(5, 4), ones(6, dtype=torch.int32), torch.zeros(2, dtype=torch.int8)]),
    "bags of 8-bit indices": (
        torch._embedding_bag, [ones(5, 4), ones(6, dtype=torch.int8), torch.zeros(2, dtype=torch.int64)]),
    "residuals of vectors": (lambda a, b: torch.linalg.lstsq(a, b, driver="gels"), [torch.eye(3)[:, :2].repeat(2, 1, 1), ones(2, 3)]),
    "residuals of one vector": (lambda a, b: torch.linalg.lstsq(a, b, driver="gels"), [torch.eye(3)[:, :2].clone(), ones(3)]),
    "a complex weight that is real": (lambda x: torch.lerp(x, x, 1.2 + 0j), [ones(3)]),
    "a product that is added to its own column": (
        lambda x: x.view(2, 1).addr_(x, ones(1)), [ones(2)]),
    "a product that is added to its own number": (
        lambda x: x.view(1, 1).addr_(x, ones(1)), [ones(1)]),
    "padding that leaves no rows": (lambda x: torch.nn.functional.pad(x, (1, 1, -1, -3), mode="replicate"), [ones(2, 3, 4, 4)]),
    "gradient of padding that leaves no rows": (
        lambda x: torch.autograd.grad(torch.nn.functional.pad(x.requires_grad_(), (1, 1, -1, -3), mode="replicate").sum(), x),
        [ones(2, 3, 4, 4)]),
    "gradient of padding that leaves no columns": (
        lambda x: torch.autograd.grad(torch.nn.functional.pad(x.requires_grad_(), (-2, -1, 1, 1, 1, 1), mode="reflect").sum(), x),
        [ones(1, 2, 3, 3, 3)]),
    "gradient of distances to nothing, with an odd stride": (
        lambda x, y: torch.autograd.grad(torch.cdist(x.requires_grad_(), y, 1.0).sum(), x),
        [ones(20).as_strided((1, 4, 5), (7, 5, 1)), ones(0, 3, 5)]),
    "gradient of distances of columns to nothing": (
        lambda x, y: torch.autograd.grad(torch.cdist(x.requires_grad_(), y, 1.0).sum(), x), [ones(5, 4).T, ones(0, 3, 5)]),
    "a mask that is cleared by itself": (lambda x: x.__setitem__(x, False), [ones(3, 4, dtype=torch.bool)]),
    "rows beyond a table without columns": (lambda x: x[[0, 1]], [ones(1, 0)]),
    "writes beyond a table without columns": (lambda x: x.__setitem__([0, 4], 0), [ones(1, 0)]),
    "sums beyond a table without columns": (lambda x, y: x.index_add_(0, torch.tensor([0, 4]), y), [ones(1, 0), ones(2, 0)]),
    "exponents that are written to": (
        lambda x, y: torch.ldexp(x, y.view(()), out=y), [ones(5, 1, dtype=torch.int16), ones(1)]),
    "an expanded tensor moved onto itself": (
        lambda x: x.__setitem__(slice(1, None), x[:-1]), [ones(1, dtype=torch.int32).expand(4)]),
    "conjugates of real numbers, for inference": (
        lambda x: torch.inference_mode()(torch.conj_physical)(x), [ones(3)]),
    "no unsigned pivots": (torch.linalg.ldl_solve, [ones(0, 0), ones(0, dtype=torch.uint16), ones(0, 1)]),
    "the widest interval": (lambda x: x.uniform_(0, 65504), [ones(2, dtype=torch.float16)]),
}  # fmt: skip

REFUSED: dict[str, tuple[Call, list[Tensor]]] = {
    "factors of unsigned integers": (torch.lu_unpack, [ones(3, 3, dtype=torch.uint32), ones(3, dtype=torch.int32)]),
    "one value for a mask in another order": (lambda x: x.__setitem__(x.T, False), [ones(3, 3, dtype=torch.bool)]),
    "values for a mask that is written to": (lambda x, y: x.__setitem__(x, y), [ones(3, dtype=torch.bool), ones(3, dtype=torch.bool)]),
    "one value for an expanded tensor": (lambda x: x.__setitem__(slice(None), 2), [ones(4).expand(3, 4)]),
    "a tensor of another dtype than the recurrent layer": (
        lambda x: torch.nn.LSTM(4, 3)(x), [ones(5, 2, 4, dtype=torch.bfloat16)]),
    "more padding than half of a dilated kernel": (
        lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 2, dilation=2), [ones(1, 2, 6, 6)]),
    "a copy between expanded tensors": (lambda x, y: x.copy_(y), [ones(4).expand(3, 4), ones(4).expand(3, 4)]),
    "pivots beside unsigned integers": (
        lambda x, p: torch.lu_unpack(x, p, unpack_data=False), [ones(3, 3, dtype=torch.uint64), ones(3, dtype=torch.int32)]),
    "an interval that ends beyond its dtype": (lambda x: x.uniform_(1, LARGEST), [ones(2, dtype=torch.float16)]),
    "an interval of nothing that begins beyond its dtype": (lambda x: x.uniform_(-1e39, 0), [ones(0)]),
    "an interval that is wider than its dtype": (lambda x: x.uniform_(-3e38, 3e38), [ones(2, dtype=torch.bfloat16)]),
    "an interval without an end": (lambda x: x.uniform_(0, torch.inf), [ones(2, dtype=torch.float64)]),
    "an interval from nowhere": (lambda x: torch.ops.aten.uniform(x, torch.nan, 1), [ones(2)]),
    "bags of 8-bit indices at 8-bit positions": (
        torch._embedding_bag, [ones(5, 4), ones(6, dtype=torch.int8), torch.zeros(2, dtype=torch.int8)]),
    "bags that begin at fractions": (torch._embedding_bag_forward_only, [ones(5, 4), ones(6, dtype=torch.int64), torch.zeros(2)]),
    "a complex weight": (lambda x: torch.lerp(x, x, 1.2 + 0.1j), [ones(3, dtype=torch.float64)]),
    "a complex weight for nothing": (lambda x: torch.lerp(x, x, 1j), [ones(0)]),
    "distances of different floats": (torch.cdist, [ones(3, 5), ones(3, 5, dtype=torch.float64)]),
    "distances of different floats by products": (
        lambda x, y: torch.cdist(x, y, 2.0, "use_mm_for_euclid_dist"), [ones(3, 5), ones(3, 5, dtype=torch.bfloat16)]),
    "a product that is added to its own row": (lambda x: x.view(1, 2).addr_(ones(1), x), [ones(2)]),
    "a product that is added to both its numbers": (lambda x: x.view(1, 1).addr_(x, x), [ones(1)]),
    "padding that leaves nothing": (lambda x: torch.nn.functional.pad(x, (-2, -2), mode="replicate"), [ones(3, 4)]),
    "padding that leaves less than nothing": (
        lambda x: torch.nn.functional.pad(x, (1, 1, -3, -3), mode="replicate"), [ones(2, 3, 4, 4)]),
    "unsigned pivots": (torch.linalg.ldl_solve, [torch.eye(2), ones(2, dtype=torch.uint64), ones(2, 1)]),
    "a negative chance": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=-1), [ones(2, 2, 3, 8)]),
    "a view beyond its storage": (lambda x: torch.as_strided(x, (2, 2), (2, 2)), [ones(4)]),
    "a copy beyond its storage": (lambda x: torch.as_strided_copy(x, (2, 2), (2, 2)), [ones(4)]),
    "windows that do not fit": (
        lambda x: torch.nn.functional.fractional_max_pool3d(x, 2, output_size=2, _random_samples=torch.zeros(1, 1, 3)),
        [ones(1, 1, 3, 3, 3)]),
    "pivots that are no integers": (torch.linalg.ldl_solve, [ones(2, 2), ones(2), ones(2, 1)]),
    "values of another dtype": (
        lambda x, m, i, v: torch.ops.aten._unsafe_masked_index_put_accumulate(x, m, [i], v),
        [ones(3), ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), ones(2, dtype=torch.bool)]),
    "counts of fractions": (torch.bincount, [ones(2, 3)]),
    "a slope of 8 bits": (torch.nn.functional.prelu, [ones(2, dtype=F8), ones(1, dtype=F8)]),
    "chunks of a negative number": (lambda x: torch.unsafe_chunk(x, -1), [ones(4)]),
    "pieces by fractions": (lambda x, at: torch.tensor_split(x, at), [ones(4), ones(2)]),
    "indices that are fractions": (lambda x, i: torch.take_along_dim(x, i, 0), [ones(4), ones(2)]),
    "a norm into complex numbers": (
        lambda x, out: torch.linalg.matrix_norm(x, out=out), [ones(2, 2), ones(0, dtype=torch.complex64)]),
    "a kernel without elements": (torch.nn.functional.conv2d, [ones(2, 3, 4, 4), ones(2, 3, 0, 2)]),
    "a transposed kernel without elements": (torch.nn.functional.conv_transpose3d, [ones(2, 3, 4, 4, 4), ones(3, 2, 2, 2, 0)]),
    "weights of other classes": (
        lambda x, t, w: torch.nn.functional.multi_margin_loss(x, t, weight=w), [ones(2, 3), ones(2, dtype=torch.int64), ones(2)]),
    "weights in a row": (
        lambda x, t, w: torch.nn.functional.multi_margin_loss(x, t, weight=w), [ones(2, 3), ones(2, dtype=torch.int64), ones(1, 3)]),
    "an order that is a bool": (lambda x: torch._foreach_norm([x], True), [ones(2)]),
    "the least of nothing": (lambda x: torch._foreach_norm([x], -torch.inf), [ones(0)]),
    "a transposed kernel that makes nothing": (
        lambda x, w: torch.nn.functional.conv_transpose1d(x, w, padding=1), [ones(1, 2, 1), ones(2, 2, 2)]),
    "a transposed kernel of 64 bits that makes nothing": (
        lambda x, w: torch.nn.functional.conv_transpose2d(x, w, padding=1),
        [ones(2, 2, 1, 3, dtype=torch.float64), ones(2, 2, 2, 2, dtype=torch.float64)]),
    "a spread kernel of integers": (
        lambda x, w: torch.nn.functional.conv2d(x, w, dilation=2),
        [ones(1, 2, 4, 4, dtype=torch.int8), ones(2, 2, 2, 2, dtype=torch.int8)]),
    "a product of bools": (
        torch.nn.functional.bilinear, [ones(2, 3, dtype=torch.bool), ones(2, 4, dtype=torch.bool), ones(5, 3, 4, dtype=torch.bool)]),
    "classes of which there are none": (lambda x: torch.nn.functional.one_hot(x, 0), [torch.zeros(2, dtype=torch.int64)]),
    "half a class": (lambda x: torch.nn.functional.one_hot(x, 2.5), [torch.zeros(2, dtype=torch.int64)]),  # type: ignore[arg-type]
    "a negative number of classes": (lambda x: torch.nn.functional.one_hot(x, -2), [torch.zeros(2, dtype=torch.int64)]),
    "a copy of another dtype": (
        lambda x, out: torch.narrow_copy(x, 1, 0, 2, out=out), [ones(3, 3, dtype=torch.int64), ones(3, 2)]),
    "a bool factor of integers": (
        lambda x, a: torch.addr(x, a, a, beta=True), [ones(2, 2, dtype=torch.int64), ones(2, dtype=torch.int64)]),
    "statistics that are no vector": (
        lambda x, m, v: torch.nn.functional.batch_norm(x, m, v, training=True), [ones(2, 1), ones(1), ones()]),
    "statistics of a vector": (lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), [ones(5)]),
    "the largest of nothing": (lambda x: torch.renorm(x, torch.inf, 0, 1.0), [ones(2, 0)]),
    "one of no categories": (lambda x: torch.multinomial(x, 1, replacement=True), [ones(2, 0)]),
    "gradients of mixed dtypes": (
        lambda x, y: torch.nn.functional.huber_loss(x.requires_grad_(), y).backward(), [ones(5, dtype=torch.float16), ones(5)]),
    "a system of no integers": (
        torch.linalg.lu_solve,
        [ones(0, 0, dtype=torch.uint16), ones(0, dtype=torch.int32), ones(0, 0, dtype=torch.uint16)]),
    "a product of no integers": (torch.linalg.householder_product, [ones(0, 0, dtype=torch.int32), ones(0, dtype=torch.int32)]),
    "pivots that are large unsigned integers": (
        torch.linalg.ldl_solve, [torch.eye(2), ones(2, dtype=torch.uint32), ones(2, 1)]),
    "a size that is a bool": (lambda x: torch.nn.functional.interpolate(x, size=(True, 4)), [ones(1, 1, 2, 2)]),
    "a size that is a fraction": (lambda x: torch.nn.functional.adaptive_max_pool2d(x, (None, 2.5)), [ones(1, 4, 4)]),
    "more elements than can be counted": (lambda x: x.resize_(2**62, 5), [ones(3)]),
    "more bytes than can be counted": (lambda x: torch.fft.fft(x, 2**63 - 1), [ones(5, 6, 7)]),
    "factors for other dimensions": (
        lambda x: torch._C._nn._upsample_bilinear2d_aa(x, None, False, [1.0, 2.0]), [ones(1, 2, 2)]),
    "a size beyond 64 bits": (lambda x: torch.nn.functional.interpolate(x, scale_factor=2.0**63), [ones(1, 1, 2, 2)]),
    "channels of a vector": (lambda x, w: torch.nn.functional.batch_norm(x, w, w), [ones(2), ones(2)]),
    "places in several dimensions": (lambda x, at: torch.gradient(x, spacing=[at], dim=0), [ones(3, 3), ones(3, 3)]),
    "a rank of 16 bits, of nothing": (torch.linalg.matrix_rank, [ones(0, 5, 5, dtype=torch.bfloat16)]),
    "a rank of complex halves, of nothing": (
        lambda x: torch.linalg.matrix_rank(x, atol=1.0), [ones(0, 1, dtype=torch.complex32)]),
    "pieces that are computed beyond 64 bits": (lambda x: x.chunk(LARGEST), [ones(4, 3)]),
    "pieces that are computed beyond 64 bits, unsafely": (lambda x: x.unsafe_chunk(LARGEST), [ones(4, 3)]),
    "a transform that is completed in small complex numbers": (
        lambda x, out: torch.fft.fft(x, dim=-2, out=out), [ones(20, 20), ones(20, 20, dtype=torch.complex32)]),
    "powers beyond 64 bits": (lambda x: torch.linalg.vander(x, N=LARGEST), [ones(2, 5)]),
    "one value of another dtype, by a mask and in order": (
        lambda x, m, v: x.index_put_((m,), v, accumulate=True), [ones(1), ones(1, dtype=torch.bool), ones(1, dtype=torch.int64)]),
    "a norm of integers": (
        lambda w, i: torch.nn.functional.embedding(i, w, max_norm=1.0),
        [ones(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]),
}  # fmt: skip
