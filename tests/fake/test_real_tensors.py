"""Real tensors beside stand-ins: operators also run on them, reads are answered by them, results are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as torch_config
from torch import Tensor

from understudy import FakeTensorMode, GuardOnDataDependentSymNode, MetadataMismatchError, ShapeEnv, make_fx
from understudy.fake_tensor import FakeTensorConverter, maybe_get_real_tensor


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(propagate_real_tensors=True)


@pytest.fixture
def symbolic() -> FakeTensorMode:
    return FakeTensorMode(propagate_real_tensors=True, shape_env=ShapeEnv())


def real(fake: Any) -> Any:
    return maybe_get_real_tensor(fake).tolist()


def test_operators_run_on_copies(mode: FakeTensorMode) -> None:
    given = torch.tensor([1.0, 2.0])
    x = mode.from_tensor(given)
    y = x * 3
    x.add_(1)
    assert real(y) == [3, 6] and real(x) == [2, 3] and given.tolist() == [1, 2]
    assert not mode.cache_enabled


def test_views_share_memory(mode: FakeTensorMode) -> None:
    whole = torch.arange(6.0)
    x, row = mode.from_tensor(whole), mode.from_tensor(whole[2:4])
    x[3].fill_(10)
    assert real(row) == [2, 10] and real(x.view(2, 3)[1]) == [10, 4, 5]


def test_factories_and_gradients(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.arange(3.0, requires_grad=True)
        loss = (x * x).sum()
        loss.backward()
    assert real(x.grad) == [0, 2, 4] and loss.item() == 5


def test_without_it_there_is_none() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(2))
    assert maybe_get_real_tensor(x) is None and (x + 1).real_tensor is None and not mode.is_hooked


def test_where_one_input_has_none_the_result_has_none(mode: FakeTensorMode) -> None:
    x = mode.from_tensor(torch.ones(2))
    y = mode.from_tensor(torch.ones(2))
    y.real_tensor = None
    assert (x + y).real_tensor is None


def test_reads(mode: FakeTensorMode) -> None:
    x = mode.from_tensor(torch.tensor([3.0, 0.0, 5.0]))
    assert x.sum().item() == 8 and bool(x[0] > 2) and not (x == 0).all()
    positive = x[x > 0]
    assert positive.shape == (2,) and real(positive) == [3, 5]
    assert x.nonzero().shape == (2, 1) and torch.equal(x, x)


def test_reads_as_symbols(symbolic: FakeTensorMode) -> None:
    x = symbolic.from_tensor(torch.tensor([3, 0, 5]))
    with symbolic:
        count = x.nonzero().shape[0]
        first = x[0].item()
        assert isinstance(count, torch.SymInt) and count.node.hint is None
        assert count == 2 and first > 2
        assert int(first) == 3
    env = symbolic.shape_env
    assert not env.guards
    # What the real values decided is checked when the program runs.
    assert [str(promise.condition) for promise in env.runtime_asserts] == ["u0 == 2", "u1 >= 3", "u1 == 3"]


def test_without_real_values_symbols_decide_nothing() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.tensor([3, 0, 5]))
    with mode, pytest.raises(GuardOnDataDependentSymNode):
        bool(x[0].item() > 2)


def test_floats_and_bools_as_symbols(symbolic: FakeTensorMode) -> None:
    x = symbolic.from_tensor(torch.tensor([0.5, 1.5]))
    with symbolic:
        assert x.sum().item() > 1.9
        flag = (x > 1).any().item()
        assert bool(flag)


def test_a_graph_of_decisions(symbolic: FakeTensorMode) -> None:
    x = symbolic.from_tensor(torch.tensor([3.0, -1.0]), static_shapes=True)

    def program(x: Tensor) -> Tensor:
        return x[x > 0] * 2 if x.sum().item() > 1 else x

    traced = make_fx(program, tracing_mode="symbolic")(x)
    assert torch.equal(traced(torch.tensor([4.0, -1.0])), torch.tensor([8.0]))
    with pytest.raises(RuntimeError):
        traced(torch.tensor([0.5, -1.0]))  # the sum decided


@pytest.fixture
def library() -> Iterator[Any]:
    with torch.library._scoped_library("real_tensors", "FRAGMENT") as made:
        yield made


def define(library: Any, name: str, kernel: Any, fake: Any) -> Any:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"real_tensors::{name}", fake, lib=library)
    return getattr(torch.ops.real_tensors, name)


def test_a_wrong_size_is_an_error_that_names_the_operator(mode: FakeTensorMode, library: Any) -> None:
    op = define(library, "size", lambda x: x.new_zeros(7), lambda x: x.new_zeros(3))
    x = mode.from_tensor(torch.zeros(3))
    with pytest.raises(MetadataMismatchError) as caught:
        op(x)
    text = str(caught.value)
    assert text.startswith(
        "real_tensors.size.default: the stand-in of the result is f32[3]@cpu, and the real result is"
    )
    assert "f32[7]@cpu" in text and "torch.library.register_fake" in text and "test_real_tensors.py" in text
    with torch_config.patch(generate_fake_kernels_from_real_mismatches=True):
        assert op(x).shape == (7,)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [(lambda x: x.double(), "f64[2, 3]"), (lambda x: x.clone().t().contiguous().t(), "~(1, 2)"), (lambda x: x[:], "shares")],
    ids=["dtype", "strides", "memory"],
)  # fmt: skip
def test_other_differences(mode: FakeTensorMode, library: Any, kernel: Any, what: str) -> None:
    op = define(library, "other", kernel, torch.empty_like)
    with pytest.raises(MetadataMismatchError) as caught:
        op(mode.from_tensor(torch.zeros(2, 3)))
    assert what in str(caught.value)


def test_tensors_on_the_meta_device_have_no_values() -> None:
    """Their results are compared with nothing: torch's meta functions differ from kernels."""
    mode = FakeTensorMode(propagate_real_tensors=True)
    with mode:
        layer = torch.nn.EmbeddingBag(10, 3, mode="sum", device="meta")
        result = layer(torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4]))
    assert result.shape == (2, 3) and result.real_tensor is None


def test_torchs_switch_is_read_when_a_mode_is_made() -> None:
    with torch_config.patch(fake_tensor_propagate_real_tensors=True):
        mode = FakeTensorMode()
    assert mode.propagate_real_tensors and real(mode.from_tensor(torch.ones(2)) + 1) == [2, 2]
    assert not FakeTensorMode().propagate_real_tensors


def test_a_converter_that_copies_data() -> None:
    mode = FakeTensorMode()
    fake = FakeTensorConverter(copy_data=True).from_real_tensor(mode, torch.tensor([1.0, 2.0]))
    assert real(fake) == [1, 2]
