"""The metadata of results: overrides by the user, and derivation by running calls on stand-ins.

    @manual_meta_overrides.register(my_kernel)      # or: manual_meta_overrides[my_kernel] = …
    def _(x, weight):
        return x.new_empty(x.shape[0], weight.shape[1])

The function gets stand-ins in the place of tensors (and the module first, for a type of module) and returns stand-ins.
The table is empty at first: everything in torch is derived by running it on stand-ins.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from understudy import _torch
from understudy.contexts import Restoring, contextmanager, guard_exit
from understudy.errors import OperatorError, UnderstudyError
from understudy.fake.inputs import describe_tensors
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import MOST_READABLE
from understudy.lines import user_frames, user_line
from understudy.meta.errors import MetaTraceError
from understudy.meta.modules import modules_in_python
from understudy.meta.proxies import ATOMS, UNKNOWN, DeviceOf, MetaProxy, read_own
from understudy.meta.structures import holds, transform

Override = Callable[..., Any]


class MetaOverrides(dict[Any, Override]):
    """Function or type of module → a function that returns its result on stand-ins. A plain dict, with a decorator."""

    def register(self, target: object) -> Callable[[Override], Override]:
        def remember(override: Override) -> Override:
            self[target] = override
            return override

        return remember

    def for_module(self, module: object) -> Override | None:
        """The override of the most derived class of this module."""
        return next((self[kind] for kind in type(module).__mro__ if kind in self), None)


manual_meta_overrides = MetaOverrides()


# --- Overrides under the names of torch's module. None is needed; users may register them for their own functions ---


def embedding_override(self: torch.nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    """The result of an embedding: a row for each index."""
    return input.new_empty((*input.shape, self.weight.shape[-1]), dtype=self.weight.dtype)


def nn_layernorm_override(self: torch.nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """The result of a normalisation: like its input."""
    return torch.empty_like(input)


def torch_relu_override(x: torch.Tensor) -> torch.Tensor:
    """The result of `torch.relu`."""
    return torch.relu(x)


def torch_nn_relu_override(self: torch.nn.ReLU, x: torch.Tensor) -> torch.Tensor:
    """The result of `torch.nn.ReLU`."""
    return torch.nn.functional.relu(x, inplace=self.inplace)


def functional_relu_override(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """The result of `torch.nn.functional.relu`."""
    return torch.nn.functional.relu(x, inplace=inplace)


def torch_where_override(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The result of `torch.where`."""
    return torch.where(condition, x, y)


def torch_abs_override(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The result of `torch.abs`."""
    return torch.abs(input, out=out)


# --- The result of a recorded call, by running it on stand-ins --------------------------------------------
# The outcome is metadata; an error, if real tensors would raise as well; or `UNKNOWN`, if it depends on data. Unknown
# calls are collected, and listed in one warning at the end of the trace.

SHOWN_CALLS = 5
"""How many unknown calls the warning shows."""


class MetadataUnknown(Exception):
    """A call has an argument with unknown metadata."""


class RefusedCall(Exception):
    """A call that raises for real tensors as well. The error itself is the cause."""

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
    """The metadata of a traced value: its stand-in, or its device. Any other value unchanged."""
    if type(v) is DeviceOf:
        v = v._attribute
    if not issubclass(type(v), (torch.fx.Proxy, MetaProxy)):
        return v
    if not issubclass(type(v), MetaProxy):
        raise MetaTraceError(f"a value of a MetaTracer is expected, and {v} is a {type(v).__name__}")
    if v._meta is UNKNOWN:
        raise MetaTraceError(f"nothing is known of {v}: say what it is with install_tensor_meta(example)")
    return v._meta


class SuspendedRecording(Restoring):
    """A region in which torch functions are not recorded. The fake mode can be entered inside; regions may be nested."""

    __slots__ = ("_derivation", "_entry", "_taken")

    def __init__(self, derivation: Derivation) -> None:
        self._derivation = derivation
        self._entry: Any = None
        self._taken: list[Any] | None = None

    def __enter__(self) -> SuspendedRecording:
        derivation = self._derivation
        guard_exit(self, self.restore)
        if not derivation.is_active:
            self._taken = _torch.function_modes_from(derivation.recording)
            derivation.region = self
            _torch.pop_function_modes(len(self._taken))
        return self

    @property
    def is_in_mode(self) -> bool:
        return self._entry is not None

    def enter_mode(self) -> None:
        """From here to `leave_mode`, or to the end of the region, the fake mode is active."""
        mode = self._derivation.mode
        self._entry = _torch.FakeModeEntry(mode)
        self._entry.enter(mode.patch_scopes)

    def leave_mode(self) -> None:
        if self._entry is not None:
            self._entry.leave()
            self._entry = None

    def restore(self) -> None:
        self.leave_mode()
        if self._taken is not None:
            _torch.push_function_modes(self._taken)
            self._derivation.region = None
            self._taken = None


class Derivation:
    """Runs calls on metadata, for one trace."""

    def __init__(self, mode: FakeTensorMode, recording: object) -> None:
        self.mode = mode
        self.recording = recording
        self.region: SuspendedRecording | None = None
        """The outermost region in which nothing is recorded, if the program is in one."""
        self.underivable: list[UnderivableCall] = []
        self._made: dict[int, Any] = {}
        self._found: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def is_active(self) -> bool:
        return self.region is not None

    # --- from values to metadata -----------------------------------------------------------------------------

    def meta_of(self, value: Any) -> Any:
        """The arguments of a call with traced values and real tensors replaced by stand-ins."""
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
        return transform(value, self._meta_of_leaf, _is_traced_value)

    def find_meta(self, value: object) -> Any:
        """The metadata of a structure of values; `UNKNOWN` if one of them is unknown."""
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
                type(tensor) is not FakeTensor  # of another mode: it has no data
                and tensor.numel() <= MOST_READABLE
                and not isinstance(tensor, torch.nn.Parameter)
            ):
                self.mode.fake_tensor_converter.read_values(self.mode, tensor, made)
        self._made[id(tensor)] = made
        self._found[id(tensor)] = (tensor, made._version)
        return made

    def find_stand_in(self, tensor: torch.Tensor) -> Any:
        """The stand-in of a real tensor, None if it has none."""
        return self._made.get(id(tensor))

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether the program has written to a real tensor: its data is then out of date."""
        made = self._made.get(id(tensor))
        return made is not None and made._version != self._found[id(tensor)][1]

    # --- running ---------------------------------------------------------------------------------------------

    def suspend_recording(self) -> SuspendedRecording:
        """Inside, nothing is recorded."""
        return SuspendedRecording(self)

    @contextmanager
    def enter_mode(self) -> Iterator[None]:
        """Inside, the fake mode is active, and nothing is recorded."""
        with self.suspend_recording() as region:
            region.enter_mode()
            yield

    def run(self, call: Callable[..., object], name: str, args: object, kwargs: object, is_torchs: bool = True) -> Any:
        """The result of a call on stand-ins, or `UNKNOWN`. `is_torchs`: an error means that real tensors would raise as
        well."""
        try:
            inputs = (self.meta_of(args), self.meta_of(kwargs))
        except MetadataUnknown:
            return UNKNOWN
        try:
            result = self._call_in_mode(call, *inputs)
        except OperatorError as error:
            raise RefusedCall(error, inputs) from error
        except UnderstudyError as error:
            return self._unknown(name, inputs, error.reason)
        except Exception as error:
            if is_torchs:
                raise RefusedCall(error, inputs) from error
            return self._unknown(name, inputs, f"{type(error).__name__}: {error}")
        return self._convert_real_tensors(result)

    def _call_in_mode(self, call: Callable[..., object], args: Any, kwargs: Any) -> Any:
        region = self.region
        if region is None or region.is_in_mode:
            with self.enter_mode():
                return call(*args, **kwargs)
        try:  # the region of `create_proxy`, which leaves the mode if an interrupt comes in between
            region.enter_mode()
            return call(*args, **kwargs)
        finally:
            region.leave_mode()

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
        shown = "\n".join(map(str, found[:SHOWN_CALLS]))
        more = f"\n  … and {count - SHOWN_CALLS} more" if count > SHOWN_CALLS else ""
        message = (
            f"the metadata of {calls} could not be derived; what follows from {them} has none\n{shown}{more}\n"
            "  to do:   say what it gives in understudy.manual_meta_overrides"
        )
        frame = next(user_frames(), None)
        place = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("understudy", 0)
        warnings.warn_explicit(message, UserWarning, *place)


def _is_traced_value(value: object) -> bool:
    return isinstance(value, (torch.Tensor, MetaProxy)) or type(value) is DeviceOf


def _is_real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not FakeTensor


# --- which function is run on metadata for a target ---------------------------------------------------------------


def override_for(target: object) -> Any:
    try:
        return manual_meta_overrides.get(target)
    except TypeError:  # not hashable
        return None


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


def length(values: Any) -> Any:
    """`len` as a node: Python's `len` can't return a symbolic size."""
    return values.shape[0] if isinstance(values, torch.Tensor) and values.ndim else len(values)


CALLS: dict[Any, Callable[..., Any]] = {
    **{target: item_call(target) for target in (operator.getitem, operator.setitem)},
    len: length,
}
"""Functions that are run on metadata in the place of a target."""


@functools.cache
def method_call(name: str) -> Callable[..., object]:
    def call(self: object, *args: object, **kwargs: object) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return call


def module_call(
    module: torch.nn.Module, forward: Callable[..., object], stand_in: Callable[[torch.Tensor], Any]
) -> Callable[..., object]:
    """The module's own forward; assignments to its attributes are undone."""
    override = manual_meta_overrides.for_module(module)
    if override is not None:
        return functools.partial(override, module)
    modules = modules_in_python(module)
    for inner in modules:  # outside of the mode, where tensors are converted sooner
        for parameter in inner._parameters.values():
            if parameter is not None:
                stand_in(parameter)

    def call(*args: object, **kwargs: object) -> Any:
        before = [(inner, dict(inner._buffers), dict(inner.__dict__)) for inner in modules]
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
