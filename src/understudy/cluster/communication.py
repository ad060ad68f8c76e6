"""Logs of collectives as rows: calls, bytes of messages, bytes on the wire, by line of the program.

Bytes on the wire are what one rank sends with a ring: 2 (n-1)/n of the message for an all-reduce, (n-1)/n for all-gather,
reduce-scatter and all-to-all. Message sizes: the larger of what one rank gives and gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.cluster.layout import Interconnect, Layout

if TYPE_CHECKING:
    from understudy.simulation.network import CollectiveRecord, Group, MeshRecord

SETUP, STEPS = "set-up", "steps"


@dataclass(frozen=True)
class CommunicationRow:
    """All alike calls of one rank, before the first step or in all of its steps. `group`: the name of a mesh dimension, or
    of the group. `seconds`: an estimate by the bandwidth of the interconnect; 0 where that is not known."""

    rank: int
    when: str
    collective: str
    group: str
    group_size: int
    dtype: str
    calls: int
    bytes: int
    wire_bytes: int
    is_between_nodes: bool
    line: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """A pipeline: its stages, microbatches of a step, and the part of a step that a stage waits (1F1B and GPipe), if all
    stages take equally long."""

    stages: int
    microbatches: int
    bubble: float


def find_schedule(logs: Mapping[int, Sequence[CollectiveRecord]]) -> Schedule | None:
    """The schedule of floating-point messages along a chain of ranks; None for rings, and without messages."""
    neighbours: dict[int, set[int]] = {}
    sent: dict[tuple[int, int, int], int] = {}
    for rank, log in logs.items():
        for record in log:
            if record.kind == "send" and record.peer is not None and "float" in record.dtype:
                neighbours.setdefault(rank, set()).add(record.peer)
                neighbours.setdefault(record.peer, set()).add(rank)
                key = (rank, record.peer, record.step)
                sent[key] = sent.get(key, 0) + 1
    first = min((rank for rank, others in neighbours.items() if len(others) == 1), default=None)
    if first is None:
        return None
    chain = [first]
    following: int | None = next(iter(neighbours[first]))
    while following is not None and following not in chain:
        chain.append(following)
        following = next((rank for rank in sorted(neighbours[following]) if rank not in chain), None)
    if len(neighbours[chain[-1]]) != 1 or any(len(neighbours[rank]) > 2 for rank in chain):
        return None
    counts = [count for (rank, peer, _), count in sent.items() if (rank, peer) == (chain[0], chain[1])]
    stages, microbatches = len(chain), max(counts, default=0)
    if not microbatches:
        return None
    return Schedule(stages, microbatches, (stages - 1) / (microbatches + stages - 1))


def wire_bytes(kind: str, nbytes: int, size: int) -> int:
    """What one of `size` ranks sends for a message of `nbytes`."""
    if size < 2 or kind == "barrier":
        return 0
    if kind == "all_reduce":
        return 2 * nbytes * (size - 1) // size
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return nbytes * (size - 1) // size
    return 0 if kind == "recv" else nbytes


def make_rows(
    rank: int, log: Iterable[CollectiveRecord], groups: Mapping[str, Group], meshes: Sequence[MeshRecord],
    layout: Layout, interconnect: Interconnect | None = None,
) -> list[CommunicationRow]:  # fmt: skip
    """Largest first; set-up before steps."""
    interconnect = interconnect or Interconnect()
    totals: dict[tuple[str, str, str, str, str], list[int]] = {}
    for record in log:
        when = SETUP if record.phase == "setup" else STEPS
        key = (when, record.kind, record.group, record.dtype, record.line)
        entry = totals.setdefault(key, [0, 0, 0])
        group = groups[record.group]
        entry[0] += 1
        entry[1] += record.nbytes
        entry[2] += wire_bytes(record.kind, record.nbytes, group.size)
    rows = []
    for (when, kind, name, dtype, line), (calls, nbytes, wire) in totals.items():
        group = groups[name]
        is_between = len({layout.node_of(member) for member in group.ranks}) > 1
        speed = interconnect.between_nodes if is_between else interconnect.within_node
        rows.append(
            CommunicationRow(
                rank,
                when,
                kind,
                name_group(group, meshes),
                group.size,
                dtype,
                calls,
                nbytes,
                wire,
                is_between,
                line,
                wire / speed if speed else 0.0,
            )
        )
    return sorted(rows, key=lambda row: (row.when != SETUP, -row.wire_bytes, -row.bytes, row.line))


def name_group(group: Group, meshes: Sequence[MeshRecord]) -> str:
    """The dimension of a mesh whose ranks these are, "world", or the name that the program or torch gave."""
    for mesh in meshes:
        for name, ranks in slices_of(mesh):
            if ranks == group.ranks:
                return name
    if group.description == "default_pg":
        return "world"
    described = group.description if group.description not in ("", "undefined") else ""
    return described or f"ranks {','.join(map(str, group.ranks[:4]))}{',…' * (group.size > 4)}"


def slices_of(mesh: MeshRecord) -> list[tuple[str, tuple[int, ...]]]:
    """The name of a dimension and the ranks along it, for each place in the other dimensions."""
    found: list[tuple[str, tuple[int, ...]]] = []
    step = 1
    for name, size in reversed(list(zip(mesh.names, mesh.shape, strict=True))):
        found += [
            (name, tuple(mesh.ranks[start + i * step] for i in range(size)))
            for start in range(len(mesh.ranks))
            if start // step % size == 0
        ]
        step *= size
    return found


def coordinates_of(rank: int, mesh: MeshRecord) -> dict[str, int]:
    """The position of a rank in each dimension; {} if it is not in the mesh."""
    if rank not in mesh.ranks:
        return {}
    position, found = mesh.ranks.index(rank), {}
    for name, size in reversed(list(zip(mesh.names, mesh.shape, strict=True))):
        found[name] = position % size
        position //= size
    return dict(reversed(found.items()))
