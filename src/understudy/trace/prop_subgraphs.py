"""Graphs inside of graphs: what higher-order operators call is propagated too, so that its nodes have values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.higher_order import RUNS
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.trace.prop_values import storages_of

Propagate = Callable[[torch.fx.GraphModule, tuple[Any, ...]], Any]


class Propagated(torch.nn.Module):
    """Stands for a graph module among the arguments of a higher-order operator: calling it propagates."""

    def __init__(self, inner: torch.fx.GraphModule, propagate: Propagate) -> None:
        super().__init__()
        self._inner = (inner,)  # in a tuple: it is no part of this module
        self._propagate = propagate

    def forward(self, *args: Any) -> Any:
        return self._propagate(*self._inner, args)


def takes_graphs(target: Any) -> bool:
    """Whether this is a higher-order operator that runs as plain code: it calls the graphs that it is given."""
    return isinstance(target, _torch.HigherOrderOperator) and target.name() in RUNS


def with_propagation(args: tuple[Any, ...], propagate: Propagate) -> tuple[Any, ...]:
    """The arguments, graph modules replaced by ones that propagate."""
    return tuple(
        [Propagated(value, propagate) if isinstance(value, torch.fx.GraphModule) else value for value in args]
    )


class SubgraphAnswers:
    """What `invoke_subgraph` gave, by the subgraph's identifier and the specs of the operands."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self._specs: dict[Any, tuple[type, list[Any]]] = {}

    def recall(self, mode: FakeTensorMode, identifier: Any, operands: tuple[Any, ...]) -> Any:
        """New tensors like those of the first time, or None if there was none for such operands."""
        key = self._key(mode, identifier, operands)
        found = self._specs.get(key) if key is not None else None
        if found is None:
            return None
        kind, specs = found
        return kind([make_new(mode, spec) for spec in specs])

    def remember(self, mode: FakeTensorMode, identifier: Any, operands: tuple[Any, ...], result: Any) -> None:
        """Only what is made of nothing but new tensors can be made again from specs."""
        self.seen.add(identifier)
        key = self._key(mode, identifier, operands)
        if key is None or type(result) not in (tuple, list) or not all(_is_plain(mode, part) for part in result):
            return
        storages = storages_of(result)
        if len(set(storages)) == len(result) and not set(storages) & set(storages_of(operands)):
            self._specs[key] = type(result), [part._spec for part in result]

    @staticmethod
    def _key(mode: FakeTensorMode, identifier: Any, operands: tuple[Any, ...]) -> Any:
        if not all(type(value) is int or _is_plain(mode, value) for value in operands):
            return None
        return identifier, *[value if type(value) is int else value._spec for value in operands]


def _is_plain(mode: FakeTensorMode, value: Any) -> bool:
    return (
        type(value) is FakeTensor
        and value.fake_mode is mode
        and value._known is None
        and not value.requires_grad
        and not value._spec.is_symbolic
        and value._spec.layout is torch.strided
    )
