"""Guards: what a run has assumed about its sizes, with the line that made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from understudy.shapes.expr import Expr


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on sizes under which the recorded answers hold."""

    condition: Any
    line: str = ""
    is_specialisation: bool = False

    def holds(self, values: Mapping[Expr, int]) -> bool:
        return bool(self.condition.evaluate(values))

    def __str__(self) -> str:
        because = f"    because {self.line}" if self.line else ""
        return f"{self.condition}{because}"


@dataclass(frozen=True, slots=True)
class Birth:
    """Where a symbol without example value came from."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} at {self.line}" if self.line else self.what


@dataclass(frozen=True, slots=True)
class InputSize:
    """One number of an input's metadata: `x.size(0)`, and what stands for it (a node or a plain number)."""

    source: str
    position: int
    dim: int
    what: str
    size: Any


@dataclass
class Inputs:
    """What was said of the inputs, so that symbols can be bound to the sizes of other inputs."""

    names: list[str] = field(default_factory=list)
    sizes: list[InputSize] = field(default_factory=list)
