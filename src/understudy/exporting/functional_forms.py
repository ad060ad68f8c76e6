"""Operators that write, as functions that compute the new values and copy them into the written tensors.

functional_form    operator → such a function
FunctionalTable    a decomposition table that includes the functional forms
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import UnderstudyError
from understudy.ops.registry import Slot, declare, record_of

aten = torch.ops.aten
Form = Callable[..., Any]
COPY = aten.copy_.default


class NotFunctionalError(UnderstudyError, RuntimeError):
    """A write that can't be expressed by operators without writes."""


def _derive(op: OpOverload) -> Form | None:
    """By the schema: the overload without `_`, without `out=`, or with the written arguments among its results."""
    record = record_of(op)
    if op is COPY or not record.is_mutable or record.changes_metadata:
        return None
    functional = find_functional(op)
    if functional is None:
        return None
    return _write_results(op, functional)


functional_form: Slot[Form] = declare("functional_form", Slot(derive=lambda record: _derive(record.op)))
"""The call without writes, except copies into its written arguments."""


def find_functional(op: OpOverload) -> OpOverload | None:
    """Return the overload with the same arguments that writes nothing, or None."""
    written = {name for _, name in _torch.written_arguments(op)}
    out_names = {a.name for a in op._schema.arguments if a.kwarg_only and a.name in written}
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in out_names]
    plain = op.overloadpacket.__name__
    namespace = getattr(torch.ops, op.namespace)
    for name in (
        plain,
        plain.removesuffix("_"),
        f"{plain}_functional",
        f"{plain.removesuffix('_')}_functional",
    ):
        family = getattr(namespace, name, None)
        for overload in family.overloads() if family is not None else ():
            found = getattr(family, overload)
            arguments = [(a.name, str(a.type)) for a in found._schema.arguments]
            if arguments == wanted and not record_of(found).is_mutable:
                return found
    return None


def _write_results(op: OpOverload, functional: OpOverload) -> Form:
    names = [name for _, name in _torch.written_arguments(op)]
    positions = {a.name: position for position, a in enumerate(op._schema.arguments)}
    is_out = record_of(op).has_out
    returns = len(op._schema.returns)

    def run(*args: object, **kwargs: object) -> Any:
        targets = [
            args[positions[name]] if positions[name] < len(args) else kwargs.get(name) for name in names
        ]
        if is_out:
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
        results = functional(*args, **kwargs)
        values = list(results) if isinstance(results, (tuple, list)) else [results]
        # In-place and out= variants write all results; a `_functional` variant returns them after its other results.
        into = values[-len(targets) :] if len(values) >= len(targets) else values
        if len(targets) == 1 and isinstance(targets[0], (list, tuple)):
            into = [values]
        for target, value in zip(targets, into, strict=True):
            _copy_all(target, value, op)
        rest = values[:returns] if len(values) > len(targets) else targets
        return rest[0] if returns == 1 else None if returns == 0 else tuple(rest)

    return run


def _copy_all(target: Any, value: Any, op: OpOverload) -> None:
    if target is None:
        return
    if isinstance(target, (list, tuple)):
        for one, new in zip(target, value, strict=True):
            _copy_all(one, new, op)
        return
    if len(target.shape) != len(value.shape):
        raise NotFunctionalError(
            f"{op} resizes the tensor it writes to, from {list(target.shape)} to {list(value.shape)}, which a "
            "program without writes can't express; pass a tensor of the right size, or use the result"
        )
    target.copy_(value)


# --- Operators whose schema is not enough ----------------------------------------------------------------------------


@functional_form("normal_")
def normal_(target: Any, mean: float = 0, std: float = 1, *, generator: object = None) -> Any:
    return target.copy_(aten.normal_functional(target, mean, std, generator=generator))


@functional_form("native_batch_norm")
def native_batch_norm(
    input: object,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if running_mean is None:
        return aten._native_batch_norm_legit.no_stats(input, weight, bias, training, momentum, eps)
    if not training:
        return aten._native_batch_norm_legit_no_training(
            input, weight, bias, running_mean, running_var, momentum, eps
        )
    *results, mean, var = aten._native_batch_norm_legit_functional(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    running_mean.copy_(mean)
    running_var.copy_(var)
    return tuple(results)


class FunctionalTable(Mapping[Any, Form]):
    """A decomposition table that also contains functional forms."""

    def __init__(self, table: Mapping[Any, Form]) -> None:
        self._table = table

    def __contains__(self, op: object) -> bool:
        return op in self._table or (isinstance(op, OpOverload) and record_of(op).functional_form is not None)

    def __getitem__(self, op: object) -> Form:
        form = record_of(op).functional_form if isinstance(op, OpOverload) else None
        return self._table[op] if form is None or op in self._table else form

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)
