"""The inputs of an export, and which of their dimensions are asked to vary.

    Inputs           the leaves of the arguments, with their names, and what is asked for each
    read_inputs      from what `export` is given, in all of torch's forms and in ours
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from understudy import _torch
from understudy.shapes.input_dims import Dim

NAME = re.compile(r"[^a-zA-Z0-9]")


@dataclass(frozen=True)
class Inputs:
    """The arguments of a program, flat."""

    leaves: list[Any]
    names: list[str]
    """What the placeholders are called: `x`, or `x_0` for a part of it."""
    paths: list[str]
    """Where the leaf stands among the arguments of the exported module: `L['x'][0]`."""
    requests: list[Any]
    """For each leaf: None, an entry for each dimension of a tensor, or what is asked for a number."""
    in_spec: Any
    forward_names: list[str]
    verify: Callable[[Any], None]
    """What `AdditionalInputs` wants to ask the finished program."""

    @property
    def is_dynamic(self) -> bool:
        return any(request is not None for request in self.requests)


def read_inputs(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> Inputs:
    arguments = _torch.bind_arguments(model, args, kwargs)
    verify: Callable[[Any], None] = lambda program: None  # noqa: E731
    if isinstance(dynamic_shapes, (torch.export.AdditionalInputs, torch.export.ShapesCollection)):
        verify = getattr(dynamic_shapes, "verify", verify)
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, dict(kwargs))
    leaves, in_spec = _torch.tree_flatten((args, dict(kwargs)))
    with_paths = _torch.flatten_with_paths(arguments)
    names = ["_".join(map(_key_name, path)).lower() for path, _ in with_paths]
    forward_names = _forward_names(arguments, args)
    given = dict(zip(forward_names, (*args, *kwargs.values()), strict=True))
    paths = ["L" + _torch.key_text(path) for path, _ in _torch.flatten_with_paths(given)]
    requests = _read_requests(arguments, dynamic_shapes, leaves)
    return Inputs(leaves, names, paths, requests, in_spec, forward_names, verify)


def _forward_names(arguments: Mapping[str, Any], args: tuple[Any, ...]) -> list[str]:
    """The names of the arguments; `*args` has one name for each."""
    count = len(args)
    names: list[str] = []
    for name, value in arguments.items():
        if len(names) < count and isinstance(value, tuple) and not any(value is arg for arg in args):
            names.extend(f"{name}_{position}" for position in range(len(value)))
        else:
            names.append(name)
    return names


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return NAME.sub("_", str(getattr(key, attribute)))
    return NAME.sub("_", str(key))


def _read_requests(arguments: dict[str, Any], dynamic_shapes: Any, leaves: Sequence[Any]) -> list[Any]:
    if not dynamic_shapes:
        return [None] * len(leaves)
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(dynamic_shapes)
        inner = [name for name, value in arguments.items() if isinstance(value, dict) and name not in dynamic_shapes]
        if len(inner) == 1 and set(dynamic_shapes) & set(arguments[inner[0]]):
            raise ValueError(f"dynamic_shapes names arguments inside of {inner[0]!r}: write {{{inner[0]!r}: {{…}}}}")
    dynamic_shapes = _in_words_of_torch(dynamic_shapes, {})
    _torch.check_dynamic_shapes(arguments, dynamic_shapes)
    asked = _torch.flatten_shapes(arguments, dynamic_shapes)
    return [_request_for(leaf, one) for leaf, one in zip(leaves, asked, strict=True)]


def _in_words_of_torch(asked: Any, known: dict[str, Any]) -> Any:
    """`understudy.Dim` and names of dimensions as `torch.export.Dim`, the same one for the same name."""
    if isinstance(asked, Dim):
        if asked.name not in known:
            known[asked.name] = torch.export.Dim(asked.name, min=asked.min, max=asked.max)
        return known[asked.name]
    if isinstance(asked, str):
        return _in_words_of_torch(Dim(asked), known)
    if isinstance(asked, Mapping):
        return {key: _in_words_of_torch(value, known) for key, value in asked.items()}
    if type(asked) in (list, tuple):
        return type(asked)(_in_words_of_torch(value, known) for value in asked)
    return asked


def _request_for(leaf: Any, asked: Any) -> Any:
    if asked is None:
        return None
    if not isinstance(leaf, torch.Tensor):
        return None if getattr(getattr(asked, "type", None), "name", "") == "STATIC" else asked
    entries = asked if isinstance(asked, Mapping) else dict(enumerate(asked))
    by_dim = {dim % leaf.ndim: entry for dim, entry in entries.items() if entry is not None}
    return {dim: entry for dim, entry in by_dim.items() if not isinstance(entry, int)} or None
