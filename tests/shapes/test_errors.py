"""Decisions that depend on data: the message says what was asked, where the symbol came from, and what to write."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode, GuardOnDataDependentSymNode, ShapeEnv


def branch(x: torch.Tensor) -> None:
    n = x.argmax().item()
    if n > 3:
        pass


def size_of_a_result(x: torch.Tensor) -> None:
    kept = x[x > 0]
    if kept.shape[0] > 10:
        pass


def loop(x: torch.Tensor) -> None:
    n = x.argmax().item()
    for _ in range(n):
        pass


def truth(x: torch.Tensor) -> None:
    is_large = (x.sum() > 100).item()
    if is_large:
        pass


def real_number(x: torch.Tensor) -> None:
    mean = x.mean().item()
    if mean > 0.5:
        pass


def several(x: torch.Tensor) -> None:
    first, second = x.argmax(1)[:2].tolist()
    if first + second == 8:
        pass


def in_a_list(x: torch.Tensor) -> None:
    sizes = x.argmax(1)[:2].tolist()
    if sizes[0] > sizes[1]:
        pass


def without_a_name(x: torch.Tensor) -> None:
    if x.argmax().item() > 3:
        pass


def of_a_tensor(x: torch.Tensor) -> None:
    if x.sum() > 3:
        pass


def a_tensor_with_a_name(x: torch.Tensor) -> None:
    is_large = x.sum() > 3
    if is_large:
        pass


def a_size_without_a_name(x: torch.Tensor) -> None:
    if x.nonzero().shape[0] > 3:
        pass


def in_a_dict(x: torch.Tensor) -> None:
    state = {"kept": x.nonzero()}
    if state["kept"].shape[0] > 3:
        pass


def an_attribute(x: torch.Tensor) -> None:
    state = SimpleNamespace(kept=x.nonzero())
    if state.kept.shape[0] > 3:
        pass


def one_of_two(x: torch.Tensor) -> None:
    n = x.argmax().item()
    if (n == 3) | (n == 5):
        pass


def loop_over_experts(x: torch.Tensor) -> None:
    hit = (x > 0).nonzero()
    for expert in hit:
        x[expert] *= 2


Program = Callable[[torch.Tensor], None]
MESSAGES: list[tuple[Program, str, str, str, str]] = [
    (branch, "whether u0 >= 4", "n = x.argmax().item()", "if n > 3:",
     "state the condition before it is used: torch._check(n >= 4) or torch._check(n <= 3)"),
    (size_of_a_result, "whether u0 >= 11", "kept = x[x > 0]", "if kept.shape[0] > 10:",
     "state the condition before it is used: torch._check(kept.shape[0] >= 11) or torch._check(kept.shape[0] <= 10)"),
    (loop, "the value of u0", "n = x.argmax().item()", "for _ in range(n):",
     "state the value before it is used: torch._check(n == <number>); or keep it a symbol: do not pass it to int(), range(), "
     "len(), a list index or math.sqrt (** 0.5 works)"),
    (loop_over_experts, "the value of u0", "hit = (x > 0).nonzero()", "for expert in hit:",
     "the iteration count depends on data; loop over the maximum instead, and mask with torch.where, or replace the loop by "
     "one batched call; for a mixture of experts, use the grouped implementation, in transformers "
     "model.set_experts_implementation('grouped_mm'); if the count is known, state the value before it is used: "
     "torch._check(hit.shape[0] == <number>); or keep it a symbol: do not pass it to int(), range(), len(), a list index or "
     "math.sqrt (** 0.5 works)"),
    (truth, "whether u0 == 1", "is_large = (x.sum() > 100).item()", "if is_large:",
     "state the condition before it is used: torch._check(is_large) or torch._check(torch.sym_not(is_large))"),
    (real_number, "whether zuf0 > 0.5", "mean = x.mean().item()", "if mean > 0.5:",
     "state the condition before it is used: torch._check(mean > 0.5) or torch._check(mean <= 0.5)"),
    (several, "whether u0 + u1 == 8", "first, second = x.argmax(1)[:2].tolist()", "if first + second == 8:",
     "state the condition before it is used: torch._check(first + second == 8) or torch._check(first + second != 8)"),
    (in_a_list, "whether u0 > u1", "sizes = x.argmax(1)[:2].tolist()", "if sizes[0] > sizes[1]:",
     "state the condition before it is used: torch._check(sizes[0] > sizes[1]) or torch._check(sizes[0] <= sizes[1])"),
    (without_a_name, "whether u0 >= 4", "if x.argmax().item() > 3:", "if x.argmax().item() > 3:",
     "assign it to a variable, u0 = (…).item(), use that one, and state the condition before it is used: torch._check(u0 >= 4) or "
     "torch._check(u0 <= 3)"),
    (of_a_tensor, "whether u0 == 1", "if x.sum() > 3:", "if x.sum() > 3:",
     "assign it to a variable, u0 = (…).item(), use that one, and state the condition before it is used: torch._check(u0) or "
     "torch._check(torch.sym_not(u0))"),
    (a_tensor_with_a_name, "whether u0 == 1", "if is_large:", "if is_large:",
     "state the condition before it is used: torch._check(is_large.item()) or torch._check(torch.sym_not(is_large.item()))"),
    (a_size_without_a_name, "whether u0 >= 4", "if x.nonzero().shape[0] > 3:", "if x.nonzero().shape[0] > 3:",
     "assign it to a variable, u0 = (…).shape[…], use that one, and state the condition before it is used: torch._check(u0 >= 4) or "
     "torch._check(u0 <= 3)"),
    (in_a_dict, "whether u0 >= 4", 'state = {"kept": x.nonzero()}', 'if state["kept"].shape[0] > 3:',
     "state the condition before it is used: torch._check(state['kept'].shape[0] >= 4) or "
     "torch._check(state['kept'].shape[0] <= 3)"),
    (an_attribute, "whether u0 >= 4", "state = SimpleNamespace(kept=x.nonzero())", "if state.kept.shape[0] > 3:",
     "state the condition before it is used: torch._check(state.kept.shape[0] >= 4) or "
     "torch._check(state.kept.shape[0] <= 3)"),
    (one_of_two, "whether u0 == 3 or u0 == 5", "n = x.argmax().item()", "if (n == 3) | (n == 5):",
     "state the condition before it is used: torch._check((n == 3) | (n == 5)) or torch._check((n != 3) & (n != 5))"),
]  # fmt: skip


def run(program: Program) -> GuardOnDataDependentSymNode:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(4, 8), static_shapes=True)
    with pytest.raises(GuardOnDataDependentSymNode) as caught, mode:
        program(x)
    return caught.value


@pytest.mark.parametrize(
    ("program", "question", "born", "asked", "advice"), MESSAGES, ids=lambda v: getattr(v, "__name__", "")
)
def test_messages(program: Program, question: str, born: str, asked: str, advice: str) -> None:
    error = run(program)
    assert error.reason.startswith(
        f"the program depends on {question}, which is data-dependent: u0 was made by "
    ) or ("zuf0 was made by .item()" in error.reason)
    assert error.reason.endswith(born) and "test_errors.py:" in error.reason
    assert error.context.line.endswith(asked) and "test_errors.py:" in error.context.line
    assert error.context.hint == advice
    assert str(error.cond) in question
    assert isinstance(error, RuntimeError)


def test_the_whole_text() -> None:
    lines = str(run(branch)).splitlines()
    assert lines[1] == "  while evaluating: u0 >= 4"
    assert lines[2].startswith("  at:      ") and lines[2].endswith(": if n > 3:")
    assert lines[3].startswith("  to do:   state the condition")


def pasted(program: str) -> Any:
    """Run text with a stand-in x; what it calls its result."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "x": mode.from_tensor(torch.randn(4, 8), static_shapes=True),
    }
    with mode:
        exec(program, names)
    return names["result"]


@pytest.mark.parametrize("answer", [0, 1])
@pytest.mark.parametrize(
    ("made", "asked"),
    [
        ("n = x.argmax().item()", "n > 3"),
        ("kept = x[x > 0]", "kept.shape[0] > 10"),
        ("flag = (x > 0).any().item()", "flag"),
        ("flag = (x > 0).any()", "flag"),
        ("mean = x.mean().item()", "mean > 0.5"),
        ("n = x.argmax().item()", "(n == 3) | (n == 5)"),
        ("n, m = x.argmax(1)[:2].tolist()", "torch.sym_min(n, m) > 3"),
        ("n, m = x.argmax(1)[:2].tolist()", "torch.sym_max(n * 2, m) == 3"),
        ("n, m = x.argmax(1)[:2].tolist()", "torch.sym_ite(n > m, n, m * 3) > 3"),
        ("n = x.argmax().item()", "n ** 0.5 > 2.0"),
        ("n = x.argmax().item()", "math.floor(n * 0.3) > 2"),
        ("state = {'kept': x.nonzero()}", "state['kept'].shape[0] % 2 == 0"),
    ],
)
def test_the_advice_helps(made: str, asked: str, answer: int) -> None:
    """Pasting the suggested line before the question answers it, either way."""
    question = f"result = 'yes' if {asked} else 'no'"
    with pytest.raises(GuardOnDataDependentSymNode) as caught:
        pasted(f"{made}\n{question}")
    advice = caught.value.context.hint.removeprefix("state the condition before it is used: ").split(" or ")
    assert pasted(f"{made}\n{advice[answer]}\n{question}") == ("yes", "no")[answer]


def test_operators_born_symbols_are_named() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(4, 8), static_shapes=True)
    with mode:
        rows = x.nonzero()
        with pytest.raises(
            GuardOnDataDependentSymNode,
            match=r"aten.nonzero.default of f32\[4, 8\]@cpu at .*rows = x.nonzero\(\)",
        ):
            bool(rows.shape[0] > 5)


def test_shapes_that_do_not_fit_are_told_with_the_sizes_at_hand() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(4, 6, 16), source="x", symbolic_context=("batch", "seq", 16))
    with pytest.raises(RuntimeError) as caught, mode:
        x + torch.zeros(5, 16)
    assert "of these shapes (batch = 4, seq = 6) fail as well" in str(caught.value)


def test_symbols_of_two_environments() -> None:
    a, b = (FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(4), source=name) for name in "ab")
    with pytest.raises(GuardOnDataDependentSymNode, match=r"belongs to another ShapeEnv(.|\n)*with one mode"):
        bool(a.shape[0] < b.shape[0])
