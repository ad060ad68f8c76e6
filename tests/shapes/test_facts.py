"""Facts: what is learned, what is proved, and that nothing is proved that is not so."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.shapes.algebra.conditions import Condition, both, either, eq, ge, gt, le, lt, ne
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.facts import Facts, Proof

from .proofs import expressions, random_fact, run
from .trees import Tree, build, build_question, compute, holds, questions, relations, trees
from .worlds import World

algebra = Algebra()
b, s, h = (algebra.symbol(name, 1) for name in ("b", "s", "h"))
d, t, u = (algebra.symbol(name, 0) for name in ("d", "t", "u"))
n = algebra.symbol("n", None)


def knowing(*conditions: bool | Condition) -> Facts:
    facts = Facts(algebra)
    for condition in conditions:
        facts.learn(condition)
    return facts


@pytest.mark.parametrize(
    ("known", "question"),
    [
        ([], lt(s % b, b)),
        ([], le(algebra.minimum(s, t), t)),
        ([], ge(abs(n), n)),
        ([], ge(algebra.maximum(t, u) * 2, t + u)),
        ([], eq(algebra.maximum(t, 3) - algebra.maximum(t, 3), 0)),
        ([eq(s % 8, 0)], eq(s // 8 * 8, s)),
        ([eq(s % 8, 0)], eq(s // 4, 2 * (s // 8))),
        ([eq(s % 8, 0)], ge(s, 8)),
        ([eq(s % 8, 0)], ne(s, 12)),
        ([eq(8 * t, s)], eq(s // 8, t)),
        ([eq(8 * t, s)], eq(s % 4, 0)),
        ([eq(b * s % 8, 0)], eq(b * s * d // 8 * 8, b * s * d)),
        ([eq(b * s % 8, 0)], eq(b * s % 4, 0)),
        ([eq(s % 8, 3), eq(t % 8, 5)], eq((s + t) % 8, 0)),
        ([eq(t, u)], eq(t * d, d * u)),
        ([eq(t, 4)], eq(t * d, 4 * d)),
        ([lt(t, 2048)], lt(t, 4096)),
        ([le(t, u), le(u, d)], le(t, d)),
        ([le(t, u)], le(t * d, u * d)),
        ([le(b * s, 100)], le(s, 100)),
        ([ge(t * u, 1)], ge(t, 1)),
        ([ne(t, 0)], ge(t, 1)),
        ([eq(2 * t, 3 * u)], eq(t // 3, u // 2)),
        ([either(eq(d, 0), eq(d, 4)), ne(d, 0)], eq(d, 4)),
        ([both(le(t, 3), ge(t, 3))], eq(t, 3)),
        ([le(t // 8, 5)], le(t, 47)),
        ([eq(s // 8, t)], lt(s, 8 * t + 8)),
        ([eq(t, u + 1)], gt(t, u)),
        ([le(algebra.maximum(t, u), 7)], le(t, 7)),
        ([eq(b * s, 12)], eq(b * s * d, 12 * d)),
        ([ne(t, u)], ne(2 * t, 2 * u)),
    ],
)
def test_proved(known: list[bool | Condition], question: bool | Condition) -> None:
    facts = knowing(*known)
    assert facts.prove(question) is Proof.YES
    assert not facts.is_contradictory


@pytest.mark.parametrize("question", [eq(d, 1), eq(s, 1), lt(t, u), eq(b * s % 8, 0), ne(n, 0)])
def test_not_known(question: bool | Condition) -> None:
    assert knowing().prove(question) is Proof.UNKNOWN


def test_refuted() -> None:
    assert knowing(lt(t, u)).prove(ge(t, u)) is Proof.NO
    assert knowing(eq(t % 2, 0)).prove(eq(t, 7)) is Proof.NO
    assert knowing(gt(t, 5)).prove(eq(t, u - u)) is Proof.NO


def test_simplify() -> None:
    facts = knowing(eq(s % 8, 0), eq(t, u), eq(h, 4))
    assert facts.simplify(s // 8 * 8) is s
    assert facts.simplify(s % 4) == 0
    assert facts.simplify(s * d // 8) is d * (s // 8)
    assert facts.simplify(u * h + 1) is 4 * t + 1
    assert facts.simplify(s) is s
    assert facts.replacement(u) is t
    assert facts.replacement(h) == 4
    assert facts.replacement(s) is s


def test_interval() -> None:
    facts = knowing(lt(t, 8), ge(u, 2))
    assert facts.interval(t * 2 + 1) == (1, 15)
    assert facts.interval(u) == (2, None)
    assert facts.interval(u - t) == (-5, None)
    assert facts.interval(n) == (None, None)
    assert facts.interval(5) == (5, 5)


def test_a_factor_of_a_product_that_may_be_zero_may_be_zero() -> None:
    assert knowing(le(t * u, 40)).interval(t) == (0, None)
    assert knowing(le(t * u, 40), ge(t * u, 1)).interval(t)[0] == 1


def test_sum_is_replaced_rather_than_a_summand() -> None:
    assert knowing(eq(t, u + d)).replacement(t) is u + d
    assert knowing(eq(u, t + d)).replacement(u) is t + d


def test_versions() -> None:
    facts = knowing()
    assert facts.version == 0
    facts.learn(lt(t, 8))
    facts.learn(lt(t, 8))
    facts.learn(True)
    assert facts.version == 1
    assert facts.conditions == (lt(t, 8),)
    assert facts.prove(lt(t, 4)) is Proof.UNKNOWN
    facts.learn(lt(t, 3))
    assert facts.prove(lt(t, 4)) is Proof.YES


def test_facts_of_one_do_not_reach_another() -> None:
    assert knowing(eq(s % 8, 0)).prove(ge(s, 8)) is Proof.YES
    assert knowing().prove(ge(s, 8)) is Proof.UNKNOWN


def test_facts_that_nothing_meets_come_to_an_end() -> None:
    facts = knowing(gt(t, 1), lt(t * t, t + 2))
    low, _ = facts.interval(t)
    assert low is not None and low.bit_length() < 2048  # each step squares it


def test_contradictions_are_noticed() -> None:
    assert knowing(eq(t % 2, 0), eq(t, 7)).is_contradictory
    assert knowing(lt(t, 4), gt(t, 4)).is_contradictory
    with pytest.raises(ValueError, match="expected a condition that can be true, got False"):
        knowing().learn(False)


def test_a_divisor_that_is_zero() -> None:
    facts = knowing(eq(t, 0))
    assert facts.simplify(s // t) is s // t
    assert facts.interval(s // t) == (None, None)
    assert facts.prove(eq(s // t, 3)) is Proof.UNKNOWN


def test_a_proof_is_no_bool() -> None:
    with pytest.raises(TypeError, match="three values"):
        bool(Proof.YES)


def test_no_unsound_answers_in_random_worlds() -> None:
    tally = run(20_000, seed=2)
    assert not tally.unsound, "\n".join(tally.unsound[:5])


def test_an_example_costs_no_answer() -> None:
    """With sizes that meet the facts, half of each search is left out: what is found is the same."""
    rng = random.Random(7)
    answers = Counter[Proof]()
    while answers.total() < 3000:
        world = World.random(rng)
        pool = [*world.symbols, *expressions(world, 6)]
        place = rng.randrange(world.symbols[0].values.size)
        example = {x.expr: int(x.values[place]) for x in world.symbols if isinstance(x.expr, Expr)}
        without, beside = Facts(world.algebra), Facts(world.algebra, example)
        for _ in range(3):
            for question in [world.question(pool) for _ in range(10)]:
                if question.legal[place]:
                    answer = without.prove(question.condition)
                    answers[answer] += 1
                    assert beside.prove(question.condition) is answer, question.text
            fact = random_fact(world, pool)
            if fact.condition is not False and (fact.truth & fact.legal)[place]:
                without.learn(fact.condition)
                beside.learn(fact.condition)
    assert min(answers[proof] for proof in Proof) > 100


def test_facts_beat_an_example_that_breaks_them() -> None:
    own = Algebra()
    x, y = own.symbol("x"), own.symbol("y")
    facts = Facts(own, {x: 5})
    facts.learn(le(y, 3))  # says nothing of x
    assert facts.prove(le(x, 3)) is Proof.UNKNOWN
    facts.learn(eq(x, y))
    assert facts.prove(le(x, 3)) is Proof.YES


@pytest.mark.parametrize(
    ("known", "asked", "text"),
    [
        ([ge(d, 1)], gt(d * t, d), "t >= 2"),
        ([ge(d, 4)], gt(d // 4 * (t // 4), d // 4), "t >= 8"),
        ([ge(d, 3)], ge(d * t - d, 3), "t >= 2"),
        ([], gt(d * t, d), "d*t > d"),  # d may be 0
        ([eq(d % 8, 0)], gt(d, 17), "d >= 24"),
    ],
)
def test_a_guard_goes_without_factors_that_are_known(
    known: list[Condition], asked: Condition, text: str
) -> None:
    facts = knowing(*known)
    assert str(facts.simplify_condition(asked)) == text
    facts.learn(asked)
    assert facts.prove(asked) is Proof.YES
    assert facts.prove(knowing(*known).simplify_condition(asked)) is Proof.YES


RANGES = (range(6), range(1, 7), range(-2, 4))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(relations(symbols=3), max_size=3),
    st.lists(questions(symbols=3), min_size=1, max_size=3),
    trees(symbols=3),
)
def test_sound(known: list[Tree], asked: list[Tree], tree: Tree) -> None:
    own = Algebra()
    symbols = [own.symbol(f"x{i}", values[0], values[-1]) for i, values in enumerate(RANGES)]
    facts = Facts(own)
    points = list(itertools.product(*RANGES))
    for fact in known:
        condition = build_question(fact, own, symbols)
        left = [point for point in points if holds(fact, point)]
        if left and condition is not False:
            facts.learn(condition)
            points = left
    for question in asked:
        proof = facts.prove(build_question(question, own, symbols))
        answers = {holds(question, point) for point in points} - {None}
        assert proof is not Proof.YES or False not in answers
        assert proof is not Proof.NO or True not in answers
    expr = build(tree, own, symbols)
    simple = facts.simplify(expr)
    low, high = facts.interval(expr)
    assert facts.simplify(simple) is simple or isinstance(simple, int)
    for point in points:
        expected = compute(tree, point)
        if expected is not None:
            values = dict(zip(symbols, point, strict=True))
            assert (simple.evaluate(values) if isinstance(simple, Expr) else simple) == expected
            assert (low is None or low <= expected) and (high is None or expected <= high)


def test_what_was_simplified_stays_so() -> None:
    """Also where each round finds something more to do."""
    algebra = Algebra()
    n, k = algebra.symbol("n", 1, None), algebra.symbol("k", 1, 21)
    facts = Facts(algebra)
    facts.learn(eq(k % 2, 1))
    simple = facts.simplify((n // -2 - n) * (k + 8))
    assert facts.simplify(simple) is simple
    for values in ({n: 5, k: 3}, {n: 8, k: 7}):
        assert simple.evaluate(values) == (values[n] // -2 - values[n]) * (values[k] + 8)
