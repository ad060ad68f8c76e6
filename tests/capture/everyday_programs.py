"""Programs of the kinds that people trace; `tests/capture/test_same_operators.py` compares their graphs with torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Program:
    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


PROGRAMS: list[Program] = []


def program(make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> Callable[..., Any]:
    """Register a function that returns what is traced, and its example inputs."""
    PROGRAMS.append(Program(make.__name__, make))
    return make


def functional(module: nn.Module, *inputs: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A module as a function of its parameters and inputs."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = list(state)

    def call(values: list[Tensor], *args: Any) -> Any:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), args)

    return call, ([value.detach() for value in state.values()], *inputs)


@program
def convolution() -> Any:
    return functional(nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 8, 8))


@program
def strided_convolution_with_groups() -> Any:
    return functional(nn.Conv2d(4, 8, 3, stride=2, groups=4), torch.randn(2, 4, 9, 9))


@program
def transposed_convolution() -> Any:
    return functional(nn.ConvTranspose2d(3, 4, 4, stride=2), torch.randn(2, 3, 5, 5))


@program
def convolution_and_pooling() -> Any:
    return functional(
        nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(3)),
        torch.randn(2, 3, 16),
    )


@program
def batch_norm_in_training() -> Any:
    return functional(nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5))


@program
def batch_norm_in_evaluation() -> Any:
    return functional(nn.BatchNorm2d(3).eval(), torch.randn(4, 3, 5, 5))


@program
def layer_norm() -> Any:
    return functional(nn.LayerNorm(16), torch.randn(4, 6, 16))


@program
def group_norm() -> Any:
    return functional(nn.GroupNorm(2, 4), torch.randn(3, 4, 6, 6))


@program
def rms_norm() -> Any:
    return functional(nn.RMSNorm(16), torch.randn(4, 6, 16))


@program
def dropout() -> Any:
    return (lambda x: F.dropout(x, 0.5, True)), (torch.randn(4, 8),)


@program
def dropout_in_evaluation() -> Any:
    return (lambda x: F.dropout(x, 0.5, False) + 1), (torch.randn(4, 8),)


@program
def attention() -> Any:
    return F.scaled_dot_product_attention, tuple(torch.randn(2, 4, 8, 16) for _ in range(3))


@program
def causal_attention() -> Any:
    return (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), tuple(
        torch.randn(2, 4, 8, 16) for _ in range(3)
    )


@program
def multi_head_attention() -> Any:
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    return functional(layer, *(torch.randn(2, 6, 16) for _ in range(3)))


@program
def transformer_layer() -> Any:
    return functional(
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), torch.randn(2, 6, 16)
    )


@program
def lstm() -> Any:
    return functional(nn.LSTM(8, 16, batch_first=True), torch.randn(2, 5, 8))


@program
def gru() -> Any:
    return functional(nn.GRU(8, 16, batch_first=True), torch.randn(2, 5, 8))


@program
def embedding_and_loss() -> Any:
    def call(weight: Tensor, ids: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.embedding(ids, weight), target)

    return call, (torch.randn(20, 8), torch.randint(20, (6,)), torch.randint(8, (6,)))


@program
def indexing() -> Any:
    return (lambda x, i: x[:, i] + x[1:2, :3].sum() - x[..., -1:]), (torch.randn(4, 6), torch.tensor([0, 2]))


@program
def index_assignment() -> Any:
    def call(x: Tensor, i: Tensor) -> Tensor:
        y = x.clone()
        y[i] = 0
        y[:, 1] += 2
        return y

    return call, (torch.randn(4, 6), torch.tensor([0, 2]))


@program
def gather_and_scatter() -> Any:
    def call(x: Tensor, i: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(1, i, x.gather(1, i))

    return call, (torch.randn(4, 6), torch.randint(6, (4, 6)))


@program
def writes_in_place() -> Any:
    def call(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1).mul_(x)
        y.relu_()
        return y

    return call, (torch.randn(4, 6),)


@program
def write_to_an_input() -> Any:
    def call(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    return call, (torch.randn(4, 6),)


@program
def views() -> Any:
    return (
        lambda x: x.view(2, 2, 6).transpose(0, 2).reshape(6, -1).flatten().unflatten(0, (6, 4)).unsqueeze(1)
    ), (torch.randn(4, 6),)


@program
def writes_through_a_view() -> Any:
    def call(x: Tensor) -> Tensor:
        y = x + 1
        y.t()[0].fill_(3)
        return y

    return call, (torch.randn(4, 6),)


@program
def split_and_join() -> Any:
    return (
        lambda x: torch.cat([part * 2 for part in x.chunk(2, 1)][::-1], 1) + torch.stack(x.unbind(0), 0)
    ), (torch.randn(4, 6),)


@program
def branch_on_a_size() -> Any:
    return (lambda x: x * 2 if x.shape[0] > 3 else x + 1), (torch.randn(4, 6),)


@program
def loop_over_a_size() -> Any:
    def call(x: Tensor) -> Tensor:
        total = x[0]
        for _ in range(3):
            total = total + x.sum(0)
        return total / x.shape[0]

    return call, (torch.randn(4, 6),)


@program
def interpolation() -> Any:
    return (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)), (
        torch.randn(1, 3, 4, 4),
    )


@program
def reductions_and_softmax() -> Any:
    return (lambda x: torch.softmax(x, -1).var(0) + x.amax(0) - x.norm(dim=0) + x.mean()), (
        torch.randn(4, 6),
    )


@program
def einsum() -> Any:
    return (lambda a, b: torch.einsum("bij,bjk->bik", a, b)), (torch.randn(2, 3, 4), torch.randn(2, 4, 5))


@program
def constants_and_factories() -> Any:
    return (lambda x: x * torch.tensor(2.0) + torch.arange(x.shape[1]) + torch.ones(x.shape[0], 1)), (
        torch.randn(4, 6),
    )


@program
def gradients_inside() -> Any:
    def call(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = F.gelu(x @ weight).square().mean()
        return torch.autograd.grad(loss, (x, weight))

    return call, (torch.randn(4, 6), torch.randn(6, 3))


@program
def gradient_of_a_convolution() -> Any:
    def call(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        weight = weight.detach().requires_grad_()
        return torch.autograd.grad(F.conv2d(x, weight).relu().sum(), (weight,))

    return call, (torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3))


@program
def transforms() -> Any:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(lambda row: (row @ weight).sin().sum()))(x)

    return call, (torch.randn(4, 6), torch.randn(6, 3))
