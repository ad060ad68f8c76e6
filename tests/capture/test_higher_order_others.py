"""Higher-order operators of the compiler's stack, those of users, and recording above autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.base_hop import BaseHOP
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.utils import reenter_make_fx
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as TorchRecorder
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.nn.attention.flex_attention import flex_attention

from understudy import FakeTensorMode, UnsupportedOperatorException, make_fx

pytestmark = pytest.mark.filterwarnings("ignore")
MODES = ("real", "fake", "symbolic")
in_each_mode = pytest.mark.parametrize("mode", MODES)
ops = torch.ops.higher_order


def sine(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (x.sin() + y,)


SINE = torch.fx.symbolic_trace(sine)


def submodules(gm: GraphModule) -> list[str]:
    return [name for name, _ in gm.named_modules() if name]


@pytest.fixture
def new_operator() -> Iterator[Callable[[str], Any]]:
    """Makes higher-order operators, and takes their names back afterwards."""
    made: list[str] = []

    def make(name: str, base: type = HigherOrderOperator) -> Any:
        made.append(name)

        class Operator(base):  # type: ignore[misc,valid-type]
            def __init__(self) -> None:
                super().__init__(name)

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(*args, **kwargs)

        return Operator()

    yield make
    for name in made:
        torch._ops._higher_order_ops.pop(name, None)


@in_each_mode
def test_invoke_subgraph_with_gradients(mode: str) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        w = w.detach().requires_grad_()
        (y,) = ops.invoke_subgraph(SINE, "sine", x, w)
        (z,) = ops.invoke_subgraph(SINE, "sine", y, w)
        return torch.autograd.grad(z.sum(), w)

    def plain(x: Tensor, w: Tensor) -> Any:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(((x.sin() + w).sin() + w).sum(), w)

    gm = make_fx(f, tracing_mode=mode)(torch.rand(4, 3), torch.rand(3))
    given = torch.rand(4, 3), torch.rand(3)
    torch.testing.assert_close(gm(*given), plain(*given))
    called = gm.graph.find_nodes(op="call_function", target=ops.invoke_subgraph)
    assert [node.args[1] for node in called] == ["sine", "sine", "sine_backward", "sine_backward"]


@in_each_mode
def test_nested_compile_region(mode: str) -> None:
    region = torch.compiler.nested_compile_region(lambda x: x.sin())
    gm = make_fx(lambda x: region(x) + region(x), tracing_mode=mode)(torch.rand(3))
    torch.testing.assert_close(gm(torch.ones(3)), torch.ones(3).sin() * 2)


@in_each_mode
def test_flex_attention_takes_what_its_functions_refer_to(mode: str) -> None:
    def f(q: Tensor, bias: Tensor) -> Tensor:
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[h] * (i - j))

    def plain(q: Tensor, bias: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        scores = q @ q.mT / q.shape[3] ** 0.5 + bias[:, None, None] * (place[:, None] - place)
        return scores.softmax(-1) @ q

    gm = make_fx(f, tracing_mode=mode)(torch.randn(1, 2, 16, 8), torch.randn(2))
    q, bias = torch.randn(1, 2, 16, 8), torch.randn(2)
    torch.testing.assert_close(gm(q, bias), plain(q, bias))
    assert submodules(gm) == ["sdpa_score0", "sdpa_mask0"]


def test_backward_of_flex_attention_on_cuda() -> None:
    def f(q: Tensor, bias: Tensor) -> Any:
        out = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[h])
        return torch.autograd.grad(out.sum(), (q, bias))

    with FakeTensorMode():
        q = torch.randn(1, 2, 128, 16, device="cuda", requires_grad=True)
        bias = torch.randn(2, device="cuda", requires_grad=True)
    gm = make_fx(f, tracing_mode="fake")(q, bias)
    assert submodules(gm) == ["sdpa_score0", "sdpa_mask0", "fw_graph0", "joint_graph0", "mask_graph0"]
    shapes = [tuple(node.meta["val"].shape) for node in gm.graph.find_nodes(op="output")[0].args[0]]
    assert shapes == [(1, 2, 128, 16), (2,)]


SIMPLE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any], list[str]]] = {
    "out_dtype": (
        lambda x: ops.out_dtype(torch.ops.aten.mul.Tensor, torch.int32, x.to(torch.int8), 3),
        lambda x: x.to(torch.int8).to(torch.int32) * 3,
        [],
    ),
    "strict_mode": (
        lambda x: strict_mode(lambda x: (x.sin(),), (x,)),
        lambda x: (x.sin(),),
        ["strict_graph_0"],
    ),
    "hints_wrapper": (
        lambda x: ops.hints_wrapper(lambda x: (x.sin(),), (x,), {}, hints={"a": 1}),
        lambda x: (x.sin(),),
        ["hints_wrapper_body_graph_0"],
    ),
    "wrap": (lambda x: ops.wrap(lambda x: x.sin(), x), lambda x: x.sin(), []),
    "tag_activation_checkpoint": (
        lambda x: ops.tag_activation_checkpoint(SINE, x, x),
        lambda x: sine(x, x),
        [],
    ),
    "run_and_save_rng_state": (
        lambda x: ops.run_and_save_rng_state(torch.ops.aten.sin.default, x)[1],
        lambda x: x.sin(),
        [],
    ),
    "run_with_rng_state": (
        lambda x: ops.run_with_rng_state(torch.get_rng_state(), torch.ops.aten.sin.default, x),
        lambda x: x.sin(),
        [],
    ),
    "print": (lambda x: (ops.print("{n}", n=1), x.sin())[1], lambda x: x.sin(), []),
}


@pytest.mark.parametrize("name", SIMPLE)
@in_each_mode
def test_operators_that_record_themselves(name: str, mode: str) -> None:
    f, plain, expected = SIMPLE[name]
    gm = make_fx(f, tracing_mode=mode)(torch.rand(4, 3))
    x = torch.rand(4, 3)
    torch.testing.assert_close(gm(x), plain(x))
    assert submodules(gm) == expected


def increase_(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@in_each_mode
def test_auto_functionalized(mode: str) -> None:
    with torch.library._scoped_library("understudy_subgraphs", "FRAGMENT") as library:
        library.define("increase(Tensor(a!) x, Tensor y) -> ()")
        library.impl("increase", increase_, "CPU")
        library.impl("increase", lambda x, y: None, "Meta")
        increase = torch.ops.understudy_subgraphs.increase.default
        gm = make_fx(lambda x: ops.auto_functionalized(increase, x=x, y=x), tracing_mode=mode)(
            torch.rand(4, 3)
        )
        x = torch.rand(4, 3)
        torch.testing.assert_close(gm(x)[1], x * 2)


@in_each_mode
def test_operator_of_a_user(mode: str, new_operator: Any) -> None:
    op = new_operator("understudy_twice")
    op.fallthrough(torch._C.DispatchKey.AutogradCPU)

    @op.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
    def dense(function: Any, x: Tensor) -> Tensor:
        return function(function(x))

    @op.py_impl(TorchFakeTensorMode)
    def fake(mode: Any, function: Any, x: Tensor) -> Tensor:
        with mode:
            return function(function(x))

    @op.py_impl(TorchRecorder)
    def recorded(mode: Any, function: Any, x: Tensor) -> Any:
        graph = reenter_make_fx(function)(x)
        mode.tracer.root.register_module("twice_graph_0", graph)
        args = torch.utils._pytree.tree_map(mode.tracer.unwrap_proxy, (graph, x))
        proxy = mode.tracer.create_proxy("call_function", op, args, {})
        return track_tensor_tree(op(graph, x), proxy, constant=None, tracer=mode.tracer)

    gm = make_fx(lambda x: op(lambda x: x.sin() * x.shape[0], x) + 1, tracing_mode=mode)(torch.rand(4))
    x = torch.rand(4)
    torch.testing.assert_close(gm(x), ((x.sin() * 4).sin() * 4) + 1)
    assert submodules(gm) == ["twice_graph_0"]


def test_operator_that_does_not_say_how_it_is_recorded(new_operator: Any) -> None:
    op = new_operator("understudy_silent")
    op.fallthrough(torch._C.DispatchKey.AutogradCPU)
    with pytest.raises(
        UnsupportedOperatorException,
        match=r"(?s)understudy_silent has no implementation for recording.*py_impl",
    ):
        make_fx(lambda x: op(x), tracing_mode="fake")(torch.ones(2))


@in_each_mode
def test_base_of_operators_with_one_graph(mode: str, new_operator: Any) -> None:
    op = new_operator("understudy_region", BaseHOP)

    def f(x: Tensor, w: Tensor) -> Any:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(op(SINE, x, w, scheme="a")[0].sum(), w)

    gm = make_fx(f, tracing_mode=mode)(torch.rand(4, 3), torch.rand(4, 3))
    torch.testing.assert_close(gm(torch.rand(4, 3), torch.rand(4, 3)), (torch.ones(4, 3),))


@in_each_mode
def test_above_autograd_branches_keep_their_composites_and_switches(mode: str) -> None:
    def yes(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.nn.functional.linear(x, x)
        return y + x

    def f(x: Tensor) -> Any:
        chosen = torch.cond(x.sum() > 0, yes, lambda x: x - 1, (x,))
        carry, rows = scan(
            lambda carry, row: (carry + row, torch.nn.functional.linear(row, x)), x[0] * 0, chosen
        )
        return while_loop(lambda i, c: i < 3, lambda i, c: (i + 1, c * 2), (torch.tensor(0), carry))[1], rows

    gm = make_fx(f, tracing_mode=mode, pre_dispatch=True)(torch.rand(3, 3))
    for x in (torch.rand(3, 3), -torch.rand(3, 3)):
        chosen = x @ x.T + x if x.sum() > 0 else x - 1
        torch.testing.assert_close(gm(x), (chosen.sum(0) * 8, torch.stack([x @ row for row in chosen])))
    inner = [node.target for node in gm.true_graph_0.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.linear.default in inner
    assert torch._C._set_grad_enabled in inner


def test_threads_that_trace_at_the_same_time() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))

    def g(x: Tensor) -> Tensor:
        return f(ops.hints_wrapper(lambda x: (x.clone(),), (x,), {}, hints={})[0])

    f_traced = make_fx(f, tracing_mode="symbolic")
    f_traced(torch.ones(2))  # loads what torch loads lazily
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for size in range(2, 8):
                gm = make_fx(g, tracing_mode=MODES[seed % 3])(torch.rand(size))
                x = -torch.rand(size)
                torch.testing.assert_close(gm(x), x.cos())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert torch._higher_order_ops.hints_wrap.track_tensor_tree is track_tensor_tree
