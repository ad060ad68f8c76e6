"""Collectives as pure functions of kind, group, bytes and interconnect."""

from __future__ import annotations

from dataclasses import replace

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
    # A ring for each card of a node; 1 step of 15 is between the nodes.
    assert across == pytest.approx(GB / 8 * 15 / 16 / 1e9 + 5e-6 + 14e-6)


def test_the_latency_of_rings_grows_with_nodes_and_that_of_trees_with_their_logarithm() -> None:
    network = Link("net", 50e9, {"other": 1.0}, latency=1e-3)
    tiny = [
        {
            kind: collective_seconds(kind, 8 * nodes, 8, LINK, ranks_per_node=8, network=network)
            for kind in ("all_gather", "all_reduce")
        }
        for nodes in (4, 32)
    ]
    assert tiny[0]["all_gather"] == pytest.approx(3e-3, rel=0.02)
    assert tiny[1]["all_gather"] == pytest.approx(31e-3, rel=0.02)
    assert tiny[0]["all_reduce"] == pytest.approx(4e-3, rel=0.02)
    assert tiny[1]["all_reduce"] == pytest.approx(10e-3, rel=0.02)


def test_many_small_collectives_over_nodes_take_longer_than_a_large_one() -> None:
    link, network = find_link(find_card("h100")), replace(find_network(400), latency=7e-5)
    large, small = (
        collective_seconds("reduce_scatter", 128, size, link, ranks_per_node=8, network=network)
        for size in (1 << 30, 1 << 23)
    )
    assert 128 * small > 10 * large


def test_more_than_two_ranks_on_pcie_share_the_way_through_the_host() -> None:
    link = Link("pcie", 32e9, {"other": 1.0}, latency=0.0, shared=16e9)
    pair, four, eight = (collective_seconds("all_gather", ranks, GB, link) for ranks in (2, 4, 8))
    assert pair == pytest.approx(GB / 2 / 32e9)
    assert four == pytest.approx(GB * 3 / 4 / 4e9)
    assert eight == pytest.approx(GB * 7 / 8 / 2e9)


def test_messages_between_latency_and_bandwidth_take_longer_than_both() -> None:
    link = Link("soft", 100e9, {"other": 1.0}, latency=0.0, fixed=1e-5, sharpness=0.5)
    middle, large = (collective_seconds("broadcast", 2, size, link) for size in (2_000_000, 200 * GB))
    assert middle == pytest.approx(4e-5)
    assert large == pytest.approx(1.0, rel=0.01)


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
    near, far = (group_seconds("all_gather", across, 8, card, 8, latency=seconds) for seconds in (1e-5, 1e-3))
    assert far - near == pytest.approx(1e-3, rel=0.02)


def test_a_given_bandwidth_of_pcie_is_still_shared() -> None:
    card, ranks, size = find_card("l40s"), tuple(range(8)), 1 << 30
    usual = group_seconds("all_gather", ranks, size, card, 8)
    given = group_seconds("all_gather", ranks, size, card, 8, within=find_link(card).bandwidth)
    assert given == pytest.approx(usual)
