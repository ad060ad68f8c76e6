"""Classes of ranks: on many ranks, some are run for all.

    first, last and one between     in each dimension, of a program without a pipeline; two more are run and compared
    columns                         of a pipeline: all stages, at the first, a middle and the last place of the others

Dimensions are those of the meshes that rank 0 makes; a pipeline is a dimension with point-to-point traffic. Uneven shards
are at the end of a dimension.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.simulation.network import CollectiveRecord, MeshRecord

CHECKED = 2
"""Ranks that are run and compared with those that stand for them."""


def find_mesh(meshes: Sequence[MeshRecord], world_size: int) -> MeshRecord | None:
    """The mesh of all ranks with the most dimensions."""
    whole = [mesh for mesh in meshes if len(mesh.ranks) == world_size]
    return max(whole, key=lambda mesh: len(mesh.shape), default=None)


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
    # Of one kind, all stages are taken at the same place of the other dimensions: they send to each other.
    chosen: dict[int, list[int]] = {}
    for (_, kind), ranks in classes.items():
        run = max(ranks) if kind == "last" else min(ranks)
        chosen[run] = sorted(rank for rank in ranks if rank != run)
    return chosen


def choose_checked(chosen: dict[int, list[int]], pipeline: int | None) -> list[int]:
    """Ranks that others stand for, drawn with a fixed seed. None of a pipeline: their columns are not run."""
    rest = sorted(rank for ranks in chosen.values() for rank in ranks)
    return [] if pipeline is not None else sorted(random.Random(0).sample(rest, min(CHECKED, len(rest))))
