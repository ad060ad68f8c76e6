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

from understudy.infer.plan import FIRST_ITSELF, ONE_NEW, OTHER, Plan
from understudy.ops.registry import RECORDS, record_of
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec

LIMIT = 1 << 16


class DispatchCacheInfo(NamedTuple):
    hits: int
    misses: int
    bypasses: dict[str, int]
    size: int


class Cache:
    """Reading is one dictionary look-up; the lock is taken only to add, evict and clear.

    `recipes` are those of composite operators (`fake/kernels/recipes.py`); `shared` are plans in a form without
    symbols, which all environments can use; `layer_plans` are those of new layers (`fake/patches/layers.py`). A cache
    with `counters` adds to the counters of that cache, and is cleared with it.
    """

    def __init__(self, limit: int = LIMIT, counters: Cache | None = None) -> None:
        self.plans: dict[Any, Plan] = {}
        self.recipes: dict[Any, Any] = {}
        self.shared: dict[Any, Any] = {}
        self.layer_plans: dict[Any, Any] = {}
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
        record = None if plan.op is None else RECORDS.get(id(plan.op))
        ignores_floats = record is not None and record.ignores_floats and plan.kind in FOR_ANY_FLOATS
        general = for_any_floats(plan.op, key) if ignores_floats else None
        with self._lock:
            self._counters.misses += 1
            self._keep(key, plan)
            if general is not None:
                self._keep(general, plan)

    def find_for_any_floats(self, op: Any, key: tuple[object, ...]) -> Plan | None:
        """The plan of a call that differs from this one in the values of floats alone."""
        general = for_any_floats(op, key)
        plan = None if general is None else self.plans.get(general)
        if plan is not None:
            self.share(key, plan)
        return plan

    def share(self, key: tuple[object, ...], plan: Plan) -> None:
        """Add a plan from another cache, without counting a miss."""
        with self._lock:
            self._keep(key, plan)

    def _keep(self, key: tuple[object, ...], plan: Plan) -> None:
        if len(self.plans) >= self._limit:
            self._evict()
            self.recipes.clear()
        self.plans[key] = plan

    def add_recipe(self, key: object, recipe: object, is_inferred: bool = False) -> None:
        """`is_inferred`: it was inferred as a whole, which is a miss; else the operators inside it have counted theirs."""
        with self._lock:
            self._counters.misses += is_inferred
            if len(self.recipes) >= self._limit:
                self.recipes.clear()
            self.recipes[key] = recipe

    def add_shared(self, key: tuple[object, ...], plan: object) -> None:
        with self._lock:
            if len(self.shared) >= self._limit:
                self.shared.clear()
            self.shared[key] = plan

    def add_layer_plan(self, key: tuple[object, ...], plan: object) -> None:
        with self._lock:
            if len(self.layer_plans) >= self._limit:
                self.layer_plans.clear()
            self.layer_plans[key] = plan

    def bypass(self, reason: str) -> None:
        with self._lock:
            self.bypasses[reason] += 1

    def _evict(self) -> None:
        """Drop the older half: insertion order is age, and an evicted plan is cheap to infer again."""
        for key in list(self.plans)[: self._limit // 2]:
            del self.plans[key]

    def forget_plans(self) -> None:
        """Drop all plans, because something that they depend on has changed (a new rule, say)."""
        with self._lock:
            self._drop_all()
        for dependent in list(self._dependents):
            dependent.forget_plans()

    def _drop_all(self) -> None:
        for table in (self.plans, self.recipes, self.shared, self.layer_plans):
            table.clear()

    def clear(self) -> None:
        with self._lock:
            self._drop_all()
            self.hits = self.misses = 0
            self.bypasses.clear()

    def info(self) -> DispatchCacheInfo:
        with self._lock:
            return DispatchCacheInfo(self.hits, self.misses, dict(self.bypasses), len(self.plans))


PLAIN_TYPES = frozenset({int, type(None), str, torch.dtype, torch.layout, torch.memory_format})
"""Types whose values go into a key as they are."""
SIZED_TYPES = frozenset({float, bool, complex})
"""Types whose values compare equal to ints: their type is part of the key."""
SYMBOLIC_TYPES = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})


class UnusualArgument(Exception):
    """An argument that can't be part of a key."""


def add_value(key: list[Any], kind: type, value: Any) -> None:
    """Add an argument other than a tensor or a list to a key."""
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


def for_any_floats(op: Any, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The key of all calls that differ from this one in the values of floats alone; None if values may matter.

    Floats that a dtype can't hold are refused by some kernels, and so are floats in place on integers.
    """
    record = None if op is None else RECORDS.get(id(op)) or record_of(op)
    if record is None or not record.ignores_floats or record.has_out:
        return None
    general: list[Any] = []
    before: Any = None
    for part in key:
        if before is float:
            if type(part) is not float or abs(part) > LARGEST_HALF:
                return None
        elif before is not SymFloat:
            if type(part) is TensorSpec and part.dtype not in ORDINARY_FLOATS:
                return None
            general.append(part)
        before = part
    return tuple(general) if len(general) < len(key) else None


SymFloat = torch.SymFloat
FOR_ANY_FLOATS = (ONE_NEW, FIRST_ITSELF, OTHER)
"""Kinds of plans that do not depend on values."""
ORDINARY_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
LARGEST_HALF = torch.finfo(torch.float16).max
NAN = "nan"
"""In keys, stands for NaN, which is not equal to itself."""
