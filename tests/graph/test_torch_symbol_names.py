"""Inside of torch's own compiler: inputs with sizes that are symbols of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from understudy import make_fx

NET = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def of_sizes(x: Tensor) -> Tensor:
    rows = (NET(x).view(-1, 2) * x.shape[0]).reshape(x.shape[0] * 2, -1)
    return rows.cumsum(0)[: x.shape[0] // 2 + 1]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_backend_is_given_sizes(mode: str) -> None:
    graphs = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(make_fx(module, tracing_mode=mode)(*inputs))
        return graphs[-1]

    compiled = torch.compile(lambda x: NET(x) * x.shape[0], backend=backend, dynamic=True)
    with torch.no_grad():
        for count in (3, 5):
            x = torch.randn(count, 4)
            torch.testing.assert_close(compiled(x), NET(x) * count)
    assert len(graphs) == 1


def test_graphs_of_torchs_stand_ins_with_symbolic_sizes() -> None:
    graphs = []

    def compiler(module: Any, inputs: Any) -> Any:
        graphs.append(make_fx(module)(*inputs))
        return make_boxed_func(graphs[-1].forward)

    compiled = torch.compile(of_sizes, backend=aot_autograd(fw_compiler=compiler), dynamic=True)
    for count in (3, 5, 8):
        x = torch.randn(count, 4, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x).sum(), x)
        (expected,) = torch.autograd.grad(of_sizes(x).sum(), x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(compiled(x), of_sizes(x))
    assert len(graphs) == 2  # one forward, one backward
    assert not any("s77" in graph.code for graph in graphs)
