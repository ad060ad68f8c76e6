"""Calls that random programs have found to differ, and their relatives: each does, or refuses, what the real one does."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle.cases import duplicate
from tests.oracle.random_findings import C64, CALLS, LARGEST, REFUSED, Call, ones
from tests.oracle.random_run import _differences, built_in_class
from understudy import FakeTensorMode, ShapeEnv, TensorSpec, make_fx
from understudy.infer.kernels import strided_on
from understudy.shapes.input_dims import DYNAMIC


def run_on_stand_ins(call: Call, reals: list[Tensor], symbolic: bool) -> tuple[Any, list[Tensor]]:
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False) if symbolic else None
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(real.data, symbolic_context=[DYNAMIC] * real.ndim if symbolic else None)
        for real in duplicate(reals)
    ]
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*fakes), fakes


def assert_like_eager(call: Call, reals: list[Tensor], symbolic: bool = False) -> None:
    """Releases of torch differ in what they refuse: the installed one is the truth."""
    given = [real.data for real in duplicate(reals)]
    try:
        expected = call(*given)
    except Exception as refusal:
        with pytest.raises(built_in_class(refusal)):
            run_on_stand_ins(call, reals, symbolic)
        return
    fake, fakes = run_on_stand_ins(call, reals, symbolic)
    if not symbolic:
        assert _differences(expected, fake, given, fakes) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_static(name: str) -> None:
    assert_like_eager(*CALLS[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, symbolic: bool) -> None:
    assert_like_eager(*REFUSED[name], symbolic)


OUTS: dict[str, tuple[Call, list[Tensor]]] = {
    "kron": (torch.kron, [ones(2, 3), ones(3, 2)]),
    "inner": (torch.inner, [ones(2, 3), ones(4, 3)]),
    "inner of a number": (torch.inner, [ones(), ones(3, 2).t()]),
    "tensordot": (lambda a, b, out: torch.tensordot(a, b, 1, out=out), [ones(2, 3), ones(3, 2)]),
    "linalg.cond": (torch.linalg.cond, [ones(2, 2)]),
    "linalg.matrix_rank": (torch.linalg.matrix_rank, [ones(2, 2)]),
    "linalg.pinv": (torch.linalg.pinv, [ones(2, 3)]),
    "linalg.norm": (torch.linalg.norm, [ones(2, 3)]),
    "linalg.multi_dot": (lambda a, b, out: torch.linalg.multi_dot([a, b], out=out), [ones(2, 3), ones(3, 2)]),
    "special.ndtr": (torch.special.ndtr, [ones(2, 3)]),
}


@pytest.mark.parametrize("name", OUTS)
def test_out_of_composites_with_symbols(name: str) -> None:
    """C++ resizes `out=` with plain integers, which symbols are not."""
    call, reals = OUTS[name]
    wanted = call(*reals, out=torch.empty(0, dtype=torch.int64 if "rank" in name else torch.float32))
    out = torch.empty(0, dtype=wanted.dtype)
    fake, (*_, given) = run_on_stand_ins(
        lambda *args: call(*args[:-1], out=args[-1]), [*reals, out], symbolic=True
    )
    assert fake is given
    assert [int(size) for size in fake.shape] == list(wanted.shape)
    assert [int(step) for step in fake.stride()] == list(wanted.stride())


MATRICES: dict[str, Call] = {
    "cholesky_inverse": lambda a, out, _: torch.cholesky_inverse(a, out=out),
    "geqrf": lambda a, out, vector: torch.geqrf(a, out=(out, vector))[0],
    "eig": lambda a, out, vector: torch.linalg.eig(a, out=(vector, out))[1],
    "householder_product": lambda a, out, vector: torch.linalg.householder_product(a, vector, out=out),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["empty", "fits"])
@pytest.mark.parametrize("name", MATRICES)
def test_strides_of_matrices_in_out_with_symbols(name: str, kind: str) -> None:
    """LAPACK's results are by columns; a tensor that fits keeps its strides."""
    shape = (2, 3, 3)
    a = torch.eye(shape[-1]).expand(shape).contiguous()
    dtype = C64 if name == "eig" else torch.float32
    out = {"empty": ones(0, dtype=dtype), "fits": ones(*shape, 2, dtype=dtype)[..., 1]}[kind]
    vector = ones(*shape[:-1], dtype=dtype)
    fake, _ = run_on_stand_ins(MATRICES[name], [a, out, vector], symbolic=True)
    assert [int(step) for step in fake.stride()] == list(MATRICES[name](a, out, vector).stride())


@pytest.mark.parametrize(
    "call",
    [torch.nan_to_num, torch.abs, torch.conj_physical, torch.exp, torch.deg2rad, torch.rad2deg, torch.clone],
)
@pytest.mark.parametrize("dtype", [torch.float32, C64])
def test_strides_of_resized_out_with_symbols(call: Call, dtype: torch.dtype) -> None:
    """Which strides a size of 1 has depends on whether the kernel copies, or goes through the elements."""
    op = {torch.clone: torch.ops.aten.clone.out, torch.conj_physical: torch.ops.aten.conj_physical.out}.get(
        call, call
    )
    x = ones(5, 7, 1, 10, dtype=dtype).as_strided((5, 10, 7, 1), (70, 1, 10, 70))
    if dtype is C64 and call in (torch.nan_to_num, torch.deg2rad, torch.rad2deg):
        pytest.skip("not of complex numbers")
    out = torch.empty(0, dtype=call(x).dtype)
    fake, _ = run_on_stand_ins(lambda x, out: op(x, out=out), [x, out], symbolic=True)
    assert [int(step) for step in fake.stride()] == list(op(x, out=out).stride())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_what_is_filled_in_keeps_its_dtype_with_symbols(dtype: torch.dtype) -> None:
    reals = [ones(3, dtype=dtype), ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)]
    made, _ = run_on_stand_ins(
        lambda x, m, i: torch.ops.aten._unsafe_masked_index(x, m, [i], 2.5), reals, symbolic=True
    )
    assert made.dtype is dtype


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float32),
        (torch.int64, torch.int32),
        (torch.float32, torch.int64),
        (C64, torch.float32),
    ],
)
@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_single_numbers_in_blocks_with_symbols(
    dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, ...]
) -> None:
    reals = [ones(dtype=dtypes[0]), ones(*shape, dtype=dtypes[1])]
    made, _ = run_on_stand_ins(torch.block_diag, reals, symbolic=True)
    assert made.dtype is torch.block_diag(*reals).dtype


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["kron", "linalg.multi_dot", "linalg.vecdot", "inner"])
def test_no_gradients_of_what_is_computed_in_out(name: str) -> None:
    calls: dict[str, Call] = {
        "kron": lambda x, out: torch.kron(x, x, out=out),
        "linalg.multi_dot": lambda x, out: torch.linalg.multi_dot([x, x], out=out),
        "linalg.vecdot": lambda x, out: torch.linalg.vecdot(x, x, out=out),
        "inner": lambda x, out: torch.inner(x, x.sum(), out=out),
    }
    for symbolic in (False, True):
        with pytest.raises(RuntimeError):
            run_on_stand_ins(
                lambda x, out: calls[name](x.requires_grad_(), out), [ones(2, 2), ones(0)], symbolic
            )
    with pytest.raises(RuntimeError):
        calls[name](ones(2, 2).requires_grad_(), ones(0))


@pytest.mark.parametrize(
    "options",
    [{}, {"hop_length": 3}, {"win_length": 8, "normalized": True}, {"length": 40}, {"center": False}],
)
@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5), (2, 10, 4)])
def test_inverse_of_a_short_time_transform_with_symbols(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    x = torch.randn(shape, dtype=C64)
    window = torch.hann_window(options.get("win_length", 10)) + 1

    def call(x: Tensor, window: Tensor) -> Tensor:
        return torch.istft(x, 10, window=window, **options)

    fake, _ = run_on_stand_ins(call, [x, window], symbolic=True)
    real = call(x, window)
    assert any(isinstance(size, torch.SymInt) for size in fake.shape) or "length" in options
    assert ([int(n) for n in fake.shape], [int(n) for n in fake.stride()]) == (
        list(real.shape),
        list(real.stride()),
    )
    graph = make_fx(call, tracing_mode="symbolic")(x, window)
    longer = torch.randn((*shape[:-1], 7), dtype=C64)
    torch.testing.assert_close(graph(longer, window), call(longer, window))


@pytest.mark.parametrize("order", ["fro", "nuc"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2, 2), (3, 0, 0)])
def test_condition_by_a_named_norm_with_symbols(order: str, shape: tuple[int, ...]) -> None:
    x = torch.eye(shape[-1]).expand(shape).contiguous()
    fake, _ = run_on_stand_ins(lambda x: torch.linalg.cond(x, order), [x], symbolic=True)
    assert [int(size) for size in fake.shape] == list(torch.linalg.cond(x, order).shape)


def test_strides_of_the_gradient_of_distances_of_nothing_with_symbols() -> None:
    def call(x: Tensor, y: Tensor) -> Any:
        return torch.autograd.grad(torch.cdist(x.requires_grad_(), y, 0.0).sum(), x)[0]

    reals = [torch.empty_strided((0, 4, 5), (1, 5, 1)), ones(3, 5)]
    fake, _ = run_on_stand_ins(call, reals, symbolic=True)
    assert [int(step) for step in fake.stride()] == list(call(*duplicate(reals)).stride()) == [1, 5, 1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "size"), [("qr", 0), ("qr", 1), ("slogdet", 1)])
def test_one_tensor_for_two_results_with_symbols(name: str, size: int) -> None:
    def call(x: Tensor, out: Tensor, other: Tensor) -> Any:
        return getattr(torch.linalg, name)(x, out=(out, out))

    reals = [ones(size, size), ones(0), ones(0)]
    _, (_, fake, _) = run_on_stand_ins(call, reals, symbolic=True)
    _, real, _ = given = duplicate(reals)
    call(*given)
    assert ([int(n) for n in fake.shape], [int(n) for n in fake.stride()]) == (
        list(real.shape),
        list(real.stride()),
    )


@pytest.mark.parametrize("shape", [(2, 3), (3, 1, 2), (0, 2), ()])
def test_strides_of_classes_with_symbols(shape: tuple[int, ...]) -> None:
    index = torch.zeros(shape[::-1], dtype=torch.int64).permute(tuple(reversed(range(len(shape))))).data
    fake, _ = run_on_stand_ins(lambda x: torch.nn.functional.one_hot(x, 4), [index], symbolic=True)
    real = torch.nn.functional.one_hot(index, 4)
    assert ([int(n) for n in fake.shape], [int(n) for n in fake.stride()]) == (
        list(real.shape),
        list(real.stride()),
    )


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("count", [-1, 4])
def test_strides_of_classes_in_a_graph(count: int, mode: str) -> None:
    index = torch.arange(24).remainder(4).view(4, 3, 2).permute(2, 1, 0)
    graph = make_fx(lambda x: torch.nn.functional.one_hot(x, count), tracing_mode=mode)(index)
    real = torch.nn.functional.one_hot(index, count)
    assert torch.equal(graph(index), real)
    assert graph(index).stride() == real.stride() == (48, 16, 4, 1)


def test_memory_of_what_overlaps_itself_is_large_enough_for_all_elements() -> None:
    spec = TensorSpec((4, 3), (1, 1), 2, dtype=torch.float32, device=torch.device("cpu"))
    assert strided_on(spec, torch.device("cpu"), zero=True).untyped_storage().nbytes() == (2 + 12) * 4


def test_no_elements_in_another_number_of_dimensions() -> None:
    fake, _ = run_on_stand_ins(
        lambda x, y: torch.cat([x, y], 1), [ones(0, dtype=C64), ones(2, 3, dtype=C64)], symbolic=True
    )
    assert [int(size) for size in fake.shape] == [2, 3]


def test_distinct_values_of_distinct_values() -> None:
    """How many there are is data, and not taken to be none."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        once = torch.unique_consecutive(torch.randn(3))
        values, places = once.unique_consecutive(return_inverse=True, dim=0)
    assert str(places.shape) == str(once.shape) == "torch.Size([u0])"
    assert str(values.shape) == "torch.Size([u1])"


@pytest.mark.parametrize("rows", [0, 5, 9])
def test_targets_of_a_loss_in_chunks(rows: int) -> None:
    from torch.nn import LinearCrossEntropyOptions

    def call(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.linear_cross_entropy(
            x, weight, target, options=LinearCrossEntropyOptions(batch_chunk_size=4)
        )

    reals = [ones(8, 3), ones(4, 3), torch.zeros(rows, dtype=torch.int64)]
    is_refused = False
    try:
        call(*reals)
    except RuntimeError:
        is_refused = True
    for symbolic in (False, True):
        with pytest.raises(RuntimeError) if is_refused else nullcontext():
            run_on_stand_ins(call, reals, symbolic)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("name", ["eigvals", "eigvalsh", "svdvals", "det"])
def test_out_begins_where_it_did_with_symbols(name: str, size: int) -> None:
    call = getattr(torch.linalg, name)
    dtype = C64 if name == "eigvals" else torch.float32
    shape = () if name == "det" else (size,)
    out = ones(20, dtype=dtype).as_strided(shape, (1,) * len(shape), 7)
    fake, _ = run_on_stand_ins(lambda x, out: call(x, out=out), [torch.eye(5), out.data], symbolic=True)
    real = call(torch.eye(5), out=out)
    assert ([int(n) for n in fake.shape], int(fake.storage_offset())) == (
        list(real.shape),
        real.storage_offset(),
    )


@pytest.mark.parametrize("call", [
    lambda x: torch.as_strided(x + 1, (4,), (1,)),
    lambda x: torch.as_strided_scatter(x + 1, torch.ones(4), (4,), (1,)),
    lambda x: (x + 1).as_strided_((4,), (1,)),
    lambda x: torch.as_strided(x[:0] + 1, (1,), (1,)),
])  # fmt: skip
def test_a_view_beyond_what_was_computed(call: Call) -> None:
    for symbolic in (False, True):
        with pytest.raises(RuntimeError):
            run_on_stand_ins(call, [ones(3)], symbolic)
    with pytest.raises(RuntimeError):
        call(ones(3))


def test_a_view_of_a_storage_without_elements() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        run_on_stand_ins(
            lambda x: x.as_strided((2,), (1,), 0),
            [ones(2, 0, 3).as_strided((0, 3), (3, 1), 3)],
            symbolic=False,
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_out_of_matrix_rank_is_filled_by_the_graph(mode: str, shape: tuple[int, ...]) -> None:
    """Below a mode, C++ computes the rank and drops it."""
    graph = make_fx(lambda x, out: torch.linalg.matrix_rank(x, out=out), tracing_mode=mode)(
        torch.eye(3), ones(*shape)
    )
    out = ones(*shape)
    graph(torch.eye(3), out)
    assert out.tolist() == 3.0


@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float32)],
)
@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, torch.nn.functional.smooth_l1_loss])
def test_gradients_of_losses_of_different_floats(loss: Call, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    def call(x: Tensor, target: Tensor) -> Any:
        return torch.autograd.grad(loss(x.requires_grad_(), target.requires_grad_()), [x, target])

    reals = [ones(2, 3, 4, dtype=dtypes[0]), ones(4, 3, 2, dtype=dtypes[1]).permute(2, 1, 0).data]
    for symbolic in (False, True):
        fakes, _ = run_on_stand_ins(call, reals, symbolic)
        for fake, real in zip(fakes, call(*(real.clone() for real in reals)), strict=True):
            assert (fake.dtype, [int(step) for step in fake.stride()]) == (real.dtype, list(real.stride()))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_dtype_of_the_gradient_of_a_number_times_a_complex_one(mode: str) -> None:
    def call(x: Tensor) -> Tensor:
        product = x * 1j
        return torch.autograd.grad(product, x, torch.ones_like(product))[0]

    graph = make_fx(call, tracing_mode=mode)(ones().requires_grad_())
    assert graph(ones().requires_grad_()).dtype is torch.float32


LARGE_VIEWS: dict[str, Call] = {
    "one window": lambda x: x.unfold(1, 2, LARGEST),
    "one element": lambda x: x[:1, :: 2**61],
    "expanded": lambda x: x[:1, :1].expand(2**61, 2),
    "one row": lambda x: x.as_strided((1, 3), (LARGEST, 1)),
    "the same element": lambda x: x.as_strided((2, 2**61), (0, 0)),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", LARGE_VIEWS)
def test_views_with_numbers_near_64_bits(name: str, symbolic: bool) -> None:
    """Memory is that of the elements: what a stride of one element is, and how often elements are repeated, takes none."""
    x = ones(4, 3)
    real = LARGE_VIEWS[name](x)
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    with mode:
        fake = LARGE_VIEWS[name](mode.from_tensor(x, static_shapes=not symbolic))
    assert [*map(int, (*fake.shape, *fake.stride()))] == [*real.shape, *real.stride()]
