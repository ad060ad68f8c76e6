"""All combinations of values that the constraints allow.

    space = Space(axes, fixed, world=8, …)
    space.list_candidates(), space.excluded

Values that follow from others are filled in: accumulation from the global batch, data parallel ranks from those that are
left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from understudy.errors import UnderstudyError
from understudy.plans.axes import (
    ACCUMULATE,
    BATCH,
    CHECKPOINT,
    CONTEXT,
    CP,
    DP,
    NODES,
    OFF,
    PER_NODE,
    PP,
    TP,
    ZERO,
    Axis,
    Value,
    find_role,
    write_value,
)
from understudy.plans.constraints import PlanRequirement, RequirementError

MOST_COMBINATIONS = 500_000


@dataclass(frozen=True)
class Shape:
    """What bounds and predictions know of a candidate. `accumulate` are the passes of one step."""

    ranks: int = 1
    per_node: int = 1
    batch: int | None = None
    accumulate: int = 1
    context: int | None = None
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int | None = None
    has_checkpoints: bool = False

    @property
    def samples(self) -> int | None:
        """Samples of one step, over all ranks."""
        return None if self.batch is None else self.batch * self.accumulate * self.dp

    @property
    def in_flight(self) -> int:
        """Passes whose activations the first stage of a pipeline holds at once."""
        return min(self.pp, self.accumulate)

    @property
    def bubble(self) -> float:
        """The time of a step over that of its passes: the stages of a pipeline wait for each other."""
        return (self.accumulate + self.pp - 1) / self.accumulate


@dataclass(frozen=True)
class Candidate:
    """Values by name, in the order of the axes."""

    values: tuple[tuple[str, Value], ...]
    shape: Shape = field(compare=False)

    @property
    def table(self) -> dict[str, Value]:
        return dict(self.values)

    def __str__(self) -> str:
        return ", ".join(f"{name}={write_value(value)}" for name, value in self.values) or "unchanged"


@dataclass
class Space:
    """`fixed`: values of options that are not varied, by name. `derived`: the name of the option for accumulation, where it
    follows from the global batch. `excluded`: combinations that the constraints do not allow."""

    axes: tuple[Axis, ...]
    fixed: Mapping[str, Value] = field(default_factory=dict)
    requirements: tuple[PlanRequirement, ...] = ()
    nodes: int = 1
    per_node: int = 1
    global_batch: int | None = None
    derived: str | None = None
    excluded: int = 0

    def list_candidates(self) -> list[Candidate]:
        count = math.prod(len(axis.values) for axis in self.axes)
        if count > MOST_COMBINATIONS:
            raise UnderstudyError(
                f"expected at most {MOST_COMBINATIONS:,} combinations, got {count:,}; name fewer values with --vary"
            )
        self._check_names()
        found = list(self._list_allowed())
        self.excluded = count - len(found)
        return found

    def _check_names(self) -> None:
        known = (
            {axis.name for axis in self.axes}
            | set(self.fixed)
            | set(self._whole({}))
            | set(_name_sizes(Shape()))
        )
        known |= {self.derived} if self.derived is not None else set()
        for requirement in self.requirements:
            unknown = sorted(requirement.names - known)
            if unknown:
                names = ", ".join(sorted(name for name in known if name.isidentifier()))
                raise RequirementError(
                    f"--require {requirement.text}: unknown name {unknown[0]!r} (choose from {names})"
                )

    def _whole(self, table: Mapping[str, Value]) -> dict[str, Value]:
        """Names that constraints may use beside those of options."""
        roles = self._by_role(table)
        nodes, per_node = int(roles.get(NODES, self.nodes)), int(roles.get(PER_NODE, self.per_node))
        return {"nodes": nodes, "cards": nodes * per_node}

    def _by_role(self, table: Mapping[str, Value]) -> dict[str, Value]:
        roles = {find_role(name): value for name, value in self.fixed.items()}
        roles |= {find_role(name): value for name, value in table.items()}
        roles.pop("", None)
        return roles

    def _list_allowed(self) -> Iterator[Candidate]:
        names = [axis.name for axis in self.axes]
        for values in itertools.product(*(axis.values for axis in self.axes)):
            table = dict(zip(names, values, strict=True))
            shape = self._make_shape(table)
            if shape is None:
                continue
            if self.derived is not None:
                table[self.derived] = shape.accumulate
            every = {**_name_sizes(shape), **self.fixed, **self._whole(table), **table}
            if all(requirement.holds(every) for requirement in self.requirements):
                yield Candidate(tuple(table.items()), shape)

    def _make_shape(self, table: Mapping[str, Value]) -> Shape | None:
        """None where the ranks, or the global batch, can't be divided so."""
        roles = self._by_role(table)
        ranks = int(self._whole(table)["cards"])
        per_node = int(roles.get(PER_NODE, self.per_node))
        tp, pp, cp = (_read_count(roles.get(role)) or 1 for role in (TP, PP, CP))
        if ranks % (tp * pp * cp):
            return None
        dp = ranks // (tp * pp * cp)
        if DP in roles and _read_count(roles[DP]) not in (None, dp):
            return None
        batch, accumulate = _read_count(roles.get(BATCH)), _read_count(roles.get(ACCUMULATE)) or 1
        if self.global_batch is not None:
            each = (batch or 1) * dp
            if self.derived is not None:
                if self.global_batch % each:
                    return None
                accumulate = self.global_batch // each
            elif each * accumulate != self.global_batch:
                return None
        zero = roles.get(ZERO)
        return Shape(
            ranks, per_node, batch, accumulate, _read_count(roles.get(CONTEXT)), dp, tp, pp, cp,
            zero if type(zero) is int else None, roles.get(CHECKPOINT, False) not in OFF,
        )  # fmt: skip


def _name_sizes(shape: Shape) -> dict[str, Value]:
    """The sizes of a layout, whether or not the script has options with these names."""
    return {DP: shape.dp, TP: shape.tp, PP: shape.pp, CP: shape.cp}


def _read_count(value: Value | None) -> int | None:
    return value if type(value) is int and value >= 1 else None
