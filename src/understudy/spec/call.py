"""A call of an operator and its outcomes, without tensors.

    outcome  = New(spec)          a tensor with a storage of its own
             | View(of, spec)     a tensor on the storage of input `of`
             | Same(of)           input `of` itself (written in place, or passed through)
             | Same(of, spec)     input `of` itself, whose metadata the call has changed to `spec`
             | Changed((Same, …)) nothing: these inputs themselves, written in place
             | Value(value)       a number, None, or any other value that is not a tensor
    outcomes = outcome            the call returns one thing
             | [outcome, …]       the call returns a list of tensors
             | (outcomes, …)      the call returns several things

`of` counts the tensor inputs of the call in the order in which they are written:
positional arguments first, lists flattened, then keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Union

import torch

from understudy._torch import Device, OpOverload, argument_names
from understudy.spec.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class New:
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class View:
    of: int
    spec: TensorSpec
    is_linked: bool = field(default=True, repr=False)
    """False: to C++ it is another tensor on the same memory, made for inference where inference mode is enabled."""


@dataclass(frozen=True, slots=True)
class Same:
    of: int
    spec: TensorSpec | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    inputs: tuple[Same, ...]


@dataclass(frozen=True, slots=True)
class Value:
    value: Any


Outcome = Union[New, View, Same, Changed, Value]
Outcomes = Union[Outcome, "list[Outcome]", "tuple[Any, ...]"]


def normal(answer: object) -> Outcomes:
    """Normalise the answer of a rule: bare specs become `New`, other bare values `Value`."""
    if isinstance(answer, TensorSpec):
        return New(answer)
    if isinstance(answer, (New, View, Same, Changed, Value)):
        return answer
    if isinstance(answer, tuple):
        return tuple(normal(part) for part in answer)
    if isinstance(answer, list):
        parts: list[Any] = [normal(part) for part in answer]
        return parts
    return Value(answer)


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and its arguments, each tensor replaced by its spec; `inputs` are these specs, in order."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    leaves: tuple[tuple[bool, bool], ...] = field(default=(), compare=False, repr=False)
    """For operators of the program, whose registered fakes may ask: requires_grad of each input, and whether it is a
    parameter."""

    @staticmethod
    def of(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, Any]) -> Call:
        return Call(op, args, kwargs, tuple(flat(TensorSpec, args, kwargs)))

    def on(self, device: torch.device) -> Call:
        """This call with all its tensors on one device."""
        devices = {*flat(Device, self.args, self.kwargs), *(spec.device for spec in self.inputs)}
        if devices <= {device}:
            return self
        args, kwargs = map_structure(lambda spec: spec.on(device), TensorSpec, (self.args, self.kwargs))
        return Call.of(self.op, *map_structure(lambda _: device, Device, (args, kwargs)))

    def argument_of(self, position: int) -> str:
        """The name of the argument that holds the input of this position."""
        names = argument_names(self.op)
        seen = 0
        for name, value in [*zip(names, self.args, strict=False), *self.kwargs.items()]:
            count = len(flat(TensorSpec, (value,), {}))
            if position < seen + count:
                return f"{name}[{position - seen}]" if isinstance(value, (list, tuple)) else name
            seen += count
        return f"input {position}"

    def __str__(self) -> str:
        return f"{self.op}({describe(self.args, self.kwargs)})"


def flat(kind: type | tuple[type, ...], args: Iterable[object], kwargs: dict[str, object]) -> list[Any]:
    """All objects of this kind in the arguments, with lists, tuples and dicts flattened, in order."""
    found: list[Any] = []
    _collect(kind, args, found)
    if kwargs:
        _collect(kind, kwargs.values(), found)
    return found


def _collect(kind: type | tuple[type, ...], values: Iterable[Any], found: list[object]) -> None:
    for value in values:
        own = type(value)  # `isinstance` asks a stand-in for the class that it claims
        if issubclass(own, kind):
            found.append(value)
        elif issubclass(own, (list, tuple)):
            _collect(kind, value, found)
        elif issubclass(own, dict):
            _collect(kind, value.values(), found)


def flat_exact(kind: type, args: Iterable[Any], kwargs: dict[str, object]) -> list[Any]:
    """As `flat`, without subclasses: on the hot path, where `isinstance` of a tensor class costs for every plain number."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        value_kind = type(value)
        if value_kind is kind:
            found.append(value)
        elif value_kind is list or value_kind is tuple:
            found += flat_exact(kind, value, {})
    return found


NUMBER_TYPES = frozenset({int, bool, float, complex})


def flat_numbers(values: Iterable[Any]) -> list[Any]:
    """The plain numbers among arguments, with lists flattened, in order."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in NUMBER_TYPES:
            found.append(value)
        elif kind is list or kind is tuple:
            found += flat_numbers(value)
    return found


def map_structure(convert: Callable[[Any], Any], kind: type | tuple[type, ...], value: object) -> Any:
    """The same structure with every object of this kind converted."""
    if isinstance(value, kind):
        return convert(value)
    if type(value) is tuple:
        return tuple([map_structure(convert, kind, part) for part in value])
    if type(value) is list:
        return [map_structure(convert, kind, part) for part in value]
    if type(value) is dict:
        return {name: map_structure(convert, kind, part) for name, part in value.items()}
    return value


def describe(args: Iterable[object], kwargs: dict[str, object], limit: int = 600) -> str:
    parts = [_short(a) for a in args] + [f"{name}={_short(a)}" for name, a in kwargs.items()]
    text = ", ".join(parts)
    return text if len(text) <= limit else text[:limit] + " …"


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)):
        shown = [_short(part) for part in value[:6]]
        if len(value) > 6:
            shown.append(f"… {len(value)} in all")
        return f"[{', '.join(shown)}]"
    return str(value) if isinstance(value, TensorSpec) else repr(value)
