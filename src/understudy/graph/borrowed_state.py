"""State that is changed while a graph is recorded, and always restored.

no_collection     pauses Python's garbage collector
KeptContents      the contents of dicts, lists and objects, restored if they hold values of the trace
BorrowedState     replaces the tensors of modules by stand-ins, and restores them afterwards
"""

from __future__ import annotations

import copy
import functools
import gc
import operator
import sys
import threading
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.fake.convert import PLAIN_TYPES
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.fake.torch_api import is_fake
from understudy.shapes.bindings import statically_known_true


class SharedSwitch:
    """A pause shared by all threads: it lasts until every caller of `begin` has called `end`."""

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


_PAUSE = SharedSwitch()


@contextmanager
def no_collection() -> Iterator[None]:
    wish = object()
    _PAUSE.begin(wish)
    try:
        yield
    finally:
        _PAUSE.end(wish)


# --- The tensors of a module, replaced by stand-ins for the time of a run -----------------------------------

TABLES = ("_parameters", "_buffers")
ScriptModule = torch.jit.ScriptModule
EVERY_MODULE_HAS = vars(torch.nn.Module())
NO_TENSORS = frozenset({bool, int, float, str, dict, set, list, tuple, type(None), OrderedDict})
"""The types of most attributes of a module, which hold no tensors. A set look-up costs a tenth of `isinstance`."""


PLAIN = frozenset({bool, int, float, str, type(None)})
CONTAINERS = frozenset({dict, list, set, OrderedDict})
"""Types in which programs store results."""
Predicate = Callable[[Any], bool]
DEEPEST = 3
"""How many levels of nested containers are searched."""
MOST_ENTRIES = 4096
"""Larger containers are data, as a vocabulary is: to copy them for each trace takes too long."""


@functools.lru_cache(maxsize=4096)
def own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the names that not every module has. The modules of one class have the same names, as a rule."""
    return tuple([name for name in names if name not in EVERY_MODULE_HAS])


def own_containers(module: torch.nn.Module) -> list[Any]:
    """The contents of dicts, lists and objects among the attributes of a module, except those that every module has."""
    attributes = vars(module)
    found = map(contents_of, map(attributes.get, own_names(tuple(attributes))))
    return [contents for contents in found if contents is not None]


def contents_of(value: Any) -> Any:
    """The dict or list in which a container or an object of a program keeps its values, or None."""
    kind = type(value)
    if kind in CONTAINERS:
        return value
    if kind in NO_TENSORS or not kind.__dictoffset__ or isinstance(value, NOT_SEARCHED):
        return None
    top = kind.__module__.partition(".")[0]
    return (
        None
        if top in WITHOUT_STATE or (top in sys.stdlib_module_names and kind not in NAMESPACES)
        else vars(value)
    )


NOT_SEARCHED = (torch.nn.Module, torch.Tensor, type, FunctionType, ModuleType)
WITHOUT_STATE = frozenset({"torch", "numpy", "understudy"})
"""Packages whose objects are not searched for what programs store in them; nor are those of Python's own library."""
NAMESPACES = frozenset({SimpleNamespace, Namespace})
"""Except these."""


class KeptContents:
    """The contents of dicts, lists and objects to which a program may write, as they were before a trace."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()

    def keep(self, values: Iterable[Any], depth: int = 0) -> None:
        """Those among these values, and nested ones."""
        for value in values:
            if type(value) in PLAIN or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            contents = contents_of(value)
            if contents is not None and depth < DEEPEST and len(contents) <= MOST_ENTRIES:
                self._before.append((contents, contents.copy()))
                self.keep(contents.values() if isinstance(contents, dict) else contents, depth + 1)

    def restore(self, is_of_trace: Predicate) -> None:
        """Give those that hold values of a trace their earlier contents."""
        for container, contents in self._before:
            if not _is_same(container, contents) and _holds(container, is_of_trace):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(contents)
        self._before.clear()


def _is_same(container: Any, contents: Any) -> bool:
    """Whether a container holds the same objects as before. Nested containers are compared by themselves."""
    if len(container) != len(contents):
        return False
    if isinstance(container, dict):
        return container.keys() == contents.keys() and all(
            map(operator.is_, container.values(), contents.values())
        )
    return all(map(operator.is_, container, contents))


def _holds(value: Any, is_of_trace: Predicate) -> bool:
    """Whether it is such a value, or has one in it."""
    contents = value if isinstance(value, tuple) else contents_of(value)
    return is_of_trace(value) if contents is None else any(map(is_of_trace, values_in(contents)))


def is_stand_in_of(mode: FakeTensorMode) -> Predicate:
    return lambda value: type(value) is FakeTensor and value.fake_mode is mode


@functools.lru_cache(maxsize=8192)
def names_used_in(code: CodeType) -> frozenset[str]:
    """The names used in the code of a function, including nested functions and comprehensions."""
    return frozenset(code.co_names).union(
        *[names_used_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    )


def cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def unwrap_member(member: object) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def values_in(container: Any, depth: int = 0) -> Iterator[object]:
    """The values in a dict or a list, and in lists, tuples, dicts and objects among them."""
    for value in container.values() if isinstance(container, dict) else container:
        contents = value if isinstance(value, (list, tuple, dict)) else contents_of(value)
        if contents is not None and depth < DEEPEST:
            yield from values_in(contents, depth + 1)
        else:
            yield value


def refuse_cycles(value: object, around: tuple[object, ...] = (), path: str = "the inputs") -> None:
    """Raise an error that names a list, tuple or dict that contains itself, if there is one."""
    if not isinstance(value, (list, tuple, dict)):
        return
    if any(value is outer for outer in around):
        raise ValueError(
            f"{path} is the {type(value).__name__} that contains it: expected inputs without cycles, because a graph names "
            "each part"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        refuse_cycles(part, (*around, value), f"{path}[{key!r}]")


def named_parts(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """`module.named_modules()`, without a generator in a generator for each level."""
    found = {id(module): ("", module)}
    _add_named_parts("", module, found)
    return list(found.values())


def _add_named_parts(
    prefix: str, module: torch.nn.Module, found: dict[int, tuple[str, torch.nn.Module]]
) -> None:
    for name, part in module._modules.items():
        if part is not None and id(part) not in found:
            path = prefix + name
            found[id(part)] = path, part
            if part._modules:
                _add_named_parts(f"{path}.", part, found)


# --- Buffers to which a program assigns: `self.count = self.count + 1` --------------------------------------

Assigned = list[tuple[torch.Tensor, torch.Tensor]]
"""Buffers, each with the tensor that was assigned to it."""


def write_assigned(assigned: Assigned) -> None:
    """Write values that were assigned to buffers into the buffers: a graph has no other names for them."""
    written = {_torch.storage_id(buffer) for buffer, _ in assigned}
    values = [value.clone() if _torch.storage_id(value) in written else value for _, value in assigned]
    for (buffer, _), value in zip(assigned, values, strict=True):
        buffer.copy_(value)


def has_same_form(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value can be written into a buffer and is the same there."""
    is_strided = buffer.layout is value.layout is torch.strided and not _torch.is_traceable_wrapper_subclass(
        value
    )
    has_equal_metadata = (buffer.dtype, buffer.device) == (
        value.dtype,
        value.device,
    ) and buffer.dim() == value.dim()
    return (
        is_strided
        and has_equal_metadata
        and all(
            statically_known_true(size == own) for size, own in zip(value.shape, buffer.shape, strict=True)
        )
    )


class ModuleOwners:
    """Which thread has put stand-ins into which module. Another thread has to wait: it would take the stand-ins for the
    module's own tensors."""

    LONGEST_WAIT = 60.0

    def __init__(self) -> None:
        self._thread_of: dict[torch.nn.Module, int] = {}
        self._changed = threading.Condition()

    def take(self, modules: list[torch.nn.Module]) -> None:
        me = threading.get_ident()
        with self._changed:
            is_free = self._are_free(modules, me)
            if not is_free and not self._changed.wait_for(
                lambda: self._are_free(modules, me), self.LONGEST_WAIT
            ):
                name = type(modules[0]).__name__
                raise UnderstudyError(
                    f"{name}: another thread has been tracing this module for a minute: trace a copy of it"
                )
            self._thread_of.update(dict.fromkeys(modules, me))

    def _are_free(self, modules: list[torch.nn.Module], me: int) -> bool:
        is_only_user = {me}.issuperset(self._thread_of.values())
        return is_only_user or all(self._thread_of.get(module, me) == me for module in modules)

    def give(self, modules: Iterable[torch.nn.Module]) -> None:
        with self._changed:
            for module in modules:
                self._thread_of.pop(module, None)
            self._changed.notify_all()


MODULE_OWNERS = ModuleOwners()


class BorrowedState:
    """While modules are borrowed, their parameters, buffers and tensor attributes are stand-ins.

    `give_back` restores every module to its earlier state, whatever its forward did to it.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._allowed_reals = mode.allow_non_fake_inputs
        self._before: dict[torch.nn.Module, dict[str, Any]] = {}
        self._kept = KeptContents()
        self._taken: list[torch.nn.Module] = []
        self.replaced: dict[torch.nn.Module, list[tuple[str, torch.Tensor, Any]]] = {}
        """For each module: the name, the real tensor and the stand-in of each replaced tensor."""

    def borrow(self, module: torch.nn.Module) -> torch.nn.Module:
        if module not in self._before:
            self.borrow_parts(module)
        return module

    def borrow_parts(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """Borrow a module, and return its submodules by name."""
        MODULE_OWNERS.take([module])  # before reading its parts: another thread may have replaced some
        self._taken.append(module)
        named = named_parts(module)
        parts = [part for _, part in named if part not in self._before]
        MODULE_OWNERS.take(parts)
        self._taken += parts
        for part in parts:
            self._borrow_one(part)
        return named

    def _borrow_one(self, module: torch.nn.Module) -> None:
        if isinstance(module, ScriptModule):
            self._convert_script_module(module)
            return
        attributes = vars(module)
        self._before[module] = attributes.copy()
        names = own_names(tuple(attributes))
        own = list(map(attributes.get, names))
        has_only_plain = PLAIN.issuperset(map(type, own))
        if not has_only_plain:
            self._kept.keep(own)
        replaced = self.replaced[module] = []
        for name in TABLES:  # the module's own dicts are not changed
            table = attributes[name]
            is_empty = not table and type(table) is dict
            attributes[name] = {} if is_empty else self._make_table(table, replaced)
        if has_only_plain:
            return
        for name, value in zip(names, own, strict=True):
            if type(value) not in NO_TENSORS and isinstance(value, torch.Tensor):
                fake = attributes[name] = self._stand_in(value)
                replaced.append((name, value, fake))

    def _make_table(self, table: dict[str, Any], replaced: list[Any]) -> dict[str, Any]:
        """The dict of parameters or buffers that the module has while it is borrowed."""
        borrowed = table.copy() if type(table) is dict else copy.copy(table)
        for name, value in table.items():
            if value is not None:
                fake = borrowed[name] = self._stand_in(value)
                replaced.append((name, value, fake))
        return borrowed

    def list_assigned(self) -> Assigned:
        """The buffers to which the modules have assigned another tensor, and that tensor."""
        found = []
        for module, attributes in self._before.items():
            if not (before := attributes["_buffers"]):
                continue
            for name, real, stand_in in self.replaced[module]:
                value = dict.get(module._buffers, name)
                if value is not stand_in and isinstance(value, torch.Tensor) and before.get(name) is real:
                    found.append((stand_in, value))
        return found

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        is_real = type(tensor) in PLAIN_TYPES or self._is_real(tensor)
        return self._mode.from_tensor(tensor, static_shapes=True) if is_real else tensor

    def _convert_script_module(self, module: torch.nn.Module) -> None:
        """The tensors of a scripted module are in C++, which accepts no stand-ins: they are converted when it runs."""
        self._mode.allow_non_fake_inputs = True
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        self.replaced[module] = [(name, tensor, tensor) for name, tensor in tensors]

    @staticmethod
    def _is_real(tensor: torch.Tensor) -> bool:
        return type(tensor) is not FakeTensor and not is_fake(tensor)

    def give_back(self) -> None:
        for module, attributes in self._before.items():
            now = vars(module)
            now.clear()
            now.update(attributes)
        self._kept.restore(is_stand_in_of(self._mode))
        self._mode.allow_non_fake_inputs = self._allowed_reals
        self._before.clear()
        self.replaced.clear()
        MODULE_OWNERS.give(self._taken)
        self._taken.clear()
