"""Errors at every possible place of a training run: nothing is left behind, and the run can be done again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from understudy import FakeTensor, FakeTensorMode
from understudy.fake import services
from understudy.infer import engine


class Fault(Exception):
    """Raised on purpose."""


class FailsAt(TorchDispatchMode):
    """Raises instead of the k-th operator."""

    def __init__(self, k: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left = k
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error(str(func))
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.embedding(ids))))


def build(device: str) -> tuple[Model, torch.optim.Optimizer]:
    with torch.device(device):
        model = Model()
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def step(model: Model, optimizer: torch.optim.Optimizer, device: str) -> None:
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(torch.arange(5, device=device)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model: Model) -> Any:
    return [
        (name, id(p), type(p), p.shape, p.dtype, p.device, p.requires_grad)
        for name, p in model.named_parameters()
    ]


def assert_torch_is_well() -> None:
    assert _get_current_dispatch_mode_stack() == []
    assert (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
    )
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    assert y.item() == 6 and x.grad.tolist() == [2, 2, 2]


def number_of_operators(device: str) -> int:
    counter = FailsAt(1 << 30, Fault)
    with FakeTensorMode():
        model, optimizer = build(device)
        with counter:
            step(model, optimizer, device)
    return (1 << 30) - counter.left


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_an_error_at_every_operator_of_a_training_step(error: type[BaseException], device: str) -> None:
    total = number_of_operators(device)
    assert total > 40
    mode = FakeTensorMode()
    with mode:
        model, optimizer = build(device)
    before = snapshot(model)
    for k in range(0, total, 1 if error is Fault else 7):
        with pytest.raises(error), mode, FailsAt(k, error):
            step(model, optimizer, device)
        assert_torch_is_well()
        assert snapshot(model) == before
        optimizer.zero_grad()
        optimizer.state.clear()  # which the optimizer itself leaves half made
    with mode:
        step(model, optimizer, device)
    assert snapshot(model) == before
    assert all(type(p) is FakeTensor for p in model.parameters())


def test_an_error_in_every_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from below: what the mode itself calls fails."""
    original = engine.infer
    left = 0

    def failing(call: Any, stage: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Fault(str(call))
        return original(call, stage)

    monkeypatch.setattr(services, "infer", failing)
    for k in range(200):
        mode = FakeTensorMode()
        mode.cache_enabled = False
        left = k
        try:
            with mode:
                step(*build("cpu"), "cpu")
        except Fault:
            assert_torch_is_well()
        else:
            break
    else:
        pytest.fail("the run never came to its end")
    assert k > 40


def test_a_fault_while_a_model_is_built() -> None:
    for k in range(12):
        with pytest.raises(Fault), FakeTensorMode(), FailsAt(k, Fault):
            build("cuda")
        assert_torch_is_well()


def test_a_fault_while_modules_move() -> None:
    mode = FakeTensorMode()
    for k in range(5):
        with mode:
            model, _ = build("cpu")
        before = [(name, id(p)) for name, p in model.named_parameters()]
        with pytest.raises(Fault), mode, FailsAt(k, Fault):
            model.to("cuda")
        assert_torch_is_well()
        assert [p.is_cuda for p in model.parameters()].count(True) == k
        with mode:
            model.to("cuda")
            step(model, torch.optim.AdamW(model.parameters()), "cuda")
        assert [
            (name, id(p)) for name, p in model.named_parameters() if isinstance(p, nn.Parameter)
        ] == before


def test_a_fault_in_a_backward_hook() -> None:
    with FakeTensorMode():
        x = torch.empty(3, requires_grad=True)
        y = x * 2
        y.register_hook(fail)
        with pytest.raises(Fault):
            y.sum().backward()
        assert x.grad is None
        (x * 2).sum().backward()
        assert x.grad is not None
    assert_torch_is_well()


def fail(grad: torch.Tensor) -> None:
    raise Fault
