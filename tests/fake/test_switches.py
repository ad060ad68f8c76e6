"""Switches of torch's own mode, overridden hooks, and constructors: each works, or says what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._subclasses.fake_tensor as torch_fake_tensor
import torch.fx.experimental.symbolic_shapes as torch_symbolic_shapes
from torch._guards import detect_fake_mode

from understudy import FakeTensorMode, ShapeEnv, errors, fake_tensor, symbolic_shapes
from understudy.errors import NotProvidedError
from understudy.fake_tensor import FakeTensor, FakeTensorConverter, in_kernel_invocation_manager
from understudy.symbolic_shapes import DimDynamic, StatelessSymbolicContext

functorch_config, dynamo_config = torch._functorch.config, torch._dynamo.config


# --- switches ---------------------------------------------------------------------------------------------------------


def test_the_cache() -> None:
    with dynamo_config.patch(fake_tensor_cache_enabled=False):
        off = FakeTensorMode()
    with dynamo_config.patch(fake_tensor_cache_crosscheck_enabled=True):
        checked = FakeTensorMode()
    plain = FakeTensorMode()
    assert (off.cache_enabled, checked.cache_enabled, plain.cache_enabled) == (False, True, True)
    assert checked.cache_crosscheck_enabled and not plain.cache_crosscheck_enabled
    plain.cache_crosscheck_enabled = True
    assert plain.crosscheck and not plain._can_replay


def test_meta_tensors_are_refused_where_that_was_asked_for() -> None:
    with functorch_config.patch(fake_tensor_allow_meta=False):
        mode = FakeTensorMode()
    with pytest.raises(AssertionError, match=r"expected a tensor on a real device, got f32\[2\]@meta"):
        mode.from_tensor(torch.empty(2, device="meta"))
    with mode, pytest.raises(errors.MetaDeviceError, match="fake_tensor_allow_meta"):
        torch.ones(2, device="meta")
    with mode:
        assert torch.ones(2).shape == (2,)
    assert FakeTensorMode().from_tensor(torch.empty(2, device="meta")).device.type == "meta"


def test_calls_run_on_the_preferred_device() -> None:
    """As under torch's mode, for inputs of which none is written to."""

    def run(make: Any) -> Any:
        with functorch_config.patch(fake_tensor_prefer_device_type="cuda"), make():
            a, b = torch.ones(3, 2).t(), torch.ones(2, 3, device="cuda")
            found = [
                a + b,
                b + a,
                torch.where(a > 0, b, a),
                a @ b.t(),
                a * 2,
                a + torch.ones((), device="cuda"),
            ]
            b += a
            return [(x.device, x.shape, x.stride()) for x in [*found, a, b]]

    assert run(FakeTensorMode) == run(torch_fake_tensor.FakeTensorMode)
    with FakeTensorMode(), pytest.raises(errors.FakeTensorDeviceMismatchError, match="two devices"):
        torch.ones(3) + torch.ones(3, device="cuda")


def test_pointers_are_refused_whatever_the_switch_says() -> None:
    mode = FakeTensorMode()
    assert not mode._allow_unsafe_data_ptr_access
    with pytest.raises(NotProvidedError, match="custom operator"):
        mode._allow_unsafe_data_ptr_access = True
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=True):
        fake = FakeTensorMode().from_tensor(torch.ones(2))
    with pytest.raises(errors.NoDataError, match="has no data"):
        fake.data_ptr()


def test_the_variable_for_debugging() -> None:
    code = (
        "import torch; from understudy.fake_tensor import FakeTensorMode\n"
        "def here(mode):\n"
        "    with mode: return torch.ones(2)\n"
        "mode = FakeTensorMode()\n"
        "print(*here(mode)._debug_trace.format())\n"
        "print(*mode.from_tensor(torch.ones(3))._debug_trace.format())\n"
    )
    import os

    shown = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TORCH_FAKE_TENSOR_DEBUG": "1"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "in here" in shown.stdout and shown.stdout.count('File "<string>"') >= 3, shown.stdout


def test_kernels_see_meta_tensors() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(2, 3))
    with in_kernel_invocation_manager(mode):
        assert x.device.type == "meta" and mode.in_kernel_invocation
        y = torch.ops.aten.mm.default(x, x.t())
        assert type(y) is torch.Tensor and y.device.type == "meta" and y.shape == (2, 2)
    assert x.device.type == "cpu" and not mode.in_kernel_invocation


def test_where_a_mode_was_made() -> None:
    def make() -> FakeTensorMode:
        return FakeTensorMode()

    mode, other = make(), make()
    assert mode.stack.rstrip().splitlines()[-2].endswith("in make") and __file__ in mode.stack
    with pytest.raises(AssertionError, match="allocated at") as caught:
        detect_fake_mode([mode.from_tensor(torch.ones(2)), other.from_tensor(torch.ones(2))])
    assert mode.stack in str(caught.value)


# --- hooks of a mode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dispatch", "_dispatch_impl"])
def test_an_overridden_dispatch_sees_every_call(name: str) -> None:
    seen: list[str] = []

    def hook(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return getattr(FakeTensorMode, name)(self, func, types, args, kwargs or {})

    kind = type("Mode", (FakeTensorMode,), {name: hook})
    mode = kind()
    for _ in range(2):  # the second time, plans are in the cache
        seen.clear()
        with mode:
            x = torch.ones(2, 3).normal_()
            torch.nn.Linear(3, 4)(x)
        x * 2
        assert {"aten.ones.default", "aten.normal_.default", "aten.addmm.default", "aten.mul.Tensor"} <= set(
            seen
        )


def test_a_hook_may_answer() -> None:
    class Doubled(FakeTensorMode):
        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().dispatch(func, types, args, kwargs)
            return super().dispatch(torch.ops.aten.cat.default, types, ([result, result],), {})

    with Doubled():
        assert torch.ones(3).shape == (6,)


def test_dispatch_can_be_called() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(2))
    for answer in (mode.dispatch, mode._dispatch_impl):
        assert answer(torch.ops.aten.add.Tensor, (FakeTensor,), (x, 1), {}).shape == (2,)


# --- constructors and converters ------------------------------------------------------------------------------------------


def test_keywords_of_the_constructor() -> None:
    mode, elem, cpu = FakeTensorMode(), torch.empty(2, device="meta"), torch.device("cpu")
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        FakeTensor(mode, elem, cpu, bogus=3)
    given = FakeTensor(mode, elem, cpu, pytype=torch.nn.Parameter, requires_grad=True, nonzero_memo=None)
    assert given.pytype is torch.nn.Parameter and given.requires_grad
    by_name = FakeTensor(elem, fake_mode=mode, fake_device="cuda:1")
    assert by_name.device == torch.device("cuda:1") == by_name._fake_device and by_name.fake_mode is mode
    for wrong, message in (
        (lambda: FakeTensor(mode, elem), "missing required argument: 'device'"),
        (lambda: FakeTensor(elem, device=cpu), "missing required argument: 'fake_mode'"),
        (lambda: FakeTensor(mode, device=cpu), "missing required argument: 'elem'"),
        (lambda: FakeTensor(elem, elem, fake_mode=mode), "got two tensors"),
        (lambda: FakeTensor(mode, elem, cpu, fake_mode=FakeTensorMode()), "conflicting fake_mode"),
        (lambda: FakeTensor(3, elem, cpu), "expected a FakeTensorMode or Tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            wrong()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"conflicting device values: device=cpu, fake_device=cuda:0"):
        FakeTensor(mode, elem, cpu, fake_device="cuda")


def test_a_parameter_rebuilt_from_its_class() -> None:
    """Libraries that move parameters call `type(parameter)(value, requires_grad=…, **vars(parameter))`."""
    with FakeTensorMode() as mode:
        weight = torch.nn.Conv2d(3, 4, 1).weight
        moved = type(weight)(weight.to("cuda"), requires_grad=False, **vars(weight))
        plain = type(weight)(torch.ones(3), requires_grad=True)
        weight.blocksize = 64  # as accelerate rebuilds the parameters of bitsandbytes
        empty = type(weight)(weight.to("meta"), requires_grad=False, **vars(weight))
        ranged = torch.nn.Parameter(torch.rand(3))  # its range is known
        vars(ranged).update(vars(torch.rand(3)))
        again = type(ranged)(ranged.to("meta"), fake_device="cpu", requires_grad=True, **vars(ranged))
    assert "_range" in vars(ranged) and "_range" not in vars(again) and again.device.type == "cpu"
    assert isinstance(moved, torch.nn.Parameter) and moved.device == torch.device("cuda", 0)
    assert not moved.requires_grad and moved.fake_mode is mode and moved.shape == weight.shape
    assert plain.requires_grad and plain.device == torch.device("cpu")
    assert empty.device.type == "meta" and vars(empty)["blocksize"] == 64


def test_a_meta_tensor_with_symbolic_sizes() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    rows = env.create_unbacked_symint(low=0)
    made = FakeTensor(mode, torch.empty((rows, 2), device="meta"), torch.device("cuda"))
    assert str(made.shape) == "torch.Size([u0, 2])" and made.device.type == "cuda"
    assert str((made + 1).shape) == "torch.Size([u0, 2])"


def test_the_shape_env_of_a_conversion() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    converter = mode.fake_tensor_converter
    assert converter.from_real_tensor(mode, torch.ones(4, 5), shape_env=env)._spec.is_symbolic
    assert not converter.from_real_tensor(mode, torch.ones(4, 5))._spec.is_symbolic
    for others in (FakeTensorMode(), FakeTensorMode(shape_env=ShapeEnv())):
        with pytest.raises(ValueError, match="expected the ShapeEnv of the mode, got another one"):
            others.fake_tensor_converter.from_real_tensor(others, torch.ones(4), shape_env=env)


def test_options_that_exclude_each_other() -> None:
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with pytest.raises(AssertionError, match="expected static_shapes=False with a symbolic_context"):
        mode.from_tensor(torch.ones(4), static_shapes=True, symbolic_context=context)
    with pytest.raises(
        ValueError, match=r"has no ShapeEnv to own them: FakeTensorMode\(shape_env=ShapeEnv\(\)\)"
    ):
        FakeTensorMode().from_tensor(torch.ones(4), symbolic_context=context)


def test_a_converter_of_ones_own() -> None:
    noted: list[tuple[int, ...]] = []

    class Converter(FakeTensorConverter):
        def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None:
            noted.append(tuple(t.shape))
            super().set_tensor_memo(t, v)

    mode = FakeTensorMode()
    mode.fake_tensor_converter = Converter()
    real, view = torch.ones(2), torch.ones(4)[1:]
    fake = mode.from_tensor(real)
    mode.from_tensor(view)
    assert noted[0] == (2,) and (3,) in noted
    converter = mode.fake_tensor_converter
    assert mode.from_tensor(real) is fake is converter._get_memo(real)
    assert converter.tensor_memo[converter.describer.get_tensor_id(real)] is fake
    other = mode.from_tensor(torch.ones(2))
    converter.set_tensor_memo(real, other)
    assert mode.from_tensor(real) is other


def test_what_a_converter_does_not_have_is_said() -> None:
    converter = FakeTensorConverter(export=True)
    assert converter.export and not converter.copy_data
    with pytest.raises(NotProvidedError, match=r"Read tensor\.constant"):
        converter.constant_storage_mapping
    with pytest.raises(NotProvidedError, match="extract_tensor_metadata"):
        converter.describer.describe_tensor(torch.ones(2))


@pytest.mark.parametrize("wanted", [torch.float32, None])
@pytest.mark.parametrize("is_view", [False, True])
def test_the_dtype_of_gradients_is_kept(wanted: Any, is_view: bool) -> None:
    leaf = torch.ones(4, dtype=torch.bfloat16)
    leaf = (leaf[1:] if is_view else leaf).requires_grad_()
    leaf.grad_dtype = wanted
    assert FakeTensorMode().from_tensor(leaf).grad_dtype is wanted
    assert FakeTensorMode().from_tensor(torch.ones(2, requires_grad=True)).grad_dtype is torch.float32


def test_operands_on_the_meta_device() -> None:
    with FakeTensorMode():
        x, meta = torch.ones(2), torch.ones(2, device="meta")
        assert x.add_(meta).device.type == "cpu" and meta.add_(x).device.type == "meta"
        indices = torch.zeros(4, dtype=torch.int64, device="meta")
        found = torch.nn.functional.embedding(indices, torch.ones(10, 3))
        assert found.device.type == "cpu" and found.shape == (4, 3)
        with pytest.raises(errors.FakeTensorDeviceMismatchError):
            x + meta


# --- inputs that are one number -----------------------------------------------------------------------------------------


def test_a_number_in_a_tensor_is_a_backed_symbol() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    t = mode.from_tensor(torch.tensor(5), source="t")
    with mode:
        number = t.item()
        assert (number.node.hint == 5 and t.item() is number) or bool(t.item() == number)
        assert number > 3
    assert [str(guard.condition) for guard in env.guards]
    assert env.evaluate_guards(torch.tensor(9)) and not env.evaluate_guards(torch.tensor(2))
    (broken,) = env.check(torch.tensor(2))
    assert "t.item()" in env.check_source() and "4" in str(broken)


def test_after_a_write_the_number_depends_on_data() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    t = mode.from_tensor(torch.tensor(5), source="t")
    with mode:
        t.add_(1)
        with pytest.raises(errors.GuardOnDataDependentSymNode):
            bool(t.item() > 3)


@pytest.mark.parametrize(
    ("real", "options", "source"),
    [
        (torch.tensor(5), {"export": True}, "t"),
        (torch.tensor(5), {}, None),
        (torch.tensor(5, dtype=torch.int32), {}, "t"),
        (torch.tensor(5.0), {}, "t"),
        (torch.tensor(float("nan"), dtype=torch.float64), {}, "t"),
        (torch.tensor([5]), {}, "t"),
    ],
    ids=["export", "no source", "int32", "float32", "nan", "one dimension"],
)
def test_where_it_is_none(real: torch.Tensor, options: Any, source: Any) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), **options)
    t = mode.from_tensor(real, source=source)
    with mode:
        assert t.item().node.hint is None


# --- torch's classes ------------------------------------------------------------------------------------------------------

OF_FAKE_TENSOR = (
    "DataDependentOutputException DynamicOutputShapeException FakeTensorDeviceMismatchError MetadataMismatchError "
    "UnsupportedFakeTensorException UnsupportedMutationAliasingException UnsupportedOperatorException"
).split()
OF_SHAPES = "ConstraintViolationError GuardOnDataDependentSymNode PendingUnbackedSymbolNotFound _ShapeEnvGuardError".split()


@pytest.mark.parametrize("name", [*OF_FAKE_TENSOR, *OF_SHAPES])
def test_exceptions_are_caught_by_torchs_names(name: str) -> None:
    ours, theirs = (
        (fake_tensor, torch_fake_tensor)
        if name in OF_FAKE_TENSOR
        else (symbolic_shapes, torch_symbolic_shapes)
    )
    kind = getattr(ours, name)
    with pytest.raises(getattr(theirs, name)) as caught:
        raise kind("a reason", func=torch.ops.aten.add.Tensor)
    error: Any = caught.value
    assert (
        type(error) is kind
        and error.reason == str(error) == "a reason"
        and error.func is torch.ops.aten.add.Tensor
    )
    assert hash(error) == hash(error) and error == error and error != kind("a reason")


def test_derived_exceptions_keep_their_builtin_bases() -> None:
    from understudy.spec.error_context import MissingKernel

    error: Any = MissingKernel("no kernel")
    assert isinstance(error, NotImplementedError) and isinstance(
        error, torch_fake_tensor.UnsupportedOperatorException
    )


def test_a_read_of_data_is_caught_by_torchs_name() -> None:
    x = FakeTensorMode().from_tensor(torch.ones(()))
    with pytest.raises(torch_fake_tensor.DataDependentOutputException) as caught:
        x.item()
    assert caught.value.func is torch.ops.aten._local_scalar_dense.default


# --- names ------------------------------------------------------------------------------------------------------------------


def test_sets_of_operators() -> None:
    positional = fake_tensor._device_not_kwarg_ops
    assert set(torch_fake_tensor._like_tensor_constructors) <= set(fake_tensor._like_tensor_constructors)
    assert torch.ops.aten.add.Tensor not in fake_tensor._like_tensor_constructors
    assert torch.ops.aten.pin_memory.default in positional and torch.ops.aten.ones.default not in positional


def test_subclasses_with_a_dispatch_of_their_own() -> None:
    class Plain(torch.nn.Parameter): ...

    class Own(torch.nn.Parameter):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

    fake = FakeTensorMode().from_tensor(torch.ones(2))
    given = [3, torch.ones(2), Plain(torch.ones(2)), fake, Own(torch.ones(2))]
    assert [fake_tensor._check_for_subclass_arg(value) for value in given] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert fake_tensor._check_for_subclass(given) and not fake_tensor._check_for_subclass(given[:-1])


def test_the_text_of_a_storage() -> None:
    with FakeTensorMode() as mode:
        storage = mode.from_tensor(torch.ones(3)).untyped_storage()
        assert str(storage) == "...\n[torch.storage.UntypedStorage(device=cpu) of size 12]"


def test_values_pass_through_keywords_of_a_hooked_mode() -> None:
    """Each call of such a mode makes its key in the general way."""
    with functorch_config.patch(fake_tensor_allow_meta=False):
        mode = FakeTensorMode()
    assert mode.is_hooked
    with mode:
        assert torch.arange(4).sum(dtype=torch.float32).item() == 6
