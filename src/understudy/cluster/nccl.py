"""Memory of NCCL, which is outside of the allocator: buffers of each communicator, as a range.

    communicators = find_communicators(rank, log, groups, layout, figures, settings, has_bound_device)
    communicators[0].low_bytes, communicators[0].high_bytes

A communicator exists from the first collective of its group. Its rings and trees take buffers for each channel; messages and
all-to-all take buffers for each channel and peer. A send outside of a batch has a communicator of its own for each pair,
unless `init_process_group` was given a `device_id` (ProcessGroupNCCL). Sizes are published observations, so they are ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.cluster.layout import Layout, LayoutError
from understudy.simulation.catalogue import Card, NcclFigures

if TYPE_CHECKING:
    from understudy.simulation.network import CollectiveRecord, Group

MiB = 1 << 20
MESSAGES = ("send", "recv", "all_to_all", "gather", "scatter")
"""Kinds that NCCL has as messages from rank to rank."""
SIMPLE_BUFFER, OTHER_BUFFERS = 4 * MiB, 5_439_488
"""Bytes of one channel: NCCL_BUFFSIZE, and the buffers of the protocols LL and LL128. In pages of 2 MiB they are the
10 MiB of NCCL's log of allocations (nccl#1685)."""
PAGE = 2 * MiB
CHANNELS_TO_ANOTHER_NODE = 2
"""NCCL_NCHANNELS_PER_NET_PEER. The buffers are shared there, so this is an upper end."""
UNKNOWN = NcclFigures(low=256 * MiB, high=1126 * MiB, low_channels=2, high_channels=32)
"""For cards of which nothing is published."""


@dataclass(frozen=True)
class Communicator:
    """One communicator of one rank. `peers`: ranks that it has exchanged messages with."""

    rank: int
    group: str
    size: int
    peers: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class NcclSettings:
    """NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS and NCCL_MAX_P2P_NCHANNELS; None where they are not set."""

    buffer_bytes: int | None = None
    channels: int | None = None
    message_channels: int | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> NcclSettings:
        return cls(
            *(
                _parse_number(name, environment.get(name))
                for name in ("NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS")
            )
        )

    @property
    def receiving_bytes(self) -> int:
        """The buffers of one channel at the side that receives."""
        simple = SIMPLE_BUFFER if self.buffer_bytes is None else self.buffer_bytes
        return -(-(simple + OTHER_BUFFERS) // PAGE) * PAGE


def _parse_number(name: str, text: str | None) -> int | None:
    if text is None or not text.strip():
        return None
    if not text.strip().isdigit() or int(text) < 1:
        raise LayoutError(f"{name} must be a positive integer, got {text!r}")
    return int(text)


def find_communicators(
    rank: int, log: Iterable[CollectiveRecord], groups: Mapping[str, Group], layout: Layout, card: Card,
    settings: NcclSettings, has_bound_device: bool,
) -> list[Communicator]:  # fmt: skip
    """In the order in which they are made. Of groups that have another backend, none."""
    figures = card.nccl or UNKNOWN
    collective: dict[tuple[str, int | None], bool] = {}
    peers: dict[tuple[str, int | None], dict[int, set[str]]] = {}
    for record in log:
        group = groups[record.group]
        if not _has_nccl(group.backend):
            continue
        is_pair = record.kind in ("send", "recv") and not record.batch and not has_bound_device
        key = (record.group, record.peer if is_pair else None)
        collective[key] = collective.get(key, False) or record.kind not in MESSAGES
        for peer, direction in _find_messages(rank, record, group):
            peers.setdefault(key, {}).setdefault(peer, set()).add(direction)
    return [
        _measure(rank, groups[name], pair, has_rings, peers.get((name, pair), {}), layout, figures, settings)
        for (name, pair), has_rings in collective.items()
    ]


def _has_nccl(backend: str) -> bool:
    """Whether cards use NCCL: "nccl" and "cpu:gloo,cuda:nccl" do."""
    return "nccl" in backend or not backend


def _find_messages(rank: int, record: CollectiveRecord, group: Group) -> list[tuple[int, str]]:
    """Ranks that this one sends to and receives from."""
    others = [other for other in group.ranks if other != rank]
    if record.kind == "all_to_all":
        return [(other, direction) for other in others for direction in ("send", "recv")]
    if record.kind in ("send", "recv"):
        return [] if record.peer in (None, rank) else [(record.peer, record.kind)]
    if record.kind not in MESSAGES:
        return []
    is_root = record.peer == rank
    direction = "recv" if is_root == (record.kind == "gather") else "send"
    return [(other, direction) for other in (others if is_root else [record.peer]) if other is not None]


def _measure(
    rank: int, group: Group, pair: int | None, has_rings: bool, peers: Mapping[int, set[str]], layout: Layout,
    figures: NcclFigures, settings: NcclSettings,
) -> Communicator:  # fmt: skip
    size = 2 if pair is not None else group.size
    name = group.name if pair is None else f"{group.name} {min(rank, pair)}-{max(rank, pair)}"
    if size == 1:
        return Communicator(rank, name, size, 0, 0, figures.single)
    low = high = 0
    if has_rings:
        share = settings.receiving_bytes / NcclSettings().receiving_bytes
        low, high = (
            round(amount * share * _limit(channels, settings.channels) / channels)
            for amount, channels in (
                (figures.low, figures.low_channels),
                (figures.high, figures.high_channels),
            )
        )
    for peer, directions in peers.items():
        each = sum(
            settings.receiving_bytes + PAGE if direction == "recv" else PAGE for direction in directions
        )
        if layout.node_of(peer) == layout.node_of(rank):
            low += each * _limit(figures.low_channels, settings.message_channels)
            high += each * _limit(figures.high_channels, settings.message_channels)
        else:
            high += each * _limit(CHANNELS_TO_ANOTHER_NODE, settings.message_channels)
    return Communicator(rank, name, size, len(peers), low, high)


def _limit(channels: int, most: int | None) -> int:
    return channels if most is None else min(channels, most)
