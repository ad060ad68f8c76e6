"""Classes of ranks: on many ranks, some are run for all.

    rank 0, and ranks it depends on    its partners in messages: the stages of a pipeline
    first of each class                where tensors are sharded in unequal parts, ranks with parts of one size are a class
    the last rank, and two drawn       compared with the ranks that stand for them
    first, last and one between        in each dimension, if these differ: a program treats ranks differently

Dimensions are those of the meshes that rank 0 makes, or else of its process groups (`infer_mesh`). A dimension with messages
is a pipeline if ranks along it differ; in a ring they are alike.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from understudy.simulation.network import MeshRecord

if TYPE_CHECKING:
    from understudy.simulation.network import CollectiveRecord, Group

CHECKED = 2
"""Ranks that are drawn, run and compared with those that stand for them."""
Breaks = Mapping[tuple[int, ...], Collection[int]]
"""Ranks of a group along which tensors have unequal parts, and the positions at which the size changes."""


def find_mesh(meshes: Sequence[MeshRecord], world_size: int) -> MeshRecord | None:
    """The mesh of all ranks with the most dimensions."""
    whole = [mesh for mesh in meshes if len(mesh.ranks) == world_size]
    return max(whole, key=lambda mesh: len(mesh.shape), default=None)


def infer_mesh(groups: Iterable[Group], world_size: int) -> MeshRecord | None:
    """Dimensions of a program that makes process groups itself, from those of rank 0: the smallest group of neighbours is
    the innermost dimension, the next one has its size as stride, and so on. None without any."""
    found: dict[int, tuple[int, str]] = {}
    for group in groups:
        stride = group.ranks[1] - group.ranks[0] if group.size > 1 else 0
        is_regular = group.ranks == tuple(range(0, stride * group.size, stride)) if stride > 0 else False
        if is_regular and group.size < world_size:
            known = found.get(stride)
            if known is None or group.size < known[0]:
                found[stride] = (group.size, group.description)
    names: list[str] = []
    shape: list[int] = []
    step = 1
    while found and step < world_size:
        size, description = found.pop(step, (0, ""))
        if not size:
            following = [stride for stride in found if stride > step and stride % step == 0]
            size = min(following, default=world_size) // step
        if world_size % (step * size) or size < 2:
            return None
        names.append(_write_name(description) or f"dim{len(names)}")
        shape.append(size)
        step *= size
    if step < world_size and names:
        names.append(f"dim{len(names)}")
        shape.append(world_size // step)
    if not names:
        return None
    return MeshRecord(tuple(reversed(names)), tuple(reversed(shape)), tuple(range(world_size)))


def _write_name(description: str) -> str:
    """The short name of a group: `tensor_model_parallel` for TENSOR_MODEL_PARALLEL_GROUP."""
    lower = description.lower()
    return (
        "" if lower in ("", "undefined", "default_pg") else lower.removesuffix("_group").removeprefix("mesh_")
    )


Places = Mapping[int, tuple[int, ...]]
"""The coordinates of each rank."""


def place_ranks(mesh: MeshRecord | None, world_size: int) -> dict[int, tuple[int, ...]]:
    if mesh is None:
        return {rank: (rank,) for rank in range(world_size)}
    return dict(zip(mesh.ranks, itertools.product(*map(range, mesh.shape)), strict=True))


def find_message_dimensions(log: Sequence[CollectiveRecord], rank: int, places: Places) -> list[int]:
    """The dimensions in which a rank sends to others, or receives, in the order of its first messages."""
    found: dict[int, None] = {}
    for peer in dict.fromkeys(record.peer for record in log if record.kind in ("send", "recv")):
        if peer is not None:
            pairs = enumerate(zip(places[rank], places[peer], strict=True))
            found |= dict.fromkeys([dim for dim, (own, other) in pairs if own != other][:1])
    return list(found)


def list_line(rank: int, dims: Collection[int], places: Places) -> list[int]:
    """The ranks that differ from one in these dimensions only."""
    own = places[rank]
    return sorted(
        other
        for other, place in places.items()
        if all(a == b for dim, (a, b) in enumerate(zip(own, place, strict=True)) if dim not in dims)
    )


def choose_first_ranks(
    stages: Sequence[int], breaks: Mapping[int, Breaks], places: Places
) -> dict[int, list[int]]:
    """The ranks that are run, and those that each of them stands for: the first of each stage, and of the ranks whose
    tensors have the sizes of its own. `breaks`: of each stage's first rank."""
    leaders = {_at(places[rank], stages): rank for rank in list_line(0, stages, places)}
    positions = {
        leader: [
            (_dimensions_of(ranks, places), sorted(changes))
            for ranks, changes in breaks.get(leader, {}).items()
        ]
        for leader in leaders.values()
    }
    shape = [1 + max(coordinates) for coordinates in zip(*places.values(), strict=True)]
    chosen: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(places):
        place = places[rank]
        leader = leaders[_at(place, stages)]
        parts = (
            bisect_right(changes, _position_in(place, dims, shape)) for dims, changes in positions[leader]
        )
        chosen.setdefault((leader, *parts), []).append(rank)
    return {ranks[0]: ranks[1:] for ranks in chosen.values()}


def _at(place: tuple[int, ...], dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(place[dim] for dim in dims)


def _dimensions_of(ranks: Sequence[int], places: Places) -> list[int]:
    """In which the ranks of a group differ."""
    columns = zip(*(places[rank] for rank in ranks), strict=True)
    return [dim for dim, column in enumerate(columns) if len(set(column)) > 1]


def _position_in(place: tuple[int, ...], dims: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for dim in dims:
        position = position * shape[dim] + place[dim]
    return position


def choose_representatives(places: Places, pipeline: int | None, per_node: int) -> dict[int, list[int]]:
    """The ranks that are run, and those that each of them stands for, where the program treats ranks differently: first,
    last and one between in each dimension, on the first node and on others, which reach it by the network; all stages of a
    pipeline, at three places of the others."""
    shape = [1 + max(coordinates) for coordinates in zip(*places.values(), strict=True)]
    classes: dict[tuple[int, object], list[int]] = {}
    for rank, place in places.items():
        stage = -1 if pipeline is None else place[pipeline]
        others = [
            "first" if position == 0 else "last" if position == size - 1 else "between"
            for dim, (position, size) in enumerate(zip(place, shape, strict=True))
            if dim != pipeline
        ]
        kind: object = (*others, rank < per_node)
        if pipeline is not None:  # as many columns as there are stages are run for each kind: there are three
            kind = "last" if "last" in others else "between" if "between" in others else "first"
        classes.setdefault((stage, kind), []).append(rank)
    # All stages of one kind are taken at the same position of the other dimensions: they send to each other.
    chosen: dict[int, list[int]] = {}
    for (_, kind), ranks in classes.items():
        run = max(ranks) if kind == "last" else min(ranks)
        chosen[run] = sorted(rank for rank in ranks if rank != run)
    return chosen


def split(chosen: dict[int, list[int]], differing: int) -> None:
    """A rank that is unlike the one that stands for it stands for itself, and for the members of the class that are nearer
    to it."""
    run = next(run for run, ranks in chosen.items() if differing in ranks)
    others = [rank for rank in chosen[run] if rank != differing]
    chosen[run] = [rank for rank in others if abs(rank - run) <= abs(rank - differing)]
    chosen[differing] = [rank for rank in others if rank not in chosen[run]]


def draw_checked(ranks: Iterable[int]) -> list[int]:
    """Some of the ranks, drawn with a fixed seed."""
    found = sorted(ranks)
    return sorted(random.Random(0).sample(found, min(CHECKED, len(found))))


def list_represented(chosen: Mapping[int, Sequence[int]]) -> list[int]:
    return [rank for ranks in chosen.values() for rank in ranks]
