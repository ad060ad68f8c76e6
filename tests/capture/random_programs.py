"""Random programs on tensors: views and writes through them, operators with many results, results that share memory,
random numbers, arithmetic on sizes, gradients, and now and then a size out of the data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

Step = Callable[[Tensor, Tensor, int], Any]
MOST_ELEMENTS = 4000
INPUT_NUMBER = 0
"As a step's number: the program's own, which is an argument of it and may be a symbol."


def gradient(a: Tensor, b: Tensor, n: int) -> Any:
    x, y = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    return torch.autograd.grad((x.sin() * y * n).sum(), (x, y))


def gradient_of_a_write(a: Tensor, b: Tensor, n: int) -> Any:
    x = a.detach().clone().requires_grad_()
    y = x * 2
    y[1:].mul_(n)
    y.select(0, 0).copy_(b)
    return torch.autograd.grad(y.exp().sum(), x)


def backward(a: Tensor, b: Tensor, n: int) -> Any:
    x = a.detach().requires_grad_()
    (x.tanh() * n).sum().backward()
    return x.grad


def normalised(a: Tensor, b: Tensor, n: int) -> Any:
    running = a.new_zeros(a.shape[1])
    return functional.batch_norm(a, running, running + 1, training=True), running


def as_many_as(a: Tensor, n: int) -> Any:
    places = (a > 0).nonzero()
    return places, torch.zeros(places.shape[0] + n)


NEW: dict[str, Step] = {
    "sin": lambda a, b, n: a.sin(),
    "sum": lambda a, b, n: a + b,
    "product": lambda a, b, n: a * b,
    "times": lambda a, b, n: a * n,
    "where": lambda a, b, n: torch.where(a > 0, a, b),
    "matmul": lambda a, b, n: a.float() @ b.float(),
    "mean": lambda a, b, n: a.mean(0, keepdim=True),
    "cat": lambda a, b, n: torch.cat([a, b], 0),
    "stack": lambda a, b, n: torch.stack([a, b], -1),
    "clone": lambda a, b, n: a.clone(),
    "contiguous": lambda a, b, n: a.contiguous(),
    "cumsum": lambda a, b, n: a.cumsum(0),
    "literal": lambda a, b, n: a + torch.tensor(float(n)),
    "flipped": lambda a, b, n: a.flip(0),
    "to integers": lambda a, b, n: a.long(),
    "to floats": lambda a, b, n: a.to(torch.float32),
    "as the other": lambda a, b, n: a.type_as(b),
    "softmax": lambda a, b, n: a.float().softmax(-1),
    "layer norm": lambda a, b, n: functional.layer_norm(a, a.shape[-1:]),
    "repeat": lambda a, b, n: a.repeat(n, *[1] * a.ndim),
    "pad": lambda a, b, n: functional.pad(a, (n, 0)),
    "gather": lambda a, b, n: a.gather(0, a.argsort(0)),
    "rows by index": lambda a, b, n: a[torch.arange(a.shape[0]) // 2],
    "scattered": lambda a, b, n: a.scatter(0, torch.zeros_like(a, dtype=torch.long), b.expand(a.shape)),
    "einsum": lambda a, b, n: torch.einsum("i...,j...->ij", a, b),
    "gradient": lambda a, b, n: gradient(a, b, n),
    "gradient of a write": lambda a, b, n: gradient_of_a_write(a, b, n),
    "backward": lambda a, b, n: backward(a, b, n),
}

VIEWS: dict[str, Step] = {
    "view": lambda a, b, n: a.view(-1, a.shape[-1]),
    "view as": lambda a, b, n: a.view_as(b),
    "flat": lambda a, b, n: a.reshape(a.numel()),
    "flattened": lambda a, b, n: a.flatten(-2),
    "unflattened": lambda a, b, n: a.unflatten(0, (-1, n)),
    "transposed": lambda a, b, n: a.transpose(0, -1),
    "moved": lambda a, b, n: a.movedim(0, -1),
    "first": lambda a, b, n: a[:1],
    "rest": lambda a, b, n: a[1:],
    "from": lambda a, b, n: a[n:],
    "up to": lambda a, b, n: a[..., :n],
    "every other": lambda a, b, n: a[..., ::2],
    "select": lambda a, b, n: a.select(0, -1),
    "unsqueezed": lambda a, b, n: a.unsqueeze(n % 2),
    "squeezed": lambda a, b, n: a.squeeze(),
    "expanded": lambda a, b, n: a.unsqueeze(0).expand(2, *a.shape),
    "expanded like": lambda a, b, n: a.expand_as(b),
    "detached": lambda a, b, n: a.detach(),
    "narrow": lambda a, b, n: a.narrow(0, 0, a.shape[0] - 1),
    "half": lambda a, b, n: a[: a.shape[0] // 2],
    "diagonal": lambda a, b, n: a.diagonal(),
    "windows": lambda a, b, n: a.unfold(0, 2, 1),
    "strided by hand": lambda a, b, n: a.as_strided((1,), (1,)),
    "imaginary": lambda a, b, n: a.imag,
    "conjugate": lambda a, b, n: a.conj(),
    "real pairs": lambda a, b, n: torch.view_as_real(a),
    "bits": lambda a, b, n: a.view(torch.int32),
    "no copy": lambda a, b, n: a.to(a.dtype),
}

MANY: dict[str, Step] = {
    "split": lambda a, b, n: a.split(n),
    "chunk": lambda a, b, n: a.chunk(2, -1),
    "unbind": lambda a, b, n: a.unbind(0),
    "tensor split": lambda a, b, n: a.tensor_split((1,)),
    "sort": lambda a, b, n: a.sort(0),
    "top": lambda a, b, n: a.topk(1, 0),
    "max": lambda a, b, n: a.max(-1),
    "extremes": lambda a, b, n: torch.aminmax(a),
    "moments": lambda a, b, n: torch.var_mean(a, 0),
    "cummax": lambda a, b, n: a.cummax(0),
    "mesh": lambda a, b, n: torch.meshgrid(a.flatten(), b.flatten(), indexing="ij"),
    "broadcast": lambda a, b, n: torch.broadcast_tensors(a, b),
    "foreach": lambda a, b, n: torch._foreach_add([a, b], 1),
    "batch norm": lambda a, b, n: normalised(a, b, n),
    "pooled": lambda a, b, n: functional.max_pool1d(a, 2, 1, return_indices=True),
    "both": lambda a, b, n: {"a": a, "b": [b, a]},
}

WRITES: dict[str, Step] = {
    "add_": lambda a, b, n: a.add_(b),
    "mul_": lambda a, b, n: a.mul_(n),
    "copy_": lambda a, b, n: a.copy_(b),
    "zero the first": lambda a, b, n: a[:1].zero_(),
    "fill the last": lambda a, b, n: a.select(-1, -1).fill_(n),
    "set an item": lambda a, b, n: a.__setitem__((0,), float(n)),
    "set a slice": lambda a, b, n: a.__setitem__(slice(n, None), b),
    "set by index": lambda a, b, n: a.__setitem__(torch.arange(a.shape[0] // 2), b),
    "set by mask": lambda a, b, n: a[:].__setitem__(a > 0, float(n)),
    "through a transposed view": lambda a, b, n: a.transpose(0, -1).mul_(n),
    "through a flat view": lambda a, b, n: a.view(-1)[1:].add_(n),
    "through the first part": lambda a, b, n: a.chunk(2)[0].copy_(b),
    "through rows": lambda a, b, n: [row.add_(n) for row in a.unbind(0)][-1],
    "through the diagonal": lambda a, b, n: a.diagonal().fill_(n),
    "through a detached view": lambda a, b, n: a.detach()[..., ::2].neg_(),
    "mask": lambda a, b, n: a.masked_fill_(a > n, 0.0),
    "index_add_": lambda a, b, n: a.index_add_(0, torch.zeros(b.shape[0], dtype=torch.long), b),
    "index_fill_": lambda a, b, n: a.index_fill_(0, torch.arange(a.shape[0] // 2), float(n)),
    "scatter_": lambda a, b, n: a.scatter_(0, torch.zeros_like(b, dtype=torch.long), b),
    "relu_": lambda a, b, n: a.relu_(),
    "cumsum_": lambda a, b, n: a.mul_(1.0).cumsum_(0),
    "foreach_": lambda a, b, n: torch._foreach_mul_([a, b], n),
    "out": lambda a, b, n: torch.neg(b, out=a),
    "out of a sum": lambda a, b, n: torch.add(a, n, out=b),
    "outs of a sort": lambda a, b, n: torch.sort(a.clone(), 0, out=(b, torch.empty(0, dtype=torch.long))),
    "t_": lambda a, b, n: a.transpose_(0, -1),
    "unsqueeze_": lambda a, b, n: a.unsqueeze_(0),
    "squeeze_": lambda a, b, n: a.squeeze_(0),
    "resize_": lambda a, b, n: a.resize_(1) if a.numel() else a,  # new memory has values that nobody knows
    "set_": lambda a, b, n: a.set_(b),
}

SIZES: dict[str, Step] = {
    "ones of a size": lambda a, b, n: a.new_ones(a.shape[0], b.shape[-1] + n),
    "ones of a product": lambda a, b, n: a.new_ones(a.shape[0] * n),
    "arange": lambda a, b, n: torch.arange(a.shape[0] + n) * 1.0,
    "by a size": lambda a, b, n: a * a.shape[0],
    "by a quotient": lambda a, b, n: a * (a.shape[0] / (b.shape[0] + 1)),
    "remainder": lambda a, b, n: a.new_zeros(a.shape[0] % 3 + 1),
    "least": lambda a, b, n: a[: min(a.shape[0], b.shape[0])],
    "branch": lambda a, b, n: a + 1 if a.shape[0] > b.shape[-1] else a - n,
    "by a stride": lambda a, b, n: a * a.stride(0) + a.storage_offset(),
    "a root": lambda a, b, n: a / a.shape[-1] ** 0.5,
}

RANDOM: dict[str, Step] = {
    "dropout": lambda a, b, n: torch.dropout(a, 0.5, True),
    "rand": lambda a, b, n: a + torch.rand(a.shape[-1]),
    "randn like": lambda a, b, n: torch.randn_like(a, dtype=torch.float32),
    "integers": lambda a, b, n: torch.randint(0, n + 2, (a.shape[0],)),
    "permutation": lambda a, b, n: a[torch.randperm(a.shape[0])],
    "uniform_": lambda a, b, n: a.uniform_(0, n),
    "bernoulli_": lambda a, b, n: a.select(0, 0).bernoulli_(0.5),
    "normal": lambda a, b, n: torch.normal(a.float(), a.float().abs() + 1),
    "exponential_": lambda a, b, n: a.view(-1).exponential_(n),
}

DATA: dict[str, Step] = {
    "places": lambda a, b, n: (a > 0).nonzero(),
    "chosen": lambda a, b, n: a[a > 0],
    "distinct": lambda a, b, n: torch.unique(a, return_counts=True),
    "as many as": lambda a, b, n: as_many_as(a, n),
    "counted": lambda a, b, n: a * (a > 0).sum().item(),
}
"""Only real and symbolic traces get past these, and not all that may follow. No random steps beside them: a real trace
holds a size fixed, and it would not be that of another run. Sizes that data decides are taken for ordinary ones, as
torch does: programs in which one is 0 or 1 are left out."""

ON_DATA = tuple(sorted({**NEW, **VIEWS, **MANY, **WRITES, **SIZES}.keys() - {"broadcast"})) + 8 * tuple(DATA)
"Steps to draw from, such that most programs read data. C++ asks `broadcast_tensors` whether sizes are 1."

STEPS: dict[str, Step] = {**NEW, **VIEWS, **MANY, **WRITES, **SIZES, **RANDOM}


@dataclass(frozen=True)
class Program:
    """Steps, each with the positions of its two operands and a number; the results are the last values, and some again."""

    steps: tuple[tuple[str, int, int, int], ...]
    results: int
    again: tuple[int, ...] = ()

    def __call__(self, number: int, *inputs: Tensor) -> Any:
        values = list(inputs)
        for name, a, b, n in self.steps:
            run_step(name, values, a, b, n, number)
        repeated = {str(position): values[position % len(values)] for position in self.again}
        return values[-self.results :], repeated, values[0].numel()


def run_step(name: str, values: list[Tensor], a: int, b: int, n: int, number: int) -> None:
    step = STEPS.get(name) or DATA[name]
    made = step(values[a % len(values)], values[b % len(values)], number if n == INPUT_NUMBER else n)
    tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    if name in DATA and any(type(tensor) is Tensor and tensor.shape[:1] < (2,) for tensor in tensors):
        raise ValueError("a size out of the data that is 0 or 1")
    values.extend(tensors)


INPUTS: dict[str, Callable[[list[int], list[Tensor]], Tensor]] = {
    "plain": lambda shape, before: torch.randn(shape),
    "transposed": lambda shape, before: torch.randn(shape[::-1]).permute(*range(len(shape))[::-1]),
    "with gaps": lambda shape, before: torch.randn(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2],
    "integers": lambda shape, before: torch.randint(-3, 4, shape),
    "complex": lambda shape, before: torch.randn(shape, dtype=torch.complex64),
    "booleans": lambda shape, before: torch.randn(shape) > 0,
    "a view of another": lambda shape, before: before[-1].flatten()[:1] if before else torch.randn(shape),
    "another again": lambda shape, before: before[-1] if before else torch.randn(shape),
}
LIKELY = ("plain", "plain", "plain", "transposed", "with gaps")


@st.composite
def inputs_of_programs(draw: st.DrawFn) -> list[Tensor]:
    size = st.integers(1, 4)
    inputs: list[Tensor] = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(size, min_size=1, max_size=3))
        inputs.append(INPUTS[draw(st.sampled_from((*LIKELY, *INPUTS)))](shape, inputs))
    return inputs


@st.composite
def programs(draw: st.DrawFn, steps: tuple[str, ...] = tuple(STEPS)) -> tuple[Program, int, list[Tensor]]:
    """A program that runs, and arguments for it: what can't run is left out."""
    torch.manual_seed(draw(st.integers(0, 99)))
    inputs = draw(inputs_of_programs())
    number = draw(st.integers(2, 4))
    kept: list[tuple[str, int, int, int]] = []
    for _ in range(draw(st.integers(1, 12))):
        place = st.integers(0, 9)
        step = (draw(st.sampled_from(steps)), draw(place), draw(place), draw(st.integers(0, 3)))
        if not _runs((*kept, step), number, inputs):
            continue
        kept.append(step)
    again = draw(st.lists(st.integers(0, 9), max_size=2))
    return Program(tuple(kept), draw(st.integers(1, 3)), tuple(again)), number, inputs


def _runs(steps: tuple[tuple[str, int, int, int], ...], number: int, inputs: list[Tensor]) -> bool:
    values = list(copy.deepcopy(inputs))
    torch.manual_seed(0)
    try:
        for name, a, b, n in steps:
            run_step(name, values, a, b, n, number)
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return False
    return all(value.numel() <= MOST_ELEMENTS for value in values) and len(values) < 40
