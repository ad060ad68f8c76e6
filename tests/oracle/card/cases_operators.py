"""Calls of single operators: forward, and forward and backward, in three dtypes."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

Call = tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]


def _indices(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device="cuda")


def _call(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Call:
    return function, shapes


_FLOATING: dict[str, Call] = {
    "linear": _call(F.linear, (4, 128, 256), (512, 256), (512,)),
    "linear of a matrix": _call(F.linear, (128, 256), (512, 256), (512,)),
    "linear of a transpose": _call(lambda x, w, b: F.linear(x.transpose(1, 2), w, b), (4, 256, 128), (512, 256), (512,)),
    "linear, 4 dimensions": _call(F.linear, (4, 4, 128, 256), (512, 256), (512,)),
    "softmax": _call(lambda x: F.softmax(x, -1), (4, 16, 128, 128)),
    "softmax in float32": _call(lambda x: F.softmax(x, -1, dtype=torch.float32), (4, 16, 128, 128)),
    "log_softmax": _call(lambda x: F.log_softmax(x, -1), (512, 5000)),
    "cross_entropy": _call(lambda x: F.cross_entropy(x, _indices(512)), (512, 5000)),
    "cross_entropy, smoothed": _call(lambda x: F.cross_entropy(x, _indices(512), label_smoothing=0.1), (512, 5000)),
    "cross_entropy of images": _call(lambda x: F.cross_entropy(x, _indices(4, 32, 32)), (4, 21, 32, 32)),
    "layer_norm": _call(lambda x, w, b: F.layer_norm(x, (256,), w, b), (4, 128, 256), (256,), (256,)),
    "layer_norm, many rows": _call(lambda x, w, b: F.layer_norm(x, (256,), w, b), (100, 1280, 256), (256,), (256,)),
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
    "embedding by frequency": _call(lambda w: F.embedding(_indices(100, 8), w, scale_grad_by_freq=True), (1000, 64)),
    "embedding_bag": _call(lambda w: F.embedding_bag(_indices(100, 8), w, mode="mean"), (1000, 64)),
    "index": _call(lambda w: w[_indices(4, 128)], (5000, 256)),
    "index, many": _call(lambda w: w[_indices(4, 2048)], (5000, 256)),
    "index, two": _call(lambda w: w[torch.arange(128, device="cuda"), _indices(128)], (5000, 256)),
    "index, two broadcast": _call(lambda w: w[torch.arange(128, device="cuda")[:, None], _indices(16)], (5000, 256)),
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
    "bce with logits": _call(lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)), (1000, 1000)),
    "kl_div": _call(lambda x: F.kl_div(x, torch.zeros_like(x), reduction="batchmean"), (1000, 1000)),
    "matmul": _call(lambda x, y: x @ y.transpose(-1, -2), (4, 8, 128, 64), (4, 8, 128, 64)),
    "matmul, permuted": _call(lambda x, y: x.transpose(1, 2) @ y.permute(0, 2, 3, 1), (4, 128, 8, 64), (4, 128, 8, 64)),
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
    "grid_sample": _call(lambda x, y: F.grid_sample(x, y, align_corners=False), (2, 3, 32, 32), (2, 16, 16, 2)),
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
    "attention, causal": _call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *((4, 8, 300, 128),) * 3),
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
