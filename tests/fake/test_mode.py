"""Entering and leaving the mode: nesting, errors in between, and torch as it was before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils._python_dispatch as python_dispatch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from understudy import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    MixedTensorsError,
    ShapeEnv,
    unset_fake_temporarily,
)
from understudy.patching import ENGINE, find_place


def stack() -> list[Any]:
    return list(_get_current_dispatch_mode_stack())


def state_of_torch() -> dict[str, Any]:
    """Everything of torch's that a mode might touch."""
    return {
        "modes": stack(),
        "flags": (
            python_dispatch._is_in_torch_dispatch_mode,
            python_dispatch._is_in_any_mode_without_ignore_compile_internals,
        ),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "autocast key": torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutocastIPU),
        "only lift": torch._C._only_lift_cpu_tensors(),
        "random": torch.random.get_rng_state().tolist(),
        "patched": {
            patch.place: vars(owner).get(name)
            for patch in ENGINE.registered
            for owner, name in [find_place(patch)]
        },
        "torch functions": len(torch.overrides._get_current_function_mode_stack()),
    }


@pytest.fixture(autouse=True)
def torch_is_as_before() -> Iterator[None]:
    before = state_of_torch()
    yield
    assert state_of_torch() == before


# --- nesting ------------------------------------------------------------------------------------------------------


def test_enter_and_leave() -> None:
    mode = FakeTensorMode()
    with mode as entered:
        assert entered is mode and stack() == [mode]
        assert type(torch.empty(2)) is FakeTensor
    assert type(torch.empty(2)) is torch.Tensor


def test_the_same_mode_twice_is_harmless() -> None:
    mode = FakeTensorMode()
    with mode:
        with mode:
            assert stack() == [mode]
            x = torch.empty(2)
        assert stack() == [mode]
        assert (x + torch.empty(2)).fake_mode is mode
    assert stack() == []


def test_nested_modes_restore_each_other() -> None:
    outer, inner = FakeTensorMode(), FakeTensorMode()
    with outer:
        a = torch.empty(2)
        with inner:
            b = torch.empty(2)
            with outer:
                assert (torch.empty(2) + a).fake_mode is outer
            assert torch.empty(2).fake_mode is inner
            with pytest.raises(MixedTensorsError):
                a + b
        assert torch.empty(2).fake_mode is outer
        assert (a + 1).fake_mode is outer
    assert (a.fake_mode, b.fake_mode) == (outer, inner)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_in_between(error: type[BaseException]) -> None:
    outer, inner = FakeTensorMode(), FakeTensorMode()
    with outer:
        with pytest.raises(error), inner, inner:
            raise error
        assert stack() == [outer]
    assert stack() == []


def test_a_mode_can_be_entered_again() -> None:
    mode = FakeTensorMode()
    for _ in range(3):
        with mode:
            torch.empty(2)


def test_in_a_generator() -> None:
    mode = FakeTensorMode()

    def tensors() -> Iterator[torch.Tensor]:
        with mode:
            yield torch.empty(2)
            yield torch.empty(3)

    numbers = tensors()
    assert next(numbers).shape == (2,)
    numbers.close()
    assert stack() == []


def test_modes_of_others_above_and_below() -> None:
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Log():
        x = torch.empty(2) + 1
    assert type(x) is FakeTensor and seen == ["aten.empty.memory_format", "aten.add.Tensor"]
    seen.clear()
    with Log(), FakeTensorMode():
        x = torch.empty(2) + 1
    assert type(x) is FakeTensor and seen == ["aten.empty.memory_format", "aten.add.Tensor"]


def test_fakes_outside_of_the_mode() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(2, requires_grad=True)
    y = (x * 2).sum()
    assert y.fake_mode is mode
    y.backward()
    assert x.grad.fake_mode is mode
    with FakeTensorMode(), pytest.raises(MixedTensorsError):
        x * 2


def test_real_for_a_moment() -> None:
    mode = FakeTensorMode()
    with mode:
        with unset_fake_temporarily() as taken:
            assert taken is mode and stack() == []
            assert type(torch.empty(2)) is torch.Tensor
            with FakeTensorMode() as other:
                assert torch.empty(2).fake_mode is other
        assert torch.empty(2).fake_mode is mode
        with pytest.raises(ValueError), unset_fake_temporarily():
            raise ValueError
        assert stack() == [mode]
    with unset_fake_temporarily() as taken:
        assert taken is None


def test_default_dtype_and_device_are_followed() -> None:
    with FakeTensorMode():
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.empty(2).dtype is torch.float64 and torch.zeros(2).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.empty(2).dtype is torch.float32
        with torch.device("cuda:2"):
            assert torch.empty(2).device == torch.device("cuda:2")
            assert torch.tensor([1.0]).device == torch.device("cuda:2")
        assert torch.empty(2).device == torch.device("cpu")


def test_options() -> None:
    mode = FakeTensorMode()
    assert mode.allow_fallback_kernels and not mode.allow_non_fake_inputs
    assert mode.static_shapes and mode.shape_env is None and not mode.export
    assert not FakeTensorMode(static_shapes=False).static_shapes
    assert mode.epoch == 0 and mode.cache_enabled
    with pytest.raises(TypeError):
        FakeTensorMode(True)  # type: ignore[misc]


def test_is_our_fake() -> None:
    one, two = FakeTensorMode(), FakeTensorMode()
    fake = one.from_tensor(torch.ones(2))
    assert one.is_our_fake(fake)
    assert not two.is_our_fake(fake)
    assert not one.is_our_fake(torch.ones(2))
    assert not one.is_our_fake(3)


def test_a_mode_that_is_left_can_go() -> None:
    mode = FakeTensorMode()
    with mode:
        nn.Linear(3, 3)(torch.empty(2, 3)).sum().backward()
    gone = weakref.ref(mode)
    del mode
    assert gone() is None


def test_torch_finds_the_mode() -> None:
    from torch._guards import active_fake_mode, detect_fake_mode

    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.ones(2))
    assert detect_fake_mode([fake]) is mode
    assert detect_fake_mode([torch.ones(2)]) is None
    with mode:
        assert detect_fake_mode() is mode and active_fake_mode() is mode


# --- after an error, torch is as it was -----------------------------------------------------------------------------

LIBRARY = torch.library.Library("understudy_test_mode", "DEF")
LIBRARY.define("broken(Tensor x) -> Tensor")
LIBRARY.impl("broken", lambda x: x, "CPU")


@torch.library.register_fake("understudy_test_mode::broken", lib=LIBRARY)
def broken(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("the author's own error")


ERRORS: dict[str, Callable[[], Any]] = {
    "shape": lambda: torch.empty(2) @ torch.empty(3),
    "device": lambda: torch.empty(2, device="cuda") + torch.empty(2, device="cpu"),
    "data": lambda: torch.empty(2).sum().item(),
    "nonzero": lambda: torch.empty(2).nonzero(),
    "real": lambda: torch.empty(3) + MIXED,
    "numpy": lambda: torch.empty(2).numpy(),
    "backward": lambda: torch.empty(2, requires_grad=True).backward(),
    "registered fake": lambda: torch.ops.understudy_test_mode.broken(torch.empty(2)),
    "meta kernel": lambda: torch.linalg.lu_factor(torch.empty(2)),
    "composite": lambda: torch.einsum("ij,jk->ik", torch.empty(2, 3), torch.empty(4, 5)),
    "interrupt": lambda: interrupt(),
}
MIXED = torch.ones(3)
ANY_ERROR = (RuntimeError, KeyError, KeyboardInterrupt)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("inside", [True, False])
def test_after_an_error_torch_is_as_it_was(call: Callable[[], Any], inside: bool) -> None:
    before = state_of_torch()
    with FakeTensorMode() as mode:
        within = state_of_torch()
        if inside:
            with pytest.raises(ANY_ERROR):
                call()
            assert state_of_torch() == within
            assert stack() == [mode]
    if not inside:
        with (
            pytest.raises(ANY_ERROR),
            torch.no_grad(),
            FakeTensorMode(),
            torch.autocast("cpu"),
            torch.device("cuda"),
        ):
            call()
    assert state_of_torch() == before
    assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))


def test_errors_of_registered_fakes_come_through() -> None:
    with FakeTensorMode(), pytest.raises(KeyError, match="the author's own error"):
        torch.ops.understudy_test_mode.broken(torch.empty(2))


def test_an_environment_of_torch_is_refused_by_name() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as TorchShapeEnv

    with pytest.raises(
        TypeError,
        match=r"expected an understudy.ShapeEnv, got a torch.fx.experimental.symbolic_shapes.ShapeEnv",
    ):
        FakeTensorMode(shape_env=TorchShapeEnv())


def test_scalars_can_be_allowed_later() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False))
    assert not mode.allow_scalar_outputs and not FakeTensorMode().allow_scalar_outputs
    with mode:
        with pytest.raises(DataDependentOutputException):
            torch.randn(()).item()
        mode.allow_scalar_outputs = True
        assert type(torch.randn(()).item()) is torch.SymFloat
