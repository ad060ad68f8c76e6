"""Writes, views and metadata changes: the graph does to its inputs and outputs what the program does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.captured import captured, check, targets

X = (3, 4)


def written_through_a_view(x: Tensor) -> Any:
    y = x.view(4, 3)
    y.add_(1)
    z = x[0]
    z.mul_(2)
    return y, z, x


def base_seen_through_a_view(x: Tensor) -> Any:
    y = x.clone()
    part = y[1:]
    y.mul_(3)
    return part.sum(), y


def inputs_returned(x: Tensor) -> Any:
    return x, x


def outputs_that_share(x: Tensor) -> Any:
    y = x * 2
    return y, y.view(-1), y[0], y.t()


def chain_of_views(x: Tensor) -> Any:
    x.t()[1:].unsqueeze(0)[..., ::2].add_(5)
    return x


def slices_assigned(x: Tensor) -> Any:
    x[1:3] = 0
    x[..., ::2] += 1
    x[0, 0] = x[1, 1]
    return x.sum()


def masked_assignment(x: Tensor) -> Any:
    x[x > 0] = -1.0
    return x


def indexed_assignment(x: Tensor) -> Any:
    x[torch.tensor([0, 2])] = 7.0
    return x


def overlapping(x: Tensor) -> Any:
    a, b = x[:-1], x[1:]
    a.add_(1)
    b.mul_(2)
    return a + b


def detached(x: Tensor) -> Any:
    x.detach().add_(1)
    return x * 2


def copied_over(x: Tensor) -> Any:
    y = x.clone()
    x.copy_(y.flip(0))
    return y


def transposed(x: Tensor) -> Any:
    x.t_()
    x.add_(1)
    return x, x.shape[0]


def sizes_before_and_after(x: Tensor) -> Any:
    before = x.shape[0]
    x.t_()
    return x.new_ones(before), x.new_ones(x.shape[0]), before


def squeezed(x: Tensor) -> Any:
    x.unsqueeze_(0)
    y = x * 2
    x.squeeze_(0)
    return x, y


def resized(x: Tensor) -> Any:
    x.resize_(2, 2)
    return x.fill_(1)


def made_and_resized(x: Tensor) -> Any:
    y = torch.empty(0)
    y.resize_(x.shape[0])
    y.copy_(x[:, 0])
    return y


def as_strided_write(x: Tensor) -> Any:
    x.as_strided((2, 2), (4, 1)).zero_()
    return x


def in_a_loop(x: Tensor) -> Any:
    total = torch.zeros(x.shape[1])
    for row in x.unbind(0):
        total += row
        row.neg_()
    return total, x


def split_and_written(x: Tensor) -> Any:
    first, second = x.split([1, 2])
    first.add_(second.sum(0))
    return second


def swapped(x: Tensor) -> Any:
    x.swapaxes_(0, 1)
    return x + 1


def data_replaced(x: Tensor) -> Any:
    y = x * 1.5
    y.data = x.t()
    return y + 1


PROGRAMS = [
    written_through_a_view, base_seen_through_a_view, inputs_returned, outputs_that_share, chain_of_views,
    slices_assigned, masked_assignment, indexed_assignment, overlapping, detached, copied_over, transposed,
    sizes_before_and_after, squeezed, as_strided_write, in_a_loop, split_and_written, swapped, data_replaced,
    made_and_resized,
]  # fmt: skip
FIXED = {as_strided_write, in_a_loop, split_and_written}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program: Any) -> None:
    others = () if program in FIXED else ((torch.randn(6, 5),), (torch.randn(4, 3),))
    check(program, torch.randn(X), others=others if program is not written_through_a_view else ())


def test_resize_of_an_input() -> None:
    check(resized, torch.randn(5))


def test_write_to_one_input_is_seen_by_a_view_of_it_that_is_an_input_as_well() -> None:
    base = torch.randn(6)
    check(lambda a, b: (a.add_(1), b * 2)[1], base, base.view(2, 3))


def test_set_makes_two_inputs_share() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        x.set_(y)
        x.add_(1)
        return x

    check(f, torch.randn(3), torch.randn(5))


def test_out_is_written() -> None:
    check(lambda x, out: torch.add(x, 1, out=out), torch.randn(5), torch.empty(5))
    check(lambda x, out: torch.add(x, 1, out=out), torch.randn(5), torch.empty(0))


def test_out_that_is_a_view() -> None:
    def f(x: Tensor) -> Any:
        y = torch.zeros(x.shape[0], 3)
        torch.sin(x, out=y[:, 1])
        return y

    check(f, torch.randn(5), others=((torch.randn(7),),))


@pytest.mark.filterwarnings("ignore:An output with one or more")
def test_the_size_of_an_out_tensor_is_read_before_it_is_resized() -> None:
    def f(x: Tensor, out: Tensor) -> Any:
        before = out.shape[0]
        torch.add(x, 1, out=out)
        return x.new_ones(before), out.shape[0]

    check(f, torch.randn(5), torch.randn(7), others=((torch.randn(6), torch.randn(9)),))


def test_several_outs() -> None:
    def f(x: Tensor, values: Tensor, indices: Tensor) -> Any:
        torch.max(x, 0, out=(values, indices))
        return values + 1

    check(f, torch.randn(4, 3), torch.empty(3), torch.empty(3, dtype=torch.int64))


def test_a_parameter_made_inside_shares_memory() -> None:
    def f(x: Tensor) -> Any:
        weight = torch.nn.Parameter(x.clone())
        with torch.no_grad():
            weight.mul_(2)
        return (weight * 3).detach()

    check(f, torch.randn(3))


def test_a_module_built_inside() -> None:
    def f(x: Tensor) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        return model(x).detach(), model[1].running_mean

    check(f, torch.randn(3, 4))


def test_dead_writes_to_inputs_stay_and_dead_values_go() -> None:
    def f(x: Tensor) -> Any:
        x.sin()
        x.add_(1)
        y = x * 2
        y.exp_()
        return x.cos()

    graph = captured(f, torch.randn(3))
    assert "sin.default" not in targets(graph)
    assert targets(graph)[0] == "add_.Tensor" and targets(graph)[-1] == "cos.default"


def test_later_reads_come_from_the_node_that_wrote() -> None:
    def f(x: Tensor) -> Any:
        x.add_(1)
        return x * 2

    graph = captured(f, torch.randn(3))
    add, mul = (node for node in graph.graph.nodes if node.op == "call_function")
    assert mul.args[0] is add
