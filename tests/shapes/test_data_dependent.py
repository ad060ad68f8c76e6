"""Operators whose answer is in the data, in a mode with a shape environment: the answer is a symbol.

Each program runs for real and with stand-ins. The symbols are bound to the real sizes, and then everything that the
stand-ins say has to be what the real run gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from understudy import FakeTensorMode, make_fx
from understudy.errors import GuardOnDataDependentSymNode
from understudy.shapes.env import ShapeEnv
from understudy.shapes.sizes import from_torch

Program = Callable[[torch.Tensor], Any]


@pytest.fixture
def env() -> ShapeEnv:
    return ShapeEnv()


@pytest.fixture
def mode(env: ShapeEnv) -> FakeTensorMode:
    return FakeTensorMode(shape_env=env)


def real_input() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8)


def numbers_of(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return [from_torch(n) for n in (*leaf.shape, *leaf.stride(), leaf.storage_offset())]
    return [from_torch(leaf)]


def check(program: Program, env: ShapeEnv, mode: FakeTensorMode) -> Any:
    """Run for real and with stand-ins; bind the symbols; compare."""
    real = program(real_input())
    x = mode.from_tensor(real_input(), source="x", static_shapes=True)
    with mode:
        fake = program(x)
    real_leaves, fake_leaves = tree_leaves(real), tree_leaves(fake)
    assert len(real_leaves) == len(fake_leaves)
    bound: dict[Any, int] = {}
    pairs = [
        pair for r, f in zip(real_leaves, fake_leaves, strict=True)
        for pair in zip(numbers_of(r), numbers_of(f), strict=True)
    ]  # fmt: skip
    for number, node in pairs:
        if getattr(getattr(node, "value", None), "is_symbol", False):
            assert bound.setdefault(node.value, number) == number
    for number, node in pairs:
        value = getattr(node, "value", node)
        if hasattr(value, "evaluate") and all(symbol in bound for symbol in value.symbols):
            assert value.evaluate(bound) == number
        elif not hasattr(value, "evaluate"):
            assert value == number
    for r, f in zip(real_leaves, fake_leaves, strict=True):
        if isinstance(r, torch.Tensor):
            assert r.dtype == f.dtype
    for fact in env.runtime_asserts:
        if all(symbol in bound for symbol in fact.condition.symbols):
            assert fact.holds(bound), str(fact)
    assert not env.guards
    return fake


def labels(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(1)


def rows(x: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0] > -10]


def count(x: torch.Tensor) -> Any:
    return (x > 0).sum().item()


def write(x: torch.Tensor, put: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = x.clone()
    put(x)
    return x


GIVEN: dict[str, Program] = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero as a tuple": lambda x: x.nonzero(as_tuple=True),
    "where": lambda x: torch.where(x > 0),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "masked_select, repeated mask": lambda x: torch.masked_select(x, x[:1] > 0),
    "masked_select, repeated input": lambda x: torch.masked_select(x[:1], x > 0),
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 0] > 0],
    "mask of columns": lambda x: x[:, x[0] > 0],
    "unique": lambda x: torch.unique(labels(x)),
    "unique, all": lambda x: torch.unique(labels(x), return_inverse=True, return_counts=True),
    "unique rows": lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(
        labels(x), return_inverse=True, return_counts=True
    ),
    "unique_consecutive columns": lambda x: torch.unique_consecutive(x, dim=1, return_counts=True),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, labels(x), dim=0),
    "repeat_interleave of repeats": lambda x: torch.repeat_interleave(labels(x)),
    "repeat_interleave, told": lambda x: torch.repeat_interleave(
        x, torch.tensor([1, 2, 3, 4]), dim=0, output_size=10
    ),
    "bincount": lambda x: torch.bincount(labels(x)),
    "bincount, at least": lambda x: torch.bincount(labels(x), minlength=9),
    "bincount, weights": lambda x: torch.bincount(labels(x), weights=x[:, 0]),
    "item": lambda x: count(x),
    "tolist": lambda x: labels(x).tolist(),
    "tolist, nested": lambda x: torch.stack([labels(x), labels(x)]).tolist(),
}

PUT: dict[str, Program] = {
    "number at a mask": lambda x: write(x, lambda y: y.__setitem__(y > 0, 0.0)),
    "row at a mask of rows": lambda x: write(x, lambda y: y.__setitem__(y[:, 0] > 0, torch.ones(8))),
    "what was there": lambda x: write(x, lambda y: y.__setitem__(y > 0, y[y > 0] * 2)),
    "index_put": lambda x: x.index_put((x > 0,), torch.tensor(0.0)),
    "index_add": lambda x: torch.zeros(4, 8).index_add(
        0, torch.where(labels(x) > 2)[0], x[torch.where(labels(x) > 2)[0]]
    ),
}

MADE: dict[str, Program] = {
    "arange": lambda x: torch.arange(count(x)),
    "arange from 2": lambda x: torch.arange(2, count(x)),
    "arange by 2": lambda x: torch.arange(0, count(x), 2),
    "empty": lambda x: torch.empty(count(x), 3) + 1,
    "zeros": lambda x: torch.zeros(3, count(x)),
    "full": lambda x: torch.full((count(x), 2), 1.5),
    "randn": lambda x: torch.randn(count(x)),
    "eye": lambda x: torch.eye(count(x)),
    "new_empty": lambda x: x.new_empty(count(x)),
    "repeat": lambda x: x.repeat(count(x), 1),
    "expand": lambda x: x.expand(count(x), 4, 8),
    "interpolate": lambda x: F.interpolate(x[None, None], size=(count(x), count(x))),
}

USED: dict[str, Program] = {
    "add": lambda x: rows(x) + rows(x),
    "add a row": lambda x: rows(x) + x[0],
    "cat": lambda x: torch.cat([rows(x), x]),
    "stack": lambda x: torch.stack([rows(x)] * 2),
    "view": lambda x: rows(x).view(-1, 2, 4).transpose(0, 1),
    "view of all": lambda x: x[x > 0].view(-1, 1).expand(-1, 3).contiguous(),
    "reshape": lambda x: x.nonzero().reshape(-1),
    "mm": lambda x: x.nonzero().float() @ torch.ones(2, 5),
    "mm of its transpose": lambda x: rows(x).t() @ rows(x),
    "bmm": lambda x: torch.bmm(rows(x)[None].transpose(1, 2), rows(x)[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", rows(x), rows(x)),
    "linear": lambda x: F.linear(rows(x), torch.ones(5, 8), torch.ones(5)),
    "softmax": lambda x: torch.softmax(x[x > 0], 0),
    "layer_norm": lambda x: F.layer_norm(rows(x), (8,)),
    "batch_norm": lambda x: F.batch_norm(rows(x), torch.zeros(8), torch.ones(8)),
    "dropout": lambda x: F.dropout(rows(x)),
    "embedding": lambda x: F.embedding(torch.unique(labels(x)), torch.ones(10, 6)),
    "one_hot": lambda x: F.one_hot(torch.unique(labels(x)), 10),
    "index_select": lambda x: x.index_select(1, torch.unique(labels(x))),
    "gather": lambda x: torch.gather(x, 1, torch.unique(labels(x)).expand(4, -1)),
    "pad": lambda x: F.pad(rows(x), (1, 1)),
    "sort": lambda x: rows(x).sort(0),
    "topk": lambda x: rows(x).topk(1, 0),
    "cumsum": lambda x: x.nonzero().cumsum(0),
    "sum": lambda x: (rows(x).sum(), rows(x).mean(0), rows(x).amax(1)),
    "cross_entropy": lambda x: F.cross_entropy(rows(x), labels(rows(x))),
    "chunk": lambda x: rows(x).chunk(2, 1),
    "conv1d": lambda x: F.conv1d(rows(x)[:, None], torch.ones(2, 1, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(*[rows(x).view(1, 1, -1, 8)] * 3),
    "sizes": lambda x: (x.nonzero().numel(), x.nonzero().size(0), x.nonzero().shape),
}  # fmt: skip


@pytest.mark.parametrize("name", [*GIVEN, *PUT, *MADE, *USED])
def test_as_the_real_run(name: str, env: ShapeEnv, mode: FakeTensorMode) -> None:
    check({**GIVEN, **PUT, **MADE, **USED}[name], env, mode)


def checked(x: torch.Tensor, low: int, high: int) -> Any:
    n = count(x[:1])
    torch._check(n >= low)
    torch._check(n <= high)
    return n


SLICED: dict[str, Program] = {
    "to": lambda x: x[:, : checked(x, 0, 8)],
    "from": lambda x: x[:, checked(x, 0, 8) :],
    "last": lambda x: x[:, -checked(x, 1, 8) :],
    "narrow": lambda x: x.narrow(1, 0, checked(x, 0, 8)),
    "select": lambda x: x.select(1, checked(x, 0, 7)),
    "split": lambda x: torch.split(x, [checked(x, 0, 8), 8 - checked(x, 0, 8)], 1),
    "unchecked": lambda x: x[:, : count(x[:1])],
}


@pytest.mark.parametrize("name", SLICED)
def test_slices(name: str, env: ShapeEnv, mode: FakeTensorMode) -> None:
    check(SLICED[name], env, mode)


def test_split_by_the_elements_of_a_tensor(env: ShapeEnv, mode: FakeTensorMode) -> None:
    def program(x: torch.Tensor) -> Any:
        first = (x[0] > 0).sum()
        sizes = torch.stack([first, 8 - first]).tolist()
        for size in sizes:
            torch._check(size >= 0)
        return torch.split(x, sizes, 1)

    check(program, env, mode)
    assert "== 8" in " ".join(str(fact.condition) for fact in env.runtime_asserts)


def test_gradients_through_a_mask(env: ShapeEnv, mode: FakeTensorMode) -> None:
    def program(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        weight = torch.ones(8, 8, requires_grad=True)
        (rows(x) @ weight).relu().sum().backward()
        return x.grad, weight.grad

    check(program, env, mode)


# --- the same question ----------------------------------------------------------------------------------------


def stand_in(mode: FakeTensorMode) -> Any:
    return mode.from_tensor(real_input(), source="x", static_shapes=True)


def test_the_same_question_has_the_same_answer(env: ShapeEnv, mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode:
        assert x.nonzero()._spec is x.nonzero()._spec
        assert torch.unique(x)._spec is torch.unique(x)._spec
        total = x.sum(dtype=torch.int64)
        assert total.item() == total.item()
    assert not env.guards and not env.runtime_asserts


def test_other_questions_have_other_answers(env: ShapeEnv, mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode:
        index = labels(x)
        sizes = [
            index.nonzero().shape[0], torch.unique(index).shape[0], torch.unique_consecutive(index).shape[0],
            torch.repeat_interleave(index).shape[0], torch.bincount(index).shape[0],
            torch.bincount(index, minlength=3).shape[0], torch.masked_select(x, x[:1] > 0).shape[0],
            torch.unique(x, dim=0).shape[0], torch.unique(x, dim=1).shape[1],
        ]  # fmt: skip
    assert len({str(size) for size in sizes}) == len(sizes)


def test_a_write_makes_it_another_question(mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode:
        before = x.nonzero()._spec
        x.add_(1)
        assert x.nonzero()._spec is not before


def test_a_new_epoch_makes_it_another_question(mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode:
        before = x.nonzero()._spec
        mode.epoch += 1
        assert x.nonzero()._spec is not before


# --- branches ---------------------------------------------------------------------------------------------------


def test_a_branch_on_data_says_what_to_do(mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode, pytest.raises(GuardOnDataDependentSymNode) as caught:
        n = labels(x)[0].item()
        if n > 3:
            pytest.fail("nobody can know")
    message = str(caught.value)
    assert "torch._check(" in message and ".item()" in message and "test_data_dependent.py" in message


def test_a_branch_that_was_checked(mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode:
        n = labels(x)[0].item()
        torch._check(n > 3)
        assert n > 3
        assert not n <= 3
        assert n * 2 >= 8


@pytest.mark.filterwarnings("ignore:_check_is_size")
def test_a_size(env: ShapeEnv, mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode:
        n = x.long()[0, 0].item()
        torch._check_is_size(n)
        assert n >= 0
        assert torch.empty(n, 3).shape[0] == n
    assert [str(fact.condition) for fact in env.runtime_asserts] == ["u0 >= 0"]


def test_an_empty_result_is_a_branch(mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode, pytest.raises(GuardOnDataDependentSymNode):
        bool(x[x > 0].numel() == 0)


def test_sizes_that_meet_are_equal_from_then_on(env: ShapeEnv, mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode:
        a, b = x[x[:, 0] > 0], x[x[:, 1] > 0]
        assert (a + b).shape[0] == a.shape[0] == b.shape[0]
    assert [str(fact.condition) for fact in env.runtime_asserts] == ["u0 == u1"]


def test_divisibility_is_checked_when_the_program_runs(env: ShapeEnv, mode: FakeTensorMode) -> None:
    x = stand_in(mode)
    with mode:
        assert str(x[x > 0].view(2, -1)._spec) == "f32[2, u0//2]@cpu"
    assert [str(fact.condition) for fact in env.runtime_asserts] == ["u0 % 2 == 0"]


def test_making_a_tensor_on_meta_asks_nothing(env: ShapeEnv, mode: FakeTensorMode) -> None:
    sizes = [env.create_unbacked_symint() for _ in range(3)]
    with mode:
        assert torch.empty(sizes, device="meta").shape[2].node is sizes[2].node
        assert torch.empty(sizes[:1], device="meta").shape[0].node is sizes[0].node
    assert not env.guards


def test_printing_assumes_nothing(env: ShapeEnv, mode: FakeTensorMode) -> None:
    x = mode.from_tensor(real_input(), source="x")
    with mode:
        n = labels(x)[0].item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[1])
        before = len(env.guards), len(env.runtime_asserts)
        str(x[:, -n:]._spec), str(x.t()._spec), repr(x[:, 1:].nonzero())
    assert (len(env.guards), len(env.runtime_asserts)) == before


def test_without_leave_it_is_refused() -> None:
    env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=env)
    x = stand_in(mode)
    with mode:
        with pytest.raises(Exception, match="depends on data"):
            x.nonzero()
        with pytest.raises(Exception, match="data"):
            x.sum().item()


def _picked(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return x[mask]


def _picked_columns(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return x[:, mask]


def _put(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return x.index_put((mask,), torch.zeros(()))


@pytest.mark.parametrize("shape", [(4,), (5,), (6,), (1,), (4, 6), (4, 5), (4, 6, 2)])
@pytest.mark.parametrize("program", [_picked, _picked_columns, _put])
def test_a_mask_has_the_sizes_of_what_it_picks_from(program: Any, shape: tuple[int, ...]) -> None:
    x, mask = torch.randn(4, 6), torch.ones(shape, dtype=torch.bool)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    try:
        rank: Any = program(x, mask).ndim
    except IndexError:
        with pytest.raises(IndexError), mode:
            program(mode.from_tensor(x), mode.from_tensor(mask))
        with pytest.raises(IndexError), FakeTensorMode():
            program(torch.randn(4, 6), torch.tensor(mask.tolist()))
        return
    with mode:
        assert program(mode.from_tensor(x), mode.from_tensor(mask)).ndim == rank


def test_that_it_has_is_a_guard() -> None:
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    x, mask = mode.from_tensor(torch.randn(4, 6), source="x"), mode.from_tensor(torch.ones(4) > 0, source="m")
    with mode:
        _picked(x, mask)
    assert [guard.text for guard in env.guards] == ["x_0 == m_0"]
    with pytest.raises(
        IndexError, match=r"the mask b8\[5\]@cpu does not match f32\[x_0, x_1\]@cpu"
    ) as caught:
        _picked(x, mode.from_tensor(torch.ones(5) > 0, static_shapes=True))
    assert "test_data_dependent.py" in str(caught.value)


REFUSED: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "bincount of two dimensions": (torch.bincount, [torch.zeros(2, 3, dtype=torch.int64)]),
    "bincount of floats": (torch.bincount, [torch.zeros(3)]),
    "bincount of truth values": (torch.bincount, [torch.zeros(3, dtype=torch.bool)]),
    "bincount with other weights": (torch.bincount, [torch.zeros(3, dtype=torch.int64), torch.zeros(4)]),
    "bincount with a column of weights": (
        torch.bincount,
        [torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1)],
    ),
    "bincount of less than nothing": (
        lambda x: torch.bincount(x, minlength=-1),
        [torch.zeros(3, dtype=torch.int64)],
    ),
    "masked_select by floats": (torch.masked_select, [torch.zeros(3), torch.zeros(3)]),
    "masked_select by bytes": (torch.masked_select, [torch.zeros(3), torch.zeros(3, dtype=torch.uint8)]),
    "repeat_interleave by floats": (torch.repeat_interleave, [torch.zeros(3)]),
    "repeat_interleave by rows": (torch.repeat_interleave, [torch.zeros(3, 2, dtype=torch.int64)]),
    "unique along no dimension": (lambda x: torch.unique(x, dim=2), [torch.zeros(3, 2)]),
    "unique along a dimension of a number": (lambda x: torch.unique(x, dim=0), [torch.zeros(())]),
}


@pytest.mark.parametrize(("program", "inputs"), REFUSED.values(), ids=REFUSED)
def test_what_eager_refuses_is_refused(program: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    """Where data decides a size, what is wrong before any data is looked at is wrong."""
    with pytest.raises((RuntimeError, IndexError)):
        program(*inputs)
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = [mode.from_tensor(t) for t in inputs]
    with pytest.raises((RuntimeError, IndexError)) as caught, mode:
        program(*fakes)
    assert "test_data_dependent.py" in str(caught.value) and not env.unbacked


def test_weights_are_as_many_as_what_is_counted() -> None:
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    x, w = (
        mode.from_tensor(torch.zeros(3, dtype=torch.int64), source="x"),
        mode.from_tensor(torch.zeros(3), source="w"),
    )
    with mode:
        torch.bincount(x, w)
    assert [guard.text for guard in env.guards] == ["x_0 == w_0"]


def test_losses_of_targets_whose_lengths_are_data() -> None:
    def program(x: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, lengths: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        losses = F.ctc_loss(x.log_softmax(2), targets, steps, lengths, reduction="none")
        return losses, *torch.autograd.grad(losses.sum(), x)

    def examples(length: int, batch: int, longest: int) -> list[torch.Tensor]:
        lengths = torch.arange(batch) % longest + 1
        return [
            torch.randn(length, batch, 6),
            torch.randint(1, 5, (batch, longest)),
            lengths * 0 + length,
            lengths,
        ]

    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    fakes = [mode.from_tensor(t, source=f"x{i}") for i, t in enumerate(examples(12, 3, 4))]
    with mode:
        losses, gradient = program(*fakes)
    assert str(losses.spec) == "f32[x0_1]@cpu" and str(gradient.spec) == "f32[x0_0, x0_1, x0_2]@cpu"
    assert {"x0_1 == x2_0", "x0_1 == x3_0"} <= {guard.text for guard in env.guards}
    graph = make_fx(program, tracing_mode="symbolic")(*examples(12, 3, 4))
    given = examples(15, 5, 7)
    for ours, real in zip(graph(*given), program(*given), strict=True):
        torch.testing.assert_close(ours, real)
    with pytest.raises(RuntimeError, match="expected one length for each entry of the batch"), mode:
        program(*fakes[:3], torch.ones(2, dtype=torch.int64) * torch.randint(1, 3, (2,)))


BOUNDED: dict[str, Any] = {
    "drawn": (lambda: torch.randint(3, 7, ()).item(), 3, 6),
    "a place": (lambda: torch.randn(5).argmax().item(), 0, 4),
    "counted": (lambda: (torch.randn(5) > 0).sum().item(), 0, 5),
    "a list": (lambda: torch.randint(0, 4, (3,)).tolist()[1], 0, 3),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_numbers_have_the_bounds_that_the_program_tells(name: str) -> None:
    draw, least, most = BOUNDED[name]
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        number = draw()
        assert bool(number >= least) and bool(number <= most)
        with pytest.raises(GuardOnDataDependentSymNode):
            bool(number > least)
        assert torch.randn(most, 2)[:number].shape == (number, 2)
    assert not env.runtime_asserts
