"""Torch's way to say how each dimension of an input becomes a size. `dims("batch", "seq")` is the shorter one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class DimDynamic(Enum):
    """What becomes of a dimension."""

    DYNAMIC = 0
    """A symbol of its own."""
    DUCK = 1
    """A symbol that it shares with dimensions whose example has the same size."""
    STATIC = 2
    """A number."""
    UNBACKED = 3
    """A symbol without example."""
    INFER_STRIDE = 4
    """Of a stride: what follows from the sizes."""


@dataclass(frozen=True)
class Constraint:
    """What must hold of a dimension; `warn_only` is taken note of, no more."""

    warn_only: bool


@dataclass(frozen=True)
class StrictMinMaxConstraint(Constraint):
    """The size lies within `vr`, an object with `lower` and `upper`."""

    vr: Any


@dataclass(frozen=True)
class RelaxedUnspecConstraint(Constraint):
    """The size stays a symbol; what is assumed about it is up to the run."""


@dataclass(frozen=True)
class SymbolicContext:
    """How the sizes of one input become symbols."""


@dataclass(frozen=True)
class SymIntSymbolicContext(SymbolicContext):
    """What must hold of a number among the inputs."""

    constraint: Any


@dataclass(frozen=True)
class StatelessSymbolicContext(SymbolicContext):
    """A `DimDynamic` for each size, and for each stride if these do not follow from the sizes."""

    dynamic_sizes: Sequence[Any]
    dynamic_strides: Sequence[Any] | None = None
    constraint_sizes: Sequence[Any] | None = None
    constraint_strides: Sequence[Any] | None = None
    specialize_on: Sequence[Any] | None = None
    view_base_context: Any = None
    shape_ids: dict[int, str | None] | None = None
    """By dimension: those of the same name are one symbol, if they are `UNBACKED`."""
    unbacked_bounds: dict[int, tuple[int | None, int | None]] | None = None

    def __post_init__(self) -> None:
        rank = len(self.dynamic_sizes)
        defaults: dict[str, Any] = {
            "dynamic_strides": DimDynamic.INFER_STRIDE,
            "constraint_sizes": None,
            "constraint_strides": None,
        }
        if self.specialize_on is None:
            object.__setattr__(self, "specialize_on", [[]] * rank)
        for name, default in defaults.items():
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, [default] * rank)
            elif len(given) != rank:
                raise ValueError(f"{name} has {len(given)} entries for {rank} dimensions")


@dataclass(frozen=True, kw_only=True)
class StatefulSymbolicContext(StatelessSymbolicContext):
    """The same for a tensor that may be converted again: its sizes are called after `tensor_source`."""

    tensor_source: Any = None
    shape_env_to_source_to_symbol_cache: dict[int, dict[str, Any]] = field(default_factory=dict)
    excluded_sizes: tuple[int | None, ...] | None = None
    """Sizes that torch's compiler has compiled for already: what is asked here is answered for them as well."""


@dataclass(frozen=True)
class SubclassSymbolicContext(StatefulSymbolicContext):
    """The same for a wrapper subclass, with a context for each tensor inside it."""

    inner_contexts: dict[str, Any] = field(default_factory=dict)
    track_outer_size_stride: bool = True
