"""Where the sweep's calls come from: torch's database of operators with sample inputs, in variants.

A case is one call with its inputs. The inputs are made with a fixed seed, so a case can be named by operator,
dtype, variant and number, and be found again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils._pytree import tree_map

from tests.oracle.compare import tensors_in

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "int64", "bool", "complex64")}

FOREACH: list[Any] = [
    *database.foreach_unary_op_db, *database.foreach_binary_op_db, *database.foreach_pointwise_op_db,
    *database.foreach_reduce_op_db, *database.foreach_other_op_db,
]  # fmt: skip

OPS: dict[str, Any] = {op.full_name: op for op in (*database.op_db, *FOREACH)}


@dataclass(frozen=True)
class Limits:
    """How many samples of an operator each variant takes; None for all of them."""

    function: int | None = None
    backward: int | None = None
    method: int | None = 3
    inplace: int | None = 12
    out: int | None = 4
    out_resized: int | None = 4
    noncontiguous: int | None = 12
    permuted: int | None = 12
    refused: int | None = None
    other_dtypes: int | None = None
    "An upper limit for all dtypes but float32."

    def of(self, variant: str, dtype: str) -> float:
        limit = getattr(self, variant)
        limits = [limit, self.other_dtypes if dtype != "float32" else None]
        return min((x for x in limits if x is not None), default=float("inf"))

    @classmethod
    def of_samples(cls, count: int, other_dtypes: int | None = None) -> Limits:
        """The same for every variant."""
        return cls(count, count, count, count, count, count, count, count, count, other_dtypes)


# Gradients and strides do not depend on the precision: these variants run in the named dtypes only.
DTYPES_OF_VARIANT = {
    "backward": ("float32", "complex64"),
    "method": ("float32",),
    "out": ("float32",),
    "out_resized": ("float32",),
    "noncontiguous": ("float32",),
    "permuted": ("float32",),
    "refused": ("float32",),
}

VARIANTS = (
    "function",
    "method",
    "inplace",
    "out",
    "out_resized",
    "noncontiguous",
    "permuted",
    "backward",
    "refused",
)


@dataclass
class Case:
    """One call to be made for real and with stand-ins."""

    op: str
    dtype: str
    variant: str
    sample: int
    call: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    differentiable_part: Callable[[Any], Any] = field(default=lambda result: result, repr=False)


def dtypes_of(op: Any, chosen: tuple[str, ...]) -> list[str]:
    supported = op.supported_dtypes("cpu")
    return [name for name in chosen if DTYPES[name] in supported]


def cases_of(op: Any, dtype: str, limits: Limits) -> Iterator[Case]:
    """All cases of an operator in one dtype."""
    for variant in VARIANTS:
        if dtype in DTYPES_OF_VARIANT.get(variant, (dtype,)):
            count = limits.of(variant, dtype)
            cases = _MAKERS[variant](op, dtype)
            yield from islice(cases, None if count == float("inf") else int(count))


def seed() -> None:
    # Not `torch.manual_seed`: that formats the stack for each kind of device there might be, and keeps it.
    torch.default_generator.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _samples(op: Any, dtype: str, requires_grad: bool = False) -> Iterator[tuple[int, Any]]:
    seed()
    # Not `op.sample_inputs`: that walks the stack for each sample, to name it should a test of torch's own fail.
    return enumerate(op.sample_inputs_func(op, "cpu", DTYPES[dtype], requires_grad))


def samples_in(op: Any, dtype: str) -> int:
    """How many samples of an operator the database has."""
    return sum(1 for _ in _samples(op, dtype))


def _case(op: Any, dtype: str, variant: str, number: int, call: Any, sample: Any, **more: Any) -> Case:
    return Case(
        op.full_name, dtype, variant, number, call, (sample.input, *sample.args), dict(sample.kwargs), **more
    )


def _calling(attribute: str, variant: str) -> Callable[[Any, str], Iterator[Case]]:
    def make(op: Any, dtype: str) -> Iterator[Case]:
        call = getattr(op, attribute)
        if call is None or (attribute != "op" and call is op.op):
            return
        for number, sample in _samples(op, dtype):
            yield _case(op, dtype, variant, number, call, sample)

    return make


def _with_inputs(
    change: Callable[[torch.Tensor], torch.Tensor], variant: str
) -> Callable[[Any, str], Iterator[Case]]:
    def changed(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def make(op: Any, dtype: str) -> Iterator[Case]:
        for number, sample in _samples(op, dtype):
            case = _case(op, dtype, variant, number, op.op, sample)
            if any(tensor.ndim for tensor in tensors_in((case.args, case.kwargs))):
                case.args, case.kwargs = tree_map(changed, (case.args, case.kwargs))
                yield case

    return make


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each element, and an offset."""
    if tensor.layout != torch.strided or tensor.ndim == 0:
        return tensor
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    wide[..., 1] = tensor.detach().resolve_conj()
    return wide[..., 1]


def reversed_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the dimensions laid out in memory the other way round."""
    if tensor.layout != torch.strided or tensor.ndim < 2:
        return tensor
    order = tuple(range(tensor.ndim - 1, -1, -1))
    return tensor.detach().permute(order).contiguous().permute(order)


def _backward(op: Any, dtype: str) -> Iterator[Case]:
    if not op.supports_autograd or DTYPES[dtype] not in op.supported_backward_dtypes("cpu"):
        return
    for number, sample in _samples(op, dtype, requires_grad=True):
        part = sample.output_process_fn_grad
        yield _case(op, dtype, "backward", number, op.op, sample, differentiable_part=part)


def _out(resized: bool) -> Callable[[Any, str], Iterator[Case]]:
    variant = "out_resized" if resized else "out"

    def make(op: Any, dtype: str) -> Iterator[Case]:
        if not op.supports_out or isinstance(op, database.ForeachFuncInfo):  # where it means something else
            return
        for number, sample in _samples(op, dtype):
            case = _case(op, dtype, variant, number, op.op, sample)
            try:
                result = op.op(*case.args, **case.kwargs)
            except Exception:  # the function variant reports what this is
                continue
            tensors = tensors_in(result)
            if tensors and all(tensor.layout == torch.strided for tensor in tensors):
                case.kwargs["out"] = tree_map(_emptied if resized else _like, result)
                yield case

    return make


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype)


def _refused(op: Any, dtype: str) -> Iterator[Case]:
    if op.error_inputs_func is None:
        return
    seed()
    for number, error in enumerate(op.error_inputs_func(op, "cpu")):
        yield _case(op, dtype, "refused", number, op.op, error.sample_input)


_MAKERS: dict[str, Callable[[Any, str], Iterator[Case]]] = {
    "function": _calling("op", "function"),
    "method": _calling("method_variant", "method"),
    "inplace": _calling("inplace_variant", "inplace"),
    "out": _out(resized=False),
    "out_resized": _out(resized=True),
    "noncontiguous": _with_inputs(gapped, "noncontiguous"),
    "permuted": _with_inputs(reversed_memory, "permuted"),
    "backward": _backward,
    "refused": _refused,
}


def duplicate(tree: Any) -> Any:
    """The tree with copies of its tensors; what shared storage, or was one object, still is."""
    copies: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            can_require = (
                leaf.is_floating_point() or leaf.is_complex()
            )  # `i[::2] = y` makes integers that claim to
            copies[id(leaf)] = _copied(leaf, storages).requires_grad_(leaf.requires_grad and can_require)
        return copies[id(leaf)]

    return tree_map(copy, tree)


def _copied(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        return tensor.clone()
    if tensor.is_conj():
        return _copied(tensor.conj(), storages).conj()
    if tensor.is_neg():
        return torch._neg_view(_copied(torch._neg_view(tensor), storages))
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
