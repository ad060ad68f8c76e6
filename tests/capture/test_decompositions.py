"""Decompositions in a trace: by a table, in every place, and what the nodes say of the operator they come from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Interpreter
from torch.fx import traceback as fx_traceback

from understudy import decompose, get_proxy_mode, make_fx

aten = torch.ops.aten
MODES = ("real", "fake", "symbolic")
each_mode = pytest.mark.parametrize("mode", MODES)


def calls(gm: Any) -> list[Any]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def targets(gm: Any) -> list[Any]:
    return [node.target for node in calls(gm)]


def addmm_by_parts(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return bias + torch.mm(a, b)


def mm_by_parts(a: Any, b: Any) -> Any:
    return (a.unsqueeze(-1) * b.unsqueeze(0)).sum(1)


def silu_by_parts(x: Any) -> Any:
    return x * torch.sigmoid(x)


ADDMM = {aten.addmm.default: addmm_by_parts}
BOTH = {**ADDMM, aten.mm.default: mm_by_parts}
SILU = {aten.silu.default: silu_by_parts}


def linear(bias: Any, a: Any, b: Any) -> Any:
    return torch.addmm(bias, a, b).relu()


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(3), torch.randn(2, 4), torch.randn(4, 3)


# --- by a table -------------------------------------------------------------------------------------------------------


@each_mode
def test_an_operator_of_the_table_is_written_out(mode: str) -> None:
    gm = make_fx(linear, ADDMM, tracing_mode=mode)(*inputs())
    assert targets(gm) == [aten.mm.default, aten.add.Tensor, aten.relu.default]
    given = inputs()
    torch.testing.assert_close(gm(*given), linear(*given))


@each_mode
def test_also_inside_other_decompositions(mode: str) -> None:
    gm = make_fx(linear, BOTH, tracing_mode=mode)(*inputs())
    assert aten.mm.default not in targets(gm) and aten.addmm.default not in targets(gm)
    given = inputs()
    torch.testing.assert_close(gm(*given), linear(*given))


@each_mode
def test_also_in_the_backward_pass(mode: str) -> None:
    def f(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(F.silu(x).sum(), x)
        return grad

    table = {
        **SILU,
        aten.silu_backward.default: torch._decomp.decomposition_table[aten.silu_backward.default],
    }
    gm = make_fx(f, table, tracing_mode=mode)(torch.randn(5))
    assert not {aten.silu.default, aten.silu_backward.default} & set(targets(gm))
    x = torch.randn(5)
    torch.testing.assert_close(gm(x), f(x))


def test_what_a_decomposition_leaves_to_others_is_recorded() -> None:
    gm = make_fx(F.silu, {aten.silu.default: lambda x: NotImplemented})(torch.randn(3))
    assert targets(gm) == [aten.silu.default]


def test_without_a_table_composite_operators_fall_apart_as_in_eager() -> None:
    gm = make_fx(lambda x, w: F.linear(x, w).softmax(-1))(torch.randn(2, 3), torch.randn(4, 3))
    assert targets(gm) == [aten.t.default, aten.mm.default, aten._softmax.default]


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "nearest-exact"])
def test_in_inference_mode_composites_are_those_of_cpp(mode: str) -> None:
    """torch has decompositions of its own in Python for some, which give other strides."""

    def enlarge(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return F.interpolate(x, scale_factor=2.0, mode=mode)

    x = torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last)
    assert x.stride(1) == 1
    output = make_fx(enlarge, tracing_mode="fake")(x).graph.output_node()
    assert output.args[0].meta["val"].stride() == enlarge(x).stride()


def test_inference_mode_changes_nothing() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w)

    with torch.inference_mode():
        gm = make_fx(f, tracing_mode="fake")(torch.randn(2, 3), torch.randn(4, 3))
    assert aten.linear.default not in targets(gm)
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    torch.testing.assert_close(gm(x, w), f(x, w))


def test_an_error_in_a_decomposition_leaves_nothing_behind() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        make_fx(F.silu, {aten.silu.default: broken})(torch.randn(2))
    assert get_proxy_mode() is None
    assert targets(make_fx(F.silu)(torch.randn(2))) == [aten.silu.default]


# --- as a context ------------------------------------------------------------------------------------------------------


@each_mode
def test_around_make_fx(mode: str) -> None:
    with decompose(SILU) as table:
        assert table == SILU
        gm = make_fx(F.silu, tracing_mode=mode)(torch.randn(3))
        own = make_fx(F.silu, {}, tracing_mode=mode)(torch.randn(3))
    after = make_fx(F.silu, tracing_mode=mode)(torch.randn(3))
    assert targets(gm) == [aten.sigmoid.default, aten.mul.Tensor]
    assert targets(own) == [aten.silu.default]
    assert targets(after) == [aten.silu.default]


@each_mode
def test_inside_of_a_traced_function(mode: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x = F.silu(x)
        with decompose(SILU):
            x = F.silu(x)
            with decompose(None):
                x = F.silu(x)
            x = F.silu(x)
        return F.silu(x)

    gm = make_fx(f, tracing_mode=mode)(torch.randn(3))
    parts = [aten.sigmoid.default, aten.mul.Tensor]
    assert targets(gm) == [aten.silu.default, *parts, aten.silu.default, *parts, aten.silu.default]
    x = torch.randn(3)
    torch.testing.assert_close(gm(x), f(x))


def test_a_context_is_of_its_own_thread() -> None:
    found: list[Any] = []
    with decompose(SILU):
        thread = threading.Thread(target=lambda: found.append(targets(make_fx(F.silu)(torch.randn(2)))))
        thread.start()
        thread.join()
    assert found == [[aten.silu.default]]


# --- where a node comes from ---------------------------------------------------------------------------------------------


def originals(gm: Any) -> list[Any]:
    return [node.meta.get("original_aten") for node in calls(gm)]


@each_mode
def test_nodes_of_a_decomposition_name_the_operator(mode: str) -> None:
    gm = make_fx(linear, ADDMM, tracing_mode=mode)(*inputs())
    assert originals(gm) == [aten.addmm.default, aten.addmm.default, None]


def test_the_outermost_operator_is_named() -> None:
    gm = make_fx(linear, BOTH)(*inputs())
    assert set(originals(gm)) == {aten.addmm.default, None}


@each_mode
def test_with_preserved_meta_every_node_names_its_operator(mode: str) -> None:
    """As torch does."""

    def f(*args: Any) -> Any:
        return linear(*args).max(0)

    with fx_traceback.preserve_node_meta():
        gm = make_fx(f, ADDMM, tracing_mode=mode)(*inputs())
    max_ = aten.max.dim
    assert originals(gm) == [aten.addmm.default, aten.addmm.default, aten.relu.default, max_, max_, max_]


@each_mode
def test_a_graph_traced_again_carries_over_what_its_nodes_say(mode: str) -> None:
    first = make_fx(lambda x: F.silu(x) + 1)(torch.randn(3))
    for number, node in enumerate(first.graph.nodes):
        node.meta["stack_trace"] = f"line of {node.name}"
        node.meta["nn_module_stack"] = {"layer": ("layer", "app.Layer")}
        node.meta["custom"] = {"number": number}
    with fx_traceback.preserve_node_meta():
        second = make_fx(lambda x: Interpreter(first).run(x), SILU, tracing_mode=mode)(torch.randn(3))
    sigmoid, mul, add = calls(second)
    assert [node.meta["stack_trace"] for node in (sigmoid, mul, add)] == [
        "line of silu",
        "line of silu",
        "line of add",
    ]
    assert [node.meta["custom"] for node in (sigmoid, mul, add)] == [
        {"number": 1},
        {"number": 1},
        {"number": 2},
    ]
    assert add.meta["nn_module_stack"] == {"layer": ("layer", "app.Layer")}
    assert sigmoid.meta["original_aten"] is aten.silu.default and add.meta["original_aten"] is aten.add.Tensor
    assert [source.name for source in sigmoid.meta["from_node"]] == ["silu"]
    sigmoid.meta["custom"]["changed"] = True
    assert "changed" not in mul.meta["custom"] and "changed" not in list(first.graph.nodes)[1].meta["custom"]
    x = torch.randn(3)
    torch.testing.assert_close(second(x), first(x))


def test_without_preserved_meta_nothing_is_carried_over() -> None:
    first = make_fx(lambda x: x + 1)(torch.randn(3))
    list(first.graph.nodes)[1].meta["custom"] = {"number": 1}
    second = make_fx(lambda x: Interpreter(first).run(x))(torch.randn(3))
    assert "custom" not in calls(second)[0].meta


def test_annotations_of_the_users_code() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with fx_traceback.annotate({"stage": 1}):
            x = x.sin()
        return x.cos()

    with fx_traceback.preserve_node_meta():
        sin, cos = calls(make_fx(f)(torch.randn(2)))
    assert sin.meta["custom"] == {"stage": 1}
    assert "custom" not in cos.meta


# --- torch's table on whole models -----------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Hardswish(),
            torch.nn.MaxPool2d(2), torch.nn.Upsample(scale_factor=2, mode="bilinear"), torch.nn.GroupNorm(2, 4),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(self.layers(x)).mean((2, 3)).log_softmax(-1)


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, (2, 5, 8)),
    "convolutions": (Convolutions, (2, 3, 8, 8)),
}


def core_table() -> Any:
    table = torch._decomp.core_aten_decompositions()
    # Its second result is not what the operator's derivative takes for it: gradients through torch's own trace are wrong.
    del table[aten._scaled_dot_product_flash_attention_for_cpu.default]
    return table


def left_over(gm: Any, table: Any) -> list[Any]:
    """Sizes are read where they are used, whatever the table says of reading them."""
    return [target for target in targets(gm) if target in table and target is not aten.sym_size.int]


@each_mode
@pytest.mark.parametrize("name", MODELS)
def test_torchs_core_table(name: str, mode: str) -> None:
    table = core_table()
    make, shape = MODELS[name]
    model = make().eval()
    gm = make_fx(model, table, tracing_mode=mode)(torch.randn(shape))
    assert not left_over(gm, table)
    x = torch.randn(shape)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("name", MODELS)
def test_torchs_core_table_on_gradients(name: str, mode: str) -> None:
    table = core_table()
    make, shape = MODELS[name]
    model = make().eval()

    def gradient(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).pow(2).sum(), [x, *model.parameters()])

    gm = make_fx(gradient, table, tracing_mode=mode)(torch.randn(shape))
    assert not left_over(gm, table)
    x = torch.randn(shape)
    for got, want in zip(gm(x), gradient(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(p, torch.nn.Parameter) and p.grad is not None for p in model.parameters())


@each_mode
def test_views_and_writes_in_inference_mode_are_tracked(mode: str) -> None:
    """Composite operators come whole to the recorder: those inside them track views and count writes as in eager."""
    seen: list[tuple[bool, int]] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            view = x.T
            x.square_()
        seen.append((view._is_view(), x._version))
        return x * 1

    program(torch.ones(2, 6))
    make_fx(program, tracing_mode=mode)(torch.ones(2, 6))
    assert seen == [(True, 1)] * 2
