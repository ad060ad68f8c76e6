"""The functions, classes and state that the code of a layer can reach, besides its arguments and its module.

The search goes by names: a function reaches the globals that it names, its closure and its defaults; in modules and
classes, it reaches the attributes that any visited function names.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import (
    BuiltinFunctionType,
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

from understudy.graph.borrowed_state import cell_contents
from understudy.lines import is_user_file

Place = tuple[Callable[[Any], Any], Any]
"""Reads a name of a namespace or of a module, and that name; or reads a cell of a closure, and None."""
MEMBERS = (
    FunctionType, BuiltinFunctionType, ModuleType, type, property, staticmethod, classmethod, functools.cached_property,
)  # fmt: skip
"""Types that are compared by identity, and searched for what they reach."""
NOT_FOLLOWED = frozenset({"torch", "numpy", "understudy", "typing", "abc"})
STATELESS: dict[str, frozenset[str] | None] = {
    **dict.fromkeys((
        "abc", "array", "ast", "base64", "binascii", "bisect", "builtins", "cmath", "collections", "contextlib",
        "contextvars", "copy", "dataclasses", "enum", "fractions", "functools", "hashlib", "heapq", "html", "itertools",
        "json", "keyword", "math", "numbers", "operator", "re", "reprlib", "statistics", "string", "struct", "textwrap",
        "types", "typing", "unicodedata", "weakref", "zlib", "__future__",
    )),
    "warnings": None,  # its state is compared
    "os": frozenset({"path", "environ", "getenv", "fspath", "cpu_count", "PathLike"}),
    "posixpath": frozenset({"join", "basename", "dirname", "split", "splitext", "normpath", "isabs", "commonprefix"}),
    "sys": frozenset({"exc_info", "intern"}),
    "logging": frozenset({"Logger", "LoggerAdapter", "Filter", "Formatter", "Handler", "getLevelName"}),
    "inspect": frozenset({"signature", "Parameter", "Signature", "isfunction", "ismethod", "isclass", "unwrap"}),
    "threading": frozenset({"Lock", "RLock", "local"}),
    "importlib": frozenset({"util", "metadata"}),
}  # fmt: skip
"""Modules of Python's standard library → their functions and classes without state, or whose state is compared; None
for all of them. Code that uses any other can't be compared: it may read files, clocks, settings."""
STATE_OF = {"warnings": ("filters",), "os": ("environ",)}
"""Modules of Python's standard library → the globals in which their functions store state."""
UNREADABLE_NAMES: dict[str, frozenset[str] | None] = {
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
"""Other modules that are not searched → the names in them whose state can't be read; None for all."""
COMPARED_SETTINGS = frozenset(
    {"default_dtype", "float32_matmul_precision", "num_threads", "grad_enabled", "detect_anomaly", "anomaly_enabled",
     "default_device", "autocast_dtype", "autocast_gpu_dtype", "autocast_cpu_dtype", "autocast_enabled", "device",
     "device_module", "device_capability", "device_properties", "rank", "world_size"}
)  # fmt: skip
"""Torch has `get_` or `set_` functions for these. They are compared for every layer, are constant in a process, or
disable the replay of layers (autocast). A layer that uses another such function is run."""
REFLECTIVE_BUILTINS = frozenset({"id", "hash", "globals", "eval", "exec", "compile", "__import__"})
"""Built-in functions with which code reaches objects that it does not name. `__hash__` may call `hash` on its parts:
its result is only visible to code that calls `hash` too, or looks something up in a dict or set."""
IO_BUILTINS = frozenset({"open", "print", "input", "breakpoint"})
"""Built-in functions with input or output."""
BY_NAME = frozenset({"setattr", "delattr", "vars", "__dict__"})
"""Names with which code reaches attributes of a module without naming them. Not `getattr`, which most code uses."""
ATTRIBUTE_INSTRUCTIONS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
"""Methods that run when an object is made. Visited objects have been made already."""
TEXT_METHODS = frozenset({"__repr__", "__str__", "__format__", "extra_repr"})
"""Methods that format an object as text."""
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
"""Attributes of torch of these types are constants."""
NOT_DATA = (
    *MEMBERS, *CONSTANTS, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType,
    ClassMethodDescriptorType,
)  # fmt: skip
UNREADABLE = frozenset({"modules", "default_generator"})
"""Data of libraries that is too large to be compared, or whose state can't be read."""
PLAIN = (bool, int, float, str)
BUILTINS = vars(builtins)
IGNORED = frozenset(
    {"__name__", "__file__", "__qualname__", "__class__", "__spec__", "__builtins__", "__path__", "__doc__", "__module__",
     "__annotations__", "__dict__", "__weakref__", "_abc_impl", "__orig_bases__"}
)  # fmt: skip
"""Attributes of every module, class or function."""


@functools.lru_cache(maxsize=8192)
def names_in(code: CodeType) -> tuple[frozenset[str], bool]:
    """The names and strings in a function, including nested ones; and whether it can reach objects that it does not name."""
    names, is_revealing = set(code.co_names), False
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, reveals = names_in(constant)
            names |= inner
            is_revealing |= reveals
        elif type(constant) is str and constant.isidentifier():
            names.add(constant)
    telling = (REFLECTIVE_BUILTINS | IO_BUILTINS) - ({"hash"} if code.co_name == "__hash__" else set())
    if not telling.isdisjoint(code.co_names):
        is_revealing |= any(
            step.argval in telling and step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            for step in dis.get_instructions(code)
        )
    return frozenset(names), is_revealing


@functools.lru_cache(maxsize=8192)
def attributes_of(code: CodeType, name: str) -> frozenset[str]:
    """The attributes of a global that a function reads. All names in the function, where the code does not show it."""
    found: set[str] = set()
    is_asked = False
    for step in dis.get_instructions(code):
        if is_asked:
            if step.opname not in ATTRIBUTE_INSTRUCTIONS:
                return names_in(code)[0]
            found.add(step.argval)
        is_asked = step.argval == name and step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and name in names_in(constant)[0]:
            found |= attributes_of(constant, name)
    return frozenset(found)


@functools.lru_cache(maxsize=8192)
def imports_in(code: CodeType) -> frozenset[str]:
    """The modules that a function, or a nested one, imports when it runs."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= imports_in(constant)
    return frozenset(found)


class ReachableCode:
    """Everything that some classes and functions reach. Grows as more of them are added."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.names_in_runs: set[str] = set()
        """The same without methods like `__repr__`, whose calls can be watched."""
        self.members: list[Place] = []
        """Where functions, classes and modules were found."""
        self.states: list[Place] = []
        """Where everything else was found."""
        self.extras: list[object] = []
        """The defaults and attributes of functions."""
        self.tables: list[Place] = []
        """The same, in the globals and classes of installed packages."""
        self.spaces: list[Any] = []
        """Namespaces: names that are added to one may be state, too."""
        self.is_open = False
        """Whether some of the state can't be read."""
        self._met: dict[int, Any] = {}
        self._found: set[tuple[int, Any]] = set()
        self._waiting: list[FunctionType] = []
        self._owners: list[Any] = []
        self._library_classes: list[Any] = []
        self._sizes: list[int] = []
        self._describing: set[int] = set()

    @property
    def is_stale(self) -> bool:
        """Whether names were added to a namespace since the search."""
        return self._sizes != list(map(len, self.spaces))

    def list_unknown(self, values: Iterable[Any]) -> list[Any]:
        """Those that were not searched yet."""
        met = self._met
        return [value for value in values if id(value) not in met]

    def add(self, values: Iterable[type], *, is_module: bool = False) -> None:
        """Search functions and classes. The class of an nn.Module is searched completely."""
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
            if owner is torch.nn.Module or not is_tracked(owner.__module__):
                self._class_of_library(owner)
                continue
            space = vars(owner)
            if self._meets(space):
                self.spaces.append(space)
                self._owners += [] if is_module else [space]
            for name, value in space.items():
                is_implied = name.startswith("__") and isinstance(value, FunctionType)
                if is_module and name in TEXT_METHODS:
                    self._describing.add(id(value))
                if (is_module or is_implied) and name not in CONSTRUCTORS:
                    self._reach(space, name, value)

    def _class_of_library(self, owner: type) -> None:
        """The methods of a library's class are not searched; a program may store data in it."""
        space = vars(owner)
        if owner is not object and self._meets(space):
            self.spaces.append(space)
            self._library_classes.append(space)

    def _meets(self, value: object) -> bool:
        """Whether the value is visited for the first time."""
        is_new = id(value) not in self._met
        self._met[id(value)] = value
        return is_new

    def _function(self, function: Any) -> None:
        if not self._meets(function):
            return
        if isinstance(function, FunctionType) and is_user_file(function.__code__.co_filename):
            self._waiting.append(function)
        else:
            self.is_open |= is_stateful(getattr(function, "__module__", None) or "", function.__name__)

    def _follow(self, function: FunctionType) -> None:
        names, is_revealing = names_in(function.__code__)
        self.names |= names - CONSTRUCTORS
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
        self.extras += extras_of(function) if is_own(function) else ()

    def _ask(self, value: object, asked: frozenset[str], names: frozenset[str]) -> None:
        """A function reads these attributes of a module or class; `names`: all names in the function."""
        if is_own(value):
            self._follow_attributes(value, asked)
        elif isinstance(value, ModuleType) and not is_tracked(value.__name__):
            is_whole = asked == names  # the code does not show which attributes are read
            self.is_open |= is_whole and not BY_NAME.isdisjoint(names)
            self._ask_library(value, asked, names)

    def _ask_library(self, module: ModuleType, asked: frozenset[str], names: frozenset[str]) -> None:
        """Attributes of a module that is not searched: its data is compared, its functions are looked up in tables. For
        a submodule, all names in the function count."""
        key = (id(module), asked)
        if key in self._found:
            return
        self._found.add(key)
        space = vars(module)
        if self._meets(space):
            self.spaces.append(space)
        for name in (*(asked & space.keys()), *STATE_OF.get(module.__name__, ())):
            value = space[name]
            if isinstance(value, ModuleType) and not is_tracked(value.__name__):
                self.is_open |= name in (UNREADABLE_NAMES.get(module.__name__) or ())
                self._ask_library(value, names, names)
            elif isinstance(value, MEMBERS):
                self.is_open |= is_stateful(module.__name__, name)
                if isinstance(value, type):
                    self._class_of_library(value)
            elif name in UNREADABLE:
                self.is_open = True
            else:
                self._compare(space, name)
        if type(module) is not ModuleType:  # some compute their attributes, as torch.backends
            computed = [name for name in asked - space.keys() if type(getattr(module, name, None)) in PLAIN]
            self.states += [_place_of(module, name) for name in computed]

    def _compare(self, space: Any, name: str) -> None:
        """Compare data of a library whose name a function uses."""
        value, key = space[name], (id(space), name)
        if not isinstance(value, NOT_DATA) and name not in IGNORED and key not in self._found:
            self._found.add(key)
            self.states.append(_place_of(space, name))

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
            (self.states if name is None or _is_own(_owner_of(place)) else self.tables).append(_place_of(place, name))
            return
        if name is None or is_own(value) or _is_own(_owner_of(place)):
            self.members.append(_place_of(place, name))
        if isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, type):
            if is_own(value):
                self._class(value, is_module=False)
                self._follow_attributes(value, CONSTRUCTORS)
            elif is_of_python(value.__module__):
                self.is_open |= is_stateful(value.__module__, value.__name__)
        else:
            for function in functions_of(value):
                self._function(function)

    def _module(self, module: ModuleType) -> None:
        if not self._meets(module):
            return
        if is_tracked(module.__name__):
            self.spaces.append(vars(module))


def extras_of(function: FunctionType) -> list[object]:
    """The defaults and attributes of a function, which may be state."""
    extras = [
        value
        for value in function.__defaults__ or ()
        if type(value) not in (int, float, bool, str, type(None))
    ]
    return [*extras, *filter(None, (function.__kwdefaults__,)), function.__dict__]


def functions_of(value: object) -> Iterator[object]:
    """The functions that run when this is called, or read as an attribute."""
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
    return [read(name) for read, name in places]


def _place_of(owner: Any, name: Any) -> Place:
    """The place of this name in a namespace or a module; without a name, of the contents of a cell."""
    if name is None:
        return lambda _: cell_contents(owner), None
    return (lambda name: getattr(owner, name, None)) if isinstance(owner, ModuleType) else owner.get, name


def is_of_python(module: str) -> bool:
    """Whether a module belongs to Python's standard library."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top.lstrip("_") in sys.stdlib_module_names


def is_stateful(module: str, name: str) -> bool:
    """Whether a function or class of a module that is not searched may have state that is not compared."""
    if is_of_python(module):
        bare = module if module in STATELESS else module.lstrip("_")
        stateless = STATELESS.get(bare, STATELESS.get(bare.partition(".")[0], frozenset()))
        return stateless is not None and name not in stateless
    if module.partition(".")[0] == "torch" and name.startswith(("get_", "set_")):
        return name[4:] not in COMPARED_SETTINGS
    hidden = UNREADABLE_NAMES.get(module, frozenset())
    return hidden is None or name in hidden


def _owner_of(space: Any) -> str:
    """The name of the module to which a namespace (of a module or a class) belongs."""
    return str(space.get("__module__") or space.get("__name__"))


def is_own(value: object) -> bool:
    """Whether a function, class or module belongs to the program, not to an installed package."""
    return _is_own(getattr(value, "__module__", None) or getattr(value, "__name__", ""))


@functools.cache
def _is_own(module: str) -> bool:
    found = sys.modules.get(module)
    return is_tracked(module) and "-packages" not in (getattr(found, "__file__", None) or "")


@functools.cache
def is_tracked(module: str) -> bool:
    """Whether a module belongs to the user's program or to a library that the user has chosen."""
    found = sys.modules.get(module)
    if found is None or module.partition(".")[0] in NOT_FOLLOWED:
        return found is None
    file = getattr(found, "__file__", None)
    if file is None:
        return module not in sys.builtin_module_names
    return is_user_file(file)
