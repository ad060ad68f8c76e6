"""The time of a step from the clock of a run: which steps count, what bounds them, how wide the interval is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, hypot

from understudy.timing.attribution import COMMUNICATION, INPUT, LAUNCHES, attribute
from understudy.timing.clock import ATTENTION, EVALUATION, SETUP, RunClock
from understudy.timing.step_time import TimeEstimate, TimeTrace
from understudy.timing.timeline import HOST, Span

HOST_ERROR = 0.6
"""Logarithm of the factor by which hosts differ from the one that is assumed, 90% of them."""
COMMUNICATION_ERROR = 0.5
"""The same of communication that nothing runs beside, and of waiting for other ranks."""
ATTENTION_ERROR = 0.4
"""The same of fused attention in training, with kernels that no measured step had."""
UNKNOWN_ERROR = 0.7
"""The same of kernels whose family is not known."""
MOST_SPANS = 20_000
"""In a trace: the longest."""
SHOWN = {COMMUNICATION: "exposed communication", HOST: LAUNCHES}


@dataclass
class StepFacts:
    """What the measurement knows of a run beside its calls."""

    steps: int = 0
    """That were completed."""
    passes: int = 0
    """Calls of models from outside."""
    has_backward: bool = False
    unknown_share: float = 0.0
    tokens: Mapping[int, int] = field(default_factory=dict)
    """In the inputs of a model, by step."""
    samples: Mapping[int, int] = field(default_factory=dict)
    ideal: Mapping[int, float] = field(default_factory=dict)
    """Seconds of all products at the published peak, by step."""
    recomputed: Mapping[int, float] = field(default_factory=dict)
    """The part of these in which the forward pass is recomputed."""


def estimate_time(clock: RunClock, facts: StepFacts) -> TimeEstimate | None:
    chosen = choose_steps(facts.steps, {step for step, _ in clock.phases})
    count = len(chosen) if facts.steps else max(1, facts.passes)
    phases: dict[str, float] = defaultdict(float)
    for (step, phase), seconds in clock.phases.items():
        if step in chosen and is_counted(phase):
            phases[phase] += seconds / count
    seconds = sum(phases.values())
    if seconds <= 0:
        return None
    windows = find_windows(clock, chosen)
    shares: dict[str, float] = defaultdict(float)
    card_seconds = 0.0
    for start, end, spans in windows:
        for kind, part in attribute(spans, start, end).items():
            shares[SHOWN.get(kind, kind)] += part / (count * seconds)
        card_seconds += sum(span.seconds for span in spans if span.clock != HOST) / count
    per_step = {
        name: sum(table.get(step, 0) for step in chosen) / count for name, table in _tables(facts).items()
    }
    error = stated_error(clock, facts, shares)
    return TimeEstimate(
        seconds_per_step=seconds,
        low_seconds=seconds * exp(-error),
        high_seconds=seconds * exp(error),
        per="step" if facts.steps else "pass",
        steps=count,
        mfu=(per_step["ideal"] - per_step["recomputed"]) / seconds,
        hfu=per_step["ideal"] / seconds,
        tokens_per_second=per_step["tokens"] / seconds if per_step["tokens"] else None,
        samples_per_second=per_step["samples"] / seconds if per_step["samples"] else None,
        bound_by=dict(sorted(shares.items(), key=lambda item: -item[1])),
        phases=dict(phases),
        card_seconds=card_seconds,
        host_seconds=sum(clock.host_seconds[step] for step in chosen) / count,
        evaluation_seconds=sum(s for (_, phase), s in clock.phases.items() if phase == EVALUATION),
        host=clock.curve.host.name,
        source=clock.curve.source,
        is_measured=clock.curve.is_measured,
        trace=make_trace(windows[-1:]),
    )


def _tables(facts: StepFacts) -> dict[str, Mapping[int, float]]:
    return {
        "ideal": facts.ideal,
        "recomputed": facts.recomputed,
        "tokens": facts.tokens,
        "samples": facts.samples,
    }


def is_counted(phase: str) -> bool:
    return phase not in (SETUP, EVALUATION)


def choose_steps(steps: int, present: set[int]) -> set[int]:
    """The steps that count, by number. Of several, the first one is left out: it makes the state of the optimizer. A step
    that did not end is in none. Without an optimizer, all that is `present` counts."""
    if not steps:
        return present
    return set(range(1 if steps > 1 else 0, steps))


def find_windows(clock: RunClock, chosen: set[int]) -> list[tuple[float, float, Sequence[Span]]]:
    """Stretches of time of the steps that count, with the spans in them: all that is issued in a phase ends in it."""
    windows: list[tuple[float, float, Sequence[Span]]] = []
    since, first = 0.0, 0
    opened: tuple[float, int] | None = None
    for step, phase, done, last in clock.ends:
        if step in chosen and is_counted(phase):
            opened = opened or (since, first)
        elif opened is not None:
            windows.append((opened[0], since, clock.timeline.spans[opened[1] : first]))
            opened = None
        since, first = done, last
    if opened is not None:
        windows.append((opened[0], since, clock.timeline.spans[opened[1] : first]))
    return windows


def stated_error(clock: RunClock, facts: StepFacts, shares: Mapping[str, float]) -> float:
    """Logarithm of the factor that 90% of steps lie within: from the card's curves, the host's time, and kernels without a
    known family."""
    kind = "training" if facts.has_backward else "inference"
    on_host = shares.get(LAUNCHES, 0.0) + shares.get(INPUT, 0.0)
    exposed = shares.get(SHOWN[COMMUNICATION], 0.0)
    attention = shares.get(ATTENTION, 0.0) if facts.has_backward else 0.0
    return hypot(
        clock.curve.error[kind], HOST_ERROR * on_host, COMMUNICATION_ERROR * exposed, ATTENTION_ERROR * attention,
        UNKNOWN_ERROR * facts.unknown_share,
    )  # fmt: skip


def make_trace(windows: Sequence[tuple[float, float, Sequence[Span]]]) -> TimeTrace:
    trace = TimeTrace()
    clocks: dict[object, int] = {}
    names: dict[str, int] = {}
    for start, _, spans in windows:
        chosen = list(spans)
        if len(chosen) > MOST_SPANS:
            least = sorted((span.seconds for span in chosen), reverse=True)[MOST_SPANS]
            chosen = [span for span in chosen if span.seconds > least]
        clocks.setdefault(HOST, 0)
        for span in chosen:
            call = getattr(span.label, "time", None)
            name = call.name if call else span.label if isinstance(span.label, str) else span.kind
            times = [(span.clock, span.start, span.seconds)]
            if span.issuing:
                times.append((HOST, span.issued - span.issuing, span.issuing))
            for clock, begin, seconds in times:
                trace.clocks.append(clocks.setdefault(clock, len(clocks)))
                trace.names.append(names.setdefault(name, len(names)))
                trace.starts.append(round(1e6 * (begin - start), 3))
                trace.durations.append(round(1e6 * seconds, 3))
    trace.clock_names.extend(_name_clock(clock) for clock in clocks)
    trace.span_names.extend(names)
    return trace


def _name_clock(clock: object) -> str:
    if isinstance(clock, tuple):
        device, stream = clock
        return f"cuda:{device}" + (f", stream {stream}" if stream else "")
    return str(clock)
