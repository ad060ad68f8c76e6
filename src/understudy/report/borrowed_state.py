"""Real modules and optimizers in a rehearsal: they work on stand-ins, and have their own tensors again afterwards.

    with borrow_state(mode, fn, args, kwargs):
        fn(*args, **kwargs)

Modules and optimizers are found in the arguments, and in the state of the function: the object of a method, its
closure, its defaults, the globals that it names, and the attributes of objects among these.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.spec.call import map_structure

DEPTH = 4
"""Maximum depth of the search through attributes and containers."""


@contextmanager
def borrow_state(mode: FakeTensorMode, *holders: object) -> Iterator[None]:
    modules, optimizers = find_stateful(holders)
    saved: list[_SavedModule | _SavedOptimizer] = [
        *map(_SavedModule, modules),
        *map(_SavedOptimizer, optimizers),
    ]
    try:
        for state in saved:
            state.replace_tensors(mode)
        yield
    finally:
        for state in saved:
            state.restore()


def make_stand_in(mode: FakeTensorMode, tensor: object) -> Any:
    """Convert a real tensor and its gradient to stand-ins; return other objects unchanged."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
        return tensor
    fake = mode.from_tensor(tensor)
    if tensor.numel() == 1 and not tensor.requires_grad:
        with _torch.PastDispatch():
            mode.remember_literal(
                fake, tensor.detach().clone()
            )  # counters of steps, scales: programs read them
    if tensor.is_leaf and tensor.grad is not None and fake.grad is None:
        fake.grad = mode.from_tensor(tensor.grad)
    return fake


class _SavedModule:
    """One module, without those below it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.parameters = dict(module._parameters)
        self.buffers = dict(module._buffers)
        self.training = module.training
        self.requires_grad = {name: p.requires_grad for name, p in self.parameters.items() if p is not None}

    def replace_tensors(self, mode: FakeTensorMode) -> None:
        for own in (self.module._parameters, self.module._buffers):
            for name, tensor in list(own.items()):
                own[name] = make_stand_in(mode, tensor)

    def restore(self) -> None:
        self.module._parameters.clear()
        self.module._parameters.update(self.parameters)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        self.module.training = self.training
        for name, requires_grad in self.requires_grad.items():
            parameter = self.parameters[name]
            assert parameter is not None
            parameter.requires_grad_(requires_grad)


class _SavedOptimizer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.groups = [
            (group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups
        ]
        self.state = optimizer.state

    def replace_tensors(self, mode: FakeTensorMode) -> None:
        def convert(value: object) -> Any:
            return map_structure(lambda tensor: make_stand_in(mode, tensor), torch.Tensor, value)

        for group in self.optimizer.param_groups:
            group["params"] = convert(group["params"])
        self.optimizer.state = defaultdict(
            dict, {make_stand_in(mode, parameter): convert(state) for parameter, state in self.state.items()}
        )

    def restore(self) -> None:
        for group, saved in self.groups:
            group.clear()
            group.update(saved)
        self.param_groups[:] = [group for group, _ in self.groups]
        self.optimizer.param_groups = self.param_groups
        self.optimizer.state = self.state


# --- where modules and optimizers are found


def find_stateful(holders: object) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    modules: dict[int, torch.nn.Module] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(holders, 0)]
    while waiting:
        value, depth = waiting.pop()
        if (
            id(value) in seen
            or depth > DEPTH
            or isinstance(value, (str, bytes, int, float, torch.Tensor, type))
        ):
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            modules |= {id(module): module for module in value.modules()}
        elif isinstance(value, torch.optim.Optimizer):
            optimizers[id(value)] = value
        else:
            waiting.extend((part, depth + 1) for part in _list_parts(value))
    return list(modules.values()), list(optimizers.values())


def _list_parts(value: object) -> list[Any]:
    """What an object holds, as far as a rehearsal may change it."""
    if isinstance(value, (list, tuple, set)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        named = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *named]
    if isinstance(value, types.ModuleType):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
