"""Metadata that the user knows better: a function or a type of module, and the function that says what it gives.

    @manual_meta_overrides.register(my_kernel)      # or: manual_meta_overrides[my_kernel] = …
    def _(x, weight):
        return x.new_empty(x.shape[0], weight.shape[1])

The function gets stand-ins in the place of tensors (and the module first, for a type of module) and gives stand-ins.
The table is empty at first: everything that torch has is derived by running it on stand-ins.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from understudy import _torch
from understudy.contexts import GuardedExit, guard_exit
from understudy.errors import OperatorError, UnderstudyError
from understudy.fake.inputs import describe_tensors
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_frames, user_line
from understudy.meta.errors import MetaTraceError
from understudy.meta.modules import modules_in_python
from understudy.meta.proxies import ATOMS, UNKNOWN, DeviceOf, MetaProxy, read_own
from understudy.meta.structures import holds, transform

Override = Callable[..., Any]


class MetaOverrides(dict[Any, Override]):
    """function or type of module → what it gives, in stand-ins. A plain dict, with a decorator."""

    def register(self, target: object) -> Callable[[Override], Override]:
        def remember(override: Override) -> Override:
            self[target] = override
            return override

        return remember

    def for_module(self, module: object) -> Override | None:
        """The override of the most special class of this module."""
        return next((self[kind] for kind in type(module).__mro__ if kind in self), None)


manual_meta_overrides = MetaOverrides()


# --- Overrides that torch's module has by name. None is needed; they may be registered for functions and modules of yours
# that give the same ---


def embedding_override(self: torch.nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    """What a table of vectors gives: a row for each index."""
    return input.new_empty((*input.shape, self.weight.shape[-1]), dtype=self.weight.dtype)


def nn_layernorm_override(self: torch.nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """What a normalisation gives: a tensor like its input."""
    return torch.empty_like(input)


def torch_relu_override(x: torch.Tensor) -> torch.Tensor:
    """What `torch.relu` gives."""
    return torch.relu(x)


def torch_nn_relu_override(self: torch.nn.ReLU, x: torch.Tensor) -> torch.Tensor:
    """What a module of `torch.nn.ReLU` gives."""
    return torch.nn.functional.relu(x, inplace=self.inplace)


def functional_relu_override(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """What `torch.nn.functional.relu` gives."""
    return torch.nn.functional.relu(x, inplace=inplace)


def torch_where_override(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What `torch.where` gives."""
    return torch.where(condition, x, y)


def torch_abs_override(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """What `torch.abs` gives."""
    return torch.abs(input, out=out)


# --- What a recorded call gives: the same call, run on stand-ins --------------------------------------------
# Three ways it can end: with metadata; with an error, because real tensors would be refused as well; or with `UNKNOWN`,
# because it can't be known without data. The last are collected, and told in one warning when the trace is over.

SHOWN = 5
"""How many of the calls that could not be derived are shown in the warning."""


READABLE = 16
"""Up to how many numbers of a constant are known: a program may decide by a flag that is a buffer."""


class MetadataUnknown(Exception):
    """A call has a value among its arguments of which nothing is known."""


class RefusedCall(Exception):
    """A call that real tensors would refuse as well. The error itself is the cause."""

    def __init__(self, error: Exception, inputs: tuple[object, object]) -> None:
        super().__init__(str(error))
        self.error = error
        self.inputs = inputs


@dataclass(frozen=True)
class UnderivableCall:
    """A call whose result could not be derived, and why."""

    call: str
    line: str
    why: str

    def __str__(self) -> str:
        return f"  called:  {self.call}\n  at:      {self.line}\n  why:     {self.why}"


def proxys_to_metas(v: Any) -> Any:
    """What is known of a value of a trace: its stand-in, or the device that it is. Anything else as it is."""
    if type(v) is DeviceOf:
        v = v._attribute
    if not issubclass(type(v), (torch.fx.Proxy, MetaProxy)):
        return v
    if not issubclass(type(v), MetaProxy):
        raise MetaTraceError(f"a value of a MetaTracer is expected, and {v} is a {type(v).__name__}")
    if v._meta is UNKNOWN:
        raise MetaTraceError(f"nothing is known of {v}: say what it is with install_tensor_meta(example)")
    return v._meta


class SuspendedRecording:
    """A region in which calls of torch are not recorded, inside a fake mode if one is given."""

    __slots__ = ("_derivation", "_entry", "_mode", "_taken")

    def __init__(self, derivation: Derivation, mode: FakeTensorMode | None) -> None:
        self._derivation = derivation
        self._mode = mode
        self._entry: Any = None
        self._taken: list[Any] | None = None

    def __enter__(self) -> None:
        derivation = self._derivation
        guard_exit(self, self._leave)
        if not derivation.is_active:
            self._taken = _torch.function_modes_from(derivation.recording)
            derivation.is_active = True
            _torch.pop_function_modes(len(self._taken))
        if self._mode is not None:
            self._entry = _torch.FakeModeEntry(self._mode)
            self._entry.enter(self._mode.patch_scopes)

    @GuardedExit
    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._entry is not None:
            self._entry.leave()
            self._entry = None
        if self._taken is not None:
            _torch.push_function_modes(self._taken)
            self._derivation.is_active = False
            self._taken = None


class Derivation:
    """Runs calls on metadata, for one trace."""

    def __init__(self, mode: FakeTensorMode, recording: object) -> None:
        self.mode = mode
        self.recording = recording
        self.is_active = False
        self.underivable: list[UnderivableCall] = []
        self._made: dict[int, Any] = {}
        self._found: dict[int, tuple[torch.Tensor, int]] = {}

    # --- from values to metadata -----------------------------------------------------------------------------

    def meta_of(self, value: Any) -> Any:
        """The arguments of a call with stand-ins in the place of values of the trace and of real tensors."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is tuple:
            return tuple([self.meta_of(part) for part in value])
        if isinstance(value, MetaProxy):
            meta = read_own(value, "_meta")
            if meta is UNKNOWN:
                raise MetadataUnknown
            return meta
        if kind is dict:
            parts = {key: self.meta_of(part) for key, part in value.items()}
            return parts if any(parts[key] is not value[key] for key in value) else value
        return transform(value, self._meta_of_leaf, _is_of_a_trace)

    def find_meta(self, value: object) -> Any:
        """The metadata of a structure of values; `UNKNOWN` if nothing is known of one of them."""
        try:
            return self.meta_of(value)
        except MetadataUnknown:
            return UNKNOWN

    def _meta_of_leaf(self, leaf: Any, path: object) -> Any:
        if type(leaf) is DeviceOf:
            leaf = leaf._attribute
            if leaf._meta is UNKNOWN:
                raise MetadataUnknown
            return leaf._meta
        if isinstance(leaf, MetaProxy):
            if leaf._meta is UNKNOWN:
                raise MetadataUnknown
            return leaf._meta
        return self.stand_in(leaf)

    def stand_in(self, tensor: torch.Tensor) -> Any:
        if type(tensor) is FakeTensor and tensor.fake_mode is self.mode:
            return tensor
        found = self._made.get(id(tensor))
        if found is not None:
            return found
        with self.suspend_recording():
            made = self.mode.from_tensor(tensor, static_shapes=True)
            if (
                tensor.numel() <= READABLE
                and not isinstance(tensor, torch.nn.Parameter)
                and tensor.device.type == "cpu"
            ):
                with _torch.no_modes():
                    self.mode.remember_literal(made, tensor.detach().clone())
        self._made[id(tensor)] = made
        self._found[id(tensor)] = (tensor, made._version)
        return made

    def find_stand_in(self, tensor: torch.Tensor) -> Any:
        """The stand-in of a tensor that is there, None if it has none."""
        return self._made.get(id(tensor))

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether the program has written to a tensor that is there: what is in it is not what the program would see."""
        made = self._made.get(id(tensor))
        return made is not None and made._version != self._found[id(tensor)][1]

    # --- running ---------------------------------------------------------------------------------------------

    def suspend_recording(self) -> SuspendedRecording:
        """Nothing that happens in here is part of the program."""
        return SuspendedRecording(self, None)

    def enter_mode(self) -> SuspendedRecording:
        """What happens in here happens to stand-ins, and is no part of the program."""
        return SuspendedRecording(self, self.mode)

    def run(self, call: Callable[..., object], name: str, args: object, kwargs: object, is_torchs: bool = True) -> Any:
        """The result of a call on metadata, or `UNKNOWN`. `is_torchs`: what it refuses, real tensors are refused, too."""
        try:
            inputs = (self.meta_of(args), self.meta_of(kwargs))
        except MetadataUnknown:
            return UNKNOWN
        try:
            with self.enter_mode():
                result = call(*inputs[0], **inputs[1])
        except OperatorError as error:
            raise RefusedCall(error, inputs) from error
        except UnderstudyError as error:
            return self._unknown(name, inputs, error.reason)
        except Exception as error:
            if is_torchs:
                raise RefusedCall(error, inputs) from error
            return self._unknown(name, inputs, f"{type(error).__name__}: {error}")
        return self._convert_real_tensors(result)

    def _convert_real_tensors(self, result: object) -> Any:
        if type(result) is FakeTensor or not holds(result, _is_real):
            return result
        return transform(result, lambda tensor, path: self.stand_in(tensor), _is_real)

    def _unknown(self, name: str, inputs: tuple[object, object], why: str) -> Any:
        call = f"{name}({describe_tensors(*inputs)})"
        self.underivable.append(
            UnderivableCall(call, user_line(), why.splitlines()[0] if why else "no reason was given")
        )
        return UNKNOWN

    # --- the one warning ---------------------------------------------------------------------------------------

    def warn(self) -> None:
        found, self.underivable = self.underivable, []
        if not found:
            return
        count = len(found)
        calls, them = ("one call", "it") if count == 1 else (f"{count} calls", "them")
        shown = "\n".join(map(str, found[:SHOWN]))
        more = f"\n  … and {count - SHOWN} more" if count > SHOWN else ""
        message = (
            f"the metadata of {calls} could not be derived; what follows from {them} has none\n{shown}{more}\n"
            "  to do:   say what it gives in understudy.manual_meta_overrides"
        )
        frame = next(user_frames(), None)
        place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("understudy", 0)
        warnings.warn_explicit(message, UserWarning, *place)


def _is_of_a_trace(value: object) -> bool:
    return isinstance(value, (torch.Tensor, MetaProxy)) or type(value) is DeviceOf


def _is_real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not FakeTensor


# --- which function a node calls on metadata -------------------------------------------------------------------------


def override_for(target: object) -> Any:
    try:
        return manual_meta_overrides.get(target)
    except TypeError:  # not hashable
        return None


def item_call(target: Callable[..., object]) -> Callable[..., object]:
    """`x[i]` with an index in a tensor whose value is data: eager reads it, and selects. Any index selects alike."""

    def call(values: object, item: object, *rest: object) -> Any:
        is_tensor = type(values) is FakeTensor
        return target(values, _with_any_index(item) if is_tensor else item, *rest)

    return call


def _with_any_index(item: object) -> Any:
    if type(item) is tuple:
        return tuple(map(_with_any_index, item))
    if type(item) is FakeTensor and item.ndim == 0 and item.fake_mode.value_of(item) is None:
        is_index = not item.is_floating_point() and item.dtype not in (torch.bool, torch.uint8)
        return 0 if is_index else item
    return item


def length(values: Any) -> Any:
    """`len`, where that is a node: Python wants a number of it, which a symbolic size is not."""
    return values.shape[0] if isinstance(values, torch.Tensor) and values.ndim else len(values)


CALLS: dict[Any, Callable[..., Any]] = {
    **{target: item_call(target) for target in (operator.getitem, operator.setitem)},
    len: length,
}
"""What is run on metadata in the place of a target."""


def method_call(name: str) -> Callable[..., object]:
    def call(self: object, *args: object, **kwargs: object) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return call


def module_call(module: torch.nn.Module, forward: Callable[..., object]) -> Callable[..., object]:
    """The module's own forward; what it assigns to itself meanwhile is taken back."""
    override = manual_meta_overrides.for_module(module)

    def call(*args: object, **kwargs: object) -> Any:
        if override is not None:
            return override(module, *args, **kwargs)
        before = [(inner, dict(inner._buffers), dict(inner.__dict__)) for inner in modules_in_python(module)]
        try:
            return forward(*args, **kwargs)
        finally:
            for inner, buffers, state in before:
                _restore(inner._buffers, buffers)
                _restore(inner.__dict__, state)

    return call


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        if now.get(name) is not value:
            now[name] = value
