"""`infer(call, runner)` runs the `STAGES` in order, checks and then sources, and makes a plan of the first answer.

Each stage gets a call and a runner, and returns outcomes, or `NotImplemented` to leave the call to the next one. The runner
(the mode) runs Python functions on stand-ins: so this layer can use decompositions and registered fakes without importing
the layer of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from understudy import _torch
from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from understudy.infer.cache import Cache
from understudy.infer.kernels import run_meta_kernel, run_real_kernel, with_fixed_sizes
from understudy.infer.plan import Plan
from understudy.ops.kernel_tables.refusals import check_dtypes
from understudy.ops.registry import RECORDS, Registered, record_of, user_rule
from understudy.ops.traits import caching
from understudy.ops.traits.devices import device_of, refuse_without_kernel
from understudy.spec import New, Same, TensorSpec, normal
from understudy.spec.call import Call, flat
from understudy.spec.sparse import count_bytes

STRIDED = torch.strided
FALLBACK_LIMIT = 64 << 20
"""The largest total size of the inputs, in bytes, with which `by_real_kernel` runs an operator."""
SPARSE_LIMIT = 1 << 30
"""The same for sparse inputs: most operators have no rule for them, and gradients of embeddings are large."""


class FunctionRunner(Protocol):
    """Runs a function on stand-ins for the call's inputs, and returns its outcomes, or NotImplemented if it does."""

    allow_fallback_kernels: bool

    def run_on_fakes(self, function: Callable[..., object], call: Call) -> Any: ...


Source = Callable[[Call, FunctionRunner], Any]


def by_rule(call: Call, runner: FunctionRunner) -> Any:
    record = RECORDS.get(id(call.op)) or record_of(call.op)
    rule = record.effective_rule
    if rule is None:
        return NotImplemented
    for spec in call.inputs:
        if spec.layout is not STRIDED:
            return NotImplemented
    answer = rule(*call.args, **call.kwargs)
    if type(answer) is TensorSpec:
        return New(answer)
    return NotImplemented if answer is NotImplemented else normal(answer)


def by_registered_fake(call: Call, runner: FunctionRunner) -> Any:
    function = _torch.registered_fake(call.op)
    return NotImplemented if function is None else runner.run_on_fakes(function, call)


def is_sparse_call(call: Call) -> bool:
    """Torch's meta kernels and decompositions support few sparse layouts; the real kernel on zeros is used instead."""
    return any(spec.sparse is not None for spec in call.inputs)


def by_refusal(call: Call, runner: FunctionRunner) -> Any:
    """Raise for data-dependent operators, by their tags."""
    tags = call.op.tags
    if torch.Tag.data_dependent_output in tags:
        raise DataDependentOutputException(
            f"{call.op} is data-dependent: it reads values of tensors without data", func=call.op
        )
    if record_of(call.op).has_dynamic_shape and not _keeps_entries(call):
        raise DynamicOutputShapeException(
            f"the size of the result of {call.op} depends on values of tensors without data", func=call.op
        )
    return NotImplemented


def _keeps_entries(call: Call) -> bool:
    """Whether it converts a sparse tensor to a layout with the same entries: only blocks, and entries that occur twice,
    depend on where they are."""
    if not is_sparse_call(call) or record_of(call.op).packet not in (
        "_to_sparse",
        "_to_sparse_csr",
        "_to_sparse_csc",
    ):
        return False
    spec = call.inputs[0]
    has_blocks = bool(spec.sparse.block) or call.kwargs.get("blocksize") is not None
    return (
        spec.sparse.is_coalesced
        and not has_blocks
        and spec.ndim == spec.sparse.sparse_dim + spec.sparse.dense_dim
    )


def by_written_decomposition(call: Call, runner: FunctionRunner) -> Any:
    """Run the decomposition for symbolic sizes. In inference mode, operators arrive here that it replaces elsewhere."""
    function = record_of(call.op).decomposition if any(spec.is_symbolic for spec in call.inputs) else None
    return NotImplemented if function is None else runner.run_on_fakes(function, call)


def by_composite(call: Call, runner: FunctionRunner) -> Any:
    """Run the decomposition that eager itself uses (CompositeImplicitAutograd)."""
    if not _torch.has_composite_kernel(call.op):
        return NotImplemented
    return runner.run_on_fakes(functools.partial(_torch.decompose, call.op), call)


def by_meta_kernel(call: Call, runner: FunctionRunner) -> Any:
    if is_sparse_call(call) or not _torch.has_meta_kernel(call.op):
        return NotImplemented
    return run_meta_kernel(call)


def by_decomposition(call: Call, runner: FunctionRunner) -> Any:
    function = None if is_sparse_call(call) else _torch.decomposition_of(call.op)
    return NotImplemented if function is None else runner.run_on_fakes(function, call)


def by_fixed_sizes(call: Call, runner: FunctionRunner) -> Any:
    """For kernels that can't take symbols: specialise the sizes to their hints, with guards."""
    if not any(spec.is_symbolic for spec in call.inputs):
        return NotImplemented
    fixed = with_fixed_sizes(call)
    answer = by_meta_kernel(fixed, runner)
    return by_real_kernel(fixed, runner) if answer is NotImplemented else answer


def by_real_kernel(call: Call, runner: FunctionRunner) -> Any:
    """The last resort: run the real operator on zeros, if that is small and safe."""
    op = call.op
    if not runner.allow_fallback_kernels:
        raise UnsupportedOperatorException(f"{op} has no rule, and allow_fallback_kernels is off", func=op)
    if not _torch.is_builtin_namespace(op):
        if _torch.returns_nothing(op) and _torch.is_mutable(op):
            return normal(None)  # it only writes to its inputs, and returns nothing
        if (given := _torch.returned_arguments(op)) is not None:
            return _returned_arguments(call, given)
        raise UnsupportedOperatorException(
            f"{op} has no fake implementation: register one with "
            f"torch.library.register_fake({op.name().split('.')[0]!r}) or understudy.rule({op.name()!r})",
            func=op,
        )
    if torch.Tag.inplace_view in op.tags:
        raise UnsupportedOperatorException(f"{op} changes metadata in place and has no rule", func=op)
    size = sum(
        spec.numel * spec.itemsize if spec.sparse is None else count_bytes(spec) for spec in call.inputs
    )
    limit = SPARSE_LIMIT if is_sparse_call(call) else FALLBACK_LIMIT
    if size > limit:
        raise UnsupportedOperatorException(
            f"{op} has no rule, and running it for real on zeros would take {size / 2**20:,.0f} MiB "
            f"(the limit is {limit >> 20} MiB)",
            func=op,
        )
    return run_real_kernel(call)


def _returned_arguments(call: Call, names: list[str]) -> Any:
    """Outcomes of an operator that returns the arguments it writes to, by its schema: `op(Tensor(a!) x) -> Tensor(a!)`."""
    positions: dict[str, int] = {}
    count = 0
    for name, value in [*zip(_torch.argument_names(call.op), call.args, strict=False), *call.kwargs.items()]:
        positions[name] = count
        count += len(flat(TensorSpec, (value,), {}))
    outcomes = tuple(Same(positions[name]) for name in names)
    return outcomes[0] if len(outcomes) == 1 else outcomes


SOURCES: tuple[Source, ...] = (
    by_rule,
    by_registered_fake,
    by_refusal,
    by_written_decomposition,
    by_composite,
    by_meta_kernel,
    by_decomposition,
    by_fixed_sizes,
    by_real_kernel,
)


cache = Cache()
"""The cache of the process: plans do not depend on the mode."""


def mark_pure(op: Any, *, pure: bool = True) -> None:
    """Allow plans of a custom operator (an overload, or its name) to be cached.

    The metadata of its results must depend only on the metadata of the inputs and the other arguments, not on global
    state.
    """
    caching.pure.replace(pure or None, op)
    if not pure:
        cache.forget_plans()


def rule(*ops: _torch.OpOverload | str) -> Callable[[Registered], Registered]:
    """Register the decorated pure function as the answer for these operators (overloads, or their names).

        @rule("mylib::pooled")
        def pooled(x: TensorSpec, size: int) -> TensorSpec:
            return x.like((x.shape[0] // size, *x.shape[1:]))

    It takes precedence over every other source, for operators of torch as well. It may return `NotImplemented` to leave
    a call to the other sources.
    """

    def register(function: Registered) -> Registered:
        user_rule.replace(function, *ops)
        cache.forget_plans()
        return function

    return register


def check_devices(call: Call, runner: FunctionRunner) -> Any:
    """Raise if the devices of the inputs do not match."""
    inputs = call.inputs
    device = inputs[0].device if inputs else None
    for spec in inputs:
        if spec.device is not device:
            device_of(call)
            break
    return NotImplemented


def check_kernel(call: Call, runner: FunctionRunner) -> Any:
    """Raise if eager has no CPU kernel for the operator, or not for these dtypes."""
    record = RECORDS.get(id(call.op)) or record_of(call.op)
    if record.lacks_cpu_kernel:
        refuse_without_kernel(call)
    row = record.kernel_row
    if row is not None:
        check_dtypes(call, row)
    return NotImplemented


STAGES: tuple[Source, ...] = (check_devices, check_kernel, *SOURCES)
"""All that an inference does before it makes the plan: checks, then sources."""


def infer(call: Call, runner: FunctionRunner) -> Plan:
    """The plan of a call, from the first stage that answers."""
    for stage in STAGES:
        outcomes = stage(call, runner)
        if outcomes is not NotImplemented:
            return Plan.of(call, outcomes)
    raise UnsupportedOperatorException(
        f"{call.op} has no fake implementation (torch.library.register_fake)", func=call.op
    )
