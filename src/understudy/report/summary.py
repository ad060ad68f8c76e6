"""A `Rehearsal` from a measurement: the events are gone through again, now that it is known what each storage was for."""

from __future__ import annotations

import linecache
import platform
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from understudy.lines import short_path
from understudy.ops.traits.flops import UNKNOWN
from understudy.report.measurement import DeviceTotals, Measurement
from understudy.report.places import BETWEEN, FORWARD, SETUP, LinePlace, Places
from understudy.report.rehearsal import (
    CATEGORIES,
    DOES_NOT_FIT,
    FAILED,
    FITS,
    TIGHT,
    Contributor,
    Coverage,
    Device,
    LineRow,
    ModuleRow,
    OperatorRow,
    OutOfMemoryRecord,
    Peak,
    PhaseRow,
    Rehearsal,
    Span,
    TimeEstimate,
    Timeline,
)
from understudy.report.text import format_size
from understudy.simulation.catalogue import Card, read_software, this_machine
from understudy.simulation.events import MemoryRecord, StorageRecord
from understudy.simulation.memory import DeviceMemory, FirstOOM, MachineMemory

GiB = 1 << 30
POINTS = 2000
"""Of the timeline, at most about as many."""
CONTRIBUTORS = 30
SPANS = 2000
STATED_ERROR = 0.02
"""Of reserved memory on cards, as a part of it: within this of the limit, a run is tight."""


@dataclass(frozen=True)
class VerdictOptions:
    """`margin`: the part of reserved memory within which a run counts as tight; `budget`: bytes, instead of the card's."""

    margin: float = STATED_ERROR
    budget: int | None = None


@dataclass
class RunFacts:
    """Facts that the runner of the program knows and the measurement does not."""

    steps: int | None = None
    failure: str = ""
    """How the program ended before its time: "the script failed", …"""
    is_out_of_memory: bool = False
    """Whether the error of the card ended it."""
    answers: list[dict[str, object]] = field(default_factory=list)
    writes: list[dict[str, object]] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)


def summarise(
    measurement: Measurement, memory: MachineMemory, card: Card | None, options: VerdictOptions | None = None,
    facts: RunFacts | None = None,
) -> Rehearsal:  # fmt: skip
    options, facts = options or VerdictOptions(), facts or RunFacts()
    totals = _find_measured_device(measurement, memory)
    device_memory = memory.devices[totals.device.index or 0] if totals.is_card else None
    alive = _find_alive_at_peak(measurement, totals)
    peak = _make_peak(measurement, totals, alive, device_memory)
    device = _make_device(card if device_memory else None, device_memory, options, max(1, len(memory.devices)))
    raised = _find_raised_oom(memory, device_memory) if facts.is_out_of_memory else None
    oom = _make_out_of_memory_record((device_memory and device_memory.first_oom) or raised, measurement.places)
    error = round(peak.reserved_bytes * options.margin) if device_memory else 0
    verdict = _decide_verdict(peak, device, oom, error, bool(facts.failure))
    notes = _list_assumptions(device, options, goes_on=oom is not None and raised is None)
    phases = _make_phase_rows(measurement, totals)
    macs = sum(row.macs for row in phases)
    return Rehearsal(
        verdict=verdict,
        headline=_write_headline(
            verdict, peak, device, oom, facts.failure, options.budget, card if device_memory is None else None
        ),
        device=device,
        steps=measurement.places.step if facts.steps is None else facts.steps,
        peak=peak,
        categories=_sum_categories(alive, totals.peak_transient),
        modules=_make_module_rows(measurement, alive),
        lines=_make_line_rows(measurement, totals, alive),
        macs=macs,
        flops=2 * macs,
        coverage=_measure_coverage(measurement),
        error_bytes=error,
        margin=options.margin,
        out_of_memory=oom,
        operators=_make_operator_rows(measurement),
        phases=phases,
        operations=sum(row.operations for row in phases),
        bytes_moved=sum(row.bytes_moved for row in phases),
        time=_estimate_time(measurement, phases, card if device_memory else None),
        timeline=_make_timeline(measurement, totals),
        answers=facts.answers,
        writes=facts.writes,
        assumptions=[*facts.assumptions, *notes],
        software=_list_software(device),
        host_peak_bytes=memory.host.peak,
    )


def _find_measured_device(measurement: Measurement, memory: MachineMemory) -> DeviceTotals:
    """The card that most was allocated on; without a card, or where none was used, the CPU."""
    cards = [totals for totals in measurement.devices.values() if totals.is_card and memory.devices]
    if cards:
        return max(cards, key=lambda totals: totals.peak)
    cpu = torch.device("cpu")
    return measurement.devices.get(cpu) or DeviceTotals(cpu)


# --- the peak


def _find_alive_at_peak(measurement: Measurement, totals: DeviceTotals) -> list[MemoryRecord]:
    alive: dict[int, MemoryRecord] = {}
    for record in measurement.events[: totals.peak_event]:
        if record.totals is totals and alive.pop(id(record), None) is None:
            alive[id(record)] = record
    for record in alive.values():
        record.category = find_category(record, measurement)
    return list(alive.values())


def find_category(record: MemoryRecord, measurement: Measurement) -> str:
    """The category of a storage. Storages that nothing has claimed are classified by the phases of their birth and death."""
    if record.category is not None:
        return record.category
    born, died = record.born, record.died
    lives_on = died is None or died.root_calls > born.root_calls  # a module was called from outside before it died
    is_like_parameter = isinstance(record, StorageRecord) and record.spec.shape in measurement.parameter_shapes
    if record.is_updated and lives_on and is_like_parameter:
        return "optimizer_state"  # of an optimizer written by hand
    if born.phase in (SETUP, BETWEEN):
        return "inputs"
    is_kept = died is None or died.phase != FORWARD or died.backward_passes > born.backward_passes
    if born.phase == FORWARD and (is_kept or not measurement.has_backward):
        return "activations"
    return "temporaries"


def _make_peak(
    measurement: Measurement, totals: DeviceTotals, alive: list[MemoryRecord], memory: DeviceMemory | None
) -> Peak:
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    allocated, reserved, active, requested = 4 * (totals.peak,)
    fragmentation = 0
    if memory is not None:
        peaks = memory.allocator.peaks()  # of the run: those of torch.cuda's statistics are the program's to reset
        allocated, reserved, active, requested = (peaks[name] for name in names)
        fragmentation = reserved - allocated
    last = measurement.events[totals.peak_event - 1] if totals.peak_event else None
    return Peak(
        allocated,
        reserved,
        active,
        requested,
        fragmentation_bytes=fragmentation,
        step=last.born.step if last else 0,
        phase=last.born.phase if last else "",
        module=measurement.places.shorten_path(last.module.path) if last else "",
        line=_write_line(last.line) if last else "",
        operator="" if last is None or last.maker is None else str(last.maker),
        contributors=_group_contributors(alive, measurement.places),
    )


def _group_contributors(alive: Iterable[MemoryRecord], places: Places) -> list[Contributor]:
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for record in alive:
        line = _write_line(record.line)
        operator = "" if record.maker is None else str(record.maker)
        groups[record.category or "", _find_module_path(record, places), line, operator].append(record.nbytes)
    rows = [Contributor(*group, count=len(sizes), bytes=sum(sizes)) for group, sizes in groups.items()]
    return sorted(rows, key=lambda row: -row.bytes)[:CONTRIBUTORS]


def _sum_categories(alive: Iterable[MemoryRecord], transient: int) -> dict[str, int]:
    found = dict.fromkeys(CATEGORIES, 0)
    found["temporaries"] = transient
    for record in alive:
        found[record.category or "temporaries"] += record.nbytes
    return found


def _find_module_path(record: MemoryRecord, places: Places) -> str:
    return places.shorten_path(record.module.path if record.owner is None else record.owner)


_texts: dict[LinePlace, str] = {}


def _write_line(line: LinePlace | None) -> str:
    if line is None:
        return ""
    if line not in _texts:
        _texts[line] = f"{short_path(line[0].co_filename)}:{line[1]}"
    return _texts[line]


def _find_raised_oom(memory: MachineMemory, measured: DeviceMemory | None) -> FirstOOM | None:
    """Where the program was refused: by the card that was measured, or else by another one."""
    devices = [device for device in (measured, *memory.devices) if device is not None]
    return next((device.last_raised for device in devices if device.last_raised is not None), None)


def _make_out_of_memory_record(oom: FirstOOM | None, places: Places) -> OutOfMemoryRecord | None:
    if oom is None:
        return None
    state = oom.state
    line = oom.line.partition(": ")[0]
    step, phase, module = oom.place
    return OutOfMemoryRecord(
        line, state.requested, state.allocated, state.reserved, step, phase, places.shorten_path(module)
    )


# --- the verdict


def _make_device(card: Card | None, memory: DeviceMemory | None, options: VerdictOptions, count: int) -> Device:
    if memory is None or card is None:
        machine = this_machine()
        return Device(
            machine.key, machine.name, "cpu", 1, machine.memory, 0, options.budget or machine.memory, machine.note
        )
    outside = memory.capped.outside
    limit = card.memory - outside
    if options.budget is not None:
        limit = min(limit, options.budget)
    return Device(card.key, card.name, card.kind, count, card.memory, outside, limit, card.note)


def _decide_verdict(peak: Peak, device: Device, oom: OutOfMemoryRecord | None, error: int, has_failed: bool) -> str:
    if oom is not None or peak.reserved_bytes > device.limit_bytes:
        return DOES_NOT_FIT
    if has_failed:
        return FAILED
    return TIGHT if peak.reserved_bytes + error > device.limit_bytes else FITS


def _write_headline(
    verdict: str, peak: Peak, device: Device, oom: OutOfMemoryRecord | None, failure: str, budget: int | None,
    unused: Card | None,
) -> str:  # fmt: skip
    """`unused` is a card that was asked for, and on which the program has put nothing."""
    used, total = peak.reserved_bytes, device.memory_bytes
    name = device.key.upper() if device.kind != "cpu" else "this machine's CPU"
    name += f" (nothing was put on the {unused.key.upper()})" if unused is not None and unused.kind != "cpu" else ""
    name += f" with a budget of {format_size(budget)}" if budget is not None else ""
    kind = "reserved" if device.kind != "cpu" else "allocated"
    share = f"{100 * used / total:.0f}%" if total else "?"
    where = f", peak in {peak.phase}" if peak.phase else ""
    where += f" of {peak.module}" if peak.module else ""
    where += f", {peak.line}" if peak.line else ""
    amount = f"{_write_amount(used, total)} of {_write_amount(total, total)} {_choose_unit(total)} {kind} ({share})"
    if verdict == FAILED:
        return f"no verdict on {name}: {failure}; until then {amount}{where}"
    if verdict != DOES_NOT_FIT:
        return f"{verdict} on {name}: {amount}{where}"
    if failure and oom is not None and used <= device.limit_bytes:
        at = f" at {oom.line}" if oom.line else ""
        return f"{verdict} on {name}: {failure}, out of memory{at}; until then {amount}{where}"
    over = used - device.limit_bytes
    if oom is None and budget == device.limit_bytes:
        return f"{verdict} on {name}: {amount}, {_write_amount(over, total)} {_choose_unit(total)} over the budget{where}"
    by = f", {_write_amount(over, total)} {_choose_unit(total)} too much" if over > 0 else ""
    first = f"; first out of memory at {oom.line}" if oom is not None and oom.line else ""
    amount = f"{_write_amount(used, total)} of {_write_amount(total, total)} {_choose_unit(total)} needed{by}"
    return f"{verdict} on {name}: {amount}{where}{first}"


def _choose_unit(total: int) -> str:
    return "GiB" if total >= GiB else "MiB"


def _write_amount(size: int, total: int) -> str:
    amount = size / (GiB if total >= GiB else 1 << 20)
    return f"{amount:.1f}" if amount >= 0.95 or amount == 0 else f"{amount:.3f}"


# --- tables


def _make_module_rows(measurement: Measurement, alive: Iterable[MemoryRecord]) -> list[ModuleRow]:
    columns = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
    by_path: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys((*columns, "other"), 0))
    for record in alive:
        column = record.category if record.category in columns else "other"
        by_path[_find_module_path(record, measurement.places)][column] += record.nbytes
    places = {measurement.places.shorten_path(path): place for path, place in measurement.places.by_path.items()}
    rows = [
        ModuleRow(
            path=path,
            kind=places[path].kind if path in places else "",
            **by_path[path],
            bytes=sum(by_path[path].values()),
            macs=places[path].macs if path in places else 0,
            flops=2 * places[path].macs if path in places else 0,
            calls=places[path].calls if path in places else 0,
        )
        for path in dict.fromkeys((*places, *by_path))
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _make_line_rows(measurement: Measurement, totals: DeviceTotals, alive: list[MemoryRecord]) -> list[LineRow]:
    at_peak: dict[LinePlace | None, int] = defaultdict(int)
    count: dict[LinePlace | None, int] = defaultdict(int)
    in_all: dict[LinePlace | None, int] = defaultdict(int)
    for record in alive:
        at_peak[record.line] += record.nbytes
    seen: set[int] = set()
    for record in measurement.events:
        if record.totals is totals and id(record) not in seen:
            seen.add(id(record))
            count[record.line] += 1
            in_all[record.line] += record.nbytes
    rows = [
        LineRow(
            line=_write_line(line),
            source=linecache.getline(line[0].co_filename, line[1]).strip() if line else "",
            bytes=at_peak[line],
            allocations=count[line],
            allocated_in_all=in_all[line],
        )
        for line in count
    ]
    return sorted(rows, key=lambda row: (-row.bytes, -row.allocated_in_all))


def _make_operator_rows(measurement: Measurement) -> list[OperatorRow]:
    rows: dict[str, list[int]] = {}
    kinds: dict[str, str] = {}
    for totals in measurement.calls.values():
        name = str(totals.operator)
        row = rows.setdefault(name, [0, 0, 0, 0])
        work = totals.work
        kinds[name] = work.kind
        amounts = (1, work.macs, work.operations, work.bytes_moved)
        rows[name] = [sum_ + amount * totals.count for sum_, amount in zip(row, amounts, strict=True)]
    made = [
        OperatorRow(name, kinds[name], calls, macs, 2 * macs, operations, bytes_moved)
        for name, (calls, macs, operations, bytes_moved) in rows.items()
    ]
    return sorted(made, key=lambda row: (-row.macs, -row.bytes_moved))


def _measure_coverage(measurement: Measurement) -> Coverage:
    unknown: dict[str, int] = defaultdict(int)
    calls = known = moved = unknown_moved = 0
    for totals in measurement.calls.values():
        calls += totals.count
        moved += totals.count * totals.work.bytes_moved
        if totals.work.kind == UNKNOWN:
            unknown[str(totals.operator)] += totals.count
            unknown_moved += totals.count * totals.work.bytes_moved
        else:
            known += totals.count
    return Coverage(calls, known, dict(unknown), unknown_moved / moved if moved else 0.0)


def _make_phase_rows(measurement: Measurement, totals: DeviceTotals) -> list[PhaseRow]:
    peaks: dict[tuple[int, str], int] = defaultdict(int)
    seen: set[int] = set()
    live = 0
    for record in measurement.events:
        if record.totals is totals:
            live += -record.nbytes if id(record) in seen else record.nbytes
            if id(record) not in seen:
                place = record.born.step, record.born.phase
                peaks[place] = max(peaks[place], live)
            seen.symmetric_difference_update((id(record),))
    return [
        PhaseRow(
            row.step, row.phase, peaks[place], row.operators, row.macs, 2 * row.macs, row.operations, row.bytes_moved
        )
        for place, row in measurement.phases.items()
    ]


# --- time, timeline, and the rest

EFFICIENCY, BANDWIDTH_EFFICIENCY, LAUNCH = 0.5, 0.7, 5e-6
"""Parts of the published peaks that training steps reach, and seconds for the launch of a kernel."""


def _find_speed(throughput: Mapping[str, float], dtype: str) -> float:
    """Operations per second for a dtype; for a dtype without a published figure, the lowest of the card."""
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"
    figure = throughput.get("float8" if dtype.startswith("float8") else dtype)
    return figure or min(throughput.values())


def _estimate_compute_seconds(measurement: Measurement, throughput: Mapping[str, float]) -> float:
    """Time of all matrix products, each at the published peak of its dtype."""
    flops: dict[str, int] = defaultdict(int)
    for totals in measurement.calls.values():
        flops[totals.dtype] += totals.count * totals.work.flops
    return sum(count / _find_speed(throughput, dtype) for dtype, count in flops.items() if count)


def _estimate_time(measurement: Measurement, phases: list[PhaseRow], card: Card | None) -> TimeEstimate | None:
    """Compute time plus memory time of the whole run, but at least the time of the launches; divided by the number
    of steps."""
    if card is None or not card.throughput or not card.bandwidth:
        return None
    counted = [row for row in phases if row.phase != SETUP]
    flops, moved = sum(row.flops for row in counted), sum(row.bytes_moved for row in counted)
    steps = max(1, measurement.places.step)
    compute = _estimate_compute_seconds(measurement, card.throughput) / EFFICIENCY / steps
    memory = moved / (BANDWIDTH_EFFICIENCY * card.bandwidth) / steps
    launch = LAUNCH * sum(row.operators for row in counted) / steps
    return TimeEstimate(
        seconds_per_step=max(compute + memory, launch),
        compute_seconds=compute,
        memory_seconds=memory,
        launch_seconds=launch,
        arithmetic_intensity=flops / moved if moved else 0.0,
        assumes=f"{EFFICIENCY:.0%} of the peak of each dtype, {BANDWIDTH_EFFICIENCY:.0%} of the bandwidth, "
        f"{LAUNCH * 1e6:.0f} us for each launch; an estimate",
    )


def _make_timeline(measurement: Measurement, totals: DeviceTotals) -> Timeline:
    """The most of each stretch of events, so that no peak is lost. Its operator, step and phase are those of the last
    birth: an event that ends a storage tells only when that began."""
    stretch = max(1, len(measurement.events) // POINTS)
    live = dict.fromkeys(CATEGORIES, 0)
    seen: set[int] = set()
    line = Timeline(bytes={name: [] for name in CATEGORIES})
    moments: list[int] = []
    best, best_total, best_event, peak_index = dict(live), -1, 0, 0
    latest = best_latest = 0
    for index, record in enumerate(measurement.events):
        is_death = id(record) in seen
        seen.symmetric_difference_update((id(record),))
        latest = latest if is_death else index
        if record.totals is totals:
            live[find_category(record, measurement)] += -record.nbytes if is_death else record.nbytes
        total = sum(live.values())
        if total > best_total or index + 1 == totals.peak_event:
            best, best_total, best_event, best_latest = dict(live), total, index, latest
        if index + 1 == totals.peak_event:
            best_total = 1 << 62  # nothing of this stretch replaces it
            peak_index = len(line.operators)
        if (index + 1) % stretch == 0 or index + 1 == len(measurement.events):
            line.operators.append(measurement.events[best_latest].call)
            _add_point(line, best, measurement.events[best_latest])
            moments.append(best_event)
            best_total = -1
    spans = _find_spans(measurement, totals, moments)
    return Timeline(line.operators, line.steps, line.phases, line.bytes, peak_index, spans)


def _find_spans(measurement: Measurement, totals: DeviceTotals, moments: list[int]) -> list[Span]:
    """Storages that were alive at points of the timeline, whose events are `moments`. One that died before the next point
    is in no span."""
    born: dict[int, int] = {}
    groups: dict[tuple[int, int, str, str, LinePlace | None], list[int]] = defaultdict(list)

    def close(record: MemoryRecord, death: int) -> None:
        start, end = bisect_left(moments, born.pop(id(record))), bisect_left(moments, death)
        if start < end:
            module = _find_module_path(record, measurement.places)
            key = (start, end, find_category(record, measurement), module, record.line)
            groups[key].append(record.nbytes)

    last: dict[int, MemoryRecord] = {}
    for index, record in enumerate(measurement.events):
        if record.totals is totals:
            if id(record) in born:
                close(record, index)
            else:
                born[id(record)] = index
                last[id(record)] = record
    for number in list(born):
        close(last[number], len(measurement.events))
    largest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:SPANS]
    return [
        Span(start, end, sum(sizes), len(sizes), category, module, _write_line(line))
        for (start, end, category, module, line), sizes in largest
    ]


def _add_point(line: Timeline, live: dict[str, int], latest: MemoryRecord) -> None:
    line.steps.append(latest.born.step)
    line.phases.append(latest.born.phase)
    for name, size in live.items():
        line.bytes[name].append(size)


GOES_ON = "after the first out of memory the run went on without a limit; a script that catches it gets it with --oom raise"


def _list_assumptions(device: Device, options: VerdictOptions, goes_on: bool) -> list[str]:
    if device.kind == "cpu":
        return ["memory of tensors on the CPU, without rounding or cache; Python and libraries are not in it"]
    return [
        f"memory outside of the allocator (context, kernels, libraries): {device.context_bytes / GiB:.2f} GiB",
        f"stated error of reserved memory: {options.margin:.1%} of it",
        *((GOES_ON,) if goes_on else ()),
    ]


def _list_software(device: Device) -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if device.kind == "cuda":
        found["simulated"] = str(read_software())
    return found
