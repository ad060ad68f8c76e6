"""What is kept of a rehearsal: plain numbers and text.

    result = measure(rehearsal, cluster, shape)
    result.fits, result.reserved_bytes, result.seconds, result.tokens

The time of a step of several ranks is that of all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from understudy.plans.candidates import Shape
from understudy.report.cluster_rehearsal import ClusterRehearsal, RankRow
from understudy.report.rehearsal import FAILED, FITS, NO_VERDICT, TIGHT, Rehearsal
from understudy.timing.attribution import LAUNCHES
from understudy.timing.step_time import TimeEstimate

COMMUNICATION = "exposed communication"


@dataclass(frozen=True)
class Wire:
    """What one rank sends in a step over the groups of one dimension."""

    group: str
    size: int
    bytes: int
    is_between_nodes: bool


@dataclass(frozen=True)
class Result:
    """Sizes in bytes, of the worst rank; seconds of one step of all ranks. `ideal_seconds`: the products of a rank at the
    published peak. `tokens` and `samples` of one step of all ranks; None where the inputs do not show them."""

    verdict: str
    error: str = ""
    headline: str = ""
    reserved_bytes: int = 0
    limit_bytes: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    ideal_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    exposed_seconds: float = 0.0
    host_seconds: float = 0.0
    """In which the calls of a step are issued, by the rank with most of them."""
    idle_seconds: float = 0.0
    """In which the card has nothing to do but wait for calls."""
    tokens: float | None = None
    samples: float | None = None
    mfu: float = 0.0
    bound_by: dict[str, float] = field(default_factory=dict)
    wires: list[Wire] = field(default_factory=list)
    report: str = ""
    passes: int | None = None
    """Passes of a step in the rehearsal, where they are fewer than in the candidate."""

    @property
    def fits(self) -> bool:
        return self.verdict in (FITS, TIGHT)

    @property
    def is_measured(self) -> bool:
        """Whether it has figures, whatever the verdict."""
        return self.verdict not in (FAILED, NO_VERDICT)


def make_failure(error: str) -> Result:
    return Result(FAILED, error=error)


def measure(
    rehearsal: Rehearsal | None, cluster: ClusterRehearsal | None, shape: Shape, report: str = ""
) -> Result:
    """`rehearsal`: of the only rank, or of the worst."""
    if rehearsal is None:
        return make_failure("no rehearsal")
    verdict, headline = (
        (cluster.verdict, cluster.headline) if cluster else (rehearsal.verdict, rehearsal.headline)
    )
    if verdict in (FAILED, NO_VERDICT):
        return Result(verdict, error=headline, report=report)
    categories = rehearsal.categories
    result = Result(
        verdict, headline=headline, reserved_bytes=rehearsal.peak.reserved_bytes or rehearsal.peak.allocated_bytes,
        limit_bytes=rehearsal.device.limit_bytes or rehearsal.device.memory_bytes,
        parameters=categories.get("parameters", 0), gradients=categories.get("gradients", 0),
        optimizer_state=categories.get("optimizer_state", 0), report=report,
        wires=[] if cluster is None else _sum_wires(cluster),
    )  # fmt: skip
    return _add_time(result, rehearsal, cluster, shape)


def _add_time(result: Result, rehearsal: Rehearsal, cluster: ClusterRehearsal | None, shape: Shape) -> Result:
    rows = [row.rehearsal for row in cluster.rows if row.rehearsal] if cluster else [rehearsal]
    times = [row.time for row in rows if row.time is not None]
    if not times:
        return result
    slowest = max(times, key=lambda time: time.seconds_per_step)
    together = cluster.time if cluster is not None else None
    time = together or _add_waiting(slowest, shape)
    seconds = time.seconds_per_step
    of_rank = [(time.tokens_per_second or 0.0) * time.seconds_per_step for time in times]
    samples = [(time.samples_per_second or 0.0) * time.seconds_per_step for time in times]
    # Ranks of one data parallel group are fed the same.
    copies = shape.ranks // (shape.tp * shape.pp * shape.cp)
    return replace(
        result, seconds=seconds, low_seconds=time.low_seconds, high_seconds=time.high_seconds,
        ideal_seconds=max(time.hfu * time.seconds_per_step for time in times),
        optimizer_seconds=slowest.phases.get("optimizer", 0.0),
        exposed_seconds=slowest.bound_by.get(COMMUNICATION, 0.0) * slowest.seconds_per_step,
        host_seconds=max(time.host_seconds for time in times),
        idle_seconds=slowest.bound_by.get(LAUNCHES, 0.0) * slowest.seconds_per_step,
        tokens=max(of_rank) * copies or None, samples=shape.samples or max(samples) * copies or None,
        mfu=time.mfu, bound_by=dict(time.bound_by),
    )  # fmt: skip


def _add_waiting(time: TimeEstimate, shape: Shape) -> TimeEstimate:
    """Add the time in which stages of a pipeline wait for each other, where their ranks were not replayed together. The
    optimizer does not wait."""
    optimizer = time.phases.get("optimizer", 0.0)
    seconds = optimizer + (time.seconds_per_step - optimizer) * shape.bubble
    scale = seconds / time.seconds_per_step
    low, high = time.low_seconds * scale, time.high_seconds * scale
    return replace(time, seconds_per_step=seconds, low_seconds=low, high_seconds=high, mfu=time.mfu / scale)


def _sum_wires(cluster: ClusterRehearsal) -> list[Wire]:
    """The traffic of the rank that sends most in its steps, by group, for one step."""
    rows: dict[int, RankRow] = {row.rank: row for row in cluster.rows}
    totals: dict[int, dict[tuple[str, int, bool], int]] = {}
    for row in cluster.communication:
        if row.when == "steps":
            table = totals.setdefault(row.rank, {})
            key = (row.group, row.group_size, row.is_between_nodes)
            table[key] = table.get(key, 0) + row.wire_bytes
    if not totals:
        return []
    rank = max(totals, key=lambda number: sum(totals[number].values()))
    steps = max(1, rows[rank].steps if rank in rows else 1)
    return [
        Wire(group, size, nbytes // steps, between) for (group, size, between), nbytes in totals[rank].items()
    ]


def extend(few: Result, more: Result, few_passes: int, more_passes: int, shape: Shape) -> Result:
    """The result for all passes of a step, from rehearsals of two smaller numbers of them: each pass beyond the first ones
    takes the same time and no more memory. What stages of a pipeline wait for each other is in both."""
    if few.seconds is None or more.seconds is None:
        return more
    each = (more.seconds - few.seconds) / (more_passes - few_passes)
    seconds = more.seconds + each * (shape.accumulate - more_passes)
    scale = seconds / more.seconds
    passes = shape.accumulate / more_passes
    missing = (shape.accumulate - more_passes) / (more_passes - few_passes)
    low, high = ((bound or 0.0) * scale for bound in (more.low_seconds, more.high_seconds))
    return replace(
        more, seconds=seconds, low_seconds=low, high_seconds=high, ideal_seconds=more.ideal_seconds * passes,
        exposed_seconds=min(more.exposed_seconds * passes, seconds), host_seconds=more.host_seconds * passes,
        idle_seconds=min(more.idle_seconds * passes, seconds), tokens=more.tokens and more.tokens * passes,
        samples=shape.samples or (more.samples and more.samples * passes), mfu=more.mfu * passes / scale,
        passes=more_passes, wires=[_extend_wire(wire, few, missing) for wire in more.wires],
    )  # fmt: skip


def _extend_wire(wire: Wire, few: Result, missing: float) -> Wire:
    same = (w.bytes for w in few.wires if (w.group, w.size) == (wire.group, wire.size))
    return replace(wire, bytes=round(wire.bytes + missing * max(0, wire.bytes - next(same, wire.bytes))))
