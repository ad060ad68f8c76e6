"""The listener that measures: it keeps nothing alive, and its cost grows with the number of calls."""

from __future__ import annotations

import weakref

import torch

import understudy
from tests.counting import count_calls
from understudy.report.runs import Recorder


def test_nothing_is_kept_alive() -> None:
    with Recorder() as recorder:
        x = torch.ones(1000)
        reference = weakref.ref(x)
        totals = recorder.measurement.devices[torch.device("cpu")]
        assert totals.live == 4000
        del x
        assert reference() is None and totals.live == 0


def test_views_and_writes_in_place_are_not_counted_twice() -> None:
    def program() -> None:
        x = torch.ones(1000)
        y = x.view(10, 100).t().detach()
        y.mul_(torch.ones(()))
        del x
        y.sum()

    assert understudy.rehearse(program).peak.allocated_bytes == 4000 + 4


def test_a_resized_storage_has_two_blocks_for_a_moment() -> None:
    def program() -> None:
        x = torch.empty(100)
        x.resize_(1000)

    assert understudy.rehearse(program).peak.allocated_bytes == 400 + 4000


def test_sequences_of_numbers_that_autograd_keeps() -> None:
    """`x * 2.0` makes a tensor of 8 bytes, which the node keeps until it has run."""

    def program() -> None:
        x = torch.ones(10, requires_grad=True)
        y = [x * 2.0 for _ in range(5)]
        kept = [torch.ones(100)]
        del y, kept

    assert understudy.rehearse(program).peak.allocated_bytes == 40 + 5 * (40 + 8) + 400


def test_cost_grows_linearly() -> None:
    def measure(count: int) -> int:
        def program() -> None:
            kept = [torch.randn(8) for _ in range(50)]
            for index in range(count):
                kept[index % 50] = kept[index % 50] + kept[(index + 1) % 50]

        with count_calls() as calls:
            understudy.rehearse(program)
        return calls.count

    measure(100)
    assert measure(4000) < 5 * measure(1000)
