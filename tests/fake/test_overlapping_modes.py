"""Uses of modes that overlap without being nested: an error, and no mode that has ended comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.utils._python_dispatch as python_dispatch
from torch._subclasses import FakeTensorMode as TorchFakeTensorMode

from understudy import FakeTensor, FakeTensorMode, make_fx
from understudy._torch import ENTERED, active_fake_mode, active_recorder
from understudy.errors import ModeOrderError
from understudy.patching import ENGINE


def compiler_flags() -> tuple[bool, bool]:
    return (
        python_dispatch._is_in_torch_dispatch_mode,
        python_dispatch._is_in_any_mode_without_ignore_compile_internals,
    )


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert active_fake_mode() is None and active_recorder() is None
    assert ENTERED.fakes == [] and ENTERED.recorders == []
    assert not ENGINE.holds and ENGINE.active == 0
    assert type(torch.ones(2)) is torch.Tensor
    assert not torch._C._only_lift_cpu_tensors()
    assert torch._C._len_torch_dispatch_stack() == 0 and compiler_flags() == (False, False)


def test_leaving_what_is_not_the_innermost() -> None:
    first, second = FakeTensorMode(), FakeTensorMode()
    first.__enter__()
    second.__enter__()
    with pytest.raises(ModeOrderError) as refusal:
        first.__exit__(None, None, None)
    assert active_fake_mode() is second
    second.__exit__(None, None, None)
    assert active_fake_mode() is None
    text = str(refusal.value)
    assert text.startswith(
        "FakeTensorMode.__exit__: another mode was entered after this one and is still active; this one has ended\n"
    )
    assert "first.__exit__(None, None, None)" in text
    assert "asyncio.to_thread" in text


def test_a_mode_that_is_left_twice() -> None:
    mode = FakeTensorMode()
    with mode:
        pass
    with pytest.raises(ModeOrderError, match="this thread has not entered the mode, or has left it"):
        mode.__exit__(None, None, None)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_three_modes_left_in_any_order(order: tuple[int, ...]) -> None:
    modes = [FakeTensorMode() for _ in range(3)]
    for mode in modes:
        mode.__enter__()
    alive = [0, 1, 2]
    for position in order:
        is_innermost = position == max(alive)
        if is_innermost:
            modes[position].__exit__(None, None, None)
        else:
            with pytest.raises(ModeOrderError):
                modes[position].__exit__(None, None, None)
        alive.remove(position)
        assert active_fake_mode() is (modes[max(alive)] if alive else None)


def test_tasks_of_asyncio() -> None:
    async def work(count: int) -> str:
        with FakeTensorMode():
            for _ in range(count):
                await asyncio.sleep(0)
            return type(torch.empty(2)).__name__

    async def main() -> list[object]:
        return await asyncio.gather(work(1), work(3), return_exceptions=True)

    first, second = asyncio.run(main())
    assert isinstance(first, ModeOrderError) and second == "FakeTensor"


def test_tasks_that_share_one_mode_need_no_order() -> None:
    mode = FakeTensorMode()

    async def work(count: int) -> torch.Tensor:
        with mode:
            for _ in range(count):
                await asyncio.sleep(0)
            return torch.empty(2)

    async def main() -> list[torch.Tensor]:
        return await asyncio.gather(work(1), work(3))

    assert all(type(value) is FakeTensor for value in asyncio.run(main()))


def batches() -> Iterator[torch.Tensor]:
    with FakeTensorMode():
        yield torch.empty(1)
        yield torch.empty(2)


def test_a_generator_that_is_closed_inside_of_another_mode() -> None:
    values = batches()
    next(values)
    with FakeTensorMode() as mode:
        with pytest.raises(ModeOrderError):
            values.close()  # type: ignore[attr-defined]
        assert active_fake_mode() is mode
    assert active_fake_mode() is None


def test_a_generator_that_outlives_the_mode_around_it() -> None:
    mode = FakeTensorMode()
    with pytest.raises(ModeOrderError), mode:
        values = batches()
        next(values)
    values.close()  # type: ignore[attr-defined]
    assert active_fake_mode() is None


def test_an_error_under_way_is_not_covered() -> None:
    first, second = FakeTensorMode(), FakeTensorMode()
    with pytest.raises(ZeroDivisionError) as error, first:
        second.__enter__()
        raise ZeroDivisionError
    second.__exit__(None, None, None)
    if hasattr(error.value, "add_note"):  # Python 3.10 has no notes
        assert any("another mode was entered after this one" in note for note in error.value.__notes__)


def test_beside_the_mode_of_torch() -> None:
    ours, theirs = FakeTensorMode(), TorchFakeTensorMode()
    ours.__enter__()
    theirs.__enter__()
    with pytest.raises(ModeOrderError):
        ours.__exit__(None, None, None)
    assert active_fake_mode() is theirs
    theirs.__exit__(None, None, None)
    assert active_fake_mode() is None


def test_recorders() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        inner = make_fx(lambda y: y * 2, tracing_mode="fake")(torch.ones(2))
        return x + 1 if inner is not None else x

    recorders = [active_recorder()]
    gm = make_fx(program, tracing_mode="fake")(torch.ones(3))
    assert recorders == [None] and active_recorder() is None
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_function", "output"]


def test_a_thread_that_ends_inside_of_a_mode() -> None:
    mode = FakeTensorMode()
    thread = threading.Thread(target=mode.__enter__)
    thread.start()
    thread.join()
    gc.collect()
    assert ENGINE.active == 0 and not ENGINE.holds
    assert torch.ones(2).tolist() == [1, 1]


@pytest.mark.parametrize("is_ours_first", [True, False])
@pytest.mark.parametrize("repeats", [1, 2])
def test_torchs_mode_left_out_of_order(is_ours_first: bool, repeats: int) -> None:
    for _ in range(repeats):
        ours, torchs = FakeTensorMode(), TorchFakeTensorMode()
        first, second = (ours, torchs) if is_ours_first else (torchs, ours)
        first.__enter__()
        second.__enter__()
        with contextlib.suppress(ModeOrderError):
            first.__exit__(None, None, None)
        with contextlib.suppress(ModeOrderError):
            second.__exit__(None, None, None)
        assert torch._C._len_torch_dispatch_stack() == 0 and compiler_flags() == (False, False)


def test_flags_inside_of_torchs_mode() -> None:
    with TorchFakeTensorMode():
        with FakeTensorMode():
            assert compiler_flags() == (True, True)
        inside = compiler_flags()
    with TorchFakeTensorMode():
        assert inside == compiler_flags()
