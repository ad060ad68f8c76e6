"""A rehearsed cluster as text: the verdict, a table of ranks, communication, faults."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.cluster.communication import SETUP, STEPS, CommunicationRow
from understudy.cluster.faults import write_ranks
from understudy.report.cluster_rehearsal import ClusterRehearsal, RankRow
from understudy.report.text import WIDTH, clean, format_range, format_size, shorten_place, write_table
from understudy.report.times import write_cost, write_step

GiB = 1 << 30
MOST_ROWS = 24
MOST_COLLECTIVES = 16
LEAST_SECONDS = 1e-4
LEAST_HOST_BYTES = 1 << 28


def write_cluster(cluster: ClusterRehearsal, width: int = WIDTH) -> str:
    sections = [
        "\n".join([clean(cluster.headline), describe_layout(cluster), *_write_time(cluster)]),
        "\n".join(clean(str(fault)) for fault in cluster.faults),
        _write_ranks(cluster, width),
        *(_write_communication(cluster, when, width) for when in (SETUP, STEPS)),
        _write_communicators(cluster, width),
        "\n".join(
            line for line in (_write_balance(cluster), _write_schedule(cluster), _write_host(cluster)) if line
        ),
        "\n".join(f"  - {clean(note)}" for note in _list_notes(cluster)),
    ]
    return "\n\n".join(section for section in sections if section)


def _list_notes(cluster: ClusterRehearsal) -> list[str]:
    """Notes that are not those of a rank, which are shown with it."""
    of_ranks = {
        note for row in cluster.rows if row.rehearsal is not None for note in row.rehearsal.assumptions
    }
    return [note for note in cluster.assumptions if note not in of_ranks]


def _write_time(cluster: ClusterRehearsal) -> list[str]:
    if cluster.time is None:
        return []
    lines = [f"{write_step(cluster.time)} (all ranks together)"]
    return lines + ([write_cost(cluster.time.cost)] if cluster.time.cost is not None else [])


def describe_layout(cluster: ClusterRehearsal) -> str:
    """The ranks, which of them were run, and the dimensions of their mesh."""
    run, count = len(cluster.rows), cluster.world_size
    nodes = (
        f"{cluster.nodes} nodes x {cluster.per_node}"
        if cluster.nodes > 1
        else f"{cluster.per_node} on one node"
    )
    sizes = cluster.dimensions
    mesh = f"; {' x '.join(f'{name} {size}' for name, size in sizes.items())}" if sizes else ""
    which = "all run" if run == count else f"{run} run: {write_ranks([row.rank for row in cluster.rows])}"
    return f"{count} ranks ({nodes}), {which}{mesh}"


def _write_ranks(cluster: ClusterRehearsal, width: int) -> str:
    """A row for ranks that are alike."""
    alike: dict[tuple[object, ...], list[RankRow]] = {}
    for row in cluster.rows:
        peak = row.peak
        key = (
            row.verdict,
            peak.reserved_bytes,
            peak.allocated_bytes,
            peak.phase,
            peak.line,
            row.nccl_low_bytes,
            row.nccl_high_bytes,
        )
        alike.setdefault(key, []).append(row)
    table: list[tuple[str, ...]] = []
    for rows in list(alike.values())[:MOST_ROWS]:
        row = rows[0]
        ranks = sorted({rank for each in rows for rank in (each.rank, *each.stands_for)})
        names = write_ranks(ranks).partition(" ")[2]
        place = (
            ", ".join(f"{name} {position}" for name, position in row.coordinates.items())
            if len(rows) == 1
            else ""
        )
        where = ", ".join(part for part in (row.peak.phase, shorten_place(row.peak.line)) if part)
        sizes = (f"{size / GiB:.2f}" for size in (row.peak.allocated_bytes, row.peak.reserved_bytes))
        nccl = format_range(row.nccl_low_bytes, row.nccl_high_bytes, unit="") if row.nccl_high_bytes else ""
        table.append((names, row.verdict, *sizes, nccl, place, where))
    limit = cluster.device.memory_bytes
    has_limit = limit and cluster.device.kind != "cpu"
    title = f"Ranks (GiB{f' of {limit / GiB:.1f}' if has_limit else ''})"
    heads = ("ranks", "verdict", "allocated", "reserved", "NCCL", "at", "peak")
    used = [column for column in range(len(heads)) if column < 4 or any(row[column] for row in table)]
    return write_table(
        title, tuple(heads[i] for i in used), [tuple(row[i] for i in used) for row in table], width
    )


def _write_communication(cluster: ClusterRehearsal, when: str, width: int) -> str:
    """Write the communication of the rank with the most traffic."""
    totals: dict[int, int] = {}
    for row in cluster.communication:
        if row.when == when:
            totals[row.rank] = totals.get(row.rank, 0) + row.wire_bytes
    if not totals:
        return ""
    rank = max(totals, key=lambda number: (totals[number], -number))
    rows = [row for row in cluster.communication if row.when == when and row.rank == rank]
    steps = cluster.ranks[rank].steps
    of = f"{steps} step{'s' * (steps != 1)}" if when == STEPS else "before the first step"
    table = [_write_row(row) for row in rows[:MOST_COLLECTIVES]]
    if len(rows) > MOST_COLLECTIVES:
        rest: Sequence[CommunicationRow] = rows[MOST_COLLECTIVES:]
        calls, nbytes, wire = (
            sum(getattr(row, name) for row in rest) for name in ("calls", "bytes", "wire_bytes")
        )
        table.append(
            (f"{len(rest)} more", "", "", f"{calls:,}", format_size(nbytes), format_size(wire), "", "")
        )
    heads: tuple[str, ...] = ("collective", "group", "dtype", "calls", "bytes", "on the wire", "time", "line")
    if not any(row[6] for row in table):
        table, heads = [(*row[:6], row[7]) for row in table], (*heads[:6], heads[7])
    return write_table(f"Communication of rank {rank} ({of})", heads, table, width)


def _write_row(row: CommunicationRow) -> tuple[str, ...]:
    time = f"{row.seconds * 1e3:.1f} ms" if row.seconds >= LEAST_SECONDS else ""
    return (
        row.collective, f"{row.group} ({row.group_size})", row.dtype, f"{row.calls:,}", format_size(row.bytes),
        format_size(row.wire_bytes), time, shorten_place(row.line).partition(": ")[0],
    )  # fmt: skip


def _write_communicators(cluster: ClusterRehearsal, width: int) -> str:
    """The communicators of the rank with the most memory in them."""
    totals: dict[int, int] = {}
    for row in cluster.communicators:
        totals[row.rank] = totals.get(row.rank, 0) + row.high_bytes
    if not any(totals.values()):
        return ""
    rank = max(totals, key=lambda number: (totals[number], -number))
    table = [
        (f"{row.group} ({row.size})", str(row.peers or ""), format_range(row.low_bytes, row.high_bytes))
        for row in cluster.communicators
        if row.rank == rank and row.high_bytes
    ]
    heads = ("communicator", "peers of messages", "memory")
    title = f"NCCL on rank {rank}, outside of the allocator (published figures, an estimate)"
    return write_table(title, heads, table[:MOST_COLLECTIVES], width)


def _write_schedule(cluster: ClusterRehearsal) -> str:
    schedule = cluster.schedule
    if schedule is None:
        return ""
    return (
        f"Pipeline: {schedule.stages} stages, {schedule.microbatches} microbatches in a step; a stage waits "
        f"{schedule.bubble:.0%} of it (1F1B or GPipe, stages of equal time)"
    )


def _write_host(cluster: ClusterRehearsal) -> str:
    """Tensors on the host, of which the offloaded and pinned ones count."""
    node, most = max(cluster.host_bytes.items(), key=lambda item: item[1], default=(0, 0))
    if most < LEAST_HOST_BYTES or cluster.device.kind == "cpu":
        return ""
    where = f"node {node}" if cluster.nodes > 1 else "the node"
    return f"Memory of the host: {format_size(most)} in all ranks of {where}, pinned memory included"


def _write_balance(cluster: ClusterRehearsal) -> str:
    rows = [row for row in cluster.rows if row.rehearsal is not None]
    if len(rows) < 2:
        return ""
    memory = [row.peak.reserved_bytes for row in rows]
    work = [row.rehearsal.flops for row in rows if row.rehearsal is not None]
    parts = []
    if max(memory) != min(memory):
        parts.append(f"reserved memory from {min(memory) / GiB:.2f} to {max(memory) / GiB:.2f} GiB")
    if max(work) != min(work):
        parts.append(f"FLOPs from {min(work):.3g} to {max(work):.3g}")
    return (
        f"Balance over ranks: {'; '.join(parts)}" if parts else "Balance over ranks: equal memory and FLOPs"
    )
