"""Collectives of a rehearsed rank on the timeline: what overlaps, and what is exposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import understudy
from understudy.timing.step_time import TimeEstimate

SIZE = 4096
COMMUNICATION = "exposed communication"


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    def set_world(count: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(count))

    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    set_world(8)
    yield set_world


def time_of(program: Callable[[], None], device: str = "8xh100") -> TimeEstimate:
    def run() -> None:
        dist.init_process_group("nccl")
        program()

    time = understudy.rehearse(run, device=device).time
    assert time is not None
    return time


def compute_and_reduce(is_async: bool, waits: bool = True, nbytes: int = 1 << 30) -> None:
    model = nn.Linear(SIZE, SIZE).cuda().bfloat16()
    x = torch.empty(8192, SIZE, device="cuda", dtype=torch.bfloat16)
    gradient = torch.empty(nbytes // 4, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            model(x)
            work = dist.all_reduce(gradient, async_op=is_async)
            for _ in range(40):
                x = torch.mm(x, model.weight)
            if is_async and waits:
                work.wait()


def test_a_collective_that_is_waited_for_is_exposed() -> None:
    waiting, beside = (
        time_of(lambda is_async=is_async: compute_and_reduce(is_async)) for is_async in (False, True)
    )
    assert COMMUNICATION not in beside.bound_by
    seconds = waiting.bound_by[COMMUNICATION] * waiting.seconds_per_step
    assert waiting.seconds_per_step == pytest.approx(beside.seconds_per_step + seconds, rel=0.02)
    assert 2 * (1 << 30) * 7 / 8 / 450e9 < seconds < 4 * (1 << 30) / 450e9
    assert "group 0" in waiting.trace.clock_names
    assert "all_reduce of 8" in waiting.trace.span_names


def test_a_long_collective_is_exposed_at_the_end_of_the_phase() -> None:
    time = time_of(lambda: compute_and_reduce(True, waits=False, nbytes=1 << 34))
    assert time.bound_by[COMMUNICATION] > 0.5


def test_more_nodes_go_over_the_network(ranks: Callable[[int], None]) -> None:
    """Between nodes, 400 Gb/s for each card."""
    inside = time_of(lambda: compute_and_reduce(False))
    ranks(64)
    across = time_of(lambda: compute_and_reduce(False))
    alone = time_of(lambda: compute_and_reduce(False), device="h100")
    assert across.seconds_per_step >= inside.seconds_per_step
    assert alone.seconds_per_step == pytest.approx(across.seconds_per_step)


def test_a_slower_link_is_slower() -> None:
    fast, slow = (time_of(lambda: compute_and_reduce(False), device=card) for card in ("8xh100", "8xl40s"))
    exposed = [time.bound_by[COMMUNICATION] * time.seconds_per_step for time in (fast, slow)]
    assert exposed[1] > 10 * exposed[0]


def test_functional_collectives_are_waited_for() -> None:
    def program() -> None:
        import torch.distributed._functional_collectives as functional

        x = torch.empty(SIZE, SIZE, device="cuda")
        model = nn.Linear(SIZE, SIZE).cuda()
        with torch.no_grad():
            for _ in range(2):
                gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD)
                model(x)
                gathered.sum()

    assert "group 0" in time_of(program).trace.clock_names


def test_sharded_layers_gather_beside_the_layer_before() -> None:
    def program() -> None:
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(6))).cuda()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.empty(8192, SIZE, device="cuda")
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    time = time_of(program)
    sent = [
        duration
        for clock, duration in zip(time.trace.clocks, time.trace.durations, strict=True)
        if time.trace.clock_names[clock].startswith("group")
    ]
    assert len(sent) >= 3 * 6 - 1  # gathered twice, reduced once
    exposed = time.bound_by.get(COMMUNICATION, 0.0) * time.seconds_per_step
    assert exposed < 0.3 * sum(sent) * 1e-6


def test_collectives_follow_the_stream_of_their_own_card() -> None:
    """A rank computes on the card of its number: what it reduces is there once that card has computed it."""

    def compute_on(card: int) -> TimeEstimate:
        def run() -> None:
            torch.cuda.set_device(card)
            compute_and_reduce(False)

        return time_of(run)

    first, second = compute_on(0), compute_on(3)
    assert second.seconds_per_step == pytest.approx(first.seconds_per_step)
    assert second.bound_by[COMMUNICATION] == pytest.approx(first.bound_by[COMMUNICATION])


def test_what_is_waited_for_early_is_exposed() -> None:
    def reduce_and_wait(waits_first: bool) -> TimeEstimate:
        def run() -> None:
            model = nn.Linear(SIZE, SIZE).cuda().bfloat16()
            x = torch.empty(8192, SIZE, device="cuda", dtype=torch.bfloat16)
            gradient = torch.empty(1 << 28, device="cuda")
            with torch.no_grad():
                model(x)
                work = dist.all_reduce(gradient, async_op=True)
                if waits_first:
                    work.wait()
                for _ in range(40):
                    x = torch.mm(x, model.weight)
                if not waits_first:
                    work.wait()

        return time_of(run)

    early, late = reduce_and_wait(True), reduce_and_wait(False)
    assert COMMUNICATION not in late.bound_by
    exposed = early.bound_by[COMMUNICATION] * early.seconds_per_step
    assert early.seconds_per_step - late.seconds_per_step == pytest.approx(exposed, rel=0.05)
