"""Sequences that were worked out by hand: times in milliseconds, so that sums are exact to read."""

from __future__ import annotations

import pytest

from understudy.timing.attribution import attribute
from understudy.timing.timeline import HOST, Timeline

CARD, SIDE, RING = "cuda:0", "cuda:0/1", "nccl"


def starts(timeline: Timeline, clock: str) -> list[float]:
    return [span.start for span in timeline.spans if span.clock == clock]


def test_the_host_runs_ahead_of_the_card() -> None:
    timeline = Timeline()
    for _ in range(3):
        timeline.launch(CARD, 10, host=1)
    assert timeline.host == 3
    assert starts(timeline, CARD) == [1, 11, 21]
    assert timeline.mark().done == 31


def test_a_host_bound_model_takes_the_time_of_its_launches() -> None:
    """Kernels of 2 ms, launches of 5: each kernel waits for its launch, and the card idles for 3 of 5 ms."""
    timeline = Timeline()
    for _ in range(100):
        timeline.launch(CARD, 2, host=5, kind="memory")
    assert timeline.mark().done == 100 * 5 + 2
    assert attribute(timeline.spans, 5, 505) == {"memory": 200, "launches": 300}


def test_two_streams_with_events() -> None:
    """B on the side stream needs A; C on the main stream runs beside B; D on the main stream needs B."""
    timeline = Timeline()
    timeline.launch(CARD, 10, kind="A")  # 0 to 10
    timeline.wait(SIDE, timeline.record(CARD))
    timeline.launch(SIDE, 20, kind="B")  # 10 to 30
    done = timeline.record(SIDE)
    timeline.launch(CARD, 5, kind="C")  # 10 to 15
    timeline.wait(CARD, done)
    timeline.launch(CARD, 1, kind="D")  # 30 to 31
    assert starts(timeline, CARD) == [0, 10, 30]
    assert starts(timeline, SIDE) == [10]
    assert timeline.host == 0
    assert timeline.mark().done == 31


def test_without_an_event_streams_do_not_wait() -> None:
    timeline = Timeline()
    timeline.launch(CARD, 10)
    timeline.launch(SIDE, 20)
    assert timeline.mark().done == 20


@pytest.mark.parametrize("reads, expected", [(False, 4 * 20 + 1), (True, 4 * (10 + 20) - 9)])
def test_an_item_in_each_step_stops_the_host_from_running_ahead(reads: bool, expected: float) -> None:
    """A step: 10 launches of 1 ms, kernels of 2. Without a read, the card is always busy; with one, it idles while the
    host issues the first kernel of the next step."""
    timeline = Timeline()
    for _ in range(4):
        for _ in range(10):
            timeline.launch(CARD, 2, host=1)
        if reads:
            timeline.synchronize(CARD)
            timeline.work(9)  # Python, before the first launch of the next step
    done = timeline.mark().done - (9 if reads else 0)
    assert done == expected


def test_a_collective_overlaps_with_backward() -> None:
    """Gradients of layer 3, then 2, then 1: each is reduced while the next layer computes; the last one is exposed."""
    timeline = Timeline()
    ends = []
    for _ in range(3):
        timeline.launch(CARD, 10, kind="products")
        ends.append(timeline.communicate(RING, CARD, 8))
    for end in ends:
        timeline.wait(CARD, end)
    timeline.launch(CARD, 2, kind="memory")  # the optimizer
    assert starts(timeline, RING) == [10, 20, 30]
    assert timeline.mark().done == 30 + 8 + 2
    assert attribute(timeline.spans, 0, 40) == {"products": 30, "communication": 8, "memory": 2}


def test_collectives_longer_than_backward_queue_up() -> None:
    timeline = Timeline()
    for _ in range(3):
        timeline.launch(CARD, 10, kind="products")
        timeline.communicate(RING, CARD, 25)
    assert starts(timeline, RING) == [10, 35, 60]
    assert attribute(timeline.spans, 0, 85) == {"products": 30, "communication": 55}


def test_a_collective_starts_when_the_last_rank_has_come() -> None:
    timeline = Timeline()
    timeline.launch(CARD, 10)
    assert timeline.communicate(RING, CARD, 5, arrivals=(3, 40, 12)) == 45


def test_an_input_pipeline_that_is_too_slow() -> None:
    """30 ms for a batch, 20 for the card: the card idles for 10 in each step, because of the input."""
    timeline = Timeline()
    marks = []
    for _ in range(4):
        timeline.work(30, "input")
        timeline.launch(CARD, 20, kind="products")
        marks.append(timeline.mark())
    assert [mark.done for mark in marks] == [50, 80, 110, 140]
    shares = attribute(timeline.spans, marks[0].done, marks[-1].done)
    assert shares == {"products": 60, "input": 30}


def test_an_input_pipeline_that_is_fast_enough_is_hidden() -> None:
    timeline = Timeline()
    for _ in range(4):
        timeline.work(15, "input")
        timeline.launch(CARD, 20, kind="products")
    assert timeline.mark().done == 15 + 4 * 20
    assert attribute(timeline.spans, 15, 95) == {"products": 80}


def test_the_host_waits_when_the_queue_is_full() -> None:
    timeline = Timeline(queue_length=2)
    for _ in range(4):
        timeline.launch(CARD, 10)
    assert timeline.host == 20  # the fourth launch waits for the second kernel
    assert timeline.mark().done == 40


def test_a_launch_takes_its_time_to_arrive() -> None:
    timeline = Timeline(latency=3)
    timeline.launch(CARD, 10, host=1)
    timeline.launch(CARD, 10, host=1)
    assert starts(timeline, CARD) == [4, 14]


def test_synchronize_waits_for_all_streams() -> None:
    timeline = Timeline()
    timeline.launch(CARD, 10)
    timeline.launch(SIDE, 30)
    timeline.synchronize(CARD)
    assert timeline.host == 10
    timeline.synchronize()
    assert timeline.host == 30


def test_shares_add_up_to_the_time() -> None:
    timeline = Timeline()
    for number in range(50):
        timeline.launch(CARD, number % 7, host=2, kind="products")
        timeline.launch(SIDE, number % 5, host=1, kind="copies")
        if number % 10 == 0:
            timeline.communicate(RING, SIDE, 13)
            timeline.work(4, "input")
    end = timeline.mark().done
    shares = attribute(timeline.spans, 3, end)
    assert sum(shares.values()) == pytest.approx(end - 3)
    assert set(shares) <= {"products", "copies", "communication", "input", "launches"}


def test_spans_of_the_host_are_on_its_clock() -> None:
    timeline = Timeline()
    timeline.work(4, "input", "next batch")
    (span,) = timeline.spans
    assert (span.clock, span.seconds, span.label) == (HOST, 4, "next batch")


def test_a_kernel_knows_when_the_host_has_issued_it() -> None:
    """Two kernels of 10, issued in 1 each: the host is done at 2, the second kernel starts at 11."""
    timeline = Timeline()
    for _ in range(2):
        timeline.launch("cuda:0", 10.0, host=1.0)
    assert [(span.issued - span.issuing, span.issued) for span in timeline.spans] == [(0.0, 1.0), (1.0, 2.0)]
    assert [span.start for span in timeline.spans] == [1.0, 11.0]
