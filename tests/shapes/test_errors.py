"""Decisions that depend on data: the message says what was asked, where the symbol came from, and what to write."""

from __future__ import annotations

from collections.abc import Callable
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


def loop_over_experts(x: torch.Tensor) -> None:
    hit = (x > 0).nonzero()
    for expert in hit:
        x[expert] *= 2


Program = Callable[[torch.Tensor], None]
MESSAGES: list[tuple[Program, str, str, str, str]] = [
    (branch, "whether u0 >= 4", "n = x.argmax().item()", "if n > 3:",
     "say which it is, before it is needed: torch._check(n >= 4) or torch._check(n <= 3)"),
    (size_of_a_result, "whether u0 >= 11", "kept = x[x > 0]", "if kept.shape[0] > 10:",
     "say which it is, before it is needed: torch._check(kept.shape[0] >= 11) or torch._check(kept.shape[0] <= 10)"),
    (loop, "the value of u0", "n = x.argmax().item()", "for _ in range(n):",
     "say what it is, before it is needed: torch._check(n == <number>); or keep it a symbol, without int() and range()"),
    (loop_over_experts, "the value of u0", "hit = (x > 0).nonzero()", "for expert in hit:",
     "how many rounds the loop has is data: go through all that there can be, with torch.where for what does not count, or "
     "do the work of all rounds in one call; of a mixture of experts, take the implementation that groups them, in "
     "transformers model.set_experts_implementation('grouped_mm'); if it is known, say what it is, before it is needed: "
     "torch._check(hit.shape[0] == <number>); or keep it a symbol, without int() and range()"),
    (truth, "whether u0 == 1", "is_large = (x.sum() > 100).item()", "if is_large:",
     "say which it is, before it is needed: torch._check(is_large) or torch._check(not is_large)"),
    (real_number, "whether zuf0 > 0.5", "mean = x.mean().item()", "if mean > 0.5:",
     "say which it is, before it is needed: torch._check(mean > 0.5) or torch._check(mean <= 0.5)"),
    (several, "whether u0 + u1 == 8", "first, second = x.argmax(1)[:2].tolist()", "if first + second == 8:",
     "say which it is, before it is needed: torch._check(first + second == 8) or torch._check(first + second != 8)"),
    (in_a_list, "whether u0 > u1", "sizes = x.argmax(1)[:2].tolist()", "if sizes[0] > sizes[1]:",
     "say which it is, before it is needed: torch._check(sizes[0] > sizes[1]) or torch._check(sizes[0] <= sizes[1])"),
    (without_a_name, "whether u0 >= 4", "if x.argmax().item() > 3:", "if x.argmax().item() > 3:",
     "keep what made it in a variable, u0 = …, and say which it is, before it is needed: torch._check(u0 >= 4) or "
     "torch._check(u0 <= 3)"),
    (of_a_tensor, "whether u0 == 1", "if x.sum() > 3:", "if x.sum() > 3:",
     "keep what made it in a variable, u0 = …, and say which it is, before it is needed: torch._check(u0) or "
     "torch._check(not u0)"),
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
        f"the program needs to know {question}, and that is data-dependent: u0 was made by "
    ) or ("zuf0 was made by .item()" in error.reason)
    assert error.reason.endswith(born) and "test_errors.py:" in error.reason
    assert error.context.line.endswith(asked) and "test_errors.py:" in error.context.line
    assert error.context.hint == advice
    assert str(error.cond) in question
    assert isinstance(error, RuntimeError)


def test_the_whole_text() -> None:
    lines = str(run(branch)).splitlines()
    assert lines[1] == "  called:  a decision on sizes(u0 >= 4)"
    assert lines[2].startswith("  at:      ") and lines[2].endswith(": if n > 3:")
    assert lines[3].startswith("  to do:   say which it is")


def pasted(program: str) -> Any:
    """Run text with a stand-in x; what it calls its result."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    names: dict[str, Any] = {"torch": torch, "x": mode.from_tensor(torch.randn(4, 8), static_shapes=True)}
    with mode:
        exec(program, names)
    return names["result"]


@pytest.mark.parametrize("answer", [0, 1])
def test_the_advice_helps(answer: int) -> None:
    """Pasting the suggested line before the question answers it, either way."""
    advice = run(branch).context.hint.split(": ", 1)[1].split(" or ")
    result = pasted(f"n = x.argmax().item()\n{advice[answer]}\nresult = 'yes' if n > 3 else 'no'")
    assert result == ("yes", "no")[answer]


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
