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
from understudy.simulation.events import CollectiveEvent, StreamEvent
from understudy.spec import TensorSpec
from understudy.spec.call import Call
from understudy.timing.attribution import COMMUNICATION, COPIES, INPUT
from understudy.timing.collectives import group_seconds
from understudy.timing.curves import Curve, Host
from understudy.timing.kernels import name_dtype, seconds_of
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
    """Of calls that are alike."""

    name: str
    device: int
    """Index of the card; -1: on the host."""
    kernels: tuple[KernelTime, ...]
    host: float
    """Seconds that the host takes to issue it, or, on the CPU, to compute it."""
    ideal: float = 0.0
    """Seconds of its products at the published peak of their dtypes."""
    recomputed: float = 0.0
    """Of these, the part in which it recomputes what the forward pass has computed."""

    @property
    def seconds(self) -> float:
        """Of its kernels."""
        return sum(kernel.seconds for kernel in self.kernels)


class RunClock:
    """The timeline of one run on cards of one kind."""

    def __init__(self, curve: Curve, per_node: int = 1) -> None:
        self.curve = curve
        self.per_node = per_node
        """Cards of a node, by which ranks are numbered."""
        self.timeline = Timeline()
        self.phases: dict[tuple[int, str], float] = defaultdict(float)
        """Seconds by step and phase."""
        self.ends: list[tuple[int, str, float, int]] = []
        """Step, phase, the time at which it was done, and the number of spans until then."""
        self.seconds_by_place: dict[tuple[Any, Any], float] = defaultdict(float)
        self.host_seconds: dict[int, float] = defaultdict(float)
        """Of issuing, by step."""
        self._streams: dict[int, int] = {}
        self._events: dict[int, float] = {}
        self._awaited: deque[float] = deque()
        """Ends of functional collectives that nothing has waited for yet."""
        self._pending = 0.0
        """The last end of asynchronous collectives."""

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
        timeline, streams = self.timeline, self._streams
        launch, places = timeline.launch, self.seconds_by_place
        factor = host_factor(self.curve.host, moment.phase)
        before = timeline.mark()
        is_placed = moment.phase != SETUP
        place: tuple[Any, Any] = (None, None)
        for position, label in enumerate(labels):
            birth = births.get(position)
            if birth is not None:
                place = birth[1], birth[2]
            kind_of_label = type(label)
            if kind_of_label is StreamEvent:
                self._follow(label)
                continue
            if kind_of_label is CollectiveEvent:
                self._communicate(label)
                continue
            _, device, kernels, host, _, _ = label.time
            if device < 0:
                timeline.work(host, INPUT if is_input else "host", label)
                continue
            if not kernels:
                timeline.host += host * factor
                continue
            stream = device, streams.get(device, 0)
            host *= factor
            if kernels[0].family == families.WAIT:
                timeline.wait(stream, self._awaited.popleft() if self._awaited else 0.0)
                continue
            for seconds, kind, _, is_blocking in kernels:
                launch(stream, seconds, host, kind, label)
                if is_placed:
                    places[place] += seconds
                host = 0.0
                if is_blocking:
                    timeline.synchronize(stream)
        self._wait_for_communication()
        after = timeline.mark()
        self.phases[moment.step, moment.phase] += after.done - before.done
        self.host_seconds[moment.step] += after.host - before.host
        self.ends.append((moment.step, moment.phase, after.done, len(timeline.spans)))

    def _communicate(self, event: CollectiveEvent) -> None:
        """On the communicator's own stream, after what the current one has so far. That one goes on beside it, until it
        waits: at once, at a `wait_tensor`, or, for what is asynchronous, at the end of the phase at the latest."""
        timeline = self.timeline
        stream = 0, self._streams.get(0, 0)
        seconds = group_seconds(event.kind, event.ranks, event.nbytes, self.curve.card, self.per_node)
        host = LAUNCHES_OF_COLLECTIVE * self.curve.host.kernel
        label = f"{event.kind} of {len(event.ranks)}"
        end = timeline.communicate(
            f"group {event.group}", stream, seconds, host, kind=COMMUNICATION, label=label
        )
        if event.is_functional:
            self._awaited.append(end)
        elif event.is_async:
            self._pending = max(self._pending, end)
        else:
            timeline.wait(stream, end)

    def _wait_for_communication(self) -> None:
        if self._pending:
            for device in {0, *self._streams}:
                self.timeline.wait((device, self._streams.get(device, 0)), self._pending)
            self._pending = 0.0

    def _follow(self, event: StreamEvent) -> None:
        timeline, stream = self.timeline, (event.device, event.stream)
        if event.kind == "select":
            self._streams[event.device] = event.stream
        elif event.kind == "record":
            self._events[event.event] = timeline.record(stream)
        elif event.kind == "wait":
            timeline.wait(stream, self._events.get(event.event, 0.0))
        elif event.kind == "host waits":
            timeline.wait_on_host(self._events.get(event.event, 0.0))
        elif event.stream < 0:
            timeline.synchronize()
        else:
            timeline.synchronize(stream)


def host_factor(host: Host, phase: str) -> float:
    """The part of the usual cost of a call in a phase."""
    return host.backward if phase == BACKWARD else host.optimizer if phase == OPTIMIZER else 1.0
