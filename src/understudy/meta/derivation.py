"""The metadata of results: a call is run on stand-ins, or by a function of `manual_meta_overrides`.

The outcome is metadata; an error, if real tensors would raise as well; or `UNKNOWN`, if it can't be computed without data.
Unknown calls are collected, and listed in one warning at the end of the trace; in a strict trace they raise.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Proxy
from torch.fx.node import map_aggregate

from understudy import _torch
from understudy.errors import OperatorError, UnderstudyError
from understudy.fake.inputs import describe_tensors
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import MOST_READABLE
from understudy.lines import user_frames, user_line
from understudy.meta.devices import DeviceOf
from understudy.meta.errors import make_unknown_error
from understudy.meta.modules import modules_in_python, restore_dict
from understudy.meta.overrides import find_override
from understudy.meta.proxies import UNKNOWN, meta_of_proxy
from understudy.meta.results import ATOMS
from understudy.meta.structures import holds, transform

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode
    from understudy.meta.tracer import MetaTracer

PLAIN = ATOMS | {FakeTensor}
SHOWN_CALLS = 5
"""How many unknown calls the warning shows."""


class MetadataUnknown(Exception):
    """A call has an argument with unknown metadata."""


@dataclass(frozen=True)
class UnknownCall:
    """A call whose metadata could not be computed, and why."""

    target: str
    call: str
    line: str
    why: str

    def __str__(self) -> str:
        return f"Could not compute metadata for {self.target}: {self.why}\n  called:  {self.call}\n  at:      {self.line}"


class Derivation:
    """Runs calls on stand-ins, for one trace."""

    def __init__(self, tracer: MetaTracer, mode: FakeTensorMode, is_strict: bool) -> None:
        self._tracer = tracer
        self._mode = mode
        self._is_strict = is_strict
        self._unknown: list[UnknownCall] = []
        self._made: dict[int, tuple[torch.Tensor, Any]] = {}

    # --- stand-ins of values ---------------------------------------------------------------------------------

    def meta_of(self, value: Any) -> Any:
        """The arguments of a call with proxies, devices and real tensors replaced by stand-ins and devices."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple:
            return tuple([self.meta_of(part) for part in value])
        if kind is dict:
            parts = {key: self.meta_of(part) for key, part in value.items()}
            return parts if any(parts[key] is not value[key] for key in value) else value
        return transform(value, self._meta_of_leaf, _is_replaced)

    def _meta_of_leaf(self, leaf: Any, path: object) -> Any:
        if type(leaf) is DeviceOf:
            if leaf.device is None:
                raise MetadataUnknown
            return leaf.device
        if isinstance(leaf, Proxy):
            meta = meta_of_proxy(leaf)
            if meta is UNKNOWN:
                raise MetadataUnknown
            return self.meta_of(meta)
        return self.stand_in(leaf)

    def find_meta(self, value: object) -> Any:
        """The metadata of a structure of values; `UNKNOWN` if one of them is unknown."""
        try:
            return self.meta_of(value)
        except MetadataUnknown:
            return UNKNOWN

    def stand_in(self, tensor: torch.Tensor) -> Any:
        """The stand-in of a real tensor. The values of a small one that is not a parameter are determined."""
        if type(tensor) is FakeTensor and tensor.fake_mode is self._mode:
            return tensor
        found = self._made.get(id(tensor))
        if found is not None:
            return found[1]
        with self._tracer.suspend():
            made = self._mode.from_tensor(tensor, static_shapes=True)
            self.read_values(tensor, made)
        self._made[id(tensor)] = tensor, made
        return made

    def read_values(self, tensor: torch.Tensor, stand_in: Any) -> None:
        if type(tensor) is torch.Tensor and tensor.numel() <= MOST_READABLE and type(stand_in) is FakeTensor:
            self._mode.fake_tensor_converter.read_values(self._mode, tensor, stand_in)

    # --- running ---------------------------------------------------------------------------------------------

    def run(self, kind: str, target: Any, args: Any, kwargs: Any, run: Callable[..., object] | None) -> Any:
        """The result of a call on stand-ins, or `UNKNOWN`. `run`: the function to call, by default that of the target."""
        try:
            inputs = self.meta_of(args), self.meta_of(kwargs) if kwargs else kwargs
        except MetadataUnknown:
            return UNKNOWN
        override = find_override(self._overridden(kind, target))
        try:
            if kind == "call_module":
                result = self._run_module(override, *inputs)
            elif override is not None:
                result = override(*inputs[0], **inputs[1])
            else:
                run = run or CALLS.get(target) or (method_call(target) if kind == "call_method" else target)
                result = run(*inputs[0], **inputs[1])
        except UnderstudyError as error:
            if isinstance(error, OperatorError):
                raise self._tracer.locate_error(error, inputs, kind, target, args, kwargs) from error
            return self._note_unknown(kind, target, inputs, error.reason)
        except Exception as error:
            if override is None and is_of_torch(kind, target, self._tracer.called):
                raise self._tracer.locate_error(error, inputs, kind, target, args, kwargs) from error
            return self._note_unknown(kind, target, inputs, f"{type(error).__name__}: {error}")
        return self._convert_real_tensors(result)

    def _overridden(self, kind: str, target: Any) -> Any:
        return type(self._tracer.called[0]) if kind == "call_module" else target

    def _run_module(self, override: Any, args: Any, kwargs: Any) -> Any:
        module, forward = self._tracer.called
        if override is not None:
            return override(module, *args, **kwargs)
        before = [(part, dict(part._buffers), dict(part.__dict__)) for part in modules_in_python(module)]
        try:
            return forward(*args, **kwargs)
        finally:  # undo assignments to attributes: the module is called again when the graph runs
            for part, buffers, state in before:
                restore_dict(part._buffers, buffers)
                restore_dict(part.__dict__, state)

    def _convert_real_tensors(self, result: object) -> Any:
        if type(result) is FakeTensor or not holds(result, _is_real):
            return result
        return transform(result, lambda tensor, path: self.stand_in(tensor), _is_real)

    def _note_unknown(self, kind: str, target: Any, inputs: tuple[object, object], why: str) -> Any:
        name = getattr(target, "__name__", None) or str(target)
        why = why.splitlines()[0] if why else "no reason was given"
        if self._is_strict:
            raise make_unknown_error(f"{kind} target {name}", why)
        called = type(self._tracer.called[0]).__name__ if kind == "call_module" else name
        call = f"{called}({describe_tensors(*inputs)})"
        self._unknown.append(UnknownCall(f"{kind} target {name}", call, user_line(), why))
        return UNKNOWN

    def close(self) -> None:
        """Called at the end of a trace: drop references to the stand-ins."""
        self._made.clear()

    def warn(self) -> None:
        """Warn about all calls whose metadata could not be computed, once."""
        found, self._unknown = self._unknown, []
        if not found:
            return
        shown = "\n".join(map(str, found[:SHOWN_CALLS]))
        more = f"\n… and {len(found) - SHOWN_CALLS} more calls" if len(found) > SHOWN_CALLS else ""
        message = (
            f"{shown}{more}\n  to do:   compute it in understudy.manual_meta_overrides; values that depend on it have no "
            "metadata either"
        )
        frame = next(user_frames(), None)
        place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("understudy", 0)
        warnings.warn_explicit(message, UserWarning, *place)


def _is_replaced(value: object) -> bool:
    """Whether the metadata of a value is another object than the value itself."""
    return isinstance(value, (torch.Tensor, Proxy)) or type(value) is DeviceOf


def _is_real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not FakeTensor


def is_of_torch(kind: str, target: Any, called: Any = None) -> bool:
    """Whether a call raises for stand-ins only if it raises for tensors: of torch's functions and modules, and of Python's
    operators."""
    if kind == "call_method":
        return True
    if kind == "call_module":
        return type(called[0]).__module__.startswith("torch.")
    module = (
        getattr(target, "__module__", None)
        or getattr(getattr(target, "__self__", None), "__name__", "")
        or ""
    )
    return (
        isinstance(target, _torch.OpOverload)
        or module in ("_operator", "builtins")
        or module.split(".")[0] == "torch"
    )


# --- functions that are run instead of a target --------------------------------------------------------------------


def item_call(target: Callable[..., object]) -> Callable[..., object]:
    """`x[i]` with a data-dependent index in a tensor: eager reads it. The metadata is the same for every index."""

    def call(values: object, item: object, *rest: object) -> Any:
        is_tensor = type(values) is FakeTensor
        return target(values, _replace_unknown_index(item) if is_tensor else item, *rest)

    return call


def _replace_unknown_index(item: object) -> Any:
    if type(item) is tuple:
        return tuple(map(_replace_unknown_index, item))
    if type(item) is FakeTensor and item.ndim == 0 and item.fake_mode.value_of(item) is None:
        is_index = not item.is_floating_point() and item.dtype not in (torch.bool, torch.uint8)
        return 0 if is_index else item
    return item


CALLS: dict[Any, Callable[..., Any]] = {
    target: item_call(target) for target in (operator.getitem, operator.setitem)
}
"""Functions that are run on stand-ins instead of a target."""


def run_on_metadata(kind: str, target: Any, args: Any, kwargs: Any, root: torch.nn.Module) -> Any:
    """The result of a call of a graph that is built by hand: proxies are replaced by their metadata, and tensors of the
    root by tensors on the meta device."""

    def meta_of(value: Any) -> Any:
        if not isinstance(value, Proxy):
            return value
        meta = meta_of_proxy(value)
        if meta is UNKNOWN:
            raise MetadataUnknown(
                f"the metadata of {value} is unknown; set it with install_tensor_meta(example)"
            )
        return meta

    args, kwargs = map_aggregate(args, meta_of), map_aggregate(kwargs, meta_of)
    if kind == "get_attr":
        return functools.reduce(getattr, target.split("."), root).to("meta")
    if kind == "call_module":
        module = root.get_submodule(target)
        override = find_override(type(module))
        return module(*args, **kwargs) if override is None else override(module, *args, **kwargs)
    override = find_override(target)
    if override is not None:
        return override(*args, **kwargs)
    return (method_call(target) if kind == "call_method" else target)(*args, **kwargs)


@functools.cache
def method_call(name: str) -> Callable[..., object]:
    def call(self: object, *args: object, **kwargs: object) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return call
