"""The calls of a program, in order: rehearsed once on stand-ins, then kept in a temporary folder.

stream = read_stream(row, folder)      rehearses if it has to
stream.calls                           distinct calls: operator, arguments with specs, results
stream.passes                          for each pass of the program: [(phase, [index of call, …]), …]
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # its operators

from tools.fit_kernels.programs import describe_program, make_program
from understudy.report.runs import MeasuredRun
from understudy.simulation.events import specs_of_call
from understudy.spec import TensorSpec
from understudy.spec.call import Call, map_structure


@dataclass
class Stream:
    calls: list[tuple[str, Any, Any, Any]]
    """Name of the operator, arguments, keyword arguments, specs of results; specs as `PlainSpec`."""
    moments: list[tuple[int, str, list[int]]]
    """Step, phase, indices of calls."""


@dataclass(frozen=True)
class PlainSpec:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


def simplify(spec: TensorSpec) -> PlainSpec:
    return PlainSpec(tuple(spec.shape), tuple(spec.stride), spec.dtype, str(spec.device))


def restore(stored: tuple[str, Any, Any, Any]) -> tuple[Call, list[TensorSpec]]:
    def make(spec: PlainSpec) -> TensorSpec:
        return TensorSpec(spec.shape, spec.stride, dtype=spec.dtype, device=torch.device(spec.device))

    name, args, kwargs, results = stored
    args, kwargs, results = map_structure(make, PlainSpec, (args, kwargs, results))
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return Call.of(op, args, kwargs), results


def keep_plain(value: Any) -> Any:
    """Objects that can't be pickled are of no interest."""
    plain = (int, float, bool, str, type(None), torch.dtype, torch.device, PlainSpec, torch.memory_format)
    if isinstance(value, (list, tuple)):
        return type(value)(keep_plain(part) for part in value)
    if isinstance(value, dict):
        return {name: keep_plain(part) for name, part in value.items()}
    return value if isinstance(value, plain) else None


def read_stream(row: dict[str, Any], folder: Path) -> Stream:
    name = hashlib.sha256(repr((describe_program(row), row["card"])).encode()).hexdigest()[:20]
    path = folder / f"{name}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    stream = rehearse_stream(row)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(stream))
    return stream


def rehearse_stream(row: dict[str, Any]) -> Stream:
    recorder = MeasuredRun(row.get("device", row["card"]))
    calls: list[Any] = []
    numbers: dict[int, int] = {}
    moments: list[tuple[int, str, list[int]]] = []
    kept: list[Any] = []
    program = make_program(row)
    with recorder:
        measurement = recorder.measurement
        label, end = measurement.label_plan, measurement._end_moment

        def label_plan(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
            totals = label(func, args, kwargs, result)
            if id(totals) not in numbers:
                call, results = specs_of_call(func, args, kwargs, result)
                numbers[id(totals)] = len(calls)
                kept.append(totals)
                stored = map_structure(simplify, TensorSpec, (call.args, call.kwargs, results))
                op = func._schema.name + ("." + func._overloadname)
                calls.append((op, *keep_plain(stored)))
            return totals

        def end_moment(moment: Any) -> None:
            finished = [numbers[id(label)] for label in recorder.mode.finished if id(label) in numbers]
            if finished:
                moments.append((moment.step, moment.root_calls, moment.phase, finished))
            end(moment)

        measurement.label_plan = label_plan
        measurement._end_moment = end_moment
        measurement.places.on_moment_end = end_moment
        program()
    return Stream(calls, moments)
