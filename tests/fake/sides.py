"""The same program run twice: for real on the CPU, and with stand-ins on some device. Their facts must be equal.

A program is a function of a device that returns tensors (in lists, tuples, dictionaries). Everything that it needs, it
makes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from understudy import FakeTensor, FakeTensorMode

Program = Callable[[str], Any]

DEVICES = ("cpu", "cuda", "cuda:3")
on_each_device = pytest.mark.parametrize("device", DEVICES)


def with_index(device: str) -> str:
    """`cuda` is `cuda:0` once a tensor is on it."""
    return device if device == "cpu" or ":" in device else f"{device}:0"


def facts(result: Any, home: str) -> list[Any]:
    """What can be said of each leaf without its data; `home` stands for the device that the program was given. The last
    entry is the first leaf on the same memory."""
    leaves = tree_flatten(result)[0]
    first_on: dict[int, int] = {}
    return [
        (*_facts_of(leaf, home), first_on.setdefault(_memory_of(leaf), number))
        if isinstance(leaf, torch.Tensor)
        else leaf
        for number, leaf in enumerate(leaves)
    ]


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _facts_of(tensor: torch.Tensor, home: str) -> tuple[Any, ...]:
    where = "home" if str(tensor.device) == home else str(tensor.device)
    return (
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, where,
        tensor.requires_grad, tensor.is_leaf, type(tensor.grad_fn).__name__,
    )  # fmt: skip


def run_fake(program: Program, device: str, **options: Any) -> Any:
    with FakeTensorMode(**options):
        result = program(device)
    for leaf in tree_flatten(result)[0]:
        assert not isinstance(leaf, torch.Tensor) or type(leaf) is FakeTensor, (
            f"a real tensor came out: {leaf!r}"
        )
    return result


def assert_like_eager(program: Program, device: str, **options: Any) -> Any:
    """Run both sides and compare; gives what the run with stand-ins returned."""
    torch.manual_seed(0)
    real = facts(program("cpu"), "cpu")
    torch.manual_seed(0)
    result = run_fake(program, device, **options)
    fake = facts(result, with_index(device))
    assert len(real) == len(fake)
    for position, (expected, got) in enumerate(zip(real, fake, strict=True)):
        assert got == expected, f"leaf {position}: stand-in {got}, eager {expected}"
    return result
