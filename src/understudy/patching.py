"""The patch engine: everything of torch that is changed while something of ours is active, when, and why.

    @patch("torch.nn.functional.one_hot", during=SYMBOLS)
    def take_symbolic_classes(original):
        \"\"\"C++ reads the number of classes as a plain integer.\"\"\"
        def one_hot(tensor, num_classes=-1):
            ...
        return one_hot

A *patch* is a function from what stands in a place of torch to what replaces it; its docstring is the reason. It is in force
while one of its *scopes* is active, in any thread of the process. So each replacement asks first whether this thread is
concerned, and does what the original does if not. Nothing is changed at import.

Several patches of one place compose: the one whose scope is later in `SCOPES` is called first, and is given the others as
its original. Two of the same scope are an error.

What the user puts into a place meanwhile is the user's: it is never overwritten, and stays when the scopes are left.

`python -m understudy.patching` lists all of them.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import inspect
import pkgutil
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from operator import is_, setitem
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from understudy.contexts import GuardedExit, guard_exit

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
SYMBOLS = Scope("symbols", 32, "a FakeTensorMode with a ShapeEnv is active")
RECORDING = Scope("recording", 64, "make_fx or another recorder is active")
MODULE_PATHS = Scope("module paths", 128, "make_fx records which modules are called")
TRACING = Scope("tracing", 256, "symbolic_trace or a MetaTracer runs")
OBSERVATION = Scope("observation", 512, "storages and operators are followed (rehearsals, simulated devices)")
SIMULATION = Scope("simulation", 1024, "devices are simulated")
EXPORTING = Scope("exporting", 2048, "export captures a program")
ACCELERATION = Scope("acceleration", 4096, "accelerate_export is active")
REHEARSAL = Scope("rehearsal", 8192, "a script is rehearsed: it does no harm, and ends after some steps")
SCOPES = (
    ANY_MODE, ABSENT_DEVICES, STORAGES, SCRIPTED, DATA_PARALLEL, SYMBOLS, RECORDING, MODULE_PATHS, TRACING, OBSERVATION,
    SIMULATION, EXPORTING, ACCELERATION, REHEARSAL,
)  # fmt: skip
"""From inner to outer. One more scope is one more line, and a `Hold` where it begins."""


Scopes = Scope | tuple[Scope, ...]


def combine(*scopes: Scope) -> int:
    mask = 0
    for scope in scopes:
        mask |= scope.bit
    return mask


class Patch(NamedTuple):
    place: str
    make: Callable[..., Any]
    """From the original to its replacement; of a switch, the function that turns it on and off."""
    mask: int
    reason: str
    is_new: bool = False

    @property
    def rank(self) -> int:
        """Where it stands among the patches of one place: by the innermost of its scopes."""
        return self.mask & -self.mask


_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<nothing>"})()
"""Stands for the content of a place that only inherits its value."""
_UNREAD: Any = object()


class Place:
    """A name in a module, a class or a dict, and what belongs there while some scopes are active."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name
        self.namespace: Mapping[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        self.patches: list[Patch] = []
        """From inner to outer."""
        self.held: dict[Make, set[Hold]] = {}
        """Patches of places that are found while the program runs, outside of the others; and who holds them."""
        self.overridden = 0
        """The scopes that were active when the user put something here: their patches stay away until they are left."""
        self._base: Any = _UNREAD
        self._original: Any = None
        self._values: dict[int, Any] = {}
        self._made: deque[tuple[Any, Any]] = deque(maxlen=16)

    def value(self, scopes: int) -> Any:
        """What belongs here while these scopes are active."""
        if self._base is _UNREAD:
            self._set_base(self._find_base(self.read()))
        scopes &= ~self.overridden
        value = self._values.get(scopes, _UNREAD)
        if value is _UNREAD:
            value = self._values[scopes] = self._compose(scopes)
        return value

    def change(self, before: int, after: int) -> None:
        """Put here what belongs here, whatever stands here now."""
        current = self.read()
        if current is not self.value(before):
            base = self._find_base(current)
            if base is not self._base:
                self._set_base(base)
                self.overridden = before & after if base is current else 0
        if (value := self.value(after)) is not current:
            self.write(value)

    def forget_values(self) -> None:
        """After a change of the patches."""
        self._values.clear()

    def _compose(self, scopes: int) -> Any:
        makes = [patch.make for patch in self.patches if patch.mask & scopes]
        value, original = self._base, self._original
        for make in (*makes, *self.held):
            value = make(original)
            original = self._look_up(value)
        if value is not self._base:
            self._made.append((value, self._base))
        return value

    def _set_base(self, base: object) -> None:
        """What is not ours, and all of ours is built on."""
        if base is not _MISSING:
            self._original = self._look_up(base)
        elif isinstance(self.owner, dict):
            self._original = getattr(builtins, self.name, None)
        else:
            self._original = getattr(self.owner, self.name, None)
        self._base = base
        self._values.clear()

    def _find_base(self, current: object) -> Any:
        """What a replacement of ours was made for; anything else is a base itself."""
        return next((base for value, base in self._made if value is current), current)

    def _look_up(self, value: Any) -> Any:
        """What the owner gives by its name for what stands in its namespace: the function of a static method."""
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
    """The usual way from some active scopes to others: each place has what it had last time, and is given what it was given
    last time. The lists are columns of one table, which C goes through. Half of all places are names that a plain module
    has: writing to its dict takes a third of the time."""

    def __init__(self, places: list[Place], before: int, after: int) -> None:
        changed = [place for place in places if place.value(before) is not place.value(after)]
        self._namespaces = [_plain_dict(place.namespace) for place in changed]
        self._names = [place.name for place in changed]
        self._nothing = [_MISSING] * len(changed)
        self._expected = [place.value(before) for place in changed]
        in_dicts = [place for place in changed if _is_dict_entry(place, before, after)]
        ended = [place for place in changed if place.value(after) is _MISSING]
        others = [place for place in changed if place not in in_dicts and place not in ended]
        self._dicts = [_plain_dict(place.namespace) for place in in_dicts], *_columns(in_dicts, after)
        self._set = [place.owner for place in others], *_columns(others, after)
        self._deleted = [place.owner for place in ended], [place.name for place in ended]

    def is_usual(self) -> bool:
        """Whether each place has what it had last time."""
        current = map(_get, self._namespaces, self._names, self._nothing)
        return all(map(is_, current, self._expected))

    def write(self) -> None:
        deque(map(setitem, *self._dicts), 0)
        deque(map(setattr, *self._set), 0)
        deque(map(delattr, *self._deleted), 0)


_get: Any = dict.get


def _plain_dict(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Of a class: the dict that its `__dict__` shows. It is only read here, which takes half of the time."""
    return namespace if isinstance(namespace, dict) else gc.get_referents(namespace)[0]


def _is_dict_entry(place: Place, before: int, after: int) -> bool:
    is_there = place.value(before) is not _MISSING and place.value(after) is not _MISSING
    return is_there and type(place.owner) is ModuleType


def _columns(places: list[Place], after: int) -> tuple[list[str], list[Any]]:
    return [place.name for place in places], [place.value(after) for place in places]


class PatchEngine:
    """Keeps every place as the active scopes want it.

    An interrupt can come at any line. `active` is what all places are known to be set for, and `is_settled` says that no
    change was broken off; the next one that enters or leaves anything completes it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may enter a mode while this thread is in here
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
        self._conditions: dict[Scope, Callable[[], object]] = {}
        self._overridden: list[Place] = []

    # --- registering -----------------------------------------------------------------------------------------

    def register(self, patch: Patch) -> None:
        for other in self.registered:
            if other.place == patch.place and other.mask & patch.mask:
                raise _two_of_one_place(other, patch)
        with self.lock:
            self.registered.append(patch)
            self._unresolved.append(patch)
            self._prepared.clear()
            if self.active & patch.mask:  # a room that was loaded while a mode is active
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
                raise _two_of_one_place(other, patch)
        place.patches = sorted((*place.patches, patch), key=lambda patch: patch.rank)
        place.forget_values()

    def place(self, owner: object, name: str) -> Place:
        key = _key(owner, name)
        return self._places.get(key) or self._places.setdefault(key, Place(owner, name))

    def settle_held(self, place: Place) -> None:
        """After a change of who holds patches of a place that was found."""
        place.forget_values()
        self.change(place, self.active, self.active)
        if not place.held and not place.patches:
            self._places.pop(_key(place.owner, place.name), None)

    # --- changing --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring all places to what the holds want now."""
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
        for scopes in tuple(self.holds.values()):
            wanted |= scopes
        if not wanted & ANY_MODE.bit:
            return wanted
        for scope in [scope for scope, is_due in self._conditions.items() if is_due()]:
            self._with_any_mode |= scope.bit
            del self._conditions[scope]
        return wanted | self._with_any_mode

    def begin_with_modes(self, scope: Scope, once: Callable[[], object] | None = None) -> None:
        """From now on, this scope is active whenever a mode is; or from the first mode on that finds `once` true."""
        if once is not None:
            self._conditions[scope] = once
        elif not self._with_any_mode & scope.bit:
            with self.lock:
                self._with_any_mode |= scope.bit
                self.settle()

    def _change_prepared(self, before: int, after: int) -> None:
        transition = self._prepared.get((before, after))
        if transition is None:
            self._resolve_all()
            transition = self._prepared[before, after] = Transition(list(self._places.values()), before, after)
        if transition.is_usual():
            transition.write()
        else:
            self._change_places(before, after)
        for switch in self.switches:
            if bool(switch.mask & before) is not bool(switch.mask & after):
                switch.make(bool(switch.mask & after))

    def _change_all(self, before: int, after: int) -> None:
        """After an interrupt: whatever stands in each place."""
        self._change_places(before, after)
        for switch in self.switches:
            switch.make(bool(switch.mask & after))

    def _change_places(self, before: int, after: int) -> None:
        self._resolve_all()
        for place in list(self._places.values()):
            self.change(place, before, after)

    def change(self, place: Place, before: int, after: int) -> None:
        """A place that is not as it was last time."""
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
    """A module and its `__dict__` are the same owner."""
    return id(owner) if isinstance(owner, (type, dict)) else id(vars(owner)), name


def _two_of_one_place(first: Patch, second: Patch) -> TypeError:
    names = [f"{patch.make.__module__}.{patch.make.__qualname__}" for patch in (first, second)]
    return TypeError(f"{second.place} is patched twice in the same scope: by {names[0]} and by {names[1]}")


def find_place(patch: Patch) -> tuple[object, str] | None:
    """The owner and the name; None if this release of torch has no such place."""
    *path, name = patch.place.split(".")
    owner: Any = None
    for end in range(1, len(path) + 1):
        prefix = ".".join(path[:end])
        if prefix in sys.modules:  # before the attribute: a function may have the name of its module
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

    `reason`: in place of its docstring. `is_new`: torch has nothing there, and the original is None.
    """

    def register(make: M) -> M:
        for place in places:
            ENGINE.register(Patch(place, make, *_about(make, during, reason), is_new))
        return make

    return register


def patch_found(places: str, *, during: Scopes, reason: str = "") -> Callable[[M], M]:
    """Register a patch for places that only the running program tells, in words. It is applied by `Hold.replace`."""

    def register(make: M) -> M:
        ENGINE.found_places.append(Patch(places, make, *_about(make, during, reason)))
        return make

    return register


def switch(place: str, *, during: Scopes, reason: str = "") -> Callable[[M], M]:
    """Register a change that is no object in a place: `turn(True)` makes it, `turn(False)` takes it back. An interrupt may
    call each of them twice."""

    def register(turn: M) -> M:
        ENGINE.switches.append(Patch(place, turn, *_about(turn, during, reason)))
        return turn

    return register


def _about(make: Callable[..., object], during: Scopes, reason: str) -> tuple[int, str]:
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

    Each can be called twice, and `leave` without `enter`: an interrupt may have come in between.
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
        """Patch a place that only the running program tells, by a function that `patch_found` has registered."""
        self._is_left = False
        with ENGINE.lock:
            place = ENGINE.place(owner, name)
            if self._found is None:
                self._found = []
            self._found.append((place, make))
            place.held.setdefault(make, set()).add(self)
            ENGINE.settle_held(place)

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
                ENGINE.settle_held(place)
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


# --- the list -----------------------------------------------------------------------------------------------


def load_all_patches() -> None:
    """Import every module of every room, since any of them may register patches."""
    package = importlib.import_module("understudy")
    for module in pkgutil.walk_packages(package.__path__, "understudy."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def describe_patches() -> str:
    """The table of all patches: scope, place, reason."""
    lines = []
    for scope in SCOPES:
        lines += [f"While {scope.meaning} ({scope.name}):", ""]
        every = sorted((*ENGINE.registered, *ENGINE.found_places, *ENGINE.switches), key=lambda patch: patch.place)
        for patch in every:
            if patch.mask & scope.bit:
                lines += _describe(patch, scope)
        lines.append("")
    return "\n".join(lines)


def _describe(patch: Patch, scope: Scope) -> list[str]:
    others = [other.name for other in SCOPES if patch.mask & other.bit and other is not scope]
    is_absent = patch in ENGINE.registered and find_place(patch) is None
    notes = [f"also while {', '.join(others)}"] if others else []
    notes += ["not in this release of torch"] if is_absent else []
    note = f"  ({'; '.join(notes)})" if notes else ""
    by = f"{patch.make.__module__}.{patch.make.__qualname__}"
    reason = textwrap.wrap(" ".join(patch.reason.split()), 104, break_on_hyphens=False)
    return [f"  {patch.place}{note}", *(f"      {line}" for line in (*reason, f"by {by}"))]


def main() -> None:
    load_all_patches()
    print(describe_patches())


if __name__ == "__main__":  # this file is then loaded twice, and the patches are known to the other one
    importlib.import_module("understudy.patching").main()
