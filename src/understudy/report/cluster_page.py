"""The page of a rehearsed cluster: one HTML file that needs nothing else.

    Path("report.html").write_text(make_cluster_page(cluster, "train.py"))

A heat map over the dimensions of the mesh, in which a click opens a rank; memory at the peak by category, so that stages of
a pipeline can be compared; what each rank communicates; its whole page. Ranks with the same figures share one page. As on
the page of one rank, the script only ever writes text: no name of a program becomes markup.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from understudy.report.cluster_rehearsal import ClusterMesh, ClusterRehearsal, RankRow
from understudy.report.cluster_text import describe_layout
from understudy.report.page import TEMPLATE, VERDICTS, escape_script, fill_template, make_page, read_template
from understudy.report.rehearsal import CATEGORIES
from understudy.report.text import format_range, format_size

CLUSTER_TEMPLATE = Path(__file__).with_name("cluster_page.html")
MOST_PAGES = 24
"""Whole reports of ranks that are on the page; of further ranks it has the tables."""
MOST_BARS = 64
MOST_CALLS = 200
OUTSIDE = ("NCCL (highest estimate)", "cached and rounding")
Table = dict[str, Any]


def make_cluster_page(cluster: ClusterRehearsal, title: str = "") -> str:
    """`title`: that of the page, if it is not the program."""
    title = title or cluster.program or "Cluster rehearsal"
    pages: list[str] = []
    known: dict[object, int] = {}
    rows = [_make_row(cluster, row, pages, known) for row in cluster.rows]
    numbers = {row.rank: number for number, row in enumerate(cluster.rows)}
    row_of = {rank: numbers[row.rank] for rank, row in sorted(cluster.ranks.items())}
    mesh = _find_mesh(cluster)
    data = json.dumps(
        {
            "title": title,
            "headline": cluster.headline,
            "verdict": VERDICTS.get(cluster.verdict, "") or "unknown",
            "facts": _list_facts(cluster),
            "faults": [[str(fault), fault.is_error] for fault in cluster.faults],
            "limit": cluster.device.limit_bytes if cluster.device.kind != "cpu" else 0,
            "dimensions": list(zip(mesh.names, mesh.shape, strict=True)),
            "across": max(range(len(mesh.shape)), key=mesh.shape.__getitem__),
            "places": [mesh.place_of(rank) for rank in range(cluster.world_size)],
            "rows": rows,
            "row_of": row_of,
            "worst": cluster.worst.rank,
            "categories": [*(name.replace("_", " ") for name in CATEGORIES), *OUTSIDE],
            "most_bars": MOST_BARS,
            "tables": [
                _list_positions(cluster, mesh, dim) for dim, size in enumerate(mesh.shape) if size > 1
            ],
            "template": read_template(TEMPLATE),
            "pages": pages,
            "notes": cluster.assumptions,
        },
        separators=(",", ":"),
    )
    return fill_template(CLUSTER_TEMPLATE, title, escape_script(data))


def _list_facts(cluster: ClusterRehearsal) -> list[tuple[str, str]]:
    most = max(cluster.host_bytes.values(), default=0)
    return [
        ("ranks", describe_layout(cluster)),
        ("card", cluster.device.name),
        ("outside of the allocator", format_size(cluster.device.context_bytes)),
        ("memory of the host", f"{format_size(most)} on a node"),
    ]


def _find_mesh(cluster: ClusterRehearsal) -> ClusterMesh:
    """That of the program; else nodes and the cards in them."""
    if cluster.mesh is not None:
        return cluster.mesh
    return ClusterMesh(["node", "card"], [cluster.nodes, cluster.per_node], list(range(cluster.world_size)))


def _make_row(
    cluster: ClusterRehearsal, row: RankRow, pages: list[str], known: dict[object, int]
) -> dict[str, Any]:
    rehearsal = row.rehearsal
    categories = rehearsal.categories if rehearsal is not None else {}
    sizes = [categories.get(name, 0) for name in CATEGORIES]
    nccl = format_range(row.nccl_low_bytes, row.nccl_high_bytes) if row.nccl_high_bytes else ""
    place = ", ".join(f"{name} {position}" for name, position in row.coordinates.items())
    where = ", ".join(part for part in (row.peak.phase, row.peak.line) if part)
    return {
        "rank": row.rank,
        "label": f"rank {row.rank}" + (f" ({place})" if place else ""),
        "verdict": row.verdict,
        "reserved": row.peak.reserved_bytes,
        "nccl": row.nccl_high_bytes,
        "nccl_text": nccl,
        "context": cluster.device.context_bytes,
        "peak": where,
        "categories": [*sizes, row.nccl_high_bytes, max(0, row.peak.reserved_bytes - sum(sizes))],
        "facts": [
            ("verdict", row.failure.strip().rpartition("\n")[2] if row.failure else row.verdict),
            ("allocated", format_size(row.peak.allocated_bytes)),
            ("reserved", format_size(row.peak.reserved_bytes)),
            *([("NCCL", nccl)] if nccl else []),
            *([("place", place)] if place else []),
            ("peak", where),
            ("host", format_size(row.host_peak_bytes)),
            ("node", str(row.node)),
        ],
        "tables": _list_communication(cluster, row),
        "page": _add_page(row, pages, known),
    }


def _add_page(row: RankRow, pages: list[str], known: dict[object, int]) -> int | None:
    """The number of its page."""
    if row.rehearsal is None:
        return None
    key = (row.rehearsal.headline, row.peak.allocated_bytes, row.peak.reserved_bytes, row.rehearsal.macs)
    if key not in known and len(pages) < MOST_PAGES:
        known[key] = len(pages)
        pages.append(make_page(row.rehearsal, f"rank {row.rank}, and those with the same figures").to_data())
    return known.get(key)


def _list_communication(cluster: ClusterRehearsal, row: RankRow) -> list[Table]:
    calls = [call for call in cluster.communication if call.rank == row.rank]
    columns = [
        ("when", "text"), ("collective", "text"), ("group", "text"), ("dtype", "text"), ("calls", "count"),
        ("bytes", "bytes"), ("on the wire", "bytes"), ("estimate", "seconds"), ("reaches", "text"), ("line", "code"),
    ]  # fmt: skip
    rows = [
        (
            call.when, call.collective, f"{call.group} ({call.group_size})", call.dtype, call.calls, call.bytes,
            call.wire_bytes, call.seconds, "other nodes" if call.is_between_nodes else "the node", call.line,
        )
        for call in calls[:MOST_CALLS]
    ]  # fmt: skip
    found = [{"title": f"Communication of rank {row.rank}", "columns": columns, "rows": rows}] if rows else []
    own = [made for made in cluster.communicators if made.rank == row.rank and made.high_bytes]
    if own:
        found.append(
            {
                "title": "NCCL, outside of the allocator (published figures, an estimate)",
                "columns": [
                    ("communicator", "text"),
                    ("ranks", "count"),
                    ("peers", "count"),
                    ("memory", "text"),
                ],
                "rows": [
                    (made.group, made.size, made.peers, format_range(made.low_bytes, made.high_bytes))
                    for made in own
                ],
            }
        )
    return found


def _list_positions(cluster: ClusterRehearsal, mesh: ClusterMesh, dim: int) -> Table:
    """What ranks at each position of a dimension have: the stages of a pipeline, for one."""
    name, rows = mesh.names[dim], []
    for position in range(mesh.shape[dim]):
        here = [row for row in cluster.rows if mesh.place_of(row.rank)[dim] == position]
        if here:
            reserved = [row.peak.reserved_bytes for row in here]
            work = [row.rehearsal.flops for row in here if row.rehearsal is not None]
            flops = float(f"{max(work) / 1e12:.3g}") if work else None
            worst = max(here, key=lambda row: row.peak.reserved_bytes)
            rows.append(
                (f"{name} {position}", len(here), min(reserved), max(reserved), flops, worst.peak.line)
            )
    columns = [
        (name, "text"), ("ranks that were run", "count"), ("least reserved", "bytes"), ("most reserved", "bytes"),
        ("TFLOPs, at most", "count"), ("peak", "code"),
    ]  # fmt: skip
    return {"title": f"By {name}", "columns": columns, "rows": rows}
