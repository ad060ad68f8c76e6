"""Errors while tracing: their text, and that nothing is left behind by them, or by a trace that went well."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.capture.captured import MODES, captured
from understudy import make_fx
from understudy.errors import ShapeMismatch

# --- what they say -------------------------------------------------------------------------------------------------------


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'real', 'fake', 'symbolic'") as caught:
        make_fx(lambda x: x, tracing_mode="pretend")
    assert "'pretend'" in str(caught.value)


def test_an_operator_that_does_not_fit_says_where() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        y = x * 2
        return y @ w  # the line

    with pytest.raises(ShapeMismatch) as caught:
        captured(f, torch.randn(2, 3), torch.randn(4, 5), mode="fake")
    text = str(caught.value)
    assert "aten.mm.default" in text
    assert "f32[2, 3]@cpu" in text and "f32[4, 5]@cpu" in text
    assert "test_errors.py" in text and "return y @ w  # the line" in text
    (note,) = caught.value.__notes__
    assert "make_fx was tracing" in note
    assert "mul = aten.mul.Tensor(x_1, 2)    f32[2, 3]@cpu" in note


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_program_is_its_own_with_a_note(mode: str) -> None:
    def f(x: Tensor) -> Any:
        x.sin().cos()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        captured(f, torch.randn(2), mode=mode)
    (note,) = caught.value.__notes__
    assert "cos = aten.cos.default(sin)" in note


def test_a_result_that_no_graph_can_return_is_named() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        captured(lambda x: (x, object()), torch.randn(2))


def test_too_few_arguments() -> None:
    with pytest.raises(TypeError, match="y"):
        make_fx(lambda x, y: x + y)(torch.randn(2))


def test_symbolic_needs_a_shape_environment() -> None:
    from understudy import FakeTensorMode

    x = FakeTensorMode().from_tensor(torch.randn(2))
    with pytest.raises(ValueError, match="shape_env=ShapeEnv"):
        make_fx(lambda x: x + 1, tracing_mode="symbolic")(x)


# --- what they leave behind ------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class StopAt(TorchDispatchMode):
    """Raises at the n-th operator."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left = number
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise self.error
        self.left -= 1
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.layers[0].weight
        self.plain = torch.randn(3)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        self.counter.add_(1)
        return self.layers(x) + self.tied(x) + self.plain


def condition() -> dict[str, Any]:
    """What of torch's state a trace could leave changed."""
    return {
        "modes": torch._C._len_torch_dispatch_stack(),
        "fake": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE),
        "recorder": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY),
        "functions": torch._C._len_torch_function_stack(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1],
        "manual_seed": torch.manual_seed,
        "Parameter": torch.nn.Parameter.__new__,
        "in a mode": torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
    }


def state_of(model: nn.Module) -> Any:
    tensors = {
        (path, name): value
        for path, part in model.named_modules(remove_duplicate=False)
        for table in (
            part._parameters,
            part._buffers,
            {k: v for k, v in vars(part).items() if isinstance(v, Tensor)},
        )
        for name, value in table.items()
    }
    identities = {key: id(value) for key, value in tensors.items()}
    gradients = {
        key: (None if value is None or value.grad is None else id(value.grad))
        for key, value in tensors.items()
    }
    flags = {path: part.training for path, part in model.named_modules()}
    values = {key: value.detach().clone() for key, value in tensors.items() if value is not None}
    return identities, gradients, flags, values


def assert_untouched(before: Any, model: nn.Module, world: dict[str, Any]) -> None:
    after = state_of(model)
    assert before[:3] == after[:3]
    for key, value in before[3].items():
        assert torch.equal(value, after[3][key]), key
    assert condition() == world


def program_of(model: nn.Module, kind: str) -> Callable[..., Any]:
    def trained(x: Tensor) -> Any:
        loss = model(x).pow(2).sum()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    def cast(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return model(x)

    return {"module": model, "trained": trained, "autocast": cast}[kind]


@pytest.mark.parametrize("kind", ["module", "trained", "autocast"])
@pytest.mark.parametrize("mode", MODES)
def test_a_trace_leaves_everything_as_it_was(mode: str, kind: str) -> None:
    model = Net()
    model.layers[1].eval()
    before, world = state_of(model), condition()
    make_fx(program_of(model, kind), tracing_mode=mode)(torch.randn(5, 4))
    assert_untouched(before, model, world)


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["module", "trained", "autocast"])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_at_any_operator_leaves_everything_as_it_was(
    mode: str, kind: str, error: type[BaseException]
) -> None:
    model = Net()
    before, world = state_of(model), condition()
    x = torch.randn(5, 4)
    for number in range(0, 60, 3):
        stopped = StopAt(number, error)
        program = program_of(model, kind)

        def f(x: Tensor, program: Any = program, stopped: StopAt = stopped) -> Any:
            with stopped:
                return program(x)

        try:
            make_fx(f, tracing_mode=mode)(x)
        except error:
            for parameter in model.parameters():
                parameter.grad = None  # in a real run, what the program itself had done up to there
        assert_untouched(before, model, world)
        if stopped.left:
            return
    pytest.fail("the program never came to its end")


def test_default_dtype_and_grad_mode_changed_by_the_program_are_its_own_business() -> None:
    world = condition()
    with torch.no_grad():
        graph = captured(lambda x: x * 2, torch.randn(2, requires_grad=True), mode="fake")
    assert condition() == world
    assert graph(torch.randn(2)).shape == (2,)


def test_inputs_are_left_alone_on_stand_ins() -> None:
    x = torch.randn(3, requires_grad=True)
    y = torch.randn(3)
    kept = copy.deepcopy((x, y))
    for mode in ("fake", "symbolic"):
        make_fx(lambda x, y: (x * y.add_(1)).sum().backward(), tracing_mode=mode)(x, y)
    assert x.grad is None
    assert torch.equal(x, kept[0]) and torch.equal(y, kept[1])
    assert type(x) is Tensor and y._version == 0


def test_fakes_that_were_given_can_be_traced_again_after_an_error() -> None:
    from understudy import FakeTensorMode, ShapeEnv

    x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.randn(3), source="x")

    def fails(x: Tensor) -> Any:
        x.sin()
        raise Stop

    with pytest.raises(Stop):
        make_fx(fails, tracing_mode="symbolic")(x)
    graph = make_fx(lambda x: x.cos(), tracing_mode="symbolic")(x)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_function", "output"]


class Unknown(torch.Tensor):
    """A subclass that says nothing of its own."""


def test_a_subclass_that_no_mode_knows() -> None:
    x = torch.ones(3, 3).as_subclass(Unknown)
    with pytest.raises(TypeError, match=r"(?s)Multiple dispatch failed.*of the class Unknown.*test_errors"):
        make_fx(lambda: torch.ops.aten.t.default(x), tracing_mode="fake")()
