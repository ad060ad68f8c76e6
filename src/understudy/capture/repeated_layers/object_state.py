"""The state of objects: compared before and after a run of a layer, and between layers."""

from __future__ import annotations

import contextvars
import functools
import logging
import pathlib
import re
import subprocess
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from understudy.capture.repeated_layers.reachable_code import functions_of
from understudy.graph.borrowed_state import cell_contents

COMPARED = frozenset(
    {int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types whose values are compared by equality."""
LARGEST = 4000
"""The largest number of objects that are read for one layer."""
UNCHANGING = (
    types.ModuleType, property, staticmethod, classmethod,
    re.Pattern, range, slice, type(...), type(NotImplemented), torch.finfo, torch.iinfo, types.GenericAlias,
    types.UnionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
"""Types whose objects are compared by identity, because a forward does not change their state."""
WITH_STATE_OUTSIDE = (pathlib.Path, subprocess.Popen, threading.Thread, type(threading.RLock()))
"""Types whose methods depend on files, processes and threads."""
OPERATORS = ("torch._ops", "torch._C")
"""Modules whose objects get attributes from torch itself when they are used."""
NAMED_LIBRARIES = ("torch", "typing", "understudy")
UNCHANGING_OF_NUMPY = frozenset({"generic", "ufunc", "dtype"})
EMPTY: Mapping[str, Any] = types.MappingProxyType({})
CACHED = type(functools.lru_cache(len))


def comparable(kind: type, value: Any) -> tuple[type, Any]:
    """A plain value with its type, as it is compared: 0.0 == -0.0."""
    return kind, (value if value or kind is not float else repr(value))


class NotComparable(Exception):
    """A module, an argument or a recording that can't be compared."""


class ObjectStates:
    """Reads the states of objects, each once."""

    def __init__(self, readers: StateReaders, block: type) -> None:
        self.block = block
        self.held: list[Any] = []
        """Objects that are compared by id(): kept alive, so that the id is not reused."""
        self.functions: dict[int, Any] = {}
        """The functions, and the classes of objects, that were visited."""
        self.calls: dict[int, int] = {}
        """For cached functions: the number of calls."""
        self._readers = readers
        self._found: dict[int, Any] = {}
        self._left = LARGEST

    def state(self, value: object) -> Any:
        """The identity of an object and its current state, recursively."""
        kind = value.__class__
        if kind in COMPARED:
            return comparable(kind, value)
        identity = id(value)
        if kind is dict and not value:  # as the `__dict__` of most functions
            self.held.append(value)
            return identity
        found = self._found.get(identity)
        if found is None:
            self.held.append(value)
            self._found[identity] = identity  # for cycles
            read = self._readers.of(kind)
            found = identity if read is None else (identity, *self._parts(read(self, value)))
            self._found[identity] = found
        return found

    def _parts(self, parts: Sequence[object]) -> list[object]:
        """The states of the parts. Parts are compared by identity, and containers also by their contents."""
        self.held.append(parts)
        self._left -= len(parts)
        if self._left < 0:
            raise NotComparable
        return [*map(id, parts), *[self.state(part) for part in parts if part.__class__ not in COMPARED]]

    def same(self, value: object) -> Any:
        """One object for all equal values, for values that were made for the comparison."""
        return self._readers.values.setdefault(value, value)

    def contents(self, value: object) -> Any:
        """The state of a global of an installed package, one level deep."""
        kind = value.__class__
        if kind in COMPARED:
            return comparable(kind, value)
        parts = (
            [value, *value.values()]
            if isinstance(value, dict)
            else [value, *getattr(value, "__dict__", EMPTY).values()]
        )
        self.held.append(parts)
        return tuple(map(id, parts))


Reader = Callable[[ObjectStates, Any], Sequence[Any]]


class StateReaders:
    """The reader of each type, None for types without state. Memoised for one trace."""

    def __init__(self) -> None:
        self._readers: dict[type, Reader | None] = dict(READERS)
        self.values: dict[Any, Any] = {}

    def of(self, kind: type) -> Reader | None:
        try:
            return self._readers[kind]
        except KeyError:
            reader = self._readers[kind] = _reader_of(kind)
            return reader


# --- readers ----------------------------------------------------------------------------------------------------------


def _of_dict(states: ObjectStates, value: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(value), *dict.values(value)]


def _of_sequence(states: ObjectStates, value: Iterable[object]) -> Sequence[object]:
    return list(value)


def _of_partial(states: ObjectStates, value: functools.partial[object]) -> Sequence[object]:
    return value.func, *value.args, *value.keywords, *value.keywords.values()


def _of_method(states: ObjectStates, value: types.MethodType) -> Sequence[object]:
    return value.__func__, value.__self__


def _of_function(states: ObjectStates, value: object) -> Sequence[object]:
    states.functions[id(value)] = value
    return ()


def _of_builtin(states: ObjectStates, value: Any) -> Sequence[object]:
    states.functions[id(value)] = value
    owner = value.__self__
    return () if owner is None or isinstance(owner, types.ModuleType) else (owner,)


def _of_cached(states: ObjectStates, value: Any) -> Sequence[object]:
    for function in functions_of(value):
        states.functions[id(function)] = function
    hits, misses, _, size = value.cache_info()
    if value.__wrapped__.__code__.co_argcount if hasattr(value.__wrapped__, "__code__") else True:
        states.calls[id(value)] = hits + misses
    return states.same(misses), states.same(size)


def _of_tensor(states: ObjectStates, value: torch.Tensor) -> Sequence[object]:
    return (states.same(0 if value.is_inference() else value._version),)


def _of_variable(states: ObjectStates, value: contextvars.ContextVar[object]) -> Sequence[object]:
    return (value.get(None),)


def _of_reference(states: ObjectStates, value: weakref.ref[object]) -> Sequence[object]:
    return (value(),)


def _of_cell(states: ObjectStates, value: types.CellType) -> Sequence[object]:
    return (cell_contents(value),)


def _of_module(states: ObjectStates, value: torch.nn.Module) -> Sequence[object]:
    """A shared module without submodules, such as an activation. Others raise: a layer may compare itself with them."""
    if value._parameters or value._buffers or value._modules or type(value) is states.block:
        raise NotComparable
    states.functions[id(type(value))] = type(value)
    return _of_dict(states, vars(value))


def _of_plain_attributes(states: ObjectStates, value: object) -> Sequence[object]:
    """The plain attributes of an object of torch, which a program may have set."""
    items = [*vars(value).items()]
    plain = [part for _, part in items if type(part) in COMPARED]
    return [*(name for name, _ in items), *map(states.same, [comparable(type(part), part) for part in plain])]


def _of_logger(states: ObjectStates, value: logging.Logger) -> Sequence[object]:
    """The levels of a logger and its parents. Filters and handlers affect only the output."""
    levels: list[Any] = [states.same(value.manager.disable), value.disabled]
    logger: logging.Logger | None = value
    while logger is not None:
        levels.append(states.same(logger.level))
        logger = logger.parent
    return levels


def _of_lock(states: ObjectStates, value: Any) -> Sequence[object]:
    return (value.locked(),)


def _refuse_to_read(states: ObjectStates, value: object) -> Sequence[object]:
    raise NotComparable


READERS: dict[type, Reader | None] = {
    dict: _of_dict,
    OrderedDict: _of_dict,
    defaultdict: _of_dict,
    list: _of_sequence,
    tuple: _of_sequence,
    set: _of_sequence,
    frozenset: _of_sequence,
    deque: _of_sequence,
    torch.Size: _of_sequence,
    functools.partial: _of_partial,
    types.MethodType: _of_method,
    types.FunctionType: _of_function,
    types.BuiltinFunctionType: _of_builtin,
    types.MethodWrapperType: lambda states, value: (value.__self__,),
    types.CellType: _of_cell,
    types.MappingProxyType: lambda states, value: [*value.keys(), *value.values()],
    bytearray: lambda states, value: (states.same(bytes(value)),),
    contextvars.ContextVar: _of_variable,
    weakref.ReferenceType: _of_reference,
    torch.Generator: _refuse_to_read,
    type(threading.Lock()): _of_lock,
    CACHED: _of_cached,
}
BASES: dict[type, Reader] = {
    OrderedDict: _of_dict,
    defaultdict: _of_dict,
    dict: _of_dict,
    list: lambda states, value: list(list.__iter__(value)),
    tuple: lambda states, value: list(tuple.__iter__(value)),
    set: lambda states, value: list(set.__iter__(value)),
    frozenset: lambda states, value: list(frozenset.__iter__(value)),
    deque: lambda states, value: list(deque.__iter__(value)),
    str: lambda states, value: (states.same(str.__str__(value)),),
    int: lambda states, value: (states.same(int.__int__(value)),),
    float: lambda states, value: (states.same(float.__float__(value)),),
}
"""Readers for objects of subclasses of these."""


def _reader_of(kind: type) -> Reader | None:
    if issubclass(kind, torch.nn.Module):
        return _of_module
    if issubclass(kind, torch.Tensor):
        return _of_tensor
    if issubclass(kind, type):
        return _of_function
    if issubclass(kind, logging.Logger):
        return _of_logger
    if issubclass(kind, WITH_STATE_OUTSIDE):
        return _refuse_to_read
    if issubclass(kind, UNCHANGING) or _is_a_number(kind):
        return None
    if kind.__module__.partition(".")[0] in NAMED_LIBRARIES:
        has_attributes = kind.__dictoffset__ != 0 and kind.__module__ not in OPERATORS
        return _of_plain_attributes if has_attributes else None
    base = next((base for base in BASES if issubclass(kind, base)), object)
    slots = _slots_of(kind)
    if kind.__basicsize__ > _size_without_attributes(kind, base, len(slots)):
        return _refuse_to_read
    contents = BASES.get(base)

    def read(states: ObjectStates, value: object) -> list[Any]:
        states.functions[id(kind)] = kind
        parts = [] if contents is None else list(contents(states, value))
        parts += [getattr(value, name, None) for name in slots]
        attributes = getattr(value, "__dict__", None)
        return parts if attributes is None else [*parts, *_of_dict(states, attributes)]

    return read


def _is_a_number(kind: type) -> bool:
    """Whether it is a number or function of numpy, which are immutable."""
    return kind.__module__ == "numpy" and not UNCHANGING_OF_NUMPY.isdisjoint(
        base.__name__ for base in kind.__mro__
    )


def _slots_of(kind: type) -> list[str]:
    return [
        name
        for owner in kind.__mro__
        for name, value in vars(owner).items()
        if isinstance(value, types.MemberDescriptorType)
    ]


def _size_without_attributes(kind: type, base: type, slots: int) -> int:
    """The size of an object without hidden C state: a larger object has state that Python can't read."""
    pointer = object.__basicsize__ // 2
    return base.__basicsize__ + pointer * (slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0))
