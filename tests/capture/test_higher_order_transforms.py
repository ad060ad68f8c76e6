"""Transforms of torch.func around higher-order operators and around each other, beside the same program without any.

Eager torch has few of these transforms: the numbers to compare with are those of a plain program under the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.func import grad, jvp, vjp, vmap

from understudy import UnsupportedOperatorException, make_fx

pytestmark = pytest.mark.filterwarnings("ignore")
Program = Callable[[Tensor, Tensor], Any]


def choice(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x * w).sin(), lambda x: (x + w) * w, (x,)).sum()


def plain_choice(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, (x * w).sin().sum(), ((x + w) * w).sum())


def steps(x: Tensor, w: Tensor) -> Tensor:
    carry, rows = scan(lambda carry, row: (carry + row * w, carry * row * w), w.sin(), x)
    return carry.sum() + rows.sum()


def plain_steps(x: Tensor, w: Tensor) -> Tensor:
    carry, total = w.sin(), torch.zeros(())
    for row in x:
        total = total + (carry * row * w).sum()
        carry = carry + row * w
    return carry.sum() + total


def rows(x: Tensor, w: Tensor) -> Tensor:
    return map_over(lambda row: (row * w).sin(), x).sum()


def plain_rows(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin().sum()


def rounds(x: Tensor, w: Tensor) -> Tensor:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * w.sin()), (torch.tensor(0), x))[1].sum()


def plain_rounds(x: Tensor, w: Tensor) -> Tensor:
    return (x * w.sin() ** 3).sum()


def grows(x: Tensor, w: Tensor) -> Tensor:
    """As many rounds as the values demand; none at all, if they are large."""
    return while_loop(lambda x: x.sum().abs() < 9, lambda x: (x * (1.5 + w * w),), (x,))[0].sum()


def plain_grows(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(20):
        x = torch.where(x.sum().abs() < 9, x * (1.5 + w * w), x)
    return x.sum()


def products(x: Tensor, w: Tensor) -> Tensor:
    return (associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic") * w).sum()


def plain_products(x: Tensor, w: Tensor) -> Tensor:
    return (torch.cumprod(x, 0) * w).sum()


def choice_in_steps(x: Tensor, w: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> Any:
        return torch.cond(row.sum() > 1, lambda c, r: c + r * w, lambda c, r: c * r, (carry, row)), carry * 2

    carry, found = scan(step, w.sin(), x)
    return carry.sum() + found.sum()


def plain_choice_in_steps(x: Tensor, w: Tensor) -> Tensor:
    carry, total = w.sin(), torch.zeros(())
    for row in x:
        total = total + (carry * 2).sum()
        carry = torch.where(row.sum() > 1, carry + row * w, carry * row)
    return carry.sum() + total


def several(x: Tensor, w: Tensor) -> Tensor:
    a, b, n = torch.cond(
        x.sum() > 0,
        lambda x: (x * w, {"total": x.sum()}, x.argmax()),
        lambda x: (x - w, {"total": x.prod()}, x.argmin()),
        (x,),
    )
    return a.sum() + b["total"] * 2 + n * 0.5 * a.mean()


def plain_several(x: Tensor, w: Tensor) -> Tensor:
    is_positive = x.sum() > 0
    a = torch.where(is_positive, x * w, x - w)
    n = torch.where(is_positive, x.argmax(), x.argmin())
    return a.sum() + torch.where(is_positive, x.sum(), x.prod()) * 2 + n * 0.5 * a.mean()


def backwards(x: Tensor, w: Tensor) -> Tensor:
    def step(carry: Any, row: Any) -> Any:
        after = {"a": carry["a"] * row["x"].sin() + w, "n": carry["n"] + 1}
        return after, (carry["a"] * carry["n"], row["y"] * w)

    carry, (first, second) = scan(
        step, {"a": w.cos(), "n": torch.tensor(0)}, {"x": x, "y": x * 2}, reverse=True
    )
    return carry["a"].sum() + first.sum() + (second * x).sum() + carry["n"]


def plain_backwards(x: Tensor, w: Tensor) -> Tensor:
    a, total = w.cos(), torch.zeros(())
    for n, row in enumerate(x.flip(0)):
        total = total + (a * n).sum() + (row * 2 * w * row).sum()
        a = a * row.sin() + w
    return a.sum() + total + x.shape[0]


def two_carries(x: Tensor, w: Tensor) -> Tensor:
    def round_(a: Tensor, b: Tensor, n: Tensor) -> Any:
        return a * b.sin(), b + a.mean(0) * w, n + 1

    a, b, _ = while_loop(lambda a, b, n: n < 4, round_, (x, w, torch.tensor(0)))
    return (a * b).sum()


def plain_two_carries(x: Tensor, w: Tensor) -> Tensor:
    a, b = x, w
    for _ in range(4):
        a, b = a * b.sin(), b + a.mean(0) * w
    return (a * b).sum()


def no_round(x: Tensor, w: Tensor) -> Tensor:
    return while_loop(lambda y: y.sum() > 1e9, lambda y: (y * w,), (x,))[0].sum() * w.sum()


def plain_no_round(x: Tensor, w: Tensor) -> Tensor:
    return x.sum() * w.sum()


PROGRAMS: dict[str, tuple[Program, Program]] = {
    "cond": (choice, plain_choice),
    "scan": (steps, plain_steps),
    "map": (rows, plain_rows),
    "while_loop": (rounds, plain_rounds),
    "while_loop by values": (grows, plain_grows),
    "associative_scan": (products, plain_products),
    "cond in scan": (choice_in_steps, plain_choice_in_steps),
    "cond with several results": (several, plain_several),
    "scan of structures, backwards": (backwards, plain_backwards),
    "while_loop with two carries": (two_carries, plain_two_carries),
    "while_loop without a round": (no_round, plain_no_round),
}


TRANSFORMS: dict[str, Callable[[Program], Program]] = {
    "vjp": lambda f: lambda x, w: vjp(f, x, w)[1](w.sum()),
    "grad of grad": lambda f: grad(lambda x, w: grad(f)(x, w).square().sum(), (0, 1)),
}


AT_ONE_SIZE = {"associative_scan"}
"""Written out step by step."""


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


def given(rows: int = 4) -> tuple[Tensor, Tensor]:
    """In double precision: derivatives of derivatives round."""
    return torch.rand(rows, 3, dtype=torch.float64) + 0.1, torch.rand(3, dtype=torch.float64)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_transformed(name: str, transform: str) -> None:
    f, plain = map(TRANSFORMS[transform], PROGRAMS[name])
    gm = make_fx(f, tracing_mode="fake")(*given())
    for _ in range(2):
        x, w = given()
        torch.testing.assert_close(gm(x, w), plain(x, w))
        torch.testing.assert_close(gm(-x, w), plain(-x, w))


@pytest.mark.parametrize("transform", ["grad of grad"])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in AT_ONE_SIZE])
def test_transformed_for_other_sizes(name: str, transform: str) -> None:
    f, plain = map(TRANSFORMS[transform], PROGRAMS[name])
    gm = make_fx(f, tracing_mode="symbolic")(*given())
    for rows in (4, 6):
        x, w = given(rows)
        torch.testing.assert_close(gm(x, w), plain(x, w))


def test_for_real_the_number_of_rounds_is_fixed_and_the_graph_says_so() -> None:
    f, plain = map(TRANSFORMS["grad of grad"], (grows, plain_grows))
    x, w = torch.full((4, 3), 0.6), torch.full((3,), 0.5)  # one round
    gm = make_fx(f)(x, w)
    for factor in (1.0, 0.9, 2.0):  # none at all has the size of one
        torch.testing.assert_close(gm(x * factor, w), plain(x * factor, w))
    with pytest.raises(
        RuntimeError,
        match=r"the iteration count is that of the recording \(1\); trace in fake",
    ):
        gm(x * 0.3, w)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_gradients_and_gradients_of_these(name: str, mode: str) -> None:
    def twice(f: Program) -> Program:
        def gradients(x: Tensor, w: Tensor) -> Any:
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            first = torch.autograd.grad(f(x, w), (x, w), create_graph=True)
            again = sum(grad.square().sum() for grad in first)
            return [grad.detach() for grad in first], torch.autograd.grad(again, (x, w))

        return gradients

    f, plain = map(twice, PROGRAMS[name])
    torch.manual_seed(0)
    x, w = given()
    example = (
        (x * 1.01, w) if mode == "real" else given()
    )  # for real, loops go round as often as in the example
    gm = make_fx(f, tracing_mode=mode)(*example)
    torch.testing.assert_close(gm(x, w), plain(x, w))


def test_a_backward_pass_does_not_compute_the_forward_pass_again() -> None:
    gm = make_fx(grad(steps, (0, 1)), tracing_mode="fake")(*given())
    assert len([node for node in gm.graph.nodes if str(node.target) == "scan"]) == 2
    gm = make_fx(grad(rounds, (0, 1)), tracing_mode="fake")(*given())
    names = [str(node.target) for node in gm.graph.nodes if "while_loop" in str(node.target)]
    assert [name for name in names if "graph" not in name] == ["while_loop_stack_output", "while_loop"]


def test_gradients_of_a_number_that_goes_from_round_to_round() -> None:
    def f(x: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, x))[1].sum()

    with pytest.raises(
        UnsupportedOperatorException,
        match=r"(?s)gradients of while_loop: expected loop state of tensors only, got a number.*torch\.tensor\(0\)",
    ):
        make_fx(grad(f), tracing_mode="fake")(torch.rand(3))


@pytest.mark.parametrize("transform", [vmap, lambda f: lambda x: jvp(f, (x,), (x,))], ids=["vmap", "jvp"])
def test_batches_and_tangents_of_loops_are_refused(transform: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return while_loop(lambda x: x.sum() < 9, lambda x: (x * 2,), (x,))[0]

    with pytest.raises(
        UnsupportedOperatorException,
        match=r"(?s)while_loop has no rule for torch\.func\.(vmap|jvp).*write it out in plain operators",
    ):
        make_fx(transform(f), tracing_mode="fake")(torch.rand(4, 3))


def test_ordinary_autograd_around_a_transform() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(grad(choice)(x, w).square().sum(), (x, w))

    gm = make_fx(f, tracing_mode="fake")(*given())
    x, w = given()
    expected = grad(lambda x, w: grad(plain_choice)(x, w).square().sum(), (0, 1))(x, w)
    torch.testing.assert_close(gm(x, w), expected)


def test_two_rounds_of_a_real_loop() -> None:
    """How many rounds there were is a number then, and the rounds are counted by a symbol."""
    x, w = torch.full((2, 2), 2.0), torch.ones(2)
    gm = make_fx(grad(grows, (0, 1)))(x, w)
    torch.testing.assert_close(gm(x, w), grad(plain_grows, (0, 1))(x, w))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_transform_above_autograd(mode: str) -> None:
    """The transform is applied to the operator first; its result is recorded below autograd."""

    def of_operands(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * x.sin(), lambda x: x * 2, (x,)).sum()

    def plain(x: Tensor) -> Tensor:
        return torch.where(x.sum() > 0, x * x.sin(), x * 2).sum()

    gm = make_fx(grad(of_operands), tracing_mode=mode, pre_dispatch=True)(torch.rand(4, 3))
    for x in (torch.rand(4, 3), -torch.rand(4, 3)):
        torch.testing.assert_close(gm(x), grad(plain)(x))
