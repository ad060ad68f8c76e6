"""Construction of torch's own layers: initial values are written without a dispatch, and constructors are replayed.

The constructor of a layer checks names, makes tensors by operators, and computes initial values. That gives the same
attributes whenever the arguments and the defaults are the same, so it runs once, and its result is kept: a
`ConstructorPlan`. No code of the user is skipped: the constructor runs again if the layer is of a subclass, another mode
is active, a hook for new parameters is registered, or a function that constructors call was replaced.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch import nn

from understudy import _torch, errors
from understudy.fake import initial_values
from understudy.fake.native import current_indices, is_grad_enabled, prepare
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import DeterminedContents
from understudy.infer.engine import cache
from understudy.patching import ANY_MODE, ENGINE, LAYERS, patch
from understudy.spec import TensorSpec

Function = Callable[..., Any]

INITIALISERS: dict[str, Callable[..., bool]] = {
    "_no_grad_normal_": initial_values.draw_normal,
    "_no_grad_uniform_": initial_values.draw_uniform,
    "_no_grad_fill_": initial_values.fill,
    "_no_grad_zero_": initial_values.zero,
}


@patch(*(f"torch.nn.init.{name}" for name in INITIALISERS), during=ANY_MODE)
def write_at_once(original: Function) -> Function:
    """torch.nn.init switches gradients off and on, which costs more than the rest of the call on a fake."""
    is_of_torch = is_torch_function(original)
    write = INITIALISERS[original.__name__] if is_of_torch else original

    @functools.wraps(original)
    def initialise(tensor: FakeTensor, *numbers: object, **others: object) -> FakeTensor:
        is_usual = is_of_torch and not others and begin_for_stand_in(tensor)
        return tensor if is_usual and write(tensor, *numbers) else original(tensor, *numbers, **others)

    return initialise


def begin_for_stand_in(tensor: object) -> bool:
    """Begin the patches of layers if this is a stand-in, until the last mode is left. Returns whether it is one."""
    is_fake = type(tensor) is FakeTensor
    if is_fake and not ENGINE.active & LAYERS.bit:
        ENGINE.begin_until_left(LAYERS)
    return is_fake


KINDS = frozenset({
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Conv2d,
})  # fmt: skip
"""Not their subclasses, which may do anything in their constructors; and only layers with tensors, as others are built
faster than a plan is found."""
ARGUMENT_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of arguments by whose value and type a plan is found."""
SHARED_TYPES = ARGUMENT_TYPES | {torch.Size}
"""Types of attributes that all layers with the same arguments may share."""
TENSOR_ATTRIBUTES = frozenset({"_is_param", "_determined"})
METHODS = (
    "__init__", "__setattr__", "register_parameter", "register_buffer", "reset_parameters", "reset_running_stats",
)  # fmt: skip
"""Methods that constructors of layers call."""
FACTORIES = ("empty", "zeros", "ones", "tensor")
INIT_FUNCTIONS = ("kaiming_uniform_", "uniform_", "normal_", "ones_", "zeros_", *INITIALISERS)
TORCH, UNDERSTUDY = (os.path.join(os.path.dirname(file), "") for file in (torch.__file__, errors.__file__))
"""The folders of both packages."""
active_fake_mode, can_skip_dispatch_for = _torch.active_fake_mode, _torch.can_skip_dispatch_for
count_writes, make_wrapper = _torch.count_writes, _torch.make_wrapper
default_dtype = torch.get_default_dtype
set_attribute = object.__setattr__


class LayerTensor(NamedTuple):
    """A parameter or buffer of a new layer."""

    spec: TensorSpec
    arguments: tuple[object, ...]
    """Those that make a wrapper for it."""
    is_parameter: bool
    writes: int
    contents: tuple[object, bool] | None

    def make(self, mode: Any) -> FakeTensor:
        fake: FakeTensor = make_wrapper(FakeTensor, *self.arguments)
        fake._spec = self.spec
        fake.fake_mode = mode
        if self.is_parameter:
            fake._is_param = True
        if self.contents is not None:
            fake._determined = DeterminedContents(*self.contents)
        if self.writes:
            count_writes((fake,) * self.writes)
        return fake


class ConstructorPlan(NamedTuple):
    """What a new layer is given.

    `called` are the functions that the constructor may have called: a plan holds as long as they are the same.
    """

    called: list[object]
    attributes: dict[str, object]
    """All of them, in their order; the values of the following ones are made anew."""
    containers: list[tuple[str, Callable[[], object]]]
    tensors: list[tuple[str, dict[str, LayerTensor | None]]]

    def build(self, layer: nn.Module, mode: object) -> None:
        attributes = self.attributes.copy()
        for name, make in self.containers:
            attributes[name] = make()
        for name, parts in self.tensors:
            attributes[name] = {key: None if part is None else part.make(mode) for key, part in parts.items()}
        set_attribute(layer, "__dict__", attributes)


PLACES = (
    "torch.nn.Linear.__init__", "torch.nn.Embedding.__init__", "torch.nn.LayerNorm.__init__",
    "torch.nn.modules.batchnorm._BatchNorm.__init__", "torch.nn.Conv2d.__init__",
)  # fmt: skip


@patch(*PLACES, during=LAYERS)
def build_layer_by_plan(original: Function) -> Function:
    """Layers with the same arguments get the same attributes: the first construction is replayed."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind, mode = type(self), active_fake_mode()
        if (
            kind not in KINDS
            or not getattr(mode, "can_skip_dispatch", False)
            or not can_skip_dispatch_for(mode)
            or current_indices
            or not is_grad_enabled()
            or vars(self)
            or _torch.has_registration_hooks()
        ):
            original(self, *args, **kwargs)
            return
        types = tuple(map(type, (*args, *kwargs.values())))
        if not ARGUMENT_TYPES.issuperset(types) or (float in types and has_zero_float(args, kwargs)):
            original(self, *args, **kwargs)
            return
        key = (
            kind,
            default_dtype(),
            mode._facts_number,
            _torch.device_of_context(),
            args,
            *kwargs.items(),
            types,
        )
        plan: ConstructorPlan | None = cache.layer_plans.get(key)
        called = list(map(getattr, *CALLED[kind]))
        if plan is not None and called == plan.called:
            plan.build(self, mode)
            return
        original(self, *args, **kwargs)
        plan = make_plan(self, called) if all(map(is_torch_function, called)) else None
        if plan is not None:
            cache.add_layer_plan(key, plan)

    return __init__


def has_zero_float(args: Any, kwargs: Any) -> bool:
    """0.0 and -0.0 are equal, and not the same."""
    return any(type(value) is float and not value for value in (*args, *kwargs.values()))


def find_functions(kind: type[nn.Module]) -> tuple[list[object], list[str]]:
    """Owners and names of the functions that the constructor of a layer may call."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module) + 1]
    found: list[tuple[object, str]] = [
        (owner, name) for owner in classes for name in METHODS if hasattr(owner, name)
    ]
    found += [(torch, name) for name in FACTORIES]
    found += [(nn.init, name) for name in INIT_FUNCTIONS]
    found += [(nn.Parameter, "__new__"), (sys.modules[kind.__module__], "Parameter")]
    return [owner for owner, _ in found], [name for _, name in found]


CALLED: dict[Any, tuple[list[object], list[str]]] = {kind: find_functions(kind) for kind in KINDS}


def is_torch_function(function: Any) -> bool:
    """Whether this is a function of torch, with or without our patches around it, and not a replacement by the program."""
    if isinstance(function, FunctionType):
        path = function.__code__.co_filename
        return path.startswith(TORCH) or (
            path.startswith(UNDERSTUDY) and is_torch_function(getattr(function, "__wrapped__", None))
        )
    return isinstance(function, (BuiltinFunctionType, WrapperDescriptorType)) or function is nn.Parameter


def make_plan(layer: nn.Module, called: list[object]) -> ConstructorPlan | None:
    """The plan for layers like this new one; None if it has attributes that can't be made anew."""
    containers: list[tuple[str, Callable[[], object]]] = []
    tensors: list[tuple[str, dict[str, LayerTensor | None]]] = []
    attributes = vars(layer).copy()
    for name, value in attributes.items():
        if name in ("_parameters", "_buffers"):
            parts = {key: None if tensor is None else describe(tensor) for key, tensor in value.items()}
            if type(value) is not dict or any(
                part is None and value[key] is not None for key, part in parts.items()
            ):
                return None
            tensors.append((name, parts))
        elif type(value) in (list, set) and all(map(can_share, value)):
            containers.append((name, value.copy().copy))
        elif type(value) in (dict, OrderedDict) and not value:
            containers.append((name, type(value)))
        elif not can_share(value):
            return None
    for name in [name for name, _ in (*containers, *tensors)]:
        attributes[name] = None
    return ConstructorPlan(called, attributes, containers, tensors)


def can_share(value: object) -> bool:
    return type(value) in SHARED_TYPES or (type(value) is tuple and all(map(can_share, value)))


def describe(tensor: torch.Tensor) -> LayerTensor | None:
    """How to make a tensor like this one; None if there is more to it than a spec and contents."""
    if type(tensor) is not FakeTensor or not TENSOR_ATTRIBUTES.issuperset(vars(tensor)):
        return None
    spec, known = tensor._spec, tensor._determined
    # torch warns whenever it initialises a tensor without elements.
    if (
        spec.sparse is not None
        or spec.is_symbolic
        or spec.conj
        or spec.neg
        or not spec.numel
        or tensor.grad_fn is not None
    ):
        return None
    if known is not None and (
        type(known) is not DeterminedContents
        or (known.extremes, known.watch, known.counting_mode) != (None, None, None)
    ):
        return None
    arguments: tuple[Any, ...] = prepare(spec)
    if tensor.requires_grad:
        arguments = (*arguments[:7], False, True, *arguments[9:])
    contents = None if known is None else (known.content, known.literal)
    return LayerTensor(spec, arguments, "_is_param" in vars(tensor), tensor._version, contents)
