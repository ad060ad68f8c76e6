"""The times of a run: calls that were recorded, in order, are replayed on a timeline.

    clock = RunClock(find_curve(card))
    label.time = clock.describe(call, results)       once for all calls that are alike
    clock.take(moment, labels, births)               at the end of each phase: its calls, in order
    clock.phases                                     seconds of each phase of each step
    clock.seconds_by_place                           seconds of kernels, by module and line

A phase ends on the timeline when all that it has issued is done. So the phases of a step add up to its time, also where the
host is ahead of the card.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from understudy.ops.traits import kernel_families as families
from understudy.ops.traits.kernel_families import describe_kernels
from understudy.simulation.events import CollectiveEvent, StreamEvent, WaitEvent
from understudy.spec import TensorSpec
from understudy.spec.call import Call
from understudy.timing.attribution import COMMUNICATION, COPIES, INPUT
from understudy.timing.collectives import POINT_TO_POINT, group_seconds
from understudy.timing.curves import Curve, Host
from understudy.timing.kernels import name_dtype, seconds_of
from understudy.timing.rank_logs import (
    Awaited,
    EventWait,
    LoggedCollective,
    PhaseEnd,
    RankLog,
    Recorded,
    Synchronized,
)
from understudy.timing.timeline import Timeline

PRODUCTS, CONVOLUTIONS, ATTENTION, MEMORY = "products", "convolutions", "attention", "memory"
KINDS: Mapping[str, str] = {
    families.MATMUL: PRODUCTS, families.CONVOLUTION: CONVOLUTIONS, families.GROUPED: CONVOLUTIONS,
    families.DEPTHWISE: CONVOLUTIONS, families.ATTENTION: ATTENTION, families.ATTENTION_BACKWARD: ATTENTION,
    families.TO_CARD: COPIES, families.TO_HOST: COPIES,
}  # fmt: skip
"""What a family counts as in the sum of what bounds a step; other families move bytes."""
SETUP, BACKWARD, OPTIMIZER, EVALUATION = "setup", "backward", "optimizer", "evaluation"


LAUNCHES_OF_COLLECTIVE = 4
"""What a collective costs the host, in calls of operators."""


class KernelTime(NamedTuple):
    seconds: float
    kind: str
    family: str
    is_blocking: bool


class CallTime(NamedTuple):
    """The time of identical calls."""

    name: str
    device: int
    """Index of the card; -1: on the host."""
    kernels: tuple[KernelTime, ...]
    host: float
    """Seconds that the host takes to issue it, or, on the CPU, to compute it."""
    ideal: float = 0.0
    """Seconds of its products at the published peak of their dtypes."""
    recomputed: float = 0.0
    """The part of these in which the forward pass is recomputed."""

    @property
    def seconds(self) -> float:
        """Time of its kernels."""
        return sum(kernel.seconds for kernel in self.kernels)


class RunClock:
    """The timeline of one run on cards of one kind. `has_log`: what other ranks wait for is kept, to be replayed with
    them. `within`, `between`, `latency`: as of `group_seconds`."""

    def __init__(
        self,
        curve: Curve,
        per_node: int = 1,
        has_log: bool = False,
        within: float = 0.0,
        between: float = 0.0,
        latency: float = 0.0,
    ) -> None:
        self.within, self.between, self.latency = within, between, latency
        self.curve = curve
        self.per_node = per_node
        """Cards of a node, by which ranks are numbered."""
        self.log = RankLog() if has_log else None
        self.timeline = Timeline()
        self.phases: dict[tuple[int, str], float] = defaultdict(float)
        """Seconds by step and phase."""
        self.ends: list[tuple[int, str, float, int]] = []
        """Step, phase, the time at which it was done, and the number of spans until then."""
        self.seconds_by_place: dict[tuple[Any, Any], float] = defaultdict(float)
        self.setup: dict[str, tuple[int, float]] = {}
        """Calls with kernels before the first pass, and their seconds, by operator."""
        self.host_seconds: dict[int, float] = defaultdict(float)
        """Time of issuing calls, by step, without what the host waits for."""
        self._streams: dict[int, int] = {}
        self._events: dict[int, float] = {}
        self._awaited: deque[tuple[float, int]] = deque()
        """Ends of functional collectives that nothing has waited for yet, and their numbers."""
        self._pending: dict[int, tuple[float, bool, int]] = {}
        """Asynchronous collectives that nothing has waited for yet, by number: end, whether it is a message, card."""

    def describe(self, call: Call, results: Iterable[TensorSpec], flops: int = 0) -> CallTime:
        """`flops`: of its products, as they are counted in reports."""
        made = list(results)
        curve, host = self.curve, self.curve.host
        name = str(call.op)
        cards = [spec.device for spec in (*made, *call.inputs) if spec.device.type == "cuda"]
        kernels = describe_kernels(call, made)
        if not cards:
            moved = sum(kernel.bytes for kernel in kernels)
            return CallTime(name, -1, (), host.view + moved / host.bandwidth)
        times = tuple(
            KernelTime(
                seconds_of(kernel, curve), KINDS.get(kernel.family, MEMORY), kernel.family, kernel.is_blocking
            )
            for kernel in kernels
        )
        ideal = flops / curve.peak(name_dtype(kernels[0])) if flops and kernels else 0.0
        is_attention = bool(kernels) and kernels[0].family == families.ATTENTION_BACKWARD
        recomputed = ideal / 5 if is_attention else 0.0  # one of its five products
        return CallTime(
            name, cards[0].index or 0, times, host.kernel if times else host.view, ideal, recomputed
        )

    def take(
        self, moment: Any, labels: Iterable[Any], births: Mapping[int, tuple[Any, Any, Any]], is_input: bool
    ) -> None:
        """`labels` have a `time`, or are a StreamEvent. `births`: by position in `labels`, where memory was born; a call
        without any belongs to the place of the one before it."""
        before = self.timeline.mark()
        factor = host_factor(self.curve.host, moment.phase)
        is_placed = moment.phase != SETUP
        place: tuple[Any, Any] = (None, None)
        issued = 0.0
        for position, label in enumerate(labels):
            birth = births.get(position)
            if birth is not None:
                place = birth[1], birth[2]
            kind = type(label)
            if kind is StreamEvent:
                self._follow(label)
            elif kind is CollectiveEvent:
                issued += self._communicate(label)
            elif kind is WaitEvent:
                self._wait_for_work(label)
            else:
                issued += self._issue(label, factor, is_input, place if is_placed else None)
        self._wait_for_communication()
        if self.log is not None:
            self.log.add(PhaseEnd(moment.step, moment.phase))
        after = self.timeline.mark()
        self.phases[moment.step, moment.phase] += after.done - before.done
        self.host_seconds[moment.step] += issued
        self.ends.append((moment.step, moment.phase, after.done, len(self.timeline.spans)))

    def _issue(self, label: Any, factor: float, is_input: bool, place: tuple[Any, Any] | None) -> float:
        """One call of an operator; returns the time of the host. The seconds of its kernels belong to `place`."""
        timeline, log = self.timeline, self.log
        name, device, kernels, host, _, _ = label.time
        if device < 0:
            timeline.work(host, INPUT if is_input else "host", label)
            if log is not None:
                log.work(host)
            return host
        issued = host = host * factor
        if not kernels:
            timeline.host += host
            if log is not None:
                log.work(host)
            return issued
        if place is None:
            count, known = self.setup.get(name, (0, 0.0))
            self.setup[name] = count + 1, known + label.time.seconds
        stream = device, self._streams.get(device, 0)
        if kernels[0].family == families.WAIT:
            if self._awaited:
                self._wait_for(stream, *self._awaited.popleft())
            return issued
        for seconds, kind, _, is_blocking in kernels:
            timeline.launch(stream, seconds, host, kind, label)
            if log is not None:
                log.launch(stream, seconds, host)
            if place is not None:
                self.seconds_by_place[place] += seconds
            host = 0.0
            if is_blocking:
                timeline.synchronize(stream)
                if log is not None:
                    log.add(Synchronized(stream))
        return issued

    def _wait_for_work(self, event: WaitEvent) -> None:
        if event.number in self._pending:
            stream = event.device, self._streams.get(event.device, 0)
            self._wait_for(stream, self._pending.pop(event.number)[0], event.number)

    def _communicate(self, event: CollectiveEvent) -> float:
        """What it costs the host. It runs on the communicator's own stream, after what the current one has so far. That one
        goes on beside it, until it waits: at once, at a `wait_tensor`, at `work.wait()`, or, for what nothing waits for but
        a message, at the end of the phase."""
        timeline = self.timeline
        stream = event.device, self._streams.get(event.device, 0)
        is_waited = not (event.is_functional or event.is_async)
        is_message = event.kind in POINT_TO_POINT
        collective = LoggedCollective(
            event.kind,
            event.group,
            event.ranks,
            event.nbytes,
            stream,
            event.number,
            event.peer,
            event.tag,
            is_waited,
        )
        host = LAUNCHES_OF_COLLECTIVE * self.curve.host.kernel
        if self.log is not None:
            self.log.work(host)
            self.log.add(collective)
        # Messages of one pair and direction follow each other; those of different pairs do not.
        clock = f"group {event.group}" + (f", {event.kind} {event.peer}" if is_message else "")
        label = f"{event.kind} of {len(event.ranks)}"
        end = timeline.communicate(
            clock, stream, self.seconds_of(collective), host, kind=COMMUNICATION, label=label
        )
        if event.is_functional:
            self._awaited.append((end, event.number))
        elif event.is_async:
            self._pending[event.number] = end, is_message, event.device
        else:
            timeline.wait(stream, end)
        return host

    def seconds_of(self, collective: LoggedCollective) -> float:
        """Time of a collective, once all of its ranks have arrived."""
        return group_seconds(
            collective.kind, collective.ranks, collective.nbytes, self.curve.card, self.per_node, self.within,
            self.between, self.latency,
        )  # fmt: skip

    def _wait_for(self, stream: tuple[int, int], end: float, number: int) -> None:
        self.timeline.wait(stream, end)
        if self.log is not None:
            self.log.add(Awaited(stream, number))

    def _wait_for_communication(self) -> None:
        for number, (end, is_message, device) in list(self._pending.items()):
            if not is_message:
                self.timeline.wait((device, self._streams.get(device, 0)), end)
                del self._pending[number]

    def _follow(self, event: StreamEvent) -> None:
        timeline, log, stream = self.timeline, self.log, (event.device, event.stream)
        if event.kind == "select":
            self._streams[event.device] = event.stream
            return
        if event.kind == "record":
            self._events[event.event] = timeline.record(stream)
            entry: Any = Recorded(event.event, stream)
        elif event.kind == "wait":
            timeline.wait(stream, self._events.get(event.event, 0.0))
            entry = EventWait(event.event, stream)
        elif event.kind == "host waits":
            timeline.wait_on_host(self._events.get(event.event, 0.0))
            entry = EventWait(event.event, None)
        elif event.stream < 0:
            timeline.synchronize()
            entry = Synchronized(None)
        else:
            timeline.synchronize(stream)
            entry = Synchronized(stream)
        if log is not None:
            log.add(entry)


def host_factor(host: Host, phase: str) -> float:
    """The part of the usual cost of a call in a phase."""
    return host.backward if phase == BACKWARD else host.optimizer if phase == OPTIMIZER else 1.0
