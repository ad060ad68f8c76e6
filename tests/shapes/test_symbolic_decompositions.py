"""Composite operators that C++ computes with plain integers keep symbolic sizes here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from understudy import FakeTensorMode, ShapeEnv, dims
from understudy.errors import GuardOnDataDependentSymNode

ROWS, COLUMNS = dims("rows", "columns")


def on_symbols(program: Callable[..., Any], *reals: Tensor) -> tuple[ShapeEnv, Any]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(real, source=f"x{i}", symbolic_context=(ROWS, COLUMNS) if real.dim() == 2 else None)
        for i, real in enumerate(reals)
    ]
    with mode:
        return env, program(*fakes)


@pytest.mark.parametrize(
    ("program", "spec"),
    [
        (lambda x: torch.take_along_dim(x, x.argsort(1), 1), "f32[rows, columns]@cpu"),
        (lambda x: torch.nn.functional.max_pool1d(x, 2), "f32[rows, columns//2]@cpu"),
        (
            lambda x: torch.nn.functional.max_pool1d(x, 3, 2, 1, ceil_mode=True),
            "f32[rows, columns//2 + 1]@cpu",
        ),
        (lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1), "f32[rows, 1]@cpu"),
        (lambda x: torch.histogram(x, x[0].sort()[0])[0], "f32[columns - 1]@cpu"),
        (lambda x: torch.nn.functional.bilinear(x, x, (x.t() @ x).expand(7, -1, -1)), "f32[rows, 7]@cpu"),
        (torch.hash_tensor, "u64[]@cpu"),
        (lambda x: (x * 1).fill_diagonal_(2.0), "f32[rows, columns]@cpu"),
        (lambda x: (x * 1).fill_diagonal_(2.0, wrap=True), "f32[rows, columns]@cpu"),
        (
            lambda x: torch._C._nn.unflatten_dense_tensors(torch.cat([x.view(-1), x[0]]), [x, x[0]])[0],
            "f32[rows, columns]@cpu",
        ),
        (
            lambda x: torch._C._nn.unflatten_dense_tensors(torch.cat([x.view(-1), x[0]]), [x, x[0]])[1],
            "f32[columns]+rows*columns@cpu",
        ),
        (
            lambda x: torch.nn.functional.embedding_bag(x.argsort(1) % 4, x, padding_idx=1),
            "f32[rows, columns]@cpu",
        ),
        (
            lambda x: torch.stft(x, 4, center=False, return_complex=True, window=x.new_ones(4)),
            "c64[rows, 3, columns - 3]~(3*columns - 9, 1, 3)@cpu",
        ),
        (
            lambda x: torch.ops.aten._upsample_bilinear2d_aa.vec(x[None, None], None, False, [2.0, 2.0]),
            "f32[1, 1, 2*rows, 2*columns]@cpu",
        ),
        (
            lambda x: torch.nn.functional.cross_entropy(x, x.softmax(1), x[0], reduction="none"),
            "f32[rows]@cpu",
        ),
    ],
)
def test_sizes_stay_symbols(program: Callable[[Tensor], Tensor], spec: str) -> None:
    env, out = on_symbols(program, torch.randn(4, 6))
    assert str(out.spec) == spec and not env.specialisations
    assert tuple(program(torch.randn(4, 6)).shape) == tuple(
        size.node.hint if hasattr(size, "node") else size for size in out.shape
    )


def test_pieces() -> None:
    env, out = on_symbols(lambda x: torch.unsafe_chunk(x, 2, 1), torch.randn(4, 6))
    assert [str(piece.spec.shape[1]) for piece in out] == ["(columns + 1)//2", "columns//2"]
    assert not env.specialisations


def test_places_from_data_become_symbols() -> None:
    env, out = on_symbols(torch.tensor_split, torch.randn(6, 2), torch.tensor([2, 4]))
    assert len(out) == 3 and len(env.unbacked) >= 2
    assert str(out[0].spec.shape[1]) == "columns"


def test_a_number_of_pieces_from_data_is_refused() -> None:
    with pytest.raises(GuardOnDataDependentSymNode, match="depends on the value of u0"):
        on_symbols(lambda x, n: torch.tensor_split(x, n.sum()), torch.randn(6, 2), torch.tensor([3]))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.nn.functional.bilinear(x, x, (x.t() @ x).expand(7, -1, -1)),
        lambda x: torch.nn.functional.cross_entropy(
            x, x.detach().softmax(1), x[0].detach(), label_smoothing=0.1
        ),
    ],
)
def test_gradients_flow(program: Callable[[Tensor], Tensor]) -> None:
    env, out = on_symbols(
        lambda x: torch.autograd.grad(program(x.requires_grad_()).sum(), x)[0], torch.randn(4, 6)
    )
    assert [str(size) for size in out.spec.shape] == ["rows", "columns"] and not env.specialisations


def steps_of(program: Callable[..., Any], *args: Tensor) -> list[str]:
    heard: list[str] = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "aten" and not func.name().startswith(("aten::size", "aten::stride")):
                heard.append(func.name())
            return func(*args, **(kwargs or {}))

    with Listener():
        program(*args)
    return heard


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.stft(x, 4, win_length=2, return_complex=True, window=x.new_ones(2)),
        lambda x: torch.ops.aten.stft.center(x, 4, normalized=True, return_complex=False),
        lambda x: torch.nn.functional.cross_entropy(
            x.view(2, -1), x.view(2, -1), x[::2], label_smoothing=0.1
        ),
        lambda x: x.view(2, 2, 3) @ x.view(2, 3, 2),
        lambda x: x.view(3, 2, 2).transpose(0, 1) @ x.view(2, 2, 3),
        lambda x: x.view(2, 1, 3, 2).expand(2, 3, 3, 2) @ x.view(1, 3, 2, 2).expand(2, 3, 2, 2),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_steps_are_those_of_a_real_run(program: Callable[[Tensor], Any]) -> None:
    real = torch.randn(12)
    _, heard = on_symbols(lambda x: steps_of(program, x), real)
    assert heard == steps_of(program, real)


def test_a_row_from_the_end_is_recorded_by_its_number() -> None:
    env, out = on_symbols(
        lambda x: torch.nn.functional.embedding_bag(x.argsort(1), x, padding_idx=-1), torch.randn(4, 6)
    )
    assert str(out.spec) == "f32[4, columns]@cpu" and [str(each.condition) for each in env.guards] == [
        "rows == 4"
    ]


@pytest.mark.parametrize(
    "program",
    [
        torch.cov,
        torch.corrcoef,
        torch.gradient,
        torch.linalg.pinv,
        lambda x: torch.kron(x, x),
        lambda x: torch.vander(x[0]),
        lambda x: torch.linalg.multi_dot([x, x.t(), x]),
    ],
)
def test_sizes_that_cpp_reads_are_fixed_and_reported(program: Callable[[Tensor], Any]) -> None:
    env, out = on_symbols(program, torch.randn(4, 6))
    expected = program(torch.randn(4, 6))
    pairs = zip(out, expected, strict=True) if isinstance(out, (list, tuple)) else [(out, expected)]
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    assert env.specialisations


def test_a_batch_is_multiplied_without_questions_about_its_elements() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    batch, rows = dims("batch", "rows")
    x = mode.from_tensor(torch.randn(0, 4, 4).mT, source="x", symbolic_context=(batch, rows, rows))
    with mode:
        out = x @ x
    assert str(out.spec) == "f32[batch, rows, rows]@cpu"
    assert [str(guard.condition) for guard in env.guards] == ["batch != 1"]
