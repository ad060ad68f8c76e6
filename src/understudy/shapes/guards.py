"""Guards: the conditions on sizes that a run has assumed, with the line that made each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import AnyCondition, FloatExpr
from understudy.shapes.node import Scalar, Size


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on sizes under which the recorded answers hold. `is_checked_by_operator`: the operator checks it when
    it runs. `is_of_operator`: it comes from an operator, not from the program itself."""

    condition: AnyCondition
    line: str = ""
    is_specialisation: bool = False
    is_checked_by_operator: bool = False
    is_of_operator: bool = field(default=False, compare=False)
    definitions: Mapping[Expr, FloatExpr] = field(default_factory=dict, repr=False, compare=False)

    def holds(self, values: Mapping[Expr, int]) -> bool:
        """Whether it holds at these sizes. False if it can't be computed."""
        return holds_at(self.condition, values)

    @property
    def text(self) -> str:
        return str(self.condition)

    @property
    def expr(self) -> Any:
        """The condition as a sympy expression."""
        # why: sympy is slow, and only other tools want it
        from understudy.shapes.sympy_writer import SympyWriter

        return SympyWriter(self.definitions).write(self.condition)

    @property
    def msg(self) -> str:
        """The message of the error for a run in which it does not hold."""
        return f"{self} does not hold"

    def __iter__(self) -> Iterator[Any]:
        """Unpacks like torch's guards: the condition, its origin, whether it is size-oblivious."""
        return iter((self.expr, self.line, False))

    def __getitem__(self, position: int) -> Any:
        return tuple(self)[position]

    def __str__(self) -> str:
        return because(self.text, self.line)


@dataclass(frozen=True, slots=True)
class Specialisation:
    """A dynamic size that was specialised to one number."""

    what: str
    number: int
    line: str = ""
    reason: str = ""

    def __str__(self) -> str:
        why = (
            self.reason if not self.line else f"{self.line}    ({self.reason})" if self.reason else self.line
        )
        return because(f"{self.what} = {self.number}", why)


def holds_at(condition: AnyCondition, values: Mapping[Expr, Any]) -> bool:
    """Whether a condition holds at these sizes. False if it can't be computed."""
    try:
        return bool(condition.evaluate(values))
    except (ArithmeticError, ValueError, TypeError, KeyError):
        return False


def because(what: str, line: str) -> str:
    return f"{what}    because {line}" if line else what


@dataclass(frozen=True, slots=True)
class SymbolOrigin:
    """The origin of an unbacked symbol."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} at {self.line}" if self.line else self.what


@dataclass(frozen=True, slots=True)
class InputSize:
    """One number of an input's metadata: `x.size(0)`, and its value (a node or a plain number)."""

    source: str
    position: int
    dim: int
    what: str
    size: Scalar

    @property
    def text(self) -> str:
        """The Python expression that reads it from the input."""
        return self.write(self.source)

    name = text  # torch's sources have one

    def write(self, source: str) -> str:
        """The same for another name of the input."""
        if self.what == "number":
            return source
        if self.what == "item":
            return f"{source}.item()"
        return f"{source}.storage_offset()" if self.what == "offset" else f"{source}.{self.what}({self.dim})"

    def is_ephemeral(self) -> bool:
        """Whether the source can't be read later: torch names such sources `<ephemeral…>`."""
        return self.source.startswith("<ephemeral")

    def read(self, inputs: Sequence[Any]) -> Any:
        """The same number of other inputs."""
        given = inputs[self.position]
        if self.what == "number":
            return given
        if self.what == "item":
            return given.item()
        if self.what == "offset":
            return given.storage_offset()
        return given.size(self.dim) if self.what == "size" else given.stride(self.dim)


@dataclass
class InputSizes:
    """The metadata of the inputs, from which symbols can be bound to the sizes of other inputs."""

    names: list[str] = field(default_factory=list)
    sizes: list[InputSize] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    metadata: dict[str, tuple[Size, ...]] = field(default_factory=dict)
    """By name: the sizes, strides and offset of a tensor; empty for a number."""

    def is_same(self, name: str, shape: Sequence[Size], stride: Sequence[Size], offset: Size) -> bool:
        """Whether the input of this name has this metadata. Symbols are compared by identity, which adds no guard."""
        known, given = self.metadata[name], (*shape, *stride, offset)
        return len(known) == len(given) and all(
            a is b or (isinstance(a, int) and isinstance(b, int) and a == b)
            for a, b in zip(known, given, strict=True)
        )

    def add(self, name: str, shape: Sequence[Size], stride: Sequence[Size], offset: Size) -> None:
        position = len(self.names)
        self.names.append(name)
        self.ranks.append(len(shape))
        self.metadata[name] = (*shape, *stride, offset)
        for what, sizes in (("size", shape), ("stride", stride)):
            for dim, size in enumerate(sizes):
                self.sizes.append(InputSize(name, position, dim, what, size))
        self.sizes.append(InputSize(name, position, 0, "offset", offset))

    def add_item(self, name: str, number: Scalar) -> None:
        """Add what is read from the tensor that was added last."""
        self.sizes.append(InputSize(name, len(self.names) - 1, 0, "item", number))

    def add_number(self, name: str, number: Scalar) -> None:
        self.sizes.append(InputSize(name, len(self.names), 0, "number", number))
        self.names.append(name)
        self.ranks.append(None)
        self.metadata[name] = ()
