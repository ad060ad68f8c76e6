"""How each dimension of an input becomes a size: static, dynamic, duck-shaped, named, bounded."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from understudy.shapes.algebra.floats import OPERATIONS
from understudy.shapes.node import Shape, Size
from understudy.shapes.sizes import at_least_one

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

STATIC, DYNAMIC, DUCK, UNBACKED = "static", "dynamic", "duck", "unbacked"
KINDS = (STATIC, DYNAMIC, DUCK, UNBACKED)


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension, from `min` to `max`: the same name is the same size wherever it is used."""

    name: str
    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or keyword.iskeyword(self.name) or self.name in OPERATIONS:
            raise ValueError(
                f"dimension name must be a Python identifier, and neither a keyword nor a function of guards, "
                f"got {self.name!r}"
            )
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(
                f"dimension {self.name!r}: min must not be greater than max, got {self.min} and {self.max}"
            )


def dims(*names: str, min: int | None = None, max: int | None = None) -> tuple[Dim, ...]:
    """Named dimensions: `batch, seq = dims("batch", "seq")`."""
    return tuple(Dim(name, min, max) for name in names)


@dataclass(frozen=True, slots=True)
class Policy:
    """How one dimension becomes a size. `derive` computes the size from the dimension called `name`."""

    kind: str
    name: str | None = None
    low: int | None = None
    high: int | None = None
    derive: Callable[[Any], Any] | None = None


def policies(tensor: torch.Tensor, context: tuple[object, ...] | None, default: str) -> list[Policy]:
    """One policy for each dimension, from the context, from marks on the tensor, or the default."""
    given = _policies_of_context(context, tensor.ndim)
    return [
        _policy_of_mark(tensor, dim) or Policy(default) if wanted is None else wanted
        for dim, wanted in enumerate(given)
    ]


MARKS = {
    STATIC: ("_dynamo_static_indices",),
    UNBACKED: ("_dynamo_unbacked_indices", "_dynamo_strict_unbacked_indices"),
    DYNAMIC: ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices"),
}
"""The attributes that `torch._dynamo.mark_static`, `mark_unbacked`, `mark_dynamic` and `maybe_mark_dynamic` set."""


def _policy_of_mark(tensor: object, dim: int) -> Policy | None:
    for kind, attributes in MARKS.items():
        if any(dim in getattr(tensor, attribute, ()) for attribute in attributes):
            low, high = None, None
            if kind == UNBACKED:
                low, high = getattr(tensor, "_dynamo_unbacked_bounds", {}).get(dim, (None, None))
                return Policy(kind, getattr(tensor, "_dynamo_shape_ids", {}).get(dim), low, high)
            bounds = [r for r in getattr(tensor, "_dynamo_dynamic_range", ()) if r.dim == dim]
            if bounds and kind == DYNAMIC:
                low, high = bounds[0].min, bounds[0].max
            return Policy(kind, None, low, high)
    return None


def _policies_of_context(context: tuple[object, ...] | None, ndim: int) -> list[Policy | None]:
    if context is None:
        return [None] * ndim
    if hasattr(context, "dynamic_sizes"):  # torch's own contexts
        constraints = getattr(context, "constraint_sizes", None) or [None] * ndim
        if not len(context.dynamic_sizes) == len(constraints) == ndim:
            raise ValueError(
                f"symbolic_context: expected one entry for each of the {ndim} dimensions, got {context!r}"
            )
        given = [
            from_torch(kind, bound) for kind, bound in zip(context.dynamic_sizes, constraints, strict=True)
        ]
        bounds, names = (getattr(context, name, None) or {} for name in ("unbacked_bounds", "shape_ids"))
        for dim, policy in enumerate(given):
            if policy.kind == UNBACKED and (dim in bounds or dim in names):
                given[dim] = Policy(UNBACKED, names.get(dim), *bounds.get(dim, (policy.low, policy.high)))
        return list(given)
    if isinstance(context, dict):  # as in torch.export: by dimension; the others are static
        if not all(isinstance(dim, int) and -ndim <= dim < ndim for dim in context):
            raise ValueError(
                f"symbolic_context: expected entries for dimensions below {ndim}, got {context!r}"
            )
        return [_policy(context.get(dim, context.get(dim - ndim, STATIC))) for dim in range(ndim)]
    if isinstance(context, Sequence) and not isinstance(context, str) and len(context) == ndim:
        return [_policy(entry) for entry in context]
    raise ValueError(
        f"symbolic_context: expected one entry for each of the {ndim} dimensions, got {context!r}"
    )


def _policy(entry: object) -> Policy | None:
    if entry is None or isinstance(entry, Policy):
        return entry
    if isinstance(entry, Dim):
        return Policy(DYNAMIC, entry.name, entry.min, entry.max)
    if isinstance(entry, int):
        return Policy(STATIC, None, entry, entry)
    if isinstance(entry, str):
        return Policy(entry) if entry in KINDS else _policy(Dim(entry))
    if hasattr(entry, "min") and hasattr(entry, "max"):
        return _from_export(entry)
    raise ValueError(
        f"symbolic_context: expected a name, a Dim, one of {', '.join(map(repr, KINDS))} or None, got {entry!r}"
    )


HINTS: dict[str, str | None] = {"AUTO": None, "STATIC": STATIC, "DYNAMIC": DYNAMIC}


def _from_export(entry: Any) -> Policy | None:
    """A `torch.export.Dim`: a name, `2*batch + 1` of one, or a hint such as `Dim.AUTO`."""
    hint = getattr(getattr(entry, "type", None), "name", None)
    if hint in HINTS:
        kind = HINTS[hint]
        if kind is None and (entry.min, entry.max) == (None, None):
            return None
        return Policy(kind or DUCK, None, entry.min, entry.max)
    root = getattr(entry, "root", None)
    if root is not None:
        return Policy(DYNAMIC, root.__name__, _number(root.min) or None, _number(root.max), entry.fn)
    return Policy(DYNAMIC, entry.__name__, _number(entry.min) or None, _number(entry.max))


def from_torch(kind: object, constraint: object = None) -> Policy:
    """The policy of a `DimDynamic` and a constraint, torch's or ours."""
    name = getattr(kind, "name", str(kind)).lower()
    if name not in KINDS:
        raise ValueError(
            f"expected a size that is {', '.join(KINDS)}, got {kind}; use a DimDynamic of that name"
        )
    return Policy(name, None, *range_of(constraint))


def range_of(constraint: object) -> tuple[int | None, int | None]:
    """The least and the largest size that a constraint allows."""
    bounds = getattr(constraint, "vr", None)
    return (None, None) if bounds is None else (_number(bounds.lower), _number(bounds.upper))


def _number(bound: Any) -> int | None:
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):  # an infinity of sympy
        return None
    return None if abs(number) >= 1 << 62 else number


def size_of(env: ShapeEnv, policy: Policy, example: int, source: object) -> Size:
    """The size of a dimension: a number, or a node of the environment."""
    if policy.kind == STATIC:
        if policy.low is not None and policy.low == policy.high != example:
            raise ValueError(f"{source}: expected {policy.low}, as in symbolic_context, got {example}")
        return example
    if policy.kind == UNBACKED:
        return _unbacked_size(env, policy, source)
    if policy.derive is not None:
        return _derive_size(env, policy, example, source)
    return env.create_symbol(
        example, source, name=policy.name, low=policy.low, high=policy.high,
        duck=policy.kind == DUCK and env.settings.duck_shape, keep_dynamic=policy.kind == DYNAMIC,
    )  # fmt: skip


def _unbacked_size(env: ShapeEnv, policy: Policy, source: object) -> Size:
    """An unbacked size; those with the same name, torch's `shape_id`, are the same symbol."""
    size = env.symbols.unbacked_by_name.get(policy.name or "")
    if size is None:
        size = env.create_unbacked_symint(low=policy.low or 0, high=policy.high, what=str(source)).node
        if policy.name is not None:
            env.symbols.unbacked_by_name[policy.name] = size
    return size


def _derive_size(env: ShapeEnv, policy: Policy, example: int, source: object) -> Size:
    assert policy.derive is not None
    start, step = policy.derive(0), policy.derive(1) - policy.derive(0)
    root, rest = divmod(example - start, step)
    if rest:
        raise ValueError(
            f"{source} is {example}, which is not {step}*{policy.name} + {start} for any {policy.name}"
        )
    size: Size = policy.derive(
        size_of(env, Policy(DYNAMIC, policy.name, policy.low, policy.high), root, source)
    )
    return size


@dataclass(frozen=True, slots=True)
class SizeSource:
    """The source of a size: `x.size(0)`."""

    input: str
    what: str
    dim: int
    variable: str
    """The name of the input, if it is a variable."""

    def __str__(self) -> str:
        return f"{self.input}.item()" if self.what == "item" else f"{self.input}.{self.what}({self.dim})"

    @property
    def symbol_name(self) -> str:
        """`x_0`; empty if the input is not a variable."""
        return f"{self.variable}_{self.dim}" if self.what == "size" and self.variable.isidentifier() else ""


def name_of(source: object) -> str:
    """The name of a source: torch's have a `name`, which is a method in some releases."""
    name = getattr(source, "name", source)
    return str(name() if callable(name) else name)


# --- The sizes and strides of an input, with symbols for dynamic ones ----------------------------


def symbolic_sizes(env: ShapeEnv, t: torch.Tensor, source: Any, context: Any) -> tuple[str, Shape, Shape]:
    """The name of the input, its sizes and its strides: numbers, and nodes of this environment."""
    name = _name(env, source, context)
    variable = getattr(source, "local_name", name)
    default = STATIC if env.settings.assume_static_by_default else DUCK
    shape = tuple(
        _create_once(env, context, policy, example, SizeSource(name, "size", dim, variable))
        for dim, (policy, example) in enumerate(zip(policies(t, context, default), t.shape, strict=True))
    )
    return name, shape, _strides(env, t, shape, name, context)


def packed_strides(shape: Sequence[Size]) -> Shape:
    """Row-major strides, as eager makes them (a size of 0 counts as 1)."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (size if type(size) is int and size > 0 else at_least_one(size))
    strides.reverse()
    return tuple(strides)


def _name(env: ShapeEnv, source: str | None, context: tuple[object, ...] | None) -> str:
    if source is None:
        source = getattr(context, "tensor_source", None)
    return f"input{len(env.inputs.names)}" if source is None else name_of(source)


def _create_once(
    env: ShapeEnv, context: tuple[object, ...] | None, policy: Policy, example: int, source: SizeSource
) -> Size:
    """With a `StatefulSymbolicContext`, a tensor that is converted again gets the same symbols."""
    remembered = getattr(context, "shape_env_to_source_to_symbol_cache", None)
    if remembered is None:
        return size_of(env, policy, example, source)
    sizes = remembered.setdefault(id(env), {})
    if str(source) not in sizes:
        sizes[str(source)] = size_of(env, policy, example, source)
    size: Size = sizes[str(source)]
    return size


def _strides(
    env: ShapeEnv, t: torch.Tensor, shape: Shape, name: str, context: tuple[object, ...] | None
) -> Shape:
    strides = list(_infer_strides(t, shape))
    for dim, kind in enumerate(getattr(context, "dynamic_strides", None) or ()):
        if getattr(kind, "name", "") == "INFER_STRIDE":
            continue
        policy = from_torch(kind)
        if policy.kind in (DYNAMIC, DUCK):
            policy = Policy(policy.kind, low=None)
            strides[dim] = t.stride(dim) if t.stride(dim) < 2 else _create_once(
                env, context, policy, t.stride(dim), SizeSource(name, "stride", dim, name)
            )  # fmt: skip
    return tuple(strides)


def _infer_strides(t: torch.Tensor, shape: Shape) -> Shape:
    """Strides in terms of the sizes, where the example's strides are products of them; numbers otherwise."""
    if t.stride() == packed_strides(t.shape):
        return packed_strides(shape)
    candidates: dict[int, Size] = {1: 1}
    strides: list[Size] = list(t.stride())
    for dim in sorted(range(t.ndim), key=lambda i: (t.stride(i), t.size(i), -i)):
        example = t.stride(dim)
        strides[dim] = candidates.get(example, example)
        candidates.setdefault(example * t.size(dim), strides[dim] * shape[dim])
    return tuple(strides)
