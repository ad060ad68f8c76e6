"""Rules of in-place and out= variants, derived from those of the functional ones, and the traits in which variants
differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import eq
from typing import Any, NamedTuple

import torch

from understudy._torch import OpOverload, operator_named, uncounted_writes
from understudy.errors import ArgumentError, DtypeError, OperatorError, ShapeMismatch
from understudy.ops.registry import OpFacts, Rule, derives, record_of
from understudy.ops.shared.decompositions import decomposition
from understudy.shapes.node import Sizes
from understudy.shapes.sizes import from_torch, has_unbacked, is_provably_equal
from understudy.spec import Changed, New, Same, TensorSpec, normal, same_shape
from understudy.spec.call import flat

OPTIONS = ("dtype", "layout", "device", "pin_memory")

exact_out = OpFacts.exact_out

CONTIGUOUS_OUT = frozenset(
    {"_fft_c2c.out", "_fft_c2r.out", "_fft_r2c.out", "cholesky.out", "cholesky_solve.out"}
)
"""`out=` is resized to contiguous strides."""
CONTIGUOUS_UNLESS_EMPTY_OUT = frozenset(
    {"cholesky_inverse.out", "geqrf.a", "linalg_householder_product.out", "linalg_lstsq.out", "ormqr.out"}
)
"""`out=` of another size is resized to contiguous strides if it has elements; an empty one gets those of the result."""
CONJUGATED_OUT = frozenset({"linalg_lu_solve.out", "_linalg_solve_ex.result"})
"""A result with the conjugation bit is computed in `out=`, if that has its strides."""
KEPT_OUT = frozenset(
    {"native_batch_norm.out", "_native_batch_norm_legit.out", "_native_batch_norm_legit.no_stats_out"}
)
"""`out=` of statistics that are not computed is unchanged."""
DECIDING_OUT = frozenset({"sum.IntList_out", "prod.int_out", "cumsum.out", "cumprod.out"})
"""`out=` decides the dtype of the computation, and must have the dtype of the argument `dtype`."""
COUNTED_OUT = frozenset({"arange", "range", "linspace", "logspace"})
"""`out=` of all overloads keeps its shape if it has as many elements as the result."""
IN_PLACE_ON_EXPANDED = frozenset({
    "_index_put_impl_", "baddbmm_", "conj_physical_", "index_fill_", "index_put_", "masked_fill_", "threshold_", "tril_",
    "triu_",
})  # fmt: skip
"""These may write into an expanded tensor in place."""
EXACT = """
    _native_batch_norm_legit addbmm addmm addmv all amax amin aminmax any argmax argmin avg_pool2d
    baddbmm bmm conj_physical cummax cummin dot gather histc index_add index_copy index_reduce
    index_select linalg_cross linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex
    linalg_lu_solve linalg_qr linalg_solve_triangular linalg_vector_norm linear logcumsumexp lu_unpack
    mm mv narrow_copy native_batch_norm ormqr renorm scatter_add signbit softshrink take tril triu vdot
""".split()
"""Their `out` overload accepts only the dtype of the result."""
EXACT_NAMED = """
    _linalg_det.result _linalg_eigh.eigenvalues _linalg_slogdet.sign _linalg_solve_ex.result
    _linalg_svd.U all.all_out any.all_out bucketize.Tensor_out isin.Tensor_Tensor_out kthvalue.values
    linalg_cholesky_ex.L linalg_inv_ex.inverse log_softmax.int_out max.dim_max min.dim_min mode.values
    round.decimals_out scatter.reduce_out scatter.src_out scatter_reduce.two_out searchsorted.Tensor_out
    softmax.int_out sort.values topk.values triangular_solve.X
    _log_softmax.out _softmax.out all.dims_out any.dims_out bucketize.Scalar_out isin.Scalar_Tensor_out
    isin.Tensor_Scalar_out median.dim_values nanmedian.dim_values scatter.value_out
    scatter.value_reduce_out searchsorted.Scalar_out sort.values_stable
""".split()
"""The same for other overloads."""
EXPANDED_OUT = frozenset(
    """
    bmm.out cummax.out cummin.out full.out histc.out mv.out ones.out
    std.correction_out tril.out triu.out var.correction_out zeros.out
""".split()
)
"""These write into expanded tensors without an error."""
exact_out.mark(*(f"{name}.out" for name in EXACT), *EXACT_NAMED)
exact_out.mark(
    "linalg_norm.out", "linalg_norm.ord_str_out", "linalg_matrix_norm.out", "linalg_matrix_norm.str_ord_out",
    "nuclear_norm.out", "nuclear_norm.dim_out",
)  # fmt: skip


def rule_of(op: OpOverload) -> Rule | None:
    """The rule for an operator: the user's, ours, or one derived from its functional variant."""
    return record_of(op).effective_rule


@derives(OpFacts.effective_rule)
def _find_rule(record: OpFacts) -> Rule | None:
    return record.user_rule or record.rule or _derive_rule(record.op)


def functional_overload(op: OpOverload) -> OpOverload | None:
    """The operator that takes the same arguments and returns new tensors, for an in-place or out= variant."""
    out_names = _out_names(op)
    packet = op.name().partition(".")[0]
    if not out_names:
        if not packet.endswith("_") or packet.endswith("__"):
            return None
        packet = packet[:-1]
    return next((functional for functional, _ in _functional_overloads(op, packet, out_names)), None)


def _out_names(op: OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write]


def _derive_rule(op: OpOverload) -> Rule | None:
    out_names = _out_names(op)
    packet = op.name().partition(".")[0]
    if out_names:
        functional, left_out = _functional_variant(op, packet, out_names)
        return _out_rule(functional, out_names, left_out, _OutVariant.of(op)) if functional else None
    if packet.endswith("_") and not packet.endswith("__"):
        functional, _ = _functional_variant(op, packet[:-1], [])
        return (
            _in_place_rule(functional, packet, record_of(op).packet in IN_PLACE_ON_EXPANDED)
            if functional
            else None
        )
    return None


def _functional_variant(op: OpOverload, packet: str, out_names: list[str]) -> tuple[Rule | None, list[str]]:
    """The rule of the operator that takes the same arguments, without `out_names`, and returns new tensors.

    A factory's out= variant takes no dtype and device: the second result names the arguments that it lacks.
    """
    for functional, left_out in _functional_overloads(op, packet, out_names):
        found = record_of(functional).user_rule or record_of(functional).rule
        if found is not None:
            return found, left_out
    return None, []


def _functional_overloads(
    op: OpOverload, packet: str, out_names: list[str]
) -> Iterator[tuple[OpOverload, list[str]]]:
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in out_names]
    names = {name for name, _ in wanted}
    namespace, _, plain = packet.partition("::")
    family = getattr(getattr(torch.ops, namespace), plain, None)
    for functional in (getattr(family, overload) for overload in family.overloads()) if family else ():
        arguments = functional._schema.arguments
        left_out = [a.name for a in arguments if out_names and a.name in OPTIONS and a.name not in names]
        if [(a.name, str(a.type)) for a in arguments if a.name not in left_out] == wanted:
            yield functional, left_out


def _in_place_rule(functional: Rule, packet: str, may_write_expanded: bool) -> Rule:
    def in_place(target: TensorSpec, *args: object, **kwargs: object) -> Same:
        result = functional(target, *args, **kwargs)
        if result is NotImplemented:
            return NotImplemented
        outcome = normal(result)
        if not isinstance(outcome, New):
            return NotImplemented
        return write_in_place(packet, target, outcome.spec, may_be_expanded=may_write_expanded)

    return in_place


def write_in_place(
    name: str, target: TensorSpec, result: TensorSpec, *, may_be_expanded: bool = False
) -> Same:
    """`target`, the first input, after this result was written into it."""
    if not same_shape(result.shape, target.shape):
        raise ShapeMismatch(
            f"{name}: the result has shape {list(result.shape)}, which does not match {target} in place"
        )
    check_castable(name, result.dtype, target.dtype)
    if not may_be_expanded:
        check_no_overlap(name, target)
    return Same(0)


def check_no_overlap(what: str, target: TensorSpec) -> None:
    """Raise for a write into an expanded tensor, in which several elements share memory."""
    for size, step in zip(target.shape, target.stride, strict=True):
        if step == 0 and size > 1:
            if any(other == 0 for other in target.shape):
                return  # without elements, nothing overlaps
            raise ArgumentError(f"{what}: can't write into {target}, which is expanded; clone it first")


class _OutVariant(NamedTuple):
    """How an out= variant treats its `out` tensor."""

    resizes_contiguous: bool
    "For variants that torch generates from the functional one: resized first, then copied into."
    resizes_used_contiguous: bool
    "Only an empty `out` gets the strides of the result."
    keeps_unused: bool
    takes_conj: bool
    exact: bool
    takes_expanded: bool
    checks_before_resize: bool
    decides_dtype: bool
    counts_elements: bool

    @staticmethod
    def of(op: OpOverload) -> _OutVariant:
        record = record_of(op)
        generated = torch.Tag.generated in op.tags
        name = record.name.removeprefix("aten::")
        return _OutVariant(
            resizes_contiguous=generated or name in CONTIGUOUS_OUT,
            resizes_used_contiguous=name in CONTIGUOUS_UNLESS_EMPTY_OUT,
            keeps_unused=name in KEPT_OUT,
            takes_conj=name in CONJUGATED_OUT,
            exact=generated or record.exact_out is not None,
            takes_expanded=name in EXPANDED_OUT,
            checks_before_resize=record.is_pointwise,
            decides_dtype=name in DECIDING_OUT,
            counts_elements=record.packet in COUNTED_OUT,
        )


def _out_rule(functional: Rule, out_names: list[str], left_out: list[str], variant: _OutVariant) -> Rule:
    def out_variant(*args: object, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in out_names]
        of_out = {name: getattr(outs[0], name) for name in left_out if name in ("dtype", "device")}
        if variant.decides_dtype:
            dtype = kwargs.setdefault("dtype", None)
            if dtype not in (None, outs[0].dtype):
                raise DtypeError(f"out=: expected a tensor of dtype {dtype}, got {outs[0]}")
            kwargs["dtype"] = outs[0].dtype
        result = functional(*args, **kwargs, **of_out)
        if result is NotImplemented:
            return NotImplemented
        first = len(flat(TensorSpec, args, kwargs))
        if isinstance(outs[0], (list, tuple)):
            return _list_written(normal(result), outs[0], first, variant)
        outcomes = normal(result)
        results = outcomes if isinstance(outcomes, tuple) else (outcomes,)
        if len(results) != len(outs) or not all(isinstance(r, New) for r in results):
            return NotImplemented
        written = tuple(
            _written(result.spec, out, first + position, variant)
            for position, (result, out) in enumerate(zip(results, outs, strict=True))
        )
        return written if len(written) > 1 else written[0]

    return out_variant


RESIZED_BY_INTEGERS = """
    inner.out kron.out linalg_cond.out linalg_cond.p_str_out linalg_matrix_norm.out linalg_matrix_norm.str_ord_out
    linalg_matrix_rank.atol_rtol_float_out linalg_matrix_rank.atol_rtol_tensor_out linalg_matrix_rank.out
    linalg_matrix_rank.out_tol_tensor linalg_multi_dot.out linalg_norm.ord_str_out linalg_norm.out
    linalg_pinv.atol_rtol_float_out linalg_pinv.out linalg_pinv.out_rcond_tensor linalg_tensorinv.out linalg_tensorsolve.out
    linalg_vecdot.out nuclear_norm.dim_out nuclear_norm.out special_ndtr.out tensordot.out
""".split()
"""Composites that copy their result into `out=`, after C++ has resized it with plain integers."""
COMPUTED_IN_OUT = ("aten::kron", "aten::linalg_multi_dot", "aten::linalg_vecdot")
"""Composites that compute their result in `out=`: refused if an argument requires grad."""

WRITTEN_UNCOUNTED = ("aten::kron",)
"""Composites that write through a view with a separate version counter."""


def _decompose_out(op: OpOverload) -> Rule:
    packet = op.name().partition(".")[0]
    functional, _ = next(_functional_overloads(op, packet, ["out"]))
    is_exact = record_of(op).exact_out

    def decompose(*args: object, out: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if packet == "aten::inner" and any(isinstance(arg, torch.Tensor) and arg.dim() == 0 for arg in args):
            return torch.mul(*args, out=out)  # type: ignore[arg-type]
        result = functional(*args, **kwargs)
        if result.requires_grad and packet in COMPUTED_IN_OUT:
            raise OperatorError(f"{packet}: out= does not support autograd, but an argument requires grad")
        if is_exact and result.dtype is not out.dtype:
            raise DtypeError(f"out=: expected a tensor of dtype {result.dtype}, got {out.dtype}")
        return copy_into_out(result, out, is_counted=packet not in WRITTEN_UNCOUNTED)

    return decompose


def copy_into_out(result: torch.Tensor, out: torch.Tensor, is_counted: bool = True) -> torch.Tensor:
    check_castable("out=", result.dtype, out.dtype)
    if not same_shape(tuple(map(from_torch, result.shape)), tuple(map(from_torch, out.shape))):
        with uncounted_writes(out):  # resized by a kernel, which does not count as a write
            out.resize_(result.shape)
    target = out if is_counted else torch.ops.aten._unsafe_view(out, out.shape)
    target.copy_(result)
    return out


for _name in RESIZED_BY_INTEGERS:
    decomposition.register(_decompose_out(operator_named(f"aten::{_name}")), _name)


def _list_written(results: Any, outs: Sequence[TensorSpec], first: int, variant: _OutVariant) -> Any:
    """The outcomes of a variant with a list of outputs, which returns nothing."""
    if not isinstance(results, list) or len(results) != len(outs):
        raise ArgumentError(f"out=: expected {len(results)} tensors, got {len(outs)}")
    pairs = enumerate(zip(results, outs, strict=True))
    return Changed(tuple(_written(result.spec, out, first + at, variant) for at, (result, out) in pairs))


def write_out(op: str, result: TensorSpec, out: TensorSpec, of: int) -> Same:
    """The outcome of an out= variant for its `out` tensor, input `of`: for variants that have their own rule."""
    return _written(result, out, of, _OutVariant.of(operator_named(f"aten::{op}")))


def _written(result: TensorSpec, out: TensorSpec, of: int, variant: _OutVariant) -> Same:
    if variant.exact and result.dtype is not out.dtype:
        raise DtypeError(f"out=: expected a tensor of dtype {result.dtype}, got {out}")
    check_castable("out=", result.dtype, out.dtype)
    if variant.keeps_unused and result.shape == (0,):
        return Same(of)
    fits = result.numel == out.numel if variant.counts_elements else _fits(result.shape, out.shape)
    if (fits and not variant.takes_expanded) or variant.checks_before_resize:
        check_no_overlap("out=", out)
    takes_conj = variant.takes_conj and result.conj and not out.conj
    if fits:
        # The conjugation bit is set on an `out` that the result is computed in, not on one that it is copied into.
        takes_conj = takes_conj and all(map(eq, result.stride, out.stride))
        return Same(of, out.as_view(out.shape, out.stride, conj=True) if takes_conj else None)
    is_contiguous = variant.resizes_contiguous or (variant.resizes_used_contiguous and not out.is_empty)
    stride = None if is_contiguous else result.stride  # the offset is kept
    conj = out.conj or takes_conj
    return Same(
        of,
        TensorSpec(
            result.shape, stride, out.offset, dtype=out.dtype, device=out.device, conj=conj, neg=out.neg
        ),
    )


def _fits(shape: Sizes, given: Sizes) -> bool:
    """Whether `out` keeps its shape. With unbacked sizes it takes the shape of the result, which has to be the same."""
    if has_unbacked(*shape, *given):
        return len(shape) == len(given) and all(map(is_provably_equal, shape, given))
    return same_shape(shape, given)


def check_castable(what: str, source: torch.dtype, target: torch.dtype) -> None:
    if not torch.can_cast(source, target):
        raise DtypeError(f"{what}: a result of {source} can't be cast to {target}")
