"""Reads of data that a stand-in lacks: one policy for `.item()`, `bool()`, `tolist()`, `.numpy()`, sizes of masks.

Determined values and ranges are answered without a policy. For the rest, a mode has

    answers="error"      a read raises (the default of a plain mode)
    answers="symbol"     numbers and sizes become symbols of the mode's shape environment
    answers="plausible"  values of an ordinary run: losses are positive and fall, nothing overflows, checks pass
    answers="worst"      as plausible, and masks select everything
    answers=policy       your own object: `policy.answer(read)` returns the answer, or NotImplemented

Every answer from a policy is listed in `mode.answers.given`, with its line.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from understudy import _torch
from understudy.errors import ArgumentError
from understudy.fake.values.determined import has_untracked_aliases, keep_contents
from understudy.fake.values.ranges import range_of
from understudy.lines import user_line
from understudy.ops.shared.dtypes import INTEGERS
from understudy.ops.traits.ranges import ValueRange
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode
    from understudy.fake.tensor import FakeTensor

Number = bool | int | float | complex
POLICIES = ("error", "symbol", "plausible", "worst")


@dataclass(frozen=True, slots=True)
class Read:
    """A read of missing data.

    `what` is read ("item", "tolist", "numpy", "equal", or the name of an operator whose result has a data-dependent
    size) from a tensor with this `spec`, whose elements are in the range `values`. `wanted`: the answer with which a
    check on that line passes (an `assert`, an `if` that raises), or a loop goes on, None if it decides neither. `rounds`:
    after so many of them, the loop should end. `least`, `most`: bounds of a size.
    """

    what: str
    spec: TensorSpec
    values: ValueRange
    line: str
    wanted: bool | None = None
    least: int = 0
    most: int | None = None
    rounds: int | None = None
    repeats: int = 0
    """How often this was read on this line before."""

    @property
    def is_size(self) -> bool:
        return self.what not in ("item", "tolist", "numpy", "equal", "allclose")


class AnswerPolicy(Protocol):
    def answer(self, read: Read) -> Any:
        """A number (for `tolist` and `numpy`, the value of every element, or the mean of integers), or NotImplemented: then
        the read raises."""


@dataclass(slots=True)
class GivenAnswer:
    """An answer of a policy: the line, what was read, the first answer, and the number of reads."""

    line: str
    what: str
    spec: str
    answer: Number
    count: int = 1

    def to_record(self) -> dict[str, Any]:
        answer = self.answer if isinstance(self.answer, (bool, int, float)) else str(self.answer)
        return {
            "line": self.line,
            "read": self.what,
            "tensor": self.spec,
            "answer": answer,
            "count": self.count,
        }

    def __str__(self) -> str:
        times = f", {self.count:,} times" if self.count > 1 else ""
        return f"{self.line}: {self.what} of {self.spec} → {self.answer!r}{times}"


@dataclass
class Plausible:
    """Values that an ordinary run would read.

    `worst_case`: masks select everything, so that data-dependent sizes are as large as possible.
    """

    worst_case: bool = False

    def answer(self, read: Read) -> Any:
        if read.is_size:
            return self._count(read)
        dtype = (
            torch.bool if read.what == "equal" else read.spec.dtype
        )  # for `allclose`, the answer is a bool
        if dtype is torch.bool:
            if read.wanted is not None:
                is_last = read.rounds is not None and read.repeats % read.rounds == read.rounds - 1
                return read.wanted != is_last
            return (read.values.likely or 0) >= 0.5
        if dtype.is_floating_point or dtype.is_complex:
            number = self._next_loss(read) if read.values.likely is None else float(read.values.likely)
            return complex(number) if dtype.is_complex else number
        if read.what in ("tolist", "numpy") and read.values.likely is not None:
            return read.values.likely  # counts add up to the number of counted values
        return self._integer(read.values)

    def _count(self, read: Read) -> int:
        """A data-dependent size: how many elements a mask selects, how many distinct values there are."""
        most = max(read.least, 1) if read.most is None else read.most
        likely = read.values.likely if read.values.filled is None else read.values.filled
        share = 1.0 if self.worst_case or likely is None else min(abs(likely), 1.0)
        is_mask = (read.values.low, read.values.high) == (0, 1)
        if likely is None and not self.worst_case and is_mask:
            share = 0.5
        return min(max(read.least, round(share * most)), most)

    def _next_loss(self, read: Read) -> float:
        """A loss: positive, and a little smaller each time. A value with bounds that such a loss would leave, such as an
        accuracy, is in the middle of its bounds."""
        number, low, high = 1 + 1.5 * 0.99**read.repeats, read.values.low, read.values.high
        if -math.inf < low and high < math.inf and not low <= number <= high:
            return (low + high) / 2
        return min(max(number, low), high)

    def _integer(self, values: ValueRange) -> int:
        if values.likely is not None:
            return round(values.likely)
        is_narrow = values.high - values.low <= 1 << 20
        return int(values.low + values.high) // 2 if is_narrow else int(min(max(1, values.low), values.high))


def make_policy(answers: Any) -> AnswerPolicy | None:
    """The policy with this name; None if reads raise."""
    if answers is None or answers in ("error", "symbol"):
        return None
    if answers in ("plausible", "worst"):
        return Plausible(worst_case=answers == "worst")
    if callable(getattr(answers, "answer", None)):
        return answers
    raise ArgumentError(
        f"answers={answers!r}: expected one of {', '.join(POLICIES)}, or an object with a method answer(read)"
    )


@dataclass
class Answers:
    """A policy, and the list of the answers it gave."""

    policy: AnswerPolicy
    given: list[GivenAnswer] = field(default_factory=list)
    _index: dict[tuple[str, str, str], GivenAnswer] = field(default_factory=dict)

    def ask(
        self, what: str, spec: TensorSpec, values: ValueRange, *, least: int = 0, most: int | None = None
    ) -> Any:
        line = user_line()
        key = (line, what, str(spec))
        before = self._index.get(key)
        wanted, rounds = find_decision() if spec.dtype is torch.bool or what == "equal" else (None, None)
        read = Read(what, spec, values, line, wanted, least, most, rounds, before.count if before else 0)
        answer = self.policy.answer(read)
        if answer is not NotImplemented:
            self._add(key, answer)
        return answer

    def record(self, what: str, spec: TensorSpec, answer: Number) -> None:
        """List an answer that did not come from the policy."""
        self._add((user_line(), what, str(spec)), answer)

    def _add(self, key: tuple[str, str, str], answer: Number) -> None:
        before = self._index.get(key)
        if before is not None:
            before.count += 1
        else:
            made = self._index[key] = GivenAnswer(*key, answer)
            self.given.append(made)


class _Composites(threading.local):
    """How many composite operators this thread is running on placeholders for their inputs. What they read there must be
    refused: the answer would become part of a plan. The operator is then run on the tensors themselves."""

    depth = 0


_composites = _Composites()


@contextmanager
def refuse_in_composite() -> Iterator[None]:
    _composites.depth += 1
    try:
        yield
    finally:
        _composites.depth -= 1


def is_in_composite() -> bool:
    """Whether a read must be refused, because a composite operator runs on placeholders."""
    return _composites.depth > 0


def answers_of(mode: FakeTensorMode) -> Answers | None:
    """The policy and list for reads of a mode here; None if no answers are made up."""
    return None if _composites.depth else mode.answers


# --- the reads -------------------------------------------------------------------------------------------------------


def number_from_program(fake: FakeTensor) -> Number | None:
    """The value of all elements of a tensor if its range is a single number."""
    dtype = fake._spec.dtype
    if fake._spec.is_symbolic or dtype.is_complex:
        return None
    value = range_of(fake).value
    if value is None:
        return None
    return bool(value) if dtype is torch.bool else float(value) if dtype.is_floating_point else int(value)


def answer_item(mode: FakeTensorMode, fake: FakeTensor, what: str = "item") -> Any:
    """The value of a tensor's elements, from its range or from the policy; NotImplemented without a policy."""
    if (kept := choose_contents(mode, fake, what)) is not None:
        with _torch.PastDispatch():
            return kept.item() if kept.numel() == 1 else kept.flatten()[0].item()
    answer = _ask_for_number(mode, fake, what)
    return answer if answer is NotImplemented else _to_python_number(answer, fake._spec.dtype)


MOST_CHOSEN = 1 << 16
"""The contents of integer tensors of up to this many elements are chosen as a whole, and kept."""


def choose_contents(mode: FakeTensorMode, fake: FakeTensor, what: str) -> torch.Tensor | None:
    """Choose the contents of a small tensor of integers, which become determined: later reads, and results computed from
    it, agree with the first read. Views are parts of their base, which is chosen as a whole. None for other tensors, and
    without a policy."""
    base = fake._base if type(fake._base) is type(fake) else fake
    spec = base._spec
    if (
        answers_of(mode) is None or spec.dtype not in INTEGERS or fake._spec.dtype is not spec.dtype
        or spec.is_symbolic or spec.sparse is not None or not 0 < spec.numel <= MOST_CHOSEN
        or number_from_program(base) is not None or has_untracked_aliases([base, fake])
    ):  # fmt: skip
        return None
    values = _make_values(mode, base, "tolist" if spec.numel > 1 else what)
    if values is None:
        return None
    keep_contents(base, values)
    fake._determined = base._determined
    return mode.value_of(fake)


def _ask_for_number(mode: FakeTensorMode, fake: FakeTensor, what: str) -> Any:
    sure = number_from_program(fake)
    if sure is not None:
        return sure
    answers = answers_of(mode)
    if answers is None or fake._spec.is_symbolic:
        return NotImplemented
    if not fake._spec.is_floating_point:
        return answers.ask(what, fake._spec, range_of(fake))
    known = fake.recall_size(NUMBER)
    if known is not None:
        answers.record(what, fake._spec, known)
        return known
    answer = answers.ask(what, fake._spec, range_of(fake))
    if answer is not NotImplemented:
        fake.remember_size(NUMBER, answer)
    return answer


NUMBER = ("number",)
"""The question for all elements of a tensor of floats: until it is written to, a loss that is read again is the same."""


def _to_python_number(answer: Any, dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return bool(answer)
    if dtype.is_complex:
        return complex(answer)
    return float(answer) if dtype.is_floating_point else int(answer)


LARGEST_ARRAY = 1 << 26
"""Arrays of answers up to this size in bytes are written out; larger ones are one expanded element."""


def answer_values(mode: FakeTensorMode, fake: FakeTensor, what: str) -> torch.Tensor | None:
    """A real tensor with the values that a program reads from this one; None without a policy."""
    if fake._spec.is_symbolic or fake._spec.sparse is not None:
        return None
    kept = choose_contents(mode, fake, what)
    return _make_values(mode, fake, what) if kept is None else kept


def _make_values(mode: FakeTensorMode, fake: FakeTensor, what: str) -> torch.Tensor | None:
    spec = fake._spec
    number = _ask_for_number(mode, fake, what)
    if number is NotImplemented:
        return None
    is_mean = spec.dtype in INTEGERS and number != int(number)
    with _torch.PastDispatch():
        if is_mean and spec.numel * spec.itemsize <= LARGEST_ARRAY:
            return _integers_with_mean(number, spec)
        number = _to_python_number(number, spec.dtype)
        whole = torch.full((), number, dtype=spec.dtype, device="cpu").expand(spec.numbers.shape)
        return whole.contiguous() if spec.numel * spec.itemsize <= LARGEST_ARRAY else whole


def _integers_with_mean(mean: float, spec: TensorSpec) -> torch.Tensor:
    """Return nearly equal integers with this mean, such as the numbers of tokens of experts."""
    sums = torch.arange(spec.numel + 1, dtype=torch.float64, device="cpu").mul(mean).round()
    return sums.diff().to(spec.dtype).reshape(spec.numbers.shape)


def answer_equal(mode: FakeTensorMode, a: FakeTensor, b: FakeTensor) -> Any:
    """`torch.equal` of two tensors of the same shape."""
    first, second = range_of(a), range_of(b)
    is_same = a._spec is b._spec and _torch.storage_id(a) == _torch.storage_id(b)
    if is_same and not first.may_be_nan:
        return True
    if a._spec.numel and (first.high < second.low or second.high < first.low):
        return False
    answers = answers_of(mode)
    if answers is None:
        return NotImplemented
    return answers.ask("equal", a._spec, ValueRange(0, 1, False, float(is_same)))


def answer_size(mode: FakeTensorMode, func: Any, fake: FakeTensor, least: int, most: int | None) -> Any:
    """A data-dependent size, by the policy."""
    answers = answers_of(mode)
    if answers is None or fake._spec.is_symbolic:
        return NotImplemented
    name = func.overloadpacket.__name__
    return answers.ask(name, fake._spec, range_of(fake), least=least, most=most)


# --- decisions of the program after a read: checks, and conditions of loops ---------------------------------------

_OUR_SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_METHODS = os.path.join("torch", "_tensor.py")
_FUNCTION_MODES = ("__torch_function__", "handle_torch_function")
"""Functions between a line of the program and its read, below `torch.device` and its like."""
EXIT_FUNCTIONS = ("exit", "_exit", "abort", "fail")
ROUNDS, MOST_ROUNDS, SEARCH_ROUNDS = 10, 1000, 3
"""The number of rounds: of a loop that only the answer ends; of one that other conditions may end earlier; of a search."""
SETTLING_SEARCHES = {
    (
        os.path.join("torch", "optim", "lbfgs.py"),
        "_strong_wolfe",
    ): "a line search accepts the first or the second point",
}
"""Functions that search, and set a flag when they are done. All other loops run as long as possible."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """A condition, and the value that an ordinary run gives it. `rounds`: see `Read`."""

    test: ast.expr
    usual: bool
    rounds: int | None = None


Wanted = tuple[bool | None, int | None]
"""The truth value that the program's current condition should have, and for how many rounds."""


def find_decision() -> Wanted:
    """The truth value with which the check on the user's current line passes, or its loop goes on.

    A check is an `assert`, or an `if` whose body raises. A loop goes on by the condition of a `while`, or by an `if` whose
    body ends in `break`: early stopping does not stop, and iterations do not converge at once.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, is_mode = frame.f_code.co_filename, frame.f_code.co_name in _FUNCTION_MODES
        if not is_mode and not file.startswith(_OUR_SOURCE) and not file.endswith(_METHODS):
            return _find_decision_at(frame.f_code, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return None, None


@functools.lru_cache(maxsize=4096)
def _find_decision_at(code: CodeType, instruction: int, line: int) -> Wanted:
    for decision in _decisions_in(code.co_filename):
        if not decision.test.lineno <= line <= (decision.test.end_lineno or 0):
            continue
        leaves = list(_conditions(decision.test, decision.usual))
        for where in _positions(code, instruction, line):
            for leaf, wanted in leaves:
                if _covers(leaf, where):
                    return wanted, decision.rounds
    return None, None


Span = tuple[int, int, int | None, int | None]
"""Line, last line, column, last column."""


def _positions(code: CodeType, instruction: int, line: int) -> Iterator[Span]:
    """The source positions of an instruction and of those before it: a jump has the position of the whole statement,
    and its condition was computed by the instructions before. Python has positions since 3.11; before, there is only
    the line."""
    if not hasattr(code, "co_positions"):
        yield line, line, None, None
        return
    known = list(code.co_positions())[: instruction // 2 + 1]
    for first, last, column, end in reversed(known[-MOST_STEPS_BACK:]):
        if first is not None and last is not None:
            yield first, last, column, end


MOST_STEPS_BACK = 16


@functools.lru_cache(maxsize=256)
def _decisions_in(file: str) -> tuple[_Decision, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # not Python source
        return ()
    return tuple(_walk_decisions(tree, file))


def _walk_decisions(tree: ast.AST, file: str) -> Iterator[_Decision]:
    """The decisions of all statements. Each waits with the innermost loop around it, and with whether it is in one of
    SETTLING_SEARCHES. Without recursion, because a chain of `elif` is nested."""
    waiting: list[tuple[ast.AST, ast.AST | None, bool]] = [(tree, None, False)]
    while waiting:
        node, loop, settles = waiting.pop()
        decision = _find_decision_of(node, loop, settles)
        if decision is not None:
            yield decision
        if isinstance(node, (ast.For, ast.While)):
            loop = node
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            loop, settles = (
                None,
                any(file.endswith(end) and node.name == name for end, name in SETTLING_SEARCHES),
            )
        inner = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
        waiting += [(child, loop, settles) for child in reversed(inner)]


def _find_decision_of(node: ast.AST, loop: ast.AST | None, settles: bool) -> _Decision | None:
    if isinstance(node, ast.Assert):
        return _Decision(node.test, True)
    if isinstance(node, ast.While):
        return _Decision(node.test, True, MOST_ROUNDS if isinstance(node.test, ast.BoolOp) else ROUNDS)
    if not isinstance(node, ast.If):
        return None
    ends_loop = isinstance(node.body[-1], ast.Break)
    if any(map(_exits, node.body)):
        return _Decision(node.test, False)
    if settles:
        is_done = any(map(_sets_flag, node.body))
        return _Decision(node.test, is_done, SEARCH_ROUNDS if ends_loop and not is_done else None)
    if loop is None or not ends_loop:
        return None
    is_endless = isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)
    return _Decision(node.test, False, ROUNDS if is_endless else MOST_ROUNDS)


def _sets_flag(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is True
    )


def _exits(statement: ast.stmt) -> bool:
    """Whether a statement raises, or exits the program."""
    if isinstance(statement, ast.Raise):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in EXIT_FUNCTIONS


def _conditions(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a condition that are evaluated as bool, each with the value that makes the condition `wanted`."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _conditions(value, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _conditions(test.operand, not wanted)
        yield test, not wanted  # a negation evaluates its operand
    else:
        yield test, wanted


def _covers(node: ast.expr, where: Span) -> bool:
    line, last, column, end = where
    if (
        node.end_lineno is None
        or node.end_col_offset is None
        or not (node.lineno <= line and last <= node.end_lineno)
    ):
        return False
    if column is None or end is None:
        return True
    starts = (node.lineno, node.col_offset) <= (line, column)
    return starts and (last, end) <= (node.end_lineno, node.end_col_offset)
