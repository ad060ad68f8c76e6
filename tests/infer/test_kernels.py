"""The real operator as the judge of refusals: the same calls are refused, by the same built-in exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from understudy import FakeTensorMode
from understudy.errors import ShapeMismatch
from understudy.infer import kernels


def overwritten(call: Callable[[torch.Tensor], Any], *shape: int) -> Callable[[], Any]:
    return lambda: call(torch.ones(shape))


ones = torch.ones
REFUSED: dict[str, Callable[[], Any]] = {
    "baddbmm of a 0-dim batch": lambda: torch.baddbmm(ones(2, 2, 2), ones(()), ones(2, 2, 2)),
    "baddbmm of a matrix": lambda: torch.baddbmm(ones(2, 2, 2), ones(2, 2), ones(2, 2, 2)),
    "avg_pool2d of a vector": lambda: functional.avg_pool2d(ones(3), 2),
    "index_copy_ of too many": lambda: ones(3, 3).index_copy_(0, torch.tensor([0]), ones(2, 3)),
    "cat of nothing": lambda: torch.cat([]),
    "cat into integers": lambda: torch.cat([ones(2)], out=torch.empty(2, dtype=torch.int64)),
    "as_strided backwards": lambda: ones(4).as_strided((2,), (-1,), 3),
    "as_strided before the start": lambda: ones(4).as_strided((2,), (1,), -3),
    "more bytes than there are numbers": lambda: torch.empty(2**63 - 1),
    "more elements than there are numbers": lambda: torch.empty(2**62, 2**62),
    "a power that uint8 can't hold": lambda: ones(3, dtype=torch.uint8).pow_(300),
    "a number that uint8 can't hold": lambda: ones(3, dtype=torch.uint8).fill_(300),
    "mm of bools": lambda: torch.mm(ones(2, 3, dtype=torch.bool), ones(3, 2, dtype=torch.bool)),
    "cumsum as bool": lambda: torch.cumsum(ones(3), 0, dtype=torch.bool),
    "a kernel that only CUDA has": lambda: torch.ops.aten._flash_attention_forward(
        ones(1, 2, 2, 8), ones(1, 2, 2, 8), ones(1, 2, 2, 8), None, None, 2, 2, 0.0, False, False
    ),
    "an 8-bit float in a list": lambda: torch._foreach_sin([ones(2).to(torch.float8_e5m2)]),
    "stack into its operand": overwritten(lambda t: torch.stack([t, t], out=t), 2, 2),
    "cross into its operand": overwritten(lambda t: torch.linalg.cross(t, t, out=t), 5, 3),
}
TAKEN: dict[str, Callable[[], Any]] = {
    "in place on an expanded empty tensor": lambda: ones(0, 1).expand(0, 3).add_(1),
    "in place on expanded columns of nothing": lambda: ones(1, 0).expand(4, 0).mul_(2),
    "mm of bools without a result": lambda: torch.mm(ones(0, 3, dtype=torch.bool), ones(3, 2, dtype=torch.bool)),
    "cumsum of one number as bool": lambda: torch.cumsum(torch.tensor(1.0), 0, dtype=torch.bool),
    "eigenvalues of an empty 8-bit matrix": lambda: ones(0, 10, 3).to(torch.bfloat16).exp(),
    "mean into its operand": overwritten(lambda t: torch.mean(t, 0, out=t), 3, 4),
    "max into its operand": overwritten(lambda t: torch.max(t, 0, out=(t, torch.empty(0, dtype=torch.int64))), 3, 4),
    "prod into its operand": overwritten(lambda t: torch.prod(t, 0, out=t), 3, 4),
    "floor_divide into its operand": lambda: torch.floor_divide(*(2 * [torch.ones((), dtype=torch.int32)])),
    "arange into a fitting shape": lambda: torch.arange(6, out=torch.empty(2, 3, dtype=torch.int64)),
    "linspace into a fitting shape": lambda: torch.linspace(0, 1, 6, out=torch.empty(2, 3)),
    "arange into another shape": lambda: torch.arange(6, out=torch.empty(2, 2, dtype=torch.int64)),
    "huber_loss of float and double": lambda: functional.huber_loss(ones(3), ones(3, dtype=torch.float64)),
    "huber_loss, not reduced": lambda: functional.huber_loss(ones(3), ones(3, dtype=torch.float64), reduction="none"),
    "split_with_sizes_copy with out": lambda: torch.split_with_sizes_copy(ones(3), (1, 2), out=[torch.empty(1), torch.empty(2)]),
    "block_diag of a number of another dtype": lambda: torch.block_diag(ones(2, 2, dtype=torch.int64), torch.tensor(1.5)),
}


def facts(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.dtype, tuple(result.shape), result.stride(), result.storage_offset(), result._version
    return [facts(each) for each in result] if isinstance(result, (list, tuple)) else result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_the_same_class(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)) as real:
        REFUSED[name]()
    with FakeTensorMode(), pytest.raises(real.type):
        REFUSED[name]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TAKEN)
def test_taken_as_by_eager(name: str) -> None:
    real = facts(TAKEN[name]())
    with FakeTensorMode():
        assert facts(TAKEN[name]()) == real


def test_the_error_is_still_ours() -> None:
    with FakeTensorMode(), pytest.raises(ShapeMismatch, match="expected 3 dimensions") as raised:
        REFUSED["baddbmm of a 0-dim batch"]()
    assert isinstance(raised.value, IndexError)
    assert "called:  aten.baddbmm.default" in str(raised.value)


def test_large_calls_are_refused_by_the_rule_alone() -> None:
    with FakeTensorMode(), pytest.raises(ShapeMismatch):
        torch.baddbmm(ones(2, 2000, 2000), ones(2000, 2000), ones(2, 2000, 2000))


def test_other_devices_are_not_asked_about() -> None:
    with FakeTensorMode():
        half = torch.empty(2, 2, dtype=torch.float8_e5m2, device="cuda")
        assert half.to(torch.float32).device.type == "cuda"


def test_random_numbers_are_not_spent() -> None:
    torch.manual_seed(3)
    with FakeTensorMode():
        torch.empty(0, 3).bernoulli_(0.5)
        with pytest.raises(RuntimeError):
            torch.empty(3, 3).bernoulli_(7.0)
    after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))


@pytest.mark.parametrize("training_with_gradients", [True, False])
def test_a_model_that_is_known_runs_no_real_kernel(training_with_gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What numbers decide is decided once, with the plan."""
    with FakeTensorMode() as mode:
        parts = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.AlphaDropout(0.1)
        model = torch.nn.Sequential(*parts)
        ids = torch.randint(0, 9, (2, 5))

        def step() -> None:
            with torch.set_grad_enabled(training_with_gradients):
                loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 8)
            if training_with_gradients:
                loss.backward()

        step()
        monkeypatch.setattr(kernels, "run_on_zeros", None)
        step()
    assert mode.cache_info().hits
