"""What classes are made to do while their modules are traced: tell of calls of `forward`, and of attributes that are read.

Both are changes of the class, for a time, and not of the module: its `__dict__`, which a program may look into and copy,
stays as it is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch

from understudy.capture.repeated_layers.object_state import COMPARED, NotComparable
from understudy.capture.repeated_layers.reachable_code import DESCRIBING, names_in
from understudy.graph.borrowed_state import EVERY_MODULE_HAS

MISSING = object()
Handler = Callable[..., Any]
"""Called with the bound `forward` of a module, and with its arguments."""


class ReplacedAttributes:
    """Attributes of classes that are replaced as long as somebody needs it, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._originals: dict[tuple[type, str], tuple[Any, Any]] = {}
        """Class and name → what was there, and what is there now."""
        self._users: dict[tuple[type, str], dict[int, object]] = {}

    def replace(self, user: object, kind: type, name: str, make: Callable[[object], object]) -> None:
        """`make` is given what the class itself holds under this name (MISSING for nothing), and gives what replaces it."""
        place = kind, name
        with self._lock:
            self._users.setdefault(place, {})[id(user)] = user
            if place not in self._originals:
                original = vars(kind).get(name, MISSING)
                self._originals[place] = original, make(original)
            setattr(kind, name, self._originals[place][1])

    def restore(self, user: object) -> None:
        """This user needs nothing any more. May be called again, after an interrupt."""
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
            return  # the program has put something else there
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

    def intercept(self, module: torch.nn.Module, handler: Handler) -> None:
        """A module with a `forward` of its own, or whose calls go to a handler already, is left alone."""
        owner = _owner_of_forward(type(module))
        if owner is None or "forward" in vars(module) or id(module) in _HANDLERS:
            return
        self._modules.append(module)
        _HANDLERS[id(module)] = owner, handler
        _REPLACED.replace(self, owner, "forward", functools.partial(_make_forward, owner))

    def release(self) -> None:
        """May be called again, after an interrupt."""
        for module in self._modules:
            _HANDLERS.pop(id(module), None)
        _REPLACED.restore(self)


_HANDLERS: dict[int, tuple[type, Handler]] = {}
"""By the identity of a module: the class in which its `forward` stands, and who is to be called. The modules are borrowed
for a trace, by one thread at a time; calls from another thread find no recorder, and run as usual."""


def _make_forward(owner: type, original: FunctionType) -> Callable[..., object]:
    @functools.wraps(original)
    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> Any:
        known_owner, handler = _HANDLERS.get(id(self), (None, None))
        if handler is None or known_owner is not owner:  # the latter: called by `super().forward(...)`
            return original(self, *args, **kwargs)
        return handler(functools.partial(original, self), *args, **kwargs)

    return forward


def _owner_of_forward(kind: type) -> type | None:
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), None)
    return owner if owner is not None and isinstance(vars(owner)["forward"], FunctionType) else None


# --- attributes in which layers differ, such as the number of a layer -----------------------------------------------------


class WatchedAttribute:
    """In a class: a plain attribute of its modules, which tells those who want to know when it is used."""

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
    """In a class: a method that may look at all attributes of a module, which tells those who want to know when it is
    called."""

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
    """Which of a layer's attributes are used while it runs."""

    def __init__(self, layer: torch.nn.Module, watched: dict[int, frozenset[str]]) -> None:
        self._modules = list(layer.modules())
        self._known = set(map(id, self._modules))
        self._watched = watched
        self._thread = threading.get_ident()
        self.names: set[str] = set()

    def note(self, instance: object, name: str) -> None:
        """A module that does not belong to the layer may be a copy of one that does."""
        is_watched = id(instance) not in self._known or name in self._watched.get(id(instance), ())
        if is_watched and threading.get_ident() == self._thread:
            self.names.add(name)

    def note_all(self, instance: object) -> None:
        for names in [self._watched[id(instance)]] if id(instance) in self._watched else self._watched.values():
            for name in names:
                self.note(instance, name)

    def __enter__(self) -> AttributeReads:
        self._methods = [place for kind in set(map(type, self._modules)) for place in _methods_that_look_inside(kind)]
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
"""How code finds attributes without asking for them."""


def _methods_that_look_inside(kind: type) -> list[tuple[type, str]]:
    """Methods that describe a module of this class as text by all of its attributes, as that of transformers' `Conv1D`."""
    found = []
    for owner in kind.__mro__:
        for name in DESCRIBING & vars(owner).keys() if owner not in (torch.nn.Module, object) else ():
            method = vars(owner)[name]
            code = getattr(method, "__code__", None)
            if isinstance(method, WatchedMethod) or (code and not LOOKING_INSIDE.isdisjoint(names_in(code)[0])):
                found.append((owner, name))
    return found


class LayerFamily:
    """Layers of one kind. If they are not alike, the attributes in which they differ can be watched: what no run of a
    layer uses makes no difference."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        self._layers = layers
        self.is_recorded = False
        self.misses = 0
        """Layers that were run although one like them should have been known."""
        self.watched: dict[int, frozenset[str]] = {}
        """By the identity of a module: the attributes that are not compared."""
        self._was_watched = False

    def watch(self, names: set[str]) -> bool:
        """Watch the attributes in which the layers differ. Says whether there are any; only once. `names`: those that the
        code of the layers uses."""
        if self._was_watched or not LOOKING_INSIDE.isdisjoint(names):
            return False
        self._was_watched = True
        for modules in zip(*(layer.modules() for layer in self._layers), strict=True):
            differing = frozenset(_differing(modules))
            if differing:
                self.watched.update(dict.fromkeys(map(id, modules), differing))
        return bool(self.watched)

    def run(self, layer: torch.nn.Module, forward: Callable[[], object]) -> tuple[set[str], Any]:
        """Run a layer that is recorded. Gives the watched attributes that it has used, and its result."""
        self.misses += self.is_recorded
        self.is_recorded = True
        if not self.watched:
            return set(), forward()
        with AttributeReads(layer, self.watched) as reads:
            result = forward()
        return reads.names, result

    def check_unread(self, names: Iterable[str]) -> None:
        """After a run: what was used makes a difference from now on."""
        used = frozenset(names)
        if used:
            self.watched = {identity: rest for identity, some in self.watched.items() if (rest := some - used)}
            raise NotComparable


def _differing(modules: tuple[torch.nn.Module, ...]) -> list[str]:
    """The plain attributes that all of them have and that are not the same in all."""
    tables = list(map(vars, modules))
    names = [
        name
        for name, value in tables[0].items()
        if name not in EVERY_MODULE_HAS and type(value) in COMPARED and all(name in table for table in tables)
        and not any(hasattr(type(module), name) for module in modules)  # it would be found there
    ]  # fmt: skip
    return [
        name for name in names if len({(type(table[name]), table[name]) for table in tables}) > 1
        and all(type(table[name]) in COMPARED for table in tables)
    ]  # fmt: skip
