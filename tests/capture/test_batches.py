"""Transforms of torch.func on symbolic sizes: sizes stay symbols, and our rules give what torch's own give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, vmap
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp
from torch.utils._pytree import tree_leaves

from understudy import make_fx
from understudy.fake.kernels.transforms import RULES_IN_USE
from understudy.ops.shared.batching import batching_rule
from understudy.ops.views import split_and_join

aten = torch.ops.aten
Function = Callable[..., Any]


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def specialised(graph: Any) -> list[str]:
    return [str(guard.condition) for guard in graph.shape_env.guards if guard.is_specialisation]


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


def where(x: Tensor) -> Tensor:
    """Places among two."""
    return (x > 0).long()


PAIRS: dict[str, tuple[Function, list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {
    "cat": (lambda a, b: torch.cat([a, b], -1), [((4, 5), (4, 2))]),
    "cat, in front": (lambda a, b: torch.cat([a, b]), [((4, 5), (3, 5)), ((4,), (3,))]),
    "cat, with nothing": (lambda a, b: torch.cat([a, b.flatten()[:0]]), [((4, 5), (3, 5))]),
    "gather": (lambda a, b: a.gather(-1, where(b)), [((4, 5), (4, 2)), ((5,), (2,)), ((5,), ())]),
    "gather, of a number": (lambda a, b: a.gather(0, 0 * where(b)), [((), (2,)), ((), ())]),
    "scatter": (lambda a, b: a.scatter(-1, where(b), b), [((4, 5), (4, 1)), ((5,), (1,))]),
    "scatter, a number": (lambda a, b: a.scatter(0, where(b), 2.5), [((4, 5), (1, 5))]),
    "scatter_add": (lambda a, b: a.scatter_add(0, where(b), b), [((4, 5), (4, 3)), ((5,), (3,))]),
    "scatter_add, to a number": (lambda a, b: a.scatter_add(0, 0 * where(b), b), [((), ())]),
    "layer_norm": (lambda a, b: F.layer_norm(a, (5,), b, 2 * b), [((4, 5), (5,)), ((5,), (5,))]),
    "layer_norm, no bias": (lambda a, b: F.layer_norm(a, (4, 5), b), [((3, 4, 5), (4, 5))]),
    "group_norm": (lambda a, b: F.group_norm(a, 2, b, 2 * b), [((3, 4, 5), (4,)), ((3, 4, 5, 2), (4,))]),
    "group_norm, no bias": (lambda a, b: F.group_norm(a, 4, b), [((3, 4), (4,)), ((3, 4, 5), (4,))]),
    "linear": (
        lambda a, b: F.linear(a, b, b.sum(-1)),
        [((5,), (2, 5)), ((4, 5), (2, 5)), ((3, 4, 5), (2, 5))],
    ),
    "conv1d": (
        lambda a, b: F.conv1d(a, b, b.sum((1, 2)), stride=2, padding=1, groups=2),
        [((3, 4, 9), (6, 2, 3)), ((4, 9), (6, 2, 3))],
    ),
    "conv2d": (lambda a, b: F.conv2d(a, b, dilation=2), [((3, 2, 7, 8), (5, 2, 2, 3))]),
    "conv_transpose1d": (
        lambda a, b: F.conv_transpose1d(a, b, b.sum((0, 2)).repeat(2), stride=2, groups=2),
        [((3, 4, 9), (4, 3, 3))],
    ),
    "mse_loss": (F.mse_loss, [((4, 5), (4, 5)), ((), ())]),
    "mse_loss, none": (lambda a, b: F.mse_loss(a, b, reduction="none"), [((4, 5), (4, 5))]),
    "smooth_l1_loss": (lambda a, b: F.smooth_l1_loss(a, b, reduction="sum", beta=0.3), [((4, 5), (4, 5))]),
    "huber_loss": (lambda a, b: F.huber_loss(a, b, delta=0.3), [((4, 5), (4, 5))]),
    "attention": (lambda a, b: F.scaled_dot_product_attention(a, b, b), [((2, 3, 4, 8), (2, 3, 5, 8))]),
    "attention, masked": (
        lambda a, b: F.scaled_dot_product_attention(a, a, a, b),
        [((2, 3, 4, 8), (4, 4)), ((2, 3, 4, 8), (2, 1, 4, 4))],
    ),
}
SINGLE: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "chunk": (lambda a: a.chunk(2, -1), [(4, 6), (5,)]),
    "slice": (lambda a: a[..., 1:-1], [(4, 6), (5,)]),
    "gelu": (F.gelu, [(4, 6)]),
    "gelu, tanh": (lambda a: F.gelu(a, approximate="tanh"), [(4,)]),
    "embedding": (
        lambda a: aten.embedding_dense_backward(a, torch.tensor([[0, 2], [2, 5]]), 7, 2, True),
        [(2, 2, 3)],
    ),
    "max_pool2d": (lambda a: F.max_pool2d(a, 2, padding=1), [(2, 3, 8, 6), (3, 8, 6)]),
    "avg_pool2d": (lambda a: F.avg_pool2d(a, 2), [(2, 3, 8, 6), (3, 8, 6)]),
    "adaptive_avg_pool2d": (lambda a: F.adaptive_avg_pool2d(a, 3), [(2, 3, 8, 6), (3, 8, 6)]),
}


def by_our_rules(f: Function) -> Any:
    RULES_IN_USE.begin()
    try:
        return f()
    finally:
        RULES_IN_USE.end()


def gradients_of(f: Function, count: int) -> Function:
    def loss(*args: Tensor) -> Tensor:
        return sum(part.sin().sum() for part in tree_leaves(f(*args)))

    return grad(loss, argnums=tuple(range(count)))


PAIR_CASES = [(name, shapes) for name, (_, cases) in PAIRS.items() for shapes in cases]
SINGLE_CASES = [(name, shape) for name, (_, cases) in SINGLE.items() for shape in cases]


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:There is a performance drop")
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (-1, 0)])
@pytest.mark.parametrize(("name", "shapes"), PAIR_CASES)
def test_rules_of_two_tensors(name: str, shapes: Any, in_dims: Any) -> None:
    f, _ = PAIRS[name]
    args = [
        r(7, *shape).movedim(0, dim) if dim is not None else r(*shape)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    for function in (f, gradients_of(f, 2)):
        batched = vmap(function, in_dims=in_dims)
        assert_same(by_our_rules(lambda batched=batched: batched(*args)), batched(*args))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("in_dims", [0, -1])
@pytest.mark.parametrize(("name", "shape"), SINGLE_CASES)
def test_rules_of_one_tensor(name: str, shape: Any, in_dims: int) -> None:
    f, _ = SINGLE[name]
    x = r(7, *shape).movedim(0, in_dims)
    for function in (f, gradients_of(f, 1)) if name != "embedding" else (f,):
        batched = vmap(function, in_dims=in_dims)
        assert_same(by_our_rules(lambda batched=batched: batched(x)), batched(x))


def test_two_levels() -> None:
    f = vmap(vmap(lambda a, b: torch.cat([a, b]), in_dims=(0, None)), in_dims=(0, 1))
    args = r(3, 4, 5), r(2, 3)
    assert_same(by_our_rules(lambda: f(*args)), f(*args))


@pytest.mark.parametrize(
    "f", [lambda a: torch.cat([a, a], 1), lambda a: torch.cat([a, a], -2), lambda a: a.chunk(2, 3)]
)
def test_dimensions_that_are_not_there(f: Function) -> None:
    with pytest.raises(IndexError, match=r"Dimension out of range \(expected to be in range of \[-1, 0\]"):
        by_our_rules(lambda: vmap(f)(r(3, 4)))


OPEN: dict[str, Function] = {
    **{f"vmap of {name}": lambda x, f=f: vmap(lambda a: f(a, a + 1))(x) for name, f in {
        "cat": lambda a, b: torch.cat([a, b], 1), "losses": F.mse_loss, "layer_norm": lambda a, b: F.layer_norm(a, (8,)),
    }.items()},
    "vmap of linear": lambda x: vmap(lambda a: F.linear(a[None], a.new_ones(3, 8), a.new_ones(3)))(x),
    "vmap of conv1d": lambda x: vmap(lambda a: F.conv1d(a[None], a[:2, :3][:, None].expand(2, a.shape[0], 3)))(x),
    "vmap of chunk": lambda x: vmap(lambda a: a.chunk(2, -1))(x),
    "vmap of a gradient of slices": lambda x: vmap(grad(lambda a: a[1:].sin().sum()))(x),
    "vmap of attention": lambda x: vmap(lambda a: F.scaled_dot_product_attention(*[a[None, None]] * 3))(x),
    "grad of linear": lambda x: grad(lambda a: F.linear(a, a.new_ones(3, 8), a.new_ones(3)).sin().sum())(x),
    "vmap of a quotient by a size": lambda x: vmap(lambda a: a.sum() / a.shape[0] - a.numel())(x),
    "vmap of kron": lambda x: vmap(lambda a: torch.kron(a, a[:2]))(x),
    "vmap of cov": lambda x: vmap(torch.cov)(x),
    "vmap of take_along_dim": lambda x: vmap(lambda a: torch.take_along_dim(a, a.argsort(-1), -1))(x),
    "vmap of slice_scatter": lambda x: vmap(lambda a: a.slice_scatter(a[1:], 0, 1))(x),
    "vmap of select_scatter": lambda x: vmap(lambda a: a.select_scatter(a[0], 0, 1))(x),
    "jacrev of jacfwd": lambda x: jacrev(jacfwd(lambda a: a.sin() * a))(x[0, :2]),
    "jacrev of jacrev": lambda x: jacrev(jacrev(lambda a: (a.sin() * a).sum()))(x[0, :2]),
    "hessian": lambda x: hessian(lambda a: (a.sin() * a).sum())(x[0, :2]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_sizes_stay_symbols(name: str) -> None:
    f = OPEN[name]
    graph = make_fx(f, tracing_mode="symbolic")(r(5, 6, 8))
    assert specialised(graph) == []
    for shape in ((5, 6, 8), (7, 9, 8)):
        x = r(*shape)
        assert_same(graph(x), f(x))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_interpolation_fixes_sizes(mode: str) -> None:
    def f(x: Tensor) -> Any:
        return vmap(lambda a: F.interpolate(a[None], scale_factor=2, mode=mode))(x)

    x = r(5, 3, 6, 8)
    graph = make_fx(f, tracing_mode="symbolic")(x)
    assert specialised(graph)
    assert_same(graph(x), f(x))


MODELS: dict[str, tuple[Function, Function]] = {
    "norms": (
        lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)),
        lambda n: r(n, 8),
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2)),
        lambda n: r(n, 2, 8, 8),
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU()),
        lambda n: r(n, 2, 9),
    ),
    "embeddings": (
        lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)),
        lambda n: torch.randint(0, 10, (n, 6)),
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        lambda n: r(n, 6, 8),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_for_each_sample(name: str) -> None:
    make, inputs = MODELS[name]
    model = make().double()
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def f(x: Tensor) -> Any:
        def loss(parameters: Any, sample: Tensor) -> Any:
            return functional_call(model, parameters, (sample[None],)).pow(2).sum()

        return vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x)

    assert parameters
    graph = make_fx(f, tracing_mode="symbolic")(inputs(5))
    assert specialised(graph) == []
    x = inputs(7)
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
    "choices": lambda x: torch.combinations(x),
    "differences with spaces": lambda x: torch.gradient(x, spacing=[0.5])[0],
    "product of several": lambda x: torch.linalg.multi_dot([x, x.outer(x), x]),
    "a norm": lambda x: torch.linalg.norm(x.outer(x) + x.diag(), 1),
    "the smallest norm": lambda x: torch.linalg.matrix_norm(x.outer(x + 1) + x.diag(), -2, keepdim=True),
    "weighted entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid().detach() ** 2, weight=x.detach() ** 2),
    "masked places": lambda x: aten._unsafe_masked_index(x, x > 0, [torch.arange(x.shape[0])], 2.0),
    "masked sums": lambda x: aten._unsafe_masked_index_put_accumulate(x, x > 0, [torch.arange(x.shape[0])], x * x),
    "pooled": lambda x: F.max_pool1d(x.view(1, 1, -1), 2),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", AROUND)
@pytest.mark.parametrize("name", BELOW)
def test_below_transforms(name: str, transform: str) -> None:
    """What C++ computes of plain integers where tensors are wrapped."""
    f = AROUND[transform](BELOW[name])
    shape = (lambda n: (2 + n, n)) if transform.startswith("vmap") else lambda n: (n,)
    x = r(*shape(4))

    def run(function: Function, x: Tensor) -> Any:
        torch.manual_seed(0)
        return function(x)

    try:
        run(f, x)
    except RuntimeError:  # a random operator where nothing may be drawn, or a write of a batch into what is none
        with pytest.raises(RuntimeError):
            make_fx(f, tracing_mode="symbolic")(x)
        return
    graph = make_fx(f, tracing_mode="symbolic")(x)
    for size in (4, 6) if not specialised(graph) else (4,):
        x = r(*shape(size))
        assert_same(run(graph, x), run(f, x))


@pytest.mark.parametrize("name", ["dropout", "a slice that begins later", "a column", "product of several", "noise"])
def test_sizes_below_transforms_stay_open(name: str) -> None:
    for transform in ("jvp of grad", "jacrev", "functionalize"):
        assert specialised(make_fx(AROUND[transform](BELOW[name]), tracing_mode="symbolic")(r(4))) == []


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


def test_rules_are_taken_back() -> None:
    def kernel() -> str:
        table = torch._C._dispatch_dump_table("aten::cat").split("\n")
        return next(line for line in table if line.startswith("FuncTorchBatched:"))

    before = kernel()
    inside = by_our_rules(kernel)
    make_fx(OPEN["vmap of cat"], tracing_mode="symbolic")(r(5, 6, 8))
    assert kernel() == before != inside
    assert set(batching_rule) >= {"aten::cat", "aten::convolution", "aten::slice_backward"}


def test_a_rule_of_the_program_is_kept() -> None:
    called = []

    def cat(keys: Any, tensors: Any, dim: int = 0) -> Any:
        called.append(len(tensors))
        return split_and_join.batch_cat(keys, tensors, dim)

    library = torch.library.Library("aten", "IMPL")
    library.impl("cat", cat, "FuncTorchBatched", with_keyset=True)
    x = r(5, 6, 8)
    graph = make_fx(OPEN["vmap of cat"], tracing_mode="symbolic")(x)
    assert called == [2]
    assert_same(graph(x), OPEN["vmap of cat"](x))


def test_views_are_tracked_as_before() -> None:
    def f(x: Tensor) -> Any:
        if x.sum().item() > 0:
            raise KeyError
        return x

    for before in (False, True):
        with torch.autograd._force_original_view_tracking(before):
            make_fx(vmap(lambda x: x + 1), tracing_mode="symbolic")(r(4, 3))
            with pytest.raises(RuntimeError):
                make_fx(vmap(f), tracing_mode="symbolic")(r(4, 3))
            assert torch.autograd.is_view_replay_enabled() == before
    assert RULES_IN_USE._count == 0
