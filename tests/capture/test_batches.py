"""Transforms of torch.func on symbolic sizes: sizes stay symbols, or C++ rules fix them with guards, or an error says so.

Never is a graph wrong at sizes that its guards admit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, vmap
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp
from torch.utils._pytree import tree_leaves

from understudy import GuardOnDataDependentSymNode, make_fx

aten = torch.ops.aten
Function = Callable[..., Any]


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def specialised(graph: Any) -> list[str]:
    return [str(guard.condition) for guard in graph.shape_env.guards if guard.is_specialisation]


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


OPEN: dict[str, Function] = {
    "vmap of softmax": lambda x: vmap(lambda a: a.softmax(-1))(x),
    "vmap of losses": lambda x: vmap(lambda a: F.mse_loss(a, a + 1))(x),
    "vmap of a quotient by a size": lambda x: vmap(lambda a: a.sum() / a.shape[0] - a.numel())(x),
    "vmap of products": lambda x: vmap(lambda a: a @ a.mT)(x),
    "hessian": lambda x: hessian(lambda a: (a.sin() * a).sum())(x[0, :2]),
}


@pytest.mark.parametrize("name", OPEN)
def test_sizes_stay_symbols(name: str) -> None:
    f = OPEN[name]
    graph = make_fx(f, tracing_mode="symbolic")(r(5, 6, 8))
    assert specialised(graph) == []
    for shape in ((5, 6, 8), (7, 9, 8)):
        x = r(*shape)
        assert_same(graph(x), f(x))


FIXED: dict[str, Function] = {
    "chunk": lambda x: vmap(lambda a: a.chunk(2, -1))(x),
    "jacrev of jacfwd": lambda x: jacrev(jacfwd(lambda a: a.sin() * a))(x[0, :2]),
    "jacrev of jacrev": lambda x: jacrev(jacrev(lambda a: (a.sin() * a).sum()))(x[0, :2]),
    "cat": lambda x: vmap(lambda a: torch.cat([a, a]))(x),
    "conv1d": lambda x: vmap(lambda a: F.conv1d(a[None], a[:2, :3][:, None].expand(2, a.shape[0], 3)))(x),
    "layer_norm": lambda x: vmap(lambda a: F.layer_norm(a, (8,)))(x),
    "a gradient of slices": lambda x: vmap(grad(lambda a: a[1:].sin().sum()))(x),
    "grad of linear": lambda x: grad(lambda a: F.linear(a, a.new_ones(3, 8), a.new_ones(3)).sin().sum())(x),
}


@pytest.mark.parametrize("name", FIXED)
def test_rules_of_torch_fix_sizes(name: str) -> None:
    """Where C++ reads sizes as plain integers, each is a guard."""
    f, x = FIXED[name], r(5, 6, 8)
    graph = make_fx(f, tracing_mode="symbolic")(x)
    assert specialised(graph)
    assert_same(graph(x), f(x))


def along_ones(f: Function) -> Function:
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))


def total(f: Function) -> Function:
    return lambda x: (f(x) ** 2).sum()


AROUND: dict[str, Callable[[Function], Function]] = {
    "vmap": lambda f: vmap(f, randomness="same"),
    "vmap, drawn for each": lambda f: vmap(f, randomness="different"),
    "vmap, nothing drawn": vmap,
    "vmap of grad": lambda f: vmap(grad(total(f)), randomness="different"),
    "vmap of jvp": lambda f: vmap(along_ones(f), randomness="different"),
    "jvp of grad": lambda f: along_ones(grad(total(f))),
    "jacrev": jacrev,
    "jacfwd": lambda f: jacfwd(f, randomness="same"),
    "functionalize": functionalize,
}


def changed(x: Tensor, view: Callable[[Tensor], Tensor], write: Callable[[Tensor, Tensor], object]) -> Tensor:
    """A new tensor, twice as long, that is written to by a view."""
    y = torch.ones(2 * x.shape[0], dtype=x.dtype)
    write(view(y), x * x)
    return y


BELOW: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout of nothing": lambda x: F.dropout(x, 0.5, training=False) * 2,
    "dropout of features": lambda x: F.dropout1d(x.view(1, -1, 1).expand(2, x.shape[0], 3), 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.25, training=True),
    "alpha dropout of features": lambda x: F.feature_alpha_dropout(x.view(1, -1, 1), 0.5, training=True),
    "noise": lambda x: x * torch.empty_like(x).normal_(),
    "noise of its own": lambda x: x * torch.zeros(x.shape[0], dtype=x.dtype).uniform_(1, 2),
    "a slice": lambda x: changed(x, lambda y: y[: x.shape[0]], Tensor.copy_),
    "a slice that begins later": lambda x: changed(x, lambda y: y[1 : x.shape[0] + 1], Tensor.add_),
    "a row": lambda x: changed(x, lambda y: y.view(2, -1)[1], Tensor.mul_),
    "a column": lambda x: changed(x, lambda y: y.unflatten(0, (-1, 2))[:, 1], Tensor.copy_),
    "a part": lambda x: changed(x, lambda y: y.chunk(2)[1], Tensor.copy_),
    "every second": lambda x: changed(x, lambda y: y.as_strided((x.shape[0],), (2,)), Tensor.copy_),
    "an item of the input's copy": lambda x: changed(x * 1, lambda y: y[0], lambda item, x: item.copy_(x.sum())),
    "a norm": lambda x: torch.linalg.norm(x.outer(x) + x.diag(), 1),
    "weighted entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid().detach() ** 2, weight=x.detach() ** 2),
    "masked places": lambda x: aten._unsafe_masked_index(x, x > 0, [torch.arange(x.shape[0])], 2.0),
    "masked sums": lambda x: aten._unsafe_masked_index_put_accumulate(x, x > 0, [torch.arange(x.shape[0])], x * x),
    "pooled": lambda x: F.max_pool1d(x.view(1, 1, -1), 2),
}  # fmt: skip


REFUSED = ("on tensor with symbolic sizes", "expected to contain only concrete integers", "isIntList()")
"""Texts of C++ where its rule reads plain integers: torch's own `make_fx` fails there in the same way."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", AROUND)
@pytest.mark.parametrize("name", BELOW)
def test_below_transforms(name: str, transform: str) -> None:
    """A graph computes what the program computes, at all sizes that its guards admit; or C++ refuses symbolic sizes."""
    f = AROUND[transform](BELOW[name])
    shape = (lambda n: (2 + n, n)) if transform.startswith("vmap") else lambda n: (n,)
    x = r(*shape(4))

    def run(function: Function, x: Tensor) -> Any:
        torch.manual_seed(0)
        return function(x)

    try:
        graph = make_fx(f, tracing_mode="symbolic")(x)
    except GuardOnDataDependentSymNode:
        return
    except RuntimeError as error:
        if not any(text in str(error) for text in REFUSED):  # eager refuses it as well
            with pytest.raises(RuntimeError):
                run(f, x)
        return
    for size in (4, 6) if not specialised(graph) else (4,):
        x = r(*shape(size))
        assert_same(run(graph, x), run(f, x))


@pytest.mark.parametrize("numbers", [[1.0, -torch.inf, 2.0], [-torch.inf]])
def test_zeros_that_a_tangent_is_made_of_are_multiplied(numbers: list[float]) -> None:
    """0 * inf is NaN: eager stores a tangent of several zeros before it multiplies it."""
    f = along_ones(grad(lambda x: (x.abs() ** 2).sum()))
    x = torch.tensor(numbers)
    assert f(x)[1].isnan().any() == (len(numbers) > 1)
    torch.testing.assert_close(make_fx(f, tracing_mode="symbolic")(x)(x), f(x), equal_nan=True)


def test_the_operators_are_those_of_static_sizes() -> None:
    linear = nn.Linear(8, 4)
    f = grad(lambda a: linear(a).sin().sum())
    x = torch.randn(5, 6, 8)
    kept = [
        [str(n.target) for n in make_fx(f, tracing_mode=mode)(x).graph.nodes if "aten" in str(n.target) and "sym_" not in str(n.target)]
        for mode in ("fake", "symbolic")
    ]  # fmt: skip
    assert kept[0] == kept[1]
