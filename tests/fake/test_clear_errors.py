"""What can't be done with stand-ins is refused in words, at the line of the user's own code."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode as TorchFakeTensorMode

from understudy import FakeTensor, FakeTensorMode, ShapeEnv, make_fx, show, symbolic_trace
from understudy.errors import (
    DataDependentOutputException,
    MixedTensorsError,
    NoDataError,
    NotProvidedError,
    ShapeMismatch,
)


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


def test_from_tensor_of_something_else() -> None:
    with pytest.raises(TypeError) as error:
        FakeTensorMode().from_tensor("x")  # type: ignore[arg-type]
    assert message(error) == (
        "from_tensor: expected a tensor, got 'x' of type str. Use from_module for a module; numbers and strings need no "
        "stand-in"
    )


@pytest.mark.parametrize(("value", "named"), [(nn.Linear, "Linear"), (nn.Linear(2, 3), "a Linear")])
def test_show_of_what_is_not_captured(value: Any, named: str) -> None:
    with pytest.raises(TypeError) as error:
        show(value)
    assert message(error) == (
        f"show: expected a captured graph (a torch.fx.GraphModule), got {named}: capture it first, with "
        'show(make_fx(module, tracing_mode="fake")(*inputs))'
    )


@pytest.mark.parametrize("is_inside", [True, False])
def test_stand_ins_of_torch(is_inside: bool) -> None:
    with TorchFakeTensorMode():
        theirs = torch.empty(3)
    mode = FakeTensorMode()
    with mode:
        ours = torch.empty(3)
    with pytest.raises(MixedTensorsError) as error:
        if is_inside:
            with mode:
                ours + theirs
        else:
            theirs + ours
    assert "got a FakeTensor of torch's own mode (torch._subclasses)" in message(error)
    assert "ours" in message(error).split("at:")[1]


def test_a_fake_function_that_returns_a_real_tensor() -> None:
    made = torch.ones(3)

    @torch.library.custom_op("understudy_test::returns_real", mutates_args=())
    def returns_real(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    returns_real.register_fake(lambda x: made)
    with FakeTensorMode(), pytest.raises(MixedTensorsError) as error:
        returns_real(torch.empty(3))
    assert message(error).startswith(
        "understudy_test.returns_real.default: expected a stand-in from its fake implementation, got a real Tensor of shape "
        "[3]; make the result from the arguments, as in torch.empty_like(x) or x.new_empty(...)"
    )


def test_inputs_that_contain_themselves() -> None:
    inputs: list[Any] = [torch.ones(2)]
    inputs.append({"again": inputs})
    with pytest.raises(ValueError, match=r"the inputs\[0\]\[1\]\['again'\] is the list that contains it"):
        make_fx(lambda values: values[0] + 1, tracing_mode="fake")(inputs)
    with pytest.raises(
        ValueError, match=r"meta_args\['values'\]\[1\]\['again'\] is the list that contains it"
    ):
        symbolic_trace(lambda values: values[0] + 1, meta_args={"values": inputs})


def test_a_real_module_that_is_moved() -> None:
    linear = nn.Linear(2, 3)
    with FakeTensorMode() as mode:
        with pytest.raises(MixedTensorsError) as error:
            linear.to("cuda")
        assert mode.from_module(linear).to("cuda").weight.is_cuda
    assert message(error).startswith("Linear.to: the parameter 'weight' is real (")
    assert "mode.from_module(module)" in message(error)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("what", ["function", "module", "inputs by name"])
def test_jit_traces(what: str, check: bool) -> None:
    with FakeTensorMode(), pytest.raises(NoDataError) as error:
        x = torch.randn(2, 3)
        if what == "function":
            torch.jit.trace(lambda x: x * 2, (x,), check_trace=check)
        elif what == "module":
            torch.jit.trace(nn.Linear(3, 2), x, check_trace=check)
        else:
            torch.jit.trace(lambda x: x * 2, example_kwarg_inputs={"x": x}, check_trace=check)
    assert "torch.jit.trace requires data, which stand-ins do not have" in message(error)
    assert "test_clear_errors.py" in message(error) and "understudy.make_fx(function)(*inputs)" in message(
        error
    )
    traced = torch.jit.trace(lambda x: x * 2, torch.ones(2))
    assert traced(torch.ones(3)).tolist() == [2, 2, 2]


def test_jit_scripts() -> None:
    with FakeTensorMode():
        scripted = torch.jit.script(nn.Linear(3, 2))
        assert scripted(torch.randn(4, 3)).shape == (4, 2)


# --- what works -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_stand_ins_given_to_a_compiled_function(backend: str) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4)
    y = torch.compile(lambda x: (x + 1).sum(0), backend=backend)(x)
    assert type(y) is FakeTensor and y.shape == (4,)


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = str(tmp_path / "weights.safetensors")
    safetensors.save_file({"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    with FakeTensorMode():
        loaded = safetensors.load_file(path)
        assert {name: str(tensor.spec) for name, tensor in loaded.items()} == {
            "a": "f32[3, 4]@cpu",
            "b": "bf16[2]@cpu",
        }
        with pytest.raises(NoDataError, match="the storage of a stand-in has no data"):
            safetensors.save_file({"a": torch.empty(3, 4)}, str(tmp_path / "none.safetensors"))


def test_anomaly_detection() -> None:
    with FakeTensorMode(), pytest.warns(UserWarning), torch.autograd.detect_anomaly():
        x = torch.empty(3, requires_grad=True)
        (x * 2).sum().backward()
    assert type(x.grad) is FakeTensor


def test_custom_operators_that_give_back_what_they_write_to() -> None:
    library = torch.library.Library("understudy_test_given_back", "DEF")
    library.define("add_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
    library.define("two.out(Tensor x, *, Tensor(a!) first, Tensor(b!) second) -> (Tensor(a!), Tensor(b!))")
    ops = torch.ops.understudy_test_given_back
    with FakeTensorMode():
        x, y = torch.empty(3), torch.empty(3)
        assert ops.add_(x, y) is x
        first, second = torch.empty(3), torch.empty(3)
        results = ops.two.out(x, first=first, second=second)
    assert results[0] is first and results[1] is second


def test_backends_of_other_devices() -> None:
    with FakeTensorMode():
        x = torch.empty(3, device="privateuseone")
        assert (x + 1).device == torch.device("privateuseone", 0)
        assert x.cpu().device == torch.device("cpu")


def test_real_meta_tensors_beside_stand_ins() -> None:
    real = torch.empty(3, device="meta")
    with FakeTensorMode():
        assert str((torch.empty(3, device="meta") + real).spec) == "f32[3]@meta"  # type: ignore[attr-defined]


# --- whose line it is -------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that is installed."""
    site = tmp_path / "lib" / "site-packages"
    (site / "vision_of_others").mkdir(parents=True)
    (site / "vision_of_others" / "__init__.py").write_text(
        textwrap.dedent(
            """
            def attend(x, w):
                return (
                    x @ w
                )

            def decide(x):
                if x.sum() > 0:
                    return x
                return -x
            """
        )
    )
    monkeypatch.syspath_prepend(site)
    yield __import__("vision_of_others")
    sys.modules.pop("vision_of_others")


def test_the_line_is_the_users_with_that_of_the_package_second(package: ModuleType) -> None:
    with FakeTensorMode(), pytest.raises(ShapeMismatch) as error:
        package.attend(
            torch.empty(2, 3),
            torch.empty(4, 5),
        )
    place = next(line for line in message(error).splitlines() if line.startswith("  at:"))
    own, library = place.split(", in ")
    assert own.endswith("package.attend(torch.empty(2, 3), torch.empty(4, 5))")
    assert "test_clear_errors.py" in own
    assert library == "site-packages/vision_of_others/__init__.py:4: return (x @ w)"
    assert "change the arguments that your line passes to the package" in message(error)


def test_generated_functions_have_no_line() -> None:
    """Since Python 3.13, the program of `python -c` has text, under the name that generated functions have as well."""
    program = """
        import dataclasses, torch, understudy
        @dataclasses.dataclass
        class Row:
            x: object
        with understudy.FakeTensorMode():
            try:
                Row(torch.ones(2)) == Row(torch.ones(3))
            except understudy.errors.ShapeMismatch as error:
                print(error.context.line)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert line.partition(": ")[0].strip() == "<string>:8"
    assert sys.version_info < (3, 13) or line.endswith(": Row(torch.ones(2)) == Row(torch.ones(3))\n")


def test_no_advice_to_change_a_package(package: ModuleType) -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException) as error:
        package.decide(torch.empty(3))
    assert "torch.where" not in message(error)
    assert "choose options that avoid the read" in message(error)


def test_the_line_of_a_guard(package: ModuleType) -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        package.attend(
            mode.from_tensor(torch.empty(2, 3), source="x"), mode.from_tensor(torch.empty(3, 5), source="w")
        )
    lines = [guard.line for guard in env.guards]
    assert all("test_clear_errors.py" in line and "vision_of_others" in line for line in lines)


def test_checks_of_distributions_can_be_switched_off() -> None:
    with FakeTensorMode():
        with pytest.raises(DataDependentOutputException, match="validate_args=False"):
            torch.distributions.Geometric(torch.rand(3), validate_args=True)  # has a check of its own
        assert torch.distributions.Geometric(torch.rand(3), validate_args=False).sample().shape == (3,)


def test_strict_export_in_a_mode() -> None:
    layer = torch.nn.Linear(3, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = (torch.ones(4, 3),)
        assert torch.export.export(layer, given).graph is not None
        with pytest.raises(NotProvidedError, match="expected strict=False inside a FakeTensorMode") as caught:
            torch.export.export(layer, given, strict=True)
    assert "to do:   leave out strict=True, or call it outside of the mode" in str(caught.value)
