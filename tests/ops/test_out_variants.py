"""How out= variants treat the tensors that they are given."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode
from understudy.errors import ArgumentError, DtypeError, ShapeMismatch

Call = Callable[..., Any]


def facts(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def agree(call: Call, *tensors: torch.Tensor) -> None:
    """What the call does to the metadata of these tensors is the same for stand-ins; all are written or read."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    with mode:
        call(*fakes)
    call(*tensors)
    assert [facts(fake) for fake in fakes] == [facts(tensor) for tensor in tensors]
    assert [fake._version > 0 for fake in fakes] == [tensor._version > 0 for tensor in tensors]


RESIZED: dict[str, tuple[Call, tuple[int, ...]]] = {
    "qr": (lambda a, q, r: torch.linalg.qr(a, out=(q, r)), (5, 3)),
    "lu": (
        lambda a, q, r: torch.lu_unpack(a, torch.ones(3, dtype=torch.int32), out=(a.new_empty(0), q, r)),
        (3, 3),
    ),
    "fft": (lambda a, q, r: torch.fft.fft(a, dim=0, out=q.new_empty(0, dtype=torch.complex64)), (4, 3)),
    "cholesky": (lambda a, q, r: torch.linalg.cholesky(a @ a.mT + torch.eye(3), out=q), (3, 3)),
    "unbind_copy": (lambda a, q, r: torch.unbind_copy(a, 0, out=[q, r]), (2, 3)),
    "split_with_sizes_copy": (lambda a, q, r: torch.split_with_sizes_copy(a, [1, 2], out=[q, r]), (3, 4)),
    "mm": (lambda a, q, r: torch.mm(a, a, out=q).view(-1), (3, 3)),
}


@pytest.mark.parametrize("name", RESIZED)
def test_resized(name: str) -> None:
    call, shape = RESIZED[name]
    torch.manual_seed(0)
    agree(call, torch.randn(shape), torch.empty(0), torch.empty(0))


COLUMNS: dict[str, Call] = {
    "cholesky_inverse": lambda a, out: torch.cholesky_inverse(torch.eye(3), out=out),
    "geqrf": lambda a, out: torch.geqrf(a, out=(out, torch.empty(3))),
    "householder_product": lambda a, out: torch.linalg.householder_product(a, torch.ones(3), out=out),
    "lstsq": lambda a, out: torch.linalg.lstsq(
        a, a, driver="gelsy", out=(out, a.new_empty(0), torch.empty((), dtype=torch.int64), a.new_empty(0))
    ),
    "ormqr": lambda a, out: torch.ormqr(a, torch.ones(3), a, out=out),
    "inv": lambda a, out: torch.linalg.inv(torch.eye(3), out=out),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("shape", [(0,), (2, 2), (3, 3)])
def test_matrices_in_columns(name: str, shape: tuple[int, ...]) -> None:
    """Some give columns to an empty tensor only."""
    agree(COLUMNS[name], torch.randn(3, 3), torch.zeros(shape))


@pytest.mark.parametrize(
    "call",
    [
        lambda a, out: torch.mm(a, a, out=out),
        lambda a, out: torch.gather(a, 0, torch.zeros(3, 3, dtype=torch.int64), out=out),
        lambda a, out: torch.amax(a, 0, out=out),
        lambda a, out: torch.softmax(a, 0, out=out),
        lambda a, out: torch.tril(a, out=out),
    ],
)
def test_another_dtype_is_refused(call: Call) -> None:
    with pytest.raises(RuntimeError):
        call(torch.ones(3, 3), torch.empty(0, dtype=torch.float64))
    with FakeTensorMode(), pytest.raises(DtypeError, match="out=: expected a tensor of dtype"):
        call(torch.ones(3, 3), torch.empty(0, dtype=torch.float64))


def test_expanded_tensors() -> None:
    def into_expanded(call: Call) -> Any:
        return call(torch.ones(3, 3), torch.empty(3).expand(3, 3))

    refused = [lambda a, out: torch.add(a, 1, out=out), lambda a, out: torch.cat([a], out=out)]
    written = [lambda a, out: torch.ones(3, 3, out=out), lambda a, out: torch.triu(a, out=out)]
    for call in refused:
        with pytest.raises(RuntimeError, match="single memory location"):
            into_expanded(call)
        with FakeTensorMode(), pytest.raises(ArgumentError, match="expanded"):
            into_expanded(call)
    for call in written:
        real = into_expanded(call)
        with FakeTensorMode():
            assert facts(into_expanded(call)) == facts(real)


def test_memory_that_is_read_is_not_written() -> None:
    def overlapping(call: Call) -> Any:
        x = torch.ones(6)
        return call(x, torch.zeros(3, dtype=torch.int64))

    calls = [
        lambda x, i: torch.gather(x, 0, i, out=x),
        lambda x, i: torch.gather(x, 0, i, out=x[:3]),
        lambda x, i: torch.take(x, i, out=x[3:]),
        lambda x, i: torch.cat([x[:3], x[3:]], out=x),
        lambda x, i: torch.index_select(x, 0, i, out=x[2:5]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="single memory location"):
            overlapping(call)
        with FakeTensorMode():
            for _ in range(2):  # found, and from the cache
                with pytest.raises(ArgumentError, match="shares memory"):
                    overlapping(call)
    with FakeTensorMode():
        assert overlapping(lambda x, i: torch.cat([x[:2], x[:1]], out=x[3:])).shape == (3,)


def test_addbmm_resizes_its_target() -> None:
    for shape in ((1,), (), (4,), (3, 1), (3, 4)):
        agree(lambda t, a, b: t.addbmm_(a, b), torch.zeros(shape), torch.ones(2, 3, 5), torch.ones(2, 5, 4))
    with FakeTensorMode(), pytest.raises(ShapeMismatch):
        torch.zeros(5).addbmm_(torch.ones(2, 3, 5), torch.ones(2, 5, 4))


def test_normal_fills_what_it_is_given() -> None:
    for shape in ((1,), (3,), (4, 2, 3), (2, 3)):
        agree(lambda mean, out: torch.normal(mean, 1.0, out=out), torch.zeros(2, 3), torch.empty(shape))
    with FakeTensorMode(), pytest.raises(ShapeMismatch):
        torch.normal(torch.zeros(2, 3), 1.0, out=torch.empty(0))


@pytest.mark.parametrize("name", ["sum", "prod", "cumsum", "cumprod"])
def test_sums_are_in_the_dtype_of_out(name: str) -> None:
    function = getattr(torch, name)
    for given, wanted in itertools.product((torch.int32, torch.float32, torch.complex64), repeat=2):
        for asked in ({}, {"dtype": torch.float32}):

            def run() -> object:
                out = torch.empty(0, dtype=wanted)  # noqa: B023
                try:
                    return function(torch.ones(2, 2, dtype=given), 0, out=out, **asked).dtype  # noqa: B023
                except RuntimeError:
                    return "refused"

            expected = run()
            with FakeTensorMode():
                assert run() == expected, (given, wanted, asked)
