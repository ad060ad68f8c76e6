"""Calls of single operators: forward, and forward and backward, in three dtypes."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

Call = tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]


def _indices(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device="cuda")


def _call(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Call:
    return function, shapes


def _assign(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:, ::2] = y[:, ::2] * 2
    x[0] = 0
    x[x[:, 0] > 1] = 1.0
    return x


_FLOATING: dict[str, Call] = {
    "linear": _call(F.linear, (4, 128, 256), (512, 256), (512,)),
    "linear of a matrix": _call(F.linear, (128, 256), (512, 256), (512,)),
    "linear of a transpose": _call(
        lambda x, w, b: F.linear(x.transpose(1, 2), w, b), (4, 256, 128), (512, 256), (512,)
    ),
    "linear, 4 dimensions": _call(F.linear, (4, 4, 128, 256), (512, 256), (512,)),
    "softmax": _call(lambda x: F.softmax(x, -1), (4, 16, 128, 128)),
    "softmax in float32": _call(lambda x: F.softmax(x, -1, dtype=torch.float32), (4, 16, 128, 128)),
    "log_softmax": _call(lambda x: F.log_softmax(x, -1), (512, 5000)),
    "cross_entropy": _call(lambda x: F.cross_entropy(x, _indices(512)), (512, 5000)),
    "cross_entropy, smoothed": _call(
        lambda x: F.cross_entropy(x, _indices(512), label_smoothing=0.1), (512, 5000)
    ),
    "cross_entropy of images": _call(lambda x: F.cross_entropy(x, _indices(4, 32, 32)), (4, 21, 32, 32)),
    "layer_norm": _call(lambda x, w, b: F.layer_norm(x, (256,), w, b), (4, 128, 256), (256,), (256,)),
    "layer_norm, many rows": _call(
        lambda x, w, b: F.layer_norm(x, (256,), w, b), (100, 1280, 256), (256,), (256,)
    ),
    "rms_norm": _call(lambda x, w: F.rms_norm(x, (256,), w), (4, 128, 256), (256,)),
    "rms_norm, many rows": _call(lambda x, w: F.rms_norm(x, (256,), w), (100, 1280, 256), (256,)),
    "group_norm": _call(lambda x, w, b: F.group_norm(x, 8, w, b), (4, 64, 32, 32), (64,), (64,)),
    "batch_norm": _call(lambda x: F.batch_norm(x, None, None, training=True), (8, 16, 32, 32)),
    "dropout": _call(lambda x: F.dropout(x, 0.1), (4, 128, 256)),
    "gelu": _call(F.gelu, (4, 128, 256)),
    "silu": _call(F.silu, (4, 128, 256)),
    "glu": _call(F.glu, (8, 16, 32, 32)),
    "embedding": _call(lambda w: F.embedding(_indices(4, 128), w), (5000, 256)),
    "embedding, many": _call(lambda w: F.embedding(_indices(4, 2048), w), (5000, 256)),
    "embedding, padded": _call(lambda w: F.embedding(_indices(4, 2048), w, padding_idx=0), (5000, 256)),
    "embedding by frequency": _call(
        lambda w: F.embedding(_indices(100, 8), w, scale_grad_by_freq=True), (1000, 64)
    ),
    "embedding_bag": _call(lambda w: F.embedding_bag(_indices(100, 8), w, mode="mean"), (1000, 64)),
    "index": _call(lambda w: w[_indices(4, 128)], (5000, 256)),
    "index, many": _call(lambda w: w[_indices(4, 2048)], (5000, 256)),
    "index, two": _call(lambda w: w[torch.arange(128, device="cuda"), _indices(128)], (5000, 256)),
    "index, two broadcast": _call(
        lambda w: w[torch.arange(128, device="cuda")[:, None], _indices(16)], (5000, 256)
    ),
    "gather": _call(lambda x: x.gather(1, _indices(128, 3)), (128, 256)),
    "index_select": _call(lambda x: x.index_select(0, _indices(300)), (128, 256)),
    "index_add": _call(lambda x: x.new_zeros(10, 2000).index_add(0, _indices(100), x), (100, 2000)),
    "scatter_add": _call(lambda x: x.new_zeros(10, 2000).scatter_add(0, _indices(100, 2000), x), (100, 2000)),
    "sum": _call(lambda x: x.sum(), (4, 128, 2560)),
    "sum of rows": _call(lambda x: x.sum(0), (4000, 2560)),
    "sum of columns": _call(lambda x: x.sum(1), (40, 256000)),
    "sum in the middle": _call(lambda x: x.sum(1), (8, 4000, 256)),
    "sum of two dimensions": _call(lambda x: x.sum((0, 2)), (8, 4000, 256)),
    "mean": _call(lambda x: x.mean(), (4000, 2560)),
    "max": _call(lambda x: x.max(), (400, 2560)),
    "max of columns": _call(lambda x: x.max(1)[0], (40, 256000)),
    "max of rows": _call(lambda x: x.max(0)[0], (10000, 512)),
    "amax": _call(lambda x: x.amax(0), (10000, 512)),
    "var": _call(lambda x: x.var(0), (10000, 512)),
    "std": _call(lambda x: x.std(), (10000, 512)),
    "norm": _call(lambda x: x.norm(), (10000, 512)),
    "norm of columns": _call(lambda x: x.norm(dim=-1), (10000, 512)),
    "prod": _call(lambda x: x.prod(), (10000,)),
    "logsumexp": _call(lambda x: x.logsumexp(-1), (1000, 1000)),
    "cumsum": _call(lambda x: x.cumsum(-1), (100, 1000)),
    "cumsum, long": _call(lambda x: x.cumsum(0), (100000,)),
    "cumprod": _call(lambda x: x.cumprod(-1), (100, 1000)),
    "sort": _call(lambda x: x.sort(-1)[0], (100, 1000)),
    "sort, long": _call(lambda x: x.sort(-1)[0], (4, 50000)),
    "sort, one": _call(lambda x: x.sort(-1)[0], (500000,)),
    "sort of rows": _call(lambda x: x.sort(0)[0], (1000, 300)),
    "topk": _call(lambda x: x.topk(5)[0], (100, 1000)),
    "topk, long": _call(lambda x: x.topk(50)[0], (4, 50000)),
    "mse_loss": _call(lambda x: F.mse_loss(x, torch.zeros_like(x)), (1000, 1000)),
    "l1_loss": _call(lambda x: F.l1_loss(x, torch.zeros_like(x)), (1000, 1000)),
    "smooth_l1_loss": _call(lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)), (1000, 1000)),
    "bce": _call(lambda x: F.binary_cross_entropy(x.sigmoid(), torch.zeros_like(x)), (1000, 1000)),
    "bce with logits": _call(
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)), (1000, 1000)
    ),
    "kl_div": _call(lambda x: F.kl_div(x, torch.zeros_like(x), reduction="batchmean"), (1000, 1000)),
    "matmul": _call(lambda x, y: x @ y.transpose(-1, -2), (4, 8, 128, 64), (4, 8, 128, 64)),
    "matmul, permuted": _call(
        lambda x, y: x.transpose(1, 2) @ y.permute(0, 2, 3, 1), (4, 128, 8, 64), (4, 128, 8, 64)
    ),
    "matmul, broadcast": _call(torch.matmul, (4, 8, 128, 64), (64, 128)),
    "matrix times vector": _call(torch.matmul, (128, 64), (64,)),
    "dot": _call(torch.matmul, (64,), (64,)),
    "einsum": _call(lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), (4, 8, 128, 64), (4, 8, 128, 64)),
    "baddbmm": _call(torch.baddbmm, (8, 128, 128), (8, 128, 64), (8, 64, 128)),
    "addmm": _call(torch.addmm, (128, 128), (128, 64), (64, 128)),
    "interpolate": _call(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (2, 3, 64, 64)),
    "interpolate, nearest": _call(lambda x: F.interpolate(x, scale_factor=2), (2, 3, 64, 64)),
    "max_pool2d": _call(lambda x: F.max_pool2d(x, 2), (2, 3, 64, 64)),
    "avg_pool2d": _call(lambda x: F.avg_pool2d(x, 2), (2, 3, 64, 64)),
    "adaptive_avg_pool2d": _call(lambda x: F.adaptive_avg_pool2d(x, 7), (2, 3, 64, 64)),
    "grid_sample": _call(
        lambda x, y: F.grid_sample(x, y, align_corners=False), (2, 3, 32, 32), (2, 16, 16, 2)
    ),
    "unfold": _call(lambda x: F.unfold(x, 3), (2, 3, 32, 32)),
    "cat": _call(lambda x, y: torch.cat((x, y), 1), (100, 200), (100, 300)),
    "pad": _call(lambda x: F.pad(x, (1, 2)), (100, 200)),
    "where": _call(lambda x: torch.where(x > 0, x, 0.0), (100, 2000)),
    "masked_fill": _call(lambda x: x.masked_fill(x > 0, float("-inf")), (100, 2000)),
    "pow": _call(lambda x: x.pow(2) + x**3, (100, 2000)),
    "scalars": _call(lambda x: (x * 2 + 1) / 3 - x, (100, 2000)),
    "clamp": _call(lambda x: x.clamp(0, 1), (100, 2000)),
    "normalize": _call(lambda x: F.normalize(x, dim=-1), (1000, 160)),
    "cosine_similarity": _call(F.cosine_similarity, (1000, 160), (1000, 160)),
    "repeat_interleave": _call(lambda x: x.repeat_interleave(3, 0), (100, 16)),
    "repeat": _call(lambda x: x.repeat(3, 2), (100, 16)),
    "roll": _call(lambda x: x.roll(1, 0), (100, 16)),
    "attention": _call(F.scaled_dot_product_attention, *((4, 8, 128, 64),) * 3),
    "attention, causal": _call(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *((4, 8, 300, 128),) * 3
    ),
    "embedding of a slice": _call(lambda w: F.embedding(_indices(4, 129)[:, :-1], w), (5000, 256)),
    "index_select by a slice": _call(lambda x: x.index_select(0, _indices(300, 2)[:, 0]), (128, 256)),
    "index by a slice": _call(lambda w: w[_indices(4, 129)[:, :-1]], (5000, 256)),
    "index of the second": _call(lambda x: x[:, _indices(1, 1, 64)], (2, 128, 40)),
    "cross_entropy of shifted": _call(
        lambda x: F.cross_entropy(x[:, :-1].reshape(-1, 500), _indices(4, 128)[:, 1:].reshape(-1)),
        (4, 128, 500),
    ),
    "cross_entropy, ignored": _call(lambda x: F.cross_entropy(x, _indices(512), ignore_index=0), (512, 500)),
    "cross_entropy, weighted": _call(
        lambda x, w: F.cross_entropy(x, _indices(512), w.detach()), (512, 500), (500,)
    ),
    "cross_entropy of probabilities": _call(
        lambda x, y: F.cross_entropy(x, y.detach()), (512, 500), (512, 500)
    ),
    "cross_entropy, not reduced": _call(
        lambda x: F.cross_entropy(x, _indices(512), reduction="none"), (512, 500)
    ),
    "powers of a number": _call(lambda x: 10000.0 ** (x / 64), (64, 100)),
    "number less a tensor": _call(lambda x: (1 - x) / 2 + 1 / (1 + x), (64, 1000)),
    "rotary, complex": _call(
        lambda x: (
            torch.view_as_real(
                torch.view_as_complex(x.float().reshape(4, 8, 128, 32, 2))
                * torch.polar(*torch.ones(2, 128, 32, device="cuda"))
            )
            .flatten(3)
            .type_as(x)
        ),
        (4, 8, 128, 64),
    ),
    "rotary, halves": _call(lambda x: torch.cat((-x[..., 32:], x[..., :32]), -1) * x, (4, 8, 128, 64)),
    "rotary, pairs": _call(
        lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2), (4, 8, 128, 64)
    ),
    "split in three": _call(
        lambda x: torch.add(*(part.transpose(0, 1) for part in x.split(256, -1)[:2])), (4, 128, 768)
    ),
    "chunks multiplied": _call(lambda x: torch.mul(*x.chunk(2, -1)), (4, 128, 768)),
    "unbind": _call(lambda x: torch.mul(*x.unbind(0)[:2]), (3, 128, 768)),
    "masked by triu": _call(
        lambda x: x + torch.full((128, 128), float("-inf"), device="cuda").triu(1), (4, 8, 128, 128)
    ),
    "masked by where": _call(
        lambda x: torch.where(torch.ones(128, 128, device="cuda").tril() == 0, float("-inf"), x),
        (4, 8, 128, 128),
    ),
    "masked_fill of a tensor": _call(lambda x: x.masked_fill(x > 0, x.new_tensor(-1e4)), (100, 2000)),
    "min of columns": _call(lambda x: x.min(1).values, (40, 2560)),
    "amax backward of columns": _call(lambda x: x - x.amax(-1, keepdim=True), (400, 2560)),
    "max of columns, kept": _call(lambda x: (x - x.max(-1, keepdim=True).values).exp(), (400, 2560)),
    "maximum": _call(torch.maximum, (400, 2560), (400, 2560)),
    "std of columns": _call(
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5), (400, 2560)
    ),
    "var, biased": _call(lambda x: x.var(-1, unbiased=False), (400, 2560)),
    "rsqrt of the mean": _call(
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), (400, 2560)
    ),
    "prod of columns": _call(lambda x: x.prod(-1), (100, 200)),
    "relu in place": _call(lambda x: F.relu(x * 1, inplace=True), (400, 2560)),
    "leaky_relu": _call(F.leaky_relu, (400, 2560)),
    "softplus": _call(F.softplus, (400, 2560)),
    "hardswish": _call(F.hardswish, (400, 2560)),
    "mish": _call(F.mish, (400, 2560)),
    "elu": _call(F.elu, (400, 2560)),
    "prelu": _call(F.prelu, (40, 16, 100), (16,)),
    "tanh": _call(torch.tanh, (400, 2560)),
    "gelu by tanh": _call(lambda x: F.gelu(x, approximate="tanh"), (400, 2560)),
    "gelu by hand": _call(
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * torch.pow(x, 3)))), (400, 2560)
    ),
    "logsigmoid": _call(F.logsigmoid, (400, 2560)),
    "instance_norm": _call(F.instance_norm, (4, 16, 32, 32)),
    "layer_norm of a transpose": _call(
        lambda x, w, b: F.layer_norm(x.transpose(1, 2), (64,), w, b), (4, 64, 100), (64,), (64,)
    ),
    "roll of two": _call(lambda x: x.roll((1, -1), (0, 1)), (100, 16)),
    "pixel_shuffle": _call(lambda x: F.pixel_shuffle(x, 2), (4, 16, 32, 32)),
    "adaptive_max_pool2d": _call(lambda x: F.adaptive_max_pool2d(x, 7), (2, 3, 64, 64)),
    "avg_pool1d": _call(lambda x: F.avg_pool1d(x, 2), (8, 16, 256)),
    "interpolate, bicubic": _call(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (2, 3, 64, 64)),
    "pad, reflected": _call(lambda x: F.pad(x, (1, 2), mode="reflect"), (2, 100, 200)),
    "huber_loss": _call(lambda x: F.huber_loss(x, torch.zeros_like(x)), (1000, 1000)),
    "nll_loss": _call(lambda x: F.nll_loss(x, _indices(512)), (512, 500)),
    "margin_ranking_loss": _call(
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x)), (1000,), (1000,)
    ),
    "triplet_margin_loss": _call(F.triplet_margin_loss, *((1000, 64),) * 3),
    "cosine_embedding_loss": _call(
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(1000, device="cuda")), *((1000, 64),) * 2
    ),
    "scatter": _call(
        lambda x: torch.zeros(128, 256, device="cuda", dtype=x.dtype).scatter(1, _indices(128, 3), x),
        (128, 3),
    ),
    "index_copy": _call(
        lambda x: x.new_zeros(100, 2000).index_copy(0, torch.arange(100, device="cuda"), x), (100, 2000)
    ),
    "index_put": _call(lambda x: x.clone().index_put((_indices(10),), x[:10] * 2), (100, 2000)),
    "assigned slices": _call(lambda x: _assign(x.clone(), x), (100, 2000)),
    "take_along_dim": _call(lambda x: x.take_along_dim(_indices(128, 3), 1), (128, 256)),
    "expand": _call(lambda x: (x[:, None].expand(-1, 8, -1) * 2).reshape(-1, 256), (128, 256)),
    "repeat_kv": _call(
        lambda x: x[:, :, None].expand(4, 2, 4, 128, 64).reshape(4, 8, 128, 64) * 2, (4, 2, 128, 64)
    ),
    "outer": _call(lambda x: torch.outer(x, x), (300,)),
    "bilinear": _call(F.bilinear, (64, 32), (64, 32), (16, 32, 32), (16,)),
    "einsum of three": _call(
        lambda x, y, z: torch.einsum("bi,ij,bj->b", x, y, z), (64, 32), (32, 48), (64, 48)
    ),
    "einsum, summed": _call(lambda x, y: torch.einsum("bthd,bshd->hts", x, y), *((4, 64, 8, 32),) * 2),
    "einsum of a linear layer": _call(
        lambda x, y: torch.einsum("...i,oi->...o", x, y), (4, 128, 256), (512, 256)
    ),
    "matmul of a batch": _call(lambda x, y: x @ y, (4, 128, 256), (256, 512)),
    "matmul of vectors": _call(lambda x, y: x @ y, (4, 128, 256), (256,)),
    "tensordot": _call(lambda x, y: torch.tensordot(x, y, ([2], [1])), (4, 128, 256), (512, 256)),
    "cdist": _call(torch.cdist, (100, 64), (200, 64)),
    "lerp": _call(lambda x, y: x.lerp(y, 0.1), (400, 2560), (400, 2560)),
    "addcmul": _call(lambda x, y: x.addcmul(y, y, value=0.1), (400, 2560), (400, 2560)),
    "clamp by a tensor": _call(lambda x: x * (1.0 / (x.norm() + 1e-6)).clamp(max=1.0), (400, 2560)),
    "sum of norms": _call(lambda x, y: torch.stack([x.norm(2), y.norm(2)]).norm(2), (400, 2560), (300,)),
    "quantile": _call(lambda x: x.float().quantile(0.9), (10000,)),
    "multi_head_attention": _call(
        lambda x, w, o: F.multi_head_attention_forward(
            x, x, x, 256, 8, w, None, None, None, False, 0.1, o, None, need_weights=False
        )[0],
        (64, 4, 256),
        (768, 256),
        (256, 256),
    ),
    "attention, masked": _call(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, torch.ones(128, 128, device="cuda", dtype=torch.bool)
        ),
        *((4, 8, 128, 64),) * 3,
    ),
    "attention, dropped": _call(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), *((4, 8, 128, 64),) * 3
    ),
    "attention, grouped": _call(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        (4, 8, 128, 64),
        (4, 2, 128, 64),
        (4, 2, 128, 64),
    ),
    "attention of transposes": _call(
        lambda q, k, v: F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        ).transpose(1, 2),
        *((4, 128, 8, 64),) * 3,
    ),
    "weight_norm": _call(lambda v, g: torch._weight_norm(v, g, 0), (128, 256), (128, 1)),
    "conv1d": _call(lambda x, w, b: F.conv1d(x, w, b, padding=1), (4, 16, 128), (32, 16, 3), (32,)),
    "conv2d": _call(lambda x, w, b: F.conv2d(x, w, b, padding=1), (4, 16, 32, 32), (32, 16, 3, 3), (32,)),
    "conv2d, depthwise": _call(
        lambda x, w: F.conv2d(x, w, padding=1, groups=16), (4, 16, 32, 32), (16, 1, 3, 3)
    ),
    "conv2d of patches": _call(
        lambda x, w, b: F.conv2d(x, w, b, stride=16).flatten(2).transpose(1, 2),
        (4, 3, 64, 64),
        (32, 3, 16, 16),
        (32,),
    ),
    "conv_transpose2d": _call(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (4, 16, 32, 32), (16, 8, 2, 2), (8,)
    ),
}

_INTEGERS: dict[str, Call] = {
    "sum": _call(lambda x: x.sum(), (1000, 1000)),
    "any": _call(lambda x: x.any(), (1000, 1000)),
    "all of columns": _call(lambda x: x.all(1), (1000, 1000)),
    "argmax": _call(lambda x: x.int().argmax(1), (1000, 1000)),
    "cumsum": _call(lambda x: x.cumsum(-1), (1000, 1000)),
    "one_hot": _call(lambda x: F.one_hot(x.long(), 10), (1000,)),
    "sort": _call(lambda x: x.sort()[0], (1000,)),
    "argsort": _call(lambda x: x.argsort(), (100000,)),
    "bincount": _call(lambda x: x.long().bincount(minlength=10), (1000,)),
    "comparison": _call(lambda x: (x == x).all(), (1000, 100)),
    "tril": _call(lambda x: x.tril(), (1000, 100)),
    "isin": _call(lambda x: torch.isin(x, x[0]), (1000, 10)),
}

_OTHERS: dict[str, Call] = {
    "randperm": _call(lambda: torch.randperm(1000, device="cuda")),
    "randperm, long": _call(lambda: torch.randperm(1000000, device="cuda")),
    "multinomial": _call(lambda p: torch.multinomial(p + 1, 1), (4, 5000)),
    "multinomial, ten": _call(lambda p: torch.multinomial(p + 1, 10), (4, 5000)),
    "_foreach_norm": _call(lambda *tensors: torch._foreach_norm(tensors)[0], (1000, 100), (300, 7)),
    "dist": _call(torch.dist, (1000, 1000), (1000, 1000)),
    "isfinite": _call(lambda x: x.isfinite().all(), (1000, 1000)),
    "isinf": _call(lambda x: x.isinf().any(), (1000, 1000)),
    "median": _call(lambda x: x.median(), (1000,)),
    "median of columns": _call(lambda x: x.median(1)[0], (100, 1000)),
    "kthvalue": _call(lambda x: x.kthvalue(3)[0], (100, 1000)),
    "argmax": _call(lambda x: x.argmax(-1), (40, 256000)),
    "cummax": _call(lambda x: x.cummax(-1)[0], (100, 1024)),
    "searchsorted": _call(lambda x, y: torch.searchsorted(x, y), (100, 1024), (100, 3)),
    "to the CPU": _call(lambda x: x.cpu(), (1000, 160)),
    "a transpose to the CPU": _call(lambda x: x.t().cpu(), (1000, 160)),
    "to the CPU in float64": _call(lambda x: x.to("cpu", torch.float64), (1000, 160)),
    "to the card in bfloat16": _call(lambda: torch.ones(1000, 100).to("cuda", torch.bfloat16)),
}


def _run_forward(call: Call, dtype: torch.dtype) -> Callable[[], None]:
    function, shapes = call

    def run() -> None:
        function(*(torch.zeros(shape, dtype=dtype, device="cuda") for shape in shapes))

    return run


def _run_backward(call: Call, dtype: torch.dtype) -> Callable[[], None]:
    function, shapes = call

    def run() -> None:
        inputs = [torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]
        result = function(*inputs)
        result.backward(torch.ones_like(result))

    return run


def operator_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, call in _FLOATING.items():
            yield f"{name}, {dtype}", _run_forward(call, dtype)
            yield f"{name}, {dtype}, backward", _run_backward(call, dtype)
    for dtype in (torch.int64, torch.int32, torch.bool):
        for name, call in _INTEGERS.items():
            yield f"{name}, {dtype}", _run_forward(call, dtype)
    for name, call in _OTHERS.items():
        yield name, _run_forward(call, torch.float32)
