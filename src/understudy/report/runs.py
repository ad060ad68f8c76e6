"""`rehearse`: a function is called once on stand-ins, and measured.

    rehearsal = understudy.rehearse(train_step, model, batch, device="h100")
    rehearsal.verdict, rehearsal.peak.reserved_bytes, print(rehearsal)

`MeasuredRun` is what `rehearse` and `understudy run` share: a simulated machine with a measurement around some code.

    recorder = MeasuredRun("h100", options)
    with recorder:
        ...                          # the program
    rehearsal = recorder.rehearsal() # also after an exception
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from understudy.errors import UnderstudyError
from understudy.patching import Hold
from understudy.report.borrowed_state import borrow_state, make_stand_in
from understudy.report.isolation import add_isolation
from understudy.report.measurement import Measurement
from understudy.report.rehearsal import Rehearsal
from understudy.report.sanity import RunFacts
from understudy.report.summary import STATED_ERROR, VerdictOptions, summarise
from understudy.simulation.catalogue import Card
from understudy.simulation.libraries import adapt_path
from understudy.simulation.machine import Machine
from understudy.simulation.memory import MachineMemory, OnOOM
from understudy.simulation.network import CLUSTER
from understudy.simulation.sandbox import Sandbox, run_sandboxed
from understudy.simulation.simulator import find_device, simulate
from understudy.simulation.storages import ObservedMode
from understudy.simulation.workspaces import HostScratch
from understudy.spec.call import map_structure
from understudy.timing.clock import RunClock
from understudy.timing.curves import can_estimate, find_curve

CARDS_OF_NODE = 8
"""Assumed cards per node where one card of many is rehearsed, without LOCAL_WORLD_SIZE."""


@dataclass(frozen=True)
class RehearsalOptions:
    """`margin`: part of reserved memory within which a run is "tight". `context`: bytes outside of the allocator, instead
    of the catalogue's. `budget`: bytes that the run may reserve. `oom="raise"`: the program gets the error of the card.
    `settings`: instead of PYTORCH_CUDA_ALLOC_CONF. `answers`: the policy for data that is not there. For estimates of time,
    `host`: the kind of host that the card is in; `per_step`: samples per step, if the inputs of the model do not show
    them."""

    margin: float = STATED_ERROR
    context: int | None = None
    budget: int | None = None
    oom: OnOOM = "record"
    settings: str | None = None
    answers: Any = "plausible"
    host: str | None = None
    per_step: int | None = None


class MeasuredRun:
    """One measured run. `mode` is active inside; `facts` come from the runner."""

    def __init__(self, device: str | Card | None = None, options: RehearsalOptions | None = None) -> None:
        self.options = options or RehearsalOptions()
        self.card, self.count = _find_card(device)
        self.interconnect = (0.0, 0.0, 0.0)
        """Bandwidth inside of a node and between nodes; 0 for the catalogue's."""
        self.facts = RunFacts()
        self._run: Any = None
        self.machine: Machine | None = None
        """Where a card is simulated."""
        self.mode: ObservedMode
        self.memory: MachineMemory
        self.measurement: Measurement

    def __enter__(self) -> MeasuredRun:
        self._run = self._measure()
        self._run.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._run.__exit__(*exception)

    @contextmanager
    def _measure(self) -> Iterator[None]:
        with Hold() as hold, self._make_machine():
            adapt_path(hold)
            self.measurement = Measurement(self.mode, self._make_clock())
            self.mode.on_event = self.measurement.follow_event
            for device in self.memory.devices:
                device.find_place = self.measurement.places.describe
            if not self.memory.devices:
                self.mode.add_listener(HostScratch(self.mode))
            with self.measurement.listen():
                yield

    def _make_clock(self) -> RunClock | None:
        if self.card is None or not can_estimate(self.card):
            return None
        per_node = self.count if self.count > 1 else int(os.environ.get("LOCAL_WORLD_SIZE") or CARDS_OF_NODE)
        has_log = CLUSTER.peers is not None
        return RunClock(find_curve(self.card, self.options.host), per_node, has_log, *self.interconnect)

    @contextmanager
    def _make_machine(self) -> Iterator[None]:
        options = self.options
        if self.card is None:
            self.memory = MachineMemory()
            self.mode = ObservedMode(allow_non_fake_inputs=True, answers=options.answers)
            self.mode.add_listener(self.memory)
            with self.mode:
                try:
                    yield
                finally:
                    if self.mode.network is not None:
                        self.mode.network.end()
            return
        simulation = simulate(
            self.card, count=self.count, settings=options.settings, context=options.context, on_oom=options.oom,
            answers=options.answers,
        )  # fmt: skip
        with simulation as machine:
            self.machine, self.mode, self.memory = machine, machine.mode, machine.memory
            yield

    def rehearsal(self) -> Rehearsal:
        linecache.checkcache()  # source lines are those of the files as they are now
        # What was measured on the user's own card may widen the stated error, never narrow it.
        measured = self.card.error if self.card is not None else None
        options = VerdictOptions(
            max(self.options.margin, measured or 0.0), self.options.budget, self.options.per_step
        )
        if self.mode.answers is not None:
            self.facts.answers = [given.to_record() for given in self.mode.answers.given]
        if self.mode.network is not None:
            self.facts.assumptions += self.mode.network.notes
        if self.machine is not None:
            noted = self.facts.assumptions
            noted += [
                note for note in (*self.machine.notes, *_describe_unknowns(self.machine)) if note not in noted
            ]
        return summarise(self.measurement, self.memory, self.card, options, self.facts)


def _describe_unknowns(machine: Machine) -> Iterator[str]:
    if not machine.count:
        return
    if machine.scratch.unknown:
        name, bound = max(machine.scratch.unknown.items(), key=lambda item: item[1])
        yield (
            f"workspaces that cuDNN chooses for {', '.join(sorted(machine.scratch.unknown))} are not counted: at "
            f"most about {bound / (1 << 20):.0f} MiB during one call ({name})"
        )
    if machine.scratch.estimated:
        yield f"scratch memory is estimated for {', '.join(sorted(machine.scratch.estimated))}"


def _find_card(device: str | Card | None) -> tuple[Card | None, int]:
    card, count = (None, 1) if device is None else find_device(device)
    return (None, 1) if card is not None and card.kind == "cpu" else (card, count)


def rehearse(
    fn: Callable[..., object], *args: object, device: str | Card | None = None, options: RehearsalOptions | None = None,
    isolated: bool = False, **kwargs: object,
) -> Rehearsal:  # fmt: skip
    """Call `fn` once on stand-ins for a card that need not be here, and say what it takes.

        understudy.rehearse(step, model, optimizer, batch, device="h100")

    Real modules, gradients and optimizers that `fn` is given or holds are as before afterwards. Without a `device`, what
    the program allocates on the CPU is counted. `fn` runs in this process, and writes what it writes; with `isolated`, in a
    fork of it, in a sandbox.
    """
    run = functools.partial(_call_once, fn, args, kwargs, device, options)
    return _rehearse_isolated(run) if isolated else run()


def _call_once(
    fn: Callable[..., object],
    args: Any,
    kwargs: Any,
    device: str | Card | None,
    options: RehearsalOptions | None,
) -> Rehearsal:
    recorder = MeasuredRun(device, options)
    recorder.facts.program = name_function(fn)
    with recorder, borrow_state(recorder.mode, fn, args, kwargs):
        args, kwargs = map_structure(
            lambda tensor: make_stand_in(recorder.mode, tensor), torch.Tensor, (args, kwargs)
        )
        fn(*args, **kwargs)
    return recorder.rehearsal()


def name_function(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


class IsolationError(UnderstudyError, RuntimeError):
    """A rehearsal in a process of its own that was not possible, or has failed there."""


def _rehearse_isolated(rehearse_here: Callable[[], Rehearsal]) -> Rehearsal:
    others = threading.active_count() - 1
    if others or sys.platform != "linux":
        why = f"the process has other threads ({others})" if others else f"{sys.platform} has no namespaces"
        raise IsolationError(f"rehearse(isolated=True) can't fork this process safely: {why}")

    def run(sandbox: Sandbox) -> bytes:
        torch.set_num_threads(1)  # threads of the parent are not here
        try:
            found = {"rehearsal": rehearse_here().to_dict()}
        except Exception:
            found = {"error": {"text": traceback.format_exc()}}
        return json.dumps(found).encode()

    result = run_sandboxed(run)
    found = json.loads(result.data or b"{}")
    if "rehearsal" not in found:
        text = found["error"]["text"] if found else f"the process ended with {result.exit_code}"
        raise IsolationError(f"the rehearsal failed in its process:\n{text}")
    return add_isolation(Rehearsal.from_dict(found["rehearsal"]), result, {})
