"""The search, against a card and a program that are formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from understudy.errors import UnderstudyError
from understudy.plans.axes import Axis, parse_vary
from understudy.plans.candidates import Candidate, Shape, Space
from understudy.plans.constraints import RequirementError, parse_requirement
from understudy.plans.estimates import Estimates, Speeds
from understudy.plans.results import Result, Wire, extend, make_failure
from understudy.plans.search import BY_FAILURE, BY_MONOTONY, COST, MEMORY, Limits, PlanSearch

GB = 10**9
LIMIT = 80 * GB


def make_space(*texts: str, **more: object) -> Space:
    return Space(tuple(parse_vary(text) for text in texts), **more)  # type: ignore[arg-type]


def simulate(shape: Shape, penalty: float = 1.0) -> Result:
    """A decoder of eight billion parameters on cards of 80 GB."""
    split, zero = shape.tp * shape.pp, shape.zero or 0
    state = [int(size * GB / split) for size in (16, 32, 96)]
    for stage, index in ((3, 0), (2, 1), (1, 2)):
        if zero >= stage:
            state[index] //= shape.dp
    moving = 20 * GB * (shape.batch or 1) * shape.in_flight / split
    products = 0.4 * (shape.batch or 1) * shape.accumulate / split
    sent = (
        0.0
        if shape.tp == 1
        else 0.05 * (shape.batch or 1) * shape.accumulate / shape.pp * (4 if shape.tp > 8 else 1)
    )
    reduce = 0.3 / split * (shape.dp > 1) * (shape.accumulate if zero >= 2 else 1)
    seconds = (products * (1 + 0.2 / (shape.batch or 1)) + sent) * shape.bubble + reduce + 0.02
    reserved = sum(state) + int(moving)
    wires = [Wire("tp", shape.tp, int(sent * 4e11), False)] if shape.tp > 1 else []
    wires += [Wire("dp", shape.dp, int(reduce * 4e10), True)] if shape.dp > 1 else []
    return Result(
        "fits" if reserved <= LIMIT else "does not fit", reserved_bytes=reserved, limit_bytes=LIMIT, parameters=state[0],
        gradients=state[1], optimizer_state=state[2], seconds=seconds * penalty, low_seconds=seconds * 0.9,
        high_seconds=seconds * 1.1, ideal_seconds=products * 0.6, optimizer_seconds=0.02, exposed_seconds=sent + reduce,
        samples=shape.samples, wires=wires,
    )  # fmt: skip


def run(search: PlanSearch, evaluate: Callable[[Candidate], Result], jobs: int = 2) -> list[Candidate]:
    """In the order in which they were begun; several at a time, the last one ends first."""
    begun: list[Candidate] = []
    running: list[Candidate] = []
    while True:
        while len(running) < jobs and (candidate := search.take()) is not None:
            begun.append(candidate)
            running.append(candidate)
        if not running:
            return begun
        done = running.pop()
        search.record(done, evaluate(done))


def make_search(space: Space, **more: object) -> PlanSearch:
    candidates = space.list_candidates()
    return PlanSearch(
        candidates,
        candidates[0],
        Estimates(Speeds(4.5e11, 5e10)),
        Limits(LIMIT, most=200),
        **more,  # type: ignore[arg-type]
    )


def test_a_value_that_always_fails_is_given_up() -> None:
    """And no other value, though it failed beside that one."""
    search = make_search(make_space("tp=8", "fused=off,on", "batch=1..8", "kind=a,b,c", per_node=8))

    def evaluate(candidate: Candidate) -> Result:
        is_broken = candidate.table["fused"] is True
        return make_failure("TypeError") if is_broken else simulate(candidate.shape, 0.9)

    begun = run(search, evaluate)
    assert sum(candidate.table["fused"] is True for candidate in begun) <= 5
    assert search.count_reasons()[BY_FAILURE] >= 7
    best = search.best()[0]
    assert best.table["fused"] is False


LAYOUTS = ("tp=1,2,4,8", "pp=1,2,4,8", "zero=0,1,2,3", "batch=1..8")


def layouts(**more: object) -> Space:
    return make_space(*LAYOUTS, nodes=2, per_node=8, global_batch=256, derived="accumulate", **more)


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_best_is_that_of_all(jobs: int) -> None:
    """Most candidates are never rehearsed, and the first three are those of rehearsing every one."""
    search = make_search(layouts())
    begun = run(search, lambda candidate: simulate(candidate.shape), jobs)
    every = make_search(layouts())
    for candidate in every.candidates:
        every.record(candidate, simulate(candidate.shape))
    assert len(search.candidates) > 150
    assert [search.score(c) for c in search.best()] == [every.score(c) for c in every.best()]
    assert len(begun) < len(search.candidates) / 3
    assert len(begun) == len(set(begun)) == len(search.results)
    assert set(search.results) | set(search.ruled_out) == set(search.candidates)


def test_bounds_rule_out_only_what_does_not_fit() -> None:
    """Parameters and state alone, and monotony: neither is ever wrong about this program."""
    search = make_search(layouts())
    for candidate in search.candidates[::7]:
        search.record(candidate, simulate(candidate.shape))
    estimates = search.estimates
    for candidate in search.candidates:
        real = simulate(candidate.shape)
        assert estimates.bound_bytes(candidate) <= real.reserved_bytes
        assert estimates.bound_seconds(candidate) <= (real.seconds or 0)
        if estimates.find_smaller_that_fails(candidate) is not None:
            assert not real.fits


def test_a_larger_batch_is_not_rehearsed() -> None:
    search = make_search(make_space("batch=1..1024", per_node=8, fixed={"tp": 8}))
    begun = run(search, lambda candidate: simulate(candidate.shape), 1)
    assert max(dict(c.values)["batch"] for c in begun) < 256  # type: ignore[type-var, operator]
    assert not search.rule_out()


def test_monotony_needs_all_else_equal() -> None:
    estimates = Estimates()
    small, large, other = (
        Candidate((("batch", batch), ("attn", attn)), Shape(batch=batch))
        for batch, attn in ((2, "eager"), (4, "eager"), (4, "sdpa"))
    )
    estimates.learn(small, Result("does not fit", reserved_bytes=90 * GB))
    assert estimates.find_smaller_that_fails(large) == small
    assert estimates.find_smaller_that_fails(other) is None


def test_passes_of_a_pipeline_are_held_at_once() -> None:
    """A larger batch with fewer passes may need less."""
    estimates = Estimates()
    few = Candidate((("batch", 8),), Shape(4, 4, batch=8, accumulate=1, pp=4))
    many = Candidate((("batch", 4),), Shape(4, 4, batch=4, accumulate=4, pp=4))
    estimates.learn(many, Result("does not fit", reserved_bytes=90 * GB))
    assert estimates.find_smaller_that_fails(few) is None


def test_values_without_a_role_are_learned() -> None:
    """What a switch does to time and memory is taken from two rehearsals that differ in it alone."""
    search = make_search(make_space("batch=1..16", "fast=off,on", per_node=8, fixed={"tp": 8}))

    def evaluate(candidate: Candidate) -> Result:
        return simulate(candidate.shape, 0.25 if candidate.table["fast"] else 1.0)

    begun = run(search, evaluate, 1)
    assert search.best()[0].table == {"batch": 16, "fast": True}
    assert len(begun) < len(search.candidates)


def test_a_candidate_that_fails_is_no_answer() -> None:
    search = make_search(make_space("batch=1,2,4", per_node=8, fixed={"tp": 8}))
    run(search, lambda c: make_failure("no") if c.shape.batch == 4 else simulate(c.shape))
    assert [c.shape.batch for c in search.best()] == [2, 1]


def test_a_script_that_always_fails_is_given_up() -> None:
    search = make_search(make_space("batch=1..1024"))
    begun = run(search, lambda candidate: make_failure("no"), 1)
    assert len(begun) == 3
    assert not search.best()


def test_goals() -> None:
    space = make_space("nodes=1,2,4", "zero=3", "batch=1..8", per_node=8)
    for goal in ("speed", MEMORY, COST):
        search = make_search(space, goal=goal)
        run(search, lambda candidate: simulate(candidate.shape), 1)
        scores = {c: search.score(c) for c in search.results if search.is_allowed(c)}
        assert search.score(search.best()[0]) <= min(scores.values()) * 1.01


def test_limits_of_a_step() -> None:
    search = make_search(make_space("batch=1..8", nodes=1, per_node=8, fixed={"zero": 3}))
    search.limits.step_seconds = 1.0
    run(search, lambda candidate: simulate(candidate.shape))
    assert all((search.results[c].seconds or 9) <= 1.0 for c in search.best())


def test_the_search_ends_where_it_has_to() -> None:
    search = make_search(layouts())
    search.limits.most = 5
    begun = run(search, lambda candidate: simulate(candidate.shape))
    assert len(begun) == 5
    search.end()
    assert search.count_reasons()["not reached"] > 0


def test_kept_results_are_not_rehearsals() -> None:
    search = make_search(layouts())
    search.limits.most = 1
    for candidate in search.candidates[:10]:
        search.record(candidate, simulate(candidate.shape), is_kept=True)
    assert search.rehearsed == 0
    assert search.take() is not None


def test_reasons_are_named() -> None:
    search = make_search(make_space("batch=1..64", per_node=8, fixed={"tp": 8}))
    for batch in (1, 32):
        candidate = next(c for c in search.candidates if c.shape.batch == batch)
        search.record(candidate, simulate(candidate.shape))
    search.rule_out()
    assert search.ruled_out[search.candidates[-1]] == BY_MONOTONY


# the space


def test_what_divides_is_kept() -> None:
    space = make_space("tp=1,2,3", "pp=1,2", "batch=1,2,3", per_node=8, global_batch=16, derived="accumulate")
    candidates = space.list_candidates()
    assert {(c.table["tp"], c.table["pp"], c.table["batch"]) for c in candidates} == set(
        itertools.product((1, 2), (1, 2), (1, 2))
    )
    assert space.excluded == 10
    for candidate in candidates:
        shape = candidate.shape
        assert shape.tp * shape.pp * shape.dp == 8
        assert shape.samples == 16
        assert candidate.table["accumulate"] == shape.accumulate


def test_requirements_know_the_cards() -> None:
    space = make_space("tp=1,2,4", requirements=(parse_requirement("tp = cards"),), per_node=4)
    assert [c.table["tp"] for c in space.list_candidates()] == [4]


def test_requirements_know_what_follows() -> None:
    """Data parallel ranks that no option names, and accumulation."""
    texts = ("tp*pp*dp=8", "dp >= 4", "accumulate <= 4")
    requirements = tuple(parse_requirement(text) for text in texts)
    space = make_space(
        "tp=1,2,4", "batch=1,2", requirements=requirements, per_node=8, global_batch=16, derived="accumulate"
    )
    found = [
        (c.table["tp"], c.table["batch"], c.shape.dp, c.table["accumulate"]) for c in space.list_candidates()
    ]
    assert found == [(1, 1, 8, 2), (1, 2, 8, 1), (2, 1, 4, 4), (2, 2, 4, 2)]


def test_a_name_that_is_not_there() -> None:
    space = make_space("tp=1,2", requirements=(parse_requirement("tp*dq=8"),), fixed={"layers": 2})
    with pytest.raises(
        RequirementError,
        match=r"--require tp\*dq=8: unknown name 'dq' \(choose from cards, cp, dp, layers, nodes, pp, tp\)",
    ):
        space.list_candidates()


def test_too_many_combinations() -> None:
    axes = tuple(Axis(f"x{i}", tuple(range(10))) for i in range(7))
    with pytest.raises(UnderstudyError, match="expected at most 500,000 combinations, got 10,000,000"):
        Space(axes).list_candidates()


def test_the_line_through_two_numbers_of_passes() -> None:
    """What does not depend on them is in both."""
    shape = Shape(4, 4, batch=1, accumulate=64, pp=4)
    few, more = (
        Result("fits", seconds=0.1 + 0.5 * n, low_seconds=0.1, high_seconds=9.0, tokens=10.0 * n)
        for n in (4, 6)
    )
    whole = extend(few, more, 4, 6, shape)
    assert whole.seconds == pytest.approx(0.1 + 0.5 * 64)
    assert whole.tokens == pytest.approx(640)
    assert whole.passes == 6


def test_predictions_know_what_the_host_needs() -> None:
    """Calls are as many for more tensor parallel ranks, and fewer in fewer passes of a larger batch."""
    estimates = Estimates()

    def make(batch: int, accumulate: int, tp: int) -> Candidate:
        values = (("batch", batch), ("tp", tp))
        return Candidate(values, Shape(8, 8, batch=batch, accumulate=accumulate, dp=8 // tp, tp=tp))

    estimates.learn(
        make(1, 64, 2),
        Result(
            "fits", reserved_bytes=GB, seconds=10.0, optimizer_seconds=0.4, host_seconds=9.6, idle_seconds=4.8
        ),
    )
    assert estimates.predict_seconds(make(1, 64, 2)) == pytest.approx(10.0)
    assert estimates.predict_seconds(make(1, 256, 8)) == pytest.approx(4 * 9.6 + 0.1, rel=0.01)
    assert estimates.predict_seconds(make(4, 16, 2)) == pytest.approx(9.6 - 4.8 + 0.4)


def test_a_ring_leaves_a_node_by_all_of_its_network_cards() -> None:
    """Gradients of one rank of each node take the network card of that rank; those of all ranks, all eight."""
    estimates = Estimates(Speeds(4.5e11, 5e10))
    known = Candidate((("tp", 1),), Shape(8, 8, dp=8, zero=0))
    estimates.learn(known, Result("fits", reserved_bytes=GB, seconds=1e-3, parameters=8 * GB))
    alone, together = (
        estimates.bound_seconds(Candidate((("tp", tp),), Shape(64, 8, dp=64 // tp, tp=tp, zero=0)))
        for tp in (8, 1)
    )
    assert alone == pytest.approx(0.5 * GB * 7 / 8 / 5e10)
    assert together == pytest.approx(4 * GB * 63 / 64 / 4e11)
