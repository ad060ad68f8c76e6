"""Random programs as a test: a sample runs always, the rest is marked `conformance`.

What the sample covers is a fixed choice of programs, so a failure can be repeated: the message names the program.
"""

from __future__ import annotations

import pytest
import torch

from tests.oracle.random_calls import DTYPES, LAYOUTS, Vocabulary, expanded, overlapping
from tests.oracle.random_run import SILENT, Tally, run_programs
from tests.oracle.random_sweep import Plan, sweep

pytestmark = pytest.mark.filterwarnings("ignore")

EVERYDAY = (
    "add", "mul", "div.no_rounding_mode", "exp", "clamp", "where", "sum", "mean", "amax", "softmax", "cat", "stack", "index_select",
    "gather", "matmul", "bmm", "nn.functional.linear", "nn.functional.layer_norm", "nn.functional.relu", "view", "transpose",
    "expand", "cumsum", "sort",
)  # fmt: skip
"Of these the sample is made: all operators would take minutes to load their samples of the database."


def tally_of(kind: str, blocks: int, programs: int) -> Tally:
    total = Tally()
    for block in range(blocks):
        vocabulary = Vocabulary(0, block, EVERYDAY)
        total.merge(run_programs(kind, vocabulary, range(programs), lambda number, on_stand_ins: None))
    return total


def failures(tally: Tally, *outcomes: str) -> str:
    return "\n".join(
        f"{group}\n      {tally.examples[group]}" for group in tally.groups if group[0] in outcomes
    )


def test_static_sample() -> None:
    tally = tally_of("static", blocks=4, programs=100)
    assert tally.steps > 400
    assert not failures(tally, *SILENT, "error")
    assert (
        tally.counts["refusal missed"] < tally.steps / 100
    )  # of out= that shares memory; see docs/known-gaps.md


def test_symbolic_sample() -> None:
    tally = tally_of("symbolic", blocks=4, programs=8)
    assert tally.steps > 20
    assert not failures(tally, *SILENT)


def test_captured_sample() -> None:
    tally = tally_of("captured", blocks=4, programs=8)
    assert tally.steps > 15
    assert not failures(tally, *SILENT)


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with another dtype for every result of `exp`, programs with it differ."""
    from understudy.fake.mode import FakeTensorMode
    from understudy.ops.registry import rule
    from understudy.ops.variants import rule_of

    exp = torch.ops.aten.exp.default
    right = rule_of(exp)
    assert right is not None
    FakeTensorMode.cache_clear()
    rule.replace(lambda x: right(x).like(dtype=torch.float64), exp)
    try:
        tally = Tally()
        vocabulary = Vocabulary(0, 0, ("exp",))
        tally.merge(run_programs("static", vocabulary, range(20), lambda number, on_stand_ins: None))
    finally:
        rule.replace(right, exp)
        FakeTensorMode.cache_clear()
    assert tally.counts["mismatch"] > 3


def test_a_program_is_the_same_again() -> None:
    first, second = (Vocabulary(0, 0, EVERYDAY).new_program(7).next_step() for _ in range(2))
    assert first is not None and second is not None
    assert (first.op, first.dtype, first.variant, first.edits) == (
        second.op,
        second.dtype,
        second.variant,
        second.edits,
    )


def test_layouts_keep_shape_and_dtype() -> None:
    import random

    for layout in LAYOUTS.values():
        for shape in ((), (3,), (2, 3), (0, 2), (2, 1, 3), (1, 2, 3, 2)):
            made = layout(torch.zeros(shape, dtype=torch.int32), random.Random(0))
            assert made.shape == shape and made.dtype is torch.int32


def test_expanded_and_overlapping_memory() -> None:
    import random

    assert 0 in expanded(torch.zeros(3, 3), random.Random(0)).stride()
    shared = overlapping(torch.zeros(9, 9), random.Random(0))
    assert shared.untyped_storage().nbytes() < 81 * 4
    assert len(DTYPES) >= 18


@pytest.mark.conformance
@pytest.mark.parametrize(("kind", "count"), [("static", 200_000), ("symbolic", 50_000), ("captured", 10_000)])
def test_all(kind: str, count: int) -> None:
    total = Tally()
    for tally in sweep(Plan(kind, seed=1), count):
        total.merge(tally)
    assert not failures(total, *SILENT)
    rates = list(total.rates().values())
    assert rates[0] >= 0.999 and rates[1] >= 0.995, total.rates()
