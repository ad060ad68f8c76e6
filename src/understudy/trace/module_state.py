"""The modules that a traced function refers to, and their tensors for the time of the trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from understudy.fake.mode import FakeTensorMode
from understudy.trace.constants import Constants
from understudy.trace.prop_state import BorrowedState

Named = tuple[torch.nn.Module, bool]
"""A module, and whether it is the one that is traced: its tensors then keep their own names."""


def modules_of(f: Callable[..., Any]) -> list[Named]:
    """The modules that a function is, is bound to, wraps, or refers to by name."""
    found: dict[int, Named] = {}
    for module, is_root in _modules_of(f, set()):
        found.setdefault(id(module), (module, is_root))
    return list(found.values())


def _modules_of(f: Any, seen: set[int]) -> Iterator[Named]:
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
        for value in (*f.args, *f.keywords.values()):
            if isinstance(value, torch.nn.Module):
                yield value, False
    wrapped = getattr(f, "__wrapped__", None)
    if wrapped is not None:
        yield from _modules_of(wrapped, seen)
    for value in _referred(f):
        if isinstance(value, torch.nn.Module):
            yield value, False
        elif getattr(value, "__closure__", None) is not None or isinstance(value, functools.partial):
            yield from ((module, False) for module, _ in _modules_of(value, seen))


def _referred(f: Any) -> Iterator[Any]:
    """The objects in the closure of a function, and the globals that its code names."""
    for cell in getattr(f, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # a variable that has no value yet
    code = getattr(f, "__code__", None)
    values = getattr(f, "__globals__", {})
    for name in code.co_names if code is not None else ():
        if isinstance(values.get(name), torch.nn.Module):
            yield values[name]


class LentState:
    """While a trace runs on stand-ins, the modules hold stand-ins; afterwards, exactly what they held before."""

    def __init__(self, mode: FakeTensorMode | None) -> None:
        self._borrowed = BorrowedState(mode) if mode is not None else None

    def lend(self, modules: list[Named], constants: Constants) -> None:
        reals = [
            (module, name, tensor)
            for module, is_root in modules
            for name, tensor in _tensors(module, is_root)
        ]
        for module, _ in modules:
            if self._borrowed is not None:
                self._borrowed.borrow(module)
        fakes = [tensor for module, is_root in modules for _, tensor in _tensors(module, is_root)]
        for (_, name, real), tensor in zip(reals, fakes, strict=True):
            constants.expect(tensor, real, name)

    def give_back(self) -> None:
        if self._borrowed is not None:
            self._borrowed.give_back()


def _tensors(module: torch.nn.Module, is_root: bool) -> Iterator[tuple[str | None, torch.Tensor]]:
    for path, part in module.named_modules(remove_duplicate=True):
        prefix = f"{path}." if path else ""
        for table in (part._parameters, part._buffers, vars(part)):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    yield (f"{prefix}{name}" if is_root else None), value
