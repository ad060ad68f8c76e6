"""State that is borrowed while a graph is recorded, and given back whatever happens.

    no_collection    Python's garbage collector, paused
    BorrowedState    modules hold stand-ins in the place of their tensors, and afterwards what they held before
"""

from __future__ import annotations

import copy
import gc
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from understudy.contexts import contextmanager, to_the_end
from understudy.errors import UnderstudyError
from understudy.fake.convert import PLAIN_TYPES
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.fake.torch_api import is_fake


class SharedPause:
    """Lasts until the last of those who want it so, in any thread, is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: set[object] = set()
        self._was_enabled = False

    def begin(self, wish: object) -> None:
        with self._lock:
            if not self._wanted:
                self._was_enabled = gc.isenabled()
            self._wanted.add(wish)
            gc.disable()

    def end(self, wish: object) -> None:
        with self._lock:
            if self._wanted == {wish} and self._was_enabled:
                gc.enable()
            self._wanted.discard(wish)


_PAUSE = SharedPause()


@contextmanager
def no_collection() -> Iterator[None]:
    wish = object()
    with to_the_end(lambda: _PAUSE.end(wish)):
        _PAUSE.begin(wish)
        yield


# --- The tensors of a module, replaced by stand-ins for the time of a run -----------------------------------

TABLES = ("_parameters", "_buffers")
EVERY_MODULE_HAS = vars(torch.nn.Module())
NO_TENSORS = frozenset({bool, int, float, str, dict, set, list, tuple, type(None), OrderedDict})
"""What most attributes of a module are: told by their type at a tenth of what `isinstance` costs."""


CONTAINERS = frozenset({dict, list, OrderedDict})
"""In which modules keep what they have computed."""
DEEPEST = 3
"""How far into them others are looked for."""


def own_containers(module: torch.nn.Module) -> list[Any]:
    """The dicts and lists that a module has for attributes, besides those that every module has."""
    attributes = vars(module)
    return [value for name, value in attributes.items() if type(value) in CONTAINERS and name not in EVERY_MODULE_HAS]


def containers_in(values: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """The dicts and lists among these values, and those in them."""
    for value in values:
        if type(value) in CONTAINERS and depth < DEEPEST:
            yield value
            yield from containers_in(value.values() if isinstance(value, dict) else value, depth + 1)


def values_in(container: Any, depth: int = 0) -> Iterator[object]:
    """The values in a dict or a list, and in lists, tuples and dicts among them."""
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, (list, tuple, dict)) and depth < DEEPEST:
            yield from values_in(value, depth + 1)
        else:
            yield value


def refuse_cycles(value: object, around: tuple[object, ...] = (), path: str = "the inputs") -> None:
    """An error that names a list, tuple or dict which contains itself; nothing if there is none."""
    if not isinstance(value, (list, tuple, dict)):
        return
    if any(value is outer for outer in around):
        raise ValueError(
            f"{path} is the {type(value).__name__} in which it is: inputs that contain themselves are no tree, and no graph "
            "can name their parts"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        refuse_cycles(part, (*around, value), f"{path}[{key!r}]")


def named_parts(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """`module.named_modules()`, without a generator in a generator for each level."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    _add_parts("", module, found)
    return list(found.values())


def _add_parts(path: str, part: torch.nn.Module, found: dict[int, tuple[str, torch.nn.Module]]) -> None:
    found[id(part)] = path, part
    inner_parts = part._modules
    if inner_parts:
        prefix = f"{path}." if path else ""
        for name, inner in inner_parts.items():
            if inner is not None and id(inner) not in found:
                _add_parts(prefix + name, inner, found)


def parts_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """`module.modules()`, as a list: the module itself comes first."""
    return [part for _, part in named_parts(module)]


class ModuleOwner:
    """Which thread has put stand-ins into a module. Another thread that wants to, waits: it would take the stand-ins
    for the module's own tensors."""

    LONGEST_WAIT = 60.0

    def __init__(self) -> None:
        self._thread_of: dict[torch.nn.Module, int] = {}
        self._changed = threading.Condition()

    def take(self, modules: list[torch.nn.Module]) -> None:
        me = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: self._are_free(modules, me), self.LONGEST_WAIT):
                name = type(modules[0]).__name__
                raise UnderstudyError(
                    f"{name}: another thread has been tracing this module for a minute: trace a copy of it"
                )
            self._thread_of.update(dict.fromkeys(modules, me))

    def _are_free(self, modules: list[torch.nn.Module], me: int) -> bool:
        return all(self._thread_of.get(module, me) == me for module in modules)

    def give(self, modules: Iterable[torch.nn.Module]) -> None:
        with self._changed:
            for module in modules:
                self._thread_of.pop(module, None)
            self._changed.notify_all()


LENDING = ModuleOwner()


class BorrowedState:
    """While modules are lent, their parameters, buffers and tensor attributes are stand-ins.

    `give_back` leaves every module as it was, whatever its forward did to it meanwhile.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._allowed_reals = mode.allow_non_fake_inputs
        self._before: dict[torch.nn.Module, dict[str, Any]] = {}
        self._containers: list[tuple[Any, Any]] = []
        """The dicts and lists that modules hold, and what was in them."""
        self._taken: list[torch.nn.Module] = []
        self.replaced: dict[torch.nn.Module, list[tuple[str, torch.Tensor, Any]]] = {}
        """For each module: name, real tensor and stand-in of what it was lent with."""

    def borrow(self, module: torch.nn.Module) -> torch.nn.Module:
        if module not in self._before:
            self.borrow_parts(module)
        return module

    def borrow_parts(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """Lends a module, and gives what it consists of, by names."""
        LENDING.take([module])  # before its parts are looked at: another thread may have replaced some
        self._taken.append(module)
        named = named_parts(module)
        parts = [part for _, part in named if part not in self._before]
        LENDING.take(parts)
        self._taken += parts
        for part in parts:
            self._borrow_one(part)
        return named

    def _borrow_one(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self._keep_one(module)
            return
        attributes = vars(module)
        self._before[module] = attributes.copy()
        if len(attributes) > len(EVERY_MODULE_HAS):
            self._containers += [(value, value.copy()) for value in containers_in(own_containers(module))]
        is_plain = NO_TENSORS.issuperset(map(type, attributes.values()))
        replaced = self.replaced[module] = []
        for name in TABLES:  # the module's own are left alone
            table = attributes[name]
            is_empty = not table and type(table) is dict
            attributes[name] = {} if is_empty else self._make_table(module, table, replaced)
        if is_plain:
            return
        for name, value in list(attributes.items()):
            if type(value) not in NO_TENSORS and isinstance(value, torch.Tensor):
                fake = attributes[name] = self._stand_in(value)
                replaced.append((name, value, fake))

    def _make_table(self, module: torch.nn.Module, table: dict[str, Any], replaced: list[Any]) -> dict[str, Any]:
        """The table for the time in which the module is lent."""
        lent = table.copy() if type(table) is dict else copy.copy(table)
        for name, value in table.items():
            if value is not None:
                fake = lent[name] = self._stand_in(value)
                replaced.append((name, value, fake))
        return lent

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._mode.from_tensor(tensor, static_shapes=True) if self._is_real(tensor) else tensor

    def _keep_one(self, module: torch.nn.Module) -> None:
        """C++ holds what a scripted module computes with, and would not take stand-ins: they are made as it computes."""
        self._mode.allow_non_fake_inputs = True
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        self.replaced[module] = [(name, tensor, tensor) for name, tensor in tensors]

    @staticmethod
    def _is_real(tensor: torch.Tensor) -> bool:
        return type(tensor) in PLAIN_TYPES or not is_fake(tensor)

    def give_back(self) -> None:
        for module, attributes in self._before.items():
            now = vars(module)
            now.clear()
            now.update(attributes)
        for container, contents in self._containers:
            if any(type(value) is FakeTensor and value.fake_mode is self._mode for value in values_in(container)):
                container.clear()
                (container.update if isinstance(container, dict) else container.extend)(contents)
        self._containers.clear()
        self._mode.allow_non_fake_inputs = self._allowed_reals
        self._before.clear()
        self.replaced.clear()
        LENDING.give(self._taken)
        self._taken.clear()
