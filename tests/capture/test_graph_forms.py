"""What graphs look like where that is for people: comparisons as they were written, branches without needless copies."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch.fx import GraphModule, Interpreter
from torch.fx.traceback import preserve_node_meta

from understudy import make_fx, patching, symbolic_trace
from understudy.capture.higher_order.torch_tracing import CurrentTracer
from understudy.patching import RECORDING

pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten


def targets_of(gm: Any) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


COMPARISONS: dict[str, tuple[Any, str]] = {
    "less": (lambda n, m: n < m * 2 + 3, "lt = sym_size_int < add"),
    "at most": (lambda n, m: n <= 12, "le = sym_size_int <= 12"),
    "greater than a number": (lambda n, m: n > 3, "gt = sym_size_int > 3"),
    "unequal": (lambda n, m: n != m, "ne = sym_size_int != sym_size_int_1"),
    "negated": (lambda n, m: torch.sym_not(n > 12), "le = sym_size_int <= 12"),
    "negated, of two sizes": (lambda n, m: torch.sym_not(n < m + 7), "ge = sym_size_int >= add"),
    "negated, strict": (lambda n, m: torch.sym_not(n <= m), "gt = sym_size_int > sym_size_int_1"),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_are_recorded_as_they_were_written(name: str) -> None:
    compare, line = COMPARISONS[name]

    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(compare(x.shape[0], y.shape[0]), lambda x: x + 1, lambda x: x - 1, (x,))

    gm = make_fx(f, tracing_mode="symbolic")(torch.ones(4), torch.ones(6))
    assert line in gm.code
    for sizes in ((2, 9), (20, 3), (5, 5), (13, 6), (12, 5)):
        x, y = torch.ones(sizes[0]), torch.ones(sizes[1])
        expected = x + 1 if bool(compare(*sizes)) else x - 1
        torch.testing.assert_close(gm(x, y), expected)


def test_a_comparison_that_spoke_of_more_than_it_depends_on() -> None:
    def f(x: Tensor) -> Tensor:
        unknown = x.sum().to(torch.int64).item()
        return torch.cond(x.shape[0] + unknown < unknown + 5, lambda x: x + 1, lambda x: x - 1, (x,))

    gm = make_fx(f, tracing_mode="symbolic")(torch.ones(3))
    assert "le = sym_size_int <= 4" in gm.code
    torch.testing.assert_close(gm(torch.ones(7)), torch.zeros(7))


def test_the_condition_of_a_loop_that_counts() -> None:
    def f(x: Tensor) -> Any:
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x + i), (0, x))

    gm = make_fx(f, tracing_mode="fake")(torch.ones(3))
    assert "lt = arg0_1 < 5" in gm.get_submodule("while_loop_cond_graph_0").code


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_gradients_of_branches_are_copied_only_where_they_must_be(mode: str) -> None:
    def f(p: Tensor, x: Tensor) -> Any:
        y = torch.cond(p, lambda x: x.sin(), lambda x: x.clone(), (x,))
        return torch.autograd.grad(y, x, torch.ones_like(y))

    gm = make_fx(f, tracing_mode=mode)(torch.tensor(True), torch.ones(3, 4, requires_grad=True))
    assert targets_of(gm.get_submodule("true_graph_1")) == [aten.cos.default, aten.mul.Tensor]
    # The gradient of a copy is what came in: an operator must not hand that out.
    assert targets_of(gm.get_submodule("false_graph_1")) == [aten.clone.default]
    x = torch.randn(3, 4, requires_grad=True)
    for p in (torch.tensor(True), torch.tensor(False)):
        torch.testing.assert_close(gm(p, x), f(p, x))


def test_two_gradients_that_are_one_tensor() -> None:
    def f(p: Tensor, x: Tensor, y: Tensor) -> Any:
        z = torch.cond(p, lambda x, y: (x + y).sin(), lambda x, y: x * y, (x, y))
        return torch.autograd.grad(z.sum(), (x, y))

    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    gm = make_fx(f, tracing_mode="symbolic")(torch.tensor(True), x, y)
    for p in (torch.tensor(True), torch.tensor(False)):
        torch.testing.assert_close(gm(p, x, y), f(p, x, y))
    first, second = gm(torch.tensor(True), x, y)
    assert first.data_ptr() != second.data_ptr()


def test_a_comparison_that_ranges_decide_goes_wherever_a_bool_does() -> None:
    def f(x: Tensor) -> Any:
        is_one = x.shape[0] == 1
        y = x.sum(0, keepdim=is_one) + torch.tensor(is_one)
        return torch.cond(is_one, lambda y: y.sin(), lambda y: y.cos(), (y,))

    gm = make_fx(f, tracing_mode="symbolic")(torch.ones(4, 5))
    x = torch.randn(3, 2)
    torch.testing.assert_close(gm(x), x.sum(0).cos())


def test_a_comparison_of_sizes_that_a_guard_has_fixed() -> None:
    weight = torch.ones(2, 3)

    def f(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] == 4, lambda x: x + weight, lambda x: x - weight, (x,))

    gm = make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.ones(2, 3))
    assert "cond(False, true_graph_0" in gm.code
    torch.testing.assert_close(gm(torch.ones(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("writes_first", [True, False])
def test_a_branch_that_writes_to_its_operand_under_functionalization(writes_first: bool) -> None:
    def writes(x: Tensor) -> Tensor:
        view = x.view(x.shape)
        view.add_(1)
        return view.sum()

    branches = (writes, torch.sum) if writes_first else (torch.sum, writes)

    def f(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] == 4, *branches, (x,))

    with pytest.raises(RuntimeError, match="might be modifying the input"):
        make_fx(torch.func.functionalize(f), tracing_mode="symbolic")(torch.ones(4, 5))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_a_branch_that_returns_a_view_of_what_it_wrote_under_functionalization(tracing_mode: Any) -> None:
    def write(x: Tensor) -> Tensor:
        copy = x.clone()
        copy.add_(1)
        return copy.view(-1)

    f = torch.func.functionalize(lambda x: torch.cond(x.sum() > 0, write, lambda x: x.clone().view(-1), (x,)))
    gm = make_fx(f, tracing_mode=tracing_mode)(torch.ones(2, 2))
    torch.testing.assert_close(gm(torch.ones(2, 2)), torch.full((4,), 2.0))
    torch.testing.assert_close(gm(-torch.ones(2, 2)), -torch.ones(4))


def test_nodes_in_branches_keep_what_the_nodes_of_a_graph_said() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,))

    gm = make_fx(f)(torch.ones(3))
    for name, branch in gm.named_children():
        assert isinstance(branch, GraphModule)
        for node in branch.graph.nodes:
            node.meta["custom"] = {"branch": name}

    def again(x: Tensor) -> Any:
        with preserve_node_meta():
            return Interpreter(gm).run(x)

    for name, branch in make_fx(again)(torch.ones(3)).named_children():
        assert isinstance(branch, GraphModule)
        found = [node.meta.get("custom") for node in branch.graph.nodes if node.op == "call_function"]
        assert found and all(custom == {"branch": name} for custom in found)


def test_our_tracer_stays_as_long_as_anyone_needs_it() -> None:
    import torch.fx.experimental.proxy_tensor as tracing

    first, second = patching.active(RECORDING), patching.active(RECORDING)
    first.__enter__()
    second.__enter__()  # as another thread would
    first.__exit__(None, None, None)
    assert type(tracing._CURRENT_MAKE_FX_TRACER) is CurrentTracer
    second.__exit__(None, None, None)
    assert tracing._CURRENT_MAKE_FX_TRACER is None


def test_our_tracer_leaves_torch_to_its_own() -> None:
    """In a thread without a capture of ours, torch's tracer answers."""
    from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx

    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with patching.active(RECORDING):
        graph = torch_make_fx(f, tracing_mode="real")(torch.ones(3))
    assert "true_graph_0" in graph.code


# --- graphs, given to torch's compilers -----------------------------------------------------------------------------


def capture_or_trace(kind: str) -> GraphModule:
    """A new graph, of which no code was written yet."""
    if kind == "make_fx":
        return make_fx(lambda x: x.sin() + 1)(torch.ones(3))
    return symbolic_trace(lambda x: x.sin() + 1, {"x": torch.ones(3)})


@pytest.mark.parametrize("kind", ["make_fx", "symbolic_trace"])
@pytest.mark.parametrize("is_inside", [False, True], ids=["whole", "inside"])
def test_a_new_graph_is_compiled_without_a_break(kind: str, is_inside: bool) -> None:
    torch.compiler.reset()
    gm = capture_or_trace(kind)
    compiled = torch.compile((lambda x: gm(x) * 1) if is_inside else gm, backend="eager", fullgraph=True)
    x = torch.randn(3)
    torch.testing.assert_close(compiled(x), x.sin() + 1, rtol=0, atol=0)


def test_the_forward_of_a_new_graph_has_its_own_signature() -> None:
    gm = make_fx(lambda x, scale: x * scale)(torch.ones(3), 2)
    assert list(inspect.signature(gm.forward).parameters) == ["x_1", "scale_1"]
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.target = aten.add.Tensor
    gm.recompile()
    torch.testing.assert_close(gm.forward(torch.ones(3), 2), torch.full((3,), 3.0))


def test_a_new_torch_level_graph_is_scripted() -> None:
    x = torch.randn(3)
    torch.testing.assert_close(torch.jit.script(capture_or_trace("symbolic_trace"))(x), x.sin() + 1)
