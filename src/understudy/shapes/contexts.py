"""How each dimension of an input becomes a size: fixed, dynamic, shared with equal ones, named, bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STATIC, DYNAMIC, DUCK = "static", "dynamic", "duck"


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension with a name of its own: the same name is the same size wherever it is used."""

    name: str
    min: int | None = None
    max: int | None = None


def dims(*names: str, min: int | None = None, max: int | None = None) -> tuple[Dim, ...]:
    """Named dimensions: `batch, seq = dims("batch", "seq")`."""
    return tuple(Dim(name, min, max) for name in names)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is asked for one dimension."""

    kind: str
    name: str | None = None
    low: int | None = None
    high: int | None = None


def policies(tensor: Any, context: Any, default: str) -> list[Policy]:
    """One policy for each dimension, from the context, from marks on the tensor, or the default."""
    given = _given(context, tensor.ndim)
    marked = [
        (STATIC, getattr(tensor, "_dynamo_static_indices", ())),
        (DYNAMIC, getattr(tensor, "_dynamo_dynamic_indices", ())),
        (DYNAMIC, getattr(tensor, "_dynamo_weak_dynamic_indices", ())),
    ]
    result = []
    for dim, wanted in enumerate(given):
        if wanted is None:
            mark = next((kind for kind, indices in marked if dim in indices), None)
            wanted = Policy(mark or default)
        result.append(wanted)
    return result


def _given(context: Any, ndim: int) -> list[Policy | None]:
    if context is None:
        return [None] * ndim
    if hasattr(context, "dynamic_sizes"):  # torch's own contexts
        constraints = getattr(context, "constraint_sizes", None) or [None] * ndim
        return [_from_torch(kind, bound) for kind, bound in zip(context.dynamic_sizes, constraints, strict=True)]
    if isinstance(context, Sequence) and len(context) == ndim:
        return [_policy(entry) for entry in context]
    raise ValueError(f"a symbolic context has one entry for each of the {ndim} dimensions, got {context!r}")


def _policy(entry: Any) -> Policy | None:
    if entry is None or isinstance(entry, Policy):
        return entry
    if isinstance(entry, Dim):
        return Policy(DYNAMIC, entry.name, entry.min, entry.max)
    if isinstance(entry, int):
        return Policy(STATIC)
    if entry in (STATIC, DYNAMIC, DUCK):
        return Policy(entry)
    if isinstance(entry, str):
        return Policy(DYNAMIC, entry)
    if hasattr(entry, "__name__") or hasattr(entry, "min"):  # torch.export.Dim
        return Policy(DYNAMIC, getattr(entry, "__name__", None), getattr(entry, "min", None), getattr(entry, "max", None))
    raise ValueError(f"a dimension is a name, a Dim, 'static', 'dynamic', 'duck' or None, not {entry!r}")


def _from_torch(kind: Any, constraint: Any) -> Policy:
    name = getattr(kind, "name", str(kind)).lower()
    bounds = getattr(constraint, "vr", None)
    low, high = (None, None) if bounds is None else (_number(bounds.lower), _number(bounds.upper))
    return Policy(STATIC if "static" in name else DUCK if name == "duck" else DYNAMIC, None, low, high)


def _number(bound: Any) -> int | None:
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if abs(number) >= 1 << 62 else number
