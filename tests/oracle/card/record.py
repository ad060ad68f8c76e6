"""Runs cases on the card of this process, the runtime without a card or the simulated one, and writes down
what the allocator was asked for.

    python -m tests.oracle.card.record real|simulated GROUP OUT.json [NAME ...]
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_EVENTS = {"alloc": "+", "free_completed": "-"}


GROUPS = {
    "operators": "operator_cases", "models": "model_cases", "decoders": "decoder_cases", "training": "training_cases",
    "programs": "program_cases",
}  # fmt: skip


def find_cases(group: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Imports only the group that is asked for: transformers takes its time."""
    cases: Iterator[tuple[str, Callable[[], None]]]
    cases = getattr(importlib.import_module(f"tests.oracle.card.cases_{group}"), GROUPS[group])()
    return cases


def record_case(run: Callable[[], None], **history: Any) -> dict[str, Any]:
    """Events in order (`+512`, `-512`), the lines they come from, peaks, and the error if there was one."""
    gc.disable()
    _multiply_once()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, **history)
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    error = None
    try:
        run()
    except Exception as raised:
        error = f"{type(raised).__name__}: {str(raised)[:200]}"
    stats = torch.cuda.memory_stats()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    gc.enable()
    gc.collect()
    torch.cuda.empty_cache()
    kept = [entry for entry in trace if entry["action"] in _EVENTS]
    return {
        "events": [f"{_EVENTS[entry['action']]}{entry['size']}" for entry in kept],
        "lines": [_name_line(entry.get("frames") or ()) for entry in kept],
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"] - retries,
        "error": error,
    }


def _multiply_once() -> None:
    """So that workspaces that stay are there before a case."""
    a = torch.ones(8, 8, device="cuda", requires_grad=True)
    (a @ a).sum().backward()


def _name_line(frames: Any) -> str:
    return next((f"{frame['filename'].rpartition('/')[2]}:{frame['line']}" for frame in frames), "")


@contextlib.contextmanager
def _card(kind: str) -> Iterator[dict[str, Any]]:
    """The card that `torch.cuda` has, and how its history is asked for."""
    if kind == "real":
        yield {"context": "alloc", "stacks": "python", "clear_history": True}
        return
    import understudy
    from understudy.simulation.catalogue import find_card

    card = find_card("h100")
    if "CARD_BYTES" in os.environ:  # the same names as in runtime.c
        context = int(os.environ["CARD_CONTEXT_BYTES"])
        card = dataclasses.replace(card, memory=int(os.environ["CARD_BYTES"]), context=context)
    with understudy.simulate(card, answers="plausible"):
        yield {}


def main() -> None:
    kind, group, out, *names = sys.argv[1:]
    recorded: dict[str, Any] = {}
    cases = list(find_cases(group))
    gc.freeze()  # what is imported is not looked at again after each case
    for name, run in cases:
        if not names or any(wanted in name for wanted in names):
            with _card(kind) as history:
                recorded[name] = record_case(run, **history)
    Path(out).write_text(json.dumps({"torch": torch.__version__, "cases": recorded}))
    sys.stdout.flush()
    os._exit(0)  # torch's threads end badly on a runtime that launches nothing


if __name__ == "__main__":
    main()
