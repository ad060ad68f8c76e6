"""Operators that nobody has described: by their schema, by a real kernel on zeros, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from understudy import FakeTensorMode
from understudy.errors import UnsupportedOperatorException

NAMESPACE = "understudy_test_sources"


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    library = torch.library.Library(NAMESPACE, "DEF")
    library.define("fill_one(Tensor(a!) x, float value) -> ()")
    library.define("fill_and_return(Tensor y, Tensor(a!) x) -> Tensor(a!)")
    library.define("swap(Tensor(a!) x, Tensor[] rest, Tensor(b!) y) -> (Tensor(b!), Tensor(a!))")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("fill_one", lambda x, value: x.fill_(value) and None, "CPU")
    library.impl("fill_and_return", lambda y, x: x.copy_(y), "CPU")
    library.impl("swap", lambda x, rest, y: (y, x), "CPU")
    library.impl("unknown", lambda x: x.clone(), "CPU")
    yield
    library._destroy()


def test_operators_that_only_write_need_no_description() -> None:
    ops = getattr(torch.ops, NAMESPACE)
    with FakeTensorMode():
        x, y = torch.zeros(3), torch.ones(5)
        before = x._version
        assert ops.fill_one(x, 2.0) is None
        assert x._version == before + 1
        assert ops.fill_and_return(y, x) is x
        first, second = ops.swap(x, [torch.ones(1), torch.ones(2)], y)
        assert first is y and second is x


def test_an_operator_without_a_description_is_refused_by_name() -> None:
    op = getattr(torch.ops, NAMESPACE).unknown
    with FakeTensorMode() as mode:
        with pytest.raises(UnsupportedOperatorException) as caught:
            op(torch.zeros(3))
        assert "unknown.default has no fake implementation: register one with" in str(caught.value)
        assert f"torch.library.register_fake('{NAMESPACE}::unknown')" in str(caught.value)
        mode.allow_fallback_kernels = False
        with pytest.raises(
            UnsupportedOperatorException, match="has no rule, and allow_fallback_kernels is off"
        ):
            op(torch.zeros(3))


def test_a_real_kernel_answers_for_small_sparse_tensors_only() -> None:
    mode = FakeTensorMode()
    small = mode.from_tensor(torch.eye(4).to_sparse_csr())
    large = mode.from_tensor(torch.sparse_coo_tensor([[0], [0]], [1.0], (1 << 15, 1 << 15)))
    with mode:
        assert (small @ torch.zeros(4, 2)).shape == (4, 2)
        dense = torch.empty(1 << 15, 1 << 14)
        with pytest.raises(
            UnsupportedOperatorException, match=r"would take [\d,]+ MiB \(the limit is 1024 MiB\)"
        ):
            large @ dense
