"""The time of a step of a rehearsed cluster, from the logs of its ranks.

    cluster.time = estimate_time(cluster, {0: log, 1: log}, card)

Rates need to know which ranks have inputs of their own. That is what the dimensions of meshes are named for: ranks along
MODEL_DIMENSIONS share theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from understudy.cluster.layout import Interconnect
from understudy.report.cluster_rehearsal import ClusterRehearsal
from understudy.simulation.catalogue import Card
from understudy.timing.collectives import group_seconds
from understudy.timing.rank_logs import MESSAGES, LoggedCollective, RankLog
from understudy.timing.ranks import RankTime, estimate_cluster
from understudy.timing.step_time import TimeEstimate

MODEL_DIMENSIONS = re.compile(r"(tp|tensor|pp|pipe|pipeline|stage|cp|context|sp|sequence|seq)(_|\d|$)")
"""Names of dimensions along which ranks share their inputs."""


def estimate_time(
    cluster: ClusterRehearsal,
    logs: Mapping[int, RankLog | None],
    card: Card | None,
    interconnect: Interconnect | None = None,
) -> TimeEstimate | None:
    """None where a rank that was run has no estimate of its own, or ran on no card."""
    ranks = {}
    for row in cluster.rows:
        log = logs.get(row.rank)
        time = row.rehearsal.time if row.rehearsal is not None else None
        if log is None or time is None:
            return None
        ranks[row.rank] = RankTime(log, time, row.steps, 1 + len(row.stands_for))
    if not ranks or card is None:
        return None
    given = interconnect or Interconnect()

    def seconds_of(collective: LoggedCollective) -> float:
        return group_seconds(
            collective.kind, collective.ranks, collective.nbytes, card, cluster.per_node, given.within_node,
            given.between_nodes, given.latency,
        )  # fmt: skip

    return estimate_cluster(ranks, seconds_of, _count_data_ranks(cluster, ranks))


def _count_data_ranks(cluster: ClusterRehearsal, ranks: Mapping[int, RankTime]) -> int | None:
    """How many ranks have inputs of their own; None if that is not known."""
    shared = 1
    for name, size in cluster.dimensions.items():
        shared *= size if MODEL_DIMENSIONS.match(name) else 1
    has_messages = any(
        type(entry) is LoggedCollective and entry.kind in MESSAGES
        for found in ranks.values()
        for entry in found.log.entries
    )
    if (shared == 1 and has_messages) or cluster.world_size % shared:
        return None
    return cluster.world_size // shared
