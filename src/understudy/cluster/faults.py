"""Faults of a distributed program, each with the lines of its ranks: what would hang or be wrong on the cluster.

    faults = find_faults(histories)        after the run: logs are compared by group and order

Deadlocks of collectives with values are found while the ranks run, by the broker (`describe_deadlock`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.simulation.network import CollectiveRecord, CreatedGroup, Group, MeshRecord


@dataclass(frozen=True)
class Fault:
    """`kind`: deadlock, missing, mismatch, divergence, point-to-point, groups, layout, data, memory. Without `is_error`, a
    note."""

    kind: str
    text: str
    ranks: list[int] = field(default_factory=list)
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def write_ranks(ranks: Sequence[int]) -> str:
    """rank 0; ranks 1-3, 8."""
    parts: list[str] = []
    ordered = sorted(ranks)
    start = 0
    for position in range(1, len(ordered) + 1):
        if position == len(ordered) or ordered[position] != ordered[position - 1] + 1:
            first, last = ordered[start], ordered[position - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = position
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(parts)}"


def describe_deadlock(
    blocked: Mapping[int, tuple[str, str, tuple[int, ...]]], ended: Mapping[int, Mapping[str, Any]]
) -> Fault | None:
    """Ranks that wait: for what, on which line, for which ranks. `ended`: results of those that have ended. None if they
    wait only for ranks that were ended after their last step, which is not a fault."""
    gone = {number for _, _, missing in blocked.values() for number in missing if number in ended}
    if gone and all(ended[number].get("was_ended") for number in gone):
        return None
    lines: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for rank, what in blocked.items():
        lines.setdefault(what, []).append(rank)
    shown = "; ".join(
        f"{write_ranks(ranks)} in {kind}{f' at {shorten_line(line)}' if line else ''}"
        + (f", waiting for {write_ranks(missing)}" if missing else "")
        for (kind, line, missing), ranks in lines.items()
    )
    if gone:
        ends = "has" if len(gone) == 1 else "have"
        return Fault(
            "missing", f"{write_ranks(sorted(gone))} {ends} ended while others wait: {shown}", list(blocked)
        )
    return Fault("deadlock", f"every rank waits: {shown}", list(blocked))


def describe_unset_key(blocked: Mapping[int, tuple[str, str, tuple[int, ...]]]) -> Fault:
    """Ranks wait for a key that one that is not run may set."""
    rank, (what, line, _) = next(entry for entry in blocked.items() if not entry[1][2])
    text = f"rank {rank} was ended in {what}, at {shorten_line(line)}: no rehearsed rank sets it; use --ranks all"
    return Fault("missing", text, [rank], is_error=False)


def describe_absence(rank: int, kind: str, line: str, absent: Sequence[int]) -> Fault:
    """A message with a rank that is not run, after which its partner is ended."""
    text = (
        f"rank {rank} was ended in {kind} at {shorten_line(line)}: it waits for {write_ranks(absent)}, which "
        f"{'is' if len(absent) == 1 else 'are'} not rehearsed; add {'it' if len(absent) == 1 else 'them'} to --ranks, or "
        "use --ranks classes"
    )
    return Fault("missing", text, [rank], is_error=False)


def shorten_line(line: str) -> str:
    """`train.py:11`, the user's own line: without its text, and without that of a library, which may have branches for ranks
    whose collectives match."""
    place, _, _ = line.partition(": ")
    return place


# --- logs, compared after the run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """What one rank did. `is_whole`: it was not ended while it waited, and did not fail."""

    rank: int
    log: Sequence[CollectiveRecord]
    groups: Mapping[str, Group]
    created: Sequence[CreatedGroup] = ()
    loaders: Sequence[tuple[str, int]] = ()
    outsiders: Sequence[tuple[str, str]] = ()
    meshes: Sequence[MeshRecord] = ()
    is_whole: bool = True


UNEVEN = ("all_to_all", "gather", "scatter")
"""Kinds whose sizes may differ between ranks."""


def find_faults(
    histories: Sequence[History], name_group: Callable[[Group], str] = lambda group: group.name
) -> list[Fault]:
    """`name_group`: how a group is called in texts."""
    found = _compare_created_groups(histories)
    groups = {group for history in histories for group in history.groups.values()}
    for group in sorted(groups, key=lambda group: (len(group.name), group.name)):
        members = [history for history in histories if history.rank in group.ranks]
        if len(members) > 1:
            found += _compare_collectives(name_group(group), group, members)
            found += _compare_messages(group, members)
    if not any(fault.is_error for fault in found) and (
        deadlock := find_order_deadlock(histories, name_group)
    ):
        found = deadlock  # which names the lines on which ranks diverge
    return [*found, *_find_outsiders(histories), *find_uncovered(histories), *_compare_loaders(histories)]


def find_order_deadlock(histories: Sequence[History], name_group: Callable[[Group], str]) -> list[Fault]:
    """Groups whose collectives match one by one, and that ranks use in another order. A blocking collective holds back all
    that follows it, in every group; one with `async_op=True` nothing."""
    if not all(history.is_whole for history in histories):
        return []
    calls = {history.rank: _number_collectives(history) for history in histories}
    groups = {history.rank: history.groups for history in histories}
    positions = dict.fromkeys(calls, 0)
    arrived: dict[tuple[tuple[int, ...], str, int], set[int]] = {}

    def find_missing(rank: int, record: CollectiveRecord, number: int) -> set[int]:
        members = groups[rank][record.group].ranks
        here = arrived.setdefault((members, record.group, number), set())
        here.add(rank)
        return {member for member in members if member in calls} - here

    has_moved = True
    while has_moved:
        has_moved = False
        for rank, log in calls.items():
            while positions[rank] < len(log):
                record, number = log[positions[rank]]
                if find_missing(rank, record, number) and record.is_blocking:
                    break
                positions[rank] += 1
                has_moved = True
    waiting = {rank: log[positions[rank]] for rank, log in calls.items() if positions[rank] < len(log)}
    if not waiting:
        return []
    sides: dict[str, list[int]] = {}
    for rank, (record, number) in waiting.items():
        group = name_group(groups[rank][record.group])
        missing = write_ranks(sorted(find_missing(rank, record, number)))
        text = f"in {record.kind} of group {group} at {shorten_line(record.line)}, waiting for {missing}"
        sides.setdefault(text, []).append(rank)
    shown = "; ".join(f"{write_ranks(ranks)} {text}" for text, ranks in sides.items())
    why = "ranks call the collectives of these groups in different orders"
    return [Fault("deadlock", f"{shown}: {why}", sorted(waiting))]


def _number_collectives(history: History) -> list[tuple[CollectiveRecord, int]]:
    """Without messages, each with its number in its group."""
    counts: dict[str, int] = {}
    found = []
    for record in history.log:
        if record.kind not in ("send", "recv"):
            counts[record.group] = counts.get(record.group, 0) + 1
            found.append((record, counts[record.group]))
    return found


def _find_outsiders(histories: Sequence[History]) -> list[Fault]:
    """Collectives of ranks that are not in the group: torch warns, and does nothing."""
    calls: dict[tuple[str, str], list[int]] = {}
    for history in histories:
        for call in dict.fromkeys(history.outsiders):
            calls.setdefault(call, []).append(history.rank)
    return [
        Fault(
            "groups",
            f"{write_ranks(ranks)}: {operation} at {shorten_line(line)} on a group without "
            f"{'this rank' if len(ranks) == 1 else 'these ranks'} does nothing",
            ranks,
            is_error=False,
        )
        for (operation, line), ranks in calls.items()
    ]


def find_uncovered(histories: Sequence[History]) -> list[Fault]:
    """Ranks that are in none of the meshes with the same dimensions, where most ranks are in one."""
    covered: dict[tuple[tuple[str, ...], tuple[int, ...]], set[int]] = {}
    for history in histories:
        for mesh in history.meshes:
            covered.setdefault((mesh.names, mesh.shape), set()).update(mesh.ranks)
    for (names, shape), ranks in covered.items():
        left = [history.rank for history in histories if history.rank not in ranks]
        if left and len(ranks) > len(left):
            sizes = " x ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))
            text = (
                f"the mesh {sizes} has {len(ranks)} ranks, without {write_ranks(left)}: "
                "the product of its sizes must be the world size"
            )
            return [Fault("layout", text, left, is_error=False)]
    return []


def _compare_collectives(name: str, group: Group, members: Sequence[History]) -> list[Fault]:
    """The first collective that does not match; before it, the first at which ranks are on different lines."""
    logs = {
        history.rank: [
            record
            for record in history.log
            if record.group == group.name and record.kind not in ("send", "recv")
        ]
        for history in members
    }
    diverged = ""
    for position in range(min(map(len, logs.values()))):
        records = {rank: log[position] for rank, log in logs.items()}
        what = f"collective {position + 1} of group {name}"
        if len({_signature(record) for record in records.values()}) > 1:
            has_sizes = len({(record.kind, record.nbytes) for record in records.values()}) > 1
            text = f"{what}: {_write_sides(records, _write_call if has_sizes else _write_whole_call)}"
            since = f"; the ranks are on different lines since {diverged}" if diverged else ""
            return [Fault("mismatch", text + since, sorted(records))]
        if not diverged and len({shorten_line(record.line) for record in records.values()}) > 1:
            diverged = f"{what}: {_write_sides(records, lambda record: f'{record.kind} at {shorten_line(record.line)}')}"
    lengths = {rank: len(log) for rank, log in logs.items()}
    if len(set(lengths.values())) > 1 and all(history.is_whole for history in members):
        least = min(lengths.values())
        extra = {rank: logs[rank][least] for rank, length in lengths.items() if length > least}
        others = write_ranks([rank for rank, length in lengths.items() if length == least])
        since = f"; the ranks are on different lines since {diverged}" if diverged else ""
        text = f"collective {least + 1} of group {name}: {_write_sides(extra, _write_call)}; {others}: none{since}"
        return [Fault("missing", text, sorted(logs))]
    return [Fault("divergence", diverged, sorted(logs), is_error=False)] if diverged else []


def _signature(record: CollectiveRecord) -> tuple[object, ...]:
    size = None if record.kind in UNEVEN else record.nbytes
    return (record.kind, record.peer, size, record.dtype, record.operation)


def _write_call(record: CollectiveRecord) -> str:
    size = f" of {record.nbytes:,} B" if record.nbytes else ""
    root = f" from rank {record.peer}" if record.kind in ("broadcast", "scatter") else ""
    root = f" to rank {record.peer}" if record.kind in ("reduce", "gather") else root
    return f"{record.kind}{size}{root} at {shorten_line(record.line)}"


def _write_whole_call(record: CollectiveRecord) -> str:
    """Where kinds and sizes are equal."""
    reduction = f" ({record.operation})" if record.operation else ""
    call = f"{record.kind} of {record.nbytes:,} B" if record.nbytes else record.kind
    return _write_call(record).replace(call, f"{call} of {record.dtype}{reduction}", 1)


def _write_sides(records: Mapping[int, CollectiveRecord], write: Callable[[CollectiveRecord], str]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, record in records.items():
        sides.setdefault(write(record), []).append(rank)
    return "; ".join(f"{write_ranks(ranks)}: {text}" for text, ranks in sides.items())


def _compare_messages(group: Group, members: Sequence[History]) -> list[Fault]:
    """Sends and receives of each pair, in order; those of one batch come in any order."""
    found = []
    for first in members:
        for second in members:
            if first.rank < second.rank:
                ends = [_list_batches(group, a, b.rank) for a, b in ((first, second), (second, first))]
                text = _match_messages(first.rank, second.rank, *ends)
                if text and (first.is_whole and second.is_whole):
                    found.append(Fault("point-to-point", text, [first.rank, second.rank]))
    return found


def _list_batches(group: Group, history: History, peer: int) -> list[list[CollectiveRecord]]:
    batches: list[list[CollectiveRecord]] = []
    last = 0
    for record in history.log:
        if record.group == group.name and record.kind in ("send", "recv") and record.peer == peer:
            if record.batch and record.batch == last:
                batches[-1].append(record)
            else:
                batches.append([record])
            last = record.batch
    return batches


def _match_messages(
    first: int, second: int, ours: list[list[CollectiveRecord]], theirs: list[list[CollectiveRecord]]
) -> str:
    while ours or theirs:
        if not (ours and theirs):
            left = (ours or theirs)[0][0]
            rank, other = (first, second) if ours else (second, first)
            way = "to" if left.kind == "send" else "from"
            partner = "recv" if left.kind == "send" else "send"
            return (
                f"rank {rank}: {left.kind} of {left.nbytes:,} B {way} rank {other} at {shorten_line(left.line)}; "
                f"rank {other} has no matching {partner}"
            )
        pairs = [(a, b) for a in ours[0] for b in theirs[0] if {a.kind, b.kind} == {"send", "recv"}]
        if not pairs:
            both = ((first, second, ours[0][0]), (second, first, theirs[0][0]))
            shown = "; ".join(
                f"rank {rank}: {record.kind} {'to' if record.kind == 'send' else 'from'} rank {other} "
                f"at {shorten_line(record.line)}"
                for rank, other, record in both
            )
            return (
                f"{shown}: each waits for the other; use batch_isend_irecv, or reverse the order on one rank"
            )
        a, b = pairs[0]
        if a.nbytes != b.nbytes:
            return f"rank {first}: {_write_call(a)}; rank {second}: {_write_call(b)}"
        ours[0].remove(a)
        theirs[0].remove(b)
        ours, theirs = ([batch for batch in side if batch] for side in (ours, theirs))
    return ""


def _compare_created_groups(histories: Sequence[History]) -> list[Fault]:
    """`new_group` has to be called by all processes in the same order."""
    if len(histories) < 2 or not all(history.is_whole for history in histories):
        return []
    for position in range(max(len(history.created) for history in histories)):
        sides: dict[str, list[int]] = {}
        calls = set()
        for history in histories:
            call = history.created[position] if position < len(history.created) else None
            calls.add(None if call is None else call.ranks)
            shown = "none" if call is None else f"ranks {list(call.ranks)} at {shorten_line(call.line)}"
            sides.setdefault(shown, []).append(history.rank)
        if len(calls) > 1:
            text = "; ".join(f"{write_ranks(ranks)}: {shown}" for shown, ranks in sides.items())
            return [
                Fault(
                    "groups",
                    f"group {position + 1}: {text}; every rank has to call new_group for every group, in the same order",
                    [history.rank for history in histories],
                )
            ]
    return []


def _compare_loaders(histories: Sequence[History]) -> list[Fault]:
    lengths: dict[str, dict[int, int]] = {}
    for history in histories:
        for line, length in history.loaders:
            lengths.setdefault(line, {}).setdefault(history.rank, length)
    found = []
    for line, by_rank in lengths.items():
        if len(set(by_rank.values())) > 1:
            sides: dict[int, list[int]] = {}
            for rank, length in by_rank.items():
                sides.setdefault(length, []).append(rank)
            ordered = sorted(sides.items(), key=lambda side: len(side[1]))
            shown = ", ".join(
                f"{write_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {length:,} batches"
                for length, ranks in ordered
            )
            text = f"{shown} at {shorten_line(line)}: the ranks with more wait at the end of the epoch"
            found.append(Fault("data", text, sorted(by_rank), is_error=False))
    return found
