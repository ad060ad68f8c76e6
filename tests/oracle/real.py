"""The oracle for rules: run the real operator on CPU, and say what it did as outcomes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from understudy import FakeTensorMode
from understudy.infer.engine import by_composite, by_decomposition, by_meta_kernel, check_kernel
from understudy.ops.variants import rule_of
from understudy.spec import New, Same, TensorSpec, Value, View, normal
from understudy.spec.call import Call


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a strided tensor."""
    return TensorSpec(
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), dtype=tensor.dtype,
        device=tensor.device, conj=tensor.is_conj(), neg=tensor.is_neg(),
    )  # fmt: skip


def real_outcomes(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Outcomes of a real call, and the specs of its inputs before the call (arguments with specs in them)."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    before = [spec_of(t) for t in tensors]
    spec_args, spec_kwargs = tree_map(
        lambda x: spec_of(x) if isinstance(x, torch.Tensor) else x, (args, kwargs)
    )
    storages = [t.untyped_storage()._cdata for t in tensors]
    with torch.no_grad():
        result = op(*args, **kwargs)

    def outcome(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return Value(value)
        for position, tensor in enumerate(tensors):
            if tensor is value:
                after = spec_of(value)
                return Same(position) if after is before[position] else Same(position, after)
        storage = value.untyped_storage()._cdata
        if storage in storages:
            return View(storages.index(storage), spec_of(value))
        return New(spec_of(value))

    def structure(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(structure(v) for v in value)
        if isinstance(value, list):
            return [structure(v) for v in value]
        return outcome(value)

    return structure(result), spec_args, spec_kwargs


def _ask_other_sources(op: Any) -> Any:
    """Tells the outcomes of an operator without a rule: those of its decomposition, or of torch's meta kernel."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        call, mode = Call.of(op, args, kwargs), FakeTensorMode()
        answers = (source(call, mode) for source in (by_composite, by_meta_kernel, by_decomposition))
        return next((outcomes for outcomes in answers if outcomes is not NotImplemented), NotImplemented)

    return answer


def check_rule(op: Any, *args: Any, **kwargs: Any) -> None:
    """The rule of `op`, or the source that answers in its place, after the checks of dtypes, must return exactly what the
    real call does, its refusals included. What the table of kernels refuses is compared elsewhere."""
    found = rule_of(op) or _ask_other_sources(op)
    spec_args, spec_kwargs = tree_map(
        lambda x: spec_of(x) if isinstance(x, torch.Tensor) else x, (args, kwargs)
    )
    try:
        expected, _, _ = real_outcomes(op, *args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as refusal:
        if " not implemented for '" in str(refusal):
            return  # a kernel that is missing for a dtype: the table of kernels has a comparison of its own
        try:
            check_kernel(Call.of(op, spec_args, spec_kwargs), FakeTensorMode())
            answer = found(*spec_args, **spec_kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return
        assert answer is NotImplemented, (
            f"{op}{spec_args}{spec_kwargs}: eager refuses ({refusal}), the rule says {answer}"
        )
        return
    answer = found(*spec_args, **spec_kwargs)
    assert answer is not NotImplemented, f"{op}: the rule declines {spec_args} {spec_kwargs}"
    assert normal(answer) == expected, (
        f"{op}\n  args {spec_args} {spec_kwargs}\n  real {expected}\n  rule {normal(answer)}"
    )
