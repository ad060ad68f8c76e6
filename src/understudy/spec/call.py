"""A call of an operator, said without tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from understudy._torch import OpOverload, argument_names
from understudy.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and its arguments, each tensor replaced by its spec; `inputs` are these specs, in order."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[TensorSpec, ...]

    @staticmethod
    def of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call(op, args, kwargs, tuple(flat(TensorSpec, args, kwargs)))

    def argument_of(self, position: int) -> str:
        """The name of the argument that holds the input of this position."""
        names = argument_names(self.op)
        seen = 0
        for name, value in [*zip(names, self.args, strict=False), *self.kwargs.items()]:
            count = len(flat(TensorSpec, (value,), {}))
            if position < seen + count:
                return f"{name}[{position - seen}]" if isinstance(value, (list, tuple)) else name
            seen += count
        return f"input {position}"

    def __str__(self) -> str:
        return f"{self.op}({describe(self.args, self.kwargs)})"


def flat(kind: type | tuple[type, ...], args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All objects of this kind among the arguments, lists flattened, in the order in which they are written."""
    found: list[Any] = []
    _collect(kind, args, found)
    if kwargs:
        _collect(kind, kwargs.values(), found)
    return found


def _collect(kind: type | tuple[type, ...], values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(kind, value, found)


def map_structure(convert: Callable[[Any], Any], kind: type | tuple[type, ...], value: Any) -> Any:
    """The same structure with every object of this kind converted."""
    if isinstance(value, kind):
        return convert(value)
    if type(value) is tuple:
        return tuple([map_structure(convert, kind, part) for part in value])
    if type(value) is list:
        return [map_structure(convert, kind, part) for part in value]
    if type(value) is dict:
        return {name: map_structure(convert, kind, part) for name, part in value.items()}
    return value


def describe(args: Iterable[Any], kwargs: dict[str, Any], limit: int = 600) -> str:
    parts = [_short(a) for a in args] + [f"{name}={_short(a)}" for name, a in kwargs.items()]
    text = ", ".join(parts)
    return text if len(text) <= limit else text[:limit] + " …"


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        shown = [_short(part) for part in value[:6]]
        if len(value) > 6:
            shown.append(f"… {len(value)} in all")
        return f"[{', '.join(shown)}]"
    return str(value) if isinstance(value, TensorSpec) else repr(value)
