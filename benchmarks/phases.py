"""What is timed: the phases of a model's life, in any mode, and how they are timed.

Both sides live in one process and take turns, so that what the machine does meanwhile hits both. Each phase
has a preparation, which is not timed, and a body, which is. Garbage collection is off while the clock runs, which counts
processor time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import Workload


@dataclass(frozen=True)
class Side:
    """One of the two stand-in tensor implementations."""

    name: str
    mode_class: Any

    def cache_clear(self) -> None:
        self.mode_class.cache_clear()


@dataclass
class Subject:
    """A workload on one side, built once, with its inputs and its optimizer."""

    workload: Workload
    side: Side
    mode: Any = None
    model: Any = None
    inputs: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None

    def set_up(self) -> None:
        self.mode = self.side.mode_class()
        with self.mode:
            self.model = self.workload.build()
            self.inputs = self.workload.inputs()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def construct(self) -> Any:
        with self.side.mode_class():
            return self.workload.build()

    def construct_on_device(self) -> Any:
        with self.side.mode_class(), torch.device("cpu"):
            return self.workload.build()

    def forward(self) -> Any:
        with self.mode, torch.no_grad():
            return self.model(**self.inputs)

    def train(self) -> Any:
        with self.mode:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.workload.loss(self.model(**self.inputs), self.inputs)
            loss.backward()
            self.optimizer.step()
            return loss


@dataclass(frozen=True)
class PhaseKind:
    name: str
    about: str
    target: float  # how many times faster than torch we want to be
    prepare: Callable[[Subject], object]
    body: Callable[[Subject], object]


def clear_cache(subject: Subject) -> None:
    subject.side.cache_clear()


def nothing(subject: Subject) -> None:
    pass


WARM, ON_DEVICE = "forward warm", "construction, torch.device"
PHASES = (
    PhaseKind("construction", "building the model, empty cache", 4.5, clear_cache, Subject.construct),
    PhaseKind(
        ON_DEVICE, "the same inside of torch.device(...)", 4.5, clear_cache, Subject.construct_on_device
    ),
    PhaseKind("forward cold", "no_grad, empty cache", 11.0, clear_cache, Subject.forward),
    PhaseKind(WARM, "no_grad, cache filled", 10.0, nothing, Subject.forward),
    PhaseKind("train step", "forward, backward, AdamW; cache filled", 10.0, nothing, Subject.train),
)


@dataclass(frozen=True)
class Budget:
    """How often to repeat: at least, at most, and until this much time is used for both sides together."""

    least: int
    most: int
    seconds: float


@contextmanager
def quiet_process() -> Iterator[None]:
    """One thread, no garbage collection in between."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def once(phase: PhaseKind, subject: Subject) -> float:
    phase.prepare(subject)
    gc.collect()
    start = time.process_time()
    kept = phase.body(subject)
    elapsed = time.process_time() - start
    del kept  # after the clock has stopped
    return elapsed


def take_turns(phase: PhaseKind, subjects: list[Subject], budget: Budget) -> list[float]:
    """Median seconds of each subject. The first round warms up; who begins changes with every round."""
    times: list[list[float]] = [[] for _ in subjects]
    with quiet_process():
        for subject in subjects:
            once(phase, subject)
        begin = time.perf_counter()
        for round_number in range(budget.most):
            order = range(len(subjects)) if round_number % 2 == 0 else reversed(range(len(subjects)))
            for position in order:
                times[position].append(once(phase, subjects[position]))
            if round_number + 1 >= budget.least and time.perf_counter() - begin > budget.seconds:
                break
    return [statistics.median(t) for t in times]


class CountOperators(TorchDispatchMode):
    """Counts the operators that reach the mode below it; asking a tensor for its device is none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.prim.device.default
        return func(*args, **(kwargs or {}))


def count_operators(phase: PhaseKind, subject: Subject) -> int:
    """How many operators the phase calls: counted apart from timing. Counts above the subject's own mode."""
    counter = CountOperators()
    entered = subject.mode
    subject.mode = _Stacked(entered, counter)
    try:
        if phase.body in (Subject.construct, Subject.construct_on_device):
            with subject.mode:
                subject.workload.build()
        else:
            phase.body(subject)
    finally:
        subject.mode = entered
    return counter.count


class _Stacked:
    """Two modes as one context manager."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.inner.__exit__(*exception)
        self.outer.__exit__(*exception)


# --- the floor: what a forward pass costs if every operator's result is there already -----------------------------------

SECONDS_FOR_A_TENSOR = 1.2e-6
"""The least that torch takes to make a tensor without data."""


class RecordResults(TorchDispatchMode):
    """Keeps for each call a result that autograd has not seen yet, so that it can be handed out in another run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, result if func._schema.is_mutable else func(*args, **(kwargs or {}))))
        return result


class HandOutResults(TorchDispatchMode):
    """Answers each call with what is ready. A `detach` that torch adds by itself is given any tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else a layer that costs more than the dispatch is put around it

    def __init__(self, calls: list[tuple[Any, Any]], spare: torch.Tensor) -> None:
        super().__init__()
        self.calls, self.spare, self.position = calls, spare, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        expected, result = self.calls[self.position]
        if func is not expected:
            return self.spare
        self.position += 1
        return result


def measure_floor(subject: Subject, turns: int) -> tuple[float, float]:
    """Seconds of a warm forward pass, and of the same program where all results are ready: the least of some turns."""
    phase = next(phase for phase in PHASES if phase.name == WARM)
    forwards, floors = [], []
    with quiet_process():
        for _ in range(turns):
            forwards.append(once(phase, subject))
            recorder = RecordResults()
            with subject.mode, torch.no_grad(), recorder:
                subject.model(**subject.inputs)
                spare = torch.empty(1)
            ready = HandOutResults(recorder.calls, spare)
            begin = time.process_time()
            with subject.mode, torch.no_grad(), ready:
                subject.model(**subject.inputs)
            bare = time.process_time() - begin
            results = [
                part for _, result in recorder.calls for part in torch.utils._pytree.tree_leaves(result)
            ]
            tensors = sum(isinstance(part, torch.Tensor) for part in results)
            floors.append(bare + tensors * SECONDS_FOR_A_TENSOR)
    return min(forwards), min(floors)
