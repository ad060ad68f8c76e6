"""Which tensors an operator call inside the mode may be given, and which calls need tensors, not only their specs."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from understudy import _torch
from understudy.errors import Context, MixedTensorsError, UnknownSubclassError
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_line
from understudy.ops.registry import Trait
from understudy.spec.call import describe, flat, map_structure
from understudy.spec.tensor_spec import SHORT_DTYPE

if TYPE_CHECKING:
    from understudy._torch import OpOverload
    from understudy.fake.mode import FakeTensorMode

ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
ONE_MODE = "Mixing fake modes gives no result: use one for all of them, or convert with mode.from_tensor(...)"


# --- calls that need tensors: traits of operators that modules of this room register ------------------------------------

Handler = Callable[["FakeTensorMode", Any, Any, Any], Any]
"""(mode, operator, args, kwargs) → the result, or `NotImplemented` to leave the call to inference."""

PASSED_THROUGH = frozenset({"profiler"})
"""Namespaces whose operators have nothing to do with tensors' contents: they run for real."""


def _pass_through(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    with _torch.PastDispatch():
        return func(*args, **kwargs)


handler: Trait[Handler] = Trait(
    "handler", derive=lambda op: _pass_through if op.namespace in PASSED_THROUGH else None
)
real_handler: Trait[Handler] = Trait("handler of calls that are given real tensors")


# --- which tensors a call may be given -----------------------------------------------------------------------------------


class FakeTensorTLS(threading.local):
    """What holds for every mode in one thread.

    `allow_non_fake_inputs_override`: whether real tensors beside fakes are converted; None leaves it to each mode.
    """

    allow_non_fake_inputs_override: bool | None = None


fake_tensor_tls = FakeTensorTLS()


def accept_inputs(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """(answer, args, kwargs): an answer in a 1-tuple if the call is settled, else the arguments to go on with."""
    if len(args) == 1 and type(args[0]) is torch.Tensor and (handle := real_handler.of(func)) is not None:
        answer = handle(mode, func, args, kwargs)  # a literal, such as `torch.tensor(0)`
        if answer is not NotImplemented:
            return (answer,), args, kwargs
    if any(is_foreign(kind) for kind in types):
        if _torch.torch_fake_tensor_class() in types:
            raise _fake_of_torch(func, args, kwargs)
        return NotImplemented
    tensors = flat(torch.Tensor, args, kwargs)
    for tensor in tensors:
        if _is_of_other_mode(mode, tensor) and not is_kept_by_function(tensor):
            raise _other_mode(func, args, kwargs, tensor)
    if all(type(tensor) is FakeTensor and tensor.fake_mode is mode for tensor in tensors):
        return None, args, kwargs
    handle = real_handler.of(func)
    if handle is not None:
        answer = handle(mode, func, args, kwargs)
        if answer is not NotImplemented:
            return (answer,), args, kwargs

    def convert(tensor: torch.Tensor) -> FakeTensor:
        if type(tensor) is FakeTensor:
            return mode.from_tensor(tensor) if _is_of_other_mode(mode, tensor) else tensor
        if not _convertible(mode, func, tensor):
            raise _real_tensor(func, args, kwargs, tensor)
        # It is a part of the program, as a buffer is, and none of the inputs: its sizes do not vary.
        return mode.fake_tensor_converter.from_real_tensor(
            mode, tensor, make_constant=tensor.numel() == 1, static_shapes=True
        )

    converted, converted_kwargs = map_structure(convert, torch.Tensor, (tuple(args), dict(kwargs)))
    if _torch.is_mutable(func):
        fakes = flat(torch.Tensor, converted, converted_kwargs)
        for tensor, fake in zip(tensors, fakes, strict=True):
            if tensor is not fake:
                mode.fake_tensor_converter.keep(tensor, fake)
    return None, converted, converted_kwargs


def _is_of_other_mode(mode: FakeTensorMode, tensor: torch.Tensor) -> bool:
    return type(tensor) is FakeTensor and tensor.fake_mode is not mode


def is_foreign(kind: type) -> bool:
    """A subclass with an operator dispatch of its own goes first: it will call again with what is inside it."""
    return kind is not FakeTensor and _torch.uses_python_dispatch(kind)


def _convertible(mode: FakeTensorMode, func: OpOverload, tensor: torch.Tensor) -> bool:
    if torch.Tag.inplace_view in func.tags:
        return False
    override = fake_tensor_tls.allow_non_fake_inputs_override
    if (mode.allow_non_fake_inputs if override is None else override) or _torch.is_zero(tensor):
        return True
    # `torch.tensor(..., device="meta")` is torch's own meta tensor even inside the mode; it has no data to lose.
    # `torch.tensor(3)` in TorchScript is a real tensor on its way to its dtype and device.
    is_scripted_literal = func.overloadpacket.__name__ == "_to_copy" and tensor.dim() == 0
    if tensor.device.type == "meta" or (is_scripted_literal and not tensor.requires_grad):
        return True
    return is_kept_by_function(tensor)


LRU_CACHE: Any = type(functools.lru_cache(len))
"""The type of a function that keeps its results."""
AROUND_A_RESULT = 3
"""How far it is from a tensor to the function that keeps it: one that is returned in a tuple is one step farther, and so is
one of a cache without a limit, which is a dict."""
_kept = WeakIdKeyDictionary()
"""Tensors that were seen in a cache: to find the holders of an object, all objects there are have to be gone through."""


def is_kept_by_function(tensor: torch.Tensor) -> bool:
    """Whether a function has kept this tensor among its results (`functools.lru_cache`). It was made before the mode, or in
    another one, and is a constant of the program: the function would make it again if it had forgotten it."""
    if tensor not in _kept and functions_that_keep([tensor]):
        _kept[tensor] = True
    return tensor in _kept


def functions_that_keep(values: Sequence[object]) -> list[Any]:
    """Each function with a cache that has one of these values among its results."""
    found: list[Any] = []
    kept: Sequence[object] = values
    for _ in range(AROUND_A_RESULT):
        if not kept:
            break
        holders = gc.get_referrers(*kept)
        found += [holder for holder in holders if isinstance(holder, LRU_CACHE)]
        kept = [holder for holder in holders if type(holder) in (dict, list, tuple) and holder is not kept]
    return found


def _real_tensor(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], tensor: torch.Tensor
) -> MixedTensorsError:
    name = _argument_name(func, args, kwargs, tensor)
    shown = describe_tensors(args, kwargs)
    what = "a real parameter" if type(tensor) is torch.nn.Parameter else "a real tensor"
    if torch.Tag.inplace_view in func.tags:
        hint = "an operator that changes metadata in place takes stand-ins only: convert it with mode.from_tensor(...)"
    else:
        hint = (
            "Please convert all Tensors of this call with mode.from_tensor(...), make them inside the mode, or let the "
            "mode convert: FakeTensorMode(allow_non_fake_inputs=True)"
        )
    context = Context(str(func), shown, user_line(), hint)
    message = f"{func}: argument {name!r} is {what} ({_real_spec(tensor)}), where stand-ins are expected"
    if type(tensor) in ORDINARY:
        return MixedTensorsError(message, func=func, context=context)
    message = message.replace("a real tensor", f"a real tensor of the class {type(tensor).__name__}")
    return UnknownSubclassError(f"Multiple dispatch failed for {message}", func=func, context=context)


def _other_mode(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], tensor: torch.Tensor
) -> MixedTensorsError:
    name = _argument_name(func, args, kwargs, tensor)
    return MixedTensorsError(
        f"{func}: argument {name!r} is a stand-in of another FakeTensorMode",
        func=func,
        context=Context(str(func), describe_tensors(args, kwargs), user_line(), ONE_MODE),
    )


def _fake_of_torch(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> MixedTensorsError:
    tensor = next(t for t in flat(torch.Tensor, args, kwargs) if type(t) is _torch.torch_fake_tensor_class())
    name = _argument_name(func, args, kwargs, tensor)
    return MixedTensorsError(
        f"{func}: argument {name!r} is a FakeTensor of torch's own mode (torch._subclasses), and stand-ins of understudy "
        "are expected",
        func=func,
        context=Context(str(func), describe_tensors(args, kwargs), user_line(), ONE_MODE),
    )


def _argument_name(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], tensor: torch.Tensor) -> str:
    for name, value in [*zip(_torch.argument_names(func), args, strict=False), *kwargs.items()]:
        if any(candidate is tensor for candidate in flat(torch.Tensor, (value,), {})):
            return name
    return "?"


def _real_spec(tensor: torch.Tensor) -> str:
    dtype = SHORT_DTYPE.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, tensor.shape))}]@{tensor.device}"


def describe_tensors(args: Any, kwargs: Any) -> str:
    def describe_bare(tensor: torch.Tensor) -> object:
        return _BareText(str(tensor._spec) if type(tensor) is FakeTensor else f"real {_real_spec(tensor)}")

    args, kwargs = map_structure(describe_bare, torch.Tensor, (tuple(args), dict(kwargs)))
    return describe(args, kwargs)


class _BareText(str):
    """A string that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


# --- the data of a stand-in ------------------------------------------------------------------------------------------------


def is_real(tensor: object) -> bool:
    """Whether it has data: a plain tensor, or a wrapper subclass around such ones."""
    if _torch.is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return all(is_real(getattr(tensor, name)) for name in names)
    return not _torch.uses_python_dispatch(type(tensor))


def refuse_missing_data(tensor: torch.Tensor, data: object) -> None:
    """`real.data = fake`: the real tensor would be left without memory, and the next read would end the process."""
    if type(data) is FakeTensor and is_real(tensor) and _torch.unwrap(tensor) is None:
        raise MixedTensorsError(
            f"a real tensor can't be given the data of a stand-in, {data._spec}: it would be left without memory",
            context=Context(
                line=user_line(),
                hint="make the model inside the mode, or exchange the parameter itself: "
                "module.weight = torch.nn.Parameter(data)",
            ),
        )


_data_check = _torch.check_assigned_data(refuse_missing_data)
