"""Plans that environments share: what is shared, what is not, and that nobody can tell."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode, ShapeEnv, dims, make_fx
from understudy.infer.engine import cache
from understudy.shapes.patterns import NoPattern, Patterns


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    FakeTensorMode.cache_clear()


def capture(f: Callable[..., Any], *shape: int, **options: Any) -> Any:
    """A run on symbols in a new environment: the specs of the results, the guards, and how many calls were inferred."""
    env = ShapeEnv(**options)
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.empty(shape), source="x", symbolic_context=dims(*"abcd"[: len(shape)]))
    before = cache.misses
    with mode:
        result = f(x)
    results = result if isinstance(result, (tuple, list)) else (result,)
    return (
        [str(getattr(part, "_spec", part)) for part in results],
        list(map(str, env.guards)),
        cache.misses - before,
    )


def program(x: torch.Tensor) -> Any:
    y = torch.cat([x, x]).transpose(0, 1)
    return y.reshape(-1), y[1:].sum(0), torch.nn.functional.pad(y, (1, 2)), y.split(3, 1)[0], x.add_(1)


def test_a_second_environment_infers_nothing() -> None:
    first = capture(lambda x: (x.transpose(0, 1) + 1, x.sum(1), x * x.mean()), 6, 8)
    second = capture(lambda x: (x.transpose(0, 1) + 1, x.sum(1), x * x.mean()), 6, 8)
    assert first[2] and second[2] == 0 and first[:2] == second[:2]


def test_what_was_assumed_is_assumed_again_with_its_own_line() -> None:
    def twice(x: torch.Tensor) -> Any:
        return x.view(-1, 4)

    def elsewhere(x: torch.Tensor) -> Any:
        return x.view(-1, 4)

    (specs, guards, count), (other_specs, other_guards, other) = (
        capture(twice, 6, 8),
        capture(elsewhere, 6, 8),
    )
    assert specs == other_specs and count == other == 1
    assert len(guards) == len(other_guards) == 1
    assert guards[0].split("because")[0] == other_guards[0].split("because")[0] and guards != other_guards


def test_after_a_guard_what_is_known_is_part_of_the_question() -> None:
    def narrow(x: torch.Tensor) -> Any:
        return x.unsqueeze(0).expand(3, -1, -1) * 2

    def assumed(x: torch.Tensor) -> Any:
        assert x.shape[0] == x.shape[1]
        return narrow(x)

    assert capture(narrow, 6, 6)[2]
    first, again = capture(assumed, 6, 6), capture(assumed, 6, 6)
    assert first[2] and not again[2] and first[:2] == again[:2]
    FakeTensorMode.cache_clear()
    assert capture(assumed, 6, 6) == first


def test_other_examples_other_names_and_other_settings_are_other_questions() -> None:
    def f(x: torch.Tensor) -> Any:
        return x.transpose(0, 1).clone(memory_format=torch.preserve_format)

    assert capture(f, 6, 8)[2] and capture(f, 8, 6)[2] and capture(f, 6, 8, specialize_zero_one=False)[2]
    assert capture(f, 6, 8)[2] == 0

    def of(name: str) -> int:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(torch.empty(6, 8), symbolic_context=dims(name, "b"))
        before = cache.misses
        with mode:
            assert str((x + 1)._spec) == f"f32[{name}, b]@cpu"
        return cache.misses - before

    assert of("m") and of("n") and not of("m")


def test_no_more_guards_and_no_other_text_than_without() -> None:
    first = capture(program, 6, 8)
    second = capture(program, 6, 8)
    assert first[:2] == second[:2] and second[2] < first[2]


def test_expressions_are_written_in_the_same_order() -> None:
    """Atoms are written in the order of their birth, also if they are born on the way to a result that has none."""

    def f(x: torch.Tensor) -> Any:
        first = x[::3].sum()
        return first, x.flatten()[::2].reshape(-1)[1:], torch.cat([x[::2, 0], x[0, ::3], x[::3, 0]])

    texts = [capture(f, 7, 11)[:2] for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]


def test_sizes_that_data_decides_are_not_shared() -> None:
    def f(x: torch.Tensor) -> Any:
        return x.nonzero() + 1

    assert capture(f, 6, 8)[2] and capture(f, 6, 8)[2]


def test_environments_are_not_kept() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    mode.from_tensor(torch.empty(6, 8)).transpose(0, 1).sum(0)
    assert cache.shared
    here = weakref.ref(env)
    del env, mode
    gc.collect()
    assert here() is None


def test_shared_plans_go_with_the_others() -> None:
    capture(lambda x: x + 1, 6, 8)
    assert cache.shared
    cache.forget_plans()
    assert not cache.shared


def test_the_same_graph_again() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)

    def graph() -> Any:
        with torch.no_grad():
            gm: Any = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
        vals = [str(node.meta.get("val")) for node in gm.graph.nodes]
        return gm, (gm.code, vals, [guard.text for guard in gm.shape_env.guards])

    (_, first), (again, second) = graph(), graph()
    assert first == second
    other = torch.randn(3, 7, 16)
    torch.testing.assert_close(again(other), layer(other))


# --- forms --------------------------------------------------------------------------------------------------------


def numbers(env: ShapeEnv) -> tuple[Any, Any]:
    return env.create_symint(8, "a").node, env.create_symint(6, "b").node


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: a,
        lambda a, b: a * b * b - 3 * a + 7,
        lambda a, b: (a + b) // 3 * b,
        lambda a, b: (a * 5) % (b + 1) - a // 4,
        lambda a, b: a.shape_env.numbers.compute("max", a // 2, b % 5),
    ],
)
def test_an_expression_in_another_environment(compute: Callable[[Any, Any], Any]) -> None:
    env, other = ShapeEnv(), ShapeEnv()
    wanted = compute(*numbers(other))
    form = Patterns(env).form_of(compute(*numbers(env)))
    assert Patterns(other).node(form) is wanted
    assert Patterns(other).form_of(wanted) is form


def test_made_in_another_order_it_is_the_same_form() -> None:
    env, other = ShapeEnv(), ShapeEnv()
    (a, b), (c, d) = numbers(env), numbers(other)
    first = (a // 2) * (b // 5)
    second = (d // 5) * (c // 2)
    assert Patterns(env).form_of(first) is Patterns(other).form_of(second)


def test_what_another_environment_does_not_have() -> None:
    env, other = ShapeEnv(), ShapeEnv()
    a, b = numbers(env)
    form = Patterns(env).form_of(a * b)
    with pytest.raises(NoPattern):
        Patterns(other).node(form)
    with pytest.raises(NoPattern):
        Patterns(other).form_of(a)


def test_knowledge_grows_with_symbols_and_facts() -> None:
    env, other = ShapeEnv(), ShapeEnv()
    mine, others = Patterns(env), Patterns(other)
    assert mine.knowledge() is others.knowledge()
    a, b = numbers(env)
    assert mine.knowledge() is not others.knowledge()
    c, d = numbers(other)
    assert mine.knowledge() is others.knowledge()
    assert a > b
    assert mine.knowledge() is not others.knowledge()
    assert c > d
    assert mine.knowledge() is others.knowledge()
    env.create_unbacked_symint()
    assert mine.knowledge() is None
