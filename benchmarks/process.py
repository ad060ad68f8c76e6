"""What takes a fresh process to measure: import time, memory of one tensor, the size of a large model."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

IMPORT = """
import time, json
import torch
start = time.perf_counter()
from {module} import FakeTensorMode
print(json.dumps(time.perf_counter() - start))
"""

TENSORS = """
import gc, json
import psutil
from {module} import FakeTensorMode
import torch

def held():
    gc.collect()
    return psutil.Process().memory_info().rss

count = 50_000
with FakeTensorMode():
    warm = [{make} for i in range(100)]
    before = held()
    kept = [{make} for i in range(count)]
    print(json.dumps((held() - before) / count))
"""

LARGE = """
import json, time
import psutil
import torch
from {module} import FakeTensorMode
from examples.llama import SIZES, Llama
before = psutil.Process().memory_info().rss
start = time.perf_counter()
with FakeTensorMode():
    model = Llama(SIZES["405b"])
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "bytes": psutil.Process().memory_info().rss - before,
                  "parameters": sum(p.numel() for p in model.parameters())}}))
"""


def answer_of(program: str) -> Any:
    """Run a program in a fresh interpreter; its last line of output is JSON."""
    # An installed package has its bytecode: so must this one, whatever the shell around says.
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=surroundings)
    if done.returncode:
        raise RuntimeError(f"a measurement failed:\n{program}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def import_seconds(module: str, repeats: int) -> float:
    """Time of `import module` beyond `import torch`."""
    return statistics.median(answer_of(IMPORT.format(module=module)) for _ in range(repeats))


def bytes_per_tensor(module: str) -> dict[str, float]:
    kinds = {"one shape": "torch.empty(4, 4)", "many shapes": "torch.empty(4, i + 1)"}
    return {kind: answer_of(TENSORS.format(module=module, make=make)) for kind, make in kinds.items()}


def large_model(module: str) -> dict[str, float]:
    """Building a model of 405 billion parameters."""
    answer: dict[str, float] = answer_of(LARGE.format(module=module))
    return answer
