"""The sweep with symbolic sizes as a test. What is known to fail is in `GAPS`, each with its reason; a gap that no longer
occurs fails the test as well. The short sweep runs always, the full one is marked `conformance`: every sample in float32 and
four in int64, which are some 60,000 cases and about ten minutes of two busy processors."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.oracle.cases import OPS, Case, Limits, cases_of
from tests.oracle.sweep import operator_names, sweep
from tests.oracle.symbolic import (
    FAILURES,
    OTHER_SIZES,
    Listener,
    Step,
    SymbolicRun,
    elements,
    examine,
    is_affordable,
    other_sizes,
    wired,
)
from tests.oracle.symbolic_sweep import Plan, cell_of, static_variants, sweep_op

CHUNKS = 12
SHORT = Plan(dtypes=("float32",), samples=1, duck_shapes=(False,))
FULL = Plan(samples=None, other_dtypes=4, variants=("function", "backward"))

GAPS: dict[str, str] = {}

GAPS_OF_FULL: dict[str, str] = {
    **GAPS,
    "prod": "of no element: the strides of the gradient are those of C++'s path for tensor subclasses",
    "ormqr": "the strides of the gradient are not those of a real run with plain sizes either",
}

pytestmark = pytest.mark.filterwarnings("ignore")


def failures(results: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """By operator: what failed."""
    found: dict[str, list[str]] = {}
    for result in results:
        for failure in cell_of(result)["failures"]:
            if failure["outcome"] in (*FAILURES, "crash", "unusable"):
                text = f"{result['op']} {failure.get('where', '')}: {failure['outcome']}, {failure.get('detail') or failure['cause']}"
                found.setdefault(str(result["op"]), []).append(text)
    return found


def check(results: Sequence[dict[str, Any]], gaps: dict[str, str]) -> None:
    found = failures(results)
    unlisted = [text for op, texts in found.items() if op not in gaps for text in texts]
    assert not unlisted, "\n".join(["not in the table of gaps:", *unlisted])
    closed = [op for op in gaps if op not in found and any(result["op"] == op for result in results)]
    assert not closed, f"closed: remove from the table of gaps: {closed}"


@pytest.mark.parametrize("number", range(CHUNKS))
def test_first_samples(number: int) -> None:
    names = [name for name in operator_names(None) if zlib.crc32(name.encode()) % CHUNKS == number]
    check([sweep_op(name, SHORT) for name in names], GAPS)


def test_steps_of_a_real_run_are_those_of_the_operator() -> None:
    """How its inputs are made is none of them: with these, no real run would ever be as recorded."""
    limits = {variant: 1 if variant == "function" else 0 for variant in static_variants()}
    case = next(iter(cases_of(OPS["sigmoid"], "float32", Limits(**limits))))
    run = SymbolicRun(case, duck_shape=False)
    assert [step[0] for step in run.real_steps(run.env.hints)] == ["aten::sigmoid"]
    assert run.is_recorded(run.env.hints)


def test_a_result_that_is_an_input_is_not_as_recorded() -> None:
    """What shuffles channels makes a copy, but of nothing gives its input back."""
    limits = {variant: 1 if variant == "function" else 0 for variant in static_variants()}
    case = next(iter(cases_of(OPS["nn.functional.channel_shuffle"], "float32", Limits(**limits))))
    run = SymbolicRun(case, duck_shape=False)
    batch = run.inputs[0][1].shape[0].value
    assert run.is_recorded({**run.env.hints, batch: 2})
    assert not run.is_recorded({**run.env.hints, batch: 0})


def test_other_brackets_are_not_as_recorded() -> None:
    """The gradient of wide matrices is (U G) V, that of square ones U (G V): the same operators, and no other sizes."""

    def steps(columns: int, from_the_left: bool) -> list[Step]:
        u, g, v = torch.ones(3, 3), torch.ones(3, 3), torch.ones(3, columns)
        with Listener() as listener:
            _ = (u @ g) @ v if from_the_left else u @ (g @ v)
        return listener.heard

    wide, square = steps(5, from_the_left=True), steps(3, from_the_left=False)
    assert [step.name for step in wide] == [step.name for step in square]
    assert wired(wide) != wired(square)
    assert wired(wide) == wired(steps(3, from_the_left=True))


@pytest.mark.parametrize(("of", "most"), [(100, 50_000), (400, 320_000)], ids=["small", "large"])
def test_sizes_tried_have_few_elements(of: int, most: int) -> None:
    """Also where the example has more of them than others may have; and none is left without sizes to try."""
    case = Case("relu", "float32", "function", 0, torch.relu, (torch.ones(of, of, 1),), {})
    run = SymbolicRun(case, duck_shape=True)
    counts = [elements(run, sizes) for sizes in other_sizes(run) if is_affordable(run, sizes)]
    assert of * of < max(counts) <= most
    assert examine(case, duck_shape=True).tried == OTHER_SIZES


@pytest.mark.conformance
def test_all_samples() -> None:
    check(list(sweep(FULL, operator_names(None), jobs=2)), GAPS_OF_FULL)
