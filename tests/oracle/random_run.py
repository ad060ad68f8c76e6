"""Random programs, held against real runs: with plain sizes, with symbolic ones, and captured.

static     each step on stand-ins does what it does on real tensors: results, what they share memory with, inputs
           afterwards, versions, `requires_grad`; or both refuse, by exceptions that the same `except` clause catches
symbolic   the whole program with symbolic sizes: right at these sizes, and at others that the guards admit
captured   the graph of the program computes the same numbers, at other sizes as well
"""

from __future__ import annotations

import builtins
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle import fx_run, symbolic
from tests.oracle.cases import Case, duplicate, seed
from tests.oracle.compare import differences, observe, tensors_in
from tests.oracle.engines import new_mode
from tests.oracle.everyday_calls import READS_VALUES
from tests.oracle.gaps import DATA_DEPENDENT
from tests.oracle.random_calls import CONTEXTS, UNSAFE, VALUES_FROM_NOWHERE, Program, Step, Vocabulary
from tests.oracle.run import _said, _text
from tests.oracle.streams import describe

OTHER_SIZES = 2
KINDS = ("static", "symbolic", "captured")

OUTCOMES = {
    "ok": "nobody can tell the runs apart",
    "refused": "both raise, and the same `except` clause catches it",
    "refused otherwise": "both raise, exceptions of different built-in classes",
    "by values": "the real run raises because of values, which stand-ins do not have",
    "by memory": "the real run has not enough memory",
    "data-dependent": "the answer lies in the data, and the engine says so",
    "other path": "C++ computes otherwise below a mode: real tensors below one that does nothing give what stand-ins give",
    "mismatch": "both work, and what they did differs",
    "error": "the real run works, the other one raises",
    "refusal missed": "the real run raises, the other one works",
    "unsound": "wrong at other sizes that the guards admit",
    "wrong": "the graph computes something else",
    "crash": "the process died in the run on stand-ins",
}
SILENT = ("mismatch", "unsound", "wrong", "crash")
HANDLERS = (
    RuntimeError,
    NotImplementedError,
    IndexError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
)
ABOUT_VALUES = (
    "is zero and using it on lu_solve", "INTERNAL ASSERT FAILED", "ZeroDivisionError", "allocated size does not match",
    "could not create a primitive",
)  # fmt: skip
"""A matrix that is singular; a divisor that is 0; counts that do not add up; what eager itself calls a bug of its own; and
what oneDNN can't do on this processor."""
NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Finding:
    """What came of one step."""

    outcome: str
    op: str
    variant: str
    edits: tuple[str, ...] = ()
    cause: str = ""
    detail: str = ""

    @property
    def group(self) -> tuple[str, str, str]:
        return (self.outcome, self.op, self.cause)


@dataclass
class Tally:
    """What came of many steps: counts, and examples of what is not as it should be."""

    counts: Counter[str] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)
    "Of operators with their variants, dtypes and edits that ran in both."
    groups: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def add(self, finding: Finding, steps: int, where: str) -> None:
        self.counts[finding.outcome] += steps
        if finding.cause:
            self.groups[finding.group] += 1
            self.examples.setdefault(
                finding.group,
                f"{where} {finding.variant} [{', '.join(finding.edits)}]\n      {finding.detail}",
            )

    def merge(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.coverage.update(other.coverage)
        self.groups.update(other.groups)
        for group, example in other.examples.items():
            self.examples.setdefault(group, example)

    @property
    def steps(self) -> int:
        return sum(self.counts.values())

    def rates(self) -> dict[str, float]:
        """How often stand-ins run where real tensors do and refuse where they do; and by the same built-in class."""
        counts = self.counts
        refused = counts["refused"] + counts["refused otherwise"]
        unequal = counts["error"] + counts["refusal missed"]
        decided = max(1, self.steps - counts["by values"] - counts["by memory"] - counts["data-dependent"])
        return {
            "refuse where eager refuses, and only there": 1 - unequal / decided,
            "of these refusals by the same built-in class": 1 - counts["refused otherwise"] / max(1, refused),
        }


def run_programs(
    kind: str, vocabulary: Vocabulary, numbers: Sequence[int], announce: Callable[[int, bool], None]
) -> Tally:
    tally = Tally()
    runner = {"static": run_static, "symbolic": run_symbolic, "captured": run_captured}[kind]
    for number in numbers:
        announce(number, False)
        program = vocabulary.new_program(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for finding, steps in runner(
                program, lambda on_stand_ins=True, number=number: announce(number, on_stand_ins)
            ):
                tally.add(finding, steps, f"{vocabulary.seed}/{vocabulary.block}/{number}")
                _cover(tally, finding)
    return tally


def _cover(tally: Tally, finding: Finding) -> None:
    if finding.outcome in ("ok", "refused"):
        said = "ran" if finding.outcome == "ok" else "refused"
        tally.coverage[f"{said} {finding.op} {finding.variant}"] += 1
        for edit in finding.edits:
            words = edit.split()
            tally.coverage[f"edit {' '.join(words[:1] if words[0] in ('number', 'size') else words)}"] += 1


def real_steps(program: Program) -> Iterator[tuple[Step, Any, BaseException | None]]:
    """The steps of the program, each run on real tensors: what it gave, or raised, which ends the program."""
    while len(program.steps) < program.length:
        step = program.next_step()
        if step is None:
            return
        seed()
        try:
            result = step.run(program.real)
        except Exception as error:
            yield step, None, error
            return
        yield step, result, None
        program.steps.append(step)
        program.append_results(result, program.real)
        if sum(t.numel() for t in tensors_in(program.real)) > 200_000:
            return


# --- static -----------------------------------------------------------------------------------------------------


def run_static(program: Program, announce: Callable[..., None]) -> Iterator[tuple[Finding, int]]:
    mode = new_mode("understudy")
    fakes: list[Any] = []
    for step, result, raised in real_steps(program):
        announce()
        while len(fakes) in program.inputs:
            fakes.append(mode.from_tensor(program.inputs[len(fakes)]))
        finding = _judge(step, program, fakes, mode, (result, raised))
        yield finding, 1
        if finding.outcome != "ok":
            return


def _judge(
    step: Step, program: Program, fakes: list[Any], mode: Any, real: tuple[Any, BaseException | None]
) -> Finding:
    result, raised = real
    try:
        seed()
        with mode:
            fake_result = step.run(fakes)
    except Exception as error:
        return _judge_error(step, error, raised, program.real)
    if raised is not None:
        return _judge_missed(step, program, raised)
    # With symbolic sizes in inference mode, views and writes of composite operators are not tracked: a known gap.
    counts_writes = step.context != "inference_mode" or mode.shape_env is None
    found = _differences(result, fake_result, program.real, fakes, counts_writes)
    if found and _is_other_path(step, program, fake_result, fakes):
        return Finding("other path", step.op, step.variant, step.edits)
    if found:
        kinds = sorted(
            {
                text.partition(":")[0].partition("[")[0] + text.partition(":")[0].rpartition("]")[2]
                for text in found
            }
        )
        detail = f"{shown(step, program.real)}\n      {'; '.join(found[:5])}"
        return Finding("mismatch", step.op, step.variant, step.edits, ", ".join(kinds), detail)
    Program.append_results(fake_result, fakes)
    return Finding("ok", step.op, step.variant, step.edits)


class Idle(TorchDispatchMode):
    """A mode that does nothing, which C++ notices all the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _is_other_path(step: Step, program: Program, fake_result: Any, fakes: list[Any]) -> bool:
    """Whether a real run of the step below a mode that does nothing gives what stand-ins give: with the values of the
    program, or with ones, if that path does not take its values. The steps before did what they do without a mode."""
    for fill in (None, _ones):
        found = _run_below_mode(step, program, fill)
        if found is not None:
            result, values = found
            return len(values) == len(fakes) and not _differences(result, fake_result, values, fakes)
    return False


def _run_below_mode(
    step: Step, program: Program, fill: Callable[[torch.Tensor], None] | None
) -> tuple[Any, list[Any]] | None:
    inputs = dict(zip(program.inputs, duplicate(list(program.inputs.values())), strict=True))
    values: list[Any] = []
    if fill is not None:
        for tensor in inputs.values():
            _refill(tensor.detach(), fill)
    try:
        for each in (*program.steps, step):
            while len(values) in inputs:
                tensor = inputs[len(values)]
                values.append(tensor.data.requires_grad_(tensor.requires_grad))
            seed()
            with Idle() if each is step else nullcontext():
                result = (_as_decomposed(each) if each is step else each).run(values)
            if each is not step:
                Program.append_results(result, values)
    except Exception:
        return None
    return result, values


def _as_decomposed(step: Step) -> Step:
    """In inference mode, composite operators arrive at an idle mode whole; without gradients, it sees those inside."""
    return replace(step, context="no_grad") if step.context == "inference_mode" else step


def shown(step: Step, values: Sequence[Any]) -> str:
    """The arguments of a step, for people."""
    args, kwargs = step.filled(values)
    return describe((*args, kwargs) if kwargs else args)[:400]


def _differences(
    real: Any, fake: Any, real_values: list[Any], fake_values: list[Any], counts_writes: bool = True
) -> list[str]:
    zeros = [0 if counts_writes else sys.maxsize] * len(real_values)
    found = [
        str(each)
        for each in differences(observe(real, real_values, zeros), observe(fake, fake_values, zeros))
    ]
    if found:
        return found
    pairs = [
        *((f"in[{i}]", a, b) for i, (a, b) in enumerate(zip(real_values, fake_values, strict=True))),
        *(
            (f"out[{i}]", a, b)
            for i, (a, b) in enumerate(zip(tensors_in(real), tensors_in(fake), strict=True))
        ),
    ]
    for where, a, b in pairs if counts_writes else ():
        if a.requires_grad != b.requires_grad:
            found.append(f"{where}.requires_grad: real {a.requires_grad}, fake {b.requires_grad}")
        if not (a.is_inference() or b.is_inference()) and a._version != b._version:
            found.append(f"{where}.version: real {a._version}, fake {b._version}")
    return found


def built_in_class(error: BaseException) -> type[BaseException]:
    return next(cls for cls in type(error).__mro__ if vars(builtins).get(cls.__name__) is cls)


def _judge_error(
    step: Step,
    error: BaseException,
    raised: BaseException | None,
    values: Sequence[Any],
    before: Sequence[Step] = (),
) -> Finding:
    """`values`: those of the real run; `before`: steps of the same run, any of which may have raised the error."""
    if fx_run.decides_by_data(error) and any(
        each.op in DATA_DEPENDENT or each.op in READS_VALUES for each in (*before, step)
    ):
        return Finding("data-dependent", step.op, step.variant, step.edits)
    if raised is not None:
        wanted = built_in_class(raised)
        if isinstance(error, wanted):
            return Finding("refused", step.op, step.variant, step.edits)
        if depends_on_values(step, values):
            return Finding("by values", step.op, step.variant, step.edits)
        cause = f"{wanted.__name__}, not {type(error).__name__}: {_said(raised)[:90]}"
        return Finding(
            "refused otherwise",
            step.op,
            step.variant,
            step.edits,
            cause,
            f"{_text(raised)[:200]} / {_text(error)[:200]}",
        )
    return Finding("error", step.op, step.variant, step.edits, _said(error), _text(error))


def _judge_missed(step: Step, program: Program, raised: BaseException) -> Finding:
    if any(words in str(raised) for words in NO_MEMORY):
        return Finding("by memory", step.op, step.variant, step.edits)
    is_about_values = isinstance(raised, torch.linalg.LinAlgError) or any(
        words in str(raised) for words in ABOUT_VALUES
    )
    if is_about_values or depends_on_values(step, program.real):
        return Finding("by values", step.op, step.variant, step.edits)
    detail = f"{shown(step, program.real)}\n      {_text(raised)[:300]}"
    return Finding("refusal missed", step.op, step.variant, step.edits, _said(raised), detail)


def depends_on_values(step: Step, values: Sequence[Any]) -> bool:
    """Whether tensors of the same metadata with other values are taken."""
    for fill in (*FILLS, *MASKS):
        others = duplicate(list(values))
        with torch.no_grad():
            for other in tensors_in([others[number] for number in step.slots()]):
                _refill(other, fill)
        try:
            seed()
            step.run(others)
        except Exception:
            continue
        return True
    return False


def _refill(tensor: torch.Tensor, fill: Callable[[torch.Tensor], None]) -> None:
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype).set_(
        storage, 0, (storage.nbytes() // tensor.element_size(),), (1,)
    )
    try:
        fill(flat if fill is not _identity else tensor.detach())
    except RuntimeError:  # a dtype that can't be filled so
        flat.zero_()


def _zeros(flat: torch.Tensor) -> None:
    flat.zero_()


def _ones(flat: torch.Tensor) -> None:
    flat.fill_(1)


def _identity(tensor: torch.Tensor) -> None:
    tensor.zero_()
    if tensor.ndim >= 2:
        tensor.diagonal(dim1=-2, dim2=-1).fill_(1)


def _distinct(flat: torch.Tensor) -> None:
    flat.copy_(torch.linspace(0.1, 0.9, flat.numel()))


def _few_true(count: int) -> Callable[[torch.Tensor], None]:
    """A mask of which so many elements are true."""

    def fill(flat: torch.Tensor) -> None:
        flat.zero_()
        if flat.dtype in (torch.bool, torch.uint8):
            flat[:count] = 1

    return fill


FILLS = (_zeros, _ones, _identity, _distinct)
MASKS = tuple(map(_few_true, range(1, 8)))
"For writes by masks: there are to be as many true elements as values."


# --- symbolic and captured: the whole program as one call -------------------------------------------------------


class WholeProgram:
    """A program as a function of its inputs."""

    def __init__(self, steps: list[Step], inputs: dict[int, torch.Tensor], length: int) -> None:
        self._steps = steps
        self._inputs = {number: at for at, number in enumerate(inputs)}
        self._length = length

    def __call__(self, *inputs: torch.Tensor) -> Any:
        values: list[Any] = []
        results = []
        for step in self._steps:
            self._take_inputs(values, inputs)
            result = step.run(values)
            results.append(result)
            Program.append_results(result, values)
        return results, list(inputs)

    def _take_inputs(self, values: list[Any], inputs: Sequence[torch.Tensor]) -> None:
        while len(values) in self._inputs:
            values.append(inputs[self._inputs[len(values)]])


def whole_case(program: Program, step: Step | None = None) -> Case:
    """The steps that a real run takes, and perhaps one that it refuses."""
    steps = [*program.steps, step] if step is not None else list(program.steps)
    name = " + ".join(each.op for each in steps)
    inputs = dict(program.inputs)
    if step is None:
        used = max((number for each in steps for number in each.slots()), default=-1)
        inputs = {number: tensor for number, tensor in inputs.items() if number <= used}
    call = WholeProgram(steps, inputs, len(program.real))
    return Case(name, "", "program", 0, call, tuple(inputs.values()), {})


def run_symbolic(program: Program, announce: Callable[..., None]) -> Iterator[tuple[Finding, int]]:
    refused: tuple[Step, BaseException] | None = None
    for step, _, raised in real_steps(program):
        if raised is not None:
            refused = (step, raised)
    if not any(tensor.numel() and tensor.ndim for tensor in program.inputs.values()):
        return
    announce()
    settings = {"duck_shape": program.rng.random() < 0.3, "specialize_zero_one": program.rng.random() < 0.6}
    if refused is not None:
        yield _refused_with_symbols(program, *refused, settings), 1
    elif program.steps:
        yield _symbolic_finding(program, settings, announce), len(program.steps)


def _refused_with_symbols(
    program: Program, step: Step, raised: BaseException, settings: dict[str, bool]
) -> Finding:
    try:
        run = symbolic.SymbolicRun(whole_case(program, step), **settings)
    except Exception as error:
        return _judge_error(step, error, raised, program.real, program.steps)
    if run.env.unbacked:  # a size that data knows is expected to fit
        return Finding("data-dependent", step.op, step.variant, step.edits)
    return _judge_missed(step, program, raised)


def _symbolic_finding(program: Program, settings: dict[str, bool], announce: Callable[..., None]) -> Finding:
    case = whole_case(program)
    last = program.steps[-1]
    edits = tuple(edit for step in program.steps for edit in step.edits)
    seed()
    real = symbolic.described(case.call(*duplicate(case.args)))
    try:
        run = symbolic.SymbolicRun(case, **settings)
    except Exception as error:
        if fx_run.decides_by_data(error):
            return Finding("data-dependent", last.op, last.variant, edits)
        return Finding("error", case.op, last.variant, edits, _said(error), _text(error))
    said = symbolic.at(run.result, run.env.hints)
    if said != _as_known(real, said):
        if said == _described_below_mode(case):
            return Finding("other path", last.op, last.variant, edits)
        if _breaks_a_promise(run, real):
            return Finding("data-dependent", last.op, last.variant, edits)
        return Finding(
            "mismatch",
            case.op,
            last.variant,
            edits,
            "at the example's sizes",
            f"real {real}, symbolic {said}"[:700],
        )
    announce(False)  # from here on, real kernels run
    wrong = _wrong_elsewhere(run, program.rng) if _has_own_memory(case) else ""
    if wrong:
        return Finding(
            "unsound",
            case.op,
            last.variant,
            edits,
            wrong.partition(":")[0],
            f"{wrong}; guards {list(run.env.guards)}"[:900],
        )
    return Finding("ok", last.op, last.variant, edits)


def has_promises(run: symbolic.SymbolicRun) -> bool:
    """Whether something was assumed of sizes that data knows: a graph checks it when it runs, and refuses as eager does."""
    unbacked = run.env.unbacked.keys()
    promises = [promise for promise in run.env.runtime_asserts if not promise.is_checked_by_operator]
    return any(not unbacked.isdisjoint(promise.condition.symbols) for promise in promises)


def _breaks_a_promise(run: symbolic.SymbolicRun, real: list[Any]) -> bool:
    """Whether the data are others than was assumed of them, which a graph checks when it runs: sizes that are symbols
    without a hint are read from the real run."""
    sizes = dict(run.env.hints)
    for said, found in zip(run.result, real, strict=True):
        for part, number in zip(said, found, strict=False):
            value = getattr(part, "value", part)
            if value in run.env.unbacked:
                sizes[value] = number
    known = [promise for promise in run.env.runtime_asserts if promise.condition.symbols <= sizes.keys()]
    return not all(promise.holds(sizes) for promise in known)


def _described_below_mode(case: Case) -> Any:
    seed()
    with Idle():
        return symbolic.described(case.call(*duplicate(case.args)))


def _is_captured_other_path(case: Case, cause: str) -> bool:
    if cause in ("out.stride", "out.dtype", "in.written"):
        return _has_other_path_below_mode(case)
    return cause == "out.values" and any(differ(case) for differ in OTHER_VALUES)


def _values_in(case: Case, context: Any) -> list[Any]:
    args = duplicate(case.args)
    seed()
    with context:
        return tensors_in(case.call(*args))


def _has_other_values_below_mode(case: Case) -> bool:
    """Whether real tensors below a mode that does nothing give NaN where eager gives numbers, or the other way round:
    C++ has one formula that divides, and another for tensors that it can't look into."""
    return not _have_same_nans(_values_in(case, nullcontext()), _values_in(case, Idle()))


def _has_uninitialised_values(case: Case) -> bool:
    """Whether eager returns memory that it has not written to: filled with NaN, it gives other results."""
    return not _have_same_nans(_values_in(case, nullcontext()), _values_in(case, filled_memory()))


def _has_cached_casts(case: Case) -> bool:
    """Whether the numbers depend on autocast keeping the casts of leaves: gradients are then added up in bfloat16.
    `make_fx` switches that off, as torch's own does."""
    with patch.dict(
        CONTEXTS, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    ):
        without = _values_in(case, nullcontext())
    return not all(map(_are_equal, _values_in(case, nullcontext()), without))


OTHER_VALUES = (_has_other_values_below_mode, _has_uninitialised_values, _has_cached_casts)


def _have_same_nans(ours: list[Any], others: list[Any]) -> bool:
    return all(bool(a.isnan().equal(b.isnan())) for a, b in zip(ours, others, strict=True))


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def filled_memory() -> Iterator[None]:
    """New memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _has_other_path_below_mode(case: Case) -> bool:
    """Whether strides, dtypes, or which inputs count as written to, are others for real tensors below a mode that does nothing."""

    def account(mode: Any) -> Any:
        args = duplicate(case.args)
        seed()
        with mode:
            return symbolic.described(case.call(*args)), [tensor._version for tensor in args]

    return bool(account(nullcontext()) != account(Idle()))


def _has_own_memory(case: Case) -> bool:
    """Whether no two inputs share memory: then they can be made in other sizes."""
    storages = {tensor.untyped_storage()._cdata for tensor in case.args}
    return len(storages) == len(case.args) and not any(op in UNSAFE for op in case.op.split(" + "))


def _wrong_elsewhere(run: symbolic.SymbolicRun, rng: random.Random) -> str:
    """What is wrong at sizes that the guards admit, at up to two of them."""
    tried = 0
    for _ in range(24):
        values = {symbol: rng.choice((run.env.hints[symbol], 0, 1, 2, 3, 5, 7)) for symbol in run.symbols}
        sizes = symbolic._changed(run, values)
        if (
            sizes == run.env.hints
        ):  # the storage of an input may be larger than the input, and at these sizes it was so
            continue
        if not (symbolic.is_admissible(run, sizes) and symbolic.is_affordable(run, sizes)) or run.broken(
            sizes
        ):
            continue
        said, inputs = symbolic.at(run.result, sizes), symbolic._shown(run, sizes)
        try:
            real = run.real_result(sizes)
        except Exception as error:
            if not has_promises(run) and not _takes_other_values(run, sizes, error):
                return f"refused elsewhere: at {inputs}: {_text(error)[:200]}"
            continue
        if said != _as_known(real, said):
            return f"another answer elsewhere: at {inputs}: real {real}, said {said}"
        tried += 1
        if tried == OTHER_SIZES:
            break
    return ""


def _as_known(real: list[Any], said: list[Any]) -> list[Any]:
    """Without the strides of tensors that have no elements because data say so: eager lays them out in another way."""
    return [_as_told(*pair) for pair in zip(real, said, strict=True)] if len(real) == len(said) else real


def _as_told(real: tuple[Any, ...], said: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(real) < 2 or real[1] != said[1] or not isinstance(real[1], int):
        return real
    end = 2 + real[1]
    is_emptied = any(
        size == 0 for size, told in zip(real[2:end], said[2:end], strict=True) if told is symbolic.UNKNOWN
    )
    return (*real[:end], *said[end : end + real[1]], *real[end + real[1] :]) if is_emptied else real


def _takes_other_values(run: symbolic.SymbolicRun, sizes: Any, error: Exception) -> bool:
    if isinstance(error, torch.linalg.LinAlgError) or any(
        words in str(error) for words in (*NO_MEMORY, *ABOUT_VALUES)
    ):
        return True
    for fill in (*FILLS, *MASKS):
        args, _ = run.real_inputs(sizes)
        with torch.no_grad():
            for tensor in args:
                _refill(tensor, fill)
        try:
            seed()
            run.case.call(*args)
        except Exception:
            continue
        return True
    return False


CAST_BY_THEIR_KERNELS = ("torch._scaled_mm", "torch._scaled_mm_v2")
"""Their CPU kernels call operators that obey autocast, which a graph below it does not have: a known gap, also of torch's."""


def run_captured(program: Program, announce: Callable[..., None]) -> Iterator[tuple[Finding, int]]:
    for _ in real_steps(program):
        pass
    if not program.steps:
        return
    announce()
    case = whole_case(program)
    if program.context in ("no_grad", "inference_mode"):  # which is not in the graph: it may write to leaves
        case.args = tuple(tensor.detach() for tensor in case.args)
    last = program.steps[-1]
    edits = tuple(edit for step in program.steps for edit in step.edits)
    mode = program.rng.choice(("fake", "fake", "symbolic"))
    if any(
        step.op in VALUES_FROM_NOWHERE or _writes_to_overlapping_memory(step, program)
        for step in program.steps
    ):
        return
    if program.context.startswith("autocast") and any(
        step.op in CAST_BY_THEIR_KERNELS for step in program.steps
    ):
        return
    verdict = fx_run.examine(case, "understudy", (mode,))[mode]
    outcome = {"rounded": "ok", "refused": "ok"}.get(verdict.outcome, verdict.outcome)
    if outcome == "wrong" and _is_captured_other_path(case, verdict.cause):
        outcome = "other path"
    if outcome in ("ok", "data-dependent", "other path"):
        yield Finding(outcome, last.op, last.variant, edits), len(program.steps)
    else:
        yield (
            Finding(outcome, case.op, f"{last.variant} {mode}", edits, verdict.cause, verdict.detail[:600]),
            len(program.steps),
        )


def _writes_to_overlapping_memory(step: Step, program: Program) -> bool:
    """Whether elements of an `out=` share a place: which of them is written last, is up to the kernel."""
    _, kwargs = step.filled([program.inputs.get(number, value) for number, value in enumerate(program.real)])
    return any(map(_overlaps_itself, tensors_in(kwargs.get("out"))))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return (
        torch.arange(length)
        .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        .unique()
        .numel()
        < tensor.numel()
    )
