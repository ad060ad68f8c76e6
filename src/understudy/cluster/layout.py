"""Nodes and ranks of a cluster: which ranks are run, and the environment that a launcher gives each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from understudy.errors import UnderstudyError

MOST_RUN_BY_DEFAULT = 16
"""Up to so many ranks, all are run."""
ALL, CLASSES = "all", "classes"


class LayoutError(UnderstudyError, ValueError):
    """A number of nodes or ranks that can't be."""


@dataclass(frozen=True)
class Layout:
    """`nodes` machines with `per_node` processes each. `environment`: variables that a launcher sets besides its ranks."""

    nodes: int = 1
    per_node: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    has_variables: bool = True
    """Whether the launcher sets variables: `torch.multiprocessing.spawn` does not."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def local_rank_of(self, rank: int) -> int:
        return rank % self.per_node

    def environment_of(self, rank: int) -> dict[str, str]:
        """The variables of torchrun."""
        if not self.has_variables:
            return dict(self.environment)
        return {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            **self.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(self.local_rank_of(rank)),
            "GROUP_RANK": str(self.node_of(rank)),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.per_node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


@dataclass(frozen=True)
class Interconnect:
    """Bytes per second that a rank sends: to cards of its node, and to other nodes. `latency`: seconds from one node to the
    next. 0: as in the catalogue."""

    within_node: float = 0.0
    between_nodes: float = 0.0
    latency: float = 0.0


def parse_count(option: str, text: str) -> int:
    """A positive number. Of a range, as torchrun takes it for elastic jobs, the larger end."""
    last = text.rpartition(":")[2] if re.fullmatch(r"\d+:\d+", text) else text
    if not last.isdigit() or int(last) < 1:
        raise LayoutError(f"{option} must be a positive integer, got {text!r}")
    return int(last)


def parse_ranks(text: str | None, world_size: int) -> tuple[int, ...] | str:
    """`all`, `classes`, or a list of ranks: "0,8,16-19"."""
    if text is None:
        return ALL if world_size <= MOST_RUN_BY_DEFAULT else CLASSES
    if text in (ALL, CLASSES):
        return text
    ranks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise LayoutError(f"--ranks must be {ALL}, {CLASSES} or a list such as 0,8,16-19, got {text!r}")
        if last >= world_size:
            raise LayoutError(
                f"--ranks names rank {last}, and the {world_size} ranks are 0 to {world_size - 1}"
            )
        ranks += range(first, last + 1)
    return tuple(sorted(set(ranks)))
