"""Which candidate is rehearsed next, which ones need no rehearsal, and when the answer is decided.

    search = PlanSearch(space.list_candidates(), first, estimates, wanted=3)
    while (candidate := search.take()) is not None:
        search.record(candidate, result)        # from any number of workers, in any order
    search.best()

A candidate is rehearsed, or ruled out with a reason; the search ends where the best `wanted` are rehearsed, and all others
are ruled out. Most promising first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from understudy.plans.axes import Value
from understudy.plans.candidates import Candidate
from understudy.plans.estimates import Estimates
from understudy.plans.results import Result

SPEED, MEMORY, COST = "speed", "memory", "cost"
GOALS = (SPEED, MEMORY, COST)
BY_BYTES, BY_MONOTONY, BY_TIME = (
    "too large: parameters and state alone",
    "a smaller one does not fit",
    "slower by its lower bound",
)
BY_PREDICTED_BYTES, BY_PREDICTION = "predicted not to fit", "predicted to be slower"
BY_FAILURE = "has a value with which all others failed"
NOT_REACHED = "not reached"
GIVE_UP = 3
"""Failures without a single candidate that ran: it is the script that fails. With one value: it is this value."""
ALIKE = 1.01
"""Times within it are equal: the one that needs less memory is better."""


@dataclass
class Limits:
    """`most`: rehearsals in all."""

    reserved_bytes: int
    step_seconds: float | None = None
    most: int = 40


@dataclass
class PlanSearch:
    candidates: Sequence[Candidate]
    first: Candidate | None
    estimates: Estimates
    limits: Limits
    goal: str = SPEED
    wanted: int = 3
    running: set[Candidate] = field(default_factory=set)
    ruled_out: dict[Candidate, str] = field(default_factory=dict)
    rehearsed: int = 0
    """In this search; results that were kept from others are not counted."""

    @property
    def results(self) -> dict[Candidate, Result]:
        return self.estimates.results

    def count_reasons(self) -> dict[str, int]:
        return dict(Counter(self.ruled_out.values()))

    def record(self, candidate: Candidate, result: Result, is_kept: bool = False) -> None:
        self.running.discard(candidate)
        self.ruled_out.pop(candidate, None)
        self.estimates.learn(candidate, result)
        self.rehearsed += not is_kept

    # what is next

    def take(self) -> Candidate | None:
        """The most promising candidate that is neither rehearsed nor ruled out; None where the answer is decided, or where
        what is running has to end first."""
        if not self.results and self.running:
            return None  # its result predicts the others
        if self.rehearsed + len(self.running) >= self.limits.most:
            return None
        if len(self.results) >= GIVE_UP and not any(result.is_measured for result in self.results.values()):
            return None
        if not self.results and self.first is not None:
            self.running.add(self.first)
            return self.first
        open_ones = self.rule_out()
        if not open_ones:
            return None
        chosen = min(open_ones, key=self._promise)
        self.running.add(chosen)
        return chosen

    def rule_out(self) -> list[Candidate]:
        """Those that are left. What a prediction has ruled out is looked at again: predictions change."""
        ranked = self.rank()
        last = self.score(ranked[self.wanted - 1]) if len(ranked) >= self.wanted else math.inf
        failing = self.estimates.find_failing_values()
        left = []
        for candidate in self.candidates:
            if candidate in self.results or candidate in self.running:
                continue
            reason = self._find_reason(candidate, last, failing)
            if reason is None:
                self.ruled_out.pop(candidate, None)
                left.append(candidate)
            else:
                self.ruled_out[candidate] = reason
        return left

    def _find_reason(self, candidate: Candidate, last: float, failing: Set[tuple[str, Value]]) -> str | None:
        known = self.ruled_out.get(candidate)
        if known in (BY_BYTES, BY_MONOTONY, BY_TIME):
            return known
        estimates, limits = self.estimates, self.limits
        if not failing.isdisjoint(candidate.values):
            return BY_FAILURE
        if estimates.bound_bytes(candidate) > limits.reserved_bytes:
            return BY_BYTES
        if estimates.find_smaller_that_fails(candidate) is not None:
            return BY_MONOTONY
        seconds = estimates.bound_seconds(candidate)
        if limits.step_seconds is not None and seconds > limits.step_seconds:
            return BY_TIME
        if self.goal != MEMORY and seconds and self._score_of(candidate, seconds) > last:
            return BY_TIME
        nbytes = estimates.predict_bytes(candidate)
        if (
            nbytes is not None
            and nbytes * math.exp(-estimates.memory_slack(candidate)) > limits.reserved_bytes
        ):
            return BY_PREDICTED_BYTES
        predicted = self._predict(candidate)
        if predicted is not None and math.isfinite(last):
            find_slack = estimates.memory_slack if self.goal == MEMORY else estimates.time_slack
            if predicted * math.exp(-find_slack(candidate)) > last:
                return BY_PREDICTION
        return None

    def _predict(self, candidate: Candidate) -> float | None:
        """The score that is expected."""
        if self.goal == MEMORY:
            return self.estimates.predict_bytes(candidate)
        seconds = self.estimates.predict_seconds(candidate)
        return None if seconds is None else self._score_of(candidate, seconds)

    def _promise(self, candidate: Candidate) -> tuple[bool, float]:
        """Smallest first: those that are expected to fit, by their score."""
        nbytes = self.estimates.predict_bytes(candidate) or 0.0
        predicted = self._predict(candidate)
        score = predicted if predicted is not None else nbytes
        return nbytes > self.limits.reserved_bytes, score * self.estimates.curiosity(candidate)

    # what is good

    def _score_of(self, candidate: Candidate, seconds: float) -> float:
        """Seconds of a step for each sample; of all cards together, where cost is the goal."""
        samples = candidate.shape.samples or candidate.shape.dp * candidate.shape.accumulate
        return seconds / samples * (candidate.shape.ranks if self.goal == COST else 1)

    def score(self, candidate: Candidate) -> float:
        """Smaller is better."""
        result = self.results[candidate]
        if self.goal == MEMORY or result.seconds is None:
            return float(result.reserved_bytes)
        if candidate.shape.batch is None and (result.tokens or result.samples):
            per = result.tokens or result.samples or 1.0
            return result.seconds / per * (candidate.shape.ranks if self.goal == COST else 1)
        return self._score_of(candidate, result.seconds)

    def is_allowed(self, candidate: Candidate) -> bool:
        result = self.results[candidate]
        limit = self.limits.step_seconds
        return result.fits and (limit is None or (result.seconds or math.inf) <= limit)

    def rank(self) -> list[Candidate]:
        """Those that fit, best first; of those that are alike, the one with less memory."""
        found = sorted((c for c in self.results if self.is_allowed(c)), key=self.score)
        ranked: list[Candidate] = []
        while found:
            alike = [c for c in found if self.score(c) <= self.score(found[0]) * ALIKE]
            best = min(alike, key=lambda c: self.results[c].reserved_bytes)
            ranked.append(best)
            found.remove(best)
        return ranked

    def best(self) -> list[Candidate]:
        return self.rank()[: self.wanted]

    def end(self) -> None:
        """What is left open was not reached."""
        for candidate in self.rule_out():
            self.ruled_out[candidate] = NOT_REACHED
