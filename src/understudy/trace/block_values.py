"""The tensors that the nodes of a recorded block give: their specs and which of them share memory, to make them anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import can_be_made_again, make_again, make_new, make_view
from understudy.fake.tensor import FakeTensor
from understudy.infer.call import flat
from understudy.trace.lent import Lent
from understudy.trace.prop_values import snapshot


@dataclass(slots=True)
class Val:
    """A tensor that a node gives: its spec, and the number of its storage."""

    spec: Any
    storage: int
    is_simple: bool
    """Made the short way: on a storage that nobody but the block's own values have."""


class Values:
    """What the steps of a block give."""

    def __init__(self, tensors: list[Any], outside: list[FakeTensor]) -> None:
        self._numbers: dict[Any, int] = {}
        self.of_tensors = [self._number(tensor) for tensor in tensors]
        self.outside = {self._number(val): val for val in outside}
        self.from_before = {*self.of_tensors, *self.outside}
        self.steps: list[Any] = []
        self.first: dict[int, int] = {}
        """The step that gives the first tensor on a storage, by the storage's number."""

    def _number(self, tensor: Any) -> int:
        key = tensor if type(tensor) is Lent else _torch.storage_id(tensor)
        return self._numbers.setdefault(key, len(self._numbers))

    def __len__(self) -> int:
        """How many storages there are."""
        return len(self._numbers)

    def add(self, val: Any) -> bool:
        """What the next step gives. Says whether it can be made at any time."""
        if type(val) is FakeTensor:
            self.steps.append(self._described(val))
            return can_be_made_again(val._spec)
        tensors = flat(FakeTensor, (val,), {})

        def described(part: Any) -> Any:
            return self._described(part) if type(part) is FakeTensor else part

        self.steps.append(map_aggregate(val, described))
        return val is not None and all(can_be_made_again(tensor._spec) for tensor in tensors)

    def _described(self, tensor: FakeTensor) -> Val:
        storage = self._number(tensor)
        self.first.setdefault(storage, len(self.steps))
        is_simple = storage not in self.from_before and can_be_made_again(tensor._spec)
        return Val(tensor._spec, storage, is_simple)


class Made:
    """The values of one stretch of nodes that were written after a recorded block, each made once."""

    def __init__(self, values: Values, mode: FakeTensorMode, given: list[FakeTensor], own: list[Any]) -> None:
        self._values = values
        self._mode = mode
        self._is_inference = torch.is_inference_mode_enabled()
        self._bases: list[Any] = [None] * len(values)
        for storage, val in values.outside.items():
            self._bases[storage] = val
        for position, (storage, tensor) in enumerate(zip(values.of_tensors, (*given, *own), strict=True)):
            if storage in values.first:
                # The inputs themselves are not held on to: who looks whether they are still used would be misled.
                self._bases[storage] = snapshot(tensor) if position < len(given) else tensor
        self._made: dict[int, Any] = {}

    def make(self, step: int) -> Any:
        """What a step gives."""
        if step not in self._made:
            if torch.is_inference_mode_enabled() is self._is_inference:
                self._made[step] = self._all(step)
            else:
                with torch.inference_mode(self._is_inference):
                    self._made[step] = self._all(step)
        return self._made[step]

    def _all(self, step: int) -> Any:
        vals: Any = self._values.steps[step]
        if type(vals) is Val:
            return self._tensor(vals, step)

        def made(part: Any) -> Any:
            return self._tensor(part, step) if type(part) is Val else part

        return map_aggregate(vals, made)

    def _tensor(self, val: Val, step: int) -> FakeTensor:
        base = self._bases[val.storage]
        if type(base) is Lent:
            base = self._bases[val.storage] = base.stand_in()
        if base is None:
            first = self._values.first[val.storage]
            if first != step:
                self.make(first)
                base = self._bases[val.storage]
        is_short = val.is_simple and not self._is_inference
        if base is None:
            fake = make_again(self._mode, val.spec, None) if is_short else make_new(self._mode, val.spec)
            self._bases[val.storage] = fake
            return fake
        return make_again(self._mode, val.spec, base) if is_short else make_view(self._mode, base, val.spec)
