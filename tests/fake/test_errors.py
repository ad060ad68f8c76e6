"""Errors as a user reads them: what is wrong, what was called, on which line of the user's code, what to do."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import understudy
from understudy import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    MixedTensorsError,
    NoDataError,
    OperatorError,
    UnderstudyError,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from understudy.errors import Context, DimensionError, DtypeError, ShapeMismatch
from understudy.infer import engine
from understudy.spec import TensorSpec
from understudy.spec.call import Call

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as active:
        yield active


def refused(function: Callable[[], Any], kind: type[Exception] = UnderstudyError) -> Any:
    with pytest.raises(kind) as caught:
        function()
    return caught.value


def text_of(function: Callable[[], Any]) -> list[str]:
    """The lines of the message, without the number of the user's line."""
    error = refused(function)
    return str(error).splitlines()


def here(function: Callable[..., Any]) -> str:
    """Where the body of a function is: file, line, text."""
    lines, start = inspect.getsourcelines(function)
    return f"tests/fake/test_errors.py:{start + len(lines) - 1}: {lines[-1].strip()}"


# --- what eager refuses as well -------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit() -> None:
    def call() -> Any:
        return torch.empty(2, 3) @ torch.empty(4, 5)

    assert text_of(call) == [
        "mm: f32[2, 3]@cpu has 3 columns, f32[4, 5]@cpu has 4 rows",
        "  called:  aten.mm.default(f32[2, 3]@cpu, f32[4, 5]@cpu)",
        f"  at:      {here(call)}",
        "  to do:   real tensors of these shapes fail as well: make the shapes fit at that line",
    ]
    error = refused(call, ShapeMismatch)
    assert isinstance(error, RuntimeError)
    assert error.func is aten.mm.default
    assert error.reason == "mm: f32[2, 3]@cpu has 3 columns, f32[4, 5]@cpu has 4 rows"
    assert isinstance(error.context, Context) and error.context.op == "aten.mm.default"
    assert error.context.inputs == "f32[2, 3]@cpu, f32[4, 5]@cpu"


def test_devices_that_do_not_go_together() -> None:
    def call() -> Any:
        return torch.empty(2, device="cuda") + torch.empty(2)

    assert text_of(call) == [
        "Expected all tensors to be on the same device, but found two devices in aten.add.Tensor: self is on cuda:0, "
        "but other is on cpu",
        "  called:  aten.add.Tensor(f32[2]@cuda:0, f32[2]@cpu)",
        f"  at:      {here(call)}",
        "  to do:   move one of them with .to(device)",
    ]
    assert isinstance(refused(call, FakeTensorDeviceMismatchError), RuntimeError)


def test_dtypes_that_do_not_go_together() -> None:
    def call() -> Any:
        return torch.empty(2, 3, dtype=torch.long) @ torch.empty(3, 3)

    assert text_of(call)[0] == (
        "aten.mm.default: the CPU kernel does not support (int64, float32); supported dtypes: float32"
    )
    assert "convert one of them" in text_of(call)[-1]
    refused(call, DtypeError)


def test_dimensions_out_of_range() -> None:
    def call() -> Any:
        return torch.empty(2).sum(4)

    assert text_of(call)[0] == "dimension out of range: expected -1 to 0, got 4"
    error = refused(call, DimensionError)
    assert isinstance(error, IndexError) and isinstance(error, RuntimeError)


EAGER_REFUSES: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.ones(2, 3) @ torch.ones(4, 5),
    "broadcast": lambda: torch.ones(2, 3) + torch.ones(4),
    "view": lambda: torch.ones(2, 3).view(7),
    "cat": lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)]),
    "dim": lambda: torch.ones(2).sum(4),
    "transpose": lambda: torch.ones(2).transpose(0, 3),
    "squeeze": lambda: torch.ones(2).unsqueeze(5),
    "index": lambda: torch.ones(3)[5],
    "too many indices": lambda: torch.ones(3)[0, 0],
    "select": lambda: torch.ones(3).select(0, 7),
    "layer_norm": lambda: F.layer_norm(torch.ones(3, 4), (5,)),
    "conv": lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 2, 3, 3)),
    "embedding": lambda: F.embedding(torch.ones(3), torch.ones(4, 5)),
    "cross_entropy": lambda: F.cross_entropy(torch.ones(3, 4), torch.ones(5, dtype=torch.long)),
    "expand": lambda: torch.ones(3).expand(4, 2),
    "in place": lambda: torch.ones(3).add_(torch.ones(2, 3)),
    "in place dtype": lambda: torch.ones(3, dtype=torch.long).add_(0.5),
    "leaf in place": lambda: torch.ones(3, requires_grad=True).add_(1),
    "string": lambda: torch.ones(3) + "a",
    "negative size": lambda: torch.empty(-3),
    "split": lambda: torch.ones(6).split([2, 3]),
    "chunk": lambda: torch.ones(4).chunk(0),
    "bmm": lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(3, 4, 5)),
    "inverse": lambda: torch.linalg.inv(torch.ones(3, 4)),
    "grad of integers": lambda: torch.ones(3, dtype=torch.long).requires_grad_(),
    "backward of nothing": lambda: torch.ones(3).sum().backward(),
    "backward of a vector": lambda: (torch.ones(3, requires_grad=True) * 2).backward(),
    "iteration over a scalar": lambda: list(torch.ones(())),
    "len of a scalar": lambda: len(torch.ones(())),
    "bool of several": lambda: bool(torch.ones(3)),
    "item of several": lambda: torch.ones(3).item(),
    "permute": lambda: torch.ones(2, 3).permute(0, 0),
    "stack": lambda: torch.stack([torch.ones(2), torch.ones(3)]),
    "linear": lambda: F.linear(torch.ones(2, 3), torch.ones(4, 5)),
    "gather": lambda: torch.ones(2, 3).gather(0, torch.ones(2, 3)),
    "where": lambda: torch.where(torch.ones(3) > 0, torch.ones(2), torch.ones(3)),
    "dropout": lambda: F.dropout(torch.ones(3), p=2.0),
    "logical": lambda: torch.ones(3) & torch.ones(3),
    "norm": lambda: F.batch_norm(torch.ones(2, 3), torch.ones(4), torch.ones(4)),
}


@pytest.mark.parametrize("call", EAGER_REFUSES.values(), ids=EAGER_REFUSES)
def test_what_eager_refuses_is_refused_with_the_same_builtin(call: Callable[[], Any]) -> None:
    with understudy.unset_fake_temporarily(), pytest.raises(Exception) as eager:
        call()
    error = refused(call, Exception)
    builtin = next(
        kind for kind in (IndexError, ValueError, TypeError, RuntimeError) if isinstance(eager.value, kind)
    )
    assert isinstance(error, builtin), f"eager: {eager.value!r}, here: {error!r}"
    assert isinstance(error, (UnderstudyError, builtin))
    assert "During handling" not in "".join(traceback.format_exception(error))


OTHER_CLASSES = {
    "index_copy": lambda x: x.index_copy(0, torch.tensor([0], device=x.device), x),
    "batch_norm": lambda x: F.batch_norm(x[:1], None, None, training=True),
    "select": lambda x: x.select(0, 9),
}


@pytest.mark.parametrize("call", OTHER_CLASSES.values(), ids=OTHER_CLASSES)
def test_refusals_on_other_devices_are_of_the_class_that_the_cpu_raises(
    call: Callable[[torch.Tensor], Any],
) -> None:
    with understudy.unset_fake_temporarily(), pytest.raises(Exception) as eager:
        call(torch.ones(2, 3))
    builtin = next(
        kind for kind in (IndexError, ValueError, TypeError, RuntimeError) if isinstance(eager.value, kind)
    )
    assert isinstance(refused(lambda: call(torch.ones(2, 3, device="cuda")), Exception), builtin)


# --- tensors that do not belong here ------------------------------------------------------------------------------------

REAL = torch.randn(3)
PARAMETER = nn.Parameter(torch.randn(3))


def test_a_real_tensor_among_fakes_is_named() -> None:
    def call() -> Any:
        return torch.empty(3) + REAL

    assert text_of(call) == [
        "aten.add.Tensor: expected a stand-in as argument 'other', got a real tensor (f32[3]@cpu)",
        "  called:  aten.add.Tensor(f32[3]@cpu, real f32[3]@cpu)",
        f"  at:      {here(call)}",
        "  to do:   Please convert all Tensors to FakeTensors first: mode.from_tensor(...); or make them in the mode, or "
        "let the mode convert: FakeTensorMode(allow_non_fake_inputs=True)",
    ]
    error = refused(call, MixedTensorsError)
    assert (
        isinstance(error, RuntimeError)
        and isinstance(error, AssertionError)
        and error.func is aten.add.Tensor
    )


def test_a_real_parameter_is_called_one() -> None:
    assert "as argument 'self', got a real parameter" in text_of(lambda: PARAMETER * torch.empty(3))[0]


def test_a_real_tensor_in_a_list_is_named() -> None:
    assert "as argument 'tensors', got a real tensor" in text_of(lambda: torch.cat([torch.empty(3), REAL]))[0]


def test_a_real_tensor_as_keyword_is_named() -> None:
    assert "'out', got a real tensor" in text_of(lambda: torch.add(torch.empty(3), 1, out=REAL))[0]


def test_real_tensors_alone_are_refused_too() -> None:
    assert "'self', got a real tensor" in text_of(lambda: REAL * 2)[0]


def test_real_tensors_are_converted_where_that_is_allowed() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as lenient:
        result = torch.empty(3) + REAL * 2 + PARAMETER
        assert type(result) is understudy.FakeTensor and result.fake_mode is lenient
        assert lenient.from_tensor(REAL) is lenient.from_tensor(REAL)
        assert (torch.empty(3) + torch.ones(())).shape == (3,)


def test_operators_that_change_metadata_take_no_real_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        error = refused(lambda: MATRIX.t_(), MixedTensorsError)
    assert "change metadata in place" in error.context.hint
    assert MATRIX.shape == (2, 3)


MATRIX = torch.randn(2, 3)


def test_fakes_of_another_mode_are_refused() -> None:
    stranger = FakeTensorMode().from_tensor(REAL)

    def call() -> Any:
        return torch.empty(3) + stranger

    assert text_of(call) == [
        "aten.add.Tensor: expected a stand-in of this FakeTensorMode as argument 'other', got one of another mode",
        "  called:  aten.add.Tensor(f32[3]@cpu, f32[3]@cpu)",
        f"  at:      {here(call)}",
        "  to do:   Mixing fake modes is not supported: use one for all tensors, or convert with mode.from_tensor(...)",
    ]


# --- data ---------------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[], Any]] = {
    "item": lambda: torch.empty(3).sum().item(),
    "bool": lambda: bool(torch.empty(1)),
    "if": lambda: 1 if torch.empty(3).sum() > 0 else 2,
    "float": lambda: float(torch.empty(())),
    "int": lambda: int(torch.empty(())),
    "index": lambda: [1, 2][torch.empty((), dtype=torch.long)],
    "tolist": lambda: torch.empty(3).tolist(),
    "format": lambda: f"{torch.empty(()):.3f}",
    "format method": lambda: "{:.3f}".format(torch.empty(())),  # noqa: UP032
    "equal": lambda: torch.equal(torch.empty(3), torch.empty(3)),
    "allclose": lambda: torch.allclose(torch.empty(3), torch.empty(3)),
    "in": lambda: 3 in torch.empty(4),
    "range": lambda: range(torch.empty((), dtype=torch.long)),
    "size": lambda: torch.empty(torch.empty((), dtype=torch.long)),
    "max": lambda: max(torch.empty(()), torch.empty(())),
}


@pytest.mark.parametrize("call", READS.values(), ids=READS)
def test_reading_values_is_refused(call: Callable[[], Any]) -> None:
    error = refused(call, DataDependentOutputException)
    assert isinstance(error, RuntimeError)
    assert error.func is not None
    assert "test_errors.py" in error.context.line
    assert "@cpu" in error.context.inputs
    assert "torch.where" in error.context.hint


SIZED_BY_DATA: dict[str, Callable[[], Any]] = {
    "nonzero": lambda: torch.empty(3).nonzero(),
    "mask": lambda: torch.empty(3)[torch.empty(3) > 0],
    "masked_select": lambda: torch.empty(3).masked_select(torch.empty(3) > 0),
    "unique": lambda: torch.unique(torch.empty(3)),
    "where": lambda: torch.where(torch.empty(3) > 0),
    "repeat_interleave": lambda: torch.empty(3).repeat_interleave(torch.empty(3, dtype=torch.long)),
    "bincount": lambda: torch.bincount(torch.empty(3, dtype=torch.long)),
    "argwhere": lambda: torch.argwhere(torch.empty(3)),
}


@pytest.mark.parametrize("call", SIZED_BY_DATA.values(), ids=SIZED_BY_DATA)
def test_sizes_that_depend_on_data_are_refused(call: Callable[[], Any]) -> None:
    error = refused(call, DynamicOutputShapeException)
    assert isinstance(error, RuntimeError)
    assert error.func is not None
    assert "test_errors.py" in error.context.line
    assert error.context.inputs and error.context.hint


WITHOUT_DATA: dict[str, Callable[[], Any]] = {
    "numpy": lambda: torch.empty(3).numpy(),
    "data_ptr": lambda: torch.empty(3).data_ptr(),
    "const_data_ptr": lambda: torch.empty(3).const_data_ptr(),
    "dlpack": lambda: torch.empty(3).__dlpack__(),
    "from_dlpack": lambda: torch.from_dlpack(torch.empty(3)),
    "array": lambda: torch.empty(3).__array__(),
    "cuda numpy": lambda: torch.zeros(3, device="cuda").numpy(),
    "grad numpy": lambda: torch.zeros(3, requires_grad=True).numpy(),
    "real data": lambda: setattr(torch.empty(3), "data", REAL),
}


@pytest.mark.parametrize("call", WITHOUT_DATA.values(), ids=WITHOUT_DATA)
def test_what_needs_data_is_refused(call: Callable[[], Any]) -> None:
    error = refused(call, NoDataError)
    assert isinstance(error, RuntimeError)
    assert "test_errors.py" in error.context.line
    assert error.context.hint


STORAGES: dict[str, Callable[[Any], Any]] = {
    "element": lambda storage: storage[0],
    "tolist": lambda storage: storage.tolist(),
    "fill_": lambda storage: storage.fill_(0),
    "data_ptr": lambda storage: storage.data_ptr(),
    "clone": lambda storage: storage.clone(),
    "copy_": lambda storage: storage.copy_(storage),
    "bytes": lambda storage: bytes(storage),
    "byteswap": lambda storage: storage.byteswap(torch.float32),
}


@pytest.mark.parametrize("use", STORAGES.values(), ids=STORAGES)
def test_data_of_storages_is_an_error_and_no_crash(use: Callable[[Any], Any]) -> None:
    storage = torch.empty(3).untyped_storage()
    assert storage.nbytes() == 12
    with pytest.raises(RuntimeError):
        use(storage)


@pytest.mark.parametrize("name", ["element", "tolist", "bytes"])
def test_data_of_storages_that_are_not_here(name: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        STORAGES[name](torch.empty(3, device="cuda").untyped_storage())


# --- operators that nothing is known of ------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("understudy_test_errors", "DEF")
LIBRARY.define("mute(Tensor x) -> Tensor")
LIBRARY.impl("mute", lambda x: x + 1, "CPU")


def test_custom_operators_without_a_fake() -> None:
    def call() -> Any:
        return torch.ops.understudy_test_errors.mute(torch.empty(3))

    lines = text_of(call)
    assert "understudy_test_errors.mute.default has no fake implementation: register one with" in lines[0]
    assert "torch.library.register_fake('understudy_test_errors::mute')" in lines[0]
    assert lines[1] == "  called:  understudy_test_errors.mute.default(f32[3]@cpu)"
    assert lines[2] == f"  at:      {here(call)}"
    assert isinstance(refused(call, UnsupportedOperatorException), RuntimeError)


def fallback(numel: int, allowed: bool) -> Any:
    class Stage:
        allow_fallback_kernels = allowed

    spec = TensorSpec((numel,), dtype=torch.float32, device=torch.device("cpu"))
    return engine.by_real_kernel(Call.of(aten.sin.default, (spec,), {}), Stage())  # type: ignore[arg-type]


def test_kernels_on_zeros_have_a_limit() -> None:
    assert fallback(3, True) is not NotImplemented
    error = refused(lambda: fallback(1 << 30, True), UnsupportedOperatorException)
    assert "4,096 MiB" in error.reason and "64 MiB" in error.reason
    error = refused(lambda: fallback(3, False), UnsupportedOperatorException)
    assert "allow_fallback_kernels" in error.reason


# --- whose line ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_inside_a_module() -> None:
    error = refused(lambda: nn.Sequential(Layer())(torch.empty(5, 7)))
    assert error.context.line.endswith(": return self.linear(x)")


def test_inside_torch_functional() -> None:
    def call() -> Any:
        return F.multi_head_attention_forward(
            torch.empty(2, 1, 4), torch.empty(2, 1, 4), torch.empty(2, 1, 4), 4, 2, torch.empty(12, 3), None,
            None, None, False, 0.0, torch.empty(4, 4), None,
        )  # fmt: skip

    assert "tests/fake/test_errors.py" in refused(call).context.line


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad @ torch.empty(7, 7)


def test_inside_backward() -> None:
    def call() -> Any:
        Wrong.apply(torch.empty(3, 3, requires_grad=True)).sum().backward()

    assert refused(call).context.line.endswith(": return grad @ torch.empty(7, 7)")


def test_inside_an_optimizer() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.empty(3, 3)
    model.weight.data = torch.empty(4, 4)

    def call() -> Any:
        optimizer.step()

    assert refused(call).context.line == here(call)


def test_through_the_standard_library() -> None:
    def call() -> Any:
        return list(map(copy.deepcopy, [1])), sorted([2, 1], key=lambda _: torch.empty(3) @ torch.empty(4))

    assert refused(call).context.line == here(call)


def test_code_without_a_file() -> None:
    error = refused(lambda: exec("import torch\ntorch.empty(3) @ torch.empty(4)", {}))
    assert "<string>:2" in error.context.line


def test_outside_the_mode(mode: FakeTensorMode) -> None:
    x = torch.empty(3)
    with understudy.unset_fake_temporarily():
        error = refused(lambda: x.view(7))
    assert "test_errors.py" in error.context.line


# --- the classes ---------------------------------------------------------------------------------------------------------


def test_torch_s_way_of_making_them() -> None:
    error = DynamicOutputShapeException(aten.nonzero.default)
    assert error.func is aten.nonzero.default and str(error) == "aten.nonzero.default"
    assert DataDependentOutputException(aten.item.default).func is aten.item.default
    assert UnsupportedOperatorException(aten.item.default).func is aten.item.default
    assert FakeTensorDeviceMismatchError("text").reason == "text"


def test_all_have_one_base() -> None:
    for name in understudy.__all__:
        thing = getattr(understudy, name)
        if isinstance(thing, type) and issubclass(thing, Exception) and thing is not UnderstudyError:
            if issubclass(thing, UserWarning):
                continue
            assert issubclass(thing, UnderstudyError) and issubclass(thing, RuntimeError), name
    assert issubclass(OperatorError, RuntimeError)


def test_an_error_inside_an_error_keeps_the_first_context() -> None:
    error = ShapeMismatch("wrong").with_context(Context("inner", "a", "line 1"))
    assert error.with_context(Context("outer", "b", "line 2")).context.op == "inner"


def test_calls_with_many_arguments_stay_readable() -> None:
    many = [torch.empty(3) for _ in range(100)] + [torch.empty(2, 4)]
    error = refused(lambda: torch.cat(many))
    assert "101 in all" in error.context.inputs and len(str(error)) < 1500


@pytest.mark.parametrize(
    "quantise",
    [
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.quantize_per_channel(x, torch.ones(2), torch.zeros(2), 0, torch.qint8),
        lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False),
        lambda x: torch._empty_affine_quantized((2,), scale=0.1, zero_point=0, dtype=torch.qint8),
    ],
)
def test_quantised_results_are_refused(quantise: Callable[[torch.Tensor], Any]) -> None:
    with (
        FakeTensorMode(),
        pytest.raises(UnsupportedFakeTensorException, match="quantised tensors are not supported"),
    ):
        quantise(torch.randn(2, 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_results_are_refused() -> None:
    with FakeTensorMode(), pytest.raises(UnsupportedFakeTensorException, match=r"use layout=torch\.jagged"):
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])


def test_a_missing_kernel_is_a_not_implemented_error() -> None:
    with pytest.raises(NotImplementedError):
        torch.ones(3, dtype=torch.int64).softmax(0)
    with FakeTensorMode(), pytest.raises(NotImplementedError) as caught:
        torch.ones(3, dtype=torch.int64).softmax(0)
    assert isinstance(caught.value, RuntimeError)
