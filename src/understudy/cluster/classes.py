"""Classes of ranks: on many ranks, some are run for all.

    first, last and one between     in each dimension, of a program without a pipeline; two more are run and compared
    columns                         of a pipeline: all stages, at the first, a middle and the last place of the others

Dimensions are those of the meshes that rank 0 makes, or else of its process groups (`infer_mesh`); a pipeline is a dimension
with point-to-point traffic. Uneven shards are at the end of a dimension.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from understudy.simulation.network import MeshRecord

if TYPE_CHECKING:
    from understudy.simulation.network import CollectiveRecord, Group

CHECKED = 2
"""Ranks that are run and compared with those that stand for them."""


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


def coordinates(rank: int, mesh: MeshRecord | None, world_size: int) -> tuple[int, ...]:
    if mesh is None:
        return (rank,)
    position, found = mesh.ranks.index(rank), []
    for size in reversed(mesh.shape):
        found.append(position % size)
        position //= size
    return tuple(reversed(found))


def find_pipeline(
    rank: int, log: Sequence[CollectiveRecord], mesh: MeshRecord | None, world_size: int
) -> int | None:
    """The dimension in which messages go from rank to rank; None without any."""
    own = coordinates(rank, mesh, world_size)
    for record in log:
        if record.kind in ("send", "recv") and record.peer is not None:
            other = coordinates(record.peer, mesh, world_size)
            return next((dim for dim, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)
    return None


def choose_representatives(
    mesh: MeshRecord | None, world_size: int, pipeline: int | None
) -> dict[int, list[int]]:
    """The ranks that are run, and those that each of them stands for."""
    shape = (world_size,) if mesh is None else mesh.shape
    at: dict[tuple[int, ...], int] = {coordinates(rank, mesh, world_size): rank for rank in range(world_size)}
    classes: dict[tuple[int, object], list[int]] = {}
    for place, rank in at.items():
        stage = -1 if pipeline is None else place[pipeline]
        others = [
            "first" if position == 0 else "last" if position == size - 1 else "between"
            for dim, (position, size) in enumerate(zip(place, shape, strict=True))
            if dim != pipeline
        ]
        kind: object = tuple(others)
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


def choose_checked(chosen: dict[int, list[int]], pipeline: int | None) -> list[int]:
    """Ranks that others stand for, drawn with a fixed seed. None of a pipeline: their columns are not run."""
    rest = sorted(rank for ranks in chosen.values() for rank in ranks)
    return [] if pipeline is not None else sorted(random.Random(0).sample(rest, min(CHECKED, len(rest))))
