"""inference_mode and no_grad: composite operators reach the mode whole, and the answers are the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.fake.sides import assert_like_eager, on_each_device
from understudy import DataDependentOutputException, FakeTensorMode, ShapeEnv, dims


def r(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device)


COMPOSITES: dict[str, Callable[[str], Any]] = {
    "linear": lambda d: F.linear(r(d, 2, 5, 4), r(d, 3, 4), r(d, 3)),
    "matmul": lambda d: r(d, 2, 3, 4) @ r(d, 4, 5),
    "matmul, vectors": lambda d: (r(d, 4) @ r(d, 4), r(d, 3, 4) @ r(d, 4), r(d, 4) @ r(d, 4, 3)),
    "einsum": lambda d: torch.einsum("bij,bjk->bik", r(d, 2, 3, 4), r(d, 2, 4, 5)),
    "dropout, off": lambda d: F.dropout(r(d, 3, 4), 0.5, training=False),
    "dropout": lambda d: F.dropout(r(d, 3, 4), 0.5, training=True),
    "attention, causal": lambda d: F.scaled_dot_product_attention(
        r(d, 2, 2, 5, 8).double(), r(d, 2, 2, 5, 8).double(), r(d, 2, 2, 5, 8).double(), is_causal=True
    ),
    "conv2d": lambda d: F.conv2d(r(d, 1, 2, 6, 6), r(d, 3, 2, 3, 3), padding=1),
    "layer_norm": lambda d: F.layer_norm(r(d, 3, 4), (4,)),
    "batch_norm": lambda d: F.batch_norm(r(d, 3, 4), r(d, 4), r(d, 4).abs()),
    "cross_entropy": lambda d: F.cross_entropy(r(d, 3, 4), torch.zeros(3, dtype=torch.int64, device=d)),
    "reshape, a view": lambda d: r(d, 3, 4).reshape(4, 3),
    "reshape, a copy": lambda d: r(d, 3, 4).t().reshape(4, 3),
    "contiguous": lambda d: (r(d, 3, 4).contiguous(), r(d, 3, 4).t().contiguous()),
    "to": lambda d: (r(d, 3).to(torch.float64), r(d, 3).to(torch.float32)),
    "chunk": lambda d: r(d, 6, 2).chunk(3),
    "split": lambda d: r(d, 6, 2).split([2, 4]),
    "stack": lambda d: torch.stack([r(d, 2), r(d, 2)]),
    "pad": lambda d: F.pad(r(d, 2, 3), (1, 2)),
    "interpolate": lambda d: F.interpolate(r(d, 1, 2, 4, 4), scale_factor=2.0, mode="bilinear"),
    "std": lambda d: r(d, 3, 4).std(0),
    "norm": lambda d: (r(d, 3, 4).norm(), torch.linalg.norm(r(d, 3, 4))),
    "tensordot": lambda d: torch.tensordot(r(d, 3, 4), r(d, 4, 5), dims=1),
    "outer": lambda d: torch.outer(r(d, 3), r(d, 4)),
    "index": lambda d: r(d, 5, 4)[torch.tensor([0, 2], device=d), 1:],
    "assign": lambda d: r(d, 5, 4).__setitem__(slice(0, 2), 1.0),
    "embedding": lambda d: F.embedding(torch.zeros(2, 3, dtype=torch.int64, device=d), r(d, 5, 4)),
    "gru": lambda d: torch.nn.GRU(4, 3).to(d)(r(d, 5, 2, 4)),
    "repeat_interleave, by a tensor": lambda d: torch.repeat_interleave(
        r(d, 3, 2), torch.tensor([1, 2, 3], device=d), 0, output_size=6
    ),
    "factors of complex matrices": lambda d: torch.linalg.lu_factor(
        torch.eye(3, dtype=torch.complex64, device=d)
    ),
    "symmetric factors": lambda d: torch.linalg.ldl_factor(torch.eye(3, dtype=torch.complex64, device=d)),
    "repeat_interleave": lambda d: r(d, 3, 2).repeat_interleave(2, 0),
    "meshgrid": lambda d: torch.meshgrid(r(d, 3), r(d, 2), indexing="ij"),
    "nonzero, known": lambda d: [
        torch.zeros(s, device=d).nonzero(as_tuple=True) for s in ((2, 3), (2, 0, 3))
    ],
    "unflatten": lambda d: r(d, 6, 2).unflatten(0, (2, 3)),
    "kron": lambda d: torch.kron(r(d, 2, 2), r(d, 3, 3)),
    "cosine_similarity": lambda d: F.cosine_similarity(r(d, 3, 4), r(d, 3, 4)),
    "multi_head_attention": lambda d: (
        torch.nn.MultiheadAttention(8, 2, batch_first=True).to(d).eval()(*[r(d, 2, 5, 8)] * 3)
    ),
    "encoder": lambda d: (
        torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(d).eval()(r(d, 2, 5, 8))
    ),
}


@on_each_device
@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_composites(name: str, guard: Any, device: str) -> None:
    def program(device: str) -> Any:
        with guard():
            return COMPOSITES[name](device)

    assert_like_eager(program, device)


@pytest.mark.parametrize("name", COMPOSITES)
def test_the_mode_entered_inside(name: str) -> None:
    with torch.inference_mode():
        assert_like_eager(COMPOSITES[name], "cpu")


@on_each_device
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_that_is_off_gives_its_input(device: str, p: float) -> None:
    with FakeTensorMode(), torch.inference_mode():
        x = torch.randn(3, device=device)
        assert F.dropout(x, p, training=False) is x
        assert (F.dropout(x, p, training=True) is x) == (p == 0)


@on_each_device
def test_inference_tensors(device: str) -> None:
    with FakeTensorMode():
        outside = torch.randn(3, device=device, requires_grad=True)
        with torch.inference_mode():
            inside = torch.randn(3, device=device)
            product = outside * inside
            assert inside.is_inference()
            assert product.is_inference()
            assert inside[1:].is_inference()
            inside.add_(1)
        assert not outside.is_inference()
        with pytest.raises(RuntimeError, match="inference"):
            inside.requires_grad_()
        with pytest.raises(RuntimeError, match=r"[Ii]nference"):
            inside.add_(1)
        with pytest.raises(RuntimeError, match=r"[Ii]nference"):
            (outside * inside).sum().backward()
        assert inside.clone().is_inference() is False


def test_lists_of_inference_tensors_can_be_written() -> None:
    with FakeTensorMode(), torch.inference_mode():
        tensors = [torch.zeros(3), torch.zeros(2)]
        torch._foreach_add_(tensors, 1)
        assert tensors[0].tolist() == [1.0, 1.0, 1.0]


def test_writes_in_inference_mode_to_ordinary_tensors_count() -> None:
    def program(device: str) -> Any:
        x = torch.zeros(3, device=device)
        with torch.inference_mode():
            x.add_(1)
            x[0] = 2
        return x, x._version

    assert_like_eager(program, "cpu")
    assert_like_eager(program, "cuda")


def test_conversion_keeps_inference() -> None:
    with torch.inference_mode():
        real = torch.zeros(3)
    assert FakeTensorMode().from_tensor(real).is_inference()


@pytest.mark.parametrize("normalise", ["batch_norm", "instance_norm"])
def test_statistics_that_are_written_without_a_word_in_the_schema(normalise: str) -> None:
    """In inference mode these operators reach the mode whole: the values of their statistics are no longer known."""
    with FakeTensorMode(), torch.inference_mode():
        mean, var = torch.zeros(3), torch.ones(3)
        assert mean.tolist() == [0.0, 0.0, 0.0]
        getattr(torch.nn.functional, normalise)(torch.empty(2, 3, 4, 4), mean, var, **{
            "batch_norm": {"training": True}, "instance_norm": {"use_input_stats": True}}[normalise])  # fmt: skip
        for statistics in (mean, var):
            with pytest.raises(DataDependentOutputException):
                statistics.tolist()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reshape": lambda x: x.reshape(3, 4),
    "flatten": torch.flatten,
    "T": lambda x: x.T,
    "broadcast_to": lambda x: x.broadcast_to(2, 2, 6),
    "atleast_3d": torch.atleast_3d,
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "hsplit": lambda x: torch.hsplit(x, 2)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
    "a copy": lambda x: x.T.reshape(-1),
    "itself": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_parameters_are_tracked(name: str) -> None:
    """In eager, the operators inside a composite one track them: a view in inference mode is of the parameter."""

    def look(x: torch.Tensor) -> tuple[object, ...]:
        with torch.inference_mode():
            view = VIEWS[name](x)
        version = None if view.is_inference() else view._version
        return view.requires_grad, view.is_leaf, view._is_view(), view._base is x, version

    real = torch.randn(2, 6, requires_grad=True)
    expected = look(real)
    with FakeTensorMode() as mode:
        assert look(mode.from_tensor(real)) == expected


@pytest.mark.parametrize("sizes", ["static", "symbolic"])
@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_tensors_of_their_own_on_the_same_memory(now: bool, target: bool, source: bool, sizes: str) -> None:
    """Another dtype of a tensor, and one that is set onto its memory, are for inference or not whatever the tensor is."""

    def look(make: Callable[[], torch.Tensor]) -> list[tuple[object, ...]]:
        with torch.inference_mode(source):
            x = make()
        with torch.inference_mode(target):
            y = make()
        views = (torch.int32, torch.float32, torch.complex64, torch.int16)
        with torch.inference_mode(now):
            found = [x.view(dtype) for dtype in views] + [torch.view_as_complex(x).view(torch.int64)]
            found += [x.view(torch.int32).add_(1)] if now or not source else []
            found += [y.set_(x)] if now or not target else []
        return [
            (tensor.is_inference(), None if tensor.is_inference() else tensor._version) for tensor in found
        ]

    expected = look(lambda: torch.ones(2, 2))
    mode = FakeTensorMode(shape_env=ShapeEnv() if sizes == "symbolic" else None)
    with mode:
        assert look(lambda: mode.from_tensor(torch.ones(2, 2))) == expected


def test_views_at_values_that_are_not_there_are_tracked() -> None:
    with FakeTensorMode(answers="plausible"):
        x = torch.empty(6, 3)
        with torch.inference_mode():
            view = torch.narrow(x, 0, torch.randint(1, 3, ()), 1)
        assert view._is_view() and view._base is x


READS_OF_DETERMINED_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "narrow": lambda x: torch.narrow(x, 0, torch.tensor(1), 2),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3]), 1),
    "cov": lambda x: torch.cov(x, fweights=torch.tensor([1, 2, 3])),
    "a condition": lambda x: x[1:] if torch.tensor([1.0, 2.0]).mean() > 1 else x,
    "ctc_loss": lambda x: F.ctc_loss(
        x.new_zeros(6, 2, 5), torch.ones(2, 3, dtype=torch.int64), [6, 6], [3, 2]
    ),
}


@pytest.mark.parametrize("sizes", ["static", "symbolic"])
@pytest.mark.parametrize("name", READS_OF_DETERMINED_VALUES)
def test_determined_values_are_read_inside_of_composite_operators(name: str, sizes: str) -> None:
    real = torch.randn(4, 3)
    mode = FakeTensorMode(shape_env=ShapeEnv() if sizes == "symbolic" else None)
    x = mode.from_tensor(real)
    with torch.inference_mode():
        want = READS_OF_DETERMINED_VALUES[name](real)
        with mode:
            got = READS_OF_DETERMINED_VALUES[name](x)
    sizes_of = [[*map(int, (*found.shape, *found.stride(), found.storage_offset()))] for found in (got, want)]
    assert sizes_of[0] == sizes_of[1]
    assert got._is_view() == want._is_view()


@pytest.mark.parametrize("sizes", ["static", "symbolic"])
def test_dropout_that_is_off_returns_its_input_under_autocast(sizes: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv() if sizes == "symbolic" else None)
    x = mode.from_tensor(torch.randn(4, 3))
    with mode, torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert F.dropout(x, 0.5, training=False) is x


def test_literals_on_the_meta_device() -> None:
    with FakeTensorMode(), torch.inference_mode():
        x = torch.tensor([1.0], device="meta")
        assert x.is_meta and (x + torch.ones(1, device="meta")).is_meta and x.new_tensor([2.0]).is_meta
        with torch.device("meta"):
            assert torch.tensor(2).is_meta


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "square_": lambda x: x.square_(),
    "true_divide_": lambda x: x.true_divide_(2),
    "selu_": F.selu_,
    "out of itself": lambda x: torch.square(x, out=x),
    "through a view": lambda x: x.reshape(-1).mul_(2),
    "out=": lambda x: torch.std(x.repeat(2, 1, 1), 0, out=x),
    "out= of an operator that counts by itself": lambda x: torch.matmul(
        torch.ones(2, 3), torch.ones(3, 6), out=x
    ),
    "statistics": lambda x: F.instance_norm(torch.ones(1, 6, 3), x[0], x[1], use_input_stats=True),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_of_composite_operators_are_counted(name: str) -> None:
    def count(x: torch.Tensor) -> int:
        with torch.inference_mode():
            WRITES[name](x)
        return x._version

    real = torch.ones(2, 6)
    expected = count(real.clone())
    assert expected
    with FakeTensorMode() as mode:
        assert count(mode.from_tensor(real)) == expected


WITH_SYMBOLS: dict[str, Callable[..., Any]] = {
    "embedding_bag": lambda x: F.embedding_bag(
        torch.zeros(3, 3, dtype=torch.int64), x, padding_idx=2, mode="sum"
    ),
    "cov": torch.cov,
    "corrcoef": torch.corrcoef,
    "gradient": torch.gradient,
    "kron": lambda x: torch.kron(x, x),
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x.t(), x]),
}


@pytest.mark.parametrize("name", WITH_SYMBOLS)
def test_sizes_stay_open_as_without_gradients(name: str) -> None:
    def find_guards(context: Any) -> list[str]:
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        x = mode.from_tensor(torch.randn(4, 6), source="x", symbolic_context=dims("a", "b"))
        with mode, context:
            WITH_SYMBOLS[name](x)
        return [str(guard.condition) for guard in env.guards]

    assert find_guards(torch.inference_mode()) == find_guards(torch.no_grad())


def test_weights_of_samples_alone_require_gradients() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    table, scale = (
        mode.from_tensor(torch.randn(5, 4)),
        mode.from_tensor(torch.randn(3, 3, requires_grad=True)),
    )
    with mode:
        index = torch.zeros(3, 3, dtype=torch.int64)
        bags = F.embedding_bag(index, table, padding_idx=2, mode="sum", per_sample_weights=scale)
    assert type(bags.grad_fn).__name__ == "EmbeddingBagBackward0"


UNDER_AUTOCAST: dict[str, Callable[[str], Any]] = {
    "LSTM": lambda d: nn.LSTM(4, 3, device=d)(r(d, 2, 5, 4)),
    "GRU": lambda d: nn.GRU(4, 3, device=d)(r(d, 2, 5, 4)),
    "RNN": lambda d: nn.RNN(4, 3, device=d)(r(d, 2, 5, 4)),
    "RNNCell": lambda d: nn.RNNCell(4, 3, device=d)(r(d, 2, 4)),
    "tensordot": lambda d: torch.tensordot(r(d, 3, 4), r(d, 4, 3), 1),
    "einsum": lambda d: torch.einsum("i,i->", r(d, 3), r(d, 3)),
    "cov": lambda d: torch.cov(r(d, 3, 4)),
    "multi_dot": lambda d: torch.linalg.multi_dot([r(d, 3, 4), r(d, 4, 3), r(d, 3, 2)]),
    "cross_entropy": lambda d: F.cross_entropy(
        r(d, 3, 4).bfloat16(), torch.zeros(3, dtype=torch.int64, device=d)
    ),
    "bilinear": lambda d: F.bilinear(r(d, 2, 3), r(d, 2, 4), r(d, 5, 3, 4)),
    "normalize": lambda d: F.normalize(r(d, 2, 3).bfloat16()),
    "LSTM, mixed": lambda d: nn.LSTM(4, 3, device=d)(r(d, 2, 5, 4).bfloat16()),
    "GRU, mixed": lambda d: nn.GRU(4, 3, device=d)(r(d, 2, 5, 4).bfloat16()),
    "RNN, mixed": lambda d: nn.RNN(4, 3, device=d, dtype=torch.bfloat16)(r(d, 2, 5, 4)),
    "LSTMCell, mixed": lambda d: nn.LSTMCell(4, 3, device=d)(r(d, 2, 4).bfloat16()),
}


@pytest.mark.parametrize("is_mode_inside", [False, True])
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_autocast_casts_inside_of_composites(name: str, is_mode_inside: bool) -> None:
    def find_dtypes(mode: Any) -> list[torch.dtype]:
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
        outer, inner = (cast, mode) if is_mode_inside else (mode, cast)
        with torch.inference_mode(), outer, inner:
            return [tensor.dtype for tensor in tree_leaves(UNDER_AUTOCAST[name]("cpu"))]

    assert find_dtypes(FakeTensorMode()) == find_dtypes(nullcontext())
    assert find_dtypes(FakeTensorMode(shape_env=ShapeEnv())) == find_dtypes(nullcontext())


def test_autocast_on_other_devices_casts_inside_of_composites() -> None:
    mode = FakeTensorMode()
    with mode, torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.RNNCell(4, 3, device="cuda")(r("cuda", 2, 4)).dtype is torch.bfloat16
        loss = F.cross_entropy(r("cuda", 3, 4).bfloat16(), torch.zeros(3, dtype=torch.int64, device="cuda"))
        assert loss.dtype is torch.float32
    with mode, torch.inference_mode():  # the plans of before are for autocast that is off
        assert nn.RNNCell(4, 3, device="cuda")(r("cuda", 2, 4)).dtype is torch.float32


def test_a_number_is_read_of_one_element() -> None:
    env = ShapeEnv(specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    one = mode.from_tensor(torch.randn(1, 1), source="x", symbolic_context=dims("a", "b"))
    with mode, torch.inference_mode():
        one.item()
        assert [str(guard.condition) for guard in env.guards] == ["a*b == 1"]
        with pytest.raises(RuntimeError, match="2 elements cannot be converted"):
            torch.empty(2).item()
        assert torch.tensor([3]).item() == 3


def test_autocast_that_changes_outside_of_the_mode_is_seen() -> None:
    mode = FakeTensorMode()
    a, b = mode.from_tensor(torch.randn(3, 4)), mode.from_tensor(torch.randn(4, 3))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.tensordot(a, b, 1).dtype is torch.bfloat16
        with mode:
            assert torch.tensordot(a, b, 1).dtype is torch.bfloat16
    with torch.inference_mode():  # nothing has told the mode that autocast has ended
        assert torch.tensordot(a, b, 1).dtype is torch.float32


def test_autocast_can_be_switched_with_keywords() -> None:
    with FakeTensorMode(), torch.inference_mode():
        torch.set_autocast_enabled(device_type="cpu", enabled=True)
        try:
            assert torch.tensordot(r("cpu", 3, 4), r("cpu", 4, 3), 1).dtype is torch.bfloat16
        finally:
            torch.set_autocast_enabled("cpu", enabled=False)
        assert torch.tensordot(r("cpu", 3, 4), r("cpu", 4, 3), 1).dtype is torch.float32


def test_attention_without_elements_has_strides_of_its_own() -> None:
    env = ShapeEnv(specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(
        torch.randn(2, 1, 3, 4), source="x", symbolic_context=dims("batch", "heads", "length", "width")
    )
    with mode, torch.inference_mode():
        F.scaled_dot_product_attention(x, x, x)
    assert not env.check(torch.randn(1, 1, 5, 6))
    assert all(env.check(torch.randn(shape)) for shape in ((0, 1, 3, 4), (2, 1, 0, 4), (2, 1, 3, 0)))


@pytest.mark.parametrize("function", [torch.corrcoef, torch.pinverse, torch.linalg.pinv])
def test_plans_inferred_under_autocast_serve_without_it(function: Callable[..., torch.Tensor]) -> None:
    FakeTensorMode.cache_clear()
    mode, real = FakeTensorMode(), torch.randn(5, 5)
    x = mode.from_tensor(real)
    for is_cast in (True, False, True):
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            expected = function(real).dtype
            with mode:
                assert function(x).dtype is expected


@pytest.mark.parametrize("symbolic", [False, True])
def test_out_that_is_resized_by_a_composite(symbolic: bool) -> None:
    """Its writes are not counted, as no tensor's are that is made for inference."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    x = mode.from_tensor(torch.randn(2, 5, 5), static_shapes=not symbolic)
    with mode, torch.inference_mode():
        out = torch.empty(0, dtype=torch.int64)
        assert torch.linalg.matrix_rank(x, out=out) is out
    assert out.is_inference() and [*map(int, out.shape)] == [2]
