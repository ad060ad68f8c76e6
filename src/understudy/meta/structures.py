"""Structures that contain traced values: dicts, dataclasses, outputs and caches of models.

As an argument of the program, a structure of examples becomes the same structure of traced values. As a result, a
structure of traced values becomes nodes that build it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.fx import Proxy

from understudy.fake.tensor import FakeTensor

Path = tuple[tuple[str, Any], ...]
"""The path of a part: steps ("item", key) and ("attr", name), outermost first."""
OPAQUE = (
    torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType,
    functools.partial, str, bytes, int, float, complex, torch.dtype, torch.device, torch.layout, enum.Enum,
)  # fmt: skip
"""Types that are not searched."""
PLAIN = frozenset({FakeTensor, torch.Tensor, int, float, bool, str, type(None), torch.dtype, torch.device})
DEEPEST = 12
COLLECTIONS = (set, frozenset, deque)
"""Collections that are rebuilt from a list of their parts."""


def parts_of(value: object) -> list[tuple[str, object, object]]:
    """The parts of a structure: the kind of step, the key, and the part."""
    if type(value) in PLAIN or isinstance(value, Proxy):  # the common case, checked first
        return []
    if isinstance(value, dict):
        return [("item", key, part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [("attr", name, getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple, *COLLECTIONS)):
        return [("item", position, part) for position, part in enumerate(value)]
    if isinstance(value, slice):
        return [("attr", name, getattr(value, name)) for name in ("start", "stop", "step")]
    if value is None or isinstance(value, OPAQUE):
        return []
    return [("attr", name, part) for name, part in state_of(value).items()]


def step_target(value: object, how: str, key: object, position: int) -> tuple[Callable[..., object], object]:
    """The function that reads a part of a structure, and its second argument: `value[…]` or `value.…`."""
    if isinstance(value, tuple):
        return operator.getitem, position
    return (operator.getitem, key) if how == "item" else (getattr, key)


def state_of(value: object) -> dict[str, object]:
    """The attributes of an object, including slots."""
    state = getattr(value, "__dict__", None)
    kind: Any = type(value)
    slots = _slots_of(kind)
    if not slots:
        return state if isinstance(state, dict) else {}
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**found, **state} if isinstance(state, dict) else found


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots of a class; classes of torch and of this library are skipped."""
    if kind.__module__.partition(".")[0] in ("torch", "understudy"):
        return ()
    slots = [vars(owner).get("__slots__", ()) for owner in kind.__mro__]
    names = [name for names in slots for name in ((names,) if isinstance(names, str) else names)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def leaves_in(value: object) -> Iterator[object]:
    """The leaves of a structure, each object once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        parts = parts_of(part)
        if not parts:
            yield part
        elif id(part) not in seen:
            seen.add(id(part))
            waiting.extend(inner for _, _, inner in reversed(parts))


def holds(value: object, is_wanted: Callable[[object], bool]) -> bool:
    """Whether a structure contains a leaf for which `is_wanted` is true."""
    return any(is_wanted(leaf) for leaf in leaves_in(value))


def is_stand_in(value: object) -> bool:
    return type(value) is FakeTensor


def transform(
    value: object, change: Callable[[Any, Path], Any], is_wanted: Callable[[Any], bool], path: Path = ()
) -> Any:
    """The same structure with wanted leaves changed. Parts without such leaves are reused."""
    if is_wanted(value):
        return change(value, path)
    if len(path) >= DEEPEST or not holds(value, is_wanted):
        return value
    parts = {
        key: transform(part, change, is_wanted, (*path, (how, key))) for how, key, part in parts_of(value)
    }
    return with_parts(value, parts)


def with_parts(value: object, parts: dict[Any, Any]) -> Any:
    """A structure like this one with these parts."""
    if isinstance(value, dict):
        return type(value)(**parts) if dataclasses.is_dataclass(value) else _dict_like(value, parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(**parts)
    if type(value) in (torch.Size, tuple):
        return tuple(parts.values())
    if isinstance(value, tuple):  # torch's named results have one argument
        return type(value)(tuple(parts.values()))
    if isinstance(value, list):
        return list(parts.values())
    if isinstance(value, deque):
        return type(value)(parts.values(), value.maxlen)
    if isinstance(value, COLLECTIONS):
        return type(value)(parts.values())
    if isinstance(value, slice):
        return slice(parts["start"], parts["stop"], parts["step"])
    return _with_state(type(value), parts)


def _dict_like(value: dict[object, object], parts: dict[object, object]) -> Any:
    if type(value) is dict:
        return parts
    made = value.copy()
    made.update(parts)
    return made


# --- targets of nodes ------------------------------------------------------------------------------------------


def rebuild(kind: str, state: dict[str, object]) -> Any:
    """An object of this class ("package.module:Class") with these attributes."""
    return _with_state(_find_class(kind), state)


def _with_state(cls: Any, state: dict[str, object]) -> Any:
    made = object.__new__(cls)
    for name, part in state.items():
        object.__setattr__(made, name, part)  # the class may override __setattr__, as frozen dataclasses do
    return made


@functools.cache
def _find_class(kind: str) -> Any:
    module, _, name = kind.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def class_name(cls: type) -> str | None:
    """The name with which `rebuild` imports a class; None if it can't, as for local classes."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        return name if _find_class(name) is cls else None
    except (ImportError, AttributeError):
        return None


def find_construction(
    value: Any,
) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]] | None:
    """The call that builds a structure from its parts; None for structures that can be node arguments."""
    kind = type(value)
    if kind in (dict, list, tuple, slice, torch.Size):
        return None
    if isinstance(value, tuple):
        return (kind, tuple(value), {}) if hasattr(value, "_fields") else (kind, (tuple(value),), {})
    if dataclasses.is_dataclass(value):
        if isinstance(value, dict):  # an output of a Hugging Face model: it omits None
            return kind, (), dict(value.items())
        if _is_plain_dataclass(kind):
            return kind, (), {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if kind is OrderedDict:
        return kind, (list(value.items()),), {}
    if isinstance(value, defaultdict):
        return kind, (value.default_factory, dict(value)), {}
    if isinstance(value, deque):
        return kind, (list(value), value.maxlen), {}
    if isinstance(value, COLLECTIONS):
        return kind, (list(value),), {}
    if isinstance(value, (dict, list)):
        return kind, ((dict if isinstance(value, dict) else list)(value),), {}
    name = class_name(kind)
    if name is None:
        raise TypeError(
            f"the program returns a {kind.__qualname__} with traced values in it, whose class can't be imported; define the "
            "class at the top of a module, or return the tensors themselves"
        )
    return rebuild, (name, dict(state_of(value))), {}


def _is_plain_dataclass(kind: Any) -> bool:
    """Whether a dataclass can be rebuilt from its fields: its constructor computes nothing."""
    is_one_itself = "__dataclass_fields__" in vars(kind) and kind.__dataclass_params__.init
    return (
        is_one_itself
        and not hasattr(kind, "__post_init__")
        and all(field.init for field in dataclasses.fields(kind))
    )
