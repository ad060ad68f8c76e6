"""Higher-order operators in make_fx: graphs inside of the graph. The reference is the same program in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.functional_tensor import FunctionalTensorMode, PythonFunctionalizeAPI
from torch.fx import GraphModule

from understudy import FakeTensorMode, OperatorError, UnsupportedMutationAliasingException, make_fx

pytestmark = pytest.mark.filterwarnings("ignore")
MODES = ("real", "fake", "symbolic")
in_each_mode = pytest.mark.parametrize("mode", MODES)
ops = torch.ops.higher_order


def agree(
    f: Callable[..., Any],
    reference: Callable[..., Any],
    mode: str,
    example: Sequence[Any],
    *others: Sequence[Any],
) -> GraphModule:
    """Trace on the example; the graph then gives what the reference gives on all inputs (of other sizes if symbolic)."""
    gm = make_fx(f, tracing_mode=mode)(*example)
    gm.graph.lint()
    for inputs in (example, *others):
        torch.testing.assert_close(gm(*inputs), reference(*inputs), rtol=0, atol=0)
    return gm


def submodules(gm: GraphModule) -> list[str]:
    return [name for name, _ in gm.named_modules() if name]


def targets(gm: Any) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape) + 0.1


def negative(*shape: int) -> Tensor:
    return -positive(*shape)


# --- under functionalization in Python, as torch's own compiler does it --------------------------------------------------


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_branches_of_functional_tensors_refer_to_nothing_outside(mode: str) -> None:
    def grown(x: Tensor) -> Any:
        y = x + 1
        y.mul_(2)
        return (y,)

    def f(x: Tensor) -> Any:
        (y,) = while_loop(lambda x: x.sum() < 10, grown, (x,))
        return torch.cond(y.sum() > 100, lambda y: y.sin(), lambda y: grown(y)[0], (y,))

    with FunctionalTensorMode():
        gm = make_fx(PythonFunctionalizeAPI().functionalize(f), tracing_mode=mode)(torch.ones(3))
    assert not any("_." in target for inner in (gm, *gm.children()) for target in targets(inner))
    assert [len(inner.graph.find_nodes(op="placeholder")) for inner in gm.children()] == [1, 1, 1, 1]
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 10.0))


# --- cond ---------------------------------------------------------------------------------------------------------------


def test_a_condition_on_sizes_is_computed_before_the_branches_are_read() -> None:
    def f(x: Tensor) -> Any:
        return torch.cond(x.shape[0] == 4, lambda x: x + x, lambda x: x * x, [x])

    gm = agree(f, lambda x: x + x if len(x) == 4 else x * x, "symbolic", [positive(3, 2)], [positive(4, 2)])
    names = [node.name for node in gm.graph.nodes]
    assert names == [
        "x_1",
        "sym_size_int",
        "eq",
        "true_graph_0",
        "false_graph_0",
        "cond",
        "getitem",
        "output",
    ]
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.cond)
    assert node.args[3] == (gm.graph.find_nodes(op="placeholder")[0],)


@in_each_mode
def test_branches_of_different_ranks_are_refused(mode: str) -> None:
    def f(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: torch.zeros(10, 10), (x,))

    with pytest.raises(OperatorError, match="branch"):
        make_fx(f, tracing_mode=mode)(torch.ones(4))


@in_each_mode
def test_cond_takes_the_branch_that_the_data_asks_for(mode: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, y: x.sin() + y, lambda x, y: (x @ y.T) @ y, (x, y))

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() + y if x.sum() > 0 else (x @ y.T) @ y

    others = [(negative(2, 3), torch.randn(2, 3))]
    if mode == "symbolic":
        others += [(positive(5, 4), torch.randn(5, 4)), (negative(7, 2), torch.randn(7, 2))]
    gm = agree(f, plain, mode, (positive(2, 3), torch.randn(2, 3)), *others)
    assert submodules(gm) == ["true_graph_0", "false_graph_0"]
    assert targets(gm.true_graph_0) == ["aten.sin.default", "aten.add.Tensor"]
    assert [node.name for node in gm.true_graph_0.graph.find_nodes(op="placeholder")] == ["arg0_1", "arg1_1"]
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.cond)
    assert node.meta["val"][0].shape == gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape


@in_each_mode
def test_what_a_branch_refers_to_becomes_an_operand(mode: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        shift = w * 2
        return torch.cond(x.sum() > 0, lambda a: a + shift + x, lambda a: a * w, (x,))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return x + w * 2 + x if x.sum() > 0 else x * w

    gm = agree(f, plain, mode, (positive(2, 3), torch.randn(3)), (negative(2, 3), torch.randn(3)))
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.cond)
    assert [argument.name for argument in node.args[3]] == ["x_1", "mul", "x_1", "w_1"]
    assert not dict(gm.true_graph_0.named_buffers())


@in_each_mode
def test_what_a_branch_of_a_branch_refers_to_becomes_an_operand_of_both(mode: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        def inner(a: Tensor) -> Tensor:
            return torch.cond(a.max() > 1, lambda a: a * w, lambda a: a.sin(), (a,))

        return torch.cond(x.sum() > 0, inner, lambda a: a.cos(), (x,))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (x * w if x.max() > 1 else x.sin()) if x.sum() > 0 else x.cos()

    above = positive(2, 3) + 1
    gm = agree(
        f, plain, mode, (above, torch.randn(3)), (above, torch.randn(3)), (negative(2, 3), torch.randn(3))
    )
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.cond)
    assert [argument.name for argument in node.args[3]] == ["x_1", "w_1"]


@in_each_mode
def test_parameters_of_modules_in_branches(mode: str) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.yes = nn.Linear(3, 3)
            self.no = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, self.yes, self.no, (x,))

    gate = Gate()
    before = dict(gate.named_parameters())
    gm = agree(
        gate, lambda x: gate.yes(x) if x.sum() > 0 else gate.no(x), mode, (positive(2, 3),), (negative(2, 3),)
    )
    assert all(gate.get_parameter(name) is tensor for name, tensor in before.items())
    assert {"yes.weight", "no.2.bias"} <= {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}


def test_sizes_that_a_branch_refers_to() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        rows, columns = x.shape
        return torch.cond(
            y.sum() > 0, lambda y: y.new_full((columns, 2), rows), lambda y: y.new_ones(columns, 2), (y,)
        )

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return torch.full((x.shape[1], 2), x.shape[0]).to(y) if y.sum() > 0 else torch.ones(x.shape[1], 2)

    gm = agree(
        f,
        plain,
        "symbolic",
        (torch.ones(2, 3), positive(4)),
        (torch.ones(5, 7), negative(3)),
        (torch.ones(3, 6), positive(2)),
    )
    assert len(gm.graph.find_nodes(op="call_function", target=ops.cond)[0].args[3]) == 3


@in_each_mode
def test_structures_in_and_out_of_cond(mode: str) -> None:
    def f(x: Tensor) -> Any:
        return torch.cond(
            x.sum() > 0,
            lambda p: {"a": p["u"][0] + 1, "b": (p["v"] * 2, None)},
            lambda p: {"a": p["u"][0] - 1, "b": (p["v"] * 3, None)},
            ({"u": [x], "v": x.exp()},),
        )

    def plain(x: Tensor) -> Any:
        sign, factor = (1, 2) if x.sum() > 0 else (-1, 3)
        return {"a": x + sign, "b": (x.exp() * factor, None)}

    agree(f, plain, mode, (positive(2, 3),), (negative(2, 3),))


@in_each_mode
def test_cond_in_cond_in_loop(mode: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> Any:
            def inner(x: Tensor) -> Tensor:
                return torch.cond(x.max() > 2, lambda x: x - w, lambda x: x + w, (x,))

            return i + 1, torch.cond(x.sum() > 0, inner, lambda x: x * w, (x,))

        return while_loop(lambda i, x: i < 4, body, (torch.tensor(0), x))[1]

    def plain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = (x - w if x.max() > 2 else x + w) if x.sum() > 0 else x * w
        return x

    others = [(negative(3), torch.rand(3)), (positive(3) * 9, torch.rand(3))]
    gm = agree(f, plain, mode, (positive(3), torch.rand(3)), *others)
    assert "while_loop_body_graph_0.true_graph_0.false_graph_0" in submodules(gm)


def test_predicate_on_sizes_keeps_both_branches() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 3, lambda x: x[:3] + 1, lambda x: x[:2] * 2, (x,))

    gm = agree(
        f,
        lambda x: x[:3] + 1 if x.shape[0] > 3 else x[:2] * 2,
        "symbolic",
        (torch.randn(5, 3),),
        (torch.randn(2, 3),),
    )
    val = gm.graph.find_nodes(op="call_function", target=ops.cond)[0].meta["val"][0]
    assert str(val.shape[0]).startswith("u")
    assert "unbacked_bindings" in gm.graph.find_nodes(op="call_function", target=ops.cond)[0].meta


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_sizes_that_data_inside_a_branch_decides(mode: str) -> None:
    def f(x: Tensor) -> Any:
        found = torch.cond(x.sum() > 0, lambda x: x.nonzero(), lambda x: (x > -1).nonzero(), (x,))
        return found.sum(), found * 2

    def plain(x: Tensor) -> Any:
        found = x.nonzero() if x.sum() > 0 else (x > -1).nonzero()
        return found.sum(), found * 2

    agree(f, plain, mode, (torch.tensor([1.0, 0.0, 2.0]),), (torch.tensor([-3.0, -0.5, -0.1]),))


@in_each_mode
def test_numbers_out_of_branches(mode: str) -> None:
    def f(x: Tensor) -> Any:
        y, n = torch.cond(x.sum() > 0, lambda x: (x + 1, 3), lambda x: (x - 1, 7), (x,))
        return y * n, n

    example = (positive(3),)
    if mode == "real":
        gm = make_fx(f)(*example)
        assert gm(*example)[1] == 3
        return
    agree(f, lambda x: ((x + 1) * 3, 3) if x.sum() > 0 else ((x - 1) * 7, 7), mode, example, (negative(3),))


def test_branches_that_do_not_go_together() -> None:
    def traced(yes: Any, no: Any) -> None:
        make_fx(lambda x: torch.cond(x.sum() > 0, yes, no, (x,)), tracing_mode="fake")(torch.ones(3))

    with pytest.raises(
        OperatorError,
        match=r"torch.cond: one branch returns f32\[3\]@cpu and the other i32\[3\]@cpu: they differ in dtype",
    ):
        traced(lambda x: x + 1, lambda x: x.int())
    with pytest.raises(OperatorError, match="differ in ndim"):
        traced(lambda x: x + 1, lambda x: x.sum())
    with pytest.raises(OperatorError, match=r"(?s)torch.cond: one branch returns.*to do: .*same structure"):
        traced(lambda x: x + 1, lambda x: (x, x))


def test_writing_to_an_operand_is_refused_while_gradients_are_recorded() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.add_(1) * 2, lambda x: x * 2, (x,))

    with pytest.raises(UnsupportedMutationAliasingException) as error:
        make_fx(f, tracing_mode="symbolic")(torch.ones(3))
    text = str(error.value)
    assert "cond: the function <lambda>, its true_graph, writes to a tensor that comes from outside" in text
    assert "aten.add_.Tensor" in text
    assert "x.add_(1) * 2" in text
    assert (
        "to do:   write to a clone of it; or, where no gradients are needed, call it under torch.no_grad()"
        in text
    )


@in_each_mode
def test_writing_to_an_operand_without_gradients(mode: str) -> None:
    def f(x: Tensor) -> Any:
        with torch.no_grad():
            y = torch.cond(x.sum() > 0, lambda x: x.add_(1) * 2, lambda x: x.mul_(3) * 2, (x,))
        return y, x + 0

    for x in (positive(3), negative(3)):
        gm = make_fx(f, tracing_mode=mode)(positive(3))
        expected = x + 1 if x.sum() > 0 else x * 3
        torch.testing.assert_close(gm(x), (expected * 2, expected))


def test_returning_an_operand_is_refused() -> None:
    for branch in (lambda x: x, lambda x: x[1:]):
        with pytest.raises(
            UnsupportedMutationAliasingException,
            match=r"(?s)returns a tensor that comes from outside.*x.clone\(\)",
        ):
            make_fx(lambda x, b=branch: torch.cond(x.sum() > 0, b, b, (x,)))(torch.ones(3))


def test_state_is_restored_after_an_error_in_a_branch() -> None:
    def wrong(x: Tensor) -> Tensor:
        raise ValueError("this branch is broken")

    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, wrong, (x,))

    from torch.fx.experimental import proxy_tensor
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in MODES:
        with pytest.raises(ValueError, match="this branch is broken"):
            make_fx(f, tracing_mode=mode)(torch.ones(3))
        assert _get_current_dispatch_mode_stack() == []
        assert torch.overrides._get_current_function_mode_stack() == []
        assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None
        assert torch.is_grad_enabled()
    torch.testing.assert_close(make_fx(lambda x: x + 1)(torch.ones(3))(torch.ones(3)), torch.full((3,), 2.0))


def test_inside_a_fake_mode_of_the_user() -> None:
    with FakeTensorMode():
        x = torch.randn(4)
        gm = make_fx(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))(x)
    torch.testing.assert_close(gm(torch.ones(4)), torch.full((4,), 2.0))


# --- loops --------------------------------------------------------------------------------------------------------------


@in_each_mode
def test_while_loop_with_several_trip_counts(mode: str) -> None:
    def f(n: Tensor, x: Tensor, w: Tensor) -> Any:
        return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * w + i), (torch.tensor(0), x))

    def plain(n: Tensor, x: Tensor, w: Tensor) -> Any:
        i = torch.tensor(0)
        while i < n:
            i, x = i + 1, x * w + i
        return i, x

    w = torch.randn(3)
    gm = agree(
        f,
        plain,
        mode,
        (torch.tensor(2), torch.randn(2, 3), w),
        *[(torch.tensor(n), torch.randn(2, 3), w) for n in (0, 1, 7)],
    )
    assert submodules(gm) == ["while_loop_cond_graph_0", "while_loop_body_graph_0"]


@in_each_mode
def test_while_loop_that_counts_with_a_number(mode: str) -> None:
    def f(x: Tensor) -> Any:
        return while_loop(lambda i, x: i < x.shape[0], lambda i, x: (i + 1, x + i), (0, x))

    def plain(x: Tensor) -> Any:
        return x.shape[0], x + sum(range(x.shape[0]))

    others = [(torch.zeros(6, 2),), (torch.zeros(2, 2),)] if mode == "symbolic" else []
    agree(f, plain, mode, (torch.zeros(4, 2),), *others)


def test_loop_that_changes_what_it_carries_is_refused() -> None:
    def f(x: Tensor) -> Any:
        return while_loop(lambda x: x.sum() < 3, lambda x: (torch.cat([x, x]),), (x,))

    with pytest.raises(
        OperatorError,
        match=r"while_loop: the input of the body and its output.*f32\[2\].*f32\[4\]",
    ):
        make_fx(f, tracing_mode="fake")(torch.ones(2))


@in_each_mode
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_scan(mode: str, reverse: bool, dim: int) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        def step(carry: Any, x: Tensor) -> Any:
            total = carry["total"] + x * w
            return {"total": total}, (total * 2, x.sum())

        return scan(step, {"total": w * 0}, x, dim=dim, reverse=reverse)

    def plain(x: Tensor, w: Tensor) -> Any:
        total, rows, sums = w * 0, [], []
        parts = list(x.unbind(dim))
        for part in reversed(parts) if reverse else parts:
            total = total + part * w
            rows.append(total * 2)
            sums.append(part.sum())
        order = slice(None, None, -1) if reverse else slice(None)
        outputs = torch.stack(rows[order], dim), torch.stack(sums[order])
        return {"total": total}, outputs

    def inputs(length: int, width: int) -> tuple[Tensor, Tensor]:
        return torch.randn((length, width) if dim == 0 else (width, length)), torch.randn(width)

    others = [inputs(7, 3), inputs(2, 5)] if mode == "symbolic" else []
    gm = agree(f, plain, mode, inputs(4, 3), *others)
    assert submodules(gm) == ["scan_combine_graph_0"]


@in_each_mode
def test_map(mode: str) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        return map_over(lambda row, other: {"a": row["x"] * other + w, "b": row["x"].sum()}, {"x": x}, w)

    def plain(x: Tensor, w: Tensor) -> Any:
        return {"a": torch.stack([row * w + w for row in x]), "b": torch.stack([row.sum() for row in x])}

    others = [(torch.randn(6, 2), torch.randn(2))] if mode == "symbolic" else []
    gm = agree(f, plain, mode, (torch.randn(4, 3), torch.randn(3)), *others)
    assert submodules(gm) == ["body_graph_0"]


def test_associative_scan_on_cuda() -> None:
    def f(x: Tensor) -> Tensor:
        return associative_scan(lambda a, b: a + b, x, 0, combine_mode="pointwise")

    with FakeTensorMode():
        gm = make_fx(f, tracing_mode="fake")(torch.randn(4, 3, device="cuda"))
    assert submodules(gm) == ["associative_scan_combine_graph_0"]


@in_each_mode
def test_associative_scan(mode: str) -> None:
    def f(x: Tensor) -> Tensor:
        return associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic")

    gm = make_fx(f, tracing_mode=mode)(torch.rand(4, 3))
    x = torch.rand(4, 3)
    torch.testing.assert_close(gm(x), x.cumprod(0))


@in_each_mode
def test_branches_that_iterate_index_and_make_constants(mode: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            total = torch.tensor(0.5)
            for row in x:
                total = total + row[0] * torch.tensor([1.0, 2.0])[1]
            return total + w.max()

        return torch.cond(x.sum() > 0, yes, lambda x: torch.zeros(()) + next(iter(w)), (x,))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        if x.sum() <= 0:
            return torch.zeros(()) + w[0]
        total = torch.tensor(0.5)
        for row in x:
            total = total + row[0] * 2
        return total + w.max()

    agree(f, plain, mode, (positive(2, 3), torch.randn(3)), (negative(2, 3), torch.randn(3)))


def test_the_branch_not_taken_touches_no_data() -> None:
    x = torch.tensor([0, 0])
    f = lambda x: torch.cond(x.sum() == 0, lambda x: x + 1, lambda x: 6 // x, (x,))  # noqa: E731
    gm = make_fx(f)(x)
    assert gm(x).tolist() == [1, 1]
    assert gm(torch.tensor([2, 3])).tolist() == [3, 2]


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_a_graph_whose_branches_have_constants_is_traced_again(tracing_mode: str) -> None:
    def program(x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - torch.tensor([2.0, 3.0]), (x,))

    x = torch.ones(2)
    first = make_fx(program, tracing_mode="symbolic", pre_dispatch=True)(x)
    again = make_fx(first, tracing_mode=tracing_mode)(x)
    for given in (x, -x):
        assert torch.equal(again(given), program(given))
