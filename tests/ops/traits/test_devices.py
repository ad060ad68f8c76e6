"""Which calls may have tensors on two devices: as torch's dispatcher and kernels decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode
from understudy.errors import FakeTensorDeviceMismatchError


def card(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


def host(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


ACCEPTED: dict[str, tuple[Callable[[], Any], str]] = {
    "a number on the CPU": (lambda: card(3) + host(), "cuda:0"),
    "a number on the CPU comes first": (lambda: host() * card(3), "cuda:0"),
    "two numbers": (lambda: host() + card(), "cuda:0"),
    "a number in place": (lambda: card(3).add_(host()), "cuda:0"),
    "a condition": (lambda: torch.where(card(3) > 0, host(), card(3)), "cuda:0"),
    "indices on the CPU": (lambda: card(3)[torch.tensor([0, 1])], "cuda:0"),
    "a mask on the CPU, written": (lambda: card(3).index_put_((torch.tensor([0, 1]),), card()), "cuda:0"),
    "a number that is written": (lambda: card(3).index_put_((torch.tensor([0]),), host()), "cuda:0"),
    "a copy": (lambda: host(3).copy_(card(3)), "cpu"),
    "a move": (lambda: card(3).to("cpu"), "cpu"),
    "a shape": (lambda: host(6).view_as(card(2, 3)), "cpu"),
    "copies of a list": (lambda: torch._foreach_copy_([host(3)], [card(3)])[0], "cpu"),
    "another card": (lambda: torch.zeros(3, device="cuda:1").to("cuda:0"), "cuda:0"),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two vectors": (lambda: card(3) + host(3), "self is on cuda:0, but other is on cpu"),
    "a vector of one element": (lambda: card(3) + host(1), "self is on cuda:0, but other is on cpu"),
    "a product": (lambda: card(2, 3) @ host(3, 2), "is on cuda:0, but mat2 is on cpu"),
    "a number in place of a card's": (lambda: host().add_(card(3)), "self is on cpu, but other is on cuda:0"),
    "two cards": (lambda: card(3) + torch.zeros(3, device="cuda:1"), "cuda:0, but other is on cuda:1"),
    "a list": (lambda: torch.cat([card(3), host(3)]), r"tensors\[0\] is on cuda:0, but tensors\[1\] is on cpu"),
    "indices on a card": (lambda: host(3)[torch.zeros(2, dtype=torch.int64, device="cuda")], "is on cuda:0"),
    "written values": (lambda: card(3).index_put_((torch.tensor([0, 1]),), host(2)), "values is on cpu"),
    "nextafter": (lambda: torch.nextafter(card(3), host()), "self is on cuda:0, but other is on cpu"),
    "gather": (lambda: card(3).gather(0, torch.zeros(2, dtype=torch.int64)), "index is on cpu"),
    "linear": (lambda: torch.nn.functional.linear(card(2, 3), host(4, 3)), "is on cpu"),
    "embedding": (lambda: torch.nn.functional.embedding(torch.tensor([0]), card(3, 2)), "is on c"),
    "where": (lambda: torch.where(card(3) > 0, host(3), card(3)), "is on cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("program", "device"), ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(program: Callable[[], Any], device: str) -> None:
    with FakeTensorMode():
        assert str(program().device) == device
        assert str(program().device) == device  # from the cache


@pytest.mark.parametrize(("program", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(program: Callable[[], Any], text: str) -> None:
    with FakeTensorMode():
        for _ in range(2):
            with pytest.raises(FakeTensorDeviceMismatchError, match=text):
                program()
