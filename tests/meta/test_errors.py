"""What a trace says when it can't go on, or can't know; and that it leaves nothing behind."""

from __future__ import annotations

import math
import re
import threading
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.meta.reality import assert_same
from understudy import (
    FakeTensorMode,
    MetaTraceError,
    MetaTracer,
    PropagationError,
    manual_meta_overrides,
    symbolic_trace,
)
from understudy.errors import ShapeMismatch

x24 = torch.randn(2, 4)


def text_of(error: BaseException) -> str:
    """The message, with the numbers of lines left out."""
    return re.sub(r"test_errors\.py:\d+", "test_errors.py:N", str(error))


# --- errors ---------------------------------------------------------------------------------------------------------


def test_an_operator_that_refuses() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x) @ w

    with pytest.raises(ShapeMismatch) as said:
        symbolic_trace(program, {"x": x24, "w": torch.randn(3, 5)})
    assert isinstance(said.value, PropagationError) and isinstance(said.value, RuntimeError)
    assert said.value.node.name == "matmul"
    assert text_of(said.value) == (
        "mm: f32[2, 4]@cpu has 4 columns, f32[3, 5]@cpu has 3 rows\n"
        "  node:    %matmul = call_function matmul\n"
        "  called:  matmul(f32[2, 4]@cpu, f32[3, 5]@cpu)\n"
        "  at:      tests/meta/test_errors.py:N: return torch.relu(x) @ w\n"
        "  to do:   real tensors of these shapes fail as well: make the shapes fit at that line"
    )


def test_a_module_that_refuses() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
    with pytest.raises(ShapeMismatch) as said:
        symbolic_trace(model, {"input": x24})
    assert "  node:    %_1 = call_module 1\n" in str(said.value)
    assert "  in:      1\n" in str(said.value)
    assert "(f32[2, 3]@cpu)" in str(said.value)


def test_an_index_out_of_range() -> None:
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 0 with size 2") as said:
        symbolic_trace(lambda x: x[7], {"x": x24})
    assert "  node:    %getitem = call_function getitem\n  called:  getitem(f32[2, 4]@cpu, 7)\n" in str(
        said.value
    )


def test_what_torchs_python_refuses() -> None:
    with pytest.raises(
        ValueError, match=r"Expected input batch_size \(2\) to match target batch_size \(3\)"
    ) as said:
        symbolic_trace(lambda x: F.nll_loss(x, torch.zeros(3, dtype=torch.int64)), {"x": x24})
    assert "node:    %nll_loss = call_function nll_loss" in str(said.value)


def test_a_decision_that_depends_on_data() -> None:
    def program(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(MetaTraceError) as said:
        symbolic_trace(program, {"x": x24})
    text = text_of(said.value)
    assert text.startswith("bool() of a value that depends on data: ")
    assert (
        "  node:    %gt : [num_users=0] = call_function[target=operator.gt](args = (%sum_1, 0), kwargs = {})\n"
        in text
    )
    assert "  called:  bool(b8[]@cpu)\n" in text
    assert "  at:      tests/meta/test_errors.py:N: if x.sum() > 0:\n" in text
    assert "  to do:   use torch.where instead of a branch" in text


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x: not x, "bool() of a value with unknown metadata"),
        (lambda x: range(x.shape[0]), "index() of a value with unknown metadata"),
        (lambda x: [y + 1 for y in x], "a loop iterates over a value with unknown metadata"),
        (lambda x: len(x), "len() of a value with unknown metadata"),
    ],
)
def test_a_question_about_nothing(program: Any, reason: str) -> None:
    with pytest.raises(MetaTraceError) as said:
        symbolic_trace(program)
    assert str(said.value).startswith(reason)
    assert (
        "  to do:   use torch.where instead of a branch, give an example of the argument in meta_args"
        in str(said.value)
    )


class Training(nn.Module):
    """Does more than a forward pass, in one of several ways."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.1, momentum=0.9)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(self, self.layer(x).square().mean())


def stepping(model: Any, loss: Tensor) -> Any:
    loss.backward()
    model.optimizer.step()
    return loss


def clipping(model: Any, loss: Tensor) -> Any:
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.layer.parameters(), 0.1)
    return norm, [parameter.grad * 1 for parameter in model.layer.parameters()]


def differentiating(model: Any, loss: Tensor) -> Any:
    return torch.autograd.grad(loss, list(model.layer.parameters()), allow_unused=True)


def test_a_step_of_an_optimizer() -> None:
    model = Training(stepping)
    model(x24)
    model.optimizer.zero_grad()
    buffers = [state["momentum_buffer"].clone() for state in model.optimizer.state.values()]
    weight = model.layer.weight.clone()
    with pytest.raises(MetaTraceError, match=r"layer\.weight") as said:
        symbolic_trace(model, {"x": x24})
    assert "capture the program with make_fx, or a whole training step with capture_step" in str(said.value)
    assert torch.equal(model.layer.weight, weight)
    for state, before in zip(model.optimizer.state.values(), buffers, strict=True):
        assert torch.equal(state["momentum_buffer"], before)


@pytest.mark.parametrize("how", [clipping, differentiating])
def test_gradients_of_parameters(how: Any) -> None:
    model = Training(how)
    traced = symbolic_trace(model, {"x": x24})
    assert all(parameter.grad is None for parameter in model.parameters())
    given = traced(x24)
    model.zero_grad()
    expected = model(x24)
    assert_same(given, expected)


def test_a_function_that_is_differentiated() -> None:
    with pytest.raises(MetaTraceError) as said:
        symbolic_trace(lambda x: torch.func.grad(lambda w: (w * w).sum())(x), {"x": x24})
    assert str(said.value).startswith(
        "torch.func differentiates a function of this value, which is not supported"
    )
    assert "keep the function whole with torch.fx.wrap" in str(said.value)


def test_a_stand_in_from_elsewhere() -> None:
    with FakeTensorMode():
        other = torch.empty(4)
    with pytest.raises(MetaTraceError, match=r"a stand-in \(f32\[4\]@cpu\) that was not made in this trace"):
        symbolic_trace(lambda x: x + other, {"x": x24})


def test_a_buffer_that_was_written_to() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("flag", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.flag.copy_(x.sum())
            return x if self.flag > 1 else -x

    with pytest.raises(MetaTraceError, match="of a value that depends on data"):
        symbolic_trace(Written(), {"x": x24})


# --- what can't be derived ------------------------------------------------------------------------------------------------


@torch.fx.wrap
def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def through_numpy(x: Tensor) -> Tensor:
    for _ in range(30):
        x = by_numpy(x) + 1
    return by_numpy(x24 + x) * 2


def test_one_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = symbolic_trace(through_numpy, {"x": x24})
    assert torch.equal(traced(x24), through_numpy(x24))
    (warning,) = caught
    assert warning.filename == __file__ and warning.category is UserWarning
    assert text_of(warning.message) == (  # type: ignore[arg-type]
        "Could not compute metadata for call_function target by_numpy: Tensor.numpy(): f32[2, 4]@cpu is a stand-in and has "
        "no data\n"
        "  called:  by_numpy(f32[2, 4]@cpu)\n"
        "  at:      tests/meta/test_errors.py:N: x = by_numpy(x) + 1\n"
        "  to do:   compute it in understudy.manual_meta_overrides; values that depend on it have no metadata either"
    )
    assert "val" not in traced.graph.find_nodes(op="call_function", target=by_numpy)[0].meta


def test_an_override_comes_first() -> None:
    try:
        manual_meta_overrides[by_numpy] = lambda x: x.new_empty(x.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            traced = symbolic_trace(through_numpy, {"x": x24})
    finally:
        del manual_meta_overrides[by_numpy]
    assert all(n.meta["val"].shape == (2, 4) for n in traced.graph.nodes if n.op == "call_function")
    assert torch.equal(traced(x24), through_numpy(x24))


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()) * 2


def test_an_override_for_a_type_of_module() -> None:
    class Whole(MetaTracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Odd)

    model = nn.Sequential(Odd(), Odd())
    seen: list[Any] = []

    @manual_meta_overrides.register(Odd)
    def odd(module: nn.Module, x: Tensor) -> Tensor:
        seen.append(module)
        return torch.empty_like(x)

    try:
        traced = symbolic_trace(model, {"input": x24}, tracer=Whole())
    finally:
        del manual_meta_overrides[Odd]
    assert seen == list(model)
    assert [n.meta["val"].dtype for n in traced.graph.nodes if n.op == "call_module"] == [torch.float32] * 2


def test_an_override_is_for_torchs_functions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(manual_meta_overrides, torch.relu, lambda x: torch.empty(7, device="meta"))
    traced = symbolic_trace(lambda x: torch.relu(x), {"x": x24})
    assert traced.graph.find_nodes(op="call_function", target=torch.relu)[0].meta["val"].shape == (7,)


# --- nothing is left behind -------------------------------------------------------------------------------------------------


def world() -> dict[str, Any]:
    """Everything that a tracer might replace."""
    found: dict[str, Any] = {"wrapped": by_numpy}
    places = (torch, torch.Tensor, torch._C.TensorBase, torch.nn.functional, nn.Module, nn.Parameter, torch.autograd.Function,
              torch.jit.ScriptFunction, torch._functorch.apis, math, torch.nn.init)  # fmt: skip
    for place in places:
        name = getattr(place, "__name__", "")
        kinds = (types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)
        found.update(
            {f"{name}.{key}": value for key, value in vars(place).items() if isinstance(value, kinds)}
        )
    return found


def failing(x: Tensor) -> Tensor:
    y = nn.ReLU()(by_numpy(x) + torch.zeros(2, 4))
    raise KeyError("the program's own")
    return y


@pytest.mark.filterwarnings("ignore:Could not compute metadata")
def test_everything_is_restored() -> None:
    before = world()
    symbolic_trace(through_numpy, {"x": x24})
    assert world() == before
    with pytest.raises(KeyError, match="the program's own"):
        symbolic_trace(failing, {"x": x24})
    after = world()
    assert after == before and list(after) == list(before)
    assert all(after[name] is value for name, value in before.items())
    assert torch._C._len_torch_function_stack() == 0
    assert type(torch.relu(x24)) is Tensor and type(nn.Linear(4, 2)(x24)) is Tensor


def test_a_failed_trace_leaves_the_root_as_it_was() -> None:
    constant = torch.ones(4)

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * constant).view(3)

    model = Failing()
    with pytest.raises(ShapeMismatch):
        symbolic_trace(model, {"x": x24})
    assert list(vars(model)) == list(vars(Failing()))


@pytest.mark.filterwarnings("ignore:Could not compute metadata")
def test_other_threads_notice_nothing() -> None:
    """While one thread traces, others run models for real, and trace on their own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)).eval()
    expected = model(x24)
    inside, done = threading.Event(), threading.Event()
    problems: list[Any] = []

    def slow(x: Tensor) -> Tensor:
        y = torch.zeros(2, 4) + x
        inside.set()
        assert done.wait(60)
        return nn.ReLU()(by_numpy(y)) + torch.ones(2, 4)

    def others() -> None:
        try:
            assert inside.wait(60)
            for _ in range(20):
                assert torch.equal(model(x24), expected)
                made = torch.zeros(3) + torch.arange(3)
                assert type(made) is Tensor and type(by_numpy(x24)) is Tensor and math.sqrt(4) == 2
                assert type(nn.Linear(2, 2).weight) is nn.Parameter
                assert torch.equal(torch.vmap(lambda r: r * 2)(x24), x24 * 2)
            traced = symbolic_trace(model, {"input": x24})
            assert torch.equal(traced(x24), expected)
            plain = torch.fx.symbolic_trace(model)
            assert torch.equal(plain(x24), expected)
        except BaseException as error:
            problems.append(error)
        finally:
            done.set()

    before = world()
    thread = threading.Thread(target=others)
    thread.start()
    traced = symbolic_trace(slow, {"x": x24})
    thread.join()
    assert not problems, problems
    assert len(traced.graph.nodes) == 8
    assert world() == before


def test_many_threads_trace_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
    codes: list[str] = []

    def work() -> None:
        codes.extend(symbolic_trace(model, {"input": x24}).code for _ in range(5))

    before = world()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(codes) == 20 and len(set(codes)) == 1
    assert world() == before


def test_a_trace_inside_a_trace() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    seen: list[Any] = []

    def program(x: Tensor) -> Tensor:
        seen.append(symbolic_trace(inner, {"input": x24}))
        return x + 1

    traced = symbolic_trace(program, {"x": x24})
    assert torch.equal(traced(x24), x24 + 1)
    assert torch.equal(seen[0](x24), inner(x24))
