"""The operator sweep as a test: every failure is in the table of gaps, and every gap in the table still occurs.

The short sweep takes the first samples of every operator and runs always; the full one is marked `conformance`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.oracle.engines import UNDER_TEST
from tests.oracle.gaps import GAPS, gap_for
from tests.oracle.sweep import Plan, operator_names, sweep, sweep_op

CHUNKS = 24
SHORT = Plan(engines=(UNDER_TEST,), samples=3, other_dtypes=1)
FULL = Plan(engines=(UNDER_TEST,))
IN_INFERENCE_MODE = Plan(engines=(UNDER_TEST,), dtypes=("float32",), context="inference_mode")

pytestmark = pytest.mark.filterwarnings("ignore")


def chunk(number: int) -> list[str]:
    """The operators of a chunk: by a hash of their names, so that related ones do not pile up in one."""
    return [name for name in operator_names(None) if zlib.crc32(name.encode()) % CHUNKS == number]


def failing_cells(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for result in results:
        for key, cell in result["engines"][UNDER_TEST].items():
            dtype, variant = key.split("/")
            if any(cell["counts"].get(outcome) for outcome in ("mismatch", "error", "crash")):
                yield result["op"], dtype, variant, cell


def unlisted(results: Sequence[dict[str, Any]]) -> list[str]:
    """Failures that the table does not know."""
    return [
        f"{op} {dtype}/{variant} sample {failure.get('sample')}: {failure['outcome']}, {failure.get('detail') or failure['cause']}"
        for op, dtype, variant, cell in failing_cells(results)
        if gap_for(op, dtype, variant) is None
        for failure in cell["failures"]
        if failure["outcome"] in ("mismatch", "error", "crash")
    ]


def closed(results: Sequence[dict[str, Any]], plan: Plan) -> list[str]:
    """Gaps of the table that this sweep should have met and has not."""
    swept = {result["op"] for result in results}
    failing = {(op, dtype, variant) for op, dtype, variant, _ in failing_cells(results)}
    return [
        f"{op} {dtype}/{variant}: {gap.reason}"
        for (op, dtype, variant), gap in GAPS.items()
        if op in swept and _within(plan, dtype, gap.sample)
        if not any(o == op and v == variant and dtype in ("*", d) for o, d, v in failing)
    ]


def _within(plan: Plan, dtype: str, sample: int) -> bool:
    limits = [plan.samples, plan.other_dtypes if dtype not in ("float32", "*") else None]
    return all(limit is None or sample < limit for limit in limits)


@pytest.mark.parametrize("number", range(CHUNKS))
def test_first_samples(number: int) -> None:
    results = [sweep_op(name, SHORT) for name in chunk(number)]
    assert not unlisted(results), "\n".join(["not in the table of gaps:", *unlisted(results)])
    assert not closed(results, SHORT), "\n".join(
        ["closed: remove from the table of gaps:", *closed(results, SHORT)]
    )


@pytest.mark.parametrize("number", range(CHUNKS))
def test_first_samples_in_inference_mode(number: int) -> None:
    results = [sweep_op(name, replace(IN_INFERENCE_MODE, samples=1)) for name in chunk(number)]
    assert not unlisted(results), "\n".join(["not in the table of gaps:", *unlisted(results)])


@pytest.mark.conformance
def test_all_samples_in_inference_mode() -> None:
    results = list(sweep(IN_INFERENCE_MODE, operator_names(None), jobs=2))
    assert not unlisted(results), "\n".join(["not in the table of gaps:", *unlisted(results)])


@pytest.mark.conformance
def test_all_samples() -> None:
    results = list(sweep(FULL, operator_names(None), jobs=2))
    assert not unlisted(results), "\n".join(["not in the table of gaps:", *unlisted(results)])
    assert not closed(results, FULL), "\n".join(
        ["closed: remove from the table of gaps:", *closed(results, FULL)]
    )


def test_gaps_name_operators_and_give_reasons() -> None:
    known = set(operator_names(None))
    for (op, _, _), gap in GAPS.items():
        assert op in known
        assert len(gap.reason) > 10
