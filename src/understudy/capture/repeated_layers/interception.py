"""Interception of calls of `forward`, and of reads of attributes, while modules are traced.

Both temporarily change the class, not the module: its `__dict__`, which a program may inspect and copy, is untouched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch

from understudy.capture.repeated_layers.object_state import COMPARED, NotComparable
from understudy.capture.repeated_layers.reachable_code import TEXT_METHODS, names_in
from understudy.graph.borrowed_state import EVERY_MODULE_HAS, parts_in

MISSING = object()
NO_NAMES: frozenset[str] = frozenset()
Handler = Callable[..., Any]
"""Called with the bound `forward` of a module, and with its arguments."""


class ReplacedAttributes:
    """Replaces attributes of classes while at least one user, in any thread, needs it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._originals: dict[tuple[type, str], tuple[Any, Any]] = {}
        """Class and name → the original and the replacement."""
        self._users: dict[tuple[type, str], dict[int, object]] = {}

    def replace(self, user: object, kind: type, name: str, make: Callable[[object], object]) -> None:
        """`make` gets the attribute of the class itself (MISSING if it has none), and returns the replacement."""
        place = kind, name
        with self._lock:
            self._users.setdefault(place, {})[id(user)] = user
            if place not in self._originals:
                original = vars(kind).get(name, MISSING)
                self._originals[place] = original, make(original)
            setattr(kind, name, self._originals[place][1])

    def restore(self, user: object) -> None:
        """Drop a user. An interrupt may cause a second call."""
        with self._lock:
            for place in list(self._users):
                users = self._users[place]
                users.pop(id(user), None)
                if not users:
                    self._restore_one(*place)
                    self._originals.pop(place, None)
                    del self._users[place]

    def _restore_one(self, kind: type, name: str) -> None:
        original, ours = self._originals.get((kind, name), (MISSING, MISSING))
        if vars(kind).get(name, MISSING) is not ours or ours is MISSING:
            return  # the program has replaced it
        if original is MISSING:
            delattr(kind, name)
        else:
            setattr(kind, name, original)


_REPLACED = ReplacedAttributes()


# --- calls of forward -------------------------------------------------------------------------------------------------


class InterceptedCalls:
    """Calls of the `forward` of some modules go to handlers, until `release`."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._owners: set[type] = set()
        """The classes whose `forward` is replaced."""

    def intercept(self, module: torch.nn.Module, handler: Handler) -> None:
        """A module with an instance attribute `forward`, or with a handler, is skipped."""
        owner = _owner_of_forward(type(module))
        if owner is None or "forward" in vars(module) or id(module) in _HANDLERS:
            return
        self._modules.append(module)
        _HANDLERS[id(module)] = owner, handler
        if owner not in self._owners:
            _REPLACED.replace(self, owner, "forward", functools.partial(_make_forward, owner))
            self._owners.add(owner)

    def release(self) -> None:
        """An interrupt may cause a second call."""
        for module in self._modules:
            _HANDLERS.pop(id(module), None)
        _REPLACED.restore(self)


_HANDLERS: dict[int, tuple[type, Handler]] = {}
"""By the identity of a module: the class that defines its `forward`, and the handler. Modules are borrowed for a trace
by one thread at a time; calls from another thread find no recorder, and run as usual."""


def _make_forward(owner: type, original: FunctionType) -> Callable[..., object]:
    @functools.wraps(original)
    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> Any:
        known_owner, handler = _HANDLERS.get(id(self), (None, None))
        if handler is None or known_owner is not owner:  # the latter: a call of `super().forward(...)`
            return original(self, *args, **kwargs)
        return handler(functools.partial(original, self), *args, **kwargs)

    return forward


def _owner_of_forward(kind: type) -> type | None:
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), None)
    return owner if owner is not None and isinstance(vars(owner)["forward"], FunctionType) else None


# --- attributes in which layers differ, such as the index of a layer -----------------------------------------------------


class WatchedAttribute:
    """A descriptor for a plain attribute of modules that reports each use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.readers: dict[int, AttributeReads] = {}

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        attributes = vars(instance)
        if self._name not in attributes:
            raise AttributeError(self._name)
        self._note(instance)
        return attributes[self._name]

    def __set__(self, instance: object, value: object) -> None:
        self._note(instance)
        vars(instance)[self._name] = value

    def __delete__(self, instance: object) -> None:
        if self._name not in vars(instance):
            raise AttributeError(self._name)
        self._note(instance)
        del vars(instance)[self._name]

    def _note(self, instance: object) -> None:
        for reads in list(self.readers.values()):
            reads.note(instance, self._name)


class WatchedMethod:
    """A descriptor for a method that may read all attributes of a module, which reports each call."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.readers: dict[int, AttributeReads] = {}

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, instance: object, *args: object) -> Any:
        for reads in list(self.readers.values()):
            reads.note_all(instance)
        return self._original(instance, *args)


class AttributeReads:
    """Collects the watched attributes of a layer that are used while it runs."""

    def __init__(self, layer: torch.nn.Module, watched: dict[int, frozenset[str]]) -> None:
        self._modules = parts_in(layer)
        self._known = set(map(id, self._modules))
        self._watched = watched
        self._thread = threading.get_ident()
        self.names: set[str] = set()

    def note(self, instance: object, name: str) -> None:
        """A module that does not belong to the layer may be a copy of one of its modules."""
        is_watched = id(instance) not in self._known or name in self._watched.get(id(instance), ())
        if is_watched and threading.get_ident() == self._thread:
            self.names.add(name)

    def note_all(self, instance: object) -> None:
        for names in [self._watched[id(instance)]] if id(instance) in self._watched else self._watched.values():
            for name in names:
                self.note(instance, name)

    def note_replayed(self, layer: torch.nn.Module, unread: Mapping[int, frozenset[str]]) -> None:
        """A layer inside of this one was replayed: the run that was recorded may have read any of its attributes, except
        those that are `unread`."""
        for module in parts_in(layer) if self._watched else ():
            self.names |= self._watched.get(id(module), NO_NAMES) - unread.get(id(module), NO_NAMES)

    def __enter__(self) -> AttributeReads:
        self._methods = [place for kind in set(map(type, self._modules)) for place in _introspecting_methods(kind)]
        for owner, name in self._methods:
            _REPLACED.replace(self, owner, name, WatchedMethod)
            vars(owner)[name].readers[id(self)] = self
        for module in self._modules:
            for name in self._watched.get(id(module), ()):
                _REPLACED.replace(self, type(module), name, lambda original, name=name: WatchedAttribute(name))  # type: ignore[misc]
                vars(type(module))[name].readers[id(self)] = self
        return self

    def __exit__(self, *exception: object) -> None:
        places = [(type(m), name) for m in self._modules for name in self._watched.get(id(m), ())]
        for owner, name in (*places, *self._methods):
            watched = vars(owner).get(name)
            if isinstance(watched, (WatchedAttribute, WatchedMethod)):
                watched.readers.pop(id(self), None)
        _REPLACED.restore(self)


LOOKING_INSIDE = frozenset(
    {"__dict__", "vars", "dir", "__dir__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__",
     "getattr_static"}
)  # fmt: skip
"""Names with which code reads attributes without naming them."""


def _introspecting_methods(kind: type) -> list[tuple[type, str]]:
    """Methods that format a module as text from all of its attributes, as in transformers' `Conv1D`."""
    found = []
    for owner in kind.__mro__:
        for name in TEXT_METHODS & vars(owner).keys() if owner not in (torch.nn.Module, object) else ():
            method = vars(owner)[name]
            code = getattr(method, "__code__", None)
            if isinstance(method, WatchedMethod) or (code and not LOOKING_INSIDE.isdisjoint(names_in(code)[0])):
                found.append((owner, name))
    return found


class LayerFamily:
    """Layers of one kind. If they are not alike, the attributes in which they differ can be watched: attributes that no
    run uses can be ignored."""

    def __init__(self, parts: list[list[torch.nn.Module]]) -> None:
        """`parts`: for each layer, the layer itself and all of its submodules."""
        self.layers = [layer for layer, *_ in parts]
        self._parts = parts
        self.is_recorded = False
        self.misses = 0
        """How many layers were run although a similar one had been recorded."""
        self.watched: dict[int, frozenset[str]] = {}
        """The attributes that are not compared, by the identity of the module."""
        self._was_watched = False

    def watch(self, names: set[str]) -> bool:
        """Watch the attributes in which the layers differ, once. Returns whether there are any. `names`: the names that
        the code of the layers uses."""
        if self._was_watched or not LOOKING_INSIDE.isdisjoint(names):
            return False
        self._was_watched = True
        for modules in zip(*self._parts, strict=True):
            differing = frozenset(_find_differing_attributes(modules))
            if differing:
                self.watched.update(dict.fromkeys(map(id, modules), differing))
        return bool(self.watched)

    def run(
        self, layer: torch.nn.Module, forward: Callable[[], object], reading: list[AttributeReads]
    ) -> tuple[set[str], Any]:
        """Run a layer. Returns the watched attributes that it used, and its result. `reading`: of the layers that are
        running, to which this one is added."""
        self.misses += self.is_recorded
        self.is_recorded = True
        if not self.watched:
            return set(), forward()
        with AttributeReads(layer, self.watched) as reads:
            reading.append(reads)
            try:
                result = forward()
            finally:
                reading.remove(reads)
        return reads.names, result

    def check_unread(self, names: Iterable[str]) -> None:
        """After a run: attributes that were used are compared from now on."""
        used = frozenset(names)
        if used:
            self.watched = {identity: rest for identity, some in self.watched.items() if (rest := some - used)}
            raise NotComparable


def _find_differing_attributes(modules: tuple[torch.nn.Module, ...]) -> list[str]:
    """The plain attributes that all modules have and that differ between them."""
    tables = list(map(vars, modules))
    names = [
        name
        for name, value in tables[0].items()
        if name not in EVERY_MODULE_HAS and type(value) in COMPARED
        and any(table.get(name) is not value for table in tables)  # most are the same object in all
    ]  # fmt: skip
    return [
        name for name in names
        if all(name in table and type(table[name]) in COMPARED for table in tables)
        and not any(hasattr(type(module), name) for module in modules)  # a class attribute would be found first
        and len({(type(table[name]), table[name]) for table in tables}) > 1
    ]  # fmt: skip
