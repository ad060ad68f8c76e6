"""The cache by itself: bounds, counters, threads."""

from __future__ import annotations

import threading

import torch

from understudy.infer.cache import Cache
from understudy.infer.plan import Plan
from understudy.spec import New, TensorSpec

CPU = torch.device("cpu")


def plan(size: int) -> Plan:
    return Plan(New(TensorSpec((size,), dtype=torch.float32, device=CPU)))


def test_counters() -> None:
    cache = Cache()
    cache.add("a", plan(1))
    cache.bypass("reason")
    cache.bypass("reason")
    info = cache.info()
    assert (info.misses, info.size, info.bypasses) == (1, 1, {"reason": 2})
    cache.clear()
    assert cache.info() == (0, 0, {}, 0)


def test_the_older_half_goes() -> None:
    cache = Cache(limit=10)
    for n in range(11):
        cache.add(n, plan(n))
    assert len(cache.plans) == 6
    assert 0 not in cache.plans and {9, 10} <= set(cache.plans)
    for n in range(1000):
        cache.add(n, plan(n))
        assert len(cache.plans) <= 10


def test_recipes_are_bounded_without_plans() -> None:
    cache = Cache(limit=10)
    for n in range(25):
        cache.add_recipe(n, object(), is_inferred=True)
        assert n in cache.recipes and len(cache.recipes) <= 10
    assert cache.info().misses == 25


def test_the_look_up_stays_valid_when_cleared() -> None:
    """The hot path holds the dictionary's own `get`."""
    cache = Cache()
    find = cache.plans.get
    cache.add("a", plan(1))
    assert find("a") is not None
    cache.clear()
    assert find("a") is None
    cache.add("a", plan(2))
    assert find("a") is not None


def test_several_threads() -> None:
    cache = Cache(limit=32)

    def fill(start: int) -> None:
        for n in range(start, start + 2000):
            cache.add(n % 97, plan(n % 97))
            found = cache.plans.get(n % 89)
            if found is not None:
                assert found.outcomes.spec.shape == (n % 89,)  # type: ignore[union-attr]

    threads = [threading.Thread(target=fill, args=(start,)) for start in (0, 500, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.info().misses == 6000 and cache.info().size <= 32


def test_plans_compare_by_what_they_do() -> None:
    assert plan(1) == plan(1) and plan(1) != plan(2)
    assert Plan(plan(1).outcomes, (0,)) != plan(1)
