"""Which shapes can be expanded and broadcast: as torch's `expand`, and with few guards where sizes are symbols."""

from __future__ import annotations

import itertools

import pytest
import torch

from understudy import FakeTensorMode, ShapeEnv, dims
from understudy.errors import ShapeMismatch
from understudy.spec.elementwise import (
    broadcast_shapes,
    broadcast_without_choice,
    check_broadcastable,
    check_expandable,
    complex_type,
    float_type,
    is_integral,
    meet_without_choice,
    real_type,
)

SHAPES = [(), (0,), (1,), (2,), (3,), (1, 1), (2, 1), (1, 3), (2, 3), (0, 3), (2, 1, 3)]


def can(function: object, *args: object) -> bool:
    try:
        function(*args)  # type: ignore[operator]
    except (ShapeMismatch, RuntimeError):
        return False
    return True


def test_a_shape_expands_where_torch_expands_it() -> None:
    for shape, target in itertools.product(SHAPES, SHAPES):
        is_possible = can(torch.empty(shape).expand, target)
        assert can(check_expandable, shape, target, "test") is is_possible, (shape, target)


def test_every_way_to_broadcast_is_torchs() -> None:
    for a, b in itertools.product(SHAPES, SHAPES):
        is_possible = can(torch.broadcast_shapes, a, b)
        assert can(check_broadcastable, a, b) is is_possible, (a, b)
        for function in (broadcast_shapes, broadcast_without_choice):
            assert can(function, a, b) is is_possible, (a, b)
            if is_possible:
                assert tuple(function(a, b)) == tuple(torch.broadcast_shapes(a, b))


def test_the_error_names_both_shapes() -> None:
    with pytest.raises(ShapeMismatch, match=r"mask: shape \[2\] can't be expanded to \[3\]"):
        check_expandable((2,), (3,), "mask")


def sizes(*examples: int) -> tuple[ShapeEnv, list[object]]:
    """Sizes with these examples, as the engine computes with them."""
    env = ShapeEnv()
    names = [f"n{position}" for position in range(len(examples))]
    fake = FakeTensorMode(shape_env=env).from_tensor(
        torch.zeros(examples), source="x", symbolic_context=dims(*names)
    )
    return env, list(fake._spec.shape)


def guards(env: ShapeEnv) -> list[str]:
    return [guard.text for guard in env.guards]


def test_equal_sizes_above_one_become_equal() -> None:
    for function in (
        lambda n, m: check_broadcastable([n], [m]),
        lambda n, m: broadcast_shapes([n], [m]),
        lambda n, m: check_expandable([n], [m], "test"),
    ):
        env, (n, m) = sizes(5, 5)
        function(n, m)
        assert len(guards(env)) == 1, function
        assert "n0 == n1" in guards(env)[0]


def test_the_same_size_needs_no_guard() -> None:
    env, (n, _) = sizes(5, 5)
    assert broadcast_shapes([n], [n]) == (n,)
    assert broadcast_shapes([n, 1], [1, n]) == (n, n)
    check_expandable([n], [2, n], "test")
    check_broadcastable([n], [1])
    assert guards(env) == []


def test_different_sizes_are_refused_where_neither_is_one() -> None:
    for function in (broadcast_shapes, broadcast_without_choice, check_broadcastable):
        _, (n, m) = sizes(4, 6)
        with pytest.raises(ShapeMismatch):
            function([n], [m])
    _, (n, m) = sizes(4, 6)
    with pytest.raises(ShapeMismatch):
        check_expandable([n], [m], "test")
    assert meet_without_choice(n, m) is None


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64]


def test_related_dtypes_are_those_of_torch() -> None:
    for dtype in DTYPES:
        x = torch.ones(2, dtype=dtype)
        assert float_type(dtype) is x.sqrt().dtype
        assert real_type(dtype) is (torch.view_as_real(x).dtype if x.is_complex() else dtype)
        assert is_integral(dtype, include_bool=True) is not (x.is_floating_point() or x.is_complex())
        assert is_integral(dtype) is (is_integral(dtype, include_bool=True) and dtype is not torch.bool)
        if x.is_floating_point():
            assert complex_type(dtype) is torch.complex(x, x).dtype
    assert complex_type(torch.complex64) is torch.complex64
