"""The paths of modules in the root, assignments to modules, and safe names.

Names of modules and parameters may be any text: keywords, quotes, line ends, code. torch.fx writes them into the code
of a graph unchanged. A path with such a name gets another one in the graph; the original is in the metadata of the
nodes.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import re
import unicodedata
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.fake.inputs import find_caching_functions
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import (
    EVERY_MODULE_HAS,
    KeptContents,
    ProgramVariables,
    depends_on_inputs,
    has_same_form,
)
from understudy.meta.errors import make_unregistered_error
from understudy.meta.proxies import MetaProxy, read_own
from understudy.meta.structures import holds

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

def has_known_parts(tracer: MetaTracer, module: torch.nn.Module) -> bool:
    """Whether it is not part of the root, but its submodules are, as in `self.layers[:2]`: these are then called."""
    known = tracer.submodule_paths or {}
    if module in known or tracer.is_leaf_module(module, ""):
        return False
    parts = list(module.children())
    has_own = bool(module._parameters or module._buffers)
    return (
        bool(parts)
        and not has_own
        and all(part in known or has_known_parts(tracer, part) for part in parts)
    )


def path_of(tracer: MetaTracer, module: torch.nn.Module) -> str:
    """The name of a module in the root. A module without parameters is added if it is not part of the root."""
    assert tracer.submodule_paths is not None
    known = tracer.submodule_paths.get(module)
    if known is not None:
        return known
    kind = type(module).__name__
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        raise make_unregistered_error(
            f"{kind} is called, which is no part of the traced module and has parameters or buffers", kind
        )
    if not tracer.allow_insert_stateless_mods:
        raise make_unregistered_error(
            f"{kind} is called, which is no part of the traced module, and allow_insert_stateless_mods is False",
            kind,
        )
    path = _fresh_name(tracer.root, kind.lower())
    tracer.root.add_module(path, module)
    tracer.submodule_paths[module] = path
    return path


def _fresh_name(root: torch.nn.Module, base: str) -> str:
    return next(
        name for name in (f"{base}_{count}" for count in itertools.count()) if not hasattr(root, name)
    )


# --- What the traced program assigns to its modules: `self.count = self.count + 1` --------------------------
# Traced values must not stay in a module after the trace. An assignment to a buffer becomes a `copy_` in the graph; all
# other attributes are restored.

Table = dict[str, Any]


class AssignedAttributes:
    """A snapshot of the attributes of all modules of a root, and of the variables of the program."""

    def __init__(self, root: torch.nn.Module, function: Callable[..., object]) -> None:
        modules = modules_in_python(root)
        self._buffers: list[tuple[Table, Table]] = [
            (module._buffers, dict(module._buffers)) for module in modules
        ]
        others = [table for module in modules for table in (module._parameters, module.__dict__)]
        self._others = [(table, dict(table)) for table in others]
        self._kept = KeptContents()
        for module in modules:
            self._kept.keep(value for name, value in vars(module).items() if name not in EVERY_MODULE_HAS)
        self._variables = ProgramVariables(function, set(map(type, modules)))

    def record_assigned_buffers(self, tracer: MetaTracer) -> None:
        """Record that what the program has assigned to buffers is written into them."""
        assigned = [
            (buffer, value if isinstance(value, MetaProxy) else tracer.proxy_of(value))
            for table, before in self._buffers
            for name, buffer in before.items()
            if isinstance(buffer, torch.Tensor)
            and (value := table.get(name)) is not buffer
            and isinstance(value, (MetaProxy, torch.Tensor))
        ]
        own = [tracer.derivation.stand_in(buffer) for buffer, _ in assigned]
        written = set(map(_torch.storage_id, own))
        values = [_value_to_write(tracer, value, before, written) for (_, value), before in zip(assigned, own, strict=True)]
        for (buffer, _), value in zip(assigned, values, strict=True):
            if value is not None:
                tracer.create_proxy("call_method", "copy_", (buffer, value), {})

    def restore(self) -> None:
        for table, before in self._buffers:
            table.update(before)
        for table, before in (*self._buffers, *self._others):
            changed = [name for name, value in table.items() if value is not before.get(name)]
            for name in changed:
                if holds(table[name], _is_traced):
                    del table[name]
                    if name in before:
                        table[name] = before[name]
        self._kept.restore(_is_traced)
        self._variables.restore(lambda value: _is_traced(value) and not depends_on_inputs(_find_recorded(value)))


def _value_to_write(tracer: MetaTracer, value: Any, buffer: Any, written: set[int]) -> Any:
    """What to write into a buffer, whose stand-in is `buffer`; None if the buffer itself was assigned. `written`: the
    storages of all buffers that are written to, of which a value may be one."""
    meta = value._meta
    if meta is buffer:
        return None
    if type(meta) is not FakeTensor:
        return value
    if not has_same_form(buffer, meta):
        raise tracer.make_refusal(f"this value is assigned to a buffer of another form, {buffer._spec}", value)
    is_alias = _torch.storage_id(meta) in written
    return tracer.create_proxy("call_method", "clone", (value,), {}) if is_alias else value


def modules_in_python(root: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules of a root except those of TorchScript, whose attributes are in C++ and are not written to."""
    modules = root.modules() if root._modules else (root,)
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def clear_caches_of(values: list[weakref.ref[object]]) -> None:
    """Clear each `functools.lru_cache` that holds one of these values, which are useless after their trace."""
    for function in find_caching_functions([value for value in (reference() for reference in values) if value is not None]):
        function.cache_clear()


def _is_traced(value: object) -> bool:
    return isinstance(value, MetaProxy)


def _find_recorded(value: MetaProxy) -> Node:
    """The node of a value; of an attribute that has none, the node of its owner: to ask it for one would add one."""
    state = read_own(value, "__dict__")
    found = next((state[name] for name in ("node", "_moved", "_made", "_source") if state.get(name) is not None), None)
    return _find_recorded(state["_owner"]) if found is None else found


UNSAFE_CHARACTERS = frozenset("\"'\\{}")
"""Characters that have a meaning inside the quotes that torch.fx puts around a name."""
ORIGINAL_PATH = "original_path"
"""In the metadata of a node: the original path of its target."""


@functools.cache
def names_of_graph_modules() -> frozenset[str]:
    """Attributes of every graph module, which would hide a submodule or parameter of the same name."""
    empty = GraphModule(torch.nn.Module(), Graph())
    return (frozenset(dir(empty)) | {"shape_env"}) - frozenset(dir(torch.nn.Module()))


def is_safe_path(path: str) -> bool:
    """Whether this path can be used in the code of a graph module."""
    first, *rest = path.split(".")
    return first not in names_of_graph_modules() and all(map(_is_safe_name, (first, *rest)))


def _is_safe_name(name: str) -> bool:
    if name.isidentifier():
        # Python normalises identifiers: `ﬁ` is `fi`.
        return unicodedata.normalize("NFKC", name) == name and not keyword.iskeyword(name)
    return bool(name) and name.isprintable() and UNSAFE_CHARACTERS.isdisjoint(name)


def safe_attribute_path(path: str, is_taken: Callable[[str], bool]) -> str:
    """The path itself if it is safe, else an identifier made from it that is not taken."""
    if is_safe_path(path):
        return path
    base = re.sub(r"[^0-9A-Za-z]+", "_", path).strip("_") or "attribute"
    if base[0].isdigit() or keyword.iskeyword(base) or base in names_of_graph_modules():
        base = f"attribute_{base}"
    name, count = base, 0
    while is_taken(name):
        count += 1
        name = f"{base}_{count}"
    return name
