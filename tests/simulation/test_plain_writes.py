"""Gradients are added up in place, as the engine does where no mode is active: the same allocations as in a real run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.simulation.memory_events import BirthsAndDeaths
from understudy import _torch
from understudy.simulation import plain_writes
from understudy.simulation.events import MemoryRecord
from understudy.simulation.storages import ObservedMode

ROWS, COLUMNS = 24, 40
SMALLEST = 64
"""Bytes: numbers and generators are not tensors of the program."""


def leaf() -> torch.Tensor:
    return torch.ones(ROWS, COLUMNS, requires_grad=True)


class Twice(torch.autograd.Function):
    """Its backward adds in Python: the sum is a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + grad


def use_three_times() -> None:
    x = leaf() * 1
    (x.exp() + x.tanh() + x * x).mul(2).sum().backward()


def add_residuals() -> None:
    x = leaf() * 1
    for _ in range(3):
        x = x + (x.exp() @ torch.ones(COLUMNS, COLUMNS)).tanh()
    x.pow(2).sum().backward()


def hand_one_gradient_to_two() -> None:
    """The sum hands an expanded gradient to both: it can't be written to."""
    x = leaf() * 1
    (x + x.exp()).sum().backward()


def gather() -> None:
    x = leaf() * 1
    (x.exp().gather(1, torch.zeros(ROWS, 8, dtype=torch.int64)).pow(2).sum() + x.sum()).backward()


def take_maximum() -> None:
    x = leaf() * 1
    (x - x.max(dim=1, keepdim=True).values).pow(2).sum().backward()


def select_rows() -> None:
    (leaf() * 1)[torch.zeros(8, dtype=torch.int64)].pow(2).sum().backward()


def add_in_a_formula() -> None:
    """The formula of var_mean adds two gradients of its own."""
    x = leaf() * 1
    variance, mean = torch.var_mean(x, dim=1, keepdim=True)
    ((x.exp() - mean) * variance).pow(2).sum().backward()


def add_in_python() -> None:
    x = leaf() * 1
    (Twice.apply(x.exp()) * x).pow(2).sum().backward()


def keep_a_gradient() -> None:
    """A hook has a gradient that is added to later: the engine does not write to it."""
    x = leaf() * 1
    y, kept = x * 2, []
    y.register_hook(kept.append)
    (y.exp() * y + x).pow(2).sum().backward()


def differentiate_twice() -> None:
    x = leaf() * 1
    (first,) = torch.autograd.grad((x.exp() * x * x).sum(), x, create_graph=True)
    first.pow(2).sum().backward()


def add_a_bias() -> None:
    """To an input that is no matrix, and can't be seen as one."""
    layer = torch.nn.Linear(COLUMNS, 32)
    layer(torch.ones(4, ROWS, COLUMNS).transpose(0, 1)).pow(2).sum().backward()


def add_a_bias_in_python() -> None:
    product = leaf() @ torch.ones(COLUMNS, 32)
    (product + torch.ones(32) + (leaf() @ torch.ones(COLUMNS, 32) + torch.ones(32))).pow(2).sum().backward()


def add_a_bias_in_a_transform() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        product = x @ torch.ones(COLUMNS, 32)
        return (product + torch.ones(32)).mul(product).sum()

    torch.func.grad(loss)(torch.ones(ROWS, COLUMNS))


PROGRAMS = (
    add_a_bias, add_a_bias_in_python, add_a_bias_in_a_transform,
    use_three_times, add_residuals, hand_one_gradient_to_two, gather, take_maximum, select_rows, add_in_a_formula,
    add_in_python, keep_a_gradient, differentiate_twice,
)  # fmt: skip


class Sizes(BirthsAndDeaths):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_event(self, record: MemoryRecord, is_birth: bool) -> None:
        self.sizes.append(record.nbytes if is_birth else -record.nbytes)


def real_sizes(program: Callable[[], None]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        program()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recorded.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = json.load(trace)["traceEvents"]
    memory = sorted(
        (event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]
    )
    return [event["args"]["Bytes"] for event in memory]


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_allocations_as_in_the_real_run(program: Callable[[], None]) -> None:
    mode, heard = ObservedMode(), Sizes()
    mode.add_listener(heard)
    with mode:
        program()
    real, found = (
        [size for size in sizes if abs(size) > SMALLEST] for sizes in (real_sizes(program), heard.sizes)
    )
    assert sorted(found) == sorted(real)  # what is born, and what dies
    assert [size for size in found if size > 0] == [size for size in real if size > 0]
    assert peak(found) == peak(real)


def peak(sizes: list[int]) -> int:
    live = highest = 0
    for size in sizes:
        live += size
        highest = max(highest, live)
    return highest


def cast_operands(device: str) -> None:
    x, weight, bias = (torch.ones(shape, device=device) for shape in ((64, 32), (100, 32), (100,)))
    with torch.autocast(device, torch.bfloat16):
        torch.nn.functional.linear(x, weight, bias)


def test_autocast_casts_the_last_operand_first() -> None:
    """torch computes arguments from the last to the first, on the CPU as on a card."""
    mode, heard = ObservedMode(), Sizes()
    mode.add_listener(heard)
    with mode:
        cast_operands("cuda")
    real = [
        size
        for size in real_sizes(lambda: cast_operands("cpu"))
        if size in (2 * 64 * 32, 2 * 100 * 32, 2 * 100)
    ]
    assert [size for size in heard.sizes if size > 0][3:6] == real == [2 * 100, 2 * 100 * 32, 2 * 64 * 32]


def test_gradients_on_a_card_are_added_in_place() -> None:
    """Kernels of autocast are between the engine and the mode there."""
    mode, heard = ObservedMode(), Sizes()
    mode.add_listener(heard)
    with mode:
        x = torch.ones(ROWS, COLUMNS, requires_grad=True, device="cuda")
        rows = torch.zeros(8, dtype=torch.int64, device="cuda")
        y = x * 1
        out = y[rows].sum() + y.gather(1, rows[:, None].expand(8, 8)).sum()
        before = len(heard.sizes)
        out.backward()
    size = 4 * ROWS * COLUMNS
    # zeros that are filled, for each of the two, into the first of which the second is added; then the product with 1
    assert heard.sizes[before:].count(size) == 3


def test_few_nodes_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch frees nodes that Python has seen one inside of the other: a long row of them would exceed the stack."""
    asked = []
    ask = _torch.running_node

    def count() -> Any:
        asked.append(1)
        return ask()

    monkeypatch.setattr(plain_writes, "MOST_NODES", 5)
    monkeypatch.setattr(_torch, "running_node", count)
    with ObservedMode():
        x = leaf()
        for _ in range(20):
            x = x.log1p()
        x.sum().backward()
    assert len(asked) == 5
