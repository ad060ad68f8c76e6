"""infer: the order of sources, devices, and what is determined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import understudy
from understudy import FakeTensorDeviceMismatchError, FakeTensorMode, UnsupportedOperatorException
from understudy.infer.engine import SOURCES, infer
from understudy.infer.plan import FIRST_ITSELF, FIRST_VIEWED, ONE_DETERMINED, ONE_NEW
from understudy.ops.traits.devices import device_of
from understudy.spec import New, Same, TensorSpec, View
from understudy.spec.call import Call

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def spec(*shape: int, device: torch.device = CPU) -> TensorSpec:
    return TensorSpec(shape, dtype=torch.float32, device=device)


def plan_of(op: Any, *args: Any, **kwargs: Any) -> Any:
    return infer(Call.of(op, args, kwargs), FakeTensorMode())


def test_the_order_is_data() -> None:
    names = [source.__name__ for source in SOURCES]
    assert names.index("by_rule") < names.index("by_registered_fake") < names.index("by_meta_kernel")
    assert names[-1] == "by_real_kernel"


def test_kinds_of_plans() -> None:
    new = plan_of(aten.add.Tensor, spec(2), spec(2))
    assert new.kind == ONE_NEW and new.outcomes == New(spec(2))
    view = plan_of(aten.t.default, spec(2, 3))
    assert view.kind == FIRST_VIEWED and isinstance(view.outcomes, View)
    same = plan_of(aten.add_.Tensor, spec(2), 1)
    assert same.kind == FIRST_ITSELF and same.outcomes == Same(0) and same.written == (0,)


def test_what_is_determined() -> None:
    assert plan_of(aten.add.Tensor, spec(2), 1).determined
    assert (
        plan_of(aten.zeros.default, [2]).determined
        and plan_of(aten.zeros.default, [2]).kind == ONE_DETERMINED
    )
    for op, args in (
        (aten.empty.memory_format, ([2],)),
        (aten.rand.default, ([2],)),
        (aten.bernoulli.default, (spec(2),)),
    ):
        assert not plan_of(op, *args).determined
    assert not plan_of(aten.zeros.default, [1 << 30]).determined


# --- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "device"),
    [
        ([spec(2)], CPU),
        ([spec(2), spec(2)], CPU),
        ([spec(2, device=CUDA), spec()], CUDA),
        ([spec(), spec(2, device=CUDA)], CUDA),
        ([spec(), spec(device=CUDA)], CUDA),
        ([spec(), spec()], CPU),
        ([], None),
    ],
)
def test_which_device_decides(inputs: list[TensorSpec], device: Any) -> None:
    assert device_of(Call.of(aten.stack.default, (inputs,), {})) == device


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (spec(2, device=CUDA), spec(2)),
        (spec(2), spec(2, device=CUDA)),
        (spec(2, device=CUDA), spec(2, device=torch.device("cuda:1"))),
        (spec(2), spec(device=CUDA)),
        (spec(1), spec(2, device=CUDA)),
    ],
)
def test_devices_that_do_not_go_together(a: TensorSpec, b: TensorSpec) -> None:
    with pytest.raises(FakeTensorDeviceMismatchError, match=r"self is on .*, but other is on") as caught:
        plan_of(aten.add.Tensor, a, b)
    assert caught.value.devices == (a.device, b.device)  # type: ignore[attr-defined]


def test_operators_that_may_mix_devices() -> None:
    cuda = spec(2, device=CUDA)
    assert plan_of(aten.copy_.default, cuda, spec(2)).outcomes == Same(0)
    index = TensorSpec((1,), dtype=torch.int64, device=CPU)
    assert plan_of(aten.index.Tensor, cuda, [index]).outcomes.spec.device == CUDA


# --- custom operators --------------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("understudy_test_engine", "FRAGMENT") as scoped:
        yield scoped


def test_a_rule_of_the_user_comes_first(library: torch.library.Library) -> None:
    library.define("pooled(Tensor x, int size) -> Tensor")
    op = torch.ops.understudy_test_engine.pooled.default
    with pytest.raises(UnsupportedOperatorException):
        plan_of(op, spec(8), 2)

    @understudy.rule("understudy_test_engine::pooled")
    def pooled(x: TensorSpec, size: int) -> TensorSpec:
        return x.like((x.shape[0] // size,))

    assert plan_of(op, spec(8), 2).outcomes == New(spec(4))
    with FakeTensorMode():
        assert torch.ops.understudy_test_engine.pooled(torch.empty(8, device="cuda"), 4).device == CUDA


def test_a_registered_fake(library: torch.library.Library) -> None:
    library.define("halves(Tensor x) -> (Tensor, Tensor)")

    @torch.library.register_fake("understudy_test_engine::halves", lib=library)
    def halves(x: torch.Tensor) -> Any:
        half = x.shape[0] // 2
        return x.new_empty(half), torch.empty_like(x[:half])

    plan = plan_of(torch.ops.understudy_test_engine.halves.default, spec(8))
    assert plan.outcomes == (New(spec(4)), New(spec(4)))


def test_a_composite_operator_needs_nothing(library: torch.library.Library) -> None:
    library.define("both(Tensor x, Tensor y) -> Tensor")
    library.impl("both", lambda x, y: (x + y).sum(0), "CompositeImplicitAutograd")
    with FakeTensorMode():
        assert torch.ops.understudy_test_engine.both(torch.empty(3, 4), torch.empty(4)).shape == (4,)


def test_a_size_that_a_registered_fake_can_t_know(library: torch.library.Library) -> None:
    library.define("some(Tensor x) -> Tensor")

    @torch.library.register_fake("understudy_test_engine::some", lib=library)
    def some(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    with FakeTensorMode(), pytest.raises(understudy.DynamicOutputShapeException, match="depends on values"):
        torch.ops.understudy_test_engine.some(torch.empty(3))
