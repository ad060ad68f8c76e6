"""Layers that are built again with the same arguments are replayed: nobody can tell, except by the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from understudy import FakeTensor, FakeTensorMode
from understudy.infer.engine import cache

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "linear without bias": lambda: nn.Linear(4, 3, bias=False),
    "linear of another dtype": lambda: nn.Linear(4, 3, dtype=torch.bfloat16),
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "layer norm": lambda: nn.LayerNorm(5, eps=1e-6),
    "layer norm without weights": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "batch norm": lambda: nn.BatchNorm2d(5, momentum=None),
    "batch norm without statistics": lambda: nn.BatchNorm1d(5, track_running_stats=False),
    "convolution": lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
    "grouped convolution": lambda: nn.Conv2d(4, 4, 3, groups=2, bias=False),
}


@pytest.fixture(autouse=True)
def mode() -> Iterator[FakeTensorMode]:
    FakeTensorMode.cache_clear()
    with FakeTensorMode() as active:
        nn.Linear(1, 1)  # from the first layer on
        yield active


def build_outside(mode: FakeTensorMode, build: Callable[[], Any]) -> Any:
    mode.__exit__(None, None, None)
    try:
        return build()
    finally:
        mode.__enter__()


def is_replayed(build: Callable[[], object]) -> bool:
    """Whether a layer is built without any operator."""
    before = FakeTensorMode.cache_info()
    build()
    return FakeTensorMode.cache_info() == before


def attributes_of(layer: nn.Module) -> list[tuple[str, object]]:
    tensors = ("_parameters", "_buffers")
    return [(name, list(value) if name in tensors else value) for name, value in vars(layer).items()]


def facts_of(tensor: Any) -> tuple[object, ...]:
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tensor._version,
        tensor.untyped_storage().nbytes(), isinstance(tensor, nn.Parameter), tensor.grad_fn, tensor._is_view(),
    )  # fmt: skip


def state_of(layer: nn.Module) -> dict[str, tuple[object, ...]]:
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return {name: facts_of(tensor) for name, tensor in tensors}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_replayed_layer_is_as_a_real_one(name: str, on_device: bool, mode: FakeTensorMode) -> None:
    def build() -> nn.Module:
        if not on_device:
            return LAYERS[name]()
        with torch.device("cpu"):
            return LAYERS[name]()

    first, layers = build(), [build(), build()]
    assert is_replayed(build)
    real = build_outside(mode, build)
    for layer in (first, *layers):
        assert attributes_of(layer) == attributes_of(real)
        assert [type(value) for value in vars(layer).values()] == [
            type(value) for value in vars(real).values()
        ]
        assert state_of(layer) == state_of(real)
        assert list(layer.state_dict(keep_vars=True)) == list(real.state_dict(keep_vars=True))
        assert repr(layer) == repr(real)
    for attribute, value in vars(layers[0]).items():
        if isinstance(value, (dict, set, list)):
            assert value is not vars(layers[1])[attribute] and value is not vars(first)[attribute]


def test_initial_values_are_known(mode: FakeTensorMode) -> None:
    def values_of(layer: nn.Module) -> dict[str, Any]:
        return {name: (buffer.tolist(), buffer.dtype) for name, buffer in layer.named_buffers()}

    _, one, other = (nn.BatchNorm2d(3) for _ in range(3))
    real = build_outside(mode, lambda: values_of(nn.BatchNorm2d(3)))
    assert values_of(one) == values_of(other) == real
    one.num_batches_tracked.add_(1)  # type: ignore[union-attr]
    one.running_mean.fill_(3)  # type: ignore[union-attr]
    assert values_of(one)["running_mean"][0] == [3.0] * 3 and one.num_batches_tracked.item() == 1  # type: ignore[union-attr]
    assert values_of(other) == values_of(nn.BatchNorm2d(3)) == real
    assert isinstance(other.num_batches_tracked.item(), int)  # type: ignore[union-attr]


def test_replayed_layers_are_trained() -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    layers(torch.randn(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())
    torch.optim.SGD(layers.parameters(), lr=0.1).step()
    assert [parameter._version for parameter in layers.parameters()] == [2] * 8
    assert len({parameter.untyped_storage()._cdata for parameter in layers.parameters()}) == 8


def test_the_state_of_random_numbers_is_left(mode: FakeTensorMode) -> None:
    before = build_outside(mode, torch.get_rng_state)
    for _ in range(3):
        nn.Linear(4, 4)
    assert build_outside(mode, lambda: torch.equal(before, torch.get_rng_state()))


# --- what a plan depends on ------------------------------------------------------------------------------------------------


def test_defaults_of_the_moment_count() -> None:
    for _ in range(2):
        assert nn.Linear(2, 3).weight.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert nn.Linear(2, 3).weight.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    for device in ("cuda", "cuda:1", "meta"):
        with torch.device(device):
            assert [nn.Linear(2, 3).weight.device for _ in range(2)] == [torch.empty(1).device] * 2
        assert [nn.Linear(2, 3, device=device).weight.device.type for _ in range(2)] == [
            device.partition(":")[0]
        ] * 2
    assert nn.Linear(2, 3).weight.device.type == "cpu"


def test_arguments_of_other_types_are_other_arguments() -> None:
    for eps in (1, 1.0, True, 0.0, -0.0, 1):
        layer = nn.LayerNorm(3, eps=eps)
        assert (type(layer.eps), str(layer.eps)) == (type(eps), str(eps))


def test_parameters_have_their_gradient_in_no_grad(mode: FakeTensorMode) -> None:
    nn.Conv1d(2, 2, 3)
    with torch.no_grad():
        assert nn.Conv1d(2, 2, 3).weight.requires_grad
    with torch.inference_mode():
        assert nn.Conv1d(2, 2, 3).weight.is_inference()


def test_errors_come_again() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="groups"):
            nn.Conv1d(3, 4, 3, groups=2)
        with pytest.warns(UserWarning, match="zero-element"):
            nn.Linear(0, 3)


def test_a_new_rule_forgets_the_plans() -> None:
    nn.Linear(4, 3)
    assert cache.layer_plans
    cache.forget_plans()
    assert not cache.layer_plans


# --- constructors run where somebody could notice --------------------------------------------------------------------------


class Doubled(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, 2 * size)
        self.name = "doubled"


def test_subclasses_and_second_initialisations_run() -> None:
    for _ in range(3):
        assert Doubled(3).name == "doubled" and Doubled(3).weight.shape == (6, 3)
    layer = nn.Linear(2, 2)
    layer.mark = "kept"  # type: ignore[assignment]
    layer.__init__(3, 3)  # type: ignore[misc]
    assert layer.mark == "kept" and layer.weight.shape == (3, 3)  # type: ignore[comparison-overlap]


REPLACED: dict[str, tuple[Any, str]] = {
    "reset_parameters": (nn.Linear, "reset_parameters"),
    "__init__": (nn.Linear, "__init__"),
    "register_parameter of the class": (nn.Linear, "register_parameter"),
    "register_parameter": (nn.Module, "register_parameter"),
    "kaiming_uniform_": (nn.init, "kaiming_uniform_"),
    "empty": (torch, "empty"),
    "the class of parameters": (torch.nn.modules.linear, "Parameter"),
}


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("name", REPLACED)
def test_functions_of_the_user_are_called(
    name: str, is_before: bool, mode: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute = REPLACED[name]
    calls = []

    def replace() -> None:
        original = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(attribute)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, call)

    nn.Linear(4, 3)
    assert is_replayed(lambda: nn.Linear(4, 3))
    if is_before:
        mode.__exit__(None, None, None)
        replace()
        mode.__enter__()
    else:
        replace()
    for _ in range(3):
        calls.clear()
        assert nn.Linear(4, 3).weight.shape == (3, 4)
        assert attribute in calls
    monkeypatch.undo()
    assert isinstance(nn.Linear(4, 3).weight, FakeTensor)


def test_hooks_for_new_parameters_are_called() -> None:
    seen: list[str] = []
    nn.BatchNorm1d(3)
    with module_hooks.register_module_parameter_registration_hook(
        lambda module, name, value: seen.append(name)
    ):
        nn.BatchNorm1d(3)
    assert seen == ["weight", "bias"]
    with module_hooks.register_module_buffer_registration_hook(lambda module, name, value: seen.append(name)):
        nn.BatchNorm1d(3)
    assert seen[2:] == ["running_mean", "running_var", "num_batches_tracked"]


def test_another_thread_builds_real_layers() -> None:
    nn.Linear(4, 3)
    found: list[Any] = []

    def build() -> None:
        found.append(nn.Linear(4, 3).weight)
        with torch.no_grad():
            found.append(torch.is_grad_enabled())
        found.append(torch.is_grad_enabled())

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert type(found[0]) is nn.Parameter and found[1:] == [False, True]


def test_everything_is_as_before_when_the_last_mode_is_left() -> None:
    places: list[tuple[Any, str]] = [
        (nn.Linear, "__init__"),
        (nn.Embedding, "__init__"),
    ]

    def look() -> list[object]:
        return [vars(owner)[name] for owner, name in places]

    patched = look()

    mode = torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    torch._C._set_dispatch_mode(mode)
    with FakeTensorMode():
        assert look() == patched
    assert look() == patched
    mode.__exit__(None, None, None)
    outside = look()
    assert not set(outside) & set(patched)
    mode.__enter__()
    assert look() == outside
    nn.Linear(2, 2)
    assert look() == patched
