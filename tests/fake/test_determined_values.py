"""Values that follow from the program alone can be read; all others raise, and none is ever stale."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from understudy import DataDependentOutputException, FakeTensor, FakeTensorMode, ShapeEnv


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode()


DETERMINED: dict[str, Callable[[], torch.Tensor]] = {
    "literal": lambda: torch.tensor([1.0, 2.0]),
    "scalar": lambda: torch.tensor(3),
    "bool": lambda: torch.tensor(True),
    "complex": lambda: torch.tensor(1 + 2j),
    "nested list": lambda: torch.tensor([[1, 2], [3, 4]]),
    "empty list": lambda: torch.tensor([]),
    "scalar_tensor": lambda: torch.scalar_tensor(2.5),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "arange": lambda: torch.arange(5),
    "arange step": lambda: torch.arange(1, 2, 0.25, dtype=torch.float64),
    "linspace": lambda: torch.linspace(0, 1, 12),
    "logspace": lambda: torch.logspace(0, 2, 3),
    "zeros": lambda: torch.zeros(2, 3),
    "ones": lambda: torch.ones(2, 3, dtype=torch.int32),
    "full": lambda: torch.full((2,), math.pi),
    "eye": lambda: torch.eye(3),
    "zeros_like": lambda: torch.zeros_like(torch.empty(3)),
    "full_like": lambda: torch.full_like(torch.empty(3), 4.0),
    "new_zeros": lambda: torch.empty(2).new_zeros(3),
    "new_tensor": lambda: torch.empty(2).new_tensor([5.0, 6.0]),
    "tril_indices": lambda: torch.tril_indices(3, 3),
    "hann_window": lambda: torch.hann_window(5),
    "arithmetic": lambda: torch.arange(4) * 2 + 1,
    "comparison": lambda: torch.arange(4) > 1,
    "broadcast": lambda: torch.arange(3)[:, None] - torch.arange(3)[None, :],
    "reduction": lambda: torch.arange(6.0).view(2, 3).sum(1),
    "mask": lambda: torch.tril(torch.ones(3, 3)).masked_fill(torch.eye(3) == 1, 7),
    "cat": lambda: torch.cat([torch.zeros(2), torch.ones(1)]),
    "stack": lambda: torch.stack([torch.arange(2), torch.tensor([5, 6])]),
    "index": lambda: torch.arange(10)[torch.tensor([1, 3])],
    "where": lambda: torch.where(torch.arange(3) > 1, 1.0, torch.zeros(3)),
    "cumsum": lambda: torch.arange(5).cumsum(0),
    "matmul": lambda: torch.ones(2, 3) @ torch.eye(3),
    "split": lambda: torch.arange(6).split(2)[1],
    "max": lambda: torch.tensor([1.0, 9.0, 3.0]).max(0)[1],
    "sort": lambda: torch.tensor([3, 1, 2]).sort()[0],
    "view": lambda: torch.arange(6).view(2, 3).t()[1:],
    "conj": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "imag of conj": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "view as dtype": lambda: torch.tensor([1.0, 2.0]).view(torch.int32),
    "to": lambda: torch.arange(3).to(torch.float16),
    "contiguous": lambda: torch.arange(6).view(2, 3).t().contiguous(),
    "clone": lambda: torch.arange(3).clone(),
    "detach": lambda: torch.arange(3.0, requires_grad=True).detach(),
    "expand": lambda: torch.tensor([2]).expand(3),
    "flip": lambda: torch.arange(3).flip(0),
    "meshgrid": lambda: torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")[1],
    "outer": lambda: torch.outer(1.0 / 10 ** (torch.arange(0, 4, 2) / 4), torch.arange(3.0)),
    "requires grad": lambda: torch.zeros(3, requires_grad=True) + 1,
    "pad": lambda: torch.nn.functional.pad(torch.ones(2), (1, 1)),
    "scatter": lambda: torch.zeros(4).scatter(0, torch.tensor([1, 2]), 5.0),
    "bincount-like": lambda: torch.nn.functional.one_hot(torch.arange(3), 4),
}


def read(t: torch.Tensor) -> Any:
    return t.detach().tolist()


@pytest.mark.parametrize("make", DETERMINED.values(), ids=DETERMINED)
def test_determined_values_can_be_read(make: Callable[[], torch.Tensor], mode: FakeTensorMode) -> None:
    expected = read(make())
    with mode:
        fake = make()
        assert type(fake) is FakeTensor
        assert str(read(fake)) == str(expected)
        assert str(read(fake)) == str(expected), "and a second time"


@pytest.mark.parametrize("make", DETERMINED.values(), ids=DETERMINED)
def test_determined_values_on_a_device_that_is_not_here(
    make: Callable[[], torch.Tensor], mode: FakeTensorMode
) -> None:
    expected = read(make())
    with mode, torch.device("cuda"):
        fake = make()
        assert fake.is_cuda
        assert str(read(fake)) == str(expected)


UNDETERMINED: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(1),
    "empty_like": lambda: torch.empty_like(torch.zeros(1)),
    "new_empty": lambda: torch.zeros(1).new_empty(1),
    "rand": lambda: torch.rand(1),
    "randn_like": lambda: torch.randn_like(torch.zeros(1)),
    "randint": lambda: torch.randint(5, (1,)),
    "randperm": lambda: torch.randperm(1),
    "normal_": lambda: torch.zeros(1).normal_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((1,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(3), 1),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(1)),
    "sum with random": lambda: torch.zeros(1) + torch.rand(1),
    "set_": lambda: torch.zeros(1).set_(torch.rand(1)),
    "resize_": lambda: torch.zeros(1).resize_(2),
    "xavier": lambda: torch.nn.init.xavier_uniform_(torch.zeros(2, 2)),
    "out": lambda: torch.add(torch.rand(1), 1, out=torch.zeros(1)),
    "data": lambda: data_set_to(torch.rand(1)),
}


def data_set_to(other: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(1)
    result.data = other
    return result


@pytest.mark.parametrize("make", UNDETERMINED.values(), ids=UNDETERMINED)
def test_undetermined_values_are_refused(make: Callable[[], torch.Tensor], mode: FakeTensorMode) -> None:
    with mode:
        fake = make()
        with pytest.raises(DataDependentOutputException):
            fake.tolist()
        with pytest.raises(DataDependentOutputException):
            fake.sum().item()


# --- the ways to read -------------------------------------------------------------------------------------------


def test_all_ways_of_reading(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.tensor(3.0)
        assert x.item() == 3.0 and float(x) == 3.0 and int(x) == 3 and bool(x) is True
        assert complex(x) == 3 and f"{x:.2f}" == "3.00"
        assert [1, 2, 3, 4][torch.tensor(2)] == 3
        assert list(range(torch.tensor(3))) == [0, 1, 2]
        assert torch.arange(5)[torch.tensor(2)].item() == 2
        assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))
        assert not torch.equal(torch.arange(3), torch.tensor([0, 1, 3]))
        assert not torch.equal(torch.empty(3), torch.empty(4))
        assert torch.allclose(torch.zeros(2), torch.zeros(2))
        assert math.sqrt(torch.tensor(16)) == 4
        assert [int(i) for i in torch.arange(3)] == [0, 1, 2]
        assert torch.tensor(2) in [torch.tensor(1), torch.tensor(2)]
        assert torch.tensor([1, 2]).numpy().tolist() == [1, 2]
        assert max(torch.tensor(1), torch.tensor(4)).item() == 4
        assert torch.empty(int(torch.tensor(3)), 2).shape == (3, 2)
        assert torch.zeros(tuple(torch.tensor([2, 3]))).shape == (2, 3)
        assert x.is_nonzero()
        if torch.arange(3).sum() > 2:
            x = x + 1
        assert x.item() == 4


def test_sizes_from_known_values(mode: FakeTensorMode) -> None:
    """What stops vision transformers from being built under torch's own mode."""
    with mode:
        rates = [x.item() for x in torch.linspace(0, 0.1, 12)]
        assert rates[-1] == pytest.approx(0.1)
        assert torch.linspace(0, 1, 3).tolist() == [0.0, 0.5, 1.0]


def test_constant_is_for_literals(mode: FakeTensorMode) -> None:
    with mode:
        literal = torch.tensor(3)
        pair, nothing = torch.tensor([1, 2]), torch.empty(())
    assert literal.constant is not None and literal.constant.item() == 3
    assert (literal + 1).constant is not None
    assert pair.constant is None and nothing.constant is None
    literal.add_(nothing.long())
    assert literal.constant is None


def test_reading_outside_the_mode(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.arange(3)
    assert x.tolist() == [0, 1, 2]
    assert (x + 1).tolist() == [1, 2, 3]
    assert int(x[1]) == 1


def test_the_value_of_a_cuda_literal(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.tensor(3.0, device="cuda")
        assert x.is_cuda and x.item() == 3.0
        assert (x * 2).cpu().item() == 6.0
        assert torch.arange(3).cuda().tolist() == [0, 1, 2]
        assert torch.arange(3, device="cuda").to("cpu", torch.float32).tolist() == [0, 1, 2]


# --- writes -------------------------------------------------------------------------------------------------------


def test_a_determined_write_is_followed(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.zeros(4)
        view, alias = x[1:3], x.view(2, 2)
        view.fill_(5)
        assert x.tolist() == [0, 5, 5, 0]
        assert alias.tolist() == [[0, 5], [5, 0]]
        alias[1] = torch.tensor([7.0, 8.0])
        assert x.tolist() == [0, 5, 7, 8]
        x[x > 6] = 1
        assert view.tolist() == [5, 1]
        torch.add(x, 1, out=x)
        assert x.tolist() == [1, 6, 2, 2]
        x.unsqueeze_(0)
        assert x.tolist() == [[1, 6, 2, 2]]


def test_an_undetermined_write_forgets_for_all_aliases(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.zeros(4)
        view, detached, other = x[1:3], x.detach(), x.view(2, 2)
        before = x + 1
        view.add_(torch.rand(2))
        for alias in (x, view, detached, other, x[0]):
            with pytest.raises(DataDependentOutputException):
                alias.sum().item()
        assert before.tolist() == [1, 1, 1, 1], "what was computed before is as it was"


def test_a_partial_write_to_unknown_memory_stays_unknown(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.empty(4)
        x[:2].zero_()
        with pytest.raises(DataDependentOutputException):
            x.tolist()


def test_memory_as_it_was_found_stays_unknown(mode: FakeTensorMode) -> None:
    """Following it would send the initialisation of every parameter past the hot path."""
    with mode:
        for x in (torch.empty(4), torch.rand(4)):
            x.zero_()
            with pytest.raises(DataDependentOutputException):
                x.tolist()


def test_several_outputs_written_at_once(mode: FakeTensorMode) -> None:
    with mode:
        xs = [torch.zeros(1), torch.ones(1)]
        torch._foreach_add_(xs, 1)
        assert [x.item() for x in xs] == [1, 2]
        torch._foreach_add_(xs, [torch.rand(1), torch.ones(1)])
        with pytest.raises(DataDependentOutputException):
            xs[0].item()


def test_one_call_that_writes_to_several_views(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.zeros(4)
        torch._foreach_add_([x[:2], x[2:]], [1.0, 2.0])
        assert x.tolist() == [1, 1, 2, 2]


def test_writes_that_the_schema_does_not_mention(mode: FakeTensorMode) -> None:
    with mode:
        norm = torch.nn.BatchNorm1d(3)
        assert norm.running_mean.tolist() == [0, 0, 0]
        norm.eval()(torch.rand(4, 3))
        assert norm.running_mean.tolist() == [0, 0, 0]
        norm.train()(torch.rand(4, 3))
        assert norm.num_batches_tracked.item() == 1
        for buffer in (norm.running_mean, norm.running_var):
            with pytest.raises(DataDependentOutputException):
                buffer.tolist()


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(3),
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "chunk": lambda x: x.chunk(3)[0],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "copy": copy.copy,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "set_ tensor": lambda x: torch.empty(3).set_(x),
    "set_ storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (3,), (1,)),
    "data of another": lambda x: put(torch.empty(3), x),
    "other dtype": lambda x: x.view(torch.int32).view(torch.float32),
    "expand": lambda x: x.unsqueeze(0),
}


def put(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    tensor.data = data
    return tensor


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("begun", ["zeros", "literal"])
def test_no_alias_writes_unseen(
    alias: Callable[[torch.Tensor], torch.Tensor], begun: str, mode: FakeTensorMode
) -> None:
    with mode:
        x = {"zeros": torch.zeros, "literal": lambda n: torch.tensor([0.0] * n)}[begun](3)
        x.zero_()
        other = alias(x)
        other.fill_(1)
        assert x[0].item() == 1
        other.uniform_()
        with pytest.raises(DataDependentOutputException):
            x.tolist()


def test_parameters_in_use_are_not_followed_any_longer(mode: FakeTensorMode) -> None:
    """Their calls would be sent past the hot path, and nobody decides by their first values."""
    with mode:
        norm = torch.nn.LayerNorm(3)
        alias = norm.weight.detach()
        norm(torch.rand(2, 3))
        for tensor in (norm.weight, alias):
            with pytest.raises(DataDependentOutputException):
                tensor.tolist()


def test_values_do_not_depend_on_autocast_at_the_time_of_reading(mode: FakeTensorMode) -> None:
    with mode:
        product = torch.full((2, 2), 1.001) @ torch.eye(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert product[0, 0].item() == torch.tensor(1.001).item()


def test_a_write_between_two_uses(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.zeros(2)
        first = x + 1
        x.add_(10)
        second = x + 1
        assert (first.tolist(), second.tolist(), x.tolist()) == ([1, 1], [11, 11], [10, 10])


def test_literals_are_copies(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.tensor([1.0, 2.0])
        value = x.numpy()
        value[0] = 99
        assert x.tolist() == [1.0, 2.0]


def test_deep_copies_are_independent(mode: FakeTensorMode) -> None:
    with mode:
        x = torch.arange(3)
        twin = copy.deepcopy(x)
        x.add_(1)
        assert (x.tolist(), twin.tolist()) == ([1, 2, 3], [0, 1, 2])


# --- loops and limits -------------------------------------------------------------------------------------------------


def test_a_counter_in_a_long_loop_stays_small(mode: FakeTensorMode) -> None:
    with mode:
        counter = torch.tensor(0)
        other = torch.zeros(())
        for _ in range(10_000):
            counter += 1
            other = other + 1
        assert counter.item() == 10_000 and other.item() == 10_000
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(2_000):
            counter += 1
            other = other + 1
        assert len(gc.get_objects()) - before < 500


def test_step_counters_of_optimizers(mode: FakeTensorMode) -> None:
    for foreach in (True, False):
        with mode:
            model = torch.nn.Linear(3, 3)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
            for _ in range(3):
                model(torch.empty(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.state[model.weight]["step"].item() == 3


def test_large_tensors_are_not_followed(mode: FakeTensorMode) -> None:
    with mode:
        with pytest.raises(DataDependentOutputException):
            torch.zeros(1 << 26).sum().item()
        assert torch.zeros(1 << 26).shape == (1 << 26,)


def test_values_cost_nothing_until_asked(mode: FakeTensorMode) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    ran: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log(), mode:
        x = torch.arange(5) * 3
        assert x.tolist() == [0, 3, 6, 9, 12]
    assert ran == ["aten.arange.default", "aten.mul.Tensor"], "reading runs nothing that other modes see"


def test_random_numbers_are_not_consumed(mode: FakeTensorMode) -> None:
    state = torch.random.get_rng_state()
    with mode:
        torch.nn.Linear(3, 3)
        torch.rand(3)
        torch.nn.functional.dropout(torch.ones(3))
        torch.arange(3).tolist()
    assert torch.equal(state, torch.random.get_rng_state())


def test_reading_does_not_depend_on_grad_or_inference_mode(mode: FakeTensorMode) -> None:
    with mode, torch.inference_mode():
        x = torch.arange(3) + 1
        assert x.tolist() == [1, 2, 3]
    assert x.tolist() == [1, 2, 3]
    with mode:
        y = torch.ones(3, requires_grad=True) * 2
        assert y.tolist() == [2, 2, 2]
        assert y.sum().item() == 6


def test_default_dtype_at_the_time_of_the_call(mode: FakeTensorMode) -> None:
    with mode:
        third = torch.tensor(1) / 3
        torch.set_default_dtype(torch.float64)
        try:
            assert third.item() == torch.tensor(1 / 3, dtype=torch.float32).item()
            assert (torch.tensor(1) / 3).item() == 1 / 3
        finally:
            torch.set_default_dtype(torch.float32)


# --- random programs, compared with the real run ------------------------------------------------------------------------

Step = Callable[[list[torch.Tensor], int, int], None]


def view_step(kind: int) -> Step:
    def step(pool: list[torch.Tensor], i: int, j: int) -> None:
        x = pool[i]
        views = [
            lambda: x.t() if x.dim() == 2 else x.view(-1, 1) if x.is_contiguous() else x,
            lambda: x[1:] if x.dim() and x.shape[0] > 1 else x[None],
            lambda: x.expand(2, *x.shape) if x.dim() < 2 else x[0],
            lambda: x.detach(),
            lambda: x[..., ::2] if x.dim() else x.view(1),
        ]
        pool.append(views[kind % len(views)]())

    return step


def compute_step(kind: int) -> Step:
    def step(pool: list[torch.Tensor], i: int, j: int) -> None:
        x, y = pool[i], pool[j]
        results = [
            lambda: x * 2 + 1,
            lambda: x.sum() + y,
            lambda: x.clone(),
            lambda: torch.cat([x.reshape(-1), y.reshape(-1)])[:6],
            lambda: torch.where(x > 0, x, -x),
            lambda: x.reshape(-1).cumsum(0),
            lambda: x.to(torch.int64).to(torch.float64) % 7,
        ]
        pool.append(results[kind % len(results)]().to(torch.float64) % 1000)

    return step


def write_step(kind: int) -> Step:
    def step(pool: list[torch.Tensor], i: int, j: int) -> None:
        x, y = pool[i], pool[j]
        if 0 in x.stride():
            return  # memory that several elements share can't be written to
        writes = [
            lambda: x.add_(1),
            lambda: x.fill_(kind),
            lambda: x.mul_(y.sum() % 3),
            lambda: x.copy_(y.reshape(-1)[0].clone()) if y.numel() else x,
            lambda: x.zero_(),
            lambda: x.masked_fill_(x > 2, 1),
        ]
        writes[kind % len(writes)]()

    return step


def forget_step(pool: list[torch.Tensor], i: int, j: int) -> None:
    if 0 not in pool[i].stride():
        pool[i].uniform_(0, 1)


programs = st.lists(
    st.tuples(
        st.sampled_from(["view", "compute", "write"]),
        st.integers(0, 40),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=14,
)
STEPS = {"view": view_step, "compute": compute_step, "write": write_step}


def start() -> list[torch.Tensor]:
    return [
        torch.arange(6.0, dtype=torch.float64).view(2, 3),
        torch.zeros(4, dtype=torch.float64),
        torch.tensor(2.0, dtype=torch.float64),
    ]


def run(program: Any) -> list[torch.Tensor]:
    pool = start()
    for name, kind, i, j in program:
        STEPS[name](kind)(pool, i % len(pool), j % len(pool))
    return pool


@given(programs)
@settings(max_examples=150)
def test_programs_of_determined_operators_read_as_they_do_for_real(program: Any) -> None:
    real = run(program)
    with FakeTensorMode():
        fake = run(program)
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.stride(), r.storage_offset()) == (f.shape, f.stride(), f.storage_offset())
        assert [f.tolist() for f in fake] == [r.tolist() for r in real]


@given(programs, programs, st.integers(0, 40))
@settings(max_examples=100)
def test_after_an_undetermined_write_nothing_stale_is_read(first: Any, second: Any, target: int) -> None:
    """Two real runs with different random numbers: where they differ, the fake must refuse to answer."""

    def whole(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        pool = run(first)
        forget_step(pool, target % len(pool), 0)
        for name, kind, i, j in second:
            STEPS[name](kind)(pool, i % len(pool), j % len(pool))
        return pool

    with torch.random.fork_rng():
        one, two = whole(1), whole(2)
    with FakeTensorMode():
        fakes = whole(1)
    for a, b, fake in zip(one, two, fakes, strict=True):
        try:
            values = fake.tolist()
        except DataDependentOutputException:
            continue
        assert torch.equal(a, b), "the random numbers make a difference, and the fake answers"
        assert values == a.tolist()


def test_a_value_of_another_dtype_than_was_said_is_not_viewed() -> None:
    """Bytes that are not what a wrong rule says must not be read, not even by accident."""
    from understudy.errors import MetadataMismatchError
    from understudy.ops.registry import user_rule

    op = torch.ops.aten.flip.default
    user_rule.replace(lambda x, dims: x.like(dtype=torch.float64), op)
    FakeTensorMode.cache_clear()
    try:
        with (
            FakeTensorMode(),
            pytest.raises(
                MetadataMismatchError, match=r"aten.flip.default: the rule returned f64\[2\]@cpu, the kernel"
            ),
        ):
            torch.tensor([1.0, 2.0], dtype=torch.float32).flip(0).tolist()
    finally:
        user_rule.replace(None, op)
        FakeTensorMode.cache_clear()


@pytest.mark.parametrize("small", [torch.uint8, torch.int64, torch.float64])
def test_block_diag_with_a_number_of_another_dtype(small: torch.dtype) -> None:
    def program() -> tuple[torch.dtype, list[list[float]]]:
        made = torch.block_diag(torch.tensor(2, dtype=small), torch.ones(1, 2))
        return made.dtype, made.tolist()

    with FakeTensorMode():
        answer = program()
    assert answer == program()


def test_a_copy_to_memory_that_was_empty() -> None:
    with FakeTensorMode():
        flags = torch.tensor([1, 0])
        copied = torch.empty(2, dtype=torch.int64, device="cuda").copy_(flags)
        assert copied.tolist() == copied.cpu().tolist() == [1, 0]
        whole = torch.empty(4)
        view = whole[:2]
        for target in (view, whole[1:]):  # parts of a storage
            with pytest.raises(DataDependentOutputException):
                target.copy_(torch.ones(len(target))).tolist()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_spdiags_of_literal_offsets(layout: torch.layout) -> None:
    def program() -> tuple[object, ...]:
        made = torch.sparse.spdiags(torch.ones(2, 3), torch.tensor([0, 1]), (3, 3), layout=layout)
        return made.layout, made.dtype, tuple(made.shape), made._nnz()

    with FakeTensorMode():
        answer = program()
    assert answer == program()


def test_spdiags_of_offsets_without_data() -> None:
    from understudy.errors import DynamicOutputShapeException

    mode = FakeTensorMode()
    offsets = mode.from_tensor(torch.tensor([0, 1]))
    with mode, pytest.raises(DynamicOutputShapeException, match="depends on the offsets"):
        torch.sparse.spdiags(torch.ones(2, 3), offsets, (3, 3))


SPARSE = {
    "coo": lambda: torch.sparse_coo_tensor([[0, 2], [1, 5]], [1.0, 2.0]),
    "coo of tensors, with dense dimensions": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.randn(2, 3)
    ),
    "coo of nothing": lambda: torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), []),
    "coo, checked": lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), check_invariants=True),
    "coo of a size": lambda: torch.sparse_coo_tensor((3, 4)),
    "coo of another dtype": lambda: torch.sparse_coo_tensor(
        [[0, 1]], [1, 2], dtype=torch.float16, requires_grad=True
    ),
    "csr": lambda: torch.sparse_csr_tensor([0, 1, 2], [0, 3], [1.0, 2.0]),
    "csc": lambda: torch.sparse_csc_tensor([0, 1, 2], [0, 3], [1.0, 2.0]),
    "bsr": lambda: torch.sparse_bsr_tensor([0, 1, 2], [0, 1], torch.ones(2, 2, 3)),
    "csr of tensors": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 4]), torch.randn(2)
    ),
    "csr, checked": lambda: torch.sparse_csr_tensor(
        [0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), check_invariants=True
    ),
}


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_tensors_of_literal_indices(make: Callable[[], torch.Tensor]) -> None:
    def program() -> tuple[object, ...]:
        made = make()
        return (
            made.layout,
            made.dtype,
            tuple(made.shape),
            made._nnz(),
            made.requires_grad,
            tuple(made.to_dense().shape),
        )

    with FakeTensorMode():
        answer = program()
    assert answer == program()


WRONG_SPARSE = {
    "negative": lambda: torch.sparse_coo_tensor([[0, -1]], [1.0, 2.0]),
    "coo outside": lambda: torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (3,), check_invariants=True),
    "csr outside": lambda: torch.sparse_csr_tensor(
        [0, 1, 2], [0, 7], [1.0, 2.0], (2, 2), check_invariants=True
    ),
    "counts": lambda: torch.sparse_coo_tensor([[0, 1]], [1.0]),
}


@pytest.mark.parametrize("make", WRONG_SPARSE.values(), ids=WRONG_SPARSE)
def test_literal_indices_that_do_not_fit(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError):
        make()
    with FakeTensorMode(), pytest.raises(RuntimeError):
        make()


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors_without_size_of_indices_without_data(layout: str) -> None:
    from understudy.errors import DynamicOutputShapeException

    mode = FakeTensorMode()
    indices = mode.from_tensor(torch.tensor([0, 1]))
    with mode, pytest.raises(DynamicOutputShapeException, match="without size="):
        if layout == "csr":
            torch.sparse_csr_tensor([0, 1, 2], indices, [1.0, 2.0])
        else:
            torch.sparse_coo_tensor(indices[None], [1.0, 2.0])


def test_sparse_tensors_on_other_devices() -> None:
    with FakeTensorMode():
        values = torch.randn(2, device="cuda")
        moved = torch.sparse_coo_tensor([[0, 1]], values)
        asked = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], device="cuda")
        rows = torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2], device="cuda"), torch.tensor([0, 4], device="cuda"), values
        )
        assert {made.device for made in (moved, asked, rows)} == {torch.device("cuda:0")} and rows.shape == (
            2,
            5,
        )


def test_buffers_are_literals() -> None:
    with FakeTensorMode():
        numbers = torch.frombuffer(bytearray(b"\1\0\2\0"), dtype=torch.int16)
        trained = torch.frombuffer(bytearray(8), dtype=torch.float32, requires_grad=True)
        assert numbers.tolist() == [1, 2] and (numbers + 1).shape == (2,)
        assert trained.requires_grad and trained.is_leaf
    assert type(torch.frombuffer(bytearray(8), dtype=torch.float32)) is torch.Tensor


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("start", [0, 1, 255, 2048, 2**24, -0.0, 0.1])
def test_counters_hold_what_real_ones_hold(dtype: torch.dtype, start: float) -> None:
    """Counters that have the same number share the next one: in each dtype, with its rounding, sign and overflow."""

    def count() -> list[object]:
        seen: list[object] = []
        first, second = torch.tensor(start).to(dtype), torch.tensor(start, dtype=torch.float64).to(dtype)
        alias, many = first.view(()), torch.tensor([start, start + 1]).to(dtype)
        for step in (1, 0, 3):
            first += step
            alias.add_(step).mul_(1)
            second *= -1 if dtype.is_signed else 1
            many[0].add_(step)
            seen += [first.item(), alias.item(), second.item(), many[0].item(), many.tolist()]
        return [(type(value), str(value)) for value in seen]

    with FakeTensorMode():
        on_stand_ins = count()
        again = count()
    assert on_stand_ins == again == count()


def test_counters_that_view_memory_of_another_dtype(mode: FakeTensorMode) -> None:
    def count() -> list[object]:
        half = torch.tensor(1.0, dtype=torch.bfloat16).view(torch.float16).add_(1)
        raw = torch.tensor([0, 0, 128, 63], dtype=torch.uint8).view(torch.float32)[0].add_(1)
        plain = torch.tensor(1.0, dtype=torch.float16).add_(1)
        return [half.item(), raw.item(), plain.item()]

    with mode:
        on_stand_ins = count()
    assert on_stand_ins == count()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_sparse_tensors_of_determined_values(layout: str) -> None:
    def program() -> torch.Tensor:
        return getattr(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), f"to_sparse_{layout}")()

    real = program()
    with FakeTensorMode():
        fake = program()
    assert (fake.layout, fake.shape, fake._nnz()) == (real.layout, real.shape, real._nnz())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_values_of_sparse_tensors_are_not_followed() -> None:
    """They share memory with what they are made of."""
    with FakeTensorMode():
        values = torch.tensor([3.0, 4.0])
        sparse = torch.sparse_coo_tensor([[0, 1], [2, 0]], values, (2, 3))
        values.zero_()
        with pytest.raises(DataDependentOutputException):
            sparse.to_dense().tolist()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("convert", ["to_sparse_coo", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_sparse_tensors_convert_with_their_entries(layout: str, convert: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return getattr(x, convert)()

    real = getattr(torch.eye(3), f"to_sparse_{layout}")()
    mode = FakeTensorMode()
    converted, fake = program(real), program(mode.from_tensor(real))
    assert (fake.layout, fake.shape, fake._nnz()) == (converted.layout, converted.shape, converted._nnz())
    assert fake.to_dense().shape == (3, 3)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_cleared_in_place() -> None:
    with FakeTensorMode():
        sparse = torch.sparse_coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], (2, 3))
        assert sparse.zero_() is sparse and sparse._nnz() == 0
        assert sparse.sparse_resize_((4, 5), 2, 0).to_dense().shape == (4, 5)


COUNTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nonzero": lambda a: a.nonzero(),
    "mask": lambda a: a[a > 1],
    "masked_select": lambda a: a.masked_select(a > 1),
    "unique": lambda a: a.unique(),
    "unique_consecutive": lambda a: a.unique_consecutive(),
    "unique of a dim": lambda a: a.unique(dim=0),
    "bincount": lambda a: a.bincount(),
    "repeat_interleave": lambda a: a.repeat_interleave(a),
    "combinations": lambda a: torch.combinations(a),
}
"""The size of the result is data."""


@pytest.mark.parametrize("name", COUNTED)
def test_sizes_that_determined_values_tell_are_no_symbols(name: str) -> None:
    numbers = [0, 2, 2, 5]
    expected = COUNTED[name](torch.tensor(numbers))
    with FakeTensorMode(shape_env=ShapeEnv()):
        found = COUNTED[name](torch.tensor(numbers))
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert found.tolist() == expected.tolist()


def test_sizes_that_undetermined_or_symbolic_values_tell_are_symbols() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(3, 4))
    with mode:
        counted = [
            x.nonzero(),
            torch.full((2,), x.shape[0]).repeat_interleave(2).nonzero(),
            torch.ones(x.shape[0]).nonzero(),
        ]
    assert all(isinstance(found.shape[0], torch.SymInt) for found in counted)
    assert not mode.shape_env.guards


LARGE = torch.ones(5000, dtype=torch.int64)


def test_integers_of_real_tensors_are_read() -> None:
    grid = torch.tensor([[1, 2, 2], [1, 3, 2]])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert (grid[:, 1] * grid[:, 2]).tolist() == [4, 6]
        assert grid[1].nonzero().shape == (3, 1)
        with pytest.raises(DataDependentOutputException):
            (torch.randn(3) + grid[0]).tolist()
        with pytest.raises(DataDependentOutputException):
            LARGE.sum().item()
