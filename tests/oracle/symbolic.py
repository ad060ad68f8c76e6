"""One case with symbolic sizes, held against real runs at the example's sizes and at others.

    at the example's sizes              the specs, evaluated there, are those of the real run
    at other sizes that the guards admit    the same: what was said holds for all of them
    at sizes that break a guard         the real run should fail or give something else; if not, the guard was needless

Tensors of sizes tried have a limited number of elements (`MOST_ELEMENTS`): what kernels compute grows with a power of it.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.oracle.cases import Case, duplicate, seed
from tests.oracle.compare import tensors_in
from tests.oracle.engines import is_data_dependent
from tests.oracle.run import Verdict, _said, _text
from understudy import FakeTensorMode
from understudy.errors import GuardOnDataDependentSymNode
from understudy.shapes.env import ShapeEnv
from understudy.shapes.guards import Guard
from understudy.shapes.input_dims import DYNAMIC
from understudy.shapes.sizes import from_torch

# The outcomes of a case with symbolic sizes.
OUTCOMES = {
    "ok": "right at the example's sizes and at all others that were tried",
    "static": "right, but no size is left that may vary",
    "refused": "both raise",
    "data-dependent": "sizes that lie in the data: right as far as they do not depend on it",
    "undecidable": "the program branches on data",
    "mismatch": "wrong at the example's sizes",
    "unsound": "wrong at other sizes that the guards admit",
    "error": "the real run works, the symbolic one raises",
}
FAILURES = ("mismatch", "unsound", "error")
OTHER_SIZES = 2
BROKEN_SIZES = 4
ASKERS_SHOWN = 3
MOST_ELEMENTS = 50_000
"""All inputs together have at most so many elements at sizes tried, or `MOST_GROWTH` times those of the sample where that is
more. The next proposal takes the place of one beyond it: three times each size of a convolution in three dimensions are 243
times its elements and 19,683 times its work, and say no more than one more of each."""
MOST_GROWTH = 2

TRUSTING = frozenset({"_segment_reduce.offsets"})
"""Operators whose kernels read where the values of the sample tell them to, beyond tensors of other sizes, until the
process dies: held against a real run at the example's sizes only."""
WITH_PIVOTS = frozenset({"lu_solve", "linalg.lu_solve", "linalg.ldl_solve", "lu_unpack"})
"""Operators whose kernels swap the rows that pivots name: those of the sample may name rows that smaller matrices lack."""
READING_BEYOND = frozenset({
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "lu_unpack",
})  # fmt: skip
"""Operators whose kernels read and write beyond parameters, or pivots, that are too short: what comes of it depends on what
lies there, and now and then it ends the process. The sizes that their guards keep away are not tried."""
NEVER_EMPTY = frozenset({"nn.functional.pdist"})
"""Operators of which a gradient of nothing takes the process with it."""
QUESTIONS = frozenset(
    {"aten::size", "aten::stride", "aten::numel", "aten::storage_offset", "aten::sym_size", "aten::sym_numel"}
)
"""What C++ asks of tensors: no steps of a computation."""

SLICES = frozenset({"aten::alias", "aten::slice.Tensor", "aten::slice_backward"})
"""What is heard of `x[..., :k]`: an alias, which has no gradient of its own, if plain numbers say that it is all of x. Of
symbols that is not asked, and a slice of all there is gives the same."""

Sizes = Mapping[Any, int]


class Step(NamedTuple):
    """One operator that was heard."""

    name: str
    results: list[Any]
    given: list[Any]
    "The whole numbers among its arguments; for `SLICES` the tensor they are made of."
    taken: list[int]
    made: list[int]
    "Storages of the tensors among its arguments, and of its results: which step's result it works on, and whether in place."


@dataclass
class Examined:
    """What came of one case."""

    verdict: Verdict
    guards: list[str] = field(default_factory=list)
    trials: int = 0
    "How often a size that breaks one guard was tried."
    needless: list[tuple[str, str]] = field(default_factory=list)
    "Guards that kept away sizes at which the real operator gives the recorded answer, and who asked for them."
    on_the_way: int = 0
    "How often it gave that answer, but on the way to it called other operators or had results other than the recorded."
    unmet: list[str] = field(default_factory=list)
    "What the real operator refused at sizes that the guards admit: often about values, which may be the sample's."
    tried: int = 0


class WatchedEnv(ShapeEnv):
    """An environment that knows which line of the library, or of torch, asked for each of its guards."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.guards: WatchedGuards = WatchedGuards()

    def asker_of(self, guard: Guard) -> str:
        return self.guards.askers[next(i for i, other in enumerate(self.guards) if other is guard)]


class WatchedGuards(list[Guard]):
    def __init__(self) -> None:
        super().__init__()
        self.askers: list[str] = []

    def append(self, guard: Guard) -> None:
        super().append(guard)
        self.askers.append(asker(sys._getframe(1)))


def asker(frame: Any) -> str:
    """The innermost lines outside of the arithmetic of sizes: `ops/views/basic.py:31 view < infer/engine.py:40 by_rule`."""
    lines: list[str] = []
    while frame is not None and len(lines) < ASKERS_SHOWN:
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/tests/oracle/" in file:
            break
        if "/understudy/shapes/" not in file:
            short = re.sub(r".*/(understudy|site-packages)/", "", file)
            lines.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines) or "C++ of the operator"


class SymbolicRun:
    """A case run once with symbolic sizes."""

    def __init__(
        self, case: Case, duck_shape: bool, listener: Any = None, specialize_zero_one: bool = True
    ) -> None:
        self.listener = listener
        self.env = WatchedEnv(duck_shape=duck_shape, specialize_zero_one=specialize_zero_one)
        self.mode = FakeTensorMode(shape_env=self.env)
        self.case = case
        self.inputs: list[tuple[Any, Any]] = []
        seed()
        args, kwargs = duplicate((case.args, case.kwargs))
        args, kwargs = tree_map(self._converted, (args, kwargs))
        with warnings.catch_warnings(), self.mode, listener or nullcontext():
            warnings.simplefilter("ignore")
            self.result = described(called(case, args, kwargs))

    def _converted(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Without duck sizing, sizes of 0 and 1 are symbols, too, which may be any number elsewhere.
        context = None if self.env.settings.duck_shape else [DYNAMIC] * leaf.ndim
        fake = self.mode.from_tensor(leaf, source=f"x{len(self.inputs)}", symbolic_context=context)
        self.inputs.append((leaf, fake._spec))
        return fake

    @property
    def symbols(self) -> list[Any]:
        return [symbol for symbol in self.env.hints if symbol not in self.env.definitions]

    def broken(self, sizes: Sizes) -> list[Any]:
        """The guards that do not hold at these sizes."""
        return [guard for guard in self.env.guards if not guard.holds(sizes)]

    def real_inputs(self, sizes: Sizes) -> Any:
        """Real arguments of other sizes, with values of the sample."""
        made = {id(leaf): resized(leaf, evaluated(spec, sizes)) for leaf, spec in self.inputs}
        if self.case.op in WITH_PIVOTS:
            for pivots in made.values():
                if pivots.dtype is torch.int32:
                    pivots.fill_(1)
        position = iter(self.inputs)

        def replaced(leaf: Any) -> Any:
            return made[id(next(position)[0])] if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(replaced, (self.case.args, self.case.kwargs))

    def real_result(self, sizes: Sizes, listener: Any = None) -> Any:
        args, kwargs = self.real_inputs(
            sizes
        )  # not for the listener: how inputs are made is no step of the operator
        seed()
        with warnings.catch_warnings(), listener or nullcontext():
            warnings.simplefilter("ignore")
            return described(called(self.case, args, kwargs))

    def is_recorded(self, sizes: Sizes) -> bool:
        """Whether a real run at these sizes is the recorded one, operator by operator.

        The symbolic run is made again to listen to it. What it hears at the example's sizes may be other operators than
        in a real run (torch takes other ways for tensor subclasses); then only the names of the real ones are compared.
        In the same way, numbers among the arguments are compared where they are written alike at the example's sizes: a
        size that C++ has read, and handed on as a number, is recorded as that number.
        """
        real, example = without_full_slices(self.real_steps(sizes), {}), self._example_steps
        if wired(real) != wired(example):
            return False
        recorded = without_full_slices(self._steps, self._as_heard(self.env.hints))
        hints, here = self._as_heard(self.env.hints), self._as_heard(sizes)
        if [(step.name, at(step.results, hints)) for step in recorded] != [step[:2] for step in example]:
            return True
        return all(
            at(said.results, here) == found.results
            and (at(said.given, hints) != before.given or at(said.given, here) == found.given)
            for said, found, before in zip(recorded, real, example, strict=True)
        )

    def real_steps(self, sizes: Sizes) -> list[Step]:
        """The operators that a real run at these sizes is made of, with their results."""
        listener = Listener()
        self.real_result(sizes, listener)
        return listener.heard

    @cached_property
    def _example_steps(self) -> list[Step]:
        return without_full_slices(self.real_steps(self.env.hints), {})

    @cached_property
    def _heard(self) -> SymbolicRun:
        return SymbolicRun(self.case, self.env.settings.duck_shape, Listener())

    @property
    def _steps(self) -> list[Step]:
        return self._heard.listener.heard

    def _as_heard(self, sizes: Sizes) -> Sizes:
        """The same sizes for the symbols of the run that was listened to."""
        by_name = {symbol.name: number for symbol, number in sizes.items()}
        symbols = (*self._heard.env.hints, *self._heard.env.definitions)
        return {symbol: by_name[symbol.name] for symbol in symbols if symbol.name in by_name}


def without_full_slices(steps: list[Step], sizes: Sizes) -> list[Step]:
    """Without those that take all there is, at these sizes: what works on their results works on what they were given."""

    def shape(description: list[Any]) -> Any:
        ((_, rank, *numbers),) = at(description, sizes)
        return numbers[:rank]

    found: list[Step] = []
    stands_for: dict[int, int] = {}
    for step in steps:
        taken, made = (
            [stands_for.get(storage, storage) for storage in each] for each in (step.taken, step.made)
        )
        if step.name in SLICES and shape(step.results) == shape(step.given):
            stands_for[made[0]] = taken[0]
        else:
            found.append(step._replace(taken=taken, made=made))
    return found


def wired(steps: list[Step]) -> list[Any]:
    """What the operators are and which results they work on: the same names in another order of brackets are another run."""
    numbers: dict[int, int] = {}
    return [
        (
            step.name,
            *[
                [numbers.setdefault(each, len(numbers)) for each in storages]
                for storages in (step.taken, step.made)
            ],
        )
        for step in steps
    ]


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Step] = []
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.name() not in QUESTIONS:
            given = args[0] if func.name() in SLICES else tree_map(_number_in, (args, kwargs))
            taken, made = (
                [self._storage(tensor) for tensor in tensors_in(each)] for each in ((args, kwargs), result)
            )
            self.heard.append(Step(func.name(), described(result), described(given), taken, made))
        return result

    def _storage(self, tensor: torch.Tensor) -> int:
        """A number for its storage, which no other one gets while this listens."""
        storage = tensor.untyped_storage() if tensor.layout == torch.strided else tensor
        self._alive.append(storage)
        return storage._cdata if isinstance(storage, torch.UntypedStorage) else id(storage)


def _number_in(argument: Any) -> Any:
    return argument if isinstance(argument, (int, torch.SymInt)) else None


NAMES = {id(function): name for name, function in vars(torch.nn.functional).items() if callable(function)}
"""Programs call these by name, and get what has that name while a mode is active."""


def called(case: Case, args: Any, kwargs: Any) -> Any:
    """The result of the call; for the backward variant the gradients."""
    name = NAMES.get(id(case.call))
    call = case.call if name is None else getattr(torch.nn.functional, name)
    result = call(*args, **kwargs)
    if case.variant != "backward":
        return result
    leaves = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    outputs = [tensor for tensor in tensors_in(case.differentiable_part(result)) if tensor.requires_grad]
    if not leaves or not outputs:
        return ()
    return torch.autograd.grad(
        outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True
    )


def described(result: Any) -> list[Any]:
    """(dtype, shape, stride, offset) for tensors, the value itself for numbers, nothing for the rest."""
    from torch.utils._pytree import tree_leaves

    found: list[Any] = []
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            numbers = (*leaf.shape, *leaf.stride(), leaf.storage_offset())
            found.append((leaf.dtype, leaf.ndim, *[from_torch(number) for number in numbers]))
        elif isinstance(leaf, torch.Tensor):
            found.append((leaf.dtype, leaf.layout))
        elif isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool):
            found.append((from_torch(leaf),))
    return found


class Unknown:
    """Equal to everything: a size that only data knows."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "?"


UNKNOWN = Unknown()


def at(description: list[Any], sizes: Sizes) -> list[Any]:
    """A description in numbers."""
    return [tuple(number_at(part, sizes) for part in entry) for entry in description]


def number_at(part: Any, sizes: Sizes) -> Any:
    value = getattr(part, "value", part)
    if not hasattr(value, "evaluate"):
        return value
    return value.evaluate(sizes) if all(symbol in sizes for symbol in value.symbols) else UNKNOWN


def evaluated(spec: Any, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape, stride = (tuple(number_at(n, sizes) for n in numbers) for numbers in (spec.shape, spec.stride))
    return shape, stride, number_at(spec.offset, sizes)


def resized(model: torch.Tensor, geometry: Any) -> torch.Tensor:
    """A tensor of another size, with the values of the model over and over."""
    shape, stride, offset = geometry
    storage = torch.zeros(_needed_elements(model, shape, stride, offset), dtype=model.dtype)
    tensor = storage.as_strided(shape, stride, offset).data  # an input is no view of anything
    values = model.detach().resolve_conj().resolve_neg().reshape(-1)
    is_expanded = any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True))
    if is_expanded and storage.numel() and values.numel():
        storage.copy_(values[torch.arange(storage.numel()) % values.numel()])
    elif tensor.numel() and values.numel():
        count = tensor.numel()
        tensor.copy_(values[torch.arange(count) % values.numel()].reshape(shape))
    if model.is_conj():
        tensor = torch._conj(tensor.conj_physical())
    if model.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor.requires_grad_(model.requires_grad)


def _needed_elements(model: torch.Tensor, shape: Any, stride: Any, offset: int) -> int:
    """How many elements the storage of a tensor has: no more than are needed, but all of the model's if the tensor is as the
    model is, and room for those of a tensor that overlaps itself if the model has it."""
    held = model.untyped_storage().nbytes() // model.element_size()
    if (shape, stride, offset) == (tuple(model.shape), model.stride(), model.storage_offset()):
        return held
    extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    needed = max(extent, 0) if all(shape) else offset
    has_room = held >= model.storage_offset() + model.numel()
    return max(needed, offset + math.prod(shape)) if has_room else needed


def other_sizes(run: SymbolicRun) -> Iterator[dict[Any, int]]:
    """Sizes near the example's: all symbols changed alike, then in turn."""
    changes = (lambda n: n + 1, lambda n: 2 * n, lambda n: n - 1, lambda n: n + 2, lambda n: 3 * n)
    hints = run.env.hints
    symbols = run.symbols
    for change in changes:
        yield _changed(run, {symbol: change(hints[symbol]) for symbol in symbols})
    for change in changes:
        for symbol in symbols:
            yield _changed(run, {symbol: change(hints[symbol])})


def _changed(run: SymbolicRun, values: dict[Any, int]) -> dict[Any, int]:
    sizes = {symbol: values.get(symbol, run.env.hints[symbol]) for symbol in run.symbols}
    for symbol, expression in run.env.definitions.items():
        if all(part in sizes for part in expression.symbols):
            sizes[symbol] = int(expression.evaluate(sizes))
    return sizes


def is_admissible(run: SymbolicRun, sizes: Sizes) -> bool:
    """Within the declared ranges: guards are another question."""
    if run.case.op in NEVER_EMPTY and not all(sizes.values()):
        return False
    return all(
        (symbol.low is None or sizes[symbol] >= symbol.low)
        and (symbol.high is None or sizes[symbol] <= symbol.high)
        for symbol in run.symbols
    )


def is_affordable(run: SymbolicRun, sizes: Sizes) -> bool:
    """Whether the inputs have few enough elements at these sizes."""
    return elements(run, sizes) <= max(
        MOST_ELEMENTS, MOST_GROWTH * sum(leaf.numel() for leaf, _ in run.inputs)
    )


def elements(run: SymbolicRun, sizes: Sizes) -> int:
    return sum(math.prod(number_at(size, sizes) for size in spec.shape) for _, spec in run.inputs)


def examine(case: Case, duck_shape: bool) -> Examined:
    real: Any = None
    raised: BaseException | None = None
    try:
        seed()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            real = described(called(case, *duplicate((case.args, case.kwargs))))
    except Exception as error:
        raised = error
    try:
        run = SymbolicRun(case, duck_shape)
    except Exception as error:
        return Examined(_judged_error(error, raised))
    if raised is not None:
        return Examined(Verdict("refused"))
    examined = Examined(Verdict("ok"), [str(guard) for guard in run.env.guards])
    answer = at(run.result, run.env.hints)
    if answer != real:
        examined.verdict = Verdict(
            "mismatch", "at the example's sizes", f"real {real}, symbolic {answer} from {run.result}"[:900]
        )
        return examined
    if case.op not in TRUSTING:
        _try_others(run, examined)
    if run.env.unbacked and examined.verdict.outcome == "ok":
        examined.verdict = Verdict("data-dependent")
    elif not examined.tried and examined.verdict.outcome == "ok":
        examined.verdict = Verdict(
            "static", "; ".join(str(guard.condition) for guard in run.env.guards)[:300]
        )
    return examined


def _judged_error(error: BaseException, raised: BaseException | None) -> Verdict:
    if raised is not None:
        return Verdict("refused")
    if isinstance(error, GuardOnDataDependentSymNode) or is_data_dependent(error):
        return Verdict("undecidable", _said(error), _text(error))
    return Verdict("error", _said(error), _text(error))


def _try_others(run: SymbolicRun, examined: Examined) -> None:
    seen: set[tuple[int, ...]] = {tuple(run.env.hints[symbol] for symbol in run.symbols)}
    broken_left = BROKEN_SIZES
    for sizes in islice(other_sizes(run), 64):
        key = tuple(sizes[symbol] for symbol in run.symbols)
        if key in seen or not (is_admissible(run, sizes) and is_affordable(run, sizes)):
            continue
        seen.add(key)
        broken = run.broken(sizes)
        if not broken and examined.tried < OTHER_SIZES:
            _try_admitted(run, sizes, examined)
        elif len(broken) == 1 and broken_left:
            broken_left -= 1
            _try_broken(run, sizes, broken[0], examined)


def _try_admitted(run: SymbolicRun, sizes: Sizes, examined: Examined) -> None:
    try:
        real = run.real_result(sizes)
    except Exception as error:
        examined.unmet.append(f"{_shown(run, sizes)}: {_text(error)[:200]}")
        return
    examined.tried += 1
    said = at(run.result, sizes)
    if said != real and examined.verdict.outcome == "ok":
        detail = (
            f"at {_shown(run, sizes)}: real {real}, said {said} from {run.result}; guards {examined.guards}"
        )
        examined.verdict = Verdict("unsound", "at other sizes", detail[:1500])


def _try_broken(run: SymbolicRun, sizes: Sizes, guard: Any, examined: Examined) -> None:
    if run.case.op in READING_BEYOND:
        return
    examined.trials += 1
    try:
        needless = run.real_result(sizes) == at(run.result, sizes)
    except Exception:  # as it should: the guard keeps such sizes away
        return
    if needless and run.is_recorded(sizes):
        examined.needless.append((guard.text, run.env.asker_of(guard)))
    elif needless:
        examined.on_the_way += 1


def _shown(run: SymbolicRun, sizes: Sizes) -> str:
    inputs = ", ".join(str(list(evaluated(spec, sizes)[0])) for _, spec in run.inputs)
    return f"inputs {inputs}"
