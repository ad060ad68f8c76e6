"""Collectives as pure functions of kind, group, bytes and interconnect."""

from __future__ import annotations

import pytest

from understudy.simulation.catalogue import find_card
from understudy.timing.collectives import Link, collective_seconds, find_link, find_network, group_seconds

LINK = Link("test", 100e9, {"other": 1.0}, latency=1e-6, fixed=0.0)
GB = 10**9


def test_a_ring_moves_all_but_one_part() -> None:
    """8 ranks, 1 GB: an all-gather sends 7/8 of it over each link, an all-reduce twice that; 6 steps of a tree."""
    assert collective_seconds("all_gather", 8, GB, LINK) == pytest.approx(GB * 7 / 8 / 100e9 + 6e-6)
    assert collective_seconds("all_reduce", 8, GB, LINK) == pytest.approx(2 * GB * 7 / 8 / 100e9 + 12e-6)


def test_a_group_of_one_costs_nothing() -> None:
    assert collective_seconds("all_reduce", 1, GB, LINK) == 0


def test_small_messages_cost_latency() -> None:
    small = collective_seconds("all_reduce", 8, 8, LINK)
    assert small == pytest.approx(12e-6, rel=0.01)


def test_a_slow_network_bounds_a_collective_over_nodes() -> None:
    network = Link("net", 1e9, {"other": 1.0}, latency=5e-6)
    inside = collective_seconds("all_gather", 8, GB, LINK)
    across = collective_seconds("all_gather", 16, GB, LINK, ranks_per_node=8, network=network)
    assert across > inside
    assert across == pytest.approx(GB / 8 * 0.5 / 1e9 + 5e-6)


def test_a_faster_network_is_faster() -> None:
    times = [
        collective_seconds(
            "reduce_scatter",
            64,
            GB,
            find_link(find_card("h100")),
            ranks_per_node=8,
            network=find_network(speed),
        )
        for speed in (100, 200, 400)
    ]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[1]


def test_newer_links_are_faster() -> None:
    times = [
        collective_seconds("all_reduce", 8, GB, find_link(find_card(name)))
        for name in ("l40s", "v100-32", "a100-80", "h100", "b200")
    ]
    assert times == sorted(times, reverse=True)


def test_given_bandwidths_replace_those_of_the_catalogue() -> None:
    card, size = find_card("h100"), 1 << 32
    inside, across = tuple(range(8)), tuple(range(16))
    usual = group_seconds("all_reduce", inside, size, card, 8)
    assert group_seconds("all_reduce", inside, size, card, 8, within=225e9) == pytest.approx(
        2 * usual, rel=0.01
    )
    slow, slower = (
        group_seconds("all_reduce", across, size, card, 8, between=speed) for speed in (5e9, 2.5e9)
    )
    assert slower == pytest.approx(2 * slow, rel=0.05)
