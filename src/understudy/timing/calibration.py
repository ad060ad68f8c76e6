"""Corrections of a card's curves from a real run on it.

    speed_from_step(time, 0.412)              how much faster all kernels of the card are than its curves say
    read_profile("trace.json")                seconds of kernels by operator, from a trace of torch.profiler
    speeds_from_profile(profile, operators)   the same for each family, against a rehearsal of that program

This module imports no torch until a profile is compared.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from understudy.errors import UnderstudyError
from understudy.timing.attribution import INPUT, LAUNCHES
from understudy.timing.step_time import TimeEstimate

LEAST, MOST = 0.2, 5.0
"""Corrections beyond these are rejected: the profile belongs to another run."""
LEAST_SECONDS = 1e-4
"""The least time of a family in a profile for a correction."""


class CalibrationError(UnderstudyError, ValueError):
    """A run that can't be compared with its rehearsal."""


class OperatorSeconds(Protocol):
    """A row of a rehearsal's table of operators."""

    @property
    def operator(self) -> str: ...
    @property
    def calls(self) -> int: ...
    @property
    def timed_calls(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class ProfiledOperator(NamedTuple):
    calls: int
    seconds: float
    """Time of the kernels that it launched."""


def speed_from_step(time: TimeEstimate, seconds: float) -> float:
    """The speed of all families, by the time of one real step. What the host takes is left as it is."""
    on_host = sum(time.bound_by.get(name, 0.0) for name in (LAUNCHES, INPUT)) * time.seconds_per_step
    on_card = time.seconds_per_step - on_host
    if seconds <= on_host or on_card <= on_host:
        raise CalibrationError(
            f"the step is bound by the host ({on_host:.3g} of {time.seconds_per_step:.3g} s), not by the card; "
            "calibrate with a larger batch, or choose another --host"
        )
    return _check(on_card / (seconds - on_host))


def _check(speed: float) -> float:
    if not LEAST <= speed <= MOST:
        raise CalibrationError(
            f"the card would be {speed:.2g} times as fast as its curves: expected {LEAST} to {MOST}; "
            "is it the same program on the same card?"
        )
    return speed


def read_profile(path: str | Path) -> dict[str, ProfiledOperator]:
    """From a Chrome trace of torch.profiler (`export_chrome_trace`): by the name of the operator, `aten::mm`."""
    events = _read_events(Path(path))
    operators: dict[Any, str] = {}
    calls: dict[str, set[Any]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    kernels = []
    for event in events:
        arguments = event.get("args") or {}
        number = arguments.get("External id")
        if event.get("cat") == "cpu_op" and number is not None:
            operators[number] = str(event.get("name"))
        elif event.get("cat") == "kernel" and number is not None:
            kernels.append((number, float(event.get("dur", 0)) * 1e-6))
    for number, duration in kernels:
        name = operators.get(number)
        if name is not None:
            calls[name].add(number)
            seconds[name] += duration
    if not seconds:
        raise CalibrationError(
            f"{path} has no kernels with their operators: record it with activities=[CPU, CUDA] and export_chrome_trace"
        )
    return {name: ProfiledOperator(len(calls[name]), seconds[name]) for name in seconds}


def _read_events(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        found = json.loads(data)
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise CalibrationError(f"{path}: expected a Chrome trace, got a file that is not JSON") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise CalibrationError(f"{path}: expected a Chrome trace, got JSON without a list of traceEvents")
    return [event for event in events if isinstance(event, dict)]


def speeds_from_profile(
    profile: Mapping[str, ProfiledOperator], rows: Iterable[OperatorSeconds]
) -> dict[str, float]:
    """By family: seconds that the curves give for its calls in the profile, over those that the profile has. Calls of one
    operator are taken to have the same mix of sizes in both."""
    # why: the registry of operators imports torch
    from understudy.ops.traits.kernel_families import families_of

    expected: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for row in rows:
        name = f"aten::{row.operator.removeprefix('aten.').partition('.')[0]}"
        found = profile.get(name)
        calls = row.timed_calls or row.calls  # files of older versions have the latter only
        if found is None or not row.seconds or not calls:
            continue
        for family in families_of(name):
            expected[family] += found.calls * row.seconds / calls
            measured[family] += found.seconds
    speeds = {
        family: expected[family] / measured[family]
        for family in measured
        if measured[family] >= LEAST_SECONDS
    }
    if not speeds:
        raise CalibrationError("the profile and the rehearsal have no operator in common")
    return {family: _check(speed) for family, speed in speeds.items()}
