from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import understudy.ops  # noqa: F401  (registers)
from tests.ops.grid import DTYPES, MORE_DTYPES, check_all, flat, layouts, overloads, pairs
from tests.oracle.real import check_rule
from tests.spec.layouts import broadcastable

FORMATS = (None, torch.preserve_format, torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def five_dims() -> Any:
    yield torch.ones(2, 3, 4, 5, 6).permute(0, 4, 1, 2, 3)
    yield torch.ones(2, 3, 4, 5, 6)[:, ::2].transpose(1, 3)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_formats(memory_format: Any) -> None:
    for op in overloads("_to_copy", "clone"):
        for x in itertools.chain(layouts(torch.float32), five_dims()):
            check_rule(op, x, memory_format=memory_format)
    (contiguous,) = overloads("contiguous")
    if memory_format is not None:
        for x in itertools.chain(layouts(torch.float32), five_dims()):
            check_rule(contiguous, x, memory_format=memory_format)


def test_casts() -> None:
    (op,) = overloads("_to_copy")
    for a, b in itertools.product(MORE_DTYPES, repeat=2):
        check_all(op, ((x,) for x in layouts(a)), dtype=b)


def test_moves() -> None:
    from understudy.ops.variants import rule_of
    from understudy.spec import TensorSpec

    (op,) = overloads("_to_copy")
    found = rule_of(op)
    assert found is not None
    cuda = torch.device("cuda", 1)
    spec = TensorSpec((2, 3), (1, 2), 5, dtype=torch.float32, device=torch.device("cpu"))
    assert found(spec, device=cuda) is TensorSpec((2, 3), (1, 2), dtype=torch.float32, device=cuda)


@settings(max_examples=300, deadline=None)
@given(broadcastable(1))
def test_copies_keep_layouts(tensors: list[torch.Tensor]) -> None:
    for op in overloads("clone", "_to_copy", "fill.Scalar", "zero", "copy"):
        args = {"fill.Scalar": (1,), "copy": (tensors[0],)}.get(
            str(op).removeprefix("aten.").removesuffix(".default"), ()
        )
        check_rule(op, tensors[0], *args)


def test_copy() -> None:
    copy_, copy = overloads("copy_", "copy")
    for a, b in itertools.product(DTYPES, repeat=2):
        for x, y in pairs(a, b):
            check_all(copy_, [(x.clone(), y), (y.clone(), x)])
            check_all(copy, [(x, y), (y, x)])
    check_rule(copy_, flat(torch.float32)[:1].expand(3), flat(torch.float32)[:3])
    check_rule(copy, flat(torch.float32)[4:8], flat(torch.float32)[:1])


def test_fill() -> None:
    fill_, fill, fill_tensor, fill_tensor_, zero_ = overloads(
        "fill_.Scalar", "fill.Scalar", "fill.Tensor", "fill_.Tensor", "zero_"
    )
    for dtype, value in itertools.product(DTYPES, (1, 1.5, True, 1j)):
        for x in layouts(dtype):
            check_rule(fill_, x.clone(), value)
            check_rule(fill, x, value)
    for a, b in itertools.product(DTYPES, repeat=2):
        check_all(fill_tensor, [(flat(a)[:3], flat(b)[0]), (flat(a)[:3], flat(b)[:1])])
        check_all(fill_tensor_, [(flat(a)[:3], flat(b)[0])])
    check_rule(fill_, flat(torch.float32)[:1].expand(3), 1)
    check_rule(zero_, flat(torch.float32)[:1].expand(3))


def test_conjugated_and_negated() -> None:
    x = torch.ones(3, 4, dtype=torch.complex64).conj()
    for tensor in (x, x.imag):
        for op in overloads("clone", "_to_copy", "zero"):
            check_rule(op, tensor)
