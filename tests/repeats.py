"""Every entry point again and again: nothing of an earlier call may stay behind.

    python -m tests.repeats              1,000 repeats of each, some minutes
    python -m tests.repeats 100 export   fewer, of those whose name begins so

Counted are the objects that Python's garbage collector knows, after the first calls and after all of them. Objects of C++
hold Python's, so that one collection may free what only the next one finds: it runs until nothing more goes.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import understudy
from understudy import FakeTensorMode, FakeTensorProp, ShapeEnv, make_fx
from understudy.fake import convert

convert.SWEEP_FIRST_AT = 1  # else up to 1,024 storages that are gone are remembered
REPEATS = 1000
FIRST = 30
"""Calls before anything is counted: caches fill."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(torch.relu(self.inner(x)))
        return result


NET, X = Net(), torch.randn(3, 4)
MODE, SYMBOLIC = FakeTensorMode(), FakeTensorMode(shape_env=ShapeEnv())
GRAPH = torch.fx.symbolic_trace(NET)
ROWS = ({0: torch.export.Dim.DYNAMIC},)


def train(device: str = "cpu") -> None:
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4, device=device)).sum().backward()
    optimizer.step()


def train_in_mode() -> None:
    with FakeTensorMode():
        train()


def train_on_card() -> None:
    with understudy.simulate("h100"):
        train("cuda")


def convert_to_symbols() -> None:
    fake: Any = SYMBOLIC.from_tensor(torch.randn(3, 4), source="x", symbolic_context=("batch", None))
    with SYMBOLIC:
        (fake + 1).view(-1)


def capture(tracing_mode: Any) -> None:
    make_fx(NET, tracing_mode=tracing_mode, allow_non_fake_inputs=True)(X)


def capture_step() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(x).sum()
        return result

    understudy.capture_step(NET, loss, torch.optim.AdamW(NET.parameters()), X)


def fail() -> None:
    with MODE:
        try:
            torch.randn(3, 4) @ torch.randn(3, 4)
        except RuntimeError:
            return
    raise AssertionError("sizes that do not fit were taken")


ENTRY_POINTS: dict[str, Callable[[], object]] = {
    "a training step in a mode": train_in_mode,
    "a training step on a simulated card": train_on_card,
    "from_tensor, one mode": lambda: MODE.from_tensor(torch.randn(3, 4)).sum(),
    "from_tensor, one ShapeEnv": convert_to_symbols,
    "from_module": lambda: FakeTensorMode().from_module(NET),
    "an error": fail,
    "make_fx, real": partial(capture, "real"),
    "make_fx, fake": partial(capture, "fake"),
    "make_fx, symbolic": partial(capture, "symbolic"),
    "capture_step": capture_step,
    "symbolic_trace": lambda: understudy.symbolic_trace(NET, meta_args={"x": X}),
    "FakeTensorProp": lambda: FakeTensorProp(GRAPH, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X),
    "export": lambda: understudy.export(NET, (X,)),
    "export, dynamic and decomposed": lambda: understudy.export(
        NET, (X,), dynamic_shapes=ROWS, decompositions=torch.export.default_decompositions()
    ),
    "rehearse": lambda: understudy.rehearse(train),
}


def count_objects() -> Counter[str]:
    before = -1
    while (now := len(gc.get_objects())) != before:
        before = now
        gc.collect()
    return Counter(type(found).__name__ for found in gc.get_objects())


def measure_growth(call: Callable[[], object], repeats: int, first: int = FIRST) -> Counter[str]:
    """What there is more after all calls than after the first ones, by the name of the class."""
    count_objects().subtract(count_objects())  # which fills caches of Python's
    for _ in range(first):
        call()
    before = count_objects()
    for _ in range(repeats):
        call()
    return count_objects() - before - Counter(Counter=1)  # of this function


def main(repeats: int = REPEATS, prefix: str = "") -> int:
    warnings.simplefilter("ignore")
    have_grown = False
    for name, call in ENTRY_POINTS.items():
        if name.startswith(prefix):
            growth = measure_growth(call, repeats)
            have_grown |= growth.total() >= repeats // 2
            kinds = ", ".join(f"{count} {kind}" for kind, count in growth.most_common(4))
            print(f"{name:38} {growth.total():6,} objects more after {repeats:,} calls  {kinds}", flush=True)
    return int(have_grown)


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(int(given[0]) if given else REPEATS, given[1] if len(given) > 1 else ""))
