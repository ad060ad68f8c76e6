"""The seconds of a collective: latency of its steps, and bytes over the slowest link.

    collective_seconds("all_reduce", ranks=8, nbytes=1 << 30, link=find_link(find_card("h100")))
    collective_seconds("all_gather", ranks=64, nbytes=…, link=…, ranks_per_node=8, network=find_network(400))

Pure: kind, size of the group, bytes and interconnect in, seconds out. `nbytes` is the size of the whole tensor: what an
all-reduce reduces, what an all-gather gives, what a reduce-scatter is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from types import MappingProxyType

from understudy.simulation.catalogue import Card
from understudy.timing.curves import read_curves


@dataclass(frozen=True)
class Link:
    """A way between ranks. `bandwidth`: bytes that a rank sends in a second, one way, as published."""

    name: str
    bandwidth: float
    efficiency: Mapping[str, float]
    """The part of it that large messages reach, by kind of collective; "other" for the rest."""
    latency: float
    """Seconds for a message of no bytes to pass one step."""
    fixed: float = 0.0
    """Seconds for a collective of no bytes, beside its steps."""
    sharpness: float = 1.0
    """How sharp the corner is between messages that latency bounds and those that bandwidth bounds; below 1, what is
    between them takes longer than both together."""
    shared: float | None = None
    """Bytes that all ranks of a group of more than two send together in a second: cards on PCIe share the way through the
    host."""

    def speed(self, kind: str, ranks: int = 2) -> float:
        """Bytes in a second."""
        part = self.efficiency.get(kind)
        own = self.bandwidth * (self.efficiency["other"] if part is None else part)
        return min(own, self.shared / ranks) if self.shared and ranks > 2 else own

    def combine(self, latency: float, moving: float) -> float:
        return (latency**self.sharpness + moving**self.sharpness) ** (1 / self.sharpness)


ROUNDS: Mapping[str, float] = MappingProxyType(
    {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0, "reduce": 1.0, "all_to_all": 1.0,
     "send": 1.0, "recv": 1.0, "gather": 1.0, "scatter": 1.0, "barrier": 2.0}
)  # fmt: skip
"""How many times the data goes around the ring."""
SLOWEST, FASTEST = "PCIe 4 x16", "NVLink 4"
POINT_TO_POINT = ("send", "recv")
TREE = "tree"
"""What an efficiency calls the way of an all-reduce up and down a tree of nodes."""


def find_link(card: Card) -> Link:
    """The link between cards of one node, by the catalogue's entry for the card: NVLink or PCIe. A generation that was not
    measured has the efficiency of the most similar one, with its own bandwidth."""
    table = read_curves()["links"]
    name = card.interconnect or SLOWEST
    alike = name if name in table else SLOWEST if name.startswith("PCIe") else FASTEST
    found = table[alike]
    one_way = (card.interconnect_bandwidth or 2e9 * found["bandwidth"]) / 2
    shared = found["shared"] * one_way / found["bandwidth"] if "shared" in found else None
    return Link(
        name, one_way, found["efficiency"], found["latency"], found["fixed"], found["sharpness"], shared
    )


def group_seconds(
    kind: str,
    ranks: Sequence[int],
    nbytes: float,
    card: Card,
    per_node: int,
    within: float = 0.0,
    between: float = 0.0,
    latency: float = 0.0,
) -> float:
    """Time of a collective of these ranks, which are numbered node by node. `within`, `between`: bytes that a rank sends in
    a second to its node and to others; `latency`: seconds from one node to the next; 0 for those of the catalogue and of
    the card's usual network."""
    nodes = Counter(rank // per_node for rank in ranks)
    inside = max(nodes.values(), default=1)
    link = find_link(card)
    if within:
        shared = link.shared and link.shared * within / link.bandwidth
        link = replace(link, bandwidth=within, shared=shared)
    network = None
    if len(nodes) > 1:
        network = find_network(between * 8e-9 or usual_network(card))
        network = replace(network, latency=latency or network.latency)
    return collective_seconds(kind, len(ranks), nbytes, link, inside, network)


def usual_network(card: Card) -> float:
    """Gb/s for each card in machines that are usually built with it."""
    if card.interconnect is None or not card.interconnect.startswith("NVLink"):
        return 100.0
    return 400.0 if (card.capability or (0, 0)) >= (9, 0) else 200.0


def find_network(gigabits: float) -> Link:
    """InfiniBand or RoCE with so many Gb/s for each card: 100, 200, 400."""
    table = read_curves()["network"]
    return Link(
        f"{gigabits:g} Gb/s", gigabits * 1e9 / 8, table["efficiency"], table["latency"], table["fixed"]
    )


def collective_seconds(
    kind: str, ranks: int, nbytes: float, link: Link, ranks_per_node: int | None = None, network: Link | None = None
) -> float:  # fmt: skip
    """`network` joins nodes of `ranks_per_node` ranks, each rank with a share of its own; without it, all are in one
    node."""
    if ranks <= 1:
        return 0.0
    if kind in POINT_TO_POINT:
        way = network if network is not None and ranks_per_node == 1 else link
        return way.fixed + way.latency + nbytes / way.speed(kind)
    inside = min(ranks, ranks_per_node or ranks)
    nodes = ceil(ranks / inside)
    if nodes == 1 or network is None:
        return _ring_seconds(kind, ranks, nbytes, link)
    ring = _wide_ring_seconds(kind, ranks, nodes, nbytes, link, network)
    return min(ring, _tree_seconds(inside, nodes, nbytes, link, network)) if kind == "all_reduce" else ring


def _ring_seconds(kind: str, ranks: int, nbytes: float, link: Link) -> float:
    """Large messages go by a ring; the latency of small ones is that of a tree, where it is shorter."""
    if ranks == 1:
        return 0.0
    rounds = ROUNDS[kind]
    steps = rounds * min(ranks - 1, 2 * ceil(log2(ranks)))
    moved = rounds * nbytes * (ranks - 1) / ranks
    return link.combine(link.fixed + steps * link.latency, moved / link.speed(kind, ranks))


def _wide_ring_seconds(kind: str, ranks: int, nodes: int, nbytes: float, link: Link, network: Link) -> float:
    """Rings through all ranks, one for each card of a node: each goes between two nodes by the network of another card. So
    latency grows with the number of ranks."""
    rounds, inside = ROUNDS[kind], ranks / nodes
    speed = min(link.speed(kind, ranks), inside * network.speed(kind)) if inside > 1 else network.speed(kind)
    latency = (nodes - 1) * network.latency + (ranks - nodes) * link.latency
    return network.fixed + rounds * (latency + nbytes * (ranks - 1) / ranks / speed)


def _tree_seconds(inside: int, nodes: int, nbytes: float, link: Link, network: Link) -> float:
    """The time of an all-reduce within each node, pipelined with one up and down a tree of the nodes."""
    within = _ring_seconds("all_reduce", inside, nbytes, link)
    between = 2 * nbytes / inside * (nodes - 1) / nodes / network.speed(TREE)
    return max(within, between) + network.fixed + 2 * ceil(log2(nodes)) * network.latency
