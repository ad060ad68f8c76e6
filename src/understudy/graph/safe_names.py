"""Paths of attributes that can be written in the code of a graph module.

Names of modules and parameters are the user's, and may be anything: keywords, quotes, line ends, code. torch.fx writes
them into the code as they are. A path with such a name gets another one in the graph; the original goes into the metadata
of the nodes that read it.
"""

from __future__ import annotations

import functools
import keyword
import re
import unicodedata
from collections.abc import Callable

import torch
from torch.fx import Graph, GraphModule

UNQUOTABLE = frozenset("\"'\\{}")
"""What would end the quotes that torch.fx puts around a name, or mean something inside of them."""
ORIGINAL_PATH = "original_path"
"""Under which key the metadata of a node has the path that its target stands for."""


@functools.cache
def names_of_graph_modules() -> frozenset[str]:
    """Attributes of a graph module itself, which hide a submodule or parameter of the same name."""
    empty = GraphModule(torch.nn.Module(), Graph())
    return (frozenset(dir(empty)) | {"shape_env"}) - frozenset(dir(torch.nn.Module()))


def is_safe_path(path: str) -> bool:
    """Whether a graph module can have this path, and its code can name it."""
    first, *rest = path.split(".")
    return first not in names_of_graph_modules() and all(map(_is_safe_name, (first, *rest)))


def _is_safe_name(name: str) -> bool:
    if name.isidentifier():
        # Python reads some letters as others: `ﬁ` as `fi`.
        return unicodedata.normalize("NFKC", name) == name and not keyword.iskeyword(name)
    return bool(name) and name.isprintable() and UNQUOTABLE.isdisjoint(name)


def safe_attribute_path(path: str, is_taken: Callable[[str], bool]) -> str:
    """The path itself if it is safe, else a plain name made of it that is not taken."""
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
