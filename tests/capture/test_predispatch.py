"""Traces above autograd and autocast: composite operators stay whole, changes of state are nodes."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops import scan
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.capture.captured import assert_same, check
from understudy import (
    DataDependentOutputException,
    FakeTensorMode,
    get_proxy_mode,
    get_torch_dispatch_modes,
    make_fx,
)

aten = torch.ops.aten
MODES = ("real", "fake", "symbolic")
each_mode = pytest.mark.parametrize("mode", MODES)
set_grad = torch._C._set_grad_enabled
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def traced(f: Any, *args: Any, mode: str = "real", **options: Any) -> Any:
    return make_fx(f, tracing_mode=mode, pre_dispatch=True, **options)(*args)


def targets(gm: Any) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Any:
    yield
    assert get_proxy_mode() is None and get_torch_dispatch_modes() == []
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.out(x + self.attention(y, y, y, need_weights=False)[0])


# --- composite operators ------------------------------------------------------------------------------------------------


@each_mode
def test_composite_operators_stay_whole(mode: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.linear(x, w), (4,)).softmax(-1)

    gm = traced(f, torch.randn(2, 3), torch.randn(4, 3), mode=mode)
    assert targets(gm) == [aten.linear.default, aten.layer_norm.default, aten.softmax.int]
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    assert torch.equal(gm(x, w), f(x, w))


@each_mode
def test_a_model_and_its_gradients(mode: str) -> None:
    model = Block()
    gm = traced(model, torch.randn(2, 5, 8), mode=mode)
    assert {aten.linear.default, aten.layer_norm.default, aten.scaled_dot_product_attention.default} <= set(
        targets(gm)
    )
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(gm(x), model(x))
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for got, want in zip(torch.autograd.grad(gm(x).sum(), list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_sizes_stay_symbolic() -> None:
    gm = traced(lambda x: F.layer_norm(x, (3,)).reshape(-1), torch.randn(4, 3), mode="symbolic")
    x = torch.randn(7, 3)
    assert torch.equal(gm(x), F.layer_norm(x, (3,)).reshape(-1))


@each_mode
def test_with_a_decomposition_table(mode: str) -> None:
    def layer_norm(x: Any, shape: Any, *rest: Any) -> Any:
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (3,)).softmax(-1)

    gm = traced(f, torch.randn(4, 3), mode=mode, decomposition_table={aten.layer_norm.default: layer_norm})
    assert aten.layer_norm.default not in targets(gm) and aten.softmax.int in targets(gm)
    x = torch.randn(4, 3)
    torch.testing.assert_close(gm(x), f(x))


def test_in_place_writes_and_views() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0].add_(1)
        x.mul_(2)
        return y + x

    gm = traced(f, torch.randn(2, 3), mode="fake")
    x = torch.randn(2, 3)
    first, second = x.clone(), x.clone()
    assert torch.equal(gm(first), f(second)) and torch.equal(first, second)


# --- state --------------------------------------------------------------------------------------------------------------


@each_mode
def test_grad_mode_is_in_the_graph(mode: str) -> None:
    scale = torch.nn.Module()
    scale.weight = torch.nn.Parameter(torch.randn(3))

    def f(x: torch.Tensor) -> Any:
        weight = scale.weight
        with torch.no_grad():
            y = x * weight
            with torch.enable_grad():
                z = y * weight
        torch.set_grad_enabled(True)
        return y, z, x + weight

    gm = traced(f, torch.randn(3), mode=mode)
    changes = [node.args[0] for node in gm.graph.nodes if node.target is set_grad]
    assert changes == [False, True, False, True, True]
    assert [node.name for node in gm.graph.nodes if node.target is set_grad][:2] == [
        "_set_grad_enabled",
        "_set_grad_enabled_1",
    ]
    x = torch.randn(3)
    results = gm(x)
    assert [result.requires_grad for result in results] == [False, True, True]
    for got, want in zip(results, f(x), strict=True):
        assert torch.equal(got, want)


@each_mode
def test_inference_mode_is_a_region_without_gradients(mode: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            x.add_(1)  # a leaf
            doubled = x * 2
        return x * 3, doubled

    def leaf() -> Tensor:
        return torch.arange(3.0).requires_grad_()

    graph = make_fx(f, tracing_mode=mode, pre_dispatch=True)(leaf())
    x, y = leaf(), leaf()
    (tripled, doubled), expected = graph(x), f(y)
    assert (
        [tripled.requires_grad, doubled.requires_grad]
        == [result.requires_grad for result in expected]
        == [True, False]
    )
    for got, want in zip((x, tripled, doubled), (y, *expected), strict=True):
        assert torch.equal(got, want)


@each_mode
def test_inference_mode_in_an_exit_stack(mode: str) -> None:
    def f(x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            x.add_(1)
        return x * 3

    graph = make_fx(f, tracing_mode=mode, pre_dispatch=True)(torch.zeros(3).requires_grad_())
    x = torch.zeros(3).requires_grad_()
    assert graph(x).requires_grad and torch.equal(x, torch.ones(3))


@each_mode
def test_names_count_the_calls_that_are_there(mode: str) -> None:
    def f(x: Any) -> Any:
        y = x.sin()
        with torch.no_grad():
            z = y.cos()
        return y + z.sin()

    graph = traced(f, torch.randn(4, requires_grad=True), mode=mode).graph
    names = [node.name for node in graph.nodes]
    assert names == [
        "x_1",
        "sin",
        "_set_grad_enabled",
        "cos",
        "_set_grad_enabled_1",
        "sin_1",
        "add",
        "output",
    ]
    assert graph.create_node("call_function", torch.sin, (), {}, name="sin").name == "sin_2"


@each_mode
def test_autocast_is_in_the_graph(mode: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            with torch.autocast("cpu", enabled=False):
                z = x @ w
        return y, z, x @ w

    gm = traced(f, torch.randn(3, 3), torch.randn(3, 3), mode=mode)
    nodes = list(gm.graph.nodes)
    entered = [node for node in nodes if node.target is enter_autocast]
    left = [node for node in nodes if node.target is exit_autocast]
    assert entered[0].args == ("cpu", torch.bfloat16, True, False)
    assert [node.args for node in left] == [(entered[1],), (entered[0],)]
    assert aten._to_copy.default not in targets(gm)  # casts are made when the graph runs
    x, w = torch.randn(2, 3, 3)
    for got, want in zip(gm(x, w), f(x, w), strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)


def test_state_is_not_recorded_below_autograd() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x + 1

    assert targets(make_fx(f)(torch.randn(2))) == [aten.add.Tensor]


@each_mode
def test_what_operators_do_inside_is_not_recorded(mode: str) -> None:
    """Batch norm, dropout and attention switch gradients on and off inside of torch and of stand-ins."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5)
    ).eval()
    gm = traced(model, torch.randn(2, 3, 5, 5), mode=mode)
    assert targets(gm) == [aten.conv2d.default, aten.batch_norm.default, aten.dropout.default]
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(gm(x), model(x))


@each_mode
def test_a_training_step_writes_the_same_statistics(mode: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gm = traced(model, torch.randn(6, 4), mode=mode)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert targets(gm).count(aten.batch_norm.default) == 1 and aten.native_batch_norm.default not in targets(
        gm
    )
    x = torch.randn(6, 4)
    torch.manual_seed(1)
    got = gm(x)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    torch.manual_seed(1)
    assert torch.equal(got, model(x))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in after.items())


# --- derivatives and transforms inside ---------------------------------------------------------------------------------------


@each_mode
def test_a_backward_pass_inside(mode: str) -> None:
    """What the derivative of a whole operator reads (mean, reciprocal deviation) is computed in the graph."""
    model = Block()

    def f(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).pow(2).sum(), [x, *model.parameters()])

    gm = traced(f, torch.randn(2, 5, 8), mode=mode)
    x = torch.randn(2, 5, 8)
    for got, want in zip(gm(x), f(x), strict=True):
        torch.testing.assert_close(got, want)
    assert not any(name.startswith("_tensor_constant") for name, _ in gm.named_buffers())


NORM = torch.nn.BatchNorm1d(4)
LAYERS = torch.nn.LSTM(4, 4, 2, dropout=0.5)
BY_CHANCE_OR_BY_WRITES = {
    "dropout": lambda x: F.dropout(x.sin(), 0.5),
    "dropout in place": lambda x: F.dropout(x.sin(), 0.5, inplace=True),
    "dropout of whole channels": lambda x: F.dropout1d(x.sin()[None], 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x.sin(), 0.5, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "rrelu": lambda x: F.rrelu(x.sin() - 0.5, training=True),
    "batch_norm": lambda x: x.sin(),
    "instance_norm": lambda x: F.instance_norm(x.T[None], torch.zeros(4), torch.ones(4)),
    "relu in place": lambda x: (x * 2).relu_(),
    "layers with dropout": lambda x: x[None],
}


@pytest.mark.filterwarnings("ignore")
@each_mode
@pytest.mark.parametrize("name", BY_CHANCE_OR_BY_WRITES)
def test_a_backward_pass_through_chance_and_writes(name: str, mode: str) -> None:
    """The derivative reads what was drawn inside of an operator: its parts are in the graph then, and drawn once."""

    modules = torch.nn.ModuleDict({"batch_norm": NORM, "layers with dropout": LAYERS})

    def f(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = (modules[name] if name in modules else torch.nn.Identity())(BY_CHANCE_OR_BY_WRITES[name](x))
        y = y[0] if isinstance(y, tuple) else y
        return y.detach(), torch.autograd.grad(y.square().sum(), x)

    NORM.reset_running_stats()
    gm = traced(f, torch.randn(6, 4), mode=mode)
    gm.graph.lint()
    x = torch.randn(6, 4)
    found = []
    for program in (gm, f):
        NORM.reset_running_stats()
        torch.manual_seed(1)
        found.append((program(x), torch.rand(()), [buffer.clone() for buffer in NORM.buffers()]))
    exactly = {} if name in modules else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(*found, **exactly)


@each_mode
@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_a_backward_pass_of_attention_under_autocast(dropout: float, mode: str) -> None:
    """Attention without a fused kernel computes in float32: autocast leaves alone what runs inside of it."""

    def f(x: torch.Tensor, mask: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = x.sin(), x.cos(), x * 2
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return y, torch.autograd.grad(y.float().square().sum(), [x, mask])

    def inputs() -> Any:
        return torch.randn(2, 2, 6, 4, requires_grad=True), torch.randn(6, 6, requires_grad=True)

    gm = traced(f, *inputs(), mode=mode)
    gm.graph.lint()
    found, args = [], inputs()
    for program in (gm, f):
        torch.manual_seed(1)
        found.append((program(*args), torch.is_autocast_enabled("cpu")))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@each_mode
def test_a_backward_pass_that_runs_a_region_again_under_autocast(mode: str) -> None:
    """A checkpoint is computed again with the autocast that it had, inside of a region with another one."""

    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                y = checkpoint(lambda x: (x @ w).sin() @ w, x, use_reentrant=False)
            return torch.autograd.grad(y.square().sum(), [x, w])

    gm = traced(f, torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True), mode=mode)
    args = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    torch.testing.assert_close(gm(*args), f(*args), rtol=0, atol=0)


def test_parts_go_where_no_backward_pass_reads_them() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    gm = traced(torch.nn.Sequential(torch.nn.Dropout(0.5), NORM), x, mode="fake")
    assert targets(gm) == [aten.dropout.default, aten.add_.Tensor, aten.batch_norm.default]


@each_mode
@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.vmap(lambda row: F.layer_norm(row, (4,)).sin().sum())(x),
        lambda x: torch.func.jvp(torch.sin, (x,), (x.cos(),))[1],
        lambda x: torch.func.grad(lambda y: F.silu(y).sum())(x),
        lambda x: torch.vmap(torch.func.grad(lambda y: y.sin().sum()))(x),
        lambda x: torch.func.jacrev(torch.sin)(x[0]),
    ],
    ids=["vmap", "jvp", "grad", "vmap of grad", "jacrev"],
)
def test_transforms(f: Any, mode: str) -> None:
    gm = traced(f, torch.randn(3, 4), mode=mode)
    x = torch.randn(3, 4)
    torch.testing.assert_close(gm(x), f(x))
    assert not list(gm.buffers())


# --- around ------------------------------------------------------------------------------------------------------------------


@each_mode
def test_what_nodes_say(mode: str) -> None:
    gm = traced(lambda x, w: F.linear(x, w), torch.randn(2, 3), torch.randn(4, 3), mode=mode)
    (node,) = (node for node in gm.graph.nodes if node.op == "call_function")
    assert node.name == "linear"
    assert tuple(node.meta["val"].shape)[1] == 4
    assert node.meta["torch_fn"] == ("linear_1", "builtin_function_or_method.linear")
    assert "test_predispatch.py" in node.meta["stack_trace"]


@each_mode
def test_an_error_leaves_no_state_behind(mode: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        with torch.autocast("cpu"):
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        traced(f, torch.randn(2), mode=mode)
    torch.set_grad_enabled(True)
    assert targets(traced(torch.sin, torch.randn(2))) == [aten.sin.default]


def test_threads_take_turns() -> None:
    found: list[Any] = []

    def work() -> None:
        gm = traced(
            lambda x, w: F.linear(x, w).softmax(-1), torch.randn(2, 3), torch.randn(4, 3), mode="fake"
        )
        found.append(targets(gm))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[aten.linear.default, aten.softmax.int]] * 4


def test_other_threads_are_not_recorded() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: torch.ones(2).cos())
        thread.start()
        thread.join()
        return x.sin()

    assert targets(traced(f, torch.randn(2))) == [aten.sin.default]


def test_a_model_built_inside_is_recorded() -> None:
    """Initial values are written by shortcuts outside of a trace."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.Linear(3, 2)(x)

    with FakeTensorMode():
        gm = traced(f, torch.empty(4, 3), mode="fake")
    assert targets(gm)[-1] is aten.linear.default
    assert aten.uniform_.default in targets(gm)
    assert gm(torch.randn(4, 3)).shape == (4, 2)


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0)], ids=["item", "bool"]
)
def test_values_that_are_asked_for(read: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if read(x) else 3)

    with pytest.raises(DataDependentOutputException, match="would hold it fixed"):
        traced(f, torch.ones(3))
    gm = traced(f, torch.ones(3), _error_on_data_dependent_ops=False)
    assert torch.equal(gm(torch.ones(3)), torch.ones(3) * 2)


@each_mode
def test_branches_stay_whole_too(mode: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: F.linear(x, x), lambda x: x.cos().softmax(-1), (x,)).softmax(
            -1
        )

    gm = traced(f, torch.randn(3, 3), mode=mode)
    assert targets(gm)[-1] is aten.softmax.int
    assert targets(gm.true_graph_0) == [aten.linear.default]
    for x in (torch.ones(3, 3), -torch.ones(3, 3)):
        torch.testing.assert_close(gm(x), f(x))


class Clipped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bound: float) -> Tensor:  # type: ignore[override]
        return x.clamp(-bound, bound)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * (ctx.saved_tensors[0].abs() < ctx.bound), None


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.vmap(lambda row: Clipped.apply(row, 0.5))(x),
        lambda x: torch.func.grad(lambda y: Clipped.apply(y, 0.5).sum())(x),
    ],
)
def test_a_function_of_autograd_inside_of_a_transform(f: Any) -> None:
    check(f, torch.randn(3, 4), others=((torch.randn(5, 2),),), pre_dispatch=True)


class WithoutGradients(torch.autograd.Function):
    """Gradients are off in here, of which nobody is told, and set again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            y = x * 2
        with torch.enable_grad():
            return y + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * 2


@each_mode
def test_the_graph_leaves_the_grad_mode_as_it_was(mode: str) -> None:
    """Also if a function of autograd, in which gradients are off, is the last call of the program."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = x * 2
            return y.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    gm = traced(Double.apply, torch.randn(3), mode=mode)
    gm(torch.randn(3))
    assert torch.is_grad_enabled()


def test_what_a_function_of_autograd_sets_ends_with_it() -> None:
    def f(x: Tensor) -> Any:
        y = WithoutGradients.apply(x.detach().requires_grad_())
        return y * 3

    check(f, torch.randn(3, 4), pre_dispatch=True)
    assert torch.is_grad_enabled()
    calls = [node for node in traced(f, torch.randn(3)).graph.nodes if node.target is set_grad]
    assert calls[-1].args == (True,)


SCALE = torch.nn.Parameter(torch.tensor(1.5))


def scanned(x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    _, rows = scan(lambda carry, row: ((carry * row).sin(), carry + row), x[0] * 0 + 1, x)
    return torch.autograd.grad(rows.sum(), x)


def chosen(x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    y = torch.cond(x.sum() > 0, lambda z: z.sin() * z, lambda z: z.exp(), (x,))
    y.sum().backward()  # type: ignore[no-untyped-call]
    return x.grad, y.detach()


@pytest.mark.parametrize("f", [scanned, chosen])
def test_gradients_of_higher_order_operators(f: Any) -> None:
    graphs = check(f, torch.randn(3, 4), others=((torch.randn(5, 2),),), pre_dispatch=True)
    for graph in graphs.values():
        assert_same(f, graph, torch.randn(3, 4))


@each_mode
def test_a_higher_order_operator_is_one_node_where_nobody_asks_for_gradients(mode: str) -> None:
    def f(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda z: z * SCALE, lambda z: z + SCALE, (x,))

    gm = make_fx(f, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)(torch.randn(3))
    assert targets(gm).count(torch.ops.higher_order.cond) == 1
    assert [name for name, _ in gm.named_children()] == ["true_graph_0", "false_graph_0"]


def test_data_of_a_tensor_is_recorded() -> None:
    def program(x: Any) -> Any:
        y = x * 2
        y.data.add_(1)
        return y

    x = torch.ones(3)
    assert torch.equal(make_fx(program, pre_dispatch=True, tracing_mode="symbolic")(x)(x), program(x))


# --- What answers an operator before autograd does: its operators are recorded below autograd --------------------------


class Doubled(torch.Tensor):
    """Computes with the tensor inside of it, and with its double."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        inner = [value.inner * 2 if isinstance(value, Doubled) else value for value in args]
        return Doubled(func(*inner, **(kwargs or {})))


@each_mode
def test_tensors_of_a_subclass_that_the_function_makes(mode: str) -> None:
    check(lambda x: (Doubled(x).sin() + 1).inner, torch.randn(3), pre_dispatch=True)

    def rows(x: Tensor) -> Any:
        jagged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))
        return F.relu(jagged * 2).values(), jagged.sum(dim=1)

    x = torch.randn(6, 3)
    graph = make_fx(rows, tracing_mode=mode, pre_dispatch=True)(x)
    for got, want in zip(graph(x), rows(x), strict=True):
        assert torch.equal(got, want)


class DoubledSines(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


def test_dispatch_modes_that_the_function_enters() -> None:
    def f(x: Tensor) -> Tensor:
        with DoubledSines():
            y = F.layer_norm(x.sin(), [3])
        return F.layer_norm(x, [3]) + y

    graphs = check(f, torch.randn(2, 3), pre_dispatch=True)
    for graph in graphs.values():
        assert [str(node.target) for node in graph.graph.nodes].count("aten.layer_norm.default") == 1
