"""Logs of collectives as rows: calls, bytes of messages, bytes on the wire, by line of the program.

Bytes on the wire are what one rank sends with a ring: 2 (n-1)/n of the message for an all-reduce, (n-1)/n for all-gather,
reduce-scatter and all-to-all. Message sizes: the larger of what one rank gives and gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.cluster.faults import write_ranks
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
    rank: int, log: Iterable[CollectiveRecord], groups: Mapping[str, Group], name_group: Callable[[Group], str],
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
                name_group(group),
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


def name_groups(groups: Iterable[Group], meshes: Sequence[MeshRecord]) -> dict[Group, str]:
    """Each group by a name of its own among those of the same ranks: the dimension of a mesh, "world", or the name that the
    program or torch gave; else its number among them, in the order in which they were made: "2 of ranks 0-3"."""
    dimensions: dict[tuple[int, ...], str] = {}
    for mesh in meshes:
        for name, ranks in slices_of(mesh):
            dimensions.setdefault(ranks, name)
    alike: dict[tuple[int, ...], list[Group]] = {}
    for group in dict.fromkeys(groups):
        alike.setdefault(group.ranks, []).append(group)
    return {
        group: name
        for ranks, made in alike.items()
        for group, name in _name_alike(ranks, made, dimensions.get(ranks, "")).items()
    }


def _name_alike(ranks: tuple[int, ...], made: Sequence[Group], dimension: str) -> dict[Group, str]:
    """`dimension`: of a mesh, along these ranks; the group that the mesh has made is called so, or else the first."""
    found: dict[Group, str] = {}
    if dimension:
        of_mesh = (group for group in made if group.description == f"mesh_{dimension}")
        found[next(of_mesh, made[0])] = dimension
    for number, group in enumerate(made, 1):
        described = "world" if group.description == "default_pg" else group.description
        if group in found:
            continue
        is_taken = described.removeprefix("mesh_") in found.values() or described in found.values()
        if described not in ("", "undefined") and not is_taken:
            found[group] = described
        elif len(made) > 1:
            found[group] = f"{number} of {write_ranks(ranks)}"
        else:
            found[group] = f"ranks {','.join(map(str, ranks[:4]))}{',…' * (len(ranks) > 4)}"
    return found


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
