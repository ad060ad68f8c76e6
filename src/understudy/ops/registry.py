"""The table of rules: operator name → pure function from specs to outcomes.

    @rule("mm")
    def mm(a, b): ...

Names are the dispatcher's (`aten::mm`, `aten::add.Tensor`); `aten::` may be left out. A rule is called with
the arguments of the operator call in which every tensor is replaced by its `TensorSpec`, so its parameters
and their defaults are those of the operator's schema. It returns outcomes (bare specs stand for new
tensors), raises an `OperatorError` for what eager would refuse, or returns `NotImplemented` for a case
that it leaves to the next source.

In-place and out= variants need no rule of their own: they are derived here from the functional one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from understudy._torch import OpOverload
from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.shapes.sizes import lies_in_data, surely_equal
from understudy.spec import Changed, New, Same, TensorSpec, normal, same_shape

Rule = Callable[..., Any]
_rules: dict[str, Rule] = {}
_from_users: dict[str, Rule] = {}
user_rules: Mapping[str, Rule] = MappingProxyType(_from_users)
_derived_rules: dict[str, Rule | None] = {}  # found by schema, kept until rules are added
_exact_out: set[str] = set()  # out= variants that take nothing but the very dtype of their result
_expanded_out: set[str] = set()  # out= variants that write into expanded tensors
RESIZED_CONTIGUOUS = frozenset({"aten::_fft_c2c.out", "aten::_fft_c2r.out", "aten::_fft_r2c.out",
                                "aten::cholesky.out", "aten::cholesky_solve.out"})  # fmt: skip
"""Out= variants that resize to contiguous strides before they look at those of their result."""
CHECK_BEFORE_RESIZE = frozenset({"aten::index_select.out"})
"""Out= variants, beside those of elementwise operators, that refuse an expanded tensor even if it is to be resized."""
DTYPE_OF_OUT = frozenset(
    f"aten::{name}" for name in ("sum.IntList_out", "prod.int_out", "cumsum.out", "cumprod.out")
)
"""Out= variants that compute in the dtype of the tensor that they are given; a dtype that is asked for has to be that."""
ASKED_DTYPE_OF_OUT = DTYPE_OF_OUT | {"aten::mean.out", "aten::mean.dtype_out"}
"""Out= variants that refuse a tensor of another dtype than was asked for."""
OPTIONS = ("dtype", "layout", "device", "pin_memory")
WRITE_EXPANDED = frozenset(
    f"aten::{name}_"
    for name in ("_index_put_impl", "baddbmm", "conj_physical", "index_fill", "index_put", "masked_fill",
                 "threshold", "tril", "triu")
)  # fmt: skip
"""In-place operators that eager lets write into an expanded tensor."""


def full_name(op: Any) -> str:
    name = op if isinstance(op, str) else op.name()
    name = name.removesuffix(".default")
    return name if "::" in name else f"aten::{name}"


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of these operators (names or `OpOverload`s)."""

    def register(function: Rule) -> Rule:
        for op in ops:
            _rules[full_name(op)] = function
        _derived_rules.clear()
        return function

    return register


def user_rule(*ops: Any) -> Callable[[Rule], Rule]:
    """As `rule`, for users: comes before every other source, and replaces a rule of ours."""

    def register(function: Rule) -> Rule:
        for op in ops:
            _from_users[full_name(op)] = function
        _derived_rules.clear()
        return function

    return register


def exact_out(*ops: str) -> None:
    """These out= variants refuse a tensor of another dtype, even if the result could be cast to it."""
    _exact_out.update(full_name(op) for op in ops)


def write_expanded(*ops: str) -> None:
    """These out= variants write into a tensor of which several elements are one place in memory."""
    _expanded_out.update(full_name(op) for op in ops)


def rule_of(op: OpOverload) -> Rule | None:
    """The rule for an operator: the user's, ours, or one derived from its functional variant."""
    name = op.name()
    found = _from_users.get(name) or _rules.get(name)
    if found is not None:
        return found
    if name not in _derived_rules:
        _derived_rules[name] = _derive_rule(op, name)
    return _derived_rules[name]


def rule_named(name: str) -> Rule:
    """The rule of ours that was registered under this name; for rules that are made of other rules."""
    return _rules[full_name(name)]


def _derive_rule(op: OpOverload, name: str) -> Rule | None:
    out_names = [
        a.name for a in op._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write
    ]
    packet = name.partition(".")[0]
    if out_names:
        functional, left_out = _functional_variant(op, packet, out_names)
        return _out_rule(functional, out_names, left_out, _OutVariant.of(op, name)) if functional else None
    if packet.endswith("_") and not packet.endswith("__"):
        functional, _ = _functional_variant(op, packet[:-1], [])
        return _in_place_rule(functional, packet) if functional else None
    return None


def _functional_variant(op: OpOverload, packet: str, out_names: list[str]) -> tuple[Rule | None, list[str]]:
    """The rule of the operator that takes the same arguments, without `out_names`, and returns new tensors.

    A factory's out= variant takes no dtype and device: the second answer names what it leaves out.
    """
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in out_names]
    names = {name for name, _ in wanted}
    namespace, _, plain = packet.partition("::")
    family = getattr(getattr(torch.ops, namespace), plain, None)
    for variant in (getattr(family, overload) for overload in family.overloads()) if family else ():
        found = _from_users.get(variant.name()) or _rules.get(variant.name())
        if found is None:
            continue
        arguments = variant._schema.arguments
        left_out = [a.name for a in arguments if out_names and a.name in OPTIONS and a.name not in names]
        if [(a.name, str(a.type)) for a in arguments if a.name not in left_out] == wanted:
            return found, left_out
    return None, []


def _in_place_rule(functional: Rule, packet: str) -> Rule:
    def in_place(target: TensorSpec, *args: Any, **kwargs: Any) -> Any:
        result = functional(target, *args, **kwargs)
        if result is NotImplemented:
            return NotImplemented
        outcome = normal(result)
        if not isinstance(outcome, New):
            return NotImplemented
        if not same_shape(outcome.spec.shape, target.shape):
            raise ShapeMismatch(
                f"{packet}: the result has shape {list(outcome.spec.shape)}, "
                f"which does not fit into {target}, written in place"
            )
        check_castable(packet, outcome.spec.dtype, target.dtype)
        if packet not in WRITE_EXPANDED:
            check_no_overlap(packet, target)
        return Same(0)

    return in_place


def check_no_overlap(what: str, target: TensorSpec) -> None:
    """Refuse to write into an expanded tensor, where several elements are one place in memory."""
    for size, step in zip(target.shape, target.stride, strict=True):
        if step == 0 and size > 1:
            raise ArgumentError(f"{what}: can't write into {target}, which is expanded; clone it first")


class _OutVariant(NamedTuple):
    """How an out= variant treats the tensor that it is given."""

    resizes_contiguous: bool
    "As variants do that are made from the functional one: resized first, then copied into."
    exact: bool
    takes_expanded: bool
    checks_before_resize: bool
    decides_dtype: bool
    takes_asked_dtype: bool

    @staticmethod
    def of(op: OpOverload, name: str) -> _OutVariant:
        generated = torch.Tag.generated in op.tags
        return _OutVariant(
            resizes_contiguous=generated or name in RESIZED_CONTIGUOUS,
            exact=generated or name in _exact_out,
            takes_expanded=name in _expanded_out,
            checks_before_resize=torch.Tag.pointwise in op.tags or name in CHECK_BEFORE_RESIZE,
            decides_dtype=name in DTYPE_OF_OUT,
            takes_asked_dtype=name in ASKED_DTYPE_OF_OUT,
        )


def _out_rule(functional: Rule, out_names: list[str], left_out: list[str], manners: _OutVariant) -> Rule:
    def out_variant(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in out_names]
        told = {name: getattr(outs[0], name) for name in left_out if name in ("dtype", "device")}
        if manners.decides_dtype and kwargs.get("dtype") is None:
            kwargs["dtype"] = outs[0].dtype
        elif manners.takes_asked_dtype and kwargs.get("dtype") not in (None, outs[0].dtype):
            raise DtypeError(f"out=: a result of {kwargs['dtype']} was asked for, not {outs[0]}")
        result = functional(*args, **kwargs, **told)
        if result is NotImplemented:
            return NotImplemented
        first = count_tensors(args) + count_tensors(kwargs.values())
        if isinstance(outs[0], (list, tuple)):
            return _list_written(normal(result), outs[0], first, manners)
        outcomes = normal(result)
        results = outcomes if isinstance(outcomes, tuple) else (outcomes,)
        if len(results) != len(outs) or not all(isinstance(r, New) for r in results):
            return NotImplemented
        written = tuple(
            _written(result.spec, out, first + position, manners)
            for position, (result, out) in enumerate(zip(results, outs, strict=True))
        )
        return written if len(written) > 1 else written[0]

    return out_variant


def _list_written(results: Any, outs: Sequence[TensorSpec], first: int, manners: _OutVariant) -> Any:
    """Variants that are given a list of tensors to write to return nothing."""
    if not isinstance(results, list) or len(results) != len(outs):
        raise ArgumentError(f"out=: {len(outs)} tensors are given for a list of {len(results)} results")
    pairs = enumerate(zip(results, outs, strict=True))
    return Changed(tuple(_written(result.spec, out, first + at, manners) for at, (result, out) in pairs))


def _written(result: TensorSpec, out: TensorSpec, of: int, manners: _OutVariant) -> Same:
    if manners.exact and result.dtype is not out.dtype:
        raise DtypeError(f"out=: a result of {result.dtype} needs a tensor of that dtype, not {out}")
    check_castable("out=", result.dtype, out.dtype)
    fits = _fits(result.shape, out.shape)
    if (fits and not manners.takes_expanded) or manners.checks_before_resize:
        check_no_overlap("out=", out)
    if fits:
        return Same(of)
    stride = None if manners.resizes_contiguous else result.stride  # the offset stays in any case
    return Same(of, TensorSpec(result.shape, stride, out.offset, dtype=out.dtype, device=out.device))


def _fits(shape: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether a tensor to write to keeps its shape. If only data knows, it takes that of the result: so it has both."""
    if lies_in_data(*shape, *given):
        return len(shape) == len(given) and all(map(surely_equal, shape, given))
    return same_shape(shape, given)


def count_tensors(args: Any) -> int:
    count = 0
    for arg in args:
        if isinstance(arg, TensorSpec):
            count += 1
        elif isinstance(arg, (list, tuple)):
            count += count_tensors(arg)
    return count


def check_castable(what: str, source: torch.dtype, target: torch.dtype) -> None:
    if not torch.can_cast(source, target):
        raise DtypeError(f"{what}: a result of {source} can't be cast to {target}")


# --- What out= variants of operators take: as found by giving each of them tensors of wider dtypes and expanded ones ---

EXACT = """
    _native_batch_norm_legit addbmm addmm addmv all amax amin aminmax any argmax argmin avg_pool2d
    baddbmm bmm conj_physical cummax cummin dot gather histc index_add index_copy index_reduce
    index_select linalg_cross linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex
    linalg_lu_solve linalg_qr linalg_solve_triangular linalg_vector_norm linear logcumsumexp lu_unpack
    mm mv native_batch_norm ormqr renorm scatter_add signbit softshrink take tril triu vdot
""".split()
"""Their `out` overload takes nothing but the dtype of the result."""
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
"""The same of other overloads."""
OUT_WRITES_EXPANDED = """
    bmm.out cummax.out cummin.out full.out histc.out mv.out ones.out
    std.correction_out tril.out triu.out var.correction_out zeros.out
""".split()
"""These write into expanded tensors without a word."""
exact_out(*(f"{name}.out" for name in EXACT), *EXACT_NAMED)
write_expanded(*OUT_WRITES_EXPANDED)
