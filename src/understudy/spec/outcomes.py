"""What an operator call does, said without tensors.

    outcome  = New(spec)          a tensor with a storage of its own
             | View(of, spec)     a tensor on the storage of input `of`
             | Same(of)           input `of` itself (written in place, or passed through)
             | Same(of, spec)     input `of` itself, whose metadata the call has changed to `spec`
             | Changed((Same, …)) nothing: these inputs themselves, written in place
             | Value(value)       a number, None, or anything that is no tensor
    outcomes = outcome            the call returns one thing
             | [outcome, …]       the call returns a list of tensors
             | (outcomes, …)      the call returns several things

`of` counts the tensor inputs of the call in the order in which they are written:
positional arguments first, lists flattened, then keyword arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

from understudy.spec.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class New:
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class View:
    of: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Same:
    of: int
    spec: TensorSpec | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    inputs: tuple[Same, ...]


@dataclass(frozen=True, slots=True)
class Value:
    value: Any


Outcome = Union[New, View, Same, Changed, Value]
Outcomes = Union[Outcome, "list[Outcome]", "tuple[Any, ...]"]


def normal(answer: Any) -> Outcomes:
    """A rule may return bare specs for new tensors and bare values: give each its outcome."""
    if isinstance(answer, TensorSpec):
        return New(answer)
    if isinstance(answer, (New, View, Same, Changed, Value)):
        return answer
    if isinstance(answer, tuple):
        return tuple(normal(part) for part in answer)
    if isinstance(answer, list):
        return [normal(part) for part in answer]  # type: ignore[misc]
    return Value(answer)
