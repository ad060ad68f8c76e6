"""Guards as text, as a check of other inputs, and as the source of one: all three say the same, and it is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from understudy import Dim, FakeTensorMode, ShapeEnv, UnderstudyError, bind_symbols, dims, eval_guards


def run(
    program: Callable[..., Any], *shapes: tuple[int, ...], names: Any = None, **options: Any
) -> tuple[ShapeEnv, Any]:
    """One symbolic run on inputs x, y, … of these shapes, all dimensions dynamic and apart."""
    env = ShapeEnv(duck_shape=False, **options)
    mode = FakeTensorMode(shape_env=env)
    inputs = [
        mode.from_tensor(torch.zeros(shape), source=name, symbolic_context=names[position] if names else ("dynamic",) * len(shape))
        for position, (name, shape) in enumerate(zip("xyz", shapes, strict=False))
    ]  # fmt: skip
    with mode:
        return env, program(*inputs)


def rows_of_eight(x: Tensor) -> Tensor:
    return x.view(-1, 8)


def test_the_guard_of_a_view_says_why() -> None:
    env, out = run(rows_of_eight, (4, 16), names=[dims("batch", "seq")])
    (guard,) = env.guards
    assert guard.text == "batch*seq % 8 == 0"
    assert str(guard).startswith("batch*seq % 8 == 0    because ") and str(guard).endswith(
        ": return x.view(-1, 8)"
    )
    assert str(out.spec) == "f32[batch*seq//8, 8]@cpu"


def whole_windows(x: Tensor) -> Tensor:
    """Padding to multiples: at even sizes, to windows of 7 of the halves."""
    if x.shape[0] % 2 == 0 and x.shape[0] // 2 > 7 and x.shape[0] // 2 % 2 == 0:
        half = x[::2]
        padded = torch.nn.functional.pad(half, (0, -half.shape[0] % 7))
        return padded.view(-1, 7)
    raise AssertionError


def test_a_guard_is_said_in_terms_of_what_is_known() -> None:
    env, out = run(whole_windows, (36,), names=[dims("length")])
    assert str(out.spec) == "f32[(length + 12)//14, 7]@cpu"
    assert [guard.text for guard in env.guards] == [
        "length % 2 == 0",
        "length >= 16",
        "length % 4 == 0",
        "length % 14 != 0",
    ]
    assert env.check(torch.zeros(40)) == [] and len(env.check(torch.zeros(28))) == 1


def test_the_gradient_of_a_size_with_example_one_assumes_nothing() -> None:
    def gradient(x: Tensor) -> Tensor:
        y = x.requires_grad_().sin()
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    env, out = run(gradient, (1, 5), names=[dims("batch", "width")])
    assert env.guards == [] and str(out.spec) == "f32[batch, width]@cpu"


def test_a_gradient_that_was_broadcast_is_summed() -> None:
    def gradient(x: Tensor, y: Tensor) -> Tensor:
        return torch.autograd.grad((x.requires_grad_() * y).sum(), x)[0]

    env, out = run(gradient, (1, 5), (3, 5), names=[dims("batch", "width"), dims("rows", "width")])
    assert "batch == 1" in [guard.text for guard in env.guards] and tuple(out.shape) == (1, out.shape[1])


def test_a_check_names_what_is_broken() -> None:
    env, _ = run(rows_of_eight, (4, 16), names=[dims("batch", "seq")])
    assert env.check(torch.zeros(2, 4)) == [] and env.evaluate_guards(x=torch.zeros(3, 8))
    (broken,) = env.check(torch.zeros(3, 5))
    assert broken.inputs == ("x",)
    assert str(broken) == f"{env.guards[0]}\n    but batch = 3 (x.size(0)), seq = 5 (x.size(1))"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((torch.zeros(4, 16), torch.zeros(16, 7)), "y.size(1) == 32\n    but y.size(1) = 7"),
        ((torch.zeros(4, 16), torch.zeros(9, 32)), "seq == y_0"),
        ((torch.zeros(4, 16, 1), torch.zeros(16, 32)), "x.dim() == 2\n    but x.dim() = 3"),
        ((torch.zeros(16, 4).t(), torch.zeros(16, 32)), "x.stride(0) == seq\n    but x.stride(0) = 1, seq = 16 (x.size(1))"),
        ((torch.zeros(1, 16), torch.zeros(16, 32)), "batch >= 2    because sizes 0 and 1 are always specialised"),
        ((torch.zeros(5, 16)[1:], torch.zeros(16, 32)), "x.storage_offset() == 0\n    but x.storage_offset() = 16"),
        ((torch.zeros(99, 16), torch.zeros(16, 32)), "batch <= 64    because its range\n    but batch = 99"),
    ],
)  # fmt: skip
def test_static_sizes_strides_and_ranges_are_checked(given: Any, text: str) -> None:
    env, _ = run(
        lambda x, y: x @ y, (4, 16), (16, 32), names=[(Dim("batch", max=64), "seq"), (None, "static")]
    )
    assert not env.check(torch.zeros(7, 3), torch.zeros(3, 32))
    assert any(str(broken).startswith(text) for broken in env.check(*given)), [
        str(b) for b in env.check(*given)
    ]


def test_inputs_are_given_in_order_or_by_name() -> None:
    env, _ = run(lambda x, y: x + y, (4, 5), (4, 5))
    assert env.check(torch.zeros(3, 2), y=torch.zeros(3, 2)) == []
    for wrong in ((), (torch.zeros(2, 2),), (torch.zeros(2, 2),) * 3):
        with pytest.raises(TypeError, match="expected the inputs x, y"):
            env.check(*wrong)
    with pytest.raises(TypeError, match="expected the inputs x, y"):
        env.check(torch.zeros(2, 2), z=torch.zeros(2, 2))


def compiled(env: ShapeEnv) -> Callable[..., None]:
    names: dict[str, Any] = {}
    exec(env.check_source(), names)
    return names["check"]  # type: ignore[no-any-return]


def test_the_source_of_a_check() -> None:
    env, _ = run(rows_of_eight, (4, 16), names=[dims("batch", "seq")])
    check = compiled(env)
    check(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="these inputs violate guards of the run") as caught:
        check(torch.zeros(3, 5))
    lines = str(caught.value).splitlines()
    assert lines[1] == f"  {env.guards[0]}" and lines[2] == "  with batch = 3, seq = 5, x: (3, 5)"
    with pytest.raises(ValueError, match="x: expected 2 dimensions as in the run, got 1"):
        check(torch.zeros(3))


def test_as_expressions() -> None:
    env, _ = run(rows_of_eight, (4, 16))
    guards = env.produce_guards()
    assert "x.size(0)*x.size(1) % 8 == 0" in guards and "x.stride(0) == x.size(1)" in guards
    assert all(eval(guard, {"x": torch.zeros(2, 12)}) for guard in guards)
    assert not all(eval(guard, {"x": torch.zeros(3, 5)}) for guard in guards)


def in_torchs_notation(program: Any, *shapes: tuple[int, ...], **options: Any) -> list[str]:
    """The guards of a program in torch's notation. They hold for these inputs."""
    env, inputs = ShapeEnv(), list(map(torch.zeros, shapes))
    mode = FakeTensorMode(shape_env=env)
    fakes = [mode.from_tensor(x) for x in inputs]
    with mode:
        program(*fakes)
    names = ["a", "b", "c"][: len(inputs)]
    guards: list[str] = env.produce_guards(fakes, names, **options)
    assert all(eval(guard, {"L": dict(zip(names, inputs, strict=True))}) for guard in guards)
    verbose = env.produce_guards_verbose(fakes, names, **options)[1].exprs
    assert [text.partition("  # ")[0] for text in verbose] == guards
    return guards


def test_guards_in_torchs_notation() -> None:
    def bounds(a: Any) -> None:
        assert a.shape[0] > 5 and a.shape[0] > 12 and a.shape[0] < 90
        assert a.shape[1] > 5 and a.shape[1] > a.shape[0]

    assert in_torchs_notation(bounds, (15, 20), _simplified=True) == [
        "L['a'].size()[0] < L['a'].size()[1]",
        "13 <= L['a'].size()[0] and L['a'].size()[0] <= 89",
        "14 <= L['a'].size()[1]",
    ]

    def twice(a: Any, b: Any) -> None:
        assert a.shape[0] == b.shape[0] * 2

    assert in_torchs_notation(twice, (16,), (8,), ignore_static=True) == [
        "L['a'].size()[0] == 2*L['b'].size()[0]",
        "2 <= L['b'].size()[0]",
    ]
    joined: Any = lambda a, b, c: (torch.cat([a, a]) + b, torch.cat([b, b]) + c)  # noqa: E731
    assert in_torchs_notation(joined, (2,), (4,), (8,), _simplified=True) == []
    assert in_torchs_notation(joined, (2,), (4,), (8,), ignore_static=True) == [
        "L['b'].size()[0] == 2*L['a'].size()[0]",
        "L['c'].size()[0] == 4*L['a'].size()[0]",
        "2 <= L['a'].size()[0]",
    ]

    def fixed(a: Any, b: Any) -> None:
        assert a.shape[0] == 5 and b.shape[0] != 7

    assert in_torchs_notation(fixed, (5,), (6,), _simplified=True) == ["L['b'].size()[0] != 7"]
    assert "L['a'].size()[0] == 5" in in_torchs_notation(fixed, (5,), (6,), ignore_static=False)


def test_guards_of_placeholders() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.zeros(4, 16), symbolic_context=dims("batch", "seq"))
    with mode:
        x.view(-1, 8)
    assert env.produce_guards([x], ["a"], ignore_static=True)[0] == "L['a'].stride()[0] == L['a'].size()[1]"
    assert "L['a'].size()[0]*L['a'].size()[1] % 8 == 0" in env.produce_guards([x], ["a"])
    code = env.produce_guards_expression([x])
    assert code is not None
    for shape, expected in (((2, 4), True), ((3, 5), False), ((3, 8), True)):
        assert env.evaluate_guards_expression(code, [torch.zeros(shape)]) is expected
        assert env.evaluate_guards_for_args([x], [torch.zeros(shape)]) is expected
    assert {s.name: n for s, n in env.bind_symbols([x], torch.zeros(3, 5)).items()} == {"batch": 3, "seq": 5}
    assert {s.name: n for s, n in env.bind_symbols(None, [torch.zeros(3, 5)]).items()} == {
        "batch": 3,
        "seq": 5,
    }


def test_graphs() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.zeros(4, 16), symbolic_context=dims("batch", "seq"))
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    graph.output(node)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert {s.name: n for s, n in bind_symbols(module, torch.zeros(3, 5)).items()} == {"batch": 3, "seq": 5}
    assert eval_guards(module, torch.zeros(3, 5)) and not eval_guards(module, torch.zeros(1, 5))


def test_one_symbol_in_two_places_binds_once() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    square = mode.from_tensor(torch.zeros(4, 4), source="x", symbolic_context=("n", "n"))
    assert not env.check(torch.zeros(3, 3))
    assert str(env.check(torch.zeros(3, 5))[0]).startswith("x.size(1) == n\n    but x.size(1) = 5, n = 3")
    for kind in (ValueError, AssertionError):  # the latter is what torch's raises
        with pytest.raises(kind, match=r"expected arg0.size\(1\) to be 3 \(n\), got 5"):
            env.bind_symbols([square], torch.zeros(3, 5))


def test_a_division_by_zero_is_a_broken_guard() -> None:
    env = ShapeEnv(specialize_zero_one=False)
    a, b = env.create_symint(8, "a"), env.create_symint(4, "b")
    assert bool(a % b == 0)
    assert not env.check(9, 3)
    assert [broken.inputs for broken in env.check(9, 0)] == [("a", "b")]
    with pytest.raises(ValueError, match="a % b == 0"):
        compiled(env)(9, 0)


# --- guards admit exactly the sizes for which the answer is right ------------------------------------------------------

PROGRAMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "view": (lambda x: x.view(-1, 4), [(4, 6)]),
    "split in two": (lambda x: x.view(x.shape[0], 2, -1), [(3, 6)]),
    "add": (lambda x, y: x + y, [(4, 6), (4, 6)]),
    "broadcast": (lambda x, y: x + y, [(4, 6), (6,)]),
    "matmul": (lambda x, y: x @ y, [(4, 6), (6, 3)]),
    "cat": (lambda x, y: torch.cat([x, y], 1), [(4, 6), (4, 3)]),
    "pad to a multiple": (
        lambda x: torch.nn.functional.pad(x, (0, (-x.shape[1]) % 4)).view(x.shape[0], -1, 4),
        [(3, 6)],
    ),
    "a branch": (lambda x: x.sum(0) if x.shape[0] > x.shape[1] else x.sum(1), [(4, 6)]),
    "slices": (lambda x: x[1:3, ::2], [(5, 6)]),
    "narrow": (lambda x: x[:, : x.shape[1] // 2] + 1, [(5, 6)]),
    "chunk": (lambda x: x.chunk(2, 1)[0], [(5, 6)]),
    "stack": (lambda x, y: torch.stack([x, y]).flatten(1), [(4, 5), (4, 5)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_admitted_sizes_are_those_for_which_the_answer_is_right(name: str) -> None:
    program, shapes = PROGRAMS[name]
    env, out = run(program, *shapes)
    dimensions = [len(shape) for shape in shapes]
    check = compiled(env)
    admitted = 0
    for sizes in itertools.product((2, 3, 4, 6, 8), repeat=sum(dimensions)):
        left = list(sizes)
        reals = [torch.zeros([left.pop(0) for _ in range(count)]) for count in dimensions]
        broken = env.check(*reals)
        if broken:
            with pytest.raises(ValueError, match="violate guards"):
                check(*reals)
            continue
        check(*reals)
        admitted += 1
        values = {env.from_sympy(symbol): number for symbol, number in env.bind_symbols(None, *reals).items()}
        expected = program(*reals)
        found = [
            s if isinstance(s, int) else s.value.evaluate(values) for s in (*out.spec.shape, *out.spec.stride)
        ]
        assert found == [*expected.shape, *expected.stride()], (sizes, out.spec)
    assert admitted >= 3


def test_what_breaks_the_guards_would_have_failed_or_differed() -> None:
    """A guard that excludes sizes for which everything is as recorded would be one too many."""
    env, _ = run(rows_of_eight, (4, 16))
    for a, b in itertools.product(range(2, 9), repeat=2):
        real = torch.zeros(a, b)
        fits = not env.check(real)
        assert fits == (a * b % 8 == 0)
        if not fits:
            with pytest.raises(RuntimeError):
                real.view(-1, 8)


def test_what_no_size_allows_is_refused() -> None:
    with pytest.raises(UnderstudyError, match=r"x_0|can't"):
        run(lambda x: x.view(-1, 7), (4, 16))
