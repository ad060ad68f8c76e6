"""Logs of several ranks, replayed together, against times worked out by hand."""

from __future__ import annotations

import random

import pytest

from understudy.timing.rank_logs import Awaited, LoggedCollective, PhaseEnd, RankLog, Synchronized
from understudy.timing.ranks import replay
from understudy.timing.timeline import Timeline

STREAM = (0, 0)
MESSAGE = 0.1


def seconds_of(collective: LoggedCollective) -> float:
    return MESSAGE


def reduce(log: RankLog, ranks: tuple[int, ...], is_waited: bool = True, number: int = 0) -> None:
    log.add(LoggedCollective("all_reduce", "0", ranks, 1, STREAM, number, is_waited=is_waited))


def message(log: RankLog, kind: str, rank: int, peer: int, number: int) -> None:
    ends = min(rank, peer), max(rank, peer)
    log.add(LoggedCollective(kind, "0", ends, 1, STREAM, number, peer))
    if kind == "recv":
        log.add(Awaited(STREAM, number))


def seconds(logs: dict[int, RankLog]) -> dict[int, float]:
    for log in logs.values():
        log.add(PhaseEnd(0, "forward"))
    return {rank: sum(phases.values()) for rank, phases in replay(logs, seconds_of).items()}


def test_a_collective_starts_when_the_last_rank_has_come() -> None:
    logs = {0: RankLog(), 1: RankLog()}
    for rank, work in enumerate((1.0, 3.0)):
        logs[rank].launch(STREAM, work, 0.0)
        reduce(logs[rank], (0, 1))
        logs[rank].launch(STREAM, 0.5, 0.0)
    assert seconds(logs) == {0: pytest.approx(3.6), 1: pytest.approx(3.6)}


def test_what_is_not_waited_for_overlaps() -> None:
    logs = {0: RankLog(), 1: RankLog()}
    for rank, work in enumerate((1.0, 3.0)):
        logs[rank].launch(STREAM, work, 0.0)
        reduce(logs[rank], (0, 1), is_waited=False, number=7)
        logs[rank].launch(STREAM, 2.5, 0.0)
        logs[rank].add(Awaited(STREAM, 7))
        logs[rank].launch(STREAM, 1.0, 0.0)
    assert seconds(logs) == {0: pytest.approx(4.5), 1: pytest.approx(6.5)}


def test_ranks_that_are_not_there_are_not_waited_for() -> None:
    log = RankLog()
    log.launch(STREAM, 1.0, 0.0)
    reduce(log, tuple(range(8)))
    assert seconds({5: log}) == {5: pytest.approx(1.1)}


def test_a_pipeline_has_its_bubble() -> None:
    """Two stages, three pieces, forward takes 1 and backward 2, one forward and one backward in turn. A message takes 0.1.

    stage 0: F0 0-1, F1 1-2, B0 4.2-6.2, F2 6.2-7.2, B1 7.3.., …
    stage 1: F0 1.1-2.1, B0 2.1-4.1, F1 4.1-5.1, B1 5.1-7.1, F2 7.3-8.3, B2 8.3-10.3
    stage 0: B1 starts at 7.2, ends at 9.2; B2 from 10.4 to 12.4
    """
    first, last = RankLog(), RankLog()
    numbers = iter(range(100))
    for _ in range(2):
        first.launch(STREAM, 1.0, 0.0)
        message(first, "send", 0, 1, next(numbers))
    for piece in range(3):
        message(first, "recv", 0, 1, next(numbers))
        first.launch(STREAM, 2.0, 0.0)
        if piece == 0:
            first.launch(STREAM, 1.0, 0.0)
            message(first, "send", 0, 1, next(numbers))
    for _ in range(3):
        message(last, "recv", 1, 0, next(numbers))
        last.launch(STREAM, 3.0, 0.0)
        message(last, "send", 1, 0, next(numbers))
    assert seconds({0: first, 1: last})[0] == pytest.approx(12.4)


def test_logs_that_do_not_match_end() -> None:
    first, second = RankLog(), RankLog()
    reduce(first, (0, 1))
    reduce(first, (0, 1))
    reduce(second, (0, 1))
    assert seconds({0: first, 1: second})[0] == pytest.approx(0.2)


def test_a_stretch_of_kernels_is_three_numbers() -> None:
    """Random kernels, host-bound and not, as on the timeline."""
    for seed in range(50):
        generator = random.Random(seed)
        timeline, log = Timeline(), RankLog()
        for _ in range(60):
            stream, seconds_of_kernel, host = (
                generator.choice((STREAM, (0, 1))),
                generator.random(),
                generator.random(),
            )
            timeline.launch(stream, seconds_of_kernel, host)
            log.launch(stream, seconds_of_kernel, host)
            if generator.random() < 0.1:
                timeline.synchronize(stream)
                log.add(Synchronized(stream))
            if generator.random() < 0.2:
                timeline.work(0.5)
                log.work(0.5)
        assert len(log.entries) < 60
        assert seconds({0: log})[0] == pytest.approx(timeline.mark().done)
