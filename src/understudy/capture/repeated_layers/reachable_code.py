"""What the code of a layer can reach besides its arguments and its module: functions, classes, and places of state.

Names decide: a function reaches the globals that it names, its closure and its defaults; in the modules and classes that
it reaches, it reaches what some function that was met calls by that name.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from understudy.capture.borrowed_modules import cell_contents
from understudy.lines import is_the_users

Place = tuple[Any, Any]
"""A namespace, or a module, and a name in it; or a cell of a closure and None."""
MEMBERS = (
    FunctionType, BuiltinFunctionType, ModuleType, type, property, staticmethod, classmethod, functools.cached_property,
)  # fmt: skip
"""What is the same if it is the same object, and is followed for what it reaches."""
NOT_FOLLOWED = frozenset({"torch", "numpy", "understudy", "typing", "abc"})
STATELESS: dict[str, frozenset[str] | None] = {
    **dict.fromkeys((
        "abc", "array", "ast", "base64", "binascii", "bisect", "builtins", "cmath", "collections", "contextlib",
        "contextvars", "copy", "dataclasses", "enum", "fractions", "functools", "hashlib", "heapq", "html", "itertools",
        "json", "keyword", "math", "numbers", "operator", "re", "reprlib", "statistics", "string", "struct", "textwrap",
        "types", "typing", "unicodedata", "weakref", "zlib", "__future__",
    )),
    "warnings": None,  # what it keeps is among the compared
    "os": frozenset({"path", "environ", "getenv", "fspath", "cpu_count", "PathLike"}),
    "posixpath": frozenset({"join", "basename", "dirname", "split", "splitext", "normpath", "isabs", "commonprefix"}),
    "sys": frozenset({"exc_info", "intern"}),
    "logging": frozenset({"Logger", "LoggerAdapter", "Filter", "Formatter", "Handler", "getLevelName"}),
    "inspect": frozenset({"signature", "Parameter", "Signature", "isfunction", "ismethod", "isclass", "unwrap"}),
    "threading": frozenset({"Lock", "RLock", "local"}),
    "importlib": frozenset({"util", "metadata"}),
}  # fmt: skip
"""Modules of Python's own library → the functions and classes in it that neither keep nor read state, or whose state is
compared; None for all of them. Code that uses any other can't be compared: it may read files, clocks, settings."""
KEPT_BY = {"warnings": ("filters",), "os": ("environ",)}
"""Modules of Python's own library → where their functions keep state."""
HIDDEN: dict[str, frozenset[str] | None] = {
    "numpy": frozenset(
        {"random", "load", "save", "savez", "loadtxt", "savetxt", "fromfile", "memmap", "seterr", "geterr", "errstate"}
    ),
    "numpy.random": None,
    "torch": frozenset(
        {"initial_seed", "seed", "manual_seed", "get_rng_state", "set_rng_state", "default_generator", "load", "save",
         "from_file"}
    ),
    "torch.random": None,
    "torch.serialization": None,
}  # fmt: skip
"""Other modules that are not followed → the names in them that lead to state that can't be looked at; None for all."""
COMPARED_SETTINGS = frozenset(
    {"default_dtype", "float32_matmul_precision", "num_threads", "grad_enabled", "detect_anomaly", "anomaly_enabled",
     "default_device", "autocast_dtype", "autocast_gpu_dtype", "autocast_cpu_dtype", "autocast_enabled", "device",
     "device_module", "device_capability", "device_properties", "rank", "world_size"}
)  # fmt: skip
"""Torch has `get_` or `set_` functions for these. They are compared for every layer, are the same for a whole process, or
keep layers from being repeated at all (autocast). A layer that uses another such function is run."""
REVEALING = frozenset({"id", "hash", "globals", "eval", "exec", "compile", "__import__"})
"""Built-in functions with which code finds what it does not name. A `__hash__` may call `hash` of its parts: who reads the
result calls `hash` too, or looks something up in a dict or set."""
OUTSIDE = frozenset({"open", "print", "input", "breakpoint"})
"""Built-in functions that reach out of the program."""
BY_NAME = frozenset({"setattr", "delattr", "vars", "__dict__"})
"""How code reaches the attributes of a module without naming them; besides `getattr`, which most code has."""
ASKING = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
MAKING = frozenset({"__init__", "__new__", "__post_init__"})
"""What runs when an object is made. Objects that are met have been made."""
DESCRIBING = frozenset({"__repr__", "__str__", "__format__", "extra_repr"})
"""Methods that describe an object as text."""
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
"""What nobody gives another meaning to, among the attributes of torch."""
NOT_DATA = (
    *MEMBERS, *CONSTANTS, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType,
    ClassMethodDescriptorType,
)  # fmt: skip
UNREADABLE = frozenset({"modules", "default_generator"})
"""Data of libraries that are too large to be compared, or whose state does not show."""
PLAIN = (bool, int, float, str)
BUILTINS = vars(builtins)
IGNORED = frozenset(
    {"__name__", "__file__", "__qualname__", "__class__", "__spec__", "__builtins__", "__path__", "__doc__", "__module__",
     "__annotations__", "__dict__", "__weakref__", "_abc_impl", "__orig_bases__"}
)  # fmt: skip
"""What every module, class or function has."""


@functools.lru_cache(maxsize=8192)
def names_in(code: CodeType) -> tuple[frozenset[str], bool]:
    """The names that a function uses, those inside it too, as names or as text; and whether it can reach others."""
    names, is_revealing = set(code.co_names), False
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, reveals = names_in(constant)
            names |= inner
            is_revealing |= reveals
        elif type(constant) is str and constant.isidentifier():
            names.add(constant)
    telling = (REVEALING | OUTSIDE) - ({"hash"} if code.co_name == "__hash__" else set())
    if not telling.isdisjoint(code.co_names):
        is_revealing |= any(
            step.argval in telling and step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            for step in dis.get_instructions(code)
        )
    return frozenset(names), is_revealing


@functools.lru_cache(maxsize=8192)
def attributes_of(code: CodeType, name: str) -> frozenset[str]:
    """What a function asks of the global of this name. All that it names, where that does not show."""
    found: set[str] = set()
    is_asked = False
    for step in dis.get_instructions(code):
        if is_asked:
            if step.opname not in ASKING:
                return names_in(code)[0]
            found.add(step.argval)
        is_asked = step.argval == name and step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and name in names_in(constant)[0]:
            found |= attributes_of(constant, name)
    return frozenset(found)


@functools.lru_cache(maxsize=8192)
def imports_in(code: CodeType) -> frozenset[str]:
    """The modules that a function imports when it runs, and those inside it too."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= imports_in(constant)
    return frozenset(found)


class ReachableCode:
    """All that some classes and functions reach. It grows as more of them are met."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.names_in_runs: set[str] = set()
        """The same, without those of methods that describe a module as text: whether these are called can be watched."""
        self.members: list[Place] = []
        """Where functions, classes and modules are found."""
        self.states: list[Place] = []
        """Where everything else is found."""
        self.tables: list[Place] = []
        """The same, in the globals and classes of installed packages."""
        self.spaces: list[Any] = []
        """Namespaces: what is added to one may be state, too."""
        self.is_open = False
        """Whether some of it can't be looked at."""
        self._met: dict[int, Any] = {}
        self._found: set[tuple[int, Any]] = set()
        self._waiting: list[FunctionType] = []
        self._owners: list[Any] = []
        self._library_classes: list[Any] = []
        self._sizes: list[int] = []
        self._describing: set[int] = set()

    @property
    def is_stale(self) -> bool:
        """Whether there are names now that were not there before."""
        return self._sizes != list(map(len, self.spaces))

    def knows(self, value: object) -> bool:
        return id(value) in self._met

    def add(self, values: Iterable[type], *, is_module: bool = False) -> None:
        """Follow functions, and the classes of objects that were met. Of a module's class, all of it is followed."""
        for value in values:
            if isinstance(value, type):
                self._class(value, is_module)
            else:
                self._function(value)
        done = -1
        while self._waiting or done != len(self._owners) * len(self.names):
            done = len(self._owners) * len(self.names)
            while self._waiting:
                self._follow(self._waiting.pop())
            for space in list(self._owners):
                for name in self.names & space.keys():
                    self._reach(space, name, space[name])
            for space in self._library_classes:
                for name in self.names & space.keys():
                    self._compare(space, name)
        self._sizes = list(map(len, self.spaces))

    def _class(self, kind: type, is_module: bool) -> None:
        if not self._meets(kind):
            return
        for owner in kind.__mro__:
            if owner is torch.nn.Module or not is_followed(owner.__module__):
                self._class_of_library(owner)
                continue
            space = vars(owner)
            if self._meets(space):
                self.spaces.append(space)
                self._owners += [] if is_module else [space]
            for name, value in space.items():
                is_implied = name.startswith("__") and isinstance(value, FunctionType)
                if is_module and name in DESCRIBING:
                    self._describing.add(id(value))
                if (is_module or is_implied) and name not in MAKING:
                    self._reach(space, name, value)

    def _class_of_library(self, owner: type) -> None:
        """Its methods are not followed; a program may keep data in it."""
        space = vars(owner)
        if owner is not object and self._meets(space):
            self.spaces.append(space)
            self._library_classes.append(space)

    def _meets(self, value: object) -> bool:
        """Whether for the first time."""
        is_new = id(value) not in self._met
        self._met[id(value)] = value
        return is_new

    def _function(self, function: Any) -> None:
        if not self._meets(function):
            return
        if isinstance(function, FunctionType) and is_the_users(function.__code__.co_filename):
            self._waiting.append(function)
        else:
            self.is_open |= is_stateful(getattr(function, "__module__", None) or "", function.__name__)

    def _follow(self, function: FunctionType) -> None:
        names, is_revealing = names_in(function.__code__)
        self.names |= names - MAKING
        if id(function) not in self._describing:
            self.names_in_runs |= names
        self.is_open |= is_revealing
        space = function.__globals__
        if self._meets(space):
            self.spaces.append(space)
        for cell in function.__closure__ or ():
            value = cell_contents(cell)
            self._reach(cell, None, value)
            if isinstance(value, ModuleType):
                self._ask(value, names, names)
        for name in names & space.keys():
            value = space[name]
            self._reach(space, name, value)
            if isinstance(value, (ModuleType, type)):
                self._ask(value, attributes_of(function.__code__, name), names)
        for name in imports_in(function.__code__) & sys.modules.keys():
            self._module(sys.modules[name])
            self._ask(sys.modules[name], names, names)
        for name in (names & BUILTINS.keys()) - space.keys():
            self._reach(BUILTINS, name, BUILTINS[name])
        for value in extras_of(function) if is_own(function) else ():
            self.states.append((CellType(value), None))

    def _ask(self, value: object, asked: frozenset[str], names: frozenset[str]) -> None:
        """A function uses these attributes of a module or class; `names`: all that it names."""
        if is_own(value):
            self._follow_attributes(value, asked)
        elif isinstance(value, ModuleType) and not is_followed(value.__name__):
            is_whole = asked == names  # it is not seen which attributes are meant
            self.is_open |= is_whole and not BY_NAME.isdisjoint(names)
            self._ask_library(value, asked, names)

    def _ask_library(self, module: ModuleType, asked: frozenset[str], names: frozenset[str]) -> None:
        """What is asked of a module that is not followed: its data are compared, its functions are judged by tables. Of
        a module in it, all is asked that the function names."""
        key = (id(module), asked)
        if key in self._found:
            return
        self._found.add(key)
        space = vars(module)
        if self._meets(space):
            self.spaces.append(space)
        for name in (*(asked & space.keys()), *KEPT_BY.get(module.__name__, ())):
            value = space[name]
            if isinstance(value, ModuleType) and not is_followed(value.__name__):
                self.is_open |= name in (HIDDEN.get(module.__name__) or ())
                self._ask_library(value, names, names)
            elif isinstance(value, MEMBERS):
                self.is_open |= is_stateful(module.__name__, name)
                if isinstance(value, type):
                    self._class_of_library(value)
            elif name in UNREADABLE:
                self.is_open = True
            else:
                self._compare(space, name)
        if type(module) is not ModuleType:  # some have attributes that are computed, as torch.backends
            computed = [name for name in asked - space.keys() if type(getattr(module, name, None)) in PLAIN]
            self.states += [(module, name) for name in computed]

    def _compare(self, space: Any, name: str) -> None:
        """Data of a library, under a name that some function uses."""
        value, key = space[name], (id(space), name)
        if not isinstance(value, NOT_DATA) and name not in IGNORED and key not in self._found:
            self._found.add(key)
            self.states.append((space, name))

    def _follow_attributes(self, owner: object, names: frozenset[str]) -> None:
        for part in owner.__mro__ if isinstance(owner, type) else (owner,):
            space = vars(part)
            for name in names & space.keys():
                self._reach(space, name, space[name])
                if isinstance(space[name], ModuleType) and is_own(space[name]):
                    self._follow_attributes(space[name], names)

    def _reach(self, place: object, name: object, value: object) -> None:
        key = (id(place), name)
        if key in self._found or name in IGNORED:
            return
        self._found.add(key)
        is_bound = isinstance(value, BuiltinFunctionType) and not isinstance(
            value.__self__, (ModuleType, type(None))
        )
        if is_bound or not isinstance(value, MEMBERS):
            (self.states if name is None or _is_own(_owner_of(place)) else self.tables).append((place, name))
            return
        if name is None or is_own(value) or _is_own(_owner_of(place)):
            self.members.append((place, name))
        if isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, type):
            if is_own(value):
                self._class(value, is_module=False)
                self._follow_attributes(value, MAKING)
            elif is_of_python(value.__module__):
                self.is_open |= is_stateful(value.__module__, value.__name__)
        else:
            for function in functions_of(value):
                self._function(function)

    def _module(self, module: ModuleType) -> None:
        if not self._meets(module):
            return
        if is_followed(module.__name__):
            self.spaces.append(vars(module))


def extras_of(function: FunctionType) -> list[object]:
    """What a function carries with it, and may use as state: defaults and attributes."""
    extras = [
        value
        for value in function.__defaults__ or ()
        if type(value) not in (int, float, bool, str, type(None))
    ]
    return [*extras, *filter(None, (function.__kwdefaults__,)), function.__dict__]


def functions_of(value: object) -> Iterator[object]:
    """What is called when this is called, or asked for."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        yield from functions_of(value.__func__)
    elif isinstance(value, property):
        yield from (function for function in (value.fget, value.fset) if function is not None)
    elif isinstance(value, functools.cached_property):
        yield value.func
    else:
        yield value
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield wrapped


def read_places(places: Iterable[Place]) -> list[object]:
    """What is there now."""
    return [_read_place(place, name) for place, name in places]


def _read_place(place: Any, name: Any) -> Any:
    if name is None:
        return cell_contents(place)
    return getattr(place, name, None) if isinstance(place, ModuleType) else place.get(name)


def is_of_python(module: str) -> bool:
    """Whether a module belongs to Python's own library."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top.lstrip("_") in sys.stdlib_module_names


def is_stateful(module: str, name: str) -> bool:
    """Whether a function or class of a module that is not followed may keep or read state that is not compared."""
    if is_of_python(module):
        bare = module if module in STATELESS else module.lstrip("_")
        stateless = STATELESS.get(bare, STATELESS.get(bare.partition(".")[0], frozenset()))
        return stateless is not None and name not in stateless
    if module.partition(".")[0] == "torch" and name.startswith(("get_", "set_")):
        return name[4:] not in COMPARED_SETTINGS
    hidden = HIDDEN.get(module, frozenset())
    return hidden is None or name in hidden


def _owner_of(space: Any) -> str:
    """The name of the module that a namespace, of a module or of a class, belongs to."""
    return str(space.get("__module__") or space.get("__name__"))


def is_own(value: object) -> bool:
    """Whether a function, class or module belongs to the program, not to an installed package."""
    return _is_own(getattr(value, "__module__", None) or getattr(value, "__name__", ""))


@functools.cache
def _is_own(module: str) -> bool:
    found = sys.modules.get(module)
    return is_followed(module) and "-packages" not in (getattr(found, "__file__", None) or "")


@functools.cache
def is_followed(module: str) -> bool:
    """Whether a module is the user's, or of a library that the user has chosen."""
    found = sys.modules.get(module)
    if found is None or module.partition(".")[0] in NOT_FOLLOWED:
        return found is None
    file = getattr(found, "__file__", None)
    if file is None:
        return module not in sys.builtin_module_names
    return is_the_users(file)
