"""Where a module that a traced program calls is in the root, and what is done with one that is not there."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from understudy.trace.meta_errors import unregistered

if TYPE_CHECKING:
    from understudy.trace.meta_tracer import MetaTracer


def is_made_of_known_parts(tracer: MetaTracer, module: torch.nn.Module) -> bool:
    """Whether it is no part of the root, but its parts are, as those of `self.layers[:2]`: they are called."""
    known = tracer.submodule_paths or {}
    if module in known or tracer.is_leaf_module(module, ""):
        return False
    parts = list(module.children())
    has_own = bool(module._parameters or module._buffers)
    return (
        bool(parts)
        and not has_own
        and all(part in known or is_made_of_known_parts(tracer, part) for part in parts)
    )


def path_of(tracer: MetaTracer, module: torch.nn.Module) -> str:
    """The name of a module in the root. One without parameters is added, if it is not there."""
    assert tracer.submodule_paths is not None
    known = tracer.submodule_paths.get(module)
    if known is not None:
        return known
    kind = type(module).__name__
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        raise unregistered(
            f"{kind} is called, which is no part of the traced module and has parameters or buffers", kind
        )
    if not tracer.allow_insert_stateless_mods:
        raise unregistered(
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
