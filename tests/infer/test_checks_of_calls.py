"""What a call checks before its results are made: indices, values and memory, refused where eager refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode, TensorSpec
from understudy.errors import OperatorError
from understudy.infer.plan import is_cast_inside
from understudy.spec.call import Call

Program = Callable[[], Any]


def x(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


INDICES: dict[str, Program] = {
    "index, last": lambda: x(3, 2)[i(0, 2)],
    "index, one too many": lambda: x(3, 2)[i(0, 3)],
    "index, from the end": lambda: x(3, 2)[i(-3)],
    "index, before the first": lambda: x(3, 2)[i(-4)],
    "index of nothing": lambda: x(0, 2)[torch.empty(0, dtype=torch.int64)],
    "index, second dimension": lambda: x(3, 2)[:, i(2)],
    "gather": lambda: x(2, 3).gather(1, i(0, 2).reshape(2, 1)),
    "gather, too large": lambda: x(2, 3).gather(1, i(0, 3).reshape(2, 1)),
    "gather, negative": lambda: x(2, 3).gather(1, i(0, -1).reshape(2, 1)),
    "index_select": lambda: x(3).index_select(0, i(2)),
    "index_select, too large": lambda: x(3).index_select(0, i(3)),
    "index_select, negative": lambda: x(3).index_select(0, i(-1)),
    "take, from the end": lambda: x(2, 3).take(i(-6, 5)),
    "take, too large": lambda: x(2, 3).take(i(6)),
    "embedding": lambda: torch.nn.functional.embedding(i(0, 4), x(5, 2)),
    "embedding, too large": lambda: torch.nn.functional.embedding(i(5), x(5, 2)),
    "scatter": lambda: x(3).scatter(0, i(2), 1.0),
    "scatter, too large": lambda: x(3).scatter(0, i(3), 1.0),
    "index_add, too large": lambda: x(3).index_add(0, i(3), x(1)),
    "index_put, too large": lambda: x(3).index_put((i(3),), x(1)),
    "nll_loss, class": lambda: torch.nn.functional.nll_loss(x(2, 3), i(0, 2)),
    "nll_loss, no such class": lambda: torch.nn.functional.nll_loss(x(2, 3), i(0, 3)),
    "nll_loss, ignored class": lambda: torch.nn.functional.nll_loss(x(2, 3), i(0, -100)),
}
VALUES: dict[str, Program] = {
    "divisor": lambda: i(4) % i(3),
    "divisor of 0": lambda: i(4) % i(0),
    "floor divisor of 0": lambda: i(4) // i(0),
    "probability": lambda: torch.bernoulli(torch.tensor([0.0, 1.0])),
    "probability of 2": lambda: torch.bernoulli(torch.tensor([2.0])),
    "weights": lambda: torch.multinomial(torch.tensor([0.5, 1.0]), 1),
    "negative weights": lambda: torch.multinomial(torch.tensor([0.5, -1.0]), 1),
    "no weight": lambda: torch.multinomial(torch.tensor([0.0, 0.0]), 1),
    "rate": lambda: torch.poisson(torch.tensor([1.0])),
    "negative rate": lambda: torch.poisson(torch.tensor([-1.0])),
    "inverse": lambda: torch.linalg.inv(torch.eye(2)),
    "inverse of zeros": lambda: torch.linalg.inv(torch.zeros(2, 2)),
}


def with_base(function: Callable[[torch.Tensor], Any], *shape: int) -> Program:
    return lambda: function(x(*shape))


MEMORY: dict[str, Program] = {
    "add_ to itself": with_base(lambda t: t.add_(t), 3, 3),
    "add_ of the transposed": with_base(lambda t: t.add_(t.t()), 3, 3),
    "add_ of a clone": with_base(lambda t: t.add_(t.t().clone()), 3, 3),
    "add_ of a shifted view": with_base(lambda t: t[1:].add_(t[:-1]), 4),
    "add_ of a disjoint view": with_base(lambda t: t[2:].add_(t[:2]), 4),
    "add_ of every second": with_base(lambda t: t[::2].add_(t[1::2]), 4),
    "add_ to an expanded tensor": with_base(lambda t: t.expand(3).add_(1), 1),
    "copy_ into an expanded tensor": with_base(lambda t: t.expand(3).copy_(torch.ones(3)), 1),
    "copy_ of the same elements": with_base(lambda t: t.expand(3).copy_(t.expand(3)), 1),
    "copy_ of the transposed": with_base(lambda t: t.copy_(t.t()), 3, 3),
    "masked_fill_ by a view of itself": lambda: (lambda m: m.masked_fill_(m.t(), False))(x(3, 3).bool()),
    "mm into its operand": with_base(lambda t: torch.mm(t, t, out=t), 3, 3),
    "mm into another tensor": with_base(lambda t: torch.mm(t, t, out=torch.empty(3, 3)), 3, 3),
    "add into its operand": with_base(lambda t: torch.add(t, t, out=t), 3, 3),
    "add into the transposed operand": with_base(lambda t: torch.add(t, 1, out=t.t()), 3, 3),
    "add into an operand that grows": with_base(lambda t: torch.add(t, x(2, 3, 3), out=t), 3, 3),
    "add into a larger operand": with_base(lambda t: torch.add(t[:1], 1, out=t), 3, 3),
    "gather into its source": with_base(
        lambda t: torch.gather(t, 0, torch.zeros(3, 3, dtype=torch.int64), out=t), 3, 3
    ),
    "index_add_ of itself": with_base(lambda t: t.index_add_(0, i(0, 1, 2), t), 3, 3),
    "scatter_ of itself": with_base(lambda t: t.scatter_(0, i(0, 1, 2), t), 3),
    "addmm_ of itself": with_base(lambda t: t.addmm_(t, torch.ones(3, 3)), 3, 3),
    "foreach_add_ of one tensor twice": with_base(lambda t: torch._foreach_add_([t, t], 1), 3),
}


def outcome(program: Program) -> Any:
    """The shapes and strides of the results, or the error."""
    try:
        result = program()
    except Exception as error:
        return error
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [(part.shape, part.stride()) for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(
    "program", [*INDICES.values(), *VALUES.values(), *MEMORY.values()], ids=[*INDICES, *VALUES, *MEMORY]
)
def test_a_call_is_refused_where_eager_refuses_it(program: Program) -> None:
    real = outcome(program)
    with FakeTensorMode():
        for found in (outcome(program), outcome(program)):  # inferred, and from the cache
            if isinstance(real, Exception):
                assert isinstance(found, type(real)), (found, real)
            else:
                assert found == real


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("index, one too many", "index 3 is out of bounds for a dimension of size 3"),
        ("index, before the first", "index -4 is out of bounds for a dimension of size 3"),
        ("divisor of 0", "integers can't be divided by 0"),
        (
            "gather into its source",
            r"the output f32\[3, 3\]@cpu shares memory with the input f32\[3, 3\]@cpu",
        ),
        ("add_ of the transposed", "share a memory location; clone one of them first"),
        (
            "add into an operand that grows",
            "is both input and output, but does not have the shape of the result",
        ),
    ],
)
def test_the_refusal_names_the_reason(program: str, text: str) -> None:
    with FakeTensorMode(), pytest.raises((OperatorError, IndexError), match=text):
        {**INDICES, **VALUES, **MEMORY}[program]()


def test_unknown_indices_are_not_refused() -> None:
    with FakeTensorMode():
        assert x(3, 2)[torch.randint(9, (4,))].shape == (4, 2)


def test_writes_are_counted_once_for_each_tensor() -> None:
    for mode in (None, FakeTensorMode()):
        if mode is not None:
            mode.__enter__()
        try:
            a, b = x(3), x(3)
            before = a._version, b._version
            a.add_(1)
            torch.mul(a, 2, out=b)
            torch._foreach_add_([a, b], 1)
            assert (a._version - before[0], b._version - before[1]) == (2, 2)
        finally:
            if mode is not None:
                mode.__exit__(None, None, None)


def test_autocast_casts_inside_of_composites_that_it_has_no_kernel_for() -> None:
    x, weight = (
        TensorSpec(shape, dtype=torch.float32, device=torch.device("cpu")) for shape in ((2, 3), (4, 3, 3))
    )
    assert is_cast_inside(Call.of(torch.ops.aten.bilinear.default, (x, x, weight, None), {}))
    assert not is_cast_inside(Call.of(torch.ops.aten.linear.default, (x, x), {}))
    assert not is_cast_inside(Call.of(torch.ops.aten.relu.default, (x,), {}))
