"""Errors of operators: of the built-in class of eager's error, with the call, the line, and what to do."""

from __future__ import annotations

import sys

import pytest
import torch

from understudy import FakeTensorMode, ShapeEnv, dims
from understudy.errors import (
    ArgumentError,
    DataDependentOutputException,
    DimensionError,
    DtypeError,
    DynamicOutputShapeException,
    ModeOrderError,
    OperatorError,
    ShapeMismatch,
    UnderstudyError,
)
from understudy.spec import TensorSpec
from understudy.spec.call import Call
from understudy.spec.device_facts import DeviceFacts
from understudy.spec.error_context import refuse_order, translate, with_context

CALL = Call.of(
    torch.ops.aten.mm.default,
    (TensorSpec((2, 3), dtype=torch.float32, device=torch.device("cpu")), 2),
    {},
)
HINTS = {
    DataDependentOutputException: "use torch.where instead of a branch",
    DynamicOutputShapeException: "use an operator with a fixed size",
    ShapeMismatch: "make the shapes fit at that line",
    DtypeError: r"convert one of them with .to(dtype)",
    ArgumentError: "correct the arguments at that line",
}


@pytest.mark.parametrize("kind", HINTS)
def test_each_kind_of_error_has_its_hint(kind: type[UnderstudyError]) -> None:
    error = with_context(kind("reason"), CALL)
    text = str(error)
    assert type(error) is kind and text.startswith("reason")
    assert "called:  aten.mm.default(f32[2, 3]@cpu, 2)" in text
    assert HINTS[kind] in text
    assert "test_errors.py" in text


@pytest.mark.parametrize(
    ("builtin", "ours"),
    [
        (IndexError, DimensionError), (ValueError, ArgumentError), (TypeError, TypeError),
        (NotImplementedError, NotImplementedError), (torch.linalg.LinAlgError, torch.linalg.LinAlgError),
        (RuntimeError, OperatorError), (ZeroDivisionError, OperatorError),
    ],
)  # fmt: skip
def test_errors_of_torch_keep_their_built_in_class(builtin: type[Exception], ours: type[Exception]) -> None:
    error = translate(builtin("why"), CALL)
    assert isinstance(error, ours)
    assert str(error).startswith("aten.mm.default: why")
    assert isinstance(error, builtin) or builtin is ZeroDivisionError


def test_examples_of_symbols_are_shown_beside_shapes() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.zeros(4, 6), source="x", symbolic_context=dims("batch", "seq"))
    with mode, pytest.raises(ShapeMismatch) as caught:
        x @ x
    assert "real tensors of these shapes (batch = 4, seq = 6) fail as well" in str(caught.value)


def test_checks_of_distributions_have_their_own_hint() -> None:
    with FakeTensorMode():
        normal = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
        with pytest.raises(DataDependentOutputException, match="validate_args=False"):
            torch.distributions.VonMises(torch.randn(3), torch.rand(3)).sample()
        assert normal.sample().shape == (3,)


def test_modes_that_are_left_in_another_order() -> None:
    mode = FakeTensorMode()
    with pytest.raises(ModeOrderError, match="this thread has not entered the mode"):
        refuse_order(None, mode, (None, None, None))
    with pytest.raises(
        ModeOrderError, match=r"another mode was entered after this one[\s\S]*asyncio\.to_thread"
    ):
        refuse_order(object(), mode, (GeneratorExit, GeneratorExit(), None))
    first = ValueError("first")
    refuse_order(object(), mode, (ValueError, first, None))  # does not replace the error that is being raised
    if sys.version_info >= (3, 11):
        assert any("another mode was entered" in note for note in first.__notes__)


def test_text_of_device_facts() -> None:
    assert str(DeviceFacts("cpu")) == "cpu"
    facts = DeviceFacts("cuda", (9, 0), multiprocessors=132, cuda="13.0", cudnn=91002)
    assert str(facts) == "cuda 9.0, 132 multiprocessors, CUDA 13.0, cuDNN 9.10.2"
