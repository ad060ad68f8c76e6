"""The modules of a traced program: their paths in the root, safe names, attributes that leaf modules assign.

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
from torch.fx import Graph, GraphModule

from understudy.fake.inputs import find_caching_functions
from understudy.meta.errors import make_unregistered_error

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
        bool(parts) and not has_own and all(part in known or has_known_parts(tracer, part) for part in parts)
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
            f"{kind} has parameters or buffers, and is not part of the traced module", kind
        )
    if not tracer.allow_insert_stateless_mods:
        raise make_unregistered_error(
            f"{kind} is not part of the traced module, and allow_insert_stateless_mods is False",
            kind,
        )
    path = tracer._insert_module_as_submodule(module)
    tracer.submodule_paths[module] = path
    return path


def find_fresh_name(root: torch.nn.Module, base: str) -> str:
    return next(
        name for name in (f"{base}_{count}" for count in itertools.count()) if not hasattr(root, name)
    )


def modules_in_python(root: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules of a root except those of TorchScript, whose attributes are in C++ and are not written to."""
    modules = root.modules() if root._modules else (root,)
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def clear_caches_of(values: list[weakref.ref[object]]) -> None:
    """Clear each `functools.lru_cache` that holds one of these values, which are useless after their trace."""
    for function in find_caching_functions(
        [value for value in (reference() for reference in values) if value is not None]
    ):
        function.cache_clear()


def restore_dict(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a dict its earlier contents."""
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if now.get(name) is not value:
            now[name] = value


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
