"""What the rehearsals so far say of a candidate that was not rehearsed.

    bounds      hold for every program whose options mean what their names say: sharded parameters, gradients and optimizer
                state; monotony in the batch; the published peak of the card and the speed of its network
    predictions scale the nearest rehearsal by the candidate's shape, and are as good as their errors so far

`Estimates` learns from each result; the slack that it allows is the error that it has made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from understudy.plans.axes import ACCUMULATE, BATCH, CHECKPOINT, CONTEXT, OFF, ZERO, Value, find_role
from understudy.plans.candidates import Candidate, Shape
from understudy.plans.results import Result

SLACK = 0.1
"""Logarithm of the factor that predictions are taken to be wrong by at least."""
FIRST_SLACK = 0.7
"""The same before there were any."""
NEW_SLACK = 0.3
"""More, for each value of a candidate that no rehearsal had so far."""
ENOUGH = 3
"""Predictions, to know their error."""


@dataclass(frozen=True)
class Speeds:
    """Bytes per second that a rank sends, as published: within its node, and to others. Infinite where it is not known."""

    within: float = math.inf
    between: float = math.inf


@dataclass
class Estimates:
    speeds: Speeds = field(default_factory=Speeds)
    results: dict[Candidate, Result] = field(default_factory=dict)
    time_errors: list[float] = field(default_factory=list)
    memory_errors: list[float] = field(default_factory=list)
    """Logarithms of measured over predicted."""

    def learn(self, candidate: Candidate, result: Result) -> None:
        seconds, nbytes = self.predict_seconds(candidate), self.predict_bytes(candidate)
        # No prediction contains the effect of a new value, so such a result does not measure the error of predictions.
        if result.is_measured and not self._count_new_values(candidate):
            if seconds and result.seconds:
                self.time_errors.append(math.log(result.seconds / seconds))
            if nbytes and result.reserved_bytes:
                self.memory_errors.append(math.log(result.reserved_bytes / nbytes))
        self.results[candidate] = result

    # bounds

    def find_failing_values(self) -> set[tuple[str, Value]]:
        """Values with which every rehearsal failed, while others ran. A failure counts for the value of its candidate with
        the most of them; where two have as many, nothing is known yet."""
        ran = {
            value for other, result in self.results.items() if result.is_measured for value in other.values
        }
        failed = [other for other, result in self.results.items() if not result.is_measured] if ran else []
        found: set[tuple[str, Value]] = set()
        while True:
            counts = Counter(value for other in failed for value in other.values if value not in ran)
            ranked = counts.most_common(2)
            if not ranked or ranked[0][1] < ENOUGH or (len(ranked) > 1 and ranked[1][1] == ranked[0][1]):
                return found
            worst = ranked[0][0]
            found.add(worst)
            failed = [other for other in failed if worst not in other.values]

    def bound_bytes(self, candidate: Candidate) -> int:
        """Parameters, gradients and optimizer state that the average rank holds; of candidates that differ in more than
        their shape, nothing is known."""
        bounds = [
            _least_bytes(result, other.shape, candidate.shape)
            for other, result in self.results.items()
            if result.is_measured and _differs_in_shape_only(candidate, other)
        ]
        return max(bounds, default=0)

    def find_smaller_that_fails(self, candidate: Candidate) -> Candidate | None:
        """One that does not fit, and needs no more memory: it differs in a smaller batch, a shorter context, checkpoints or
        a higher stage of ZeRO."""
        for other, result in self.results.items():
            if result.is_measured and not result.fits and _needs_at_least(candidate, other):
                return other
        return None

    def bound_seconds(self, candidate: Candidate) -> float:
        """The least time of one step: products at the published peak, gradients at the network's published speed."""
        bounds = [0.0]
        for other, result in self.results.items():
            if not result.seconds or not _differs_in_shape_only(candidate, other):
                continue
            a, c = other.shape, candidate.shape
            work = _work(c) / _work(a)
            ideal = result.ideal_seconds * work
            bounds.append(max(ideal, self._gradient_seconds(result, a, c)))
        return max(bounds)

    def _gradient_seconds(self, result: Result, a: Shape, c: Shape) -> float:
        if c.dp == 1 or not result.parameters:
            return 0.0
        total = (
            result.parameters * a.tp * a.pp * (a.dp if a.zero == 3 else 1) / 2
        )  # parameters may be float32
        share = 2 * total / (c.tp * c.pp) * (c.dp - 1) / c.dp / 2
        return share / self._find_speed("dp", c)

    def _find_speed(self, dimension: str, shape: Shape) -> float:
        """Bytes that a rank sends in a second over a dimension. A ring through several ranks of a node leaves it by the
        network cards of all of them."""
        if not _is_between(dimension, shape):
            return self.speeds.within
        inner = {"tp": 1, "cp": shape.tp, "dp": shape.tp * shape.cp}.get(dimension, shape.per_node)
        return min(self.speeds.within, self.speeds.between * max(1, shape.per_node // inner))

    # predictions

    def predict_seconds(self, candidate: Candidate) -> float | None:
        anchor = self._find_anchor(candidate, needs_time=True)
        if anchor is None:
            return None
        result, a, c = self.results[anchor], anchor.shape, candidate.shape
        assert result.seconds is not None
        passes = max(result.seconds - result.optimizer_seconds, 1e-9) / a.bubble
        exposed = min(result.exposed_seconds, 0.9 * passes)
        idle = min(result.idle_seconds / a.bubble, 0.9 * passes - exposed)
        compute = (passes - exposed - idle) * _work(c) / _work(a)
        # Calls are as many for a large batch as for a small one, and for a part of each layer as for all of it.
        host = result.host_seconds * _calls(c) / _calls(a)
        optimizer = result.optimizer_seconds * _optimizer_share(c) / _optimizer_share(a)
        sent = self._send_seconds(c)
        before = self._send_seconds(a)
        exposed = exposed * sent / before if before else sent
        return (max(compute + exposed, host) * c.bubble + optimizer) * self._effect(
            candidate, anchor, "seconds"
        )

    def predict_bytes(self, candidate: Candidate) -> float | None:
        anchor = self._find_anchor(candidate, needs_time=False)
        if anchor is None:
            return None
        result, a, c = self.results[anchor], anchor.shape, candidate.shape
        fixed = result.parameters + result.gradients + result.optimizer_state
        moving = max(result.reserved_bytes - fixed, 0) * _activations(c) / _activations(a)
        return _sharded_bytes(result, a, c) + moving * self._effect(candidate, anchor, "bytes")

    def time_slack(self, candidate: Candidate) -> float:
        return _find_slack(self.time_errors) + NEW_SLACK * self._count_new_values(candidate)

    def memory_slack(self, candidate: Candidate) -> float:
        return _find_slack(self.memory_errors) + NEW_SLACK * self._count_new_values(candidate)

    def curiosity(self, candidate: Candidate) -> float:
        """A factor that lets a candidate with values that are new come first where predictions are alike."""
        return math.exp(-NEW_SLACK / 2 * self._count_new_values(candidate))

    def _count_new_values(self, candidate: Candidate) -> int:
        """The number of values not seen in any rehearsal, without growing numbers such as the batch."""
        seen = {
            value for other, result in self.results.items() if result.is_measured for value in other.values
        }
        return sum(
            value not in seen
            for value in candidate.values
            if find_role(value[0]) not in (BATCH, CONTEXT, ACCUMULATE)
        )

    def _find_anchor(self, candidate: Candidate, needs_time: bool) -> Candidate | None:
        known = [
            other
            for other, result in self.results.items()
            if result.is_measured and (result.seconds or not needs_time)
        ]
        return min(known, key=lambda other: _distance(candidate, other), default=None)

    def _send_seconds(self, shape: Shape) -> float:
        """Seconds in which a rank sends in a step, from the rehearsals of each dimension; 0 where there are none."""
        total = 0.0
        for dimension in ("tp", "dp", "pp", "cp"):
            size = getattr(shape, dimension)
            if size == 1:
                continue
            units = [
                unit
                for other, result in self.results.items()
                if (unit := _find_unit(dimension, result, other.shape)) is not None
            ]
            if units:
                nbytes = units[-1] * _scale_of(dimension, shape)
                total += nbytes / self._find_speed(dimension, shape)
        return total if math.isfinite(total) else 0.0

    def _effect(self, candidate: Candidate, anchor: Candidate, what: str) -> float:
        """The factor of values that are not part of a shape, each from two rehearsals that differ in this value alone."""
        effect = 1.0
        theirs = anchor.table
        for name, value in candidate.values:
            before = theirs.get(name)
            if value != before and not _is_in_shape(name):
                effect *= self._find_effect(name, before, value, what)
        return effect

    def _find_effect(self, name: str, before: Value | None, after: Value, what: str) -> float:
        for one, result in self.results.items():
            if one.table.get(name) != before or not result.is_measured:
                continue
            wanted = tuple((key, after if key == name else value) for key, value in one.values)
            other = self.results.get(Candidate(wanted, one.shape))
            if other is None or not other.is_measured:
                continue
            if what == "seconds" and other.seconds and result.seconds:
                return other.seconds / result.seconds
            if what == "bytes" and result.reserved_bytes:
                fixed = result.parameters + result.gradients + result.optimizer_state
                moving = [max(r.reserved_bytes - fixed, 1) for r in (result, other)]
                return moving[1] / moving[0]
        return 1.0


def _find_slack(errors: list[float]) -> float:
    """The slack from the most recent errors: predictions get better with more rehearsals."""
    if len(errors) < ENOUGH:
        return FIRST_SLACK
    return max(SLACK, 1.2 * max(abs(error) for error in errors[-8:]))


def _is_in_shape(name: str) -> bool:
    role = find_role(name)
    return bool(role) and role != CHECKPOINT


def _differs_in_shape_only(one: Candidate, other: Candidate) -> bool:
    theirs = other.table
    return all(_is_in_shape(name) or theirs.get(name) == value for name, value in one.values)


def _needs_at_least(one: Candidate, other: Candidate) -> bool:
    """Whether memory can only grow from the other to this one. Passes count as far as a pipeline holds them at once."""
    a, b = one.shape, other.shape
    if (a.ranks, a.dp, a.tp, a.pp, a.cp) != (b.ranks, b.dp, b.tp, b.pp, b.cp):
        return False
    if (a.batch or 1) < (b.batch or 1) or (a.context or 1) < (b.context or 1):
        return False
    if (a.batch or 1) * a.in_flight < (b.batch or 1) * b.in_flight:
        return False
    if a.accumulate == 1 < b.accumulate:  # the first pass may make what the second one meets
        return False
    theirs = other.table
    for name, value in one.values:
        before = theirs.get(name)
        role = find_role(name)
        if value == before or (_is_in_shape(name) and role != ZERO):
            continue
        if role == ZERO and isinstance(value, int) and isinstance(before, int) and value < before:
            continue
        if role == CHECKPOINT and value in OFF:
            continue
        return False
    return True


def _shards(shape: Shape) -> tuple[int, int, int]:
    """How many ranks share parameters, gradients, optimizer state."""
    split = shape.tp * shape.pp
    if shape.zero is None:
        return split, split, split
    return tuple(split * (shape.dp if shape.zero >= stage else 1) for stage in (3, 2, 1))  # type: ignore[return-value]


def _sharded_bytes(result: Result, a: Shape, c: Shape) -> int:
    """What is expected: stage by stage."""
    sizes = result.parameters, result.gradients, result.optimizer_state
    return sum(
        int(size * before / after) for size, before, after in zip(sizes, _shards(a), _shards(c), strict=True)
    )


def _least_bytes(result: Result, a: Shape, c: Shape) -> int:
    """A lower bound. Which sizes a stage of ZeRO shards differs between programs (a copy in another precision is a parameter
    in one, and optimizer state in the other), and of a program that does not say, whether it shards at all."""
    whole = (result.parameters + result.gradients + result.optimizer_state) * a.tp * a.pp
    least = whole / (c.tp * c.pp)
    if a.zero is None or c.zero is None or c.zero > a.zero:
        return 0 if (a.zero is None and a.ranks != c.ranks) else int(least / c.dp)
    return int(least * (min(1.0, a.dp / c.dp) if a.zero else 1.0))


def _work(shape: Shape) -> float:
    """Relative work of one rank in a step: the computation of its passes."""
    return (shape.batch or 1) * (shape.context or 1) * shape.accumulate / (shape.tp * shape.pp * shape.cp)


def _calls(shape: Shape) -> float:
    """Relative number of calls of one rank in a step."""
    return shape.accumulate / shape.pp


def _activations(shape: Shape) -> float:
    per_pass = (shape.batch or 1) * (shape.context or 1) / (shape.tp * shape.pp * shape.cp)
    return per_pass * shape.in_flight


def _optimizer_share(shape: Shape) -> float:
    return 1 / _shards(shape)[2]


def _is_between(dimension: str, shape: Shape) -> bool:
    """Ranks are numbered with tensor parallelism innermost and pipelines outermost, as is usual."""
    inner = shape.tp * (shape.cp if dimension != "tp" else 1)
    inner *= {"tp": 1, "cp": 1, "dp": shape.dp, "pp": shape.dp * shape.pp}[dimension]
    return inner > shape.per_node


def _scale_of(dimension: str, shape: Shape) -> float:
    """What a rank sends in a step over this dimension, in relation to others of the same program."""
    size = getattr(shape, dimension)
    tokens = (shape.batch or 1) * (shape.context or 1) * shape.accumulate / shape.cp
    if dimension == "tp":
        return tokens / shape.pp * (size - 1) / size
    if dimension == "pp":
        return tokens / shape.tp
    if dimension == "cp":
        return tokens / (shape.tp * shape.pp) * (size - 1) / size
    times = shape.accumulate if (shape.zero or 0) >= 2 else 1
    return times / (shape.tp * shape.pp) * (size - 1) / size


def _find_unit(dimension: str, result: Result, shape: Shape) -> float | None:
    """What a rank has sent over this dimension, for a scale of one."""
    size = getattr(shape, dimension)
    if size == 1:
        return None
    named = [w for w in result.wires if w.group == dimension or find_role(w.group) == dimension]
    if dimension == "dp" and not named:
        named = [w for w in result.wires if w.size == size and find_role(w.group) not in ("tp", "pp", "cp")]
    elif not named and [getattr(shape, other) for other in ("tp", "dp", "pp", "cp")].count(size) == 1:
        named = [w for w in result.wires if w.size == size]
    return sum(w.bytes for w in named) / _scale_of(dimension, shape) if named else None


def _distance(one: Candidate, other: Candidate) -> float:
    """In powers of two, and a little for every other value that differs."""
    a, b = one.shape, other.shape
    weights: Mapping[str, float] = {
        "tp": 2.0,
        "pp": 2.0,
        "cp": 2.0,
        "dp": 0.5,
        "batch": 1.0,
        "context": 1.0,
        "ranks": 0.5,
    }
    total = sum(
        weight * abs(math.log2((getattr(a, name) or 1) / (getattr(b, name) or 1)))
        for name, weight in weights.items()
    )
    total += 0.1 * abs(math.log2(a.accumulate / b.accumulate))
    theirs = other.table
    return total + sum(
        0.8 for name, value in one.values if theirs.get(name) != value and find_role(name) not in weights
    )
