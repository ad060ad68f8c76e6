"""The data of a rehearsed cluster: a row for each rank that was run, its communication, faults, and one verdict.

    cluster.verdict, cluster.headline
    cluster.ranks[7].peak.reserved_bytes       also of a rank that another one stands for
    cluster.ranks[7].rehearsal                 the whole `Rehearsal` of that rank
    cluster.communication                      rows: rank, collective, group, calls, bytes, line
    cluster.time.seconds_per_step              of all ranks together
    cluster.communicators                      rows: rank, group, memory of NCCL from low_bytes to high_bytes
    cluster.faults                             deadlocks, mismatches, …: each with a text that names ranks and lines
    cluster.to_json(), ClusterRehearsal.from_json(text)

JSON has the same names; `cluster.schema.json` beside this file is its schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.cluster.communication import CommunicationRow, Schedule
from understudy.cluster.faults import Fault
from understudy.cluster.nccl import Communicator
from understudy.report.documents import Document, make_document_schema
from understudy.report.rehearsal import (
    DOES_NOT_FIT,
    FAILED,
    FITS,
    NO_VERDICT,
    TIGHT,
    VERDICTS,
    Device,
    Peak,
    Rehearsal,
)
from understudy.timing.step_time import TimeEstimate

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("cluster.schema.json")
KIND = "cluster"
"""The value of `kind` in JSON, by which a cluster is known from a rehearsal of one card."""


@dataclass(frozen=True)
class CardUse:
    """What one rank holds on one card, at its peak. `line`: where most of it was made."""

    card: int
    reserved_bytes: int
    allocated_bytes: int
    line: str = ""


@dataclass(frozen=True)
class ClusterMesh:
    """The dimensions in which all ranks are laid out, outermost first, and the ranks in that order."""

    names: list[str]
    shape: list[int]
    ranks: list[int]

    def place_of(self, rank: int) -> list[int]:
        position, found = self.ranks.index(rank), []
        for size in reversed(self.shape):
            found.append(position % size)
            position //= size
        return found[::-1]


@dataclass(frozen=True)
class RankRow:
    """A rank that was run, for itself and for the ranks that it `stands_for`. NCCL's memory is outside of the allocator, and
    an estimate from `nccl_low_bytes` to `nccl_high_bytes`."""

    rank: int
    node: int
    local_rank: int
    verdict: str
    steps: int
    peak: Peak
    coordinates: dict[str, int] = field(default_factory=dict)
    stands_for: list[int] = field(default_factory=list)
    cards: list[CardUse] = field(default_factory=list)
    nccl_low_bytes: int = 0
    nccl_high_bytes: int = 0
    host_peak_bytes: int = 0
    failure: str = ""
    rehearsal: Rehearsal | None = None


@dataclass
class ClusterRehearsal(Document):
    """All that was measured of one program on several cards."""

    TITLE = "cluster rehearsal"

    verdict: str
    headline: str
    device: Device
    nodes: int
    per_node: int
    rows: list[RankRow]
    mesh: ClusterMesh | None = None
    schedule: Schedule | None = None
    communication: list[CommunicationRow] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    time: TimeEstimate | None = None
    """The time of a step, of all ranks together."""
    program: str = ""
    """The script and its arguments, or the name of the function."""
    kind: str = KIND
    schema_version: int = SCHEMA_VERSION

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node

    @property
    def cards(self) -> int:
        """The cards that are used: one for each rank, or fewer if all ranks were run and some share a card."""
        used = {(row.node, use.card) for row in self.rows for use in row.cards}
        return len(used) if used and len(self.rows) == self.world_size else self.world_size

    @property
    def dimensions(self) -> dict[str, int]:
        """Sizes by name: of the mesh of all ranks, else of those that the ranks that were run are in."""
        if self.mesh is not None:
            return dict(zip(self.mesh.names, self.mesh.shape, strict=True))
        sizes: dict[str, int] = {}
        for row in self.rows:
            for name, position in row.coordinates.items():
                sizes[name] = max(sizes.get(name, 0), position + 1)
        return sizes

    @property
    def ranks(self) -> dict[int, RankRow]:
        """The row of every rank, also of those that another one stands for."""
        return {rank: row for row in self.rows for rank in (*row.stands_for, row.rank)}

    @property
    def worst(self) -> RankRow:
        """The rank that fails, or the one with the highest peak."""
        order = (FITS, TIGHT, NO_VERDICT, DOES_NOT_FIT, FAILED)
        return max(
            self.rows,
            key=lambda row: (
                order.index(row.verdict),
                row.peak.reserved_bytes + row.nccl_low_bytes,
                row.peak.allocated_bytes,
                -row.rank,
            ),
        )

    @property
    def host_bytes(self) -> dict[int, int]:
        """Memory of tensors on the host, pinned or not, by node: the sum of its ranks' peaks."""
        found: dict[int, int] = {}
        for rank, row in self.ranks.items():
            node = rank // self.per_node
            found[node] = found.get(node, 0) + row.host_peak_bytes
        return dict(sorted(found.items()))

    def __str__(self) -> str:
        # why: tables are loaded when they are printed
        from understudy.report.cluster_text import write_cluster

        return write_cluster(self)


def _make_whole_schema() -> dict[str, Any]:
    """`python -m understudy.report.cluster_rehearsal` writes it to the file that is shipped."""
    return make_document_schema(ClusterRehearsal, {"verdict": VERDICTS})


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(_make_whole_schema(), indent=1) + "\n")
