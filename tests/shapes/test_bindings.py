"""Symbols that data decides: where a result tells them, and what happens when a program is run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from understudy import (
    FakeTensor,
    FakeTensorMode,
    KeyPath,
    ShapeEnv,
    compute_unbacked_bindings,
    dims,
    free_symbols,
    free_unbacked_symbols,
    has_free_symbols,
    has_free_unbacked_symbols,
    rebind_unbacked,
    resolve_unbacked_bindings,
    statically_known_true,
)


def made() -> tuple[ShapeEnv, FakeTensorMode, FakeTensor]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    return env, mode, mode.from_tensor(torch.randn(4, 8), source="x", symbolic_context=dims("n", "m"))


def shown(bindings: Any) -> dict[str, str]:
    return {symbol.name: str(path) for symbol, path in bindings.items()}


def names(symbols: set[Any]) -> set[str]:
    return {symbol.name for symbol in symbols}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: x.nonzero(), {"u0": ".size()[0]"}),
        (lambda x: x.argmax().item(), {"u0": ""}),
        (lambda x: x.sum().item(), {"zuf0": ""}),
        (lambda x: (x.sum() > 0).item(), {"u0": ""}),
        (lambda x: [x.argmax().item(), {"rows": x.nonzero()}], {"u0": "[0]", "u1": "[1]['rows'].size()[0]"}),
        (lambda x: torch.unique(x, return_counts=True), {"u0": "[0].size()[0]"}),
        (lambda x: x.argmax().item() * 2, {"u0": "//2"}),
    ],
)  # fmt: skip
def test_where_a_symbol_can_be_read(program: Any, expected: dict[str, str]) -> None:
    env, mode, x = made()
    with mode:
        result = program(x)
    bindings = compute_unbacked_bindings(env, result)
    assert bindings is not None and shown(bindings) == expected
    assert compute_unbacked_bindings(env, result) is None


def test_reading_it_off_a_real_result() -> None:
    env, mode, x = made()
    real = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]])
    with mode:
        bindings = compute_unbacked_bindings(env, [x.nonzero(), x.argmax().item()])
    assert bindings is not None
    result = [real.nonzero(), int(real.argmax())]
    assert [path.get(result) for path in bindings.values()] == [3, 5]


def test_peeking_leaves_them() -> None:
    env, mode, x = made()
    with mode:
        rows = x.nonzero()
    assert compute_unbacked_bindings(env, rows, peek=True) == compute_unbacked_bindings(env, rows)


def test_a_symbol_that_nothing_tells_is_an_error() -> None:
    env, mode, x = made()
    with mode:
        x.nonzero()
        with pytest.raises(
            ValueError, match=r"u0 \(made by aten.nonzero.* can't be computed from the result"
        ):
            compute_unbacked_bindings(env, x + 1)
        with env.ignore_fresh_unbacked_symbols():
            x.sum(0).nonzero()
    assert compute_unbacked_bindings(env, x + 1) is None


def test_nothing_to_bind() -> None:
    env, _, x = made()
    assert compute_unbacked_bindings(env, x) is None and compute_unbacked_bindings(None, x) is None


def test_running_again_renames() -> None:
    env, mode, x = made()
    node = torch.fx.Graph().call_function(torch.nonzero, ())
    with mode:
        first = x.nonzero()
        node.meta["unbacked_bindings"] = compute_unbacked_bindings(env, first)
        mode.epoch += 1
        second = x.nonzero()
    assert first.shape[0].node is not second.shape[0].node
    rebind_unbacked(env, node, second)
    assert statically_known_true(first.shape[0] == second.shape[0])
    assert not env.pending_fresh_unbacked_symbols
    resolved = resolve_unbacked_bindings(env, node.meta["unbacked_bindings"])
    assert resolved is not None and shown(resolved) == {"u1": ".size()[0]"}
    assert resolve_unbacked_bindings(env, None) is None


def test_what_became_a_number_needs_no_renaming() -> None:
    env, mode, x = made()
    with mode:
        bindings = compute_unbacked_bindings(env, x.argmax().item())
    assert bindings is not None
    rebind_unbacked(env, bindings, 3)
    assert not env.unbacked_renamings


def test_free_symbols() -> None:
    _, mode, x = made()
    n, m = x.shape
    with mode:
        rows = x.nonzero()
        number = x.argmax().item()
    assert names(free_symbols(x)) == {"n", "m"} and names(free_symbols([n * 2, {"k": m}])) == {"n", "m"}
    assert names(free_symbols(rows)) == {"u0"} == names(free_unbacked_symbols(rows))
    assert names(free_unbacked_symbols((x, number + n))) == {"u1"}
    assert names(free_symbols(torch.sym_int(n * 0.3) + number)) == {"n", "u1"}
    assert not free_symbols(torch.zeros(3)) and not free_symbols(3) and not free_symbols(None)
    assert has_free_symbols(x) and not has_free_unbacked_symbols(x) and has_free_unbacked_symbols(rows)
    int(n)
    assert names(free_symbols(x)) == {"m"}


def test_paths_print_as_code() -> None:
    path = KeyPath().then("item", 0).then("item", "rows").then("size", 1).then("divided", 4)
    assert str(path) == "[0]['rows'].size()[1]//4"
    assert path.get([{"rows": torch.zeros(2, 12)}]) == 3
    assert KeyPath().then("offset").get(torch.zeros(5)[2:]) == 2


def test_symbols_are_those_of_the_expressions() -> None:
    env, mode, x = made()
    with mode:
        rows = x.nonzero()
    n, count = x.shape[0].node.expr, rows.shape[0].node.expr
    assert free_symbols(x.shape[0] + rows.shape[0]) == {n, count}
    assert free_unbacked_symbols([x, rows]) == {count}
    assert free_symbols({n + 1: [count, torch.zeros(2)]}) == {n, count}
    bindings = compute_unbacked_bindings(env, rows)
    assert bindings is not None and set(bindings) == {count} and count in bindings and n not in bindings
    assert bindings[count].get(torch.zeros(5, 2)) == 5
    assert env.bind_symbols([x], torch.zeros(3, 7))[n] == 3
