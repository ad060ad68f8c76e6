"""The dispatch cache: what it distinguishes, what it skips and says why, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from understudy import DispatchCacheInfo, FakeTensor, FakeTensorMode, MetadataMismatchError, New
from understudy.infer.engine import cache
from understudy.infer.plan import Plan


@pytest.fixture(autouse=True)
def mode() -> Iterator[FakeTensorMode]:
    FakeTensorMode.cache_clear()
    with FakeTensorMode() as active:
        yield active
    FakeTensorMode.cache_clear()


def counted(function: Callable[[], Any]) -> tuple[int, int]:
    """Hits and misses of a call."""
    before = FakeTensorMode.cache_info()
    function()
    after = FakeTensorMode.cache_info()
    return after.hits - before.hits, after.misses - before.misses


def test_info_and_clear() -> None:
    info = FakeTensorMode.cache_info()
    assert isinstance(info, DispatchCacheInfo)
    assert (info.hits, info.misses, info.size, info.bypasses) == (0, 0, 0, {})
    x = torch.empty(2)
    assert counted(lambda: x + 1) == (0, 1)
    assert counted(lambda: x + 1) == (1, 0)
    assert FakeTensorMode.cache_info().size == 2
    FakeTensorMode.cache_clear()
    assert FakeTensorMode.cache_info() == DispatchCacheInfo(0, 0, {}, 0)
    assert counted(lambda: x + 1) == (0, 1)


def test_the_cache_is_shared_by_modes() -> None:
    x = torch.empty(2)
    x + 1
    with FakeTensorMode():
        y = torch.empty(2)
        assert counted(lambda: y + 1) == (1, 0)


DIFFERENT: dict[str, tuple[Callable[[], Any], ...]] = {
    "1, 1.0, True": (lambda: X + 1, lambda: X + 1.0, lambda: X + True, lambda: X + 1j),
    "sizes": (lambda: torch.zeros(2), lambda: torch.zeros(3), lambda: torch.zeros(2, 1)),
    "dtypes": (lambda: torch.zeros(2), lambda: torch.zeros(2, dtype=torch.int32)),
    "devices": (
        lambda: torch.zeros(2),
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.zeros(2, device="cuda:1"),
    ),
    "strides": (lambda: torch.empty(3, 3) + 1, lambda: torch.empty(3, 3).t() + 1),
    "offsets": (lambda: torch.empty(4)[:2].view(2), lambda: torch.empty(4)[2:].view(2)),
    "memory formats": (
        lambda: torch.empty(1, 2, 3, 4).contiguous(),
        lambda: torch.empty(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    ),
    "which argument": (
        lambda: torch.ops.aten.clamp.default(X, 1, None),
        lambda: torch.ops.aten.clamp.default(X, None, 1),
    ),
    "lists": (lambda: torch.cat([X, X]), lambda: torch.cat([X, X, X])),
    "conj": (
        lambda: torch.empty(2, dtype=torch.cfloat) + 1,
        lambda: torch.empty(2, dtype=torch.cfloat).conj() + 1,
    ),
    "rounding": (lambda: torch.div(X, 2, rounding_mode="floor"), lambda: torch.div(X, 2)),
}
X = FakeTensorMode().from_tensor(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("calls", DIFFERENT.values(), ids=DIFFERENT)
def test_different_calls_have_different_answers(calls: Any) -> None:
    with X.fake_mode:
        cold = [described(call()) for call in calls]
        warm = [described(call()) for call in calls]
        FakeTensorMode.cache_clear()
        backwards = [described(call()) for call in reversed(calls)]
    assert cold == warm == backwards[::-1]


def described(value: Any) -> Any:
    return value.spec if isinstance(value, FakeTensor) else [described(part) for part in value]


def test_one_is_not_true_and_not_a_float() -> None:
    x = torch.empty(2, dtype=torch.int64)
    for _ in range(2):
        assert (x + 1).dtype is torch.int64
        assert (x + 1.0).dtype is torch.float32
        assert (x + True).dtype is torch.int64
        assert (x.bool() + True).dtype is torch.bool
        assert (x.bool() + 1).dtype is torch.int64
        assert (x + 1j).dtype is torch.complex64


def test_default_dtype_is_part_of_the_key() -> None:
    x = torch.empty(2, dtype=torch.int64)
    assert (x / 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype is torch.float64
        assert torch.empty(2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x / 2).dtype is torch.float32


def test_negative_zero_and_nan() -> None:
    x = torch.empty(2)
    for value in (0.0, -0.0, float("nan"), float("inf")):
        assert (x * value).shape == (2,)
        assert torch.full((2,), value).shape == (2,)
    for _ in range(2):
        assert torch.full((1,), -0.0).numpy()[0].tobytes() != torch.full((1,), 0.0).numpy()[0].tobytes()


def test_inference_mode_gives_inference_tensors_from_the_same_plans() -> None:
    x = torch.empty(2)
    assert not (x + 1).is_inference()
    with torch.inference_mode():
        y = torch.empty(2)
        assert (y + 1).is_inference()
    assert not (x + 1).is_inference()


def test_operators_on_lists_and_with_several_outputs_are_cached() -> None:
    xs = [torch.empty(2), torch.empty(3)]
    torch._foreach_add_(xs, 1)
    assert counted(lambda: torch._foreach_add_(xs, 1)) == (1, 0)
    x = torch.empty(4, 3)
    x.split(2), x.unbind(), x.max(0)
    assert counted(lambda: (x.split(2), x.unbind(), x.max(0))) == (3, 0)


# --- bypasses -----------------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("understudy_test_cache", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")


@torch.library.register_fake("understudy_test_cache::twice", lib=LIBRARY)
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_bypasses_are_counted_by_reason() -> None:
    torch.ops.understudy_test_cache.twice(torch.empty(2))
    torch.empty(2, 3).t_()
    torch.empty(2, 3).t_()
    bypasses = FakeTensorMode.cache_info().bypasses
    assert bypasses["custom operator not marked pure"] == 1
    assert bypasses["inplace view"] == 2


def test_calls_that_need_tensors_are_counted() -> None:
    torch.tensor(2).item()
    assert FakeTensorMode.cache_info().bypasses["answered from tensors, not from specs"] == 1
    torch.arange(3).nonzero()
    assert FakeTensorMode.cache_info().bypasses["data-dependent output"] == 1


def test_data_dependent_calls_are_not_cached() -> None:
    x = torch.empty(3)
    for _ in range(2):
        size = FakeTensorMode.cache_info().size
        with pytest.raises(RuntimeError):
            x.nonzero()
        assert FakeTensorMode.cache_info().size == size


def test_literals_do_not_share_values() -> None:
    values = [torch.tensor(n).item() for n in (1, 2, 3)]
    assert values == [1, 2, 3]
    assert [torch.full((1,), n).item() for n in (1, 2, 3)] == [1, 2, 3]


def test_the_cache_can_be_switched_off(mode: FakeTensorMode) -> None:
    x = torch.empty(2)
    x + 1
    mode.cache_enabled = False
    size = FakeTensorMode.cache_info().size
    y = x + 1
    z = torch.empty(5, 5)
    assert y.shape == (2,) and z.shape == (5, 5)
    assert FakeTensorMode.cache_info().size == size
    assert counted(lambda: x + 1)[0] == 0
    assert FakeTensorMode.cache_info().bypasses["cache disabled"] >= 1


# --- cross-check --------------------------------------------------------------------------------------------------


def wrong_plan(key: Any) -> None:
    plan = cache.plans[key]
    assert plan.spec is not None
    other = New(plan.spec.like((99,)))
    bad = Plan(other, plan.written, plan.determined)
    bad.op, bad.kind, bad.spec = plan.op, plan.kind, other.spec
    cache.plans[key] = bad


def test_a_wrong_entry_is_found() -> None:
    x = torch.empty(2)
    before = set(cache.plans)
    x * 3
    (key,) = set(cache.plans) - before
    wrong_plan(key)
    assert (x * 3).shape == (99,), "without a cross-check the entry is believed"
    with FakeTensorMode(crosscheck=True):
        y = torch.empty(2)
        with pytest.raises(MetadataMismatchError, match=r"cached .*99.*\n.*fresh .*f32\[2\]") as caught:
            y * 3
        assert caught.value.func is torch.ops.aten.mul.Tensor


def test_right_entries_pass_the_cross_check() -> None:
    with FakeTensorMode(crosscheck=True):
        for _ in range(2):
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.empty(2, 3)).sum().backward()
            optimizer.step()
    assert FakeTensorMode.cache_info().hits > 20


def test_not_a_number_is_found_again() -> None:
    """It is not equal to itself, and was never found in the cache."""
    with FakeTensorMode() as mode:
        x = torch.empty(3)
        torch.nan_to_num(x + float("nan"), float("nan"))
        before = mode.cache_info()
        torch.nan_to_num(x + float("nan"), float("nan"))
        assert mode.cache_info().misses == before.misses


def test_other_floats_need_no_other_plan() -> None:
    """Optimizers compute with other numbers at each step; tensors of integers and floats of no use to a dtype do not count."""

    def misses_of(step: Callable[[float], object], *values: float) -> int:
        before = FakeTensorMode.cache_info().misses
        for value in values:
            step(value)
        return FakeTensorMode.cache_info().misses - before

    with FakeTensorMode():
        x, n = torch.randn(5, 7), torch.arange(4).view(2, 2) * torch.ones((), dtype=torch.int64)
        assert misses_of(lambda value: x * value, 0.25, 0.5, 0.75) == 1
        assert misses_of(lambda value: x.addcdiv_(x, x, value=value), 0.25, 0.5, 0.75) == 1
        assert misses_of(lambda value: torch._foreach_add_([x, x], [value, 2 * value]), 0.25, 0.5, 0.75) == 1
        assert misses_of(lambda value: n * value, 0.25, 0.5, 0.75) == 3
        assert misses_of(lambda value: x * value, 1e30, float("inf"), float("nan")) == 3
        assert (x * 0.125).dtype is torch.float32 and (n * 0.125).dtype is torch.float32
        assert (x * 2).shape == (x * True).shape == (5, 7)
