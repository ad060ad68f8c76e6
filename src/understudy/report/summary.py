"""A `Rehearsal` from a measurement: the events are read a second time, when the purpose of each storage is known."""

from __future__ import annotations

import linecache
import platform
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from understudy.lines import short_path
from understudy.ops.traits.flops import UNKNOWN
from understudy.report.measurement import DeviceTotals, Measurement
from understudy.report.places import BETWEEN, FORWARD, SETUP, LinePlace, ModulePlace, Places, write_phase
from understudy.report.rehearsal import (
    CATEGORIES,
    DOES_NOT_FIT,
    FAILED,
    FITS,
    NO_VERDICT,
    TIGHT,
    Contributor,
    Coverage,
    Device,
    LineRow,
    MemorySpan,
    MemoryTimeline,
    ModuleRow,
    OperatorRow,
    OutOfMemoryRecord,
    Peak,
    PhaseRow,
    Rehearsal,
)
from understudy.report.sanity import RunFacts, find_missing_work, make_sanity
from understudy.report.text import format_size
from understudy.simulation.catalogue import Card, make_cpu_card, read_software
from understudy.simulation.events import MemoryRecord, StorageRecord
from understudy.simulation.memory import DeviceMemory, FirstOOM, MachineMemory
from understudy.timing.estimate import StepFacts, estimate_time
from understudy.timing.step_time import TimeEstimate

GiB = 1 << 30
POINTS = 2000
"""Approximate maximum of points in the timeline."""
CONTRIBUTORS = 30
SPANS = 2000
STATED_ERROR = 0.02
"""Relative error of reserved memory on cards. A run this close to the limit is tight."""


@dataclass(frozen=True)
class VerdictOptions:
    """`margin`: the fraction of reserved memory within which a run is tight; `budget`: a limit in bytes, not the
    card's; `per_step`: samples per step, if not derived from the inputs of the model."""

    margin: float = STATED_ERROR
    budget: int | None = None
    per_step: int | None = None


def summarise(
    measurement: Measurement, memory: MachineMemory, card: Card | None, options: VerdictOptions | None = None,
    facts: RunFacts | None = None,
) -> Rehearsal:  # fmt: skip
    options, facts = options or VerdictOptions(), facts or RunFacts()
    totals = _find_measured_device(measurement, memory)
    device_memory = memory.devices[totals.device.index or 0] if totals.is_card else None
    alive = _find_alive_at_peak(measurement, totals)
    peak = _make_peak(measurement, totals, alive, device_memory)
    device = _make_device(
        card if device_memory else None, device_memory, options, max(1, len(memory.devices))
    )
    raised = _find_raised_oom(memory, device_memory) if facts.is_out_of_memory else None
    oom = _make_out_of_memory_record(
        (device_memory and device_memory.first_oom) or raised, measurement.places
    )
    margin = max(options.margin, *facts.margins.values(), 0)
    error = round(peak.reserved_bytes * margin) if device_memory else 0
    missing = "" if card is None or card.kind == "cpu" else find_missing_work(measurement, totals, facts)
    verdict = _decide_verdict(peak, device, oom, error, bool(facts.failure), bool(missing))
    notes = _list_assumptions(device, margin, facts, goes_on=oom is not None and raised is None)
    phases = _make_phase_rows(measurement, totals)
    macs = sum(row.macs for row in phases)
    return Rehearsal(
        verdict=verdict,
        headline=_write_headline(
            verdict,
            peak,
            device,
            oom,
            facts.failure or missing,
            options.budget,
            card if device_memory is None else None,
        ),
        device=device,
        steps=measurement.places.step if facts.steps is None else facts.steps,
        peak=peak,
        categories=_sum_categories(alive),
        modules=_make_module_rows(measurement, alive),
        lines=_make_line_rows(measurement, totals, alive),
        macs=macs,
        flops=2 * macs,
        coverage=_measure_coverage(measurement),
        error_bytes=error,
        margin=margin,
        out_of_memory=oom,
        operators=_make_operator_rows(measurement),
        phases=phases,
        operations=sum(row.operations for row in phases),
        bytes_moved=sum(row.bytes_moved for row in phases),
        time=_estimate_time(measurement, options) if device_memory else None,
        timeline=_make_timeline(measurement, totals),
        answers=facts.answers,
        writes=facts.writes,
        assumptions=[*facts.assumptions, *notes],
        software=_list_software(device),
        host_peak_bytes=memory.host.peak,
        sanity=make_sanity(measurement, totals, facts),
        program=facts.program,
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
    lives_on = (
        died is None or died.root_calls > born.root_calls
    )  # a module was called from outside before it died
    is_like_parameter = (
        isinstance(record, StorageRecord) and record.spec.shape in measurement.parameter_shapes
    )
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
        peaks = (
            memory.allocator.peaks()
        )  # of the run: those of torch.cuda's statistics are the program's to reset
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
        line=write_line(last.line) if last else "",
        operator="" if last is None or last.maker is None else str(last.maker),
        contributors=_group_contributors(alive, measurement.places),
    )


def _group_contributors(alive: Iterable[MemoryRecord], places: Places) -> list[Contributor]:
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for record in alive:
        line = write_line(record.line)
        operator = "" if record.maker is None else str(record.maker)
        groups[record.category or "", _find_module_path(record, places), line, operator].append(record.nbytes)
    rows = [Contributor(*group, count=len(sizes), bytes=sum(sizes)) for group, sizes in groups.items()]
    return sorted(rows, key=lambda row: -row.bytes)[:CONTRIBUTORS]


def _sum_categories(alive: Iterable[MemoryRecord]) -> dict[str, int]:
    found = dict.fromkeys(CATEGORIES, 0)
    for record in alive:
        found[record.category or "temporaries"] += record.nbytes
    return found


def _find_module_path(record: MemoryRecord, places: Places) -> str:
    return places.shorten_path(record.module.path if record.owner is None else record.owner)


_texts: dict[int, str] = {}
"""By the identity of a line: there is one object of each, which is kept."""


def write_line(line: LinePlace | None) -> str:
    if line is None:
        return ""
    text = _texts.get(id(line))
    if text is None:
        text = _texts[id(line)] = f"{short_path(line[0].co_filename)}:{line[1]}"
    return text


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


def _make_device(
    card: Card | None, memory: DeviceMemory | None, options: VerdictOptions, count: int
) -> Device:
    if memory is None or card is None:
        machine = make_cpu_card()
        return Device(
            machine.key,
            machine.name,
            "cpu",
            1,
            machine.memory,
            0,
            options.budget or machine.memory,
            machine.note,
        )
    outside = memory.capped.outside
    limit = card.memory - outside
    if options.budget is not None:
        limit = min(limit, options.budget)
    return Device(card.key, card.name, card.kind, count, card.memory, outside, limit, card.note)


def _decide_verdict(
    peak: Peak,
    device: Device,
    oom: OutOfMemoryRecord | None,
    error: int,
    has_failed: bool,
    has_done_nothing: bool,
) -> str:
    if oom is not None or (peak.reserved_bytes > device.limit_bytes and not has_done_nothing):
        return DOES_NOT_FIT
    if has_failed:
        return FAILED
    if has_done_nothing:
        return NO_VERDICT
    return TIGHT if peak.reserved_bytes + error > device.limit_bytes else FITS


def _write_headline(
    verdict: str, peak: Peak, device: Device, oom: OutOfMemoryRecord | None, failure: str, budget: int | None,
    unused: Card | None,
) -> str:  # fmt: skip
    """`unused` is a requested card without any tensor of the program."""
    used, total = peak.reserved_bytes, device.memory_bytes
    name = device.key.upper() if device.kind != "cpu" else "this machine's CPU"
    name += (
        f" (nothing was put on the {unused.key.upper()})"
        if unused is not None and unused.kind != "cpu"
        else ""
    )
    name += f" with a budget of {format_size(budget)}" if budget is not None else ""
    kind = "reserved" if device.kind != "cpu" else "allocated"
    share = f"{100 * used / total:.0f}%" if total else "?"
    where = f", peak {write_phase(peak.phase)}" if peak.phase else ""
    where += f" of {peak.module}" if peak.module else ""
    where += f", {peak.line}" if peak.line else ""
    amount = f"{_write_amount(used, total)} of {_write_amount(total, total)} {_choose_unit(total)} {kind} ({share})"
    if verdict == FAILED and unused is not None and unused.kind != "cpu":
        return f"no verdict on {unused.key.upper()}: {failure}, before anything was put on the card"
    if verdict == FAILED:
        return f"no verdict on {name}: {failure}; until then {amount}{where}"
    if verdict == NO_VERDICT:
        return f"no verdict on {unused.key.upper() if unused is not None else name}: {failure}"
    if verdict != DOES_NOT_FIT:
        return f"{verdict} on {name}: {amount}{where}"
    if failure and oom is not None and used <= device.limit_bytes:
        at = f" at {oom.line}" if oom.line else ""
        return f"{verdict} on {name}: {failure}, out of memory{at}; until then {amount}{where}"
    over = used - device.limit_bytes
    if oom is None and budget == device.limit_bytes:
        return f"{verdict} on {name}: {amount}, {_write_amount(over, total)} {_choose_unit(total)} over the budget{where}"
    unit = _choose_unit(total)
    by = f", {_write_amount(over, total)} {unit} too much" if over > 0 else ""
    first = f"; first out of memory at {oom.line}" if oom is not None and oom.line else ""
    outside = total - device.limit_bytes
    of = f"{_write_amount(total, total)} less {_write_amount(outside, total)} outside of the allocator"
    usable = f"{_write_amount(device.limit_bytes, total)} usable" + (f" ({of})" if outside else "")
    amount = f"{_write_amount(used, total)} {unit} needed, {usable}{by}"
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
    places = {
        measurement.places.shorten_path(path): place for path, place in measurement.places.by_path.items()
    }
    seconds = _sum_seconds(measurement, lambda module, line: measurement.places.shorten_path(module.path))
    rows = [
        ModuleRow(
            path=path,
            kind=places[path].kind if path in places else "",
            **by_path[path],
            bytes=sum(by_path[path].values()),
            macs=places[path].macs if path in places else 0,
            flops=2 * places[path].macs if path in places else 0,
            calls=places[path].calls if path in places else 0,
            seconds=seconds[path],
        )
        for path in dict.fromkeys((*places, *by_path))
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _sum_seconds(measurement: Measurement, choose: Callable[[ModulePlace, Any], Any]) -> dict[Any, float]:
    """Sum the seconds of kernels in the whole run, grouped by `choose(place)`."""
    found: dict[Any, float] = defaultdict(float)
    for (module, line), seconds in (measurement.clock.seconds_by_place if measurement.clock else {}).items():
        if module is not None:
            found[choose(module, line)] += seconds
    return found


MOST_OF_IT = 0.5
"""A line of the program with a larger share of the peak, such as `trainer.train()`, is shown by the lines that it calls."""


def _make_line_rows(
    measurement: Measurement, totals: DeviceTotals, alive: list[MemoryRecord]
) -> list[LineRow]:
    own_bytes: dict[str, int] = defaultdict(int)
    for record in alive:
        own_bytes[write_line(record.line)] += record.nbytes
    descended = {text for text, size in own_bytes.items() if size > MOST_OF_IT * sum(own_bytes.values())}
    shown: dict[str, LinePlace | None] = {}

    def choose(line: LinePlace | None) -> str:
        if line is not None and len(line) == 3 and write_line(line) in descended:
            line = line[2]
        text = write_line(line)
        shown.setdefault(text, line)
        return text

    at_peak: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    in_all: dict[str, int] = defaultdict(int)
    for record in alive:
        at_peak[choose(record.line)] += record.nbytes
    seconds = _sum_seconds(measurement, lambda module, line: choose(line))
    seen: set[int] = set()
    for record in measurement.events:
        if record.totals is totals and id(record) not in seen:
            seen.add(id(record))
            text = choose(record.line)
            count[text] += 1
            in_all[text] += record.nbytes
    rows = [
        LineRow(
            line=text,
            source=linecache.getline(line[0].co_filename, line[1]).strip() if line else "",
            bytes=at_peak[text],
            allocations=count[text],
            allocated_in_all=in_all[text],
            seconds=seconds[text],
        )
        for text, line in shown.items()
        if text in count or seconds[text]
    ]
    return sorted(rows, key=lambda row: (-row.bytes, -row.allocated_in_all))


def _make_operator_rows(measurement: Measurement) -> list[OperatorRow]:
    rows: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    for totals in measurement.calls.values():
        name = str(totals.operator)
        row = rows.setdefault(name, [0, 0, 0, 0, 0.0])
        work = totals.work
        kinds[name] = work.kind
        seconds = totals.time.seconds if totals.time is not None else 0.0
        amounts = (1, work.macs, work.operations, work.bytes_moved, seconds)
        rows[name] = [sum_ + amount * totals.count for sum_, amount in zip(row, amounts, strict=True)]
    made = []
    for name, (calls, macs, operations, moved, seconds) in rows.items():
        setup = measurement.clock.setup.get(name, (0, 0.0)) if measurement.clock else (int(calls), 0.0)
        made.append(
            OperatorRow(
                name,
                kinds[name],
                int(calls),
                int(macs),
                2 * int(macs),
                int(operations),
                int(moved),
                max(0.0, seconds - setup[1]),
                int(calls) - setup[0],
            )
        )
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
            row.step,
            row.phase,
            peaks[place],
            row.operators,
            row.macs,
            2 * row.macs,
            row.operations,
            row.bytes_moved,
        )
        for place, row in measurement.phases.items()
    ]


# --- time, timeline, and the rest


def _estimate_time(measurement: Measurement, options: VerdictOptions) -> TimeEstimate | None:
    clock = measurement.clock
    if clock is None:
        return None
    steps = measurement.places.step
    samples = measurement.samples
    if options.per_step is not None:
        samples = dict.fromkeys({step for step, _ in clock.phases}, options.per_step)
    facts = StepFacts(
        steps=steps,
        passes=measurement.passes,
        has_backward=measurement.has_backward,
        unknown_share=_measure_coverage(measurement).unknown_share,
        tokens=measurement.tokens,
        samples=samples,
        ideal=measurement.ideal,
        recomputed=measurement.recomputed,
    )
    return estimate_time(clock, facts)


def _make_timeline(measurement: Measurement, totals: DeviceTotals) -> MemoryTimeline:
    """The most of each stretch of events, so that no peak is lost. Its operator, step and phase are those of the last
    birth: the event of a death refers to its birth only."""
    stretch = max(1, len(measurement.events) // POINTS)
    live = dict.fromkeys(CATEGORIES, 0)
    seen: set[int] = set()
    line = MemoryTimeline(bytes={name: [] for name in CATEGORIES})
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
    return MemoryTimeline(line.operators, line.steps, line.phases, line.bytes, peak_index, spans)


def _find_spans(measurement: Measurement, totals: DeviceTotals, moments: list[int]) -> list[MemorySpan]:
    """Storages that were alive at points of the timeline, whose events are `moments`. One that died before the next point
    is in no span."""
    born: dict[int, int] = {}
    groups: dict[tuple[int, int, str, str, str], list[int]] = defaultdict(list)

    def close(record: MemoryRecord, death: int) -> None:
        start, end = bisect_left(moments, born.pop(id(record))), bisect_left(moments, death)
        if start < end:
            module = _find_module_path(record, measurement.places)
            key = (start, end, find_category(record, measurement), module, write_line(record.line))
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
        MemorySpan(start, end, sum(sizes), len(sizes), category, module, line)
        for (start, end, category, module, line), sizes in largest
    ]


def _add_point(line: MemoryTimeline, live: dict[str, int], latest: MemoryRecord) -> None:
    line.steps.append(latest.born.step)
    line.phases.append(latest.born.phase)
    for name, size in live.items():
        line.bytes[name].append(size)


GOES_ON = "after the first out-of-memory error the run continued without a limit; with --oom raise the script receives it"


def _list_assumptions(device: Device, margin: float, facts: RunFacts, goes_on: bool) -> list[str]:
    if device.kind == "cpu":
        on_cpu = "memory of CPU tensors; rounding, caches, Python and libraries are not counted"
        return [on_cpu, *facts.margins]
    return [
        f"memory outside of the allocator (context, kernels, libraries): {device.context_bytes / GiB:.2f} GiB",
        f"stated error of reserved memory: {margin:.1%} of it",
        *facts.margins,
        *((GOES_ON,) if goes_on else ()),
    ]


def _list_software(device: Device) -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if device.kind == "cuda":
        found["simulated"] = str(read_software())
    return found
