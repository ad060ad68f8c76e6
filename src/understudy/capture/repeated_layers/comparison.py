"""Whether two layers are alike.

    arguments and results    the key of a call (`key_of`), and whether a run has changed its arguments
    LayerComparison          the signature of a module: everything that its forward can read besides its arguments
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from operator import is_not, itemgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.capture.lazy_state import LazyParameter, LazyParameterDict
from understudy.capture.repeated_layers.object_state import (
    COMPARED,
    NotComparable,
    ObjectStates,
    StateReaders,
    comparable,
)
from understudy.capture.repeated_layers.reachable_code import ReachableCode, is_own, read_places
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.ranges import range_of
from understudy.graph.borrowed_state import EVERY_MODULE_HAS
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.capture.tracer import PythonKeyTracer

OWN_ATTRIBUTES = frozenset({"_is_param", "_is_buffer", "persistent", *FakeTensor.__annotations__})
"""The attributes of every stand-in; others were set by the program, which may read them."""


SIMPLE = frozenset({FakeTensor, *COMPARED})
"""Types of arguments that are not containers."""


def flatten_call(args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a layer's arguments, and their structure."""
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    if SIMPLE.issuperset(map(type, leaves)):
        return leaves, (len(args), *kwargs)
    leaves, structure = _torch.tree_flatten((args, kwargs))
    return leaves, str(structure)


def _refuse(tensor: torch.Tensor) -> object:
    raise NotComparable


def _refuse_unless_none(name: str) -> Callable[[torch.Tensor], object]:
    def read(tensor: torch.Tensor) -> object:
        if getattr(tensor, name) is not None:
            raise NotComparable
        return None

    return read


FACTS_BESIDES_SPEC: dict[str, Callable[[Any], object]] = {
    "_version": lambda tensor: None if tensor.is_inference() else tensor._version,
    "_is_view": lambda tensor: tensor._is_view(),
    "_base": _refuse_unless_none("_base"),
    "grad_fn": _refuse_unless_none("grad_fn"),
    "is_leaf": lambda tensor: tensor.is_leaf,
    "grad": lambda tensor: _refuse(tensor) if tensor.is_leaf and tensor.grad is not None else None,
    "is_inference": lambda tensor: tensor.is_inference(),
    "is_pinned": lambda tensor: tensor._is_pinned,
    **dict.fromkeys(("untyped_storage", "storage", "_typed_storage", "is_set_to"), _refuse),
}
"""By the name that code uses: what a tensor says of itself that is not in its spec. Compared where the code of a layer
has the name."""


def key_of(
    tracer: PythonKeyTracer, mode: FakeTensorMode, leaves: list[Any], structure: object, allows_gradients: bool,
    names: set[str],
) -> Key:  # fmt: skip
    """A key that is equal for calls whose arguments differ only in the values of tensors. `names`: those that the code
    of the layer uses."""
    is_grad = torch.is_grad_enabled()
    facts = [FACTS_BESIDES_SPEC[name] for name in sorted(FACTS_BESIDES_SPEC.keys() & names)]
    parts: list[Any] = [structure, is_grad, *_torch.settings()]
    first: dict[Any, int] = {}
    for leaf in leaves:
        kind = type(leaf)
        if kind is FakeTensor:
            node, needs_grad = tracer.find_node(leaf), leaf.requires_grad
            if node is None or leaf.fake_mode is not mode or is_marked(leaf):
                raise NotComparable
            if leaf._determined is not None:  # the layer may read its values
                parts += [id(leaf), leaf._version]
            if leaf._range is not None:  # the layer may decide by it
                parts.append(range_of(leaf))
            if facts:
                parts += [read(leaf) for read in facts]
            if needs_grad and is_grad and not allows_gradients:
                raise NotComparable
            # Identity and aliasing of the tensors.
            parts += [
                leaf._spec, needs_grad, first.setdefault(-_torch.storage_id(leaf), len(first)),
                first.setdefault(id(leaf), len(first)), first.setdefault(node, len(first)),
            ]  # fmt: skip
        elif kind in COMPARED:
            parts += comparable(kind, leaf)
        elif isinstance(leaf, torch.SymInt) and type(leaf.node) is SymNode:
            parts.append(leaf.node)
        else:
            raise NotComparable
    return tuple(parts)


def is_marked(tensor: FakeTensor) -> bool:
    """Whether the program has set attributes of its own on a stand-in."""
    return not vars(tensor).keys() <= OWN_ATTRIBUTES


def check_unchanged(arguments: Any, leaves: list[object], structure: object) -> None:
    """Raise if a run has changed the lists and dicts among its arguments."""
    now, form = flatten_call(*arguments)
    if form != structure or len(now) != len(leaves) or any(map(is_not, now, leaves)):
        raise NotComparable
    if any(is_marked(leaf) for leaf in leaves if type(leaf) is FakeTensor):
        raise NotComparable


def check_results(result: object, leaves: list[object], arguments: object, seen: ComparedState) -> None:
    """Raise unless the results can be made again: new containers, and tensors that are not the module's own."""
    others = {*map(id, _containers(arguments)), *map(id, seen.held), *seen.containers}
    if not others.isdisjoint(map(id, _containers(result))):
        raise NotComparable
    own = set(map(id, seen.tensors))
    for leaf in leaves:
        if id(leaf) in own or (type(leaf) is FakeTensor and is_marked(leaf)):
            raise NotComparable


def _containers(value: object) -> Iterator[Any]:
    """The lists and dicts in a structure. Raises for other containers, whose contents are unknown."""
    if isinstance(value, (list, dict)):
        yield value
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)
    elif type(value) not in COMPARED and not isinstance(value, (torch.Tensor, torch.SymInt)):
        raise NotComparable


# --- Signatures of layers: everything that the forward of a module can read, besides its arguments ---------------

TABLES = frozenset({dict, LazyParameterDict, OrderedDict, set})
"""The types of a module's dicts of parameters, modules and hooks, most of which are empty."""
DICTS: dict[Any, type] = {dict: dict, LazyParameterDict: dict}
"""By type: which of them can be told apart."""
HOLDING = ("_parameters", "_buffers", "_modules")
EMPTY_BY_DEFAULT = frozenset(name for name, value in EVERY_MODULE_HAS.items() if not value and name not in HOLDING)
"""Attributes of every module that are skipped while they are empty: dicts of hooks and the like."""
default_values = itemgetter(*sorted(EMPTY_BY_DEFAULT))
END = object()
CONTAINERS = (tuple, list, set, frozenset, torch.Size)
Key = tuple[Any, ...]


class ComparedState:
    """The objects from which a signature was made."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        """The tensors of a module and its submodules, in the same order for all siblings."""
        self.held: list[Any] = []
        """Objects that are in the signature by id(): kept alive, so that the id is not reused."""
        self.calls: dict[int, int] = {}
        """For cached functions: the number of calls so far."""
        self._positions: dict[int, int] = {}
        self.containers: set[int] = set()
        """The lists, dicts and sets among its attributes, by identity."""
        self.kinds: dict[type, None] = {}
        self.modules: dict[int, int] = {}
        """The visited modules, by identity, with their order."""

    def position(self, tensor: object) -> int:
        """The position of a tensor; a tensor that was visited before (tied weights) has the same one."""
        position = self._positions.setdefault(id(tensor), len(self.tensors))
        self.tensors.append(tensor)
        return position


class LayerComparison:
    """Compares modules by signatures. One for each trace: reachable code is searched once."""

    def __init__(self) -> None:
        self._reaches: dict[type, ReachableCode] = {}
        self._readers = StateReaders()
        self._compared_names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._watched: Mapping[int, frozenset[str]] = {}

    def signature(self, module: torch.nn.Module, seen: ComparedState, watched: Mapping[int, frozenset[str]]) -> Key:
        """A signature that is equal for modules whose forwards do the same. `watched`: attributes that are not
        compared, by the module's identity."""
        self._watched = watched
        states = ObjectStates(self._readers, type(module))
        parts: list[Any] = []
        self._walk(module, parts, seen, states)
        parts += self._state_of_code(type(module), seen, states)
        seen.held, seen.calls = states.held, states.calls
        return tuple(parts)

    def names_of(self, kind: type) -> set[str]:
        """The names that the code of such layers uses, except in methods like `__repr__`."""
        return self._reaches[kind].names_in_runs

    # The state of a module is written into one flat list: its class, the names of its attributes, and the values. END
    # marks the end of a dict or a list, and stands for empty dicts, and for values that are not compared.

    def _walk(self, module: torch.nn.Module, parts: list[Any], seen: ComparedState, states: ObjectStates) -> None:
        kind: type = type(module)
        parts.append(kind)
        position = len(seen.modules)
        if seen.modules.setdefault(id(module), position) != position:
            parts.append(seen.modules[id(module)])
            return
        seen.kinds[kind] = None
        attributes = vars(module)
        watched = self._watched.get(id(module), ()) if self._watched else ()
        names = self._names_to_compare(attributes)
        parts.append(names)
        for name in names:
            value = attributes[name]
            kind = type(value)
            if kind in COMPARED:
                # `comparable` without the call: a model has hundreds of such attributes
                plain = value if value or kind is not float else repr(value)
                parts += (kind, plain) if name not in watched else (END,)
            elif kind in TABLES and not value:
                parts.append(END)
            elif kind in DICTS:
                self._describe_table(value, parts, seen, states)
            else:
                self._describe(value, parts, seen, states)

    def _names_to_compare(self, attributes: dict[str, object]) -> tuple[str, ...]:
        """The attributes of a module that are compared: without dicts of hooks that are empty."""
        names = tuple(attributes)
        known = self._compared_names.get(names)
        if known is None:
            has_all = attributes.keys() >= EMPTY_BY_DEFAULT
            known = tuple([name for name in names if name not in EMPTY_BY_DEFAULT]) if has_all else names
            self._compared_names[names] = known
        return names if len(known) < len(names) and any(default_values(attributes)) else known

    def _describe(self, value: Any, parts: list[object], seen: ComparedState, states: ObjectStates) -> None:
        kind = type(value)
        if kind in DICTS:
            self._describe_table(value, parts, seen, states)
        elif kind in COMPARED:
            parts += comparable(kind, value)
        elif kind is FakeTensor:
            if value._determined is not None or value._node is not None:
                raise NotComparable  # the latter: computed or written to by the program
            parts += (seen.position(value), value._spec, value.requires_grad)
            if is_marked(value) or value._kind is not None:
                parts += _marks(value, states)
        elif kind is LazyParameter:
            if value.fake is not None:
                self._describe(value.fake, parts, seen, states)
            else:
                parts += (seen.position(value), value.spec, value.requires_grad)
        elif isinstance(value, torch.nn.Module):
            self._walk(value, parts, seen, states)
        elif kind in CONTAINERS or kind is functools.partial:
            self._describe_list(kind, value, parts, seen, states)
        elif isinstance(value, torch.Tensor):
            raise NotComparable
        else:
            parts.append(states.state(value))

    def _describe_table(self, table: Any, parts: list[object], seen: ComparedState, states: ObjectStates) -> None:
        seen.containers.add(id(table))
        parts.append(DICTS[type(table)])
        for key, value in dict.items(table):
            kind = type(value)
            if kind in COMPARED:
                parts += (key or repr(key), *comparable(kind, value))
            elif kind is LazyParameter and value.fake is None:
                parts += (key, seen.position(value), value.spec, value.requires_grad)
            else:
                parts.append(key or repr(key))
                if kind is not FakeTensor and isinstance(value, torch.nn.Module):
                    self._walk(value, parts, seen, states)
                else:
                    self._describe(value, parts, seen, states)
        parts.append(END)

    def _describe_list(self, kind: type, value: Any, parts: list[Any], seen: ComparedState, states: ObjectStates) -> None:
        parts.append(kind)
        if kind is functools.partial:
            value = (value.func, len(value.args), *value.args, *value.keywords, *value.keywords.values())
        else:
            seen.containers.add(id(value))
        for part in value:
            self._describe(part, parts, seen, states)
        parts.append(END)

    def _state_of_code(self, kind: type, seen: ComparedState, states: ObjectStates) -> Key:
        """The state that the code of a layer reads from globals, closures, classes and objects."""
        reach = self._reaches.get(kind)
        if reach is None or reach.is_stale:
            reach = self._reaches[kind] = ReachableCode()
        strange = reach.list_unknown(seen.kinds)
        if strange:
            reach.add(strange, is_module=True)
        while not reach.is_open:
            found = list(map(states.state, (*reach.extras, *read_places(reach.states))))
            strange = list(filter(is_own, reach.list_unknown(states.functions.values())))
            if not strange:
                tables = map(states.contents, read_places(reach.tables))
                return *read_places(reach.members), *found, *tables, *map(len, reach.spaces)
            reach.add(strange)
        raise NotComparable


def _marks(tensor: FakeTensor, states: ObjectStates) -> list[object]:
    """The attributes of a stand-in that a program may read, besides its spec."""
    marks = [(name, value) for name, value in vars(tensor).items() if name not in OWN_ATTRIBUTES]
    if any(isinstance(value, MethodType) for _, value in marks):
        raise NotComparable
    return [tensor._kind, *[(name, states.state(value)) for name, value in marks]]
