"""Checks and conversion of the tensors that a call inside the mode gets; handlers for calls that need tensors, not only
specs."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import Context, MixedTensorsError, UnknownSubclassError
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_line
from understudy.ops.registry import Slot, declare, record_of
from understudy.spec.call import describe, flat, map_structure
from understudy.spec.tensor_spec import SHORT_DTYPE

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

PLAIN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
ONE_MODE = (
    "Mixing fake modes is not supported: use one for all tensors, or convert with mode.from_tensor(...)"
)


# --- handlers: calls that need tensors; other modules of this package register them ------------------------------------

Handler = Callable[["FakeTensorMode", Any, Any, Any], Any]
"""(mode, operator, args, kwargs) → the result, or `NotImplemented` to leave the call to inference."""

PASSED_THROUGH = frozenset({"profiler"})
"""Namespaces whose operators compute nothing on tensors: they run for real."""


def _pass_through(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    with _torch.PastDispatch():
        return func(*args, **kwargs)


handler: Slot[Handler] = declare(
    "handler", Slot(derive=lambda record: _pass_through if record.op.namespace in PASSED_THROUGH else None)
)
"""Handler."""
real_handler: Slot[Handler] = declare("real_handler", Slot())
"""Handler of calls that are given real tensors."""


# --- which tensors a call accepts -----------------------------------------------------------------------------------


class FakeTensorTLS(threading.local):
    """Settings for all modes of one thread.

    `allow_non_fake_inputs_override`: whether real tensors beside fakes are converted; None leaves it to each mode.
    """

    allow_non_fake_inputs_override: bool | None = None


fake_tensor_tls = FakeTensorTLS()


def accept_inputs(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """(answer, args, kwargs): the answer in a 1-tuple if a handler gave one, else None and the converted arguments."""
    if (
        mode.allow_non_fake_inputs
        and not kwargs
        and (known := _recall_converted(mode, func, args)) is not None
    ):
        return None, known, kwargs
    if (
        len(args) == 1
        and type(args[0]) is torch.Tensor
        and (handle := record_of(func).real_handler) is not None
    ):
        answer = handle(mode, func, args, kwargs)  # a literal, such as `torch.tensor(0)`
        if answer is not NotImplemented:
            return (answer,), args, kwargs
    if any(has_own_dispatch(kind) for kind in types):
        if _torch.torch_fake_tensor_class() in types:
            raise _make_torch_fake_error(func, args, kwargs)
        return NotImplemented
    tensors = flat(torch.Tensor, args, kwargs)
    for tensor in tensors:
        if _is_of_other_mode(mode, tensor) and not is_cached_by_function(tensor):
            raise _make_other_mode_error(func, args, kwargs, tensor)
    if all(type(tensor) is FakeTensor and tensor.fake_mode is mode for tensor in tensors):
        return None, args, kwargs
    handle = record_of(func).real_handler
    if handle is not None:
        answer = handle(mode, func, args, kwargs)
        if answer is not NotImplemented:
            return (answer,), args, kwargs

    def convert(tensor: torch.Tensor) -> FakeTensor:
        if type(tensor) is FakeTensor:
            return mode.from_tensor(tensor) if _is_of_other_mode(mode, tensor) else tensor
        if not _can_convert(mode, func, tensor):
            raise _make_real_tensor_error(func, args, kwargs, tensor)
        # It is a constant of the program, like a buffer, not an input: its sizes are static.
        return mode.fake_tensor_converter.from_real_tensor(
            mode, tensor, make_constant=is_readable(tensor), static_shapes=True
        )

    converted, converted_kwargs = map_structure(convert, torch.Tensor, (tuple(args), dict(kwargs)))
    if _torch.is_mutable(func):
        fakes = flat(torch.Tensor, converted, converted_kwargs)
        for tensor, fake in zip(tensors, fakes, strict=True):
            if tensor is not fake:
                mode.fake_tensor_converter.keep_alive(tensor, fake)
    return None, converted, converted_kwargs


def _recall_converted(mode: FakeTensorMode, func: Any, args: Any) -> list[Any] | None:
    """The arguments, if all real tensors among them were converted before; None for calls that have to be looked at."""
    if fake_tensor_tls.allow_non_fake_inputs_override is False:
        return None
    recall = mode.fake_tensor_converter.recall
    known = []
    for value in args:
        kind = type(value)
        if kind is torch.nn.Parameter or kind is torch.Tensor:
            value = recall(value)
            if value is None:
                return None
        elif kind is FakeTensor:
            if value.fake_mode is not mode:
                return None
        elif kind not in ATOMS:
            return None
        known.append(value)
    is_plain = (
        not _torch.is_mutable(func)
        and record_of(func).real_handler is None
        and torch.Tag.inplace_view not in func.tags
    )
    return known if is_plain else None


ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype})
MOST_READ_INTEGERS = 1 << 12
"""The values of integer constants up to this many elements are read: a grid of patches has three for each image."""


def is_readable(constant: torch.Tensor) -> bool:
    """Whether the values of a real tensor are determined. A program decides by flags, and by numbers that it counts with."""
    count = constant.numel()
    return count == 1 or (
        count <= MOST_READ_INTEGERS and not (constant.is_floating_point() or constant.is_complex())
    )


def _is_of_other_mode(mode: FakeTensorMode, tensor: torch.Tensor) -> bool:
    return type(tensor) is FakeTensor and tensor.fake_mode is not mode


def has_own_dispatch(kind: type) -> bool:
    """Whether a subclass has its own `__torch_dispatch__`. It is tried first, and calls operators on its inner tensors."""
    return kind is not FakeTensor and _torch.uses_python_dispatch(kind)


def _can_convert(mode: FakeTensorMode, func: OpOverload, tensor: torch.Tensor) -> bool:
    if torch.Tag.inplace_view in func.tags:
        return False
    override = fake_tensor_tls.allow_non_fake_inputs_override
    if (mode.allow_non_fake_inputs if override is None else override) or _torch.is_zero(tensor):
        return True
    # `torch.tensor(..., device="meta")` is a plain meta tensor even inside the mode; it has no data to lose.
    # `torch.tensor(3)` in TorchScript is a real tensor that is then converted to its dtype and device.
    is_scripted_literal = func.overloadpacket.__name__ == "_to_copy" and tensor.dim() == 0
    if tensor.device.type == "meta" or (is_scripted_literal and not tensor.requires_grad):
        return True
    return is_cached_by_function(tensor)


LRU_CACHE: Any = type(functools.lru_cache(len))
"""The type of a function with a cache."""
MOST_STEPS_TO_CACHE = 3
"""How many references lie between a tensor and the cached function that holds it. A tuple around the tensor is one step
more, and so is the dict of a cache without a limit."""
_cached_tensors = WeakIdKeyDictionary()
"""Tensors that were found in a cache. Memoised, because `gc.get_referrers` scans all objects."""


def is_cached_by_function(tensor: torch.Tensor) -> bool:
    """Whether this tensor is in the cache of a function (`functools.lru_cache`). Such a tensor was made before the
    mode, or in another one, and is a constant of the program."""
    if tensor not in _cached_tensors and find_caching_functions([tensor]):
        _cached_tensors[tensor] = True
    return tensor in _cached_tensors


def find_caching_functions(values: Sequence[object]) -> list[Any]:
    """The functions with a cache (`functools.lru_cache`) that holds one of these values."""
    found: list[Any] = []
    level: Sequence[object] = values
    for _ in range(MOST_STEPS_TO_CACHE):
        if not level:
            break
        holders = gc.get_referrers(*level)
        found += [holder for holder in holders if isinstance(holder, LRU_CACHE)]
        level = [holder for holder in holders if type(holder) in (dict, list, tuple) and holder is not level]
    return found


def _make_real_tensor_error(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], tensor: torch.Tensor
) -> MixedTensorsError:
    name = _argument_name(func, args, kwargs, tensor)
    shown = describe_tensors(args, kwargs)
    what = "a real parameter" if type(tensor) is torch.nn.Parameter else "a real tensor"
    if torch.Tag.inplace_view in func.tags:
        hint = (
            "operators that change metadata in place require stand-ins: convert it with mode.from_tensor(...)"
        )
    else:
        hint = (
            "Please convert all Tensors to FakeTensors first: mode.from_tensor(...); or make them in the mode, or let the "
            "mode convert: FakeTensorMode(allow_non_fake_inputs=True)"
        )
    context = Context(str(func), shown, user_line(), hint)
    message = f"{func}: expected a stand-in as argument {name!r}, got {what} ({_real_spec(tensor)})"
    if type(tensor) in PLAIN_CLASSES:
        return MixedTensorsError(message, func=func, context=context)
    message = message.replace("a real tensor", f"a real tensor of the class {type(tensor).__name__}")
    return UnknownSubclassError(f"Multiple dispatch failed for {message}", func=func, context=context)


def _make_other_mode_error(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], tensor: torch.Tensor
) -> MixedTensorsError:
    name = _argument_name(func, args, kwargs, tensor)
    return MixedTensorsError(
        f"{func}: expected a stand-in of this FakeTensorMode as argument {name!r}, got one of another mode",
        func=func,
        context=Context(str(func), describe_tensors(args, kwargs), user_line(), ONE_MODE),
    )


def _make_torch_fake_error(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> MixedTensorsError:
    tensor = next(t for t in flat(torch.Tensor, args, kwargs) if type(t) is _torch.torch_fake_tensor_class())
    name = _argument_name(func, args, kwargs, tensor)
    return MixedTensorsError(
        f"{func}: expected a stand-in of understudy as argument {name!r}, got a FakeTensor of torch's own mode "
        "(torch._subclasses)",
        func=func,
        context=Context(str(func), describe_tensors(args, kwargs), user_line(), ONE_MODE),
    )


def _argument_name(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], tensor: torch.Tensor
) -> str:
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
    """Whether it has data: a plain tensor, or a wrapper subclass around plain tensors."""
    if _torch.is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return all(is_real(getattr(tensor, name)) for name in names)
    return not _torch.uses_python_dispatch(type(tensor))


def refuse_missing_data(tensor: torch.Tensor, data: object) -> None:
    """Raise for `real.data = fake`: the real tensor would have no memory, and the next read would crash the process."""
    if type(data) is FakeTensor and is_real(tensor) and _torch.unwrap(tensor) is None:
        raise MixedTensorsError(
            f"can't assign the data of a stand-in, {data._spec}, to a real tensor",
            context=Context(
                line=user_line(),
                hint="make the model inside the mode, or replace the parameter itself: "
                "module.weight = torch.nn.Parameter(data)",
            ),
        )


_data_check = _torch.check_assigned_data(refuse_missing_data)
