"""Symbolic sizes, under the names of `torch.fx.experimental.symbolic_shapes`.

A program that imports from there changes one line. A name for a mechanism that understudy does not have can be imported,
and says what to use instead when it is used.
"""

from understudy.errors import (
    ConstraintViolationError as ConstraintViolationError,
    GuardsFrozen as _GuardsFrozen,
    GuardOnDataDependentSymNode as GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound as PendingUnbackedSymbolNotFound,
)
from understudy.prop.propagation import PropagateUnbackedSymInts as PropagateUnbackedSymInts
from understudy.shapes.bindings import (
    bind_symbols as bind_symbols,
    compute_unbacked_bindings as compute_unbacked_bindings,
    eval_guards as eval_guards,
    find_symbol_binding_fx_nodes as find_symbol_binding_fx_nodes,
    free_symbols as free_symbols,
    free_unbacked_symbols as free_unbacked_symbols,
    fx_placeholder_targets as fx_placeholder_targets,
    fx_placeholder_vals as fx_placeholder_vals,
    guard_or_false as guard_or_false,
    guard_or_true as guard_or_true,
    has_free_symbols as has_free_symbols,
    has_free_unbacked_symbols as has_free_unbacked_symbols,
    is_symbol_binding_fx_node as is_symbol_binding_fx_node,
    rebind_unbacked as rebind_unbacked,
    resolve_unbacked_bindings as resolve_unbacked_bindings,
    statically_known_false as statically_known_false,
    statically_known_true as statically_known_true,
)
from understudy.shapes.env import Settings as _Settings, ShapeEnv as ShapeEnv
from understudy.shapes.guards import Guard as _Guard
from understudy.shapes.node import SymNode as _SymNode
from understudy.shapes.torch_api.names import (
    SYMPY_INTERP as SYMPY_INTERP,
    Constraint as Constraint,
    DimDynamic as DimDynamic,
    RelaxedUnspecConstraint as RelaxedUnspecConstraint,
    StatefulSymbolicContext as StatefulSymbolicContext,
    StatelessSymbolicContext as StatelessSymbolicContext,
    StrictMinMaxConstraint as StrictMinMaxConstraint,
    SubclassSymbolicContext as SubclassSymbolicContext,
    SymbolicContext as SymbolicContext,
    SymIntEqByExpr as SymIntEqByExpr,
    SymIntSymbolicContext as SymIntSymbolicContext,
    SymTypes as SymTypes,
    TrackedFake as TrackedFake,
    canonicalize_bool_expr as canonicalize_bool_expr,
    cast_symbool_to_symint_guardless as cast_symbool_to_symint_guardless,
    check_consistent as check_consistent,
    _constrain_range_for_size as _constrain_range_for_size,
    constrain_range as constrain_range,
    constrain_unify as constrain_unify,
    create_contiguous as create_contiguous,
    error as error,
    eval_is_non_overlapping_and_dense as eval_is_non_overlapping_and_dense,
    expect_true as expect_true,
    guard_bool as guard_bool,
    guard_float as guard_float,
    guard_int as guard_int,
    guard_scalar as guard_scalar,
    guard_size_oblivious as guard_size_oblivious,
    guarding_hint_or_throw as guarding_hint_or_throw,
    has_guarding_hint as has_guarding_hint,
    has_static_value as has_static_value,
    has_symbolic_sizes_strides as has_symbolic_sizes_strides,
    is_accessor_node as is_accessor_node,
    is_concrete_bool as is_concrete_bool,
    is_concrete_float as is_concrete_float,
    is_concrete_int as is_concrete_int,
    is_nested_int as is_nested_int,
    is_symbolic as is_symbolic,
    optimization_hint as optimization_hint,
    safe_expand as safe_expand,
    sym_and as sym_and,
    sym_eq as sym_eq,
    sym_or as sym_or,
    uninteresting_files as uninteresting_files,
)
from understudy.torch_names import INSTEAD as _INSTEAD, advise as _advise, module_getattr as _module_getattr

ShapeEnvSettings, RuntimeAssert, _ShapeEnvGuardError = _Settings, _Guard, _GuardsFrozen

_advise(ShapeEnv, _SymNode)
__getattr__ = _module_getattr(__name__)
__all__ = [
    *("CallMethodKey", "ConvertIntKey", "DivideByKey", "InnerTensorKey"),
    *[name for name in dir() if not name.startswith("_")],
    *[name for name in _INSTEAD["symbolic_shapes"] if not name.startswith("_")],
]
