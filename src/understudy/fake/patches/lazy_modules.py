"""Parameters and buffers of lazy modules (`nn.LazyLinear`), whose sizes follow from the first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.patching import ANY_MODE, patch_call


@contextmanager
def show_as_plain(tensors: Iterable[Any]) -> Iterator[None]:
    """Let uninitialized tensors be plain stand-ins, with no elements, meanwhile."""
    kinds = [(fake, type(fake)) for fake in tensors]
    for fake, _ in kinds:
        fake.__class__ = FakeTensor
    try:
        yield
    finally:
        for fake, kind in kinds:
            fake.__class__ = kind


class Uninitialized(_torch.UninitializedTensorMixin, FakeTensor):
    """A stand-in without a shape. `materialize`, which torch's lazy modules call, gives it one and makes it a
    `FakeTensor`; until then it can be moved and cast, as in eager."""

    __slots__ = ()

    cls_to_become = FakeTensor
    eager_class: type = _torch.UninitializedTensorMixin
    _allowed_methods = [  # noqa: RUF012  as in torch's class
        *_torch.UninitializedTensorMixin._allowed_methods,
        *(FakeTensor.to, FakeTensor.cuda, FakeTensor.cpu, vars(FakeTensor)["device"].fget),
    ]

    def __new__(cls, requires_grad: bool = True, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        fake: Any = torch.empty(0, device=device, dtype=dtype, requires_grad=requires_grad)
        if issubclass(cls, nn.Parameter):
            fake._is_param = True
        fake.__class__ = cls
        return fake

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an allowed function on what this becomes, which the engine knows."""
        if func not in cls._allowed_methods and type(func).__name__ != "method-wrapper":
            raise ValueError(
                f"expected a parameter with a shape in {func}, got an uninitialized one; run the lazy module on a batch"
            )
        with show_as_plain(arg for arg in args if isinstance(arg, Uninitialized)):
            result = func(*args, **(kwargs or {}))
        if issubclass(cls, UninitializedBuffer) and type(result) is FakeTensor:
            vars(result).update(vars(args[0]))
            result.__class__ = (
                cls  # as in eager: nn.Module exchanges buffers, and sets the data of parameters
            )
        return result

    @property
    def data(self) -> torch.Tensor:
        with show_as_plain([self]):
            return self.data

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        with show_as_plain([self]):
            self.data = other

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"<{self.eager_class.__name__}>"

    __str__ = __repr__  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        if id(self) not in memo:
            data = self.data
            memo[id(self)] = type(self)(self.requires_grad, data.device, data.dtype)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.eager_class, (self.requires_grad,)


class FakeUninitializedParameter(Uninitialized, UninitializedParameter):
    __slots__ = ()

    cls_to_become = FakeTensor
    eager_class = UninitializedParameter


class FakeUninitializedBuffer(Uninitialized, UninitializedBuffer):
    __slots__ = ()

    cls_to_become = FakeTensor
    eager_class = UninitializedBuffer


@patch_call("torch.nn.parameter.UninitializedParameter.__new__", during=ANY_MODE)
def make_parameter(
    original: Callable[..., object],
    cls: type,
    requires_grad: bool = True,
    device: Any = None,
    dtype: Any = None,
) -> object:
    """Eager makes the tensor an object of this class, which a stand-in can't become."""
    if cls is UninitializedParameter and _torch.active_fake_mode() is not None:
        return FakeUninitializedParameter(requires_grad, device, dtype)
    return original(cls, requires_grad, device, dtype)


@patch_call("torch.nn.parameter.UninitializedBuffer.__new__", during=ANY_MODE)
def make_buffer(
    original: Callable[..., object], cls: type, requires_grad: bool = False, device: Any = None, dtype: Any = None,
    persistent: bool = True,
) -> object:  # fmt: skip
    """As for parameters."""
    if cls is not UninitializedBuffer or _torch.active_fake_mode() is None:
        return original(cls, requires_grad, device, dtype, persistent)
    fake: Any = FakeUninitializedBuffer(requires_grad, device, dtype)
    fake.persistent, fake._is_buffer = persistent, True
    return fake
