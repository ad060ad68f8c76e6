"""The dispatch cache: key → plan, bounded, with counters.

A key is `(identity of the operator, … what the arguments are …, default dtype, facts of simulated devices)`: specs stand
for tensors, and every other argument comes with its type where two types could compare equal (1, 1.0, True). The mode makes
it (`FakeTensorMode.__torch_dispatch__`), on the hot path.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from understudy.infer.plan import Plan
from understudy.shapes.node import SymNode

LIMIT = 1 << 16


class DispatchCacheInfo(NamedTuple):
    hits: int
    misses: int
    bypasses: dict[str, int]
    size: int


class Cache:
    """Reading is one dictionary look-up; the lock is taken only to add, evict and clear.

    `recipes` belong to the layer that breaks composite operators up; `shared` are the plans that environments share, said
    without their symbols. A cache that counts with another (`counters`) forgets with it, too.
    """

    def __init__(self, limit: int = LIMIT, counters: Cache | None = None) -> None:
        self.plans: dict[Any, Plan] = {}
        self.recipes: dict[Any, Any] = {}
        self.shared: dict[Any, Any] = {}
        self.hits = 0
        self.misses = 0
        self.bypasses: Counter[str] = Counter()
        self._limit = limit
        self._counters = counters or self
        self._lock = threading.Lock()
        self._dependents: WeakSet[Cache] = WeakSet()
        if counters is not None:
            counters._dependents.add(self)

    def add(self, key: tuple[object, ...], plan: Plan) -> None:
        with self._lock:
            self._counters.misses += 1
        self.share(key, plan)

    def share(self, key: tuple[object, ...], plan: Plan) -> None:
        """Add what another cache has found."""
        with self._lock:
            if len(self.plans) >= self._limit:
                self._evict()
                self.recipes.clear()
            self.plans[key] = plan

    def add_shared(self, key: tuple[object, ...], plan: object) -> None:
        with self._lock:
            if len(self.shared) >= self._limit:
                self.shared.clear()
            self.shared[key] = plan

    def bypass(self, reason: str) -> None:
        with self._lock:
            self.bypasses[reason] += 1

    def _evict(self) -> None:
        """Drop the older half: insertion order is age, and a plan in use is cheaply made again."""
        for key in list(self.plans)[: self._limit // 2]:
            del self.plans[key]

    def forget_plans(self) -> None:
        """After something that answers were made from has changed."""
        with self._lock:
            self.plans.clear()
            self.recipes.clear()
            self.shared.clear()
        for dependent in list(self._dependents):
            dependent.forget_plans()

    def clear(self) -> None:
        with self._lock:
            self.plans.clear()
            self.shared.clear()
            self.hits = self.misses = 0
            self.bypasses.clear()

    def info(self) -> DispatchCacheInfo:
        with self._lock:
            return DispatchCacheInfo(self.hits, self.misses, dict(self.bypasses), len(self.plans))


PLAIN_TYPES = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format})
"""Types whose values are a key by themselves."""
SIZED_TYPES = frozenset({float, bool, complex})
"""Types whose values compare equal to ints: their type is part of the key."""
SYMBOLIC_TYPES = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})


class UnusualArgument(Exception):
    """An argument that no key can hold."""


def add_value(key: list[Any], kind: type, value: Any) -> None:
    """Add an argument that is no tensor and no list to a key."""
    if kind in PLAIN_TYPES:
        key.append(value)
    elif kind in SIZED_TYPES:
        key.append(kind)
        key.append(NAN if value != value else value)
    elif kind in SYMBOLIC_TYPES and type(value.node) is SymNode:
        key.append(kind)
        key.append(value.node)
    else:
        raise UnusualArgument


NAN = "nan"
"""Stands for a number that is not equal to itself, and would never be found again."""
