"""Two rehearsals of a cluster side by side: ranks whose memory changed, and changes of communication.

text = write_cluster_comparison(before, after)
grown = most_growth(before, after)          bytes of the rank whose reserved memory grew most
"""

from __future__ import annotations

from collections.abc import Sequence

from understudy.cluster.communication import STEPS
from understudy.cluster.faults import write_ranks
from understudy.report.cluster_rehearsal import ClusterRehearsal
from understudy.report.comparison import RehearsalFileError, format_growth
from understudy.report.text import WIDTH, clean, format_size, write_table

MOST_ROWS = 24


def read_cluster(text: str, path: str) -> ClusterRehearsal:
    try:
        return ClusterRehearsal.from_json(text)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RehearsalFileError(
            f"expected a cluster rehearsal of this version in {path}: {str(error).splitlines()[0]}; rehearse again"
        ) from None


def most_growth(before: ClusterRehearsal, after: ClusterRehearsal) -> int:
    """The largest growth among the ranks of both, or else the growth of the worst rank."""
    shared = before.ranks.keys() & after.ranks.keys()
    if before.world_size != after.world_size or not shared:
        return after.worst.peak.reserved_bytes - before.worst.peak.reserved_bytes
    return max(
        after.ranks[rank].peak.reserved_bytes - before.ranks[rank].peak.reserved_bytes for rank in shared
    )


def write_cluster_comparison(before: ClusterRehearsal, after: ClusterRehearsal, width: int = WIDTH) -> str:
    sections = [
        clean(f"before: {before.headline}\nafter:  {after.headline}"),
        _write_faults(before, after),
        _write_ranks(before, after, width),
        _write_communication(before, after, width),
    ]
    return "\n\n".join(section for section in sections if section)


def _write_faults(before: ClusterRehearsal, after: ClusterRehearsal) -> str:
    old, new = ([str(fault) for fault in cluster.faults] for cluster in (before, after))
    lines = [f"new: {text}" for text in new if text not in old]
    lines += [f"gone: {text}" for text in old if text not in new]
    return clean("\n".join(lines))


def _write_ranks(before: ClusterRehearsal, after: ClusterRehearsal, width: int) -> str:
    if before.world_size != after.world_size:
        return f"{before.world_size} ranks, then {after.world_size}"
    changes: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(before.ranks.keys() & after.ranks.keys()):
        sizes = (before.ranks[rank].peak.reserved_bytes, after.ranks[rank].peak.reserved_bytes)
        changes.setdefault(sizes, []).append(rank)
    rows = [
        (write_ranks(ranks).partition(" ")[2], format_size(old), format_size(new), format_growth(new - old))
        for (old, new), ranks in changes.items()
    ]
    heads = ("ranks", "before", "after", "")
    return write_table("Reserved memory", heads, rows[:MOST_ROWS], width)


def _write_communication(before: ClusterRehearsal, after: ClusterRehearsal, width: int) -> str:
    """Bytes of messages in each step, of the first rank that was run."""
    totals = [_sum_communication(cluster) for cluster in (before, after)]
    names = sorted({*totals[0], *totals[1]}, key=lambda name: -max(total.get(name, 0) for total in totals))
    rows: Sequence[tuple[str, ...]] = [
        (name, *(format_size(total.get(name, 0)) for total in totals), format_growth(growth))
        for name in names
        if (growth := totals[1].get(name, 0) - totals[0].get(name, 0))
    ]
    if not rows:
        return ""
    heads = ("collective and group", "before", "after", "")
    title = f"Communication of rank {after.rows[0].rank} in a step"
    return write_table(title, heads, rows[:MOST_ROWS], width)


def _sum_communication(cluster: ClusterRehearsal) -> dict[str, int]:
    first = cluster.rows[0]
    found: dict[str, int] = {}
    for row in cluster.communication:
        if row.rank == first.rank and row.when == STEPS:
            name = f"{row.collective}, {row.group} ({row.group_size})"
            found[name] = found.get(name, 0) + row.bytes
    return {name: nbytes // max(1, first.steps) for name, nbytes in found.items()}
