"""Finds the modules that a traced function refers to, and replaces their tensors during the trace.

A tensor that was in the cache of a function (`functools.lru_cache`) before the trace, or in a dict or list of a module,
is a constant of the graph. Stand-ins are useless after the trace: a cache that has stored one is cleared when the trace
ends.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import torch

from understudy import _torch
from understudy.capture.constants import Constants
from understudy.capture.lazy_state import LazyParameter, LazyParameterDict, LazyParameters
from understudy.contexts import contextmanager, run_to_the_end
from understudy.fake.convert import PLAIN_TYPES
from understudy.fake.inputs import LRU_CACHE
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import MOST_READABLE, DeterminedContents, LiteralStorage
from understudy.graph.borrowed_state import (
    PLAIN,
    BorrowedState,
    ProgramVariables,
    cell_contents,
    depends_on_inputs,
    has_same_form,
    named_parts,
    names_used_in,
    own_containers,
    unwrap_member,
    values_in,
    write_assigned,
)
from understudy.lines import is_user_file
from understudy.spec.call import flat

Named = tuple[torch.nn.Module, bool]
"""A module, and whether it is the traced one: its tensors then keep their names in the graph module."""


def modules_of(f: Callable[..., object]) -> list[Named]:
    """The modules that a callable is, is bound to, wraps, or refers to by name."""
    found: dict[int, Named] = {}
    for module, is_root in _modules_of(f, set()):
        found.setdefault(id(module), (module, is_root))
    return list(found.values())


def _modules_of(f: object, seen: set[int]) -> Iterator[Named]:
    if id(f) in seen:
        return
    seen.add(id(f))
    if isinstance(f, torch.nn.Module):
        yield f, True
        return
    for name in ("_orig_mod", "__self__"):
        owner = getattr(f, name, None)
        if isinstance(owner, torch.nn.Module):
            yield owner, True
    if isinstance(f, functools.partial):
        yield from _modules_of(f.func, seen)
    wrapped = getattr(f, "__wrapped__", None)
    if wrapped is not None:
        yield from _modules_of(wrapped, seen)
    for value in _references_of(f):
        yield from _modules_in(value, seen)


def _modules_in(value: object, seen: set[int], depth: int = 0) -> Iterator[Named]:
    """The modules in a value: the value itself, in containers and objects, or those that a function refers to."""
    if isinstance(value, torch.nn.Module):
        yield value, False
    elif isinstance(value, FUNCTIONS):
        yield from ((module, False) for module, _ in _modules_of(value, seen))
    elif depth < DEEPEST and id(value) not in seen and len(seen) < MOST:
        parts = _parts(value)
        if parts:
            seen.add(id(value))
        if not PLAIN.issuperset(map(type, parts)):  # as in a vocabulary
            for part in parts:
                yield from _modules_in(part, seen, depth + 1)


DEEPEST, MOST = 4, 10_000
"""Limits of the search: the depth, and the number of values."""


def _parts(value: object) -> list[Any]:
    if isinstance(value, CONTAINERS):
        return list(value.values() if isinstance(value, dict) else value)
    if type(value).__module__.partition(".")[0] in WITHOUT_MODULES:
        return [value.module] if isinstance(value, torch.fx.Interpreter) else []
    slots = [name for kind in type(value).__mro__ for name, slot in vars(kind).items() if isinstance(slot, SLOT)]
    parts = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return parts + [getattr(value, name, None) for name in slots]


CONTAINERS = (list, tuple, dict, set, frozenset)
WITHOUT_MODULES = frozenset({"builtins", "torch", "numpy", "types", "functools", "understudy"})
"""Packages whose objects are not searched for modules."""
SLOT = MemberDescriptorType
FUNCTIONS = (FunctionType, MethodType, functools.partial, LRU_CACHE)


def _references_of(f: object) -> Iterator[Any]:
    """The values that a function refers to: closure, defaults, bound object, and the globals that it names."""
    if isinstance(f, functools.partial):
        yield from (*f.args, *f.keywords.values())
    yield from map(cell_contents, getattr(f, "__closure__", None) or ())
    yield from getattr(f, "__defaults__", None) or ()
    yield from (getattr(f, "__kwdefaults__", None) or {}).values()
    if isinstance(f, MethodType) and not isinstance(f.__self__, (type, torch.nn.Module)):
        yield f.__self__
    elif not isinstance(f, (*FUNCTIONS, type)):  # a callable object
        yield from (*_parts(f), type(f).__call__)
    code = getattr(f, "__code__", None)
    names = getattr(f, "__globals__", {})
    for name in names_used_in(code) if code is not None else ():
        value = names.get(name)
        # Functions of other files are not followed: they refer to too many values.
        is_of_here = getattr(value, "__globals__", names) is names
        if not isinstance(value, (type, ModuleType)) and (is_of_here or isinstance(value, MethodType)):
            yield value


class LazyBorrowedState(BorrowedState):
    """Borrowed state of modules that will probably not run: stand-ins are made on first access."""

    def __init__(self, mode: FakeTensorMode, lazy: LazyParameters, waiting: Container[int]) -> None:
        super().__init__(mode)
        self._lazy = lazy
        self._waiting = waiting

    def _make_table(self, module: torch.nn.Module, table: dict[str, Any], replaced: list[Any]) -> dict[str, Any]:
        if not table or id(module) not in self._waiting or type(table) is not dict:
            return super()._make_table(module, table, replaced)
        lazy_table = LazyParameterDict(table)
        for name, value in table.items():
            if value is not None:
                lazy = self._lazy.make_lazy(value) if type(value) in PLAIN_TYPES else None
                tensor = lazy_table[name] = lazy or self._stand_in(value)
                replaced.append((name, value, tensor))
        return lazy_table

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is FakeTensor:
            return tensor
        self._lazy.make_fake_on_storage(tensor)
        return super()._stand_in(tensor)

    def _find_stand_in(self, stand_in: Any) -> torch.Tensor:
        return stand_in.stand_in() if type(stand_in) is LazyParameter else super()._find_stand_in(stand_in)

    def give_back(self) -> None:
        super().give_back()
        self._lazy.close()


# --- Constants -------------------------------------------------------------------------------------------------------
# Small integer buffers that no checkpoint holds (`persistent=False`), such as a stride, are constants of the program, and
# their values are known. Parameters and other buffers are state: their values may be others when the graph runs. A buffer
# that the program writes to is state as well, so a trace that has read its value is repeated without. Real tensors outside
# of modules are constants too, of any dtype if they are single numbers: the mode tells of them when it converts them.


class ConstantsWritten(Exception):
    """The program has read the values of constants, and has written to them: the graph may not hold these fixed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


@final
class ReadLiteral(LiteralStorage):
    """A literal that tells whether it was read."""

    __slots__ = ("is_read",)

    def __init__(self, real: torch.Tensor) -> None:
        super().__init__(real)
        self.is_read = False

    def storage(self) -> torch.Tensor:
        self.is_read = True
        return self.real


class KnownConstant(NamedTuple):
    """A constant whose values are known."""

    fake: FakeTensor
    real: torch.Tensor
    literal: ReadLiteral
    contents: DeterminedContents
    is_converted: bool
    """Whether its stand-in was made when the program used it, and not for a module."""


class ConstantValues:
    """The constants of one trace whose values are known, from when it is made until `forget`. `state`: tensors that are
    none, because the program writes to them; None: all of them."""

    def __init__(self, mode: FakeTensorMode, state: tuple[torch.Tensor, ...] | None, knows_buffers: bool) -> None:
        self._mode = mode
        self._state = None if state is None else frozenset(map(id, state))
        self._knows_buffers = knows_buffers
        self._known: list[KnownConstant] = []
        mode.constant_listeners.append(self._know_converted)

    def know_buffers(self, module: torch.nn.Module, tensors: list[tuple[str, torch.Tensor, object]]) -> None:
        """Of the tensors of a module (name, tensor, stand-in), those that no checkpoint holds."""
        names = module._non_persistent_buffers_set if self._knows_buffers else ()
        for name, real, stand_in in tensors if names else ():
            if name in names and is_small_integer_tensor(real):
                with _torch.no_modes():
                    values = real.detach().clone()
                self._know(stand_in.stand_in() if type(stand_in) is LazyParameter else stand_in, real, values, False)

    def _know_converted(self, fake: FakeTensor, real: torch.Tensor, values: torch.Tensor) -> None:
        self._know(fake, real, values, True)

    def _know(self, fake: object, real: torch.Tensor, values: torch.Tensor, is_converted: bool) -> None:
        if type(fake) is not FakeTensor or fake.fake_mode is not self._mode or fake._determined is not None:
            return
        if self._state is not None and id(real) not in self._state:
            literal = ReadLiteral(values)
            contents = fake._determined = DeterminedContents(literal, literal=True)
            self._known.append(KnownConstant(fake, real, literal, contents, is_converted))

    def check_unwritten(self) -> None:
        """Raise for constants that were read and written to, also by other tensors on the same memory."""
        written = {_torch.storage_id(known.fake) for known in self._known if known.contents.content is not known.literal}
        concerned = [known for known in self._known if _torch.storage_id(known.fake) in written]
        if any(known.literal.is_read for known in concerned):
            raise ConstantsWritten([known.real for known in concerned])

    def forget(self) -> None:
        """The stand-ins may belong to a mode of the user, and outlive the trace."""
        listeners = self._mode.constant_listeners
        listeners[:] = [listener for listener in listeners if listener != self._know_converted]
        for fake, real, _, _, is_converted in self._known:
            if fake._determined is not None:
                fake._determined.forget()
                fake._determined = None
            if is_converted:
                self._mode.fake_tensor_converter.forget(real)
        self._known.clear()


def is_small_integer_tensor(tensor: torch.Tensor) -> bool:
    """Whether this is a small tensor of integers or bools with a memory of its own."""
    if type(tensor) is not torch.Tensor or tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized:
        return False
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.numel() > MOST_READABLE:
        return False
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


class BorrowedModules:
    """Puts stand-ins into modules during a trace, and restores the modules afterwards."""

    def __init__(self, mode: FakeTensorMode | None, constant_values: ConstantValues | None = None) -> None:
        self._mode = mode
        self._constant_values = constant_values
        self._borrowed: BorrowedState | None = None
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """If the program really runs: the buffers of modules, and what they were before."""

    def borrow(
        self, modules: list[Named], constants: Constants, waiting: Container[int] = (), with_gradients: bool = False
    ) -> None:
        """`waiting`: modules, by identity, whose stand-ins are made on first access. `with_gradients`: also those of
        parameters that may receive gradients."""
        if self._mode is not None:
            lazy = LazyParameters(self._mode, constants, with_gradients)
            self._borrowed = LazyBorrowedState(self._mode, lazy, waiting)
        for module, is_root in modules:
            named = named_parts(module) if self._borrowed is None else self._borrowed.borrow_parts(module)
            for path, part in named:
                if self._borrowed is None and isinstance(part._buffers, dict):  # of scripted modules they are in C++
                    self._buffers.append((part._buffers, dict(part._buffers)))
                tensors = self._tensors(part)
                for name, real, tensor in tensors:
                    path_of_tensor = f"{path}.{name}" if path and is_root else name
                    constants.expect(tensor, real, path_of_tensor if is_root else None)
                if self._constant_values is not None:
                    self._constant_values.know_buffers(part, tensors)

    @property
    def parts(self) -> list[torch.nn.Module]:
        """The borrowed modules, with all of their submodules."""
        return [] if self._borrowed is None else list(self._borrowed.replaced)

    def _tensors(self, module: torch.nn.Module) -> list[tuple[str, torch.Tensor, Any]]:
        """For each tensor of a module: its name, the tensor, and its stand-in."""
        if self._borrowed is not None:
            return self._borrowed.replaced[module]
        tables = (module._parameters, module._buffers, vars(module))
        items = [item for table in tables for item in table.items()]
        return [(name, value, value) for name, value in items if isinstance(value, torch.Tensor)]

    def record_assigned(self) -> None:
        """Write into buffers what the program has assigned to them: `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`."""
        assigned = [
            (buffer, value)
            for now, before in self._buffers
            for name, buffer in before.items()
            if (value := now.get(name)) is not buffer and buffer is not None and value is not None
        ]
        if self._borrowed is not None:
            assigned = self._borrowed.list_assigned()
        write_assigned([pair for pair in assigned if has_same_form(*pair)])

    def give_back(self) -> None:
        if self._borrowed is not None:
            self._borrowed.give_back()
        for now, before in self._buffers:
            now.update(before)


class CachePlace(NamedTuple):
    """Where a program has a cached function: an attribute of a module or class, or the cell of a closure."""

    owner: Any
    name: str
    cache: Any
    is_plain: bool
    """Whether it stands there by itself, and not in a staticmethod or property."""


def call_with_sizes(cache: Any) -> Callable[..., object]:
    """A cached function that is called without its cache where a size is a symbol. As a key of the cache, the size would
    have to be a number; and what is kept for it belongs to this trace."""

    @functools.wraps(cache)
    def call(*args: object, **kwargs: object) -> object:
        return cache.__wrapped__(*args, **kwargs) if flat(torch.SymInt, args, kwargs) else cache(*args, **kwargs)

    call.__dict__.update(cache_info=cache.cache_info, cache_clear=cache.cache_clear)
    return call


class CachesOfModules:
    """The cached functions in a Python module, in its classes, and in modules that it imports. A module is searched
    once, and again if names were added to it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, list[CachePlace]]] = {}

    def find(self, names: Iterable[str]) -> Iterator[CachePlace]:
        modules = {name: sys.modules.get(name) for name in names}
        for name, module in modules.items():
            if module is None or not _is_searched(module):
                continue
            size, caches = self._seen.get(name, (-1, []))
            if size != len(vars(module)):
                caches = [*_caches_in(module), *(cache for inner in _inner_modules(module) for cache in _caches_in(inner))]
                self._seen[name] = len(vars(module)), caches
            yield from caches


_CACHES = CachesOfModules()


def _is_searched(module: object) -> bool:
    """Whether it belongs neither to torch nor to Python's standard library."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return isinstance(file, str) and is_user_file(file)


def _inner_modules(module: ModuleType) -> list[ModuleType]:
    return [value for value in list(vars(module).values()) if isinstance(value, ModuleType) and _is_searched(value)]


def _caches_in(module: ModuleType) -> Iterator[CachePlace]:
    for name, value in list(vars(module).items()):
        yield from _caches_behind(module, name, value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner, member in list(vars(value).items()):
                yield from _caches_behind(value, inner, member)


def _caches_behind(owner: object, name: str, member: object) -> Iterator[CachePlace]:
    """The cached functions behind a value: the value itself, or those that a wrapper calls."""
    value = unwrap_member(member)
    if type(value) is LRU_CACHE:
        yield CachePlace(owner, name, value, value is member)
    elif isinstance(value, FunctionType) and value.__closure__ and hasattr(value, "__wrapped__"):
        for cell in value.__closure__:
            if type(found := cell_contents(cell)) is LRU_CACHE:
                yield CachePlace(cell, "cell_contents", found, True)


def _surroundings_of(f: Callable[..., object]) -> tuple[list[Any], set[str]]:
    """The cached functions that a function is, wraps, or refers to through closures; and the Python modules in which
    these functions are defined."""
    found: list[Any] = []
    names: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [f]
    while todo:
        value = todo.pop()
        if id(value) in seen or not callable(value):
            continue
        seen.add(id(value))
        if type(value) is LRU_CACHE:
            found.append(value)
        if isinstance(value, MethodType):
            names.add(type(value.__self__).__module__)
            todo.append(value.__func__)
        elif isinstance(value, FunctionType):
            names.add(value.__module__)
            todo += map(cell_contents, value.__closure__ or ())
        todo.append(getattr(value, "__wrapped__", None))
    return found, names


class ProgramCaches:
    """The caches that a traced function may use: cached functions, and dicts and lists of modules."""

    def __init__(self, f: Callable[..., object], modules: list[torch.nn.Module], mode: FakeTensorMode) -> None:
        """`modules`: those that the function uses, with all of their submodules."""
        self._mode = mode
        self._modules = modules
        self._around, self._names = _surroundings_of(f)
        kinds = set(map(type, modules))
        self._names |= {base.__module__ for kind in kinds for base in kind.__mro__}
        self._misses = {id(cache): cache.cache_info().misses for cache in self._all()}
        self._variables = ProgramVariables(f, kinds)

    def _all(self) -> Iterable[Any]:
        caches = (*self._around, *(place.cache for place in _CACHES.find(self._names)))
        return {id(cache): cache for cache in caches}.values()

    @contextmanager
    def accept_symbols(self) -> Iterator[None]:
        """Inside, sizes that are symbols are no keys of the caches."""
        changed: list[tuple[Any, str, Any, Any]] = []

        def restore() -> None:
            for owner, name, before, call in reversed(changed):
                if getattr(owner, name, None) is call:
                    setattr(owner, name, before)

        with run_to_the_end(restore):
            for owner, name, cache, is_plain in list(_CACHES.find(self._names)):
                if is_plain and (before := getattr(owner, name, None)) is not None:
                    changed.append((owner, name, before, call_with_sizes(cache)))
                    setattr(owner, name, changed[-1][-1])
            yield

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor was in a cache before the trace."""
        if any(kept is tensor for cache in self._all() for kept in tensors_cached_by(cache)):
            return True
        containers = (container for module in self._modules for container in own_containers(module))
        in_modules = (kept for container in containers for kept in values_in(container))
        return any(kept is tensor for kept in in_modules) or self._variables.hold(tensor)

    def empty(self) -> None:
        """Clear the caches that contain stand-ins of the trace. An interrupt may cause a second call."""
        self._variables.restore(self._is_of_cache)
        for cache in self._all():
            if cache.cache_info().misses != self._misses.get(id(cache), 0):
                kept = tensors_cached_by(cache)
                if any(type(value) is FakeTensor and value.fake_mode is self._mode for value in kept):
                    cache.cache_clear()


    def _is_of_cache(self, value: Any) -> bool:
        """Whether it is a stand-in of the trace that does not depend on the inputs."""
        if type(value) is not FakeTensor or value.fake_mode is not self._mode:
            return False
        return value._node is None or not depends_on_inputs(value._node)


def tensors_cached_by(cache: Any) -> list[torch.Tensor]:
    """The tensors in the cache of a function, also inside lists, tuples, dicts and plain objects."""
    if not cache.cache_info().currsize:
        return []
    return [tensor for value in gc.get_referents(cache) for tensor in _tensors_in(value)]


def _tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < DEEPEST_RESULT and not isinstance(value, (type, ModuleType, FunctionType, torch.nn.Module)):
        parts = value if isinstance(value, (list, tuple, set)) else value.values() if isinstance(value, dict) else ()
        for part in parts or getattr(value, "__dict__", {}).values():
            yield from _tensors_in(part, depth + 1)


DEEPEST_RESULT = 4
"""How many levels of a cached result are searched for tensors."""
