"""The sweep of `make_fx` as a test: every operator is captured, the graph does what the operator does; what is not so is in
the table of gaps, every gap in the table still occurs, and torch's own make_fx has it as well unless the table says why.

The short sweep takes the first samples and runs always; the full one is marked `conformance`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.oracle.engines import UNDER_TEST
from tests.oracle.fx_gaps import GAPS, gap_for
from tests.oracle.fx_sweep import MODES, Plan, sweep_op
from tests.oracle.sweep import operator_names, sweep

CHUNKS = 24
SHORT = Plan(engines=(UNDER_TEST,), samples=2, other_variants=1)
FULL = Plan(engines=(UNDER_TEST,), samples=None, most=64)
"43 of 745 operators have more samples than that (max_pool2d 1,440): so many of them are drawn."
OF_GAPS = Plan(engines=("torch",), samples=None, most=0)

pytestmark = pytest.mark.filterwarnings("ignore")


def chunk(number: int) -> list[str]:
    """The operators of a chunk: by a hash of their names, so that related ones do not pile up in one."""
    return [name for name in operator_names(None) if zlib.crc32(name.encode()) % CHUNKS == number]


def failures(
    results: Sequence[dict[str, Any]], engine: str = UNDER_TEST
) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    from tests.oracle.fx_run import FAILURES

    for result in results:
        for key, cell in result["engines"][engine].items():
            mode, variant = key.split("/")
            for failure in cell["failures"]:
                if failure["outcome"] in FAILURES:
                    yield result["op"], mode, variant, failure


def check(results: Sequence[dict[str, Any]], plan: Plan) -> None:
    found = list(failures(results))
    unlisted = [
        f"{op} {mode}/{variant} sample {failure.get('sample')}: {failure['outcome']}, {failure.get('detail') or failure['cause']}"
        for op, mode, variant, failure in found
        if gap_for(op, variant, mode, failure["outcome"]) is None
    ]
    assert not unlisted, "\n".join(["not in the table of gaps:", *unlisted])
    seen = {(op, variant, mode) for op, mode, variant, _ in found}
    swept = {result["op"] for result in results}
    closed = [
        f"{op} {mode}/{variant}: {gap.reason}"
        for (op, variant), gap in GAPS.items()
        for mode, sample in gap.modes.items()
        if op in swept and not gap.only_rounds and _comes_to(plan, variant, sample)
        if (op, variant, mode) not in seen
    ]
    assert not closed, "\n".join(["closed: remove from the table of gaps:", *closed])


def _comes_to(plan: Plan, variant: str, sample: int) -> bool:
    limit = plan.limit(variant)
    return limit is None or sample < limit


@pytest.mark.parametrize("number", range(CHUNKS))
def test_first_samples(number: int) -> None:
    check([sweep_op(name, SHORT) for name in chunk(number)], SHORT)


@pytest.mark.conformance
def test_all_samples() -> None:
    check(list(sweep(FULL, operator_names(None), jobs=2)), FULL)


@pytest.mark.conformance
def test_what_torch_captures_is_captured() -> None:
    """Only the samples in the table can be exceptions: torch fails there as well, or the table says what it does."""
    results = list(sweep(OF_GAPS, sorted({op for op, _ in GAPS}), jobs=2))
    failing = {(op, variant, mode) for op, mode, variant, _ in failures(results, "torch")}
    ahead = [
        f"{op} {mode}/{variant}: {gap.reason}"
        for (op, variant), gap in GAPS.items()
        for mode in gap.modes
        if not gap.torch_does and not gap.only_rounds and (op, variant, mode) not in failing
    ]
    assert not ahead, "\n".join(["torch captures these:", *ahead])


def test_gaps_name_operators_and_give_reasons() -> None:
    known = set(operator_names(None))
    for (op, _), gap in GAPS.items():
        assert op in known
        assert len(gap.reason) > 10


def swept(op: str, *failing: tuple[str, str]) -> dict[str, Any]:
    """What a sweep of one operator says that fails so: (mode/variant, outcome)."""
    cells = {
        key: {
            "counts": {outcome: 1},
            "failures": [{"outcome": outcome, "cause": "?", "count": 1, "sample": 0}],
        }
        for key, outcome in failing
    }
    return {"op": op, "seconds": 0.0, "engines": {UNDER_TEST: cells}}


def test_what_is_not_in_the_table_is_reported() -> None:
    check([swept("add")], FULL)
    with pytest.raises(
        AssertionError, match=r"not in the table of gaps:\s+add fake/function sample 0: wrong"
    ):
        check([swept("add", ("fake/function", "wrong"))], FULL)
    with pytest.raises(AssertionError, match=r"linalg.norm fake/out sample 0: wrong"):
        check([swept("linalg.norm", ("fake/out", "wrong"))], FULL)
    check([swept("linalg.norm", ("fake/out", "rounded"))], FULL)


def test_a_gap_that_no_longer_occurs_is_reported() -> None:
    check([swept("equal", *((f"{mode}/function", "data-dependent") for mode in MODES))], FULL)
    with pytest.raises(AssertionError, match=r"closed: remove from the table of gaps:\s+equal real/function"):
        check([swept("equal", *((f"{mode}/function", "data-dependent") for mode in MODES[1:]))], FULL)
