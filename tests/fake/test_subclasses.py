"""Stand-ins of classes that have a `__torch_function__` of their own, as torchvision's images and boxes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from understudy import FakeTensorMode, make_fx, rehearse


class Image(Tensor):
    """Its operators return plain tensors, and `clone`, `to` and `detach` return images."""

    KEPT = (Tensor.clone, Tensor.to, Tensor.detach)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if func in cls.KEPT and isinstance(args[0], cls):
            return result.as_subclass(cls)
        return result.as_subclass(Tensor) if isinstance(result, cls) else result

    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone()

    @property
    def height(self) -> int:
        return int(self.shape[-2])


PROGRAMS: dict[str, Any] = {
    "made": lambda x: x,
    "pointwise": lambda x: x + 1,
    "view": lambda x: x.view(-1),
    "in place": lambda x: x.add_(1),
    "stack": lambda x: torch.stack([x, x]),
    "plain": lambda x: x.as_subclass(Tensor),
    "clone": lambda x: x.clone(),
    "dtype": lambda x: x.to(torch.float64),
    "index": lambda x: x[0, :2],
    "copy": lambda x: copy.deepcopy(x),
    "written": lambda x: x.__setitem__(0, 2.0),
    "read": lambda x: (x.height, x.device, x.dtype, len(x), x.stride()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_class_with_functions_of_its_own(name: str) -> None:
    program = PROGRAMS[name]
    expected = program(torch.ones(3, 4).as_subclass(Image))
    with FakeTensorMode():
        found = program(torch.ones(3, 4).as_subclass(Image))
    assert isinstance(found, Image) == isinstance(expected, Image)
    if isinstance(expected, Tensor):
        assert (found.shape, found.stride(), found.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
    else:
        assert found == expected


class Tagged(Tensor):
    """Hands its attributes on to its results, as images with metadata do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            vars(result).update(next((vars(x) for x in args if isinstance(x, cls)), {}))
        return result


def test_attributes_that_are_handed_on_do_not_change_the_tensor_inside() -> None:
    def run() -> list[Any]:
        x = torch.ones(3, 4).as_subclass(Tagged)
        x.tag = "scan"
        results: list[Any] = [x[None], x.to(torch.float64), x.t(), copy.copy(x), copy.copy(x[0])]
        return [(y.tag, y.as_subclass(Tensor).shape, y.as_subclass(Tensor).dtype) for y in results]

    expected = run()
    with FakeTensorMode():
        assert run() == expected


def test_it_is_on_its_device() -> None:
    with FakeTensorMode():
        image = torch.ones(3, 4).as_subclass(Image).to("cuda")
        assert isinstance(image, Image) and image.device == torch.device("cuda", 0)
        assert (image * 2).device == torch.device("cuda", 0)
        assert torch.ones(3).as_subclass(Image).cuda().device == torch.device("cuda", 0)


def test_writes_through_it_are_seen_by_the_tensor_inside() -> None:
    with FakeTensorMode():
        plain = torch.ones(3)
        plain.as_subclass(Image).add_(1)
        assert plain._version == 1


def train_on(make_input: Any) -> tuple[Any, list[Any]]:
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(inplace=True), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    )
    out = net(make_input(torch.randn(3, 4)))
    loss = torch.nn.functional.cross_entropy(out, torch.tensor([0, 1, 0])) + torch.cat([out, out])[0].sum()
    loss.backward()
    return type(loss).__name__, [(p.grad.shape, type(p.grad).__name__) for p in net.parameters()]


def test_gradients_pass_through_it() -> None:
    """A network whose inputs have such a class: its activations have it, too."""
    expected = train_on(lambda x: x.as_subclass(Tagged))
    with FakeTensorMode():
        kind, gradients = train_on(lambda x: x.as_subclass(Tagged))
        assert {name for _, name in gradients} == {"FakeTensor"}
    assert (kind, [shape for shape, _ in gradients]) == (expected[0], [shape for shape, _ in expected[1]])


def test_what_a_network_holds_does_not_depend_on_the_class_of_its_inputs() -> None:
    def measure(make_input: Any) -> tuple[Any, ...]:
        def run() -> None:
            net = torch.nn.Sequential(*[torch.nn.Linear(256, 256), torch.nn.GELU()] * 4).cuda()
            net(make_input(torch.randn(64, 256).cuda())).pow(2).sum().backward()

        found = rehearse(run, device="h100")
        return found.peak.allocated_bytes, found.sanity.inputs

    measured = measure(lambda x: x.as_subclass(Tagged))
    assert measured == measure(lambda x: x)
    assert "f32[64, 256]" in str(measured[1])


def test_a_graph_would_end_at_it() -> None:
    with pytest.raises(RuntimeError, match="type FakeTensor which is not a subclass"):
        make_fx(lambda x: x.as_subclass(Image) + 1, tracing_mode="fake")(torch.ones(3))
