"""One case, for real and with stand-ins, and the verdict."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.oracle.cases import Case, duplicate
from tests.oracle.compare import Account, differences, observe, tensors_in, versions_of
from tests.oracle.engines import is_data_dependent
from tests.oracle.gaps import DATA_DEPENDENT, REFUSED_BY_VALUES
from tests.oracle.streams import Recorder, describe, divergence

# The outcomes of a case, and whether the engine is to blame.
OUTCOMES = {
    "ok": "nobody can tell the runs apart",
    "refused": "both raise",
    "data-dependent": "the answer lies in the data, and the engine says so",
    "refused-by-values": "the real run raises because of values, which stand-ins do not have",
    "mismatch": "both work, the metadata differs",
    "error": "the real run works, the fake one raises",
    "refusal-missed": "the real run raises, the fake one works",
    "crash": "the process died, or did not come back",
}
FAILURES = ("mismatch", "error", "crash")


@dataclass(frozen=True)
class Verdict:
    outcome: str
    cause: str = ""
    "Short, and equal for failures that look alike."
    detail: str = ""


class Run:
    """What came of one run: an account, or what it raised."""

    def __init__(self) -> None:
        self.account: Account | None = None
        self.raised: BaseException | None = None


def run(case: Case, prepare: Callable[[Case], Any], *modes: Any) -> Run:
    """Run a case inside the modes, with inputs that were prepared outside of them."""
    done = Run()
    try:
        args, kwargs = prepare(case)
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")
            for mode in modes:
                stack.enter_context(mode)
            done.account = _account(case, args, kwargs)
    except Exception as error:
        done.raised = error
    return done


def _account(case: Case, args: Any, kwargs: Any) -> Account:
    inputs = tensors_in((args, kwargs))
    before = versions_of(inputs)
    result = case.call(*args, **kwargs)
    if case.variant != "backward":
        return observe(result, inputs, before)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    outputs = [t for t in tensors_in(case.differentiable_part(result)) if t.requires_grad]
    if not leaves or not outputs:
        return observe((), inputs, before)
    ones = [torch.ones_like(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
    return observe(gradients, [*inputs, *ones], [*before, *versions_of(ones)])


def run_real(case: Case, *modes: Any) -> Run:
    return run(case, copies, *modes)


def run_fake(case: Case, mode: Any, *modes: Any) -> Run:
    return run(case, lambda case: stand_ins(case, mode), mode, *modes)


def copies(case: Case) -> Any:
    return duplicate((case.args, case.kwargs))


def stand_ins(case: Case, mode: Any) -> Any:
    return tree_map(
        lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, copies(case)
    )


def judge(case: Case, real: Run, fake: Run) -> Verdict:
    if real.raised is not None and fake.raised is not None:
        return Verdict("refused")
    if real.raised is not None:
        if case.variant == "refused" and case.op in REFUSED_BY_VALUES:
            return Verdict("refused-by-values")
        return Verdict("refusal-missed", _said(real.raised), _text(real.raised))
    if fake.raised is not None:
        if is_data_dependent(fake.raised) and case.op in DATA_DEPENDENT:
            return Verdict("data-dependent")
        return Verdict("error", _said(fake.raised), _text(fake.raised))
    assert real.account is not None and fake.account is not None
    found = differences(real.account, fake.account)
    if not found:
        return Verdict("ok")
    kinds = sorted({f"{difference.where.partition('[')[0]}.{difference.field}" for difference in found})
    return Verdict("mismatch", ", ".join(kinds), "; ".join(str(difference) for difference in found[:6]))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def _said(error: BaseException) -> str:
    """Class and first line, with numbers left out so that similar failures group."""
    first_line = str(error).strip().partition("\n")[0]
    without_numbers = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", f"{type(error).__name__}: {first_line}")
    return re.sub(r"\b(f|bf|i|u|b|c)N\[[^\]]*\]", "SPEC", without_numbers)[:160]


def culprit(case: Case, mode: Any) -> str:
    """The first operator, below the public function, whose answer differs from the real one's."""
    real, fake = Recorder(), Recorder()
    run_real(case, real)
    run_fake(case, mode, fake)
    parted = divergence(real.calls, fake.calls)
    return "" if parted is None else f"{(parted.real or parted.fake).op} {parted}"  # type: ignore[union-attr]


def inputs_of(case: Case) -> str:
    return describe((*case.args, case.kwargs) if case.kwargs else case.args)[:400]
