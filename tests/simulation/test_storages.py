"""Storages from birth to death: each once, none kept alive, none that inference made."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.simulation.memory_events import BirthsAndDeaths
from understudy.simulation.events import Listener, MemoryRecord
from understudy.simulation.storages import ObservedMode

F = torch.nn.functional


class Diary(BirthsAndDeaths):
    """All that was heard, and the bytes that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, Any]] = []
        self.alive = self.peak = 0

    def on_event(self, record: MemoryRecord, is_birth: bool) -> None:
        self.events.append(("birth" if is_birth else "death", record.nbytes))
        self.alive += record.nbytes if is_birth else -record.nbytes
        self.peak = max(self.peak, self.alive)

    def before_operator(self, func: Any, args: Any, kwargs: Any) -> None:
        self.events.append(("before", str(func)))

    def after_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.events.append(("after", str(func)))

    @property
    def births(self) -> list[int]:
        return [what for event, what in self.events if event == "birth"]

    @property
    def operators(self) -> list[str]:
        return [what for event, what in self.events if event == "before"]


@pytest.fixture
def mode() -> ObservedMode:
    return ObservedMode()


@pytest.fixture
def diary(mode: ObservedMode) -> Iterator[Diary]:
    diary = Diary()
    mode.add_listener(diary)
    with mode:
        yield diary


def test_one_operator_in_order(mode: ObservedMode, diary: Diary) -> None:
    x = torch.empty(10, device="cuda")
    diary.events.clear()
    y = x * 2
    assert diary.events == [("before", "aten.mul.Tensor"), ("birth", 40), ("after", "aten.mul.Tensor")]
    diary.events.clear()
    del y
    assert diary.events == [("death", 40)]


def test_a_record_says_where_and_what(mode: ObservedMode, diary: Diary) -> None:
    x = torch.empty(3, 5, dtype=torch.bfloat16, device="cuda:3")
    record = mode.find_record(x)
    assert record is not None
    assert (record.nbytes, record.device, record.dtype, record.stream) == (
        30,
        torch.device("cuda:3"),
        torch.bfloat16,
        0,
    )
    assert mode.find_record(x.t()) is record
    y = torch.empty(1)
    later = mode.find_record(y)
    assert later is not None and later.serial == record.serial + 1
    del x
    assert record() is None and record.nbytes == 30


def test_views_and_aliases_are_not_counted_twice(mode: ObservedMode, diary: Diary) -> None:
    x = torch.empty(4, 6, device="cuda", requires_grad=True)
    diary.events.clear()
    parameter = torch.nn.Parameter(x.detach())
    views = [
        x.t(),
        x[0],
        x.view(24),
        x.detach(),
        x.alias() if hasattr(x, "alias") else x.view_as(x),
        x.data,
        parameter,
    ]
    with torch.no_grad():
        x.add_(1)
    assert diary.births == []
    del views, parameter
    assert diary.alive == 96
    del x
    assert diary.alive == 0


def test_a_view_keeps_its_storage_alive(mode: ObservedMode, diary: Diary) -> None:
    row = torch.empty(100, 10)[3]
    assert diary.alive == 4000
    del row
    assert diary.alive == 0


def test_nothing_is_left_after_a_training_step(mode: ObservedMode, diary: Diary) -> None:
    def train() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))
        model.to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 16, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    gc.collect()
    assert diary.alive == 0 and diary.peak > 4 * 4 * (16 * 32 + 32 + 2 * 32)
    assert not mode.storages


def test_cold_and_warm_runs_are_told_alike(mode: ObservedMode, diary: Diary) -> None:
    """What decompositions and registered fakes perform on is not memory of the program."""
    mode.cache_clear()

    def run() -> list[tuple[str, Any]]:
        diary.events.clear()
        x = torch.empty(4, 8, 6, 6, device="cuda", requires_grad=True)
        y = F.gelu(F.batch_norm(x, None, None, training=True)).std()
        y.backward()
        torch.linalg.lstsq(torch.empty(5, 3), torch.empty(5, 2))
        torch.special.erfcx(torch.empty(7))
        del x, y
        return list(diary.events)

    assert run() == run()


def test_several_results_and_lists(mode: ObservedMode, diary: Diary) -> None:
    x = torch.empty(8, 8, device="cuda")
    diary.events.clear()
    values, _indices = x.max(0)
    assert diary.births == [32, 64]
    torch._foreach_add([x, values], 1.0)
    assert diary.births == [32, 64, 256, 32]


def test_births_come_in_the_order_of_the_kernels(mode: ObservedMode, diary: Diary) -> None:
    """A dropout's mask is there before its result, cold and warm."""
    x = torch.empty(100, device="cuda")
    diary.events.clear()
    kept = [torch.native_dropout(x, 0.5, True) for _ in range(2)]
    assert diary.births == [100, 400, 100, 400]
    del kept
    assert diary.alive == 400


def test_composites_of_inference_mode_are_broken_up(mode: ObservedMode, diary: Diary) -> None:
    with torch.inference_mode():
        x = torch.empty(2, 3, 4, device="cuda")
        weight = torch.empty(5, 4, device="cuda")
        diary.events.clear()
        F.linear(x, weight)
    assert "aten.mm.default" in diary.operators and "aten.linear.default" not in diary.operators


def test_resizes(mode: ObservedMode, diary: Diary) -> None:
    x = torch.empty(10, device="cuda")
    diary.events.clear()
    x.resize_(100)
    assert [event for event in diary.events if event[0] in ("birth", "death")] == [
        ("birth", 400),
        ("death", 40),
    ]
    diary.events.clear()
    x.untyped_storage().resize_(0)
    assert diary.events == [("birth", 0), ("death", 400)] and diary.alive == 0
    x.untyped_storage().resize_(400)
    assert diary.alive == 400
    out = torch.empty(0, device="cuda")
    torch.mul(x, 2, out=out)
    assert diary.alive == 800


def test_set_and_data_leave_the_old_storage(mode: ObservedMode, diary: Diary) -> None:
    x, y = torch.empty(10, device="cuda"), torch.empty(50, device="cuda")
    assert diary.alive == 240
    x.set_(y)
    assert diary.alive == 200
    z = torch.empty(5, device="cuda")
    z.data = y
    assert diary.alive == 200


def test_conversions_and_copies_are_births(mode: ObservedMode, diary: Diary) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        real = torch.nn.Linear(3, 2)
    fake = mode.from_module(real)
    assert diary.alive == 32
    again = copy.deepcopy(fake)
    assert diary.alive == 64
    del fake, again
    gc.collect()
    assert diary.alive == 0


def test_gradients_are_the_tensors_that_backward_made(mode: ObservedMode, diary: Diary) -> None:
    x = torch.empty(10, device="cuda", requires_grad=True)
    (x * 2).sum().backward()
    assert diary.alive == 80


def test_a_refused_birth_is_none(mode: ObservedMode, diary: Diary) -> None:
    class Full(Listener):
        def on_birth(self, record: MemoryRecord) -> None:
            raise MemoryError("full")

    x = torch.empty(10, device="cuda")
    mode.add_listener(full := Full())
    with pytest.raises(MemoryError, match="full"):
        x * 2
    gc.collect()
    assert diary.alive == 40
    mode.remove_listener(full)
    assert (x * 2).shape == (10,)
    assert diary.alive == 40


def test_no_operator_is_running_after_an_error(mode: ObservedMode, diary: Diary) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        real = torch.ones(2)
    x = torch.empty(3, 4)
    with pytest.raises(RuntimeError):
        x @ x
    record = mode.find_record(mode.from_tensor(real))
    assert record is not None and record.maker is None


def test_sparse_tensors_have_indices_and_values(mode: ObservedMode, diary: Diary) -> None:
    indices, values = torch.zeros(2, 3, dtype=torch.long), torch.empty(3)
    before = diary.alive
    sparse = torch.sparse_coo_tensor(indices, values, (10, 10), check_invariants=False).coalesce()
    assert diary.alive - before >= 2 * 3 * 8 + 3 * 4
    del sparse
    assert diary.alive == before
