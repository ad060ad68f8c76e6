"""Stand-ins of tensor classes that have a `__torch_function__` of their own, such as torchvision's images and boxes.

    x.as_subclass(Image)        an object of a class derived from Image, around the stand-in

The class itself decides what its operators return. Below it, each operator is called on the stand-in inside.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from understudy import _torch
from understudy.fake.native import prepare
from understudy.fake.tensor import FakeTensor, native_argument


def wrap_stand_in(fake: FakeTensor, kind: Any) -> Any:
    """None where a graph is recorded, which would end at the object, and for classes with a dispatch of their own."""
    derived = kind if hasattr(kind, "_is_around_stand_in") else derive_class(kind)
    if derived is None or fake._node is not None or fake.spec.is_symbolic:
        return None
    wrap: Any = _Wrapping.apply if fake.requires_grad else _make_around
    return wrap(fake, derived)


def _make_around(fake: Any, derived: Any) -> Any:
    made = _torch.make_wrapper(derived, *prepare(fake.spec))
    made._stand_in = fake
    return made


def find_stand_in(tensor: Any) -> Any:
    """The stand-in inside of such an object; any other tensor itself."""
    return getattr(tensor, "_stand_in", tensor)


class _Wrapping(torch.autograd.Function):
    """Put an object around a stand-in that requires a gradient; the gradient of the object is that of the stand-in."""

    @staticmethod
    def forward(ctx: Any, fake: FakeTensor, derived: Any) -> Any:
        return _make_around(fake.detach(), derived)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return find_stand_in(gradient), None


@functools.cache
def derive_class(kind: Any) -> Any:
    if _torch.uses_python_dispatch(kind):
        return None

    def to(made: Any, *args: Any, **kwargs: Any) -> Any:
        named = {name: native_argument(value) for name, value in kwargs.items()}
        return kind.to(made, *map(native_argument, args), **named)

    members = {
        "__slots__": (
            "_stand_in",
        ),  # not in `__dict__`, which classes with metadata copy from object to object
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__torch_dispatch__": classmethod(dispatch_to_stand_in),
        "device": property(lambda made: made._stand_in.device),
        "to": to,
        "cuda": lambda made, device=None, **options: made.to(find_card(device), **options),
        "_is_around_stand_in": True,
    }
    if kind.__deepcopy__ is torch.Tensor.__deepcopy__:
        members["__deepcopy__"] = copy_with_stand_in
    return type(kind.__name__, (kind,), members)


def find_card(device: Any) -> torch.device:
    """The device that `x.cuda(device)` names."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")


def copy_with_stand_in(made: Any, memo: dict[int, Any]) -> Any:
    copied = memo[id(made)] = wrap_stand_in(copy.deepcopy(made._stand_in, memo), type(made))
    return copied


def dispatch_to_stand_in(kind: Any, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
    """Call an operator on the stand-ins inside. What it writes in place is given back as the object around it."""
    outer = {}

    def unwrap(tensor: torch.Tensor) -> torch.Tensor:
        inner = find_stand_in(tensor)
        outer[id(inner)] = tensor
        return inner

    def give_back(result: torch.Tensor) -> torch.Tensor:
        given = outer.get(id(result), result)
        if given is not result:
            torch.autograd.graph.increment_version(result)
        return given

    args, kwargs = _torch.tree_map_only(torch.Tensor, unwrap, (args, kwargs or {}))
    return _torch.tree_map_only(torch.Tensor, give_back, func(*args, **kwargs))
