"""Higher-order operators on stand-ins, called as plain functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.fake.sides import facts, on_each_device, run_fake, with_index
from understudy import FakeTensor, FakeTensorMode, OperatorError, ShapeEnv, dims

pytestmark = pytest.mark.filterwarnings("ignore")


def shapes(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


@on_each_device
def test_cond_on_an_unknown_value(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, device=device, requires_grad=True)
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 2, (x,))
        assert type(y) is FakeTensor
        assert (y.shape, y.device) == ((3,), torch.device(with_index(device)))
        y.sum().backward()
        assert x.grad.shape == (3,)


def test_cond_on_a_known_value_takes_that_branch() -> None:
    calls = []
    with FakeTensorMode():
        for value in (True, False):
            torch.cond(
                torch.tensor(value),
                lambda x: calls.append(True) or x,
                lambda x: calls.append(False) or x,
                (torch.ones(2),),
            )
    assert calls == [True, False]


def test_cond_with_branches_that_differ_is_refused() -> None:
    with FakeTensorMode():
        x = torch.randn(3)
        with pytest.raises(OperatorError, match=r"f32\[3\].*f32\[1\]"):
            torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x[:1], (x,))


def test_cond_with_sizes_that_differ_keeps_the_bounds_of_both() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(6), source="x", symbolic_context=dims("n"))
    with mode:
        condition = torch.randn(4).sum() > 0
        for shorter in (lambda x: x[:2], lambda x: x.new_zeros(5)):
            for branches in ((lambda x: torch.cat([x, x]), shorter), (shorter, lambda x: torch.cat([x, x]))):
                assert torch.cond(condition, *branches, (x,)).shape[0] >= 2  # no guard: both have two or more


def test_cond_with_structures() -> None:
    with FakeTensorMode():
        x = torch.randn(3)
        out = torch.cond(
            x.sum() > 0, lambda x: {"a": x, "b": (x * 2,)}, lambda x: {"a": x + 1, "b": (x,)}, (x,)
        )
        assert shapes(out["a"], out["b"][0]) == [(3,), (3,)]


@on_each_device
def test_while_loop(device: str) -> None:
    with FakeTensorMode():
        count, x = while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), torch.ones(2, device=device))
        )
        assert count.item() == 3
        assert x.tolist() == [8.0, 8.0]
        count, x = while_loop(
            lambda i, x: x.sum() < 3,
            lambda i, x: (i + 1, x * 2),
            (torch.tensor(0), torch.randn(2, device=device)),
        )
        assert x.device == torch.device(with_index(device))


def test_while_loop_that_changes_its_shape_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(OperatorError, match="while_loop"):
        while_loop(lambda x: x.sum() < 3, lambda x: (torch.cat([x, x]),), (torch.randn(2),))


@on_each_device
@pytest.mark.parametrize("reverse", [True, False])
def test_scan(device: str, reverse: bool) -> None:
    with FakeTensorMode():
        init = torch.randn(3, device=device, requires_grad=True)
        xs = torch.randn(4, 3, device=device, requires_grad=True)
        carry, out = scan(lambda c, x: (c + x, {"product": c * x}), init, xs, reverse=reverse)
        assert shapes(carry, out["product"]) == [(3,), (4, 3)]
        out["product"].sum().backward()
        assert shapes(init.grad, xs.grad) == [(3,), (4, 3)]


@on_each_device
def test_associative_scan_and_map(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(4, 3, device=device, requires_grad=True)
        summed = associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")
        mapped = map_over(lambda row, other: (row + other, row.sum()), x, torch.randn(3, device=device))
        assert shapes(summed, *mapped) == [(4, 3), (4, 3), (4,)]
        (summed.sum() + mapped[1].sum()).backward()
        assert x.grad.device == torch.device(with_index(device))


def attention(device: str) -> Any:
    q, k = torch.randn(1, 2, 16, 16, device=device), torch.randn(1, 2, 16, 16, device=device)
    bias = torch.randn(2, device=device)
    return flex_attention(q, k, k, score_mod=lambda score, b, h, i, j: score + bias[h])


def test_flex_attention_is_like_eager() -> None:
    torch._dynamo.reset()
    real = facts(attention("cpu"), "cpu")
    assert facts(run_fake(attention, "cpu"), "cpu") == real


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_flex_attention_on_cuda(device: str) -> None:
    with FakeTensorMode():
        q = torch.randn(1, 2, 128, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device=device)
        out = flex_attention(q, q, q, block_mask=mask)
        assert (out.shape, out.dtype, str(out.device)) == (q.shape, torch.bfloat16, with_index(device))
        out.sum().backward()
        assert q.grad.dtype is torch.bfloat16
        assert create_mask(lambda b, h, i, j: i >= j, 1, 1, 8, 8, device=device).shape == (1, 1, 8, 8)


def test_invoke_subgraph() -> None:
    class Sine(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (x.sin(),)

    graph = torch.fx.symbolic_trace(Sine())
    with FakeTensorMode():
        x = torch.randn(3, requires_grad=True)
        (y,) = invoke_subgraph(graph, "sine", x)
        y.sum().backward()
        assert x.grad.shape == (3,)
        assert torch.compiler.nested_compile_region(lambda x: x.cos())(x).shape == (3,)


@on_each_device
def test_checkpoint_around_and_inside(device: str) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: checkpoint(torch.sin, x, use_reentrant=False), lambda x: x.cos(), (x,)
        )

    with FakeTensorMode():
        x = torch.randn(3, device=device, requires_grad=True)
        checkpoint(body, x, use_reentrant=False).sum().backward()
        assert x.grad.shape == (3,)


def test_under_transforms() -> None:
    with FakeTensorMode():
        x = torch.randn(4, 3)
        out = torch.vmap(
            lambda x: torch.cond(torch.tensor(True), lambda x: x.sin(), lambda x: x.cos(), (x,))
        )(x)
        assert out.shape == (4, 3)
        gradient = torch.func.grad(lambda x: scan(lambda c, x: (c + x, c * x), x[0], x)[1].sum())(x)
        assert gradient.shape == (4, 3)


def test_one_that_is_given_tensors_only() -> None:
    from torch._higher_order_ops.inline_asm_elementwise import inline_asm_elementwise

    options = {"asm_str": "mov.f32 $0, $1;", "constraints": "=f,f", "dtype": torch.float64}
    with FakeTensorMode():
        for _ in range(2):
            out = inline_asm_elementwise(torch.randn(2, 3), **options)
            assert type(out) is FakeTensor and out.shape == (2, 3) and out.dtype is torch.float64


def test_compiled_functions_run_as_they_are() -> None:
    @torch.compile
    def before(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    with FakeTensorMode():
        inside = torch.compile(lambda x: x.cos(), fullgraph=True)
        decorated = torch.compile(dynamic=True)(lambda x: x + 1)
        x = torch.randn(3, device="cuda", requires_grad=True)
        for function in (before, inside, decorated):
            out = function(x)
            assert type(out) is FakeTensor
            assert out.device == x.device
        model = torch.compile(nn.Linear(3, 2).cuda())
        model(x).sum().backward()
        assert x.grad is not None


def test_compiled_modules_are_wrapped_as_torch_wraps_them() -> None:
    with FakeTensorMode():
        linear = nn.Linear(3, 2)
        for model in (torch.compile(linear, mode="max-autotune"), torch.compile(dynamic=False)(linear)):
            assert isinstance(model, torch._dynamo.OptimizedModule)
            assert model._orig_mod is linear
            assert list(model.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
            assert not model.eval().training and not linear.training


def test_torch_is_itself_again_afterwards() -> None:
    before = torch.compile, torch._ops.HigherOrderOperator.dispatch, torch.Tensor.device
    with FakeTensorMode():
        assert torch.compile is not before[0]
    assert (torch.compile, torch._ops.HigherOrderOperator.dispatch, torch.Tensor.device) == before
    assert "device" not in vars(torch.Tensor)
