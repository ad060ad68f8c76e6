"""The patch engine: applies all changes of torch while a mode of ours is active.

    @patch_call("torch.nn.functional.one_hot", during=SYMBOLS)
    def take_symbolic_classes(original, tensor, num_classes=-1):
        \"\"\"C++ reads the number of classes as a plain integer.\"\"\"
        ...
        return original(tensor, num_classes)

A *patch* is a function that is called instead of one of torch, or a function from an object of torch to its
replacement (`@patch`); its docstring is the reason. It is in force while one of its *scopes* is active, in all threads
of the process. So each replacement checks whether it applies to this thread, and calls the original if not. Nothing is
changed at import.

    Hold.enter ──► settle ──► changes from the active scopes to the wanted ones ──► each place: old value → new value

Several patches of one place compose: the one whose scope is later in `SCOPES` is outermost, and gets the others as its
original. Two of the same scope are an error. If the user assigns to a patched place, the assignment is kept: it is not
overwritten, and stays when the scopes are left.

`python -m understudy.patching`, which is `understudy patches`, lists all of them.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

Make = Callable[[Any], Any]
"""From the original to its replacement."""
M = TypeVar("M", bound=Callable[..., Any])


# --- scopes -------------------------------------------------------------------------------------------------


class Scope(NamedTuple):
    """When patches are in force. `bit`: scopes are combined as the bits of a number."""

    name: str
    bit: int
    meaning: str


SCOPES: list[Scope] = []
"""From inner to outer."""


def _add_scope(name: str, meaning: str) -> Scope:
    SCOPES.append(Scope(name, 1 << len(SCOPES), meaning))
    return SCOPES[-1]


ANY_MODE = _add_scope("any mode", "a FakeTensorMode or a recorder is active, or symbolic_trace runs")
ABSENT_DEVICES = _add_scope(
    "absent devices", "a mode is active, and there was a tensor on a device that is not here"
)
STORAGES = _add_scope("storages", "a mode is active, and the storage of a stand-in was handed out")
DATA_PARALLEL = _add_scope(
    "data parallel", "a mode is active, and DistributedDataParallel was given stand-ins"
)
LAYERS = _add_scope("layers", "a layer was initialised in a mode, until the last mode is left")
SYMBOLS = _add_scope("symbols", "a FakeTensorMode with a ShapeEnv is active")
RECORDING = _add_scope("recording", "make_fx or another recorder is active")
MODULE_PATHS = _add_scope("module paths", "make_fx records which modules are called")
TRACING = _add_scope("tracing", "symbolic_trace or a MetaTracer runs")
OBSERVATION = _add_scope("observation", "storages and operators are followed (rehearsals, simulated devices)")
SIMULATION = _add_scope("simulation", "devices are simulated")
EXPORTING = _add_scope("exporting", "export captures a program")
ACCELERATION = _add_scope("acceleration", "accelerate_export is active")
REHEARSAL = _add_scope(
    "rehearsal", "a script is rehearsed: its effects are contained, and it ends after some steps"
)
FILE_OVERLAY = _add_scope(
    "file overlay", "a script is rehearsed without namespaces: its writes are redirected in Python"
)
Scopes = Scope | tuple[Scope, ...]
_ANY_MODE_BIT = ANY_MODE.bit
_FIRST_GROUP = 1 << len(SCOPES)
"""The lowest bit of groups of places that are found at run time. They are outside of all scopes."""
_MOST_GROUPS = 64
"""So many are remembered; then those that are not active are dropped."""


def combine(*scopes: Scope) -> int:
    return sum({scope.bit for scope in scopes})


# --- places -------------------------------------------------------------------------------------------------


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
"""The value of a place that only inherits its value."""
_UNREAD: Any = object()
_MOST_REPLACEMENTS = 16
on_replacement: list[Callable[[Any, Any], object]] = []
"""Called with each replacement that is made for a scope, and its original."""


class Place:
    """A name in a module, a class or a dict, and its value for each combination of active scopes."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name
        self.namespace: Mapping[str, Any] = owner if isinstance(owner, dict) else vars(owner)
        is_plain_module = isinstance(owner, ModuleType) and type(owner).__setattr__ is ModuleType.__setattr__
        self.entries: Any = self.namespace if is_plain_module or isinstance(owner, dict) else None
        """The dict to write to; None for a class, whose attributes are set."""
        self.patches: list[Patch] = []
        """From inner to outer."""
        self.overridden = 0
        """The scopes that were active when the user assigned to this place: their patches are not applied until they
        are left."""
        self._base: Any = _UNREAD
        self._mask = 0
        """The scopes of all patches."""
        self._values: dict[int, Any] = {}
        self._made: list[tuple[Any, Any]] = []
        """Replacements and their originals: all in `_values`, the one in force, and the latest others, which the user
        may have kept and may assign again."""

    def set_patches(self, patches: Iterable[Patch]) -> None:
        self.patches = sorted(patches, key=lambda patch: patch.rank)
        self._mask = functools.reduce(int.__or__, (patch.mask for patch in self.patches), 0)
        self._forget_values()

    def value(self, scopes: int) -> Any:
        """The value of this place while these scopes are active."""
        if self._base is _UNREAD:
            self._base = self._find_base(self.read())
        scopes &= self._mask & ~self.overridden
        value = self._values.get(scopes, _UNREAD)
        if value is _UNREAD:
            value = self._values[scopes] = self._compose(scopes)
        return value

    def settle(self, before: int, after: int) -> None:
        """Set the value for the new scopes, whatever the current value is: the user or an interrupt has changed it."""
        base = self._find_base(self.read())
        if base is not self._base and self._base is not _UNREAD:
            self.overridden = before & after if base is self.read() else 0
            self._forget_values()
        self._base = base
        self.write(self.value(after))

    def _compose(self, scopes: int) -> Any:
        value, original = self._base, self._find_original()
        for patch in self.patches:
            if patch.mask & scopes:
                value = patch.make(original)
                original = self._look_up(value)
        if value is not self._base:
            if isinstance(self._base, BuiltinFunctionType) and isinstance(self.owner, ModuleType):
                # Python pickles a function by its name, and finds it there; `os.stat` calls itself posix.stat.
                value.__module__, value.__qualname__ = self.owner.__name__, self.name
            self._made.append((value, self._base))
            for notice in on_replacement if scopes < _FIRST_GROUP else ():
                notice(value, self._base)
        return value

    def _forget_values(self) -> None:
        """Make all values anew when they are wanted. The one that is in force is still known as ours."""
        current = self.read()
        older, latest = self._made[:-_MOST_REPLACEMENTS], self._made[-_MOST_REPLACEMENTS:]
        self._made = [*(pair for pair in older if pair[0] is current), *latest]
        self._values.clear()

    def _find_original(self) -> Any:
        if self._base is not _MISSING:
            return self._look_up(self._base)
        return getattr(builtins if isinstance(self.owner, dict) else self.owner, self.name, None)

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
        if value is self.read():
            return
        if self.entries is not None:
            if value is _MISSING:
                del self.entries[self.name]
            else:
                self.entries[self.name] = value
        elif value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


Change = tuple[Place, Mapping[str, Any], str, Any, Any]
"""A place with its namespace and name, the expected current value, and the next value."""


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


def _key(owner: object, name: str) -> tuple[int, str]:
    """The key of a place; a module and its `__dict__` are the same owner."""
    return id(owner) if isinstance(owner, (type, dict)) else id(vars(owner)), name


def _make_conflict_error(first: Patch, second: Patch) -> TypeError:
    names = [f"{patch.make.__module__}.{patch.make.__qualname__}" for patch in (first, second)]
    return TypeError(f"{second.place} is patched twice in the same scope: by {names[0]} and by {names[1]}")


# --- the engine ---------------------------------------------------------------------------------------------


class PatchGroup(NamedTuple):
    """Places that were found at run time, and are patched together."""

    bit: int
    places: tuple[tuple[object, str], ...]


GroupKey = tuple[int, tuple[tuple[int, str], ...]]
"""By identity: the function that makes the replacements; the owner and the name of each place."""


class PatchEngine:
    """Keeps the values of all places in accordance with the active scopes.

    `active` are the scopes for which all places are set. `is_settled` is False while a change is incomplete: after an
    interrupt in the middle of one, the next call that enters or leaves a scope completes it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: a finalizer may enter a mode while this thread holds it
        self.registered: list[Patch] = []
        self.found_places: list[Patch] = []
        self.switches: list[Patch] = []
        self.holds: dict[int, int] = {}
        """The scopes of each hold, by its id()."""
        self.active = 0
        self.is_settled = True
        self._places: dict[tuple[int, str], Place] = {}
        self._unresolved: list[Patch] = []
        self._groups: dict[GroupKey, PatchGroup] = {}
        self._changes: dict[tuple[int, int], list[Change]] = {}
        self._with_any_mode = 0
        self._until_left = 0
        self._overridden: list[Place] = []
        self._is_suspended = False

    # --- places --------------------------------------------------------------------------------------------

    def register(self, patch: Patch) -> None:
        for other in self.registered:
            if other.place == patch.place and other.mask & patch.mask:
                raise _make_conflict_error(other, patch)
        with self.lock:
            self.registered.append(patch)
            self._unresolved.append(patch)
            self._changes.clear()
            if self.active & patch.mask:  # a package that was imported while a mode is active
                self.is_settled = False
                self.settle()

    def _resolve_all(self) -> None:
        while self._unresolved:
            patch = self._unresolved[0]
            found = find_place(patch)
            if found is not None:
                self._add(patch, *found)
            del self._unresolved[0]

    def _add(self, patch: Patch, owner: object, name: str) -> None:
        place = self._places.setdefault(_key(owner, name), Place(owner, name))
        if place.patches:  # its values are made anew
            self._changes.clear()
        for other in place.patches:
            if other.mask & patch.mask:
                raise _make_conflict_error(other, patch)
        place.set_patches((*place.patches, patch))

    def find_group(self, places: Sequence[tuple[object, str]], make: Make) -> int:
        """The bit by which these places, found at run time, are patched with `make`. The same places have the same bit."""
        key = id(make), tuple([(id(owner), name) for owner, name in places])
        group = self._groups.get(key)
        return self._add_group(key, places, make) if group is None else group.bit

    def _add_group(self, key: GroupKey, places: Sequence[tuple[object, str]], make: Make) -> int:
        with self.lock:
            if len(self._groups) >= _MOST_GROUPS:
                self._drop_groups()
            used = {group.bit for group in self._groups.values()}
            bit = next(bit for number in itertools.count() if (bit := _FIRST_GROUP << number) not in used)
            self._groups[key] = PatchGroup(bit, tuple(places))
            for owner, name in {_key(owner, name): (owner, name) for owner, name in places}.values():
                self._add(Patch(name, make, bit, ""), owner, name)
            return bit

    def _drop_groups(self) -> None:
        wanted = functools.reduce(int.__or__, self.holds.values(), self.active)
        dropped = sum(group.bit for group in self._groups.values() if not group.bit & wanted)
        self._groups = {key: group for key, group in self._groups.items() if group.bit & wanted}
        for key, place in list(self._places.items()):
            if any(patch.mask & dropped for patch in place.patches):
                place.set_patches(patch for patch in place.patches if not patch.mask & dropped)
                if not place.patches:
                    del self._places[key]
        self._changes.clear()

    # --- scopes --------------------------------------------------------------------------------------------

    def begin_with_modes(self, scope: Scope) -> None:
        """From now on, this scope is active whenever a mode is."""
        if not self._with_any_mode & scope.bit:
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
        self._set_suspended(True)
        try:
            yield
        finally:
            self._set_suspended(False)

    def _set_suspended(self, is_suspended: bool) -> None:
        with self.lock:
            self._is_suspended = is_suspended
            self.settle()

    def _find_wanted(self) -> int:
        wanted = 0
        for scopes in () if self._is_suspended else tuple(self.holds.values()):
            wanted |= scopes
        if not wanted & _ANY_MODE_BIT:
            self._until_left = 0
            return wanted
        return wanted | self._with_any_mode | self._until_left

    # --- changing ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Set all places for the scopes that are held now. Again if a finalizer has changed these meanwhile."""
        while (wanted := self._find_wanted()) != self.active or not self.is_settled:
            if self.is_settled:
                self.is_settled = False
                self.change(self.active, wanted)
            else:
                self._repair(self.active, wanted)
            self.active = wanted
            self.is_settled = True

    def change(self, before: int, after: int) -> None:
        changes = self._changes.get((before, after))
        if changes is None:
            changes = self._changes[before, after] = self._find_changes(before, after)
        for place, namespace, name, old, new in changes:
            if namespace.get(name, _MISSING) is not old:
                self._settle_place(place, before, after)
            elif new is _MISSING:
                place.write(new)
            elif place.entries is not None:
                place.entries[name] = new
            else:
                setattr(place.owner, name, new)
        for switch in self.switches:
            if bool(switch.mask & before) is not bool(switch.mask & after):
                switch.make(bool(switch.mask & after))
        if self._overridden:
            self._end_overrides(after)

    def _find_changes(self, before: int, after: int) -> list[Change]:
        self._resolve_all()
        different = before ^ after
        return [
            (place, place.namespace, place.name, place.value(before), place.value(after))
            for place in self._places.values()
            if any(patch.mask & different for patch in place.patches)
            and place.value(before) is not place.value(after)
        ]

    def _repair(self, before: int, after: int) -> None:
        """After an interrupt: set each place, whatever its current value."""
        self._resolve_all()
        for place in list(self._places.values()):
            self._settle_place(place, before, after)
        for switch in self.switches:
            switch.make(bool(switch.mask & after))

    def _settle_place(self, place: Place, before: int, after: int) -> None:
        self._changes.clear()
        place.settle(before, after)
        if place.overridden and place not in self._overridden:
            self._overridden.append(place)

    def _end_overrides(self, after: int) -> None:
        self._changes.clear()
        for place in self._overridden:
            place.overridden &= after
        self._overridden = [place for place in self._overridden if place.overridden]


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
    """Register a function that is called instead of the original, with the original as its first argument. Where
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
    """Register a change that is not the value of a name: `turn(True)` makes it, `turn(False)` undoes it. After an
    interrupt, each may be called again."""

    def register(turn: M) -> M:
        ENGINE.switches.append(Patch(place, turn, *_find_reason(turn, during, reason)))
        return turn

    return register


def _find_reason(make: Callable[..., object], during: Scopes, reason: str) -> tuple[int, str]:
    reason = reason or inspect.getdoc(make) or ""
    if not reason:
        raise TypeError(
            f"{make.__module__}.{make.__qualname__} patches torch without a reason: give it a docstring"
        )
    return combine(*([during] if isinstance(during, Scope) else during)), reason


# --- entering scopes ----------------------------------------------------------------------------------------


class Hold:
    """Keeps scopes active, from `enter` to `leave`.

        with Hold() as hold:
            hold.enter(combine(TRACING))
            ...

    A hold that is freed is left: that of a thread that has ended, or whose `with` statement was interrupted.
    """

    __slots__ = ("_scopes",)

    def __init__(self) -> None:
        self._scopes = 0

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def __del__(self) -> None:
        self.leave()

    def enter(self, scopes: int) -> None:
        self._scopes |= scopes
        with ENGINE.lock:
            ENGINE.holds[id(self)] = self._scopes
            if scopes & ~ENGINE.active or not ENGINE.is_settled:
                ENGINE.settle()

    def replace(self, owner: object, name: str, make: Make) -> None:
        """Patch a place that was found at run time, with a function registered by `patch_found`."""
        self.enter(ENGINE.find_group([(owner, name)], make))

    def leave(self) -> None:
        if not self._scopes:
            return
        with ENGINE.lock:
            ENGINE.holds.pop(id(self), None)
            ENGINE.settle()
        self._scopes = 0


@contextmanager
def active(*scopes: Scope) -> Iterator[Hold]:
    """A context in which these scopes are active."""
    with Hold() as hold:
        hold.enter(combine(*scopes))
        yield hold


if __name__ == "__main__":
    sys.exit(importlib.import_module("understudy.cli").main(["patches"]))
