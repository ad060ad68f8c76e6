"""Steps of a run: one is over when each of its optimizers has stepped, so that the one that steps most seldom counts.

In a program without an optimizer of torch.optim, which updates its parameters by hand, a step is a backward pass and what
follows it until the next one.

with StepCounter(most=2) as counter:        # knows the optimizers that a rehearsed script makes from here on
    counter.count(optimizer)                # after each of their steps; raises EndOfScript at the last one
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from understudy.patching import REHEARSAL, patch_call
from understudy.simulation.least_memory import least_bytes

PATIENCE, LEAST_PATIENCE = 100, 4
"""How many times as often another optimizer has to step for one that never does to be left out of account; and where others
update all of its parameters, as those do that an optimizer like SAM calls."""

FORMULA_STEPS = 2
"""Steps of each optimizer after which the least memory is computed: all of its state exists then."""


class EndOfScript(BaseException):
    """Raised in a script when it has taken its steps. No `Exception`: a script that handles errors is ended as well."""


class StepCounter:
    """Counts the steps of all optimizers, and ends the script after `most`."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.names: set[str] = set()
        """Classes of the optimizers; those of a function that has ended are gone by the end of the run."""
        self.steps = 0
        self.least: dict[torch.device, int] = {}
        """Bytes that training needs at least, by formula."""
        self._backward_depth = 0

    def __enter__(self) -> StepCounter:
        _counters.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _counters[:] = [counter for counter in _counters if counter is not self]

    def add(self, optimizer: object) -> None:
        self.counts.setdefault(optimizer, 0)
        self.names.add(type(optimizer).__name__)

    def count(self, optimizer: object, *_: object) -> None:
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        self.names.add(type(optimizer).__name__)
        if self.counts[optimizer] <= FORMULA_STEPS:
            for device, size in least_bytes([optimizer, *self.counts]).items():
                self.least[device] = max(size, self.least.get(device, 0))
        steps = min(self._list_counts())
        if steps > self.steps:
            self.steps = steps
            if self.most is not None and steps >= self.most:
                raise EndOfScript

    def _list_counts(self) -> Iterator[int]:
        """The steps of each optimizer that counts. One that has not stepped yet is waited for."""
        often = max(self.counts.values()) / (self.most or 1)
        updated: set[int] | None = None
        for optimizer, steps in self.counts.items():
            if steps:
                yield steps
                continue
            if updated is None:
                updated = set().union(*[_identify_parameters(o) for o, count in self.counts.items() if count])
            is_shared = _identify_parameters(optimizer) <= updated
            if often <= (LEAST_PATIENCE if is_shared else PATIENCE):
                yield 0

    def begin_backward(self) -> None:
        """Before a backward pass: without optimizers, this is the end of the step before."""
        is_counted = not self.counts and self._backward_depth == 0
        if is_counted and self.most is not None and self.steps >= self.most:
            raise EndOfScript
        self._backward_depth += 1

    def end_backward(self) -> None:
        self._backward_depth -= 1
        if not self.counts and self._backward_depth == 0:
            self.steps += 1


_counters: list[StepCounter] = []


def _identify_parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}


@patch_call("torch.optim.Optimizer.__init__", during=REHEARSAL)
def follow_optimizers(original: Callable[..., object], self: object, *args: object, **kwargs: object) -> None:
    """A step of a rehearsal is over when each of its optimizers has stepped: they are counted from the start."""
    original(self, *args, **kwargs)
    for counter in _counters:
        counter.add(self)


@patch_call("torch.autograd.backward", during=REHEARSAL)
def follow_backward_passes(original: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Programs that update parameters by hand have no optimizer whose steps could be counted."""
    counters = list(_counters)
    for counter in counters:
        counter.begin_backward()
    try:
        original(*args, **kwargs)
    finally:
        for counter in counters:
            counter.end_backward()
