"""Programs for export, each with inputs for three sizes; the first is the example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Sizes = tuple[int, int]


@dataclass
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Any, ...]]
    dynamic: Any = None
    """What is asked of the inputs, as in torch.export; None for a program of fixed sizes."""
    is_unlike_torch: str = ""
    """Why torch's own program is not compared with."""


CASES: dict[str, Case] = {}
AUTO = torch.export.Dim.AUTO
ROWS = ({0: torch.export.Dim.DYNAMIC},)
BOTH = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)


def one(b: int, n: int) -> tuple[Any, ...]:
    return (torch.randn(b, n, generator=torch.Generator().manual_seed(b)),)


def case(
    inputs: Callable[[int, int], tuple[Any, ...]] = one, dynamic: Any = ROWS, **options: Any
) -> Callable[[Any], Any]:
    def register(kind: Any) -> Any:
        CASES[kind.__name__] = Case(kind, inputs, dynamic, **options)
        return kind

    return register


@case()
class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x: Any) -> Any:
        return self.net(x)


@case()
class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))


@case()
class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(6), persistent=False)

    def forward(self, x: Any) -> Any:
        self.count.add_(1)
        self.seen[1:3] += x.sum()
        return x + self.count, self.seen * 2


@case()
class AssignsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        self.total = self.total + x.sum(0)
        return x + self.total


@case()
class BatchNormInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Any) -> Any:
        return self.norm(x)


@case()
class WritesInput(nn.Module):
    def forward(self, x: Any) -> Any:
        x[:, 1:3].mul_(2)
        x.add_(1)
        return x.sum(1), x.t()


@case()
class WritesThroughViews(nn.Module):
    def forward(self, x: Any) -> Any:
        y = x.clone()
        rows, flat = y.unbind(1), y.view(-1)
        rows[2].zero_()
        flat[:2] = 7
        y.transpose(0, 1)[0].neg_()
        return rows[2] + 1, flat * 2, y


@case()
class ReturnsItsInput(nn.Module):
    def forward(self, x: Any) -> Any:
        return {"same": x, "view": x[:, :2], "new": [x + 1, None, 3]}


@case()
class FillsInPlace(nn.Module):
    def forward(self, x: Any) -> Any:
        mask = torch.zeros_like(x)
        mask[x > 0] = 1.0
        mask.masked_fill_(x < -1, 2.0).clamp_(max=1.5)
        return F.relu_(x * mask)


@case()
class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def forward(self, x: Any) -> Any:
        return x * self.scale + torch.tensor([0.5, 1.5, 2.5, 0.0, 0.0, 1.0])


@case()
class LayersInAList(nn.Module):
    """Not registered: their parameters are constants of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(6, 6), nn.Linear(6, 6)]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@case()
class NoGradRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            scale = self.linear(x).abs().amax()
        y = self.linear(x) / scale
        with torch.no_grad():
            y = y + 1
            with torch.enable_grad():
                y = y * self.linear.bias
        return y


@case()
class WritesWithoutGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


@case()
class AutocastRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.float() + self.linear(x)


@case()
class ChoosesBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x - 1, (x,))


@case(dynamic=BOTH)
class SizesInArithmetic(nn.Module):
    def forward(self, x: Any) -> Any:
        b, n = x.shape
        y = torch.arange(n, device=x.device) / n + torch.full((b, 1), b * 2)
        return y.reshape(b * n), n


@case()
class UnknownSizes(nn.Module):
    def forward(self, x: Any) -> Any:
        found = x[x > 0]
        return found * 2, torch.nonzero(x).sum()


@case()
class ReadsNumber(nn.Module):
    def forward(self, x: Any) -> Any:
        n = (x.abs().sum().long() % 3 + 1).item()
        torch._check(n >= 1)
        torch._check(n <= 3)
        return torch.ones(n, 6) * 2


def pair(b: int, n: int) -> tuple[Any, ...]:
    return {"a": torch.ones(b, n), "more": [torch.randn(b, 3), 2.5]}, torch.randn(b)


@case(
    pair,
    dynamic=(
        {"a": {0: torch.export.Dim("b")}, "more": [{0: torch.export.Dim("b")}, None]},
        {0: torch.export.Dim("b")},
    ),
)
class NestedInputs(nn.Module):
    def forward(self, parts: Any, scale: Any) -> Any:
        return parts["a"].sum(1) * scale + parts["more"][0][:, 0] * parts["more"][1]


def grown(b: int, n: int) -> tuple[Any, ...]:
    return torch.randn(b, 4), torch.randn(2 * b + 1, 4)


_b = torch.export.Dim("b", min=2, max=64)


@case(grown, dynamic=({0: _b}, {0: 2 * _b + 1}))
class DerivedSizes(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return torch.cat([x, x, y[:1]]) + y


@case(dynamic=({0: AUTO, 1: AUTO},))
class AutoSizes(nn.Module):
    def forward(self, x: Any) -> Any:
        return x @ torch.ones(6, 2)


@case(lambda b, n: (torch.randn(b, 3, 8, 8),))
class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.eval()

    def forward(self, x: Any) -> Any:
        y = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return F.interpolate(y, scale_factor=2.0, mode="bilinear")


@case(lambda b, n: (torch.randn(b, 5, 8),))
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]


@case(lambda b, n: (torch.randn(b, 5, 8),))
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 4)

    def forward(self, x: Any) -> Any:
        h = c = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return h


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        return self.linear(x).sin() * scale


@case()
class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Shared()

    def forward(self, x: Any) -> Any:
        return self.part(self.part(x), scale=2.0)


@case(lambda b, n: (torch.randn(b, 6), torch.zeros(b, 4, 6)))
class KeyValueCache(nn.Module):
    def forward(self, x: Any, cache: Any) -> Any:
        cache[:, 2] = x
        cache.narrow(1, 0, 2).copy_(x[:, None] * 2)
        return (cache * x[:, None]).sum(1)


CASES["KeyValueCache"].dynamic = ({0: _b}, {0: _b})


@torch.library.custom_op("understudy_exporting::accumulate", mutates_args=("total",))
def accumulate(x: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(x.sum())


@torch.library.custom_op("understudy_exporting::split_off", mutates_args=("rest", "last"))
def split_off(
    x: torch.Tensor, rest: torch.Tensor, last: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rest.mul_(2)
    if last is not None:
        last.add_(1)
    return x * 2, x + 1


@split_off.register_fake
def _(
    x: torch.Tensor, rest: torch.Tensor, last: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("understudy_exporting::shift_all", mutates_args=("parts",))
def shift_all(parts: list[torch.Tensor], by: torch.Tensor) -> torch.Tensor:
    for part in parts:
        part.add_(by)
    return by * 2


@shift_all.register_fake
def _(parts: list[torch.Tensor], by: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(by)


@case()
class CustomOperatorsThatWrite(nn.Module):
    """To a buffer, a view of it, a view of the input, several tensors, and what was written before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("table", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> Any:
        accumulate(x, self.total)
        accumulate(x, self.table[1])
        first, second = split_off(x.clone(), x[:, 1])
        own = first * 3
        shifted = shift_all([own, self.table], second.sum())
        _, third = split_off(second, own, self.total)
        return first + second, self.table * 1, shifted, x + 0, own + third, self.total.sum()


@case()
class OddNames(nn.Module):
    """Of modules, parameters and buffers that are alike once they are identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("a-b", "a b", "1x", "A_b")})
        self.numbers = nn.ParameterDict(
            {"k-1": nn.Parameter(torch.ones(6)), "K_1": nn.Parameter(torch.zeros(6))}
        )
        self.register_buffer("x", torch.ones(6))

    def forward(self, x: Any) -> Any:
        for part in self.parts.values():
            x = part(x)
        return x * self.numbers["k-1"] + self.numbers["K_1"] + self.x


class Asserts(nn.Module):
    """Not in a test's own file, where pytest rewrites `assert`."""

    def forward(self, x: Any, n: Any) -> Any:
        assert n.item() <= x.shape[0], "too many"
        assert 0 < n.item() < 500 and n.item() != 3
        return x * 2


class AssertsOfTensors(nn.Module):
    """Conditions that are tensors, negated ones, and several in one statement."""

    def forward(self, x: Any) -> Any:
        assert x.max() < 100
        assert not x.isnan().any(), "numbers"
        assert (x > -100).all() and not (x == 7).any().item()
        return x * 2
