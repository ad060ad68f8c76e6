"""Kernels: the same calls are refused as in eager, by the same built-in exceptions, and none runs to find that out."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.oracle.cases import OPS, Limits, cases_of, dtypes_of
from tests.oracle.run import run_fake
from understudy import FakeTensorMode, _torch
from understudy.errors import MetadataMismatchError, ShapeMismatch
from understudy.infer import kernels
from understudy.infer.crosscheck import _count_bytes
from understudy.ops.registry import rule

ones = torch.ones
REFUSED: dict[str, Callable[[], Any]] = {
    "baddbmm of a matrix": lambda: torch.baddbmm(ones(2, 2, 2), ones(2, 2), ones(2, 2, 2)),
    "index_copy_ of too many": lambda: ones(3, 3).index_copy_(0, torch.tensor([0]), ones(2, 3)),
    "cat of nothing": lambda: torch.cat([]),
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
}
TAKEN: dict[str, Callable[[], Any]] = {
    "in place on an expanded empty tensor": lambda: ones(0, 1).expand(0, 3).add_(1),
    "in place on expanded columns of nothing": lambda: ones(1, 0).expand(4, 0).mul_(2),
    "mm of bools without a result": lambda: torch.mm(
        ones(0, 3, dtype=torch.bool), ones(3, 2, dtype=torch.bool)
    ),
    "eigenvalues of an empty 8-bit matrix": lambda: ones(0, 10, 3).to(torch.bfloat16).exp(),
    "floor_divide into its operand": lambda: torch.floor_divide(*(2 * [torch.ones((), dtype=torch.int32)])),
    "arange into a fitting shape": lambda: torch.arange(6, out=torch.empty(2, 3, dtype=torch.int64)),
    "linspace into a fitting shape": lambda: torch.linspace(0, 1, 6, out=torch.empty(2, 3)),
    "arange into another shape": lambda: torch.arange(6, out=torch.empty(2, 2, dtype=torch.int64)),
    "huber_loss of float and double": lambda: functional.huber_loss(ones(3), ones(3, dtype=torch.float64)),
    "huber_loss, not reduced": lambda: functional.huber_loss(
        ones(3), ones(3, dtype=torch.float64), reduction="none"
    ),
    "split_with_sizes_copy with out": lambda: torch.split_with_sizes_copy(
        ones(3), (1, 2), out=[torch.empty(1), torch.empty(2)]
    ),
    "block_diag of a number of another dtype": lambda: torch.block_diag(
        ones(2, 2, dtype=torch.int64), torch.tensor(1.5)
    ),
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
        REFUSED["baddbmm of a matrix"]()
    assert "called:  aten.baddbmm.default" in str(raised.value)


def test_random_numbers_are_not_spent() -> None:
    torch.manual_seed(3)
    with FakeTensorMode():
        torch.empty(0, 3).bernoulli_(0.5)
        with pytest.raises(RuntimeError):
            torch.empty(3, 3).bernoulli_(7.0)
    after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))


# --- no kernel runs to find metadata or to confirm a refusal ------------------------------------------------------------


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators whose real kernels are run on dense tensors, as they are."""
    ops: list[Any] = []
    run = kernels.run_on_zeros

    def record(call: Any, *make: Any) -> Any:
        if all(spec.sparse is None for spec in call.inputs):  # for sparse layouts, torch has few meta kernels
            ops.append(call.op)
        return run(call, *make)

    monkeypatch.setattr(kernels, "run_on_zeros", record)
    FakeTensorMode.cache_clear()
    return ops


def is_known_to_torch(op: Any) -> bool:
    return (
        _torch.has_meta_kernel(op)
        or _torch.decomposition_of(op) is not None
        or _torch.has_composite_kernel(op)
    )


PART = 12
"""One of so many operators of the database."""


@pytest.mark.filterwarnings("ignore")
def test_the_operator_database_runs_no_kernel(kernels_run: list[Any]) -> None:
    """Refusals, out=, complex numbers, integers and tensors without elements among them."""
    count = 0
    for name, entry in OPS.items():
        if zlib.crc32(name.encode()) % PART:
            continue
        for dtype in dtypes_of(entry, ("float32", "int64", "complex64")):
            for case in cases_of(entry, dtype, Limits.of_samples(2)):
                run_fake(case, FakeTensorMode())
                count += 1
    assert count > 500
    assert not {op for op in kernels_run if is_known_to_torch(op)}


def test_models_run_no_kernel(kernels_run: list[Any]) -> None:
    with FakeTensorMode():
        parts = (
            torch.nn.Embedding(9, 8), torch.nn.LSTM(8, 8, batch_first=True), torch.nn.Linear(8, 8),
            torch.nn.Dropout(0.1), torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.nn.LayerNorm(8),
        )  # fmt: skip
        ids = torch.randint(0, 9, (2, 5))
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()])
        for _ in range(2):
            x = parts[0](ids)
            x = parts[5](parts[4](parts[3](parts[2](parts[1](x)[0]))))
            torch.nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten() % 8).backward()
            optimizer.step()
            optimizer.zero_grad()
        images = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
        )
        images.to(torch.bfloat16)(torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)).sum().backward()
    assert not kernels_run


def test_a_refusal_runs_no_kernel(kernels_run: list[Any]) -> None:
    with FakeTensorMode():
        a = torch.ones(3, 3, dtype=torch.bfloat16)
        torch.addmm(a, a, a, out=torch.empty(0, dtype=torch.bfloat16))
        for call in REFUSED.values():
            with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)):
                call()
    assert not kernels_run


def test_sparse_layouts_without_a_meta_kernel_run_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "run_on_zeros", None)
    with (
        FakeTensorMode(allow_fallback_kernels=False),
        pytest.raises(RuntimeError, match="allow_fallback_kernels is off"),
    ):
        x = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (3, 3))
        torch.sparse.sum(x, dim=0)


# --- crosscheck="eager" -----------------------------------------------------------------------------------------------


def test_answers_are_compared_with_eager_on_request() -> None:
    with FakeTensorMode(crosscheck="eager"):
        a = torch.ones(3, 3)
        (a @ a + a.t()).sum()
        with pytest.raises(ShapeMismatch):
            a @ torch.ones(4, 4)


def test_a_wrong_rule_is_found_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "aten::tanh"
    right = rule.by_name(name)
    rule.replace(lambda x: x.like((*x.shape, 1)), name)
    try:
        with FakeTensorMode() as plain:
            plain.cache_clear()
            assert torch.tanh(torch.ones(2)).shape == (2, 1)
        with FakeTensorMode(crosscheck="eager"), pytest.raises(MetadataMismatchError, match="eager returns"):
            torch.tanh(torch.ones(2))
    finally:
        rule.replace(right, name)
        FakeTensorMode.cache_clear()


def test_other_values_of_crosscheck_are_refused() -> None:
    with pytest.raises(ValueError, match=r'crosscheck must be False, True or "eager", got \'always\''):
        FakeTensorMode(crosscheck="always")


def test_the_size_of_a_checked_call() -> None:
    """The storage, or the elements if they overlap."""
    sizes = {
        (4, 5): torch.ones(4, 5),
        (6,): torch.ones(4, 6)[::3, 2],
        (1, 5): torch.ones(1, 5),
        (3, 2): torch.ones(1, 2).expand(3, 2),
        (0,): torch.ones(0),
    }
    mode = FakeTensorMode()
    found = [_count_bytes(mode.from_tensor(real)._spec) // 4 for real in sizes.values()]
    assert found == [20, 2 + 1 + 18, 5, 6, 1]
