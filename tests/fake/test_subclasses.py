"""Stand-ins of classes that have a `__torch_function__` of their own, as torchvision's images and boxes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from understudy import FakeTensorMode


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
            vars(result).update(vars(args[0]))
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


def test_gradients_would_end_at_it() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="type FakeTensor which is not a subclass"):
        torch.ones(3, requires_grad=True).as_subclass(Image)
