"""Tensors that a program reaches past its modules: a list of parameters, an optimizer's, one in a closure.

While stand-ins are traced, a tensor of a lent module is its stand-in, whoever holds it: `torch.autograd.grad(loss, params)`
and `[p.grad for p in params]` then speak of the tensors that the program has computed with. So is every other tensor to
which gradients go: none of them is left at a tensor of the user's. What an optimizer learns in a step is taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.trace.constants import Constants

REAL = frozenset({torch.Tensor, torch.nn.Parameter})
SEQUENCES = frozenset({list, tuple})


def has_reals(args: Any, kwargs: Any) -> bool:
    """Whether a real tensor is among the arguments of a torch function."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in REAL or (kind in SEQUENCES and not REAL.isdisjoint(map(type, value))):
            return True
    return False


class Strays:
    """The stand-ins of real tensors, for the time of one trace."""

    def __init__(self, constants: Constants, mode: FakeTensorMode) -> None:
        self._constants = constants
        self._mode = mode

    def replaced(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a torch function with stand-ins for what is real."""
        return tuple(map(self._replaced, args)), {name: self._replaced(value) for name, value in kwargs.items()}

    def _replaced(self, value: Any) -> Any:
        kind = type(value)
        if kind in REAL:
            return self._stand_in(value)
        if kind in SEQUENCES:
            return kind([self._stand_in(part) if type(part) in REAL else part for part in value])
        return value

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._constants.stand_in_of(tensor)
        if found is not None:
            return found
        with _torch.NoFunctionModes():
            is_given_gradients = tensor.requires_grad and tensor.is_leaf and not _torch.is_functorch_wrapped(tensor)
            if not (is_given_gradients and self._mode.allow_non_fake_inputs):
                return tensor
            fake = self._mode.from_tensor(tensor, static_shapes=True)
        self._constants.expect(fake, tensor, None)
        return fake


@contextmanager
def forgetful_optimizers() -> Iterator[None]:
    """Optimizers that make a step in a trace of this thread have, afterwards, the state and options of before."""
    before: dict[Optimizer, tuple[dict[Any, Any], list[dict[str, Any]]]] = {}

    def remember(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in before and _torch.active_recorder() is not None:
            state = {parameter: copy.copy(entries) for parameter, entries in optimizer.state.items()}
            before[optimizer] = state, [dict(group) for group in optimizer.param_groups]

    handle = register_optimizer_step_pre_hook(remember)
    try:
        yield
    finally:
        handle.remove()
        for optimizer, (state, groups) in before.items():
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(options)
