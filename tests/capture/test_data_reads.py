"""Reads of data that no operator tells of, and tensors that are made past every operator, in real mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from tests.capture.captured import check
from understudy import DataDependentOutputException, NoDataError, make_fx

READS = {
    "tolist": lambda x: x * x.tolist()[0],
    "tolist of a result": lambda x: x * (x * 2).long().tolist()[1],
    "numpy": lambda x: x * float(x.numpy()[0]),
    "asarray": lambda x: x * float(np.asarray(x)[0]),
    "from_numpy": lambda x: x + torch.from_numpy(x.numpy() * 2),
    "tensor_split": lambda x: torch.tensor_split(x, x[:1].long())[0],
    "a list of tensors": lambda x: torch.Tensor([x[0], x[1]]) * 2,
    "a list for Tensor.new": lambda x: x.new([x[0], x[1]]) * 2,
    "values of a sparse tensor": lambda x: torch.sparse_coo_tensor([[0, 1]], [x[0], x[1]], (3,)).to_dense(),
    "a capsule": lambda x: torch.from_dlpack(x.__dlpack__()) * 2,
    "to_dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)) * 2,
    "numpy's from_dlpack": lambda x: x * float(np.from_dlpack(x)[0]),
    "a read inside of grad": grad(lambda x: (x * x.detach().tolist()[0]).sum()),
    "a read inside of torch": lambda x: torch.tensordot(x, x, dims=x[1:].long().view(2, 1) * 0),
    "a draw": lambda x: x * torch.rand(2).tolist()[0],
}


def test_lengths_stay_inputs() -> None:
    def loss(lengths: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(scores, torch.ones(2, 3).long(), lengths, lengths - 3)

    scores = torch.randn(6, 2, 4).log_softmax(-1)
    gm = make_fx(loss)(torch.tensor([6, 5]))
    assert torch.equal(gm(torch.tensor([4, 6])), loss(torch.tensor([4, 6])))


@pytest.mark.parametrize("name", READS)
def test_a_read_past_every_operator_is_refused(name: str) -> None:
    with pytest.raises(
        DataDependentOutputException, match=r"(?s)data-dependent: it reads a value of.*fixed.*to do:"
    ):
        make_fx(READS[name])(torch.tensor([3.0, 1, 2]))


def test_what_to_do() -> None:
    with pytest.raises(DataDependentOutputException, match=r"(?s)Tensor\.tolist.*test_data_reads.*symbolic"):
        make_fx(READS["tolist"])(torch.ones(3))
    with pytest.raises(DataDependentOutputException, match=r"torch\.stack"):
        make_fx(READS["a list of tensors"])(torch.ones(3))


def test_a_parameter_is_no_constant() -> None:
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(DataDependentOutputException, match=r"Tensor\.tolist"):
        make_fx(lambda x: layer(x) * layer.weight.detach().tolist()[0][0])(torch.ones(2))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * torch.tensor([1, 2]).tolist()[0],
        lambda x: x * (torch.arange(4) * 2).tolist()[3],
        lambda x: x * float(torch.ones(2).numpy()[0]),
        lambda x: torch.tensor_split(x, torch.tensor([1]))[0],
        lambda x: x + torch.tensor([1.0, 2, 3]),
        lambda x: x * len(repr(torch.ones(2))),
        lambda x: torch.Tensor([torch.tensor(2.0), 1]) * x[0],
        lambda x: x.split([3, *x[:0].tolist()])[0],
    ],
)
def test_what_is_determined_can_be_read(f: Any) -> None:
    check(f, torch.ones(3), modes=("real",))


def test_a_read_can_be_allowed() -> None:
    gm = make_fx(READS["tolist"], _error_on_data_dependent_ops=False)(torch.full((3,), 2.0))
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 2.0))


LISTS = {
    "tensor": lambda x: torch.tensor([x[0], x[1]]) * 2,
    "tensor of tensors and numbers": lambda x: torch.tensor([[x[0], 1, True], [2.5, x[1], 0]]),
    "tensor of another dtype": lambda x: torch.tensor([x.long()[0], 2], dtype=torch.float64),
    "tensor of integers and floats": lambda x: torch.tensor((x.long()[0], 0.5)),
    "tensor that takes gradients": lambda x: torch.tensor([x[0]], requires_grad=True).detach() + 1,
    "tensor of vectors of one element": lambda x: torch.as_tensor([x[:1], x[1:2]]) * 2,
    "tensor of one": lambda x: torch.tensor([x.sum()]),
    "as_tensor": lambda x: torch.as_tensor([x[0], x[1]]) * 2,
    "asarray": lambda x: torch.asarray([x[0], x[1]]) * 2,
    "new_tensor": lambda x: x.double().new_tensor([x[0], 3]),
    "tensor inside of grad": grad(lambda x: (torch.tensor([x[0], x[1]]) * x[:2]).sum()),
    "sizes among them": lambda x: torch.tensor([x[0], x.shape[0]]),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_tensor_of_tensors_is_stacked(name: str) -> None:
    check(LISTS[name], torch.tensor([1.5, 2, 3]), others=((torch.tensor([3.5, 1, 2, 7]),),))


def test_a_list_with_a_size_is_stacked_and_viewed_only_if_nested() -> None:
    for program, ending in ((lambda x: [x.shape[0], 2], []), (lambda x: [[x.shape[0]], [2]], ["view"])):
        graph = make_fx(lambda x, f=program: torch.tensor(f(x)), tracing_mode="symbolic")(torch.ones(5)).graph
        names = [node.target.__name__.split(".")[0] for node in graph.nodes if node.op == "call_function"]
        assert names == ["sym_size", "scalar_tensor", "scalar_tensor", "stack", *ending]


def test_a_list_that_torch_refuses() -> None:
    for bad in (lambda x: torch.tensor([x[0], "a"]), lambda x: torch.tensor([[x[0]], [x[0], x[1]]])):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            make_fx(bad, tracing_mode="fake")(torch.ones(3))


def test_a_capsule_of_a_stand_in() -> None:
    with pytest.raises(NoDataError, match="__dlpack__"):
        make_fx(READS["to_dlpack"], tracing_mode="fake")(torch.ones(3))


class Kind(Tensor):
    """A subclass without a dispatch of its own."""


CONSTANT = torch.arange(3.0).as_subclass(Kind)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + CONSTANT,
        lambda x: -CONSTANT * x + 1,
        lambda x: torch.stack([x, CONSTANT]).unbind(1),
        lambda x: (x * 2).as_subclass(Kind).sin(),
        lambda x: x.as_subclass(Kind).add_(1),
    ],
)
def test_subclasses_in_a_real_trace(f: Any) -> None:
    example, x = torch.randn(3), torch.randn(3)
    gm = make_fx(f)(example.clone())
    torch.testing.assert_close(gm(x.clone()), f(x.clone()))
    gm = make_fx(f)(example.clone().as_subclass(Kind))
    torch.testing.assert_close(gm(x.clone().as_subclass(Kind)), f(x.clone().as_subclass(Kind)))


def test_a_constant_may_share_memory_with_an_input() -> None:
    base = torch.arange(4.0)
    part = base[:3]
    gm = make_fx(lambda x: part * 2 + x)(base[1:])
    assert torch.equal(gm(torch.ones(3)), torch.tensor([1.0, 3, 5]))


@pytest.mark.parametrize("kind", [Kind, Tensor, torch.nn.Parameter])
def test_a_subclass_made_past_every_operator(kind: Any) -> None:
    def f(x: Tensor) -> Any:
        made = Tensor._make_subclass(kind, x.sin())
        return (made + 1).as_subclass(Tensor)

    gm = make_fx(f)(torch.ones(3))
    assert torch.equal(gm(torch.arange(3.0)), torch.arange(3.0).sin() + 1)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_lists_of_lengths_that_are_inputs(mode: str) -> None:
    def f(x: torch.Tensor, lengths: list[int], of_targets: list[int]) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), torch.ones(2, 3, dtype=torch.int64), lengths, of_targets)

    x = torch.randn(6, 2, 5)
    gm = make_fx(f, tracing_mode=mode)(x, [6, 6], [3, 2])
    assert torch.equal(gm(x, [6, 6], [3, 2]), f(x, [6, 6], [3, 2]))
    if mode == "symbolic":
        assert torch.equal(gm(x, [5, 4], [2, 1]), f(x, [5, 4], [2, 1]))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lists_of_lengths_of_ctc_loss(mode: str, reduction: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        targets = torch.ones(2, 3, dtype=torch.int64)
        return torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, (6, 5), [3, 2], reduction=reduction)

    x = torch.randn(6, 2, 4)
    torch.testing.assert_close(make_fx(program, tracing_mode=mode)(x)(x), program(x))
