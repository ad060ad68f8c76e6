"""An interrupt may come at any line of a trace: what was there before is as it was."""

from __future__ import annotations

import gc
import linecache
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from understudy import make_fx
from understudy._torch import active_fake_mode, active_recorder

PLACES = 40


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.counted = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.counted(self.last(self.norm(self.first(x))))


def is_a_with(frame: FrameType) -> bool:
    """Python comes to such a line twice; a signal is never heard of the second time, before what was entered is left."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def interrupted(run: Callable[[], Any], at: int) -> int:
    """Run it, with an interrupt at this line of the library's, counted from its first one; how many there were."""
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line" and not is_a_with(frame):
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if "understudy/" in frame.f_code.co_filename.replace("\\", "/") else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run()
    except KeyboardInterrupt:
        assert at > 0
    finally:
        sys.settrace(before)
    return count


def things(model: nn.Module) -> list[Any]:
    """All that could be left behind, by identity."""
    tensors = [*model.state_dict(keep_vars=True).items()]
    return [
        *((name, id(tensor), type(tensor), tensor.detach().tolist()) for name, tensor in tensors),
        *((name, sorted(vars(part))) for name, part in model.named_modules()),
        (torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), gc.isenabled()),
    ]


def nothing_is_left_behind(mode: str, where: str) -> None:
    model = nn.Sequential(*[Layer() for _ in range(3)])
    x = torch.randn(5, 4)

    def trace() -> None:
        make_fx(model, tracing_mode=mode)(x)

    trace()
    before = things(model)
    count = interrupted(trace, at=-1)
    ranges = {"everywhere": range(1, count, count // PLACES), "towards the end": range(count - count // 4, count, 31)}
    for at in ranges[where]:
        interrupted(trace, at)
        assert active_fake_mode() is None, at
        assert active_recorder() is None, at
        assert things(model) == before, at


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("where", ["everywhere", "towards the end"])
def test_interrupts(where: str, mode: str) -> None:
    """In a process of its own: an interrupt inside of torch's own switches leaves those as they are."""
    code = f"from {__name__} import nothing_is_left_behind; nothing_is_left_behind({mode!r}, {where!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
