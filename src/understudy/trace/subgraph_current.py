"""The capture that runs in this thread just now.

torch's higher-order operators make graphs of the functions that they are given in several places: where they are
recorded, and in their rules for autograd. All of them ask torch for its current tracer. While a capture runs, the
answer is `TracerOfThisThread`, which hands them graphs of ours.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from understudy import _torch
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from understudy.trace.capture import Capture


class _Running(threading.local):
    def __init__(self) -> None:
        self.captures: list[Capture] = []


_running = _Running()


def current_capture() -> Capture | None:
    return _running.captures[-1] if _running.captures else None


def capture_of_branches() -> Capture:
    """The capture that a branch belongs to."""
    capture = current_capture()
    if capture is None:
        raise UnderstudyError(
            "a higher-order operator can only be recorded inside make_fx: the graphs of its functions need a capture "
            "to belong to"
        )
    return capture


@contextmanager
def running(capture: Capture) -> Iterator[None]:
    _running.captures.append(capture)
    try:
        with _torch.announced_tracer(TRACER):
            yield
    finally:
        _running.captures.pop()


@contextmanager
def branches_below_autograd() -> Iterator[None]:
    """Inside, graphs of branches are made below autograd, also those of a trace that goes above it."""
    capture = current_capture()
    if capture is None or not capture.options.pre_dispatch:
        yield
        return
    assert capture.stand_ins is not None  # made here if it was not, so that both have the same
    below = copy.copy(capture)
    below.options = replace(capture.options, pre_dispatch=False)
    with running(below):
        yield


class TracerOfThisThread:
    """What torch's higher-order operators need of the tracer that is at work."""

    @property
    def fake_tensor_mode(self) -> Any:
        capture = current_capture()
        return None if capture is None else capture.fake_mode

    def trace_subgraph(self, f: Callable[..., Any], *args: Any) -> GraphModule:
        return capture_of_branches().subgraph(f, args)

    def trace_subgraph_custom_decomp(
        self, f: Callable[..., Any], decomp_table: Mapping[Any, Callable[..., Any]], *args: Any
    ) -> GraphModule:
        return capture_of_branches().subgraph(f, args, decomp_table)


TRACER = TracerOfThisThread()
