"""The length of a walk through the code, in calls of Python functions: the same on every machine, where times are not.

A walk is counted in a process of its own: in this one, other tests may have left scopes of patches active.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import understudy

LIBRARY = str(Path(understudy.__file__).parent)
COUNT = """
import collections, json, sys

def count_calls(walk):
    for _ in range(3):
        walk()
    calls = collections.Counter()

    def notice(frame, event, argument):
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    sys.setprofile(notice)
    walk()
    sys.setprofile(None)
    return calls
"""


def count_in_new_process(setup: str, walk: str) -> dict[str, int]:
    """How many functions of Python a walk calls when it is made for the fourth time, by file."""
    code = f"{COUNT}\n{setup}\nprint(json.dumps(count_calls(lambda: {walk})))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    calls: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return calls


def test_symbolic_trace_of_three_modules() -> None:
    setup = """
import torch
from torch import nn
from understudy import symbolic_trace

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
examples = {"input": torch.randn(2, 4)}
"""
    assert sum(count_in_new_process(setup, "symbolic_trace(model, examples)").values()) <= 900


def test_capture_of_a_linear_layer() -> None:
    """Functions of the library alone."""
    setup = """
import torch
from understudy import make_fx

model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
"""
    calls = count_in_new_process(setup, "make_fx(model, tracing_mode='fake')(x)")
    own = [count for file, count in calls.items() if file.startswith(LIBRARY)]
    assert sum(own) <= 350 and len(own) <= 30, (sum(own), len(own))


def test_capture_of_an_optimizer_step() -> None:
    """All functions of Python, for each parameter of an optimizer that counts its steps."""
    setup = """
import torch
from understudy import capture_step

def calls_of(layers):
    model, x = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)]), torch.randn(2, 4)
    return lambda: capture_step(model, lambda y: y.sum(), torch.optim.AdamW(model.parameters()), x)

few, many = calls_of(2), calls_of(12)
"""
    few, many = (sum(count_in_new_process(setup, f"{name}()").values()) for name in ("few", "many"))
    assert (many - few) / 20 <= 1150, (few, many)


ADDITION = """
import sys, torch
from understudy import FakeTensorMode

def files_of_calls(walk):
    files = []

    def notice(frame, event, argument):
        if event == "call" and "understudy" in frame.f_globals.get("__name__", ""):
            files.append(frame.f_globals["__name__"])

    sys.setprofile(notice)
    walk()
    sys.setprofile(None)
    return files

with FakeTensorMode() as mode:
    x, y = torch.empty(3, 4), torch.empty(3, 4)
    x + y
    mode.cache_clear()
    cold = files_of_calls(lambda: x + y)
    print(len(cold), len(set(cold)), len(files_of_calls(lambda: x + y)))
"""


def test_addition_as_a_cache_miss_and_as_a_hit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADDITION], check=True, capture_output=True, text=True, timeout=120
    )
    cold, modules, warm = map(int, done.stdout.split())
    assert cold <= 40 and modules <= 12
    assert warm == 1
