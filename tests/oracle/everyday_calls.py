"""What programs do that torch's database has no entry for: subscripts, operators with Python numbers, conversions, writes
through views, layers with their options, transforms of `torch.func`, gradients of gradients.

Each is a function of tensors, with shapes to begin with; random programs change the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Shape = tuple[int, ...]

FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
NUMBERS = FLOATS | {torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64}


@dataclass(frozen=True)
class Everyday:
    """Looks to random programs like an operator of the database."""

    op: Callable[..., Any]
    shapes: tuple[tuple[Shape, ...], ...]
    dtypes: frozenset[torch.dtype]
    indices: tuple[int, ...] = ()
    "Which arguments are indices: int64, all of them 0 or 1."
    masks: tuple[int, ...] = ()
    method_variant = None
    inplace_variant = None
    supports_out = False
    supports_autograd = True

    def supported_dtypes(self, device: str) -> frozenset[torch.dtype]:
        return self.dtypes

    def sample_inputs_func(
        self, info: Any, device: str, dtype: torch.dtype, requires_grad: bool
    ) -> Iterator[Any]:
        for shapes in self.shapes:
            first, *others = (self._new(number, shape, dtype) for number, shape in enumerate(shapes))
            yield SimpleNamespace(
                input=first, args=tuple(others), kwargs={}, output_process_fn_grad=lambda result: result
            )

    def _new(self, number: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        values = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape)
        if number in self.indices:
            return values % 2
        return (values % 3 == 0) if number in self.masks else (values % 7 + 1).to(dtype)


def _all(
    table: dict[str, Callable[..., Any]],
    *shapes: tuple[Shape, ...],
    dtypes: frozenset[torch.dtype] = NUMBERS,
    **more: tuple[int, ...],
) -> dict[str, Everyday]:
    return {name: Everyday(call, shapes, dtypes, **more) for name, call in table.items()}


def _write(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function that changes its first argument, by a statement, and returns it."""

    def call(x: Tensor, *others: Tensor) -> Tensor:
        change(x, *others)
        return x

    return call


def _assign(place: Any) -> Callable[..., Tensor]:
    return _write(lambda x, value: x.__setitem__(place, value))


# --- views, of which random programs also take some between two steps ---------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "x[1:]": lambda x: x[1:],
    "x[:, 0]": lambda x: x[:, 0],
    "x[..., 0]": lambda x: x[..., 0],
    "x[..., ::2]": lambda x: x[..., ::2],
    "x[..., :-1]": lambda x: x[..., :-1],
    "x[-1]": lambda x: x[-1],
    "x[None]": lambda x: x[None],
    "x[:, None]": lambda x: x[:, None],
    "x[0:0]": lambda x: x[0:0],
    "x[...]": lambda x: x[...],
    "x.mT": lambda x: x.mT,
    "x.transpose(0, -1)": lambda x: x.transpose(0, -1),
    "x.reshape(-1)": lambda x: x.reshape(-1),
    "x.view(-1)": lambda x: x.view(-1),
    "x.flatten(1)": lambda x: x.flatten(1),
    "x.detach()": lambda x: x.detach(),
    "x.unsqueeze(-1)": lambda x: x.unsqueeze(-1),
    "x.squeeze()": lambda x: x.squeeze(),
    "x.conj()": lambda x: x.conj(),
    "x.real": lambda x: x.real,
    "x.diagonal()": lambda x: x.diagonal(),
    "x.expand(2, ...)": lambda x: x.expand(2, *x.shape),
    "x.chunk(2)[-1]": lambda x: x.chunk(2)[-1],
    "x.unbind(-1)[0]": lambda x: x.unbind(-1)[0],
    "x.movedim(0, -1)": lambda x: x.movedim(0, -1),
    "x.narrow(0, 0, 1)": lambda x: x.narrow(0, 0, 1),
    "x.contiguous()": lambda x: x.contiguous(),
    "x.view_as(x)": lambda x: x.view_as(x),
}

SUBSCRIPTS = {
    "x[1, None, ..., 0]": lambda x: x[1, None, ..., 0],
    "x[True]": lambda x: x[True],
    "x[[0, 1]]": lambda x: x[[0, 1]],
    "x[:, [0, -1]]": lambda x: x[:, [0, -1]],
    "x.T": lambda x: x.T,
    "x.mH": lambda x: x.mH,
    "x.imag": lambda x: x.imag,
    "x.split(2, -1)": lambda x: x.split(2, -1),
    "a, b = x": lambda x: tuple(x),
    "x.unfold(0, 2, 1)": lambda x: x.unfold(0, 2, 1),
    "x.view(uint8)": lambda x: x.view(torch.uint8),
    "x.unflatten(-1, (-1, 1))": lambda x: x.unflatten(-1, (-1, 1)),
    "x.permute(1, 0, 2)": lambda x: x.permute(1, 0, 2),
}
INDEXED = {
    "x[i]": lambda x, i: x[i],
    "x[:, i]": lambda x, i: x[:, i],
    "x[i, ..., i]": lambda x, i: x[i, ..., i],
    "x[i, None]": lambda x, i: x[i, None],
    "x[..., i, 0]": lambda x, i: x[..., i, 0],
    "x[i] = 0": _write(lambda x, i: x.__setitem__(i, 0)),
    "x[:, i] += 1": _write(lambda x, i: x[:, i].add_(1)),
    "x[i] = x[i] + 1": _write(lambda x, i: x.__setitem__(i, x[i] + 1)),
    "embedding, padded": lambda x, i: functional.embedding(i, x.reshape(x.shape[0], -1), padding_idx=0),
    "one_hot(i, 4)": lambda x, i: functional.one_hot(i, 4).to(x.dtype) + x.sum(),
    "x.index_add(0, i, x[i])": lambda x, i: x.index_add(0, i, x[i]),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i.view(-1, *[1] * (x.ndim - 1)), 0),
}
MASKED = {
    "x.masked_fill(m, -inf)": lambda x, m: x.masked_fill(m, float("-inf")),
    "x[m] = 0": _write(lambda x, m: x.__setitem__(m, 0)),
    "where(m, x, 0)": lambda x, m: torch.where(m, x, 0),
    "where(m, 1.5, x)": lambda x, m: torch.where(m, 1.5, x),
    "x * m": lambda x, m: x * m,
    "x + ~m": lambda x, m: x + ~m,
    "m | (x > 1)": lambda x, m: m | (x > 1),
    "m.any(-1) & x.all(-1)": lambda x, m: m.any(-1) & x.all(-1),
    "sum of m / sum of x": lambda x, m: m.sum() / x.sum(),
    "m.cumsum(-1) * x": lambda x, m: m.cumsum(-1) * x,
    "m.float() @ x.mT": lambda x, m: m.float() @ x.mT.float(),
}
ASSIGNMENTS = {
    "x[1:] = y": _assign(slice(1, None)),
    "x[..., 0] = y": _assign((..., 0)),
    "x[:, ::2] = y": _assign((slice(None), slice(None, None, 2))),
    "x[None] = y": _assign(None),
    "x[0, 1] = y": _assign((0, 1)),
    "x[...] = y": _assign(...),
    "x.T.add_(y)": _write(lambda x, y: x.mT.add_(y)),
    "x.view(-1).copy_(y)": _write(lambda x, y: x.view(-1).copy_(y)),
    "x.clone()[0].sub_(y)": lambda x, y: x.clone()[0].sub_(y),
}


def _augment(text: str) -> Callable[..., Tensor]:
    code = compile(text, "everyday", "exec")

    def call(x: Tensor, *others: Tensor) -> Any:
        names = {"x": x, "y": others[0] if others else None, "torch": torch}
        exec(code, names)
        return names["x"]

    return call


AUGMENTED = {
    text: _augment(text)
    for text in (
        "x += 1", "x += 2.5", "x -= True", "x *= 1j", "x /= 2", "x //= 2", "x **= 2", "x %= 3", "x &= 1", "x <<= 1", "x[0] += 1",
        "x[..., 1:] *= 2", "x[:, 0] = x[:, 1]", "x[1:] = x[:-1]", "x.zero_()[0].fill_(2)", "x = -x; x[0] = 3",
        "x.chunk(2)[0].zero_()", "x.mT[0] = 1", "x.unbind()[0].add_(1)", "x.diagonal().fill_(1)", "x.real.mul_(2)",
        "x.squeeze_(); x.unsqueeze_(0)", "x.t_()", "x.transpose_(0, -1).add_(1)", "x.requires_grad_()", "x.detach_()",
        "x.swapaxes_(0, 1)", "del x[0]",
    )
}  # fmt: skip
AUGMENTED_BY = {
    text: _augment(text)
    for text in (
        "x += y",
        "x -= y",
        "x *= y",
        "x /= y",
        "x //= y",
        "x **= y",
        "x @= y",
        "x &= y",
        "x ^= y",
        "x[0] += y",
        "x %= y",
    )
}


def _evaluate(text: str) -> Callable[..., Any]:
    names = {"torch": torch, "F": functional, "inf": float("inf")}
    return eval(f"lambda x, y=None: {text}", names)  # type: ignore[no-any-return]


ARITHMETIC = {
    text: _evaluate(text)
    for text in (
        "2 - x", "1 / x", "2 ** x", "x // 3", "x % 2.5", "-x", "~x", "abs(x)", "x > 0.5", "5 == x", "x ** 0.5", "3.0 // x", "1j * x",
        "inf * x", "divmod(x, 2)", "True & x", "x >> 1", "1 << x", "round(x)", "x ** -1", "x + True", "x != 2 ** 40", "x * 2 ** 40",
        "2.5 % x", "x.sum() * x", "x.mean() + 1", "(x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)", "x.max(-1).values",
        "x.argmax(-1)", "x.sum((0, -1))", "x.softmax(-1) @ x.mT", "x.std()", "x.norm()", "x.topk(2).indices", "x.sum(0, dtype=torch.float64)",
        "torch.tensor(2.5) * x", "torch.tensor(2) * x", "torch.tensor([1.5, 2]) .sum() - x", "torch.stack([x, x + 1])",
        "torch.cat([x, 2 * x], -1)", "torch.cat([x, x.double()])", "torch.maximum(x, torch.tensor(0.5))", "torch.einsum('...i,...j->...ij', x, x)",
        "x.clamp(min=0).pow(2).sum(-1).sqrt()", "torch.add(x, x, alpha=2)", "torch.add(x, 1, alpha=0.5)", "x.sort(descending=True)",
        "x.repeat(2, *[1] * x.ndim)", "x.tile(2)", "x.roll(1, 0)", "x.flip(0)", "x.cumsum(0)", "x.logsumexp(-1)", "x.var(0, correction=0)",
    )
}  # fmt: skip
ARITHMETIC_OF_TWO = {
    text: _evaluate(text)
    for text in (
        "x + y", "x - y[..., 0:1]", "x * y.sum()", "x / y", "x // y", "x @ y.mT", "x ** y", "x == y", "x & y", "torch.where(x > y, x, y)",
        "torch.cat([x, y])", "torch.stack([x, y], 1)", "x.type_as(y)", "x.to(y)", "x.expand_as(y)", "torch.lerp(x, y, 0.5)",
        "torch.result_type(x, y)", "x.add(y, alpha=2)", "torch.minimum(x, y)", "torch.addcmul(x, x, y, value=0.5)", "x.copy_(y)",
        "x.new_tensor([1, 2]) * y[..., :2]", "F.mse_loss(x, y)", "F.cosine_similarity(x, y)", "F.smooth_l1_loss(x, y, beta=0.5)",
        "F.kl_div(x, y, log_target=True)", "F.l1_loss(x, y, reduction='sum')", "F.huber_loss(x, y, 'none')", "x.masked_fill(y > 1, 0)",
        "torch.isclose(x, y)", "torch.dot(x.reshape(-1), y.reshape(-1))", "torch.outer(x.reshape(-1), y.reshape(-1))", "x.sub_(y.to(x.dtype))",
    )
}  # fmt: skip
CONVERSIONS = {
    text: _evaluate(text)
    for text in (
        "x.half()", "x.bfloat16().float()", "x.long()", "x.bool()", "x.byte()", "x.to(torch.complex64)", "x.double() + x",
        "x.to(torch.float8_e4m3fn).float()", "x.to('cpu')", "x.to(torch.float32, copy=True)", "x.to(memory_format=torch.channels_last)",
        "x.contiguous(memory_format=torch.channels_last)", "x.clone(memory_format=torch.contiguous_format)", "x.cpu()",
        "x.to(torch.int8) * 2", "x.char() + x.short()", "torch.as_tensor(x, dtype=torch.float64)", "torch.asarray(x)", "torch.clone(x)",
        "torch.zeros_like(x, dtype=torch.int32)", "torch.ones_like(x, memory_format=torch.contiguous_format)", "x.new_zeros(2, 3)",
        "x.new_full((2,), 3)", "torch.full_like(x, 2.5)", "torch.tensor([1, 2], dtype=x.dtype)", "torch.arange(x.shape[0]) * 2.0",
        "torch.full(x.shape, 2)", "torch.ones(x.shape[-1:])[:, None]", "torch.eye(x.shape[-1], dtype=x.dtype)", "torch.rand_like(x)",
        "torch.linspace(0, 1, x.shape[0], dtype=x.dtype)", "torch.zeros(len(x), x.numel())", "torch.full((2,), x.shape[0] / 2)",
        "torch.ones(3, 4).tril() * x.sum()", "torch.arange(0, 1, 0.25) + x.sum()", "torch.tensor(x.shape)", "torch.randn(x.shape).abs()",
        "torch.randint(0, 5, x.shape) + x", "torch.zeros(0, 3).sum() + x", "torch.complex(x, x)", "torch.view_as_real(x)", "x.dim() * x",
        "torch.meshgrid(x.reshape(-1), x.reshape(-1), indexing='xy')", "torch.triu(x.new_ones(3, 3), 1).bool()", "torch.finfo(x.dtype).max * x",
    )
}  # fmt: skip
LAYERS_OF_IMAGES = {
    text: _evaluate(text)
    for text in (
        "F.conv2d(x, x.new_ones(4, 2, 3, 3), padding='same', groups=2)", "F.conv2d(x, x.new_ones(2, 4, 2, 2), x.new_ones(2), stride=2, dilation=2)",
        "F.conv_transpose2d(x, x.new_ones(4, 2, 3, 3), stride=2, output_padding=1)", "F.interpolate(x, scale_factor=2, mode='bilinear')",
        "F.interpolate(x, size=(3, 7), mode='bicubic', antialias=True)", "F.interpolate(x, size=4)", "F.interpolate(x, scale_factor=0.5, mode='area')",
        "F.max_pool2d(x, 2, ceil_mode=True, return_indices=True)", "F.avg_pool2d(x, 2, padding=1, count_include_pad=False)",
        "F.adaptive_avg_pool2d(x, (1, 2))", "F.adaptive_max_pool2d(x, 2)", "F.group_norm(x, 2, x.new_ones(4))",
        "F.batch_norm(x, x.new_zeros(4), x.new_ones(4), training=True)", "F.instance_norm(x, eps=1e-3)", "F.pad(x, (1, 0, 2, -1), value=2.0)",
        "F.pad(x, (1, 1, 1, 1), mode='reflect')", "F.unfold(x, 2, stride=2)", "F.pixel_shuffle(x, 2)", "F.dropout2d(x, 0.5)", "F.lp_pool2d(x, 2.0, 2)",
        "F.local_response_norm(x, 2)", "F.grid_sample(x, x.new_zeros(2, 3, 3, 2), align_corners=False)", "F.channel_shuffle(x, 2)",
        "torch.nn.Conv2d(4, 6, 3, padding=1, bias=False)(x)", "torch.nn.BatchNorm2d(4).eval()(x)", "torch.nn.Sequential(torch.nn.Conv2d(4, 2, 1), torch.nn.ReLU(), torch.nn.Flatten())(x)",
        "x.flatten(2).transpose(1, 2)", "x.mean((2, 3))", "x.permute(0, 2, 3, 1).contiguous()", "F.relu(x, inplace=True)", "F.layer_norm(x, x.shape[1:])",
    )
}  # fmt: skip
LAYERS_OF_SEQUENCES = {
    text: _evaluate(text)
    for text in (
        "F.linear(x, x.new_ones(5, 4), x.new_ones(5))", "F.layer_norm(x, (4,), x.new_ones(4), eps=1e-3)", "F.rms_norm(x, (4,))", "F.gelu(x, approximate='tanh')",
        "F.softmax(x, -1, dtype=torch.float32)", "F.log_softmax(x, 1)", "F.scaled_dot_product_attention(x, x, x, is_causal=True)",
        "F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], scale=0.5)", "F.scaled_dot_product_attention(x, x, x, x.new_ones(3, 3).bool())",
        "F.dropout(x, 0.2, training=True)", "F.glu(x)", "F.silu(x, inplace=True)", "F.normalize(x, dim=1)", "F.conv1d(x.mT, x.new_ones(2, 4, 2), padding=1)",
        "torch.nn.LSTM(4, 3, batch_first=True)(x)", "torch.nn.GRU(4, 3, num_layers=2, bidirectional=True)(x)", "torch.nn.MultiheadAttention(4, 2)(x, x, x)",
        "torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)(x)", "torch.nn.TransformerEncoderLayer(4, 2, 8).eval()(x)", "torch.nn.Linear(4, 2)(x).relu()",
        "F.cross_entropy(x.mT, torch.zeros(x.shape[:2], dtype=torch.long), ignore_index=1, label_smoothing=0.1)", "F.nll_loss(x.mT, torch.zeros(x.shape[:2], dtype=torch.long))",
        "F.binary_cross_entropy_with_logits(x, x, pos_weight=x.new_ones(4))", "F.avg_pool1d(x, 2)", "F.max_pool1d(x, 2, stride=1)", "F.pad(x, (0, 1))",
        "F.one_hot(x.argmax(-1), 4)", "F.multi_margin_loss(x[:, 0], torch.zeros(x.shape[0], dtype=torch.long))", "F.cross_entropy(x[:, 0], x[:, 1])",
        "x.unsqueeze(1) + x.unsqueeze(2)", "torch.baddbmm(x, x[..., :2], x[:, :2], beta=0.5)", "(x @ x.mT).masked_fill(torch.ones(3, 3).triu(1).bool(), -inf)",
        "torch.nn.utils.rnn.pad_sequence([x[0], x[1, :2]])", "torch.nn.Embedding(5, 3)(x.long() % 5)",
        "torch.cdist(x, x)", "torch.fft.rfft(x).abs()", "torch.linalg.norm(x, dim=(-2, -1))", "torch.linalg.qr(x)[0]", "torch.linalg.solve(x @ x.mT, x)", "torch.tensordot(x, x, dims=1)",
    )
}  # fmt: skip


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2 + ctx.saved_tensors[0] * 0


def _differentiate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    function(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


def _differentiate_twice(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    return first, torch.autograd.grad(first.sum(), leaf)


def _step(x: Tensor) -> Any:
    weight = nn.Parameter(x.detach().clone())
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    (weight * x).sum().backward()
    optimizer.step()
    return weight.detach(), weight.grad


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap(sum)": lambda x: vmap(lambda row: row.sum() + 1)(x),
    "vmap(in_dims=1, out_dims=-1)": lambda x: vmap(lambda row: row * 2 - row.mean(), in_dims=1, out_dims=-1)(
        x
    ),
    "vmap of vmap": lambda x: vmap(vmap(lambda row: row.cumsum(0)))(x),
    "vmap of a product": lambda x: vmap(torch.outer, in_dims=(0, None))(x[:, :, 0], x[0, :, 0]),
    "vmap of where": lambda x: vmap(lambda row: torch.where(row > 1, row, 0))(x),
    "grad": lambda x: grad(lambda row: row.sin().sum())(x),
    "grad and value": lambda x: torch.func.grad_and_value(lambda row: (row**2).mean())(x),
    "vmap of grad": lambda x: vmap(grad(lambda row: row.softmax(0).prod()))(x[:, :, 0]),
    "jvp": lambda x: jvp(lambda row: row.tanh() * row, (x,), (x,)),
    "vjp": lambda x: vjp(lambda row: row.exp().sum(0), x)[1](x[0]),
    "jacrev": lambda x: jacrev(lambda row: row**2)(x[0, 0]),
    "jacfwd": lambda x: jacfwd(lambda row: row.sum() * row)(x[0, 0]),
    "hessian": lambda x: hessian(lambda row: (row**3).sum())(x[0, 0]),
    "functionalize": lambda x: functionalize(lambda row: row.clone().add_(1)[0])(x),
    "backward": lambda x: _differentiate(lambda leaf: (leaf[1:] * leaf[:-1]).sum(), x),
    "backward through a write": lambda x: _differentiate(lambda leaf: leaf.clone().mul_(2)[0].sum(), x),
    "backward of a norm": lambda x: _differentiate(lambda leaf: leaf.norm(dim=-1).sum(), x),
    "backward of channels last": lambda x: _differentiate(
        lambda leaf: leaf.mT.contiguous().mT.relu().sum(), x
    ),
    "backward of attention": lambda x: _differentiate(
        lambda leaf: functional.scaled_dot_product_attention(leaf, leaf, leaf).sum(), x
    ),
    "gradients twice": _differentiate_twice,
    "autograd.Function": lambda x: _differentiate(lambda leaf: _Doubled.apply(leaf).sum(), x),
    "checkpoint": lambda x: _differentiate(
        lambda leaf: checkpoint(torch.tanh, leaf, use_reentrant=False).sum(), x
    ),
    "AdamW": _step,
    "autograd.functional.jacobian": lambda x: torch.autograd.functional.jacobian(
        lambda row: row * 2, x[0, 0]
    ),
    "inference mode": lambda x: torch.inference_mode()(torch.add)(x, 1),
    "autocast": lambda x: torch.autocast("cpu", dtype=torch.bfloat16)(torch.matmul)(x, x.mT),
}
GRADIENTS = "gradients of the program"


def _gradients(result: Tensor, *leaves: Tensor) -> Any:
    return torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)


READS_VALUES = frozenset({*INDEXED, *MASKED})
"Random programs may give them masks for indices, and single numbers, which C++ reads."

EVERYDAY: dict[str, Everyday] = {
    **_all({**VIEWS, **SUBSCRIPTS}, ((2, 3, 4),), ((3, 3),), ((4,),)),
    **_all(INDEXED, ((3, 4, 2), (3,)), ((4, 3), (2,)), indices=(1,)),
    **_all(MASKED, ((3, 4), (3, 4)), ((2, 3, 4), (3, 4)), ((3, 4), (3, 1)), masks=(1,)),
    **_all(
        {**ASSIGNMENTS, **AUGMENTED_BY}, ((3, 3), (3, 3)), ((3, 4), ()), ((2, 3, 4), (1,)), ((3, 4), (4,))
    ),
    **_all({**AUGMENTED, **ARITHMETIC}, ((2, 3, 4),), ((3, 3),), ((4,),), ((),)),
    **_all(
        ARITHMETIC_OF_TWO, ((3, 4), (3, 4)), ((2, 3, 4), (3, 4)), ((3, 4), (4,)), ((3, 4), ()), ((), (3, 4))
    ),
    **_all(CONVERSIONS, ((2, 3, 4),), ((2, 3, 2, 2),), ((4,),), ((),)),
    **_all(LAYERS_OF_IMAGES, ((2, 4, 5, 6),), ((1, 4, 3, 3),), dtypes=FLOATS),
    **_all(LAYERS_OF_SEQUENCES, ((2, 3, 4),), dtypes=FLOATS),
    **_all(TRANSFORMS, ((2, 3, 4),), ((3, 3, 2),), dtypes=FLOATS),
    **_all({GRADIENTS: _gradients}),
}
