"""The patch engine: applies all changes of torch while a mode of ours is active.

    @patch_call("torch.nn.functional.one_hot", during=SYMBOLS)
    def take_symbolic_classes(original, tensor, num_classes=-1):
        \"\"\"C++ reads the number of classes as a plain integer.\"\"\"
        ...
        return original(tensor, num_classes)

A *patch* is a function that is called in the place of one of torch, or a function from an object of torch to its
replacement (`@patch`); its docstring is the reason. It is in force while one of its *scopes* is active, in all threads
of the process. So each replacement checks whether it applies to this thread, and calls the original if not. Nothing is
changed at import.

Several patches of one place compose: the one whose scope is later in `SCOPES` is outermost, and gets the others as its
original. Two of the same scope are an error.

If the user assigns to a patched place, the assignment is kept: it is not overwritten, and stays when the scopes are left.

`python -m understudy.patching`, which is `understudy patches`, lists all of them.
"""

from __future__ import annotations

import builtins
import functools
import gc
import importlib
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from operator import contains, delitem, getitem, setitem
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from understudy.contexts import GuardedExit, contextmanager, guard_exit, run_to_the_end

Make = Callable[[Any], Any]
"""From the original to its replacement."""
M = TypeVar("M", bound=Callable[..., Any])


class Scope(NamedTuple):
    """When patches are in force. `bit`: scopes are combined as the bits of a number."""

    name: str
    bit: int
    meaning: str


ANY_MODE = Scope("any mode", 1, "a FakeTensorMode or a recorder is active, or symbolic_trace runs")
ABSENT_DEVICES = Scope("absent devices", 2, "a mode is active, and there was a tensor on a device that is not here")
STORAGES = Scope("storages", 4, "a mode is active, and the storage of a stand-in was handed out")
SCRIPTED = Scope("scripted functions", 8, "a mode is active, and TorchScript has compiled a function")
DATA_PARALLEL = Scope("data parallel", 16, "a mode is active, and DistributedDataParallel was given stand-ins")
LAYERS = Scope("layers", 32, "a layer was initialised in a mode, until the last mode is left")
SYMBOLS = Scope("symbols", 64, "a FakeTensorMode with a ShapeEnv is active")
RECORDING = Scope("recording", 128, "make_fx or another recorder is active")
MODULE_PATHS = Scope("module paths", 256, "make_fx records which modules are called")
TRACING = Scope("tracing", 512, "symbolic_trace or a MetaTracer runs")
OBSERVATION = Scope("observation", 1024, "storages and operators are followed (rehearsals, simulated devices)")
SIMULATION = Scope("simulation", 2048, "devices are simulated")
EXPORTING = Scope("exporting", 4096, "export captures a program")
ACCELERATION = Scope("acceleration", 8192, "accelerate_export is active")
REHEARSAL = Scope("rehearsal", 16384, "a script is rehearsed: it does no harm, and ends after some steps")
SCOPES = (
    ANY_MODE, ABSENT_DEVICES, STORAGES, SCRIPTED, DATA_PARALLEL, LAYERS, SYMBOLS, RECORDING, MODULE_PATHS, TRACING,
    OBSERVATION, SIMULATION, EXPORTING, ACCELERATION, REHEARSAL,
)  # fmt: skip
"""From inner to outer. A new scope is one more line, and a `Hold` where it is entered."""


Scopes = Scope | tuple[Scope, ...]
_ANY_MODE_BIT = ANY_MODE.bit


def combine(*scopes: Scope) -> int:
    return sum({scope.bit for scope in scopes})


class Patch(NamedTuple):
    place: str
    make: Callable[..., Any]
    """From the original to its replacement; for a switch, the function that turns it on and off."""
    mask: int
    reason: str
    is_new: bool = False

    @property
    def rank(self) -> int:
        """The order among the patches of one place: by the innermost of its scopes."""
        return self.mask & -self.mask


_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<nothing>"})()
"""Marks a place that only inherits its value."""
_UNREAD: Any = object()
on_replacement: list[Callable[[Any, Any], object]] = []
"""Called with each replacement that is made for a scope, and its original."""


class Place:
    """A name in a module, a class or a dict, and its value for each combination of active scopes."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name
        self.namespace: Mapping[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        self.patches: list[Patch] = []
        """From inner to outer."""
        self.held: dict[Make, set[Hold]] = {}
        """Patches that were found at run time, outside of the others, with their holders."""
        self.overridden = 0
        """The scopes that were active when the user assigned to this place: their patches are not applied until they
        are left."""
        self._base: Any = _UNREAD
        self._original: Any = None
        self._values: dict[int, Any] = {}
        self._made: deque[tuple[Any, Any]] = deque(maxlen=16)

    def value(self, scopes: int) -> Any:
        """The value of this place while these scopes are active."""
        if self._base is _UNREAD:
            self._set_base(self._find_base(self.read()))
        scopes &= ~self.overridden
        value = self._values.get(scopes, _UNREAD)
        if value is _UNREAD:
            value = self._values[scopes] = self._compose(scopes)
        return value

    def change(self, before: int, after: int) -> None:
        """Set the value for the new scopes, whatever the current value is."""
        current = self.read()
        if current is not self.value(before):
            base = self._find_base(current)
            if base is not self._base:
                self._set_base(base)
                self.overridden = before & after if base is current else 0
        if (value := self.value(after)) is not current:
            self.write(value)

    def clear_values(self) -> None:
        """Clear memoised values after a change of the patches."""
        self._values.clear()

    def _compose(self, scopes: int) -> Any:
        makes = [patch.make for patch in self.patches if patch.mask & scopes]
        value, original = self._base, self._original
        for make in (*makes, *self.held):
            value = make(original)
            original = self._look_up(value)
        if value is not self._base:
            self._made.append((value, self._base))
            for notice in () if self.held else on_replacement:
                notice(value, self._base)
        return value

    def _set_base(self, base: object) -> None:
        """Set the original value, on which all patches are built."""
        if base is not _MISSING:
            self._original = self._look_up(base)
        elif isinstance(self.owner, dict):
            self._original = getattr(builtins, self.name, None)
        else:
            self._original = getattr(self.owner, self.name, None)
        self._base = base
        self._values.clear()

    def _find_base(self, current: object) -> Any:
        """The original of a replacement of ours; any other value is an original itself."""
        return next((base for value, base in self._made if value is current), current)

    def _look_up(self, value: Any) -> Any:
        """The attribute value for an entry of the owner's namespace: the function of a static method."""
        is_bound = isinstance(self.owner, type) and hasattr(type(value), "__get__")
        return value.__get__(None, self.owner) if is_bound else value

    def read(self) -> Any:
        return self.namespace.get(self.name, _MISSING)

    def write(self, value: object) -> None:
        if isinstance(self.owner, MutableMapping):
            if value is _MISSING:
                del self.owner[self.name]
            else:
                self.owner[self.name] = value
        elif value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Transition:
    """The fast path from some active scopes to others: if each place has the same value as last time, it is set to the
    same new value as last time. The lists are iterated in C. Names of modules are written to the module's dict, which takes
    half of the time."""

    def __init__(self, places: list[Place], switches: list[Patch], before: int, after: int) -> None:
        self._turns = [
            (switch.make, bool(switch.mask & after))
            for switch in switches
            if bool(switch.mask & before) is not bool(switch.mask & after)
        ]
        changed = [place for place in places if place.value(before) is not place.value(after)]
        present = [place for place in changed if place.value(before) is not _MISSING]
        self._present = _namespaces_and_names(present)
        self._expected = [place.value(before) for place in present]
        self._absent = _namespaces_and_names([place for place in changed if place.value(before) is _MISSING])
        written = [place for place in changed if place.value(after) is not _MISSING]
        removed = [place for place in changed if place.value(after) is _MISSING]
        entries = [place for place in written if _is_dict_entry(place)]
        others = [place for place in written if not _is_dict_entry(place)]
        self._items = *_namespaces_and_names(entries), [place.value(after) for place in entries]
        self._set = *_owners_and_names(others), [place.value(after) for place in others]
        self._removed = _namespaces_and_names([place for place in removed if _is_dict_entry(place)])
        self._deleted = _owners_and_names([place for place in removed if not _is_dict_entry(place)])

    def matches_last_time(self) -> bool:
        """Whether each place has the same value as last time. Lists compare their elements by identity first."""
        try:
            return list(map(getitem, *self._present)) == self._expected and not any(map(contains, *self._absent))
        except KeyError:
            return False

    def write(self) -> None:
        deque(map(setitem, *self._items), 0)
        deque(map(setattr, *self._set), 0)
        deque(map(delitem, *self._removed), 0)
        deque(map(delattr, *self._deleted), 0)

    def turn_switches(self) -> None:
        for turn, is_on in self._turns:
            turn(is_on)


def _plain_dict(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """For a class: the dict behind its `__dict__` proxy. Only for reading, which takes half of the time."""
    return namespace if isinstance(namespace, dict) else gc.get_referents(namespace)[0]


def _is_dict_entry(place: Place) -> bool:
    owner = place.owner
    return isinstance(owner, dict) or (isinstance(owner, ModuleType) and type(owner).__setattr__ is ModuleType.__setattr__)


def _namespaces_and_names(places: list[Place]) -> tuple[list[dict[str, Any]], list[str]]:
    return [_plain_dict(place.namespace) for place in places], [place.name for place in places]


def _owners_and_names(places: list[Place]) -> tuple[list[object], list[str]]:
    return [place.owner for place in places], [place.name for place in places]


class PatchEngine:
    """Keeps the values of all places in accordance with the active scopes.

    An interrupt can come at any line. `active` are the scopes for which all places are set, and `is_settled` is False
    while a change is incomplete; the next call that enters or leaves a scope completes it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: a finalizer may enter a mode while this thread holds it
        self.registered: list[Patch] = []
        self.found_places: list[Patch] = []
        self.switches: list[Patch] = []
        self.holds: dict[Hold, int] = {}
        self.active = 0
        self.is_settled = True
        self._places: dict[tuple[int, str], Place] = {}
        self._unresolved: list[Patch] = []
        self._prepared: dict[tuple[int, int], Transition] = {}
        self._with_any_mode = 0
        self._until_left = 0
        self._conditions: dict[Scope, Callable[[], object]] = {}
        self._overridden: list[Place] = []
        self._is_suspended = False

    # --- registering -----------------------------------------------------------------------------------------

    def register(self, patch: Patch) -> None:
        for other in self.registered:
            if other.place == patch.place and other.mask & patch.mask:
                raise _make_conflict_error(other, patch)
        with self.lock:
            self.registered.append(patch)
            self._unresolved.append(patch)
            self._prepared.clear()
            if self.active & patch.mask:  # a package that was imported while a mode is active
                self.is_settled = False
                self.settle()

    def _resolve(self, patch: Patch) -> None:
        found = find_place(patch)
        if found is None:
            return
        place = self.place(*found)
        place.owner = found[0]
        for other in place.patches:
            if other.mask & patch.mask:
                raise _make_conflict_error(other, patch)
        place.patches = sorted((*place.patches, patch), key=lambda patch: patch.rank)
        place.clear_values()

    def place(self, owner: object, name: str) -> Place:
        key = _key(owner, name)
        return self._places.get(key) or self._places.setdefault(key, Place(owner, name))

    def update_held(self, place: Place) -> None:
        """Update a place that was found at run time, after a change of its holders."""
        place.clear_values()
        self.change(place, self.active, self.active)
        if not place.held and not place.patches:
            self._places.pop(_key(place.owner, place.name), None)

    # --- changing --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Set all places for the scopes that are held now."""
        wanted = self._combine_holds()
        if wanted == self.active and self.is_settled:
            return
        if self.is_settled:
            self.is_settled = False
            self._change_prepared(self.active, wanted)
        else:
            self._change_all(self.active, wanted)
        if self._overridden:
            self._end_overrides(wanted)
        self.active = wanted
        self.is_settled = True

    def _combine_holds(self) -> int:
        wanted = 0
        for scopes in () if self._is_suspended else tuple(self.holds.values()):
            wanted |= scopes
        if not wanted & _ANY_MODE_BIT:
            self._until_left = 0
            return wanted
        for scope, is_due in tuple(self._conditions.items()):
            if is_due():
                self._with_any_mode |= scope.bit
                del self._conditions[scope]
        return wanted | self._with_any_mode | self._until_left

    def begin_with_modes(self, scope: Scope, once: Callable[[], object] | None = None) -> None:
        """From now on, this scope is active whenever a mode is; or starting with the first mode for which `once()` is
        true."""
        if once is not None:
            self._conditions[scope] = once
        elif not self._with_any_mode & scope.bit:
            with self.lock:
                self._with_any_mode |= scope.bit
                self.settle()

    def begin_until_left(self, scope: Scope) -> None:
        """This scope is active from now until the last mode is left."""
        with self.lock:
            self._until_left |= scope.bit
            self.settle()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Inside, nothing is patched, in any thread. The lock is not held: to load a package takes long."""
        with run_to_the_end(lambda: self._set_suspended(False)):
            self._set_suspended(True)
            yield

    def _set_suspended(self, is_suspended: bool) -> None:
        with self.lock:
            self._is_suspended = is_suspended
            self.settle()

    def _change_prepared(self, before: int, after: int) -> None:
        transition = self._prepared.get((before, after))
        if transition is None:
            self._resolve_all()
            transition = Transition(list(self._places.values()), self.switches, before, after)
            self._prepared[before, after] = transition
        if transition.matches_last_time():
            transition.write()
        else:
            self._change_places(before, after)
        transition.turn_switches()

    def _change_all(self, before: int, after: int) -> None:
        """After an interrupt: set each place, whatever its current value."""
        self._change_places(before, after)
        for switch in self.switches:
            switch.make(bool(switch.mask & after))

    def _change_places(self, before: int, after: int) -> None:
        self._resolve_all()
        for place in list(self._places.values()):
            self.change(place, before, after)

    def change(self, place: Place, before: int, after: int) -> None:
        """Set a place whose value has changed since last time."""
        if place.patches:
            self._prepared.clear()
        place.change(before, after)
        if place.overridden and place not in self._overridden:
            self._overridden.append(place)

    def _resolve_all(self) -> None:
        while self._unresolved:
            self._resolve(self._unresolved[0])
            del self._unresolved[0]

    def _end_overrides(self, wanted: int) -> None:
        self._prepared.clear()
        for place in self._overridden:
            place.overridden &= wanted
        self._overridden = [place for place in self._overridden if place.overridden]


def _key(owner: object, name: str) -> tuple[int, str]:
    """The key of a place; a module and its `__dict__` are the same owner."""
    return id(owner) if isinstance(owner, (type, dict)) else id(vars(owner)), name


def _make_conflict_error(first: Patch, second: Patch) -> TypeError:
    names = [f"{patch.make.__module__}.{patch.make.__qualname__}" for patch in (first, second)]
    return TypeError(f"{second.place} is patched twice in the same scope: by {names[0]} and by {names[1]}")


def find_place(patch: Patch) -> tuple[object, str] | None:
    """The owner and the name; None if this release of torch has no such place."""
    *path, name = patch.place.split(".")
    owner: Any = None
    for end in range(1, len(path) + 1):
        prefix = ".".join(path[:end])
        if prefix in sys.modules:  # checked first: a function may have the name of its module
            owner = sys.modules[prefix]
        elif hasattr(owner, path[end - 1]):
            owner = getattr(owner, path[end - 1])
        else:
            try:
                owner = importlib.import_module(prefix)
            except ImportError:
                return None
    is_there = patch.is_new or hasattr(owner, name) or hasattr(builtins, name)
    return (owner, name) if is_there else None


ENGINE = PatchEngine()


# --- registering patches ------------------------------------------------------------------------------------


def patch(*places: str, during: Scopes, reason: str = "", is_new: bool = False) -> Callable[[M], M]:
    """Register a function from the original to its replacement, for each of these places ("torch.nn.functional.one_hot").

    `reason`: instead of the docstring. `is_new`: the name does not exist in torch, and the original is None.
    """

    def register(make: M) -> M:
        for place in places:
            ENGINE.register(Patch(place, make, *_find_reason(make, during, reason), is_new))
        return make

    return register


def patch_call(*places: str, during: Scopes, reason: str = "") -> Callable[[M], M]:
    """Register a function that is called in the place of the original, with the original as its first argument. Where
    one more call of Python matters, `patch` does without it."""

    def register(function: M) -> M:
        @functools.wraps(function)
        def make(original: Callable[..., object]) -> Callable[..., object]:
            @functools.wraps(original)
            def call(*args: object, **kwargs: object) -> object:
                return function(original, *args, **kwargs)

            return call

        patch(*places, during=during, reason=reason)(make)
        return function

    return register


def patch_found(places: str, *, during: Scopes, reason: str = "") -> Callable[[M], M]:
    """Register a patch for places that are found at run time; `places` describes them. It is applied by `Hold.replace`."""

    def register(make: M) -> M:
        ENGINE.found_places.append(Patch(places, make, *_find_reason(make, during, reason)))
        return make

    return register


def switch(place: str, *, during: Scopes, reason: str = "") -> Callable[[M], M]:
    """Register a change that is not the value of a name: `turn(True)` makes it, `turn(False)` undoes it. An interrupt
    may cause a second call of each."""

    def register(turn: M) -> M:
        ENGINE.switches.append(Patch(place, turn, *_find_reason(turn, during, reason)))
        return turn

    return register


def _find_reason(make: Callable[..., object], during: Scopes, reason: str) -> tuple[int, str]:
    reason = reason or inspect.getdoc(make) or ""
    if not reason:
        raise TypeError(f"{make.__module__}.{make.__qualname__} patches torch, and does not say why: give it a docstring")
    return combine(*([during] if isinstance(during, Scope) else during)), reason


# --- entering scopes ----------------------------------------------------------------------------------------


class Hold:
    """Keeps scopes active, from `enter` to `leave`.

        with Hold() as hold:
            hold.enter(combine(TRACING))
            ...

    Each can be called twice, and `leave` without `enter`, because an interrupt may come in between.
    """

    __slots__ = ("_found", "_is_left")

    def __init__(self) -> None:
        self._found: list[tuple[Place, Make]] | None = None
        self._is_left = True

    def __enter__(self) -> Hold:
        guard_exit(self, self.leave)
        return self

    @GuardedExit
    def __exit__(self, *exception: object) -> None:
        try:
            self.leave()
        except BaseException:  # an interrupt
            self.leave()
            raise

    def enter(self, scopes: int) -> None:
        self._is_left = False
        with ENGINE.lock:
            ENGINE.holds[self] = scopes
            if scopes & ~ENGINE.active or not ENGINE.is_settled:
                ENGINE.settle()

    def replace(self, owner: object, name: str, make: Make) -> None:
        """Patch a place that was found at run time, with a function registered by `patch_found`."""
        self._is_left = False
        with ENGINE.lock:
            place = ENGINE.place(owner, name)
            if self._found is None:
                self._found = []
            self._found.append((place, make))
            place.held.setdefault(make, set()).add(self)
            ENGINE.update_held(place)

    def leave(self) -> None:
        if self._is_left:
            return
        with ENGINE.lock:
            while self._found:
                place, make = self._found[-1]
                holders = place.held.get(make, set())
                holders.discard(self)
                if not holders:
                    place.held.pop(make, None)
                ENGINE.update_held(place)
                self._found.pop()
            ENGINE.holds.pop(self, None)
            ENGINE.settle()
        self._is_left = True


class ActiveScopes(Hold):
    """A hold that enters its scopes by itself."""

    __slots__ = ("_scopes",)

    def __init__(self, *scopes: Scope) -> None:
        super().__init__()
        self._scopes = combine(*scopes)

    def __enter__(self) -> Hold:
        hold = super().__enter__()
        hold.enter(self._scopes)
        return hold


def active(*scopes: Scope) -> Hold:
    """A context in which these scopes are active."""
    return ActiveScopes(*scopes)


if __name__ == "__main__":
    sys.exit(importlib.import_module("understudy.cli").main(["patches"]))
