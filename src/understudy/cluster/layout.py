"""Nodes and ranks of a cluster: which ranks are run, and the environment that a launcher gives each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from understudy.errors import UnderstudyError

MOST_RUN_BY_DEFAULT = 16
"""Up to so many ranks, all are run."""
MOST_RANKS = 1 << 20
ALL, CLASSES = "all", "classes"
TORCHRUN, DEEPSPEED, NO_VARIABLES = "torchrun", "deepspeed", ""
"""Launchers by the variables that they set for each rank; `torch.multiprocessing.spawn` sets none."""


class LayoutError(UnderstudyError, ValueError):
    """A number of nodes or ranks that can't be."""


@dataclass(frozen=True)
class Layout:
    """`nodes` machines with `per_node` processes each. `environment`: variables that a launcher sets besides its ranks.
    `rank_option`: the option by which the launcher gives each process its number on the node, "" for none."""

    nodes: int = 1
    per_node: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    variables: str = TORCHRUN
    rank_option: str = ""

    def __post_init__(self) -> None:
        if self.world_size > MOST_RANKS:
            raise LayoutError(f"expected at most {MOST_RANKS:,} ranks, got {self.world_size:,}")

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def local_rank_of(self, rank: int) -> int:
        return rank % self.per_node

    def arguments_of(self, rank: int) -> tuple[str, ...]:
        """What the launcher puts in front of the program's own arguments."""
        return (f"{self.rank_option}={self.local_rank_of(rank)}",) if self.rank_option else ()

    def environment_of(self, rank: int) -> dict[str, str]:
        """The variables of the launcher."""
        if self.variables == NO_VARIABLES:
            return dict(self.environment)
        node, local_rank = self.node_of(rank), self.local_rank_of(rank)
        numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": self.world_size}
        if self.variables == DEEPSPEED:
            numbers |= {"LOCAL_SIZE": self.per_node, "CROSS_RANK": node, "CROSS_SIZE": self.nodes}
        else:
            numbers |= {
                "GROUP_RANK": node, "ROLE_RANK": rank, "LOCAL_WORLD_SIZE": self.per_node, "GROUP_WORLD_SIZE": self.nodes,
                "ROLE_WORLD_SIZE": self.world_size, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
            }  # fmt: skip
        names = {
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        return {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            **self.environment,
            **{name: str(number) for name, number in numbers.items()},
            **(names if self.variables == TORCHRUN else {}),
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
    found = re.fullmatch(r"(?:([0-9]+):)?([0-9]+)", text)
    first, last = (int(found[1] or 1), int(found[2])) if found else (1, 0)
    if not 1 <= first <= last:
        raise LayoutError(f"{option} must be a positive integer, got {text!r}")
    return last


def parse_rank(text: str, world_size: int) -> int:
    if not re.fullmatch("[0-9]+", text) or int(text) >= world_size:
        raise LayoutError(
            f"--rank must be one of the {world_size} ranks, 0 to {world_size - 1}, got {text!r}"
        )
    return int(text)


def parse_ranks(text: str | None, world_size: int) -> tuple[int, ...] | str:
    """`all`, `classes`, or a list of ranks: "0,8,16-19"."""
    if text is None:
        return ALL if world_size <= MOST_RUN_BY_DEFAULT else CLASSES
    if text in (ALL, CLASSES):
        return text
    ranks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise LayoutError(f"--ranks must be {ALL}, {CLASSES} or a list such as 0,8,16-19, got {text!r}")
        if last >= world_size:
            raise LayoutError(f"--ranks: expected ranks from 0 to {world_size - 1}, got {last}")
        ranks += range(first, last + 1)
    return tuple(sorted(set(ranks)))
