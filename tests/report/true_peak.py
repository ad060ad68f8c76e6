"""The true peak of a program on the CPU: a replay of every allocation and free that torch's profiler has seen.

oneDNN is off, unless it is asked for: on processors with instructions for bfloat16 its matrix products take scratch memory, an amount that depends on
the processor and on the number of threads, and that no operator shows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def true_peak(program: Callable[[], object], uses_onednn: bool = False) -> int:
    onednn = torch.backends.mkldnn.flags(enabled=uses_onednn)
    with onednn, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        program()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recorded.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = json.load(trace)["traceEvents"]
    live = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak
