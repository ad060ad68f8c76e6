"""Names of torch's private modules that the modules of the same names here do not define themselves.

    IMPORTED      names that torch's modules import from other modules of torch: they are torch's own, loaded when named
    INSTEAD       names of mechanisms that understudy does not have, each with what to use instead
    ATTRIBUTES    attributes of torch's classes that the classes of the same names here do not have, each with advice
    UNCALLED      methods that a subclass can't override, because the class itself never calls them, each with advice
    module_getattr  the `__getattr__` of `understudy.fake_tensor` and the other four modules

The page "What differs from torch's modules" (docs/differences.md) is written from these tables:
`python -m understudy.torch_names > docs/differences.md`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

from understudy.errors import NotProvided, NotProvidedError

IMPORTED: dict[str, str] = {
    name: module
    for module, names in {
        "torch": "SymBool SymFloat SymInt Tensor",
        "torch._C._functorch": "get_unwrapped is_batchedtensor is_functorch_wrapped_tensor is_gradtrackingtensor "
        "is_legacy_batchedtensor",
        "torch._guards": "SLoc ShapeGuard Source TracingContext",
        "torch._library.fake_class_registry": "FakeScriptObject",
        "torch._library.fake_profile": "MissingOpProfile",
        "torch._library.opaque_object": "get_reconstruct_fn is_opaque_reference_type is_opaque_value "
        "is_opaque_value_type should_hoist",
        "torch._logging._internal": "LazyString dtrace_structured trace_structured",
        "torch._opaque_base": "OpaqueBase",
        "torch._ops": "HigherOrderOperator OpOverload",
        "torch._prims_common": "BoolLike FloatLike IntLike suggest_memory_format",
        "torch._utils": "_is_privateuse1_backend_available render_call",
        "torch._utils_internal": "signpost_event",
        "torch.fx._compatibility": "compatibility",
        "torch.fx": "GraphModule Node Proxy Tracer",
        "torch.fx.experimental._backward_state": "BackwardState",
        "torch.fx.experimental._config": "AggressiveGuardFreeMode",
        # the steps of a KeyPath: torch's tools ask for these classes by isinstance
        "torch.fx.experimental.symbolic_shapes": "CallMethodKey ConvertIntKey DivideByKey InnerTensorKey",
        "torch.fx.graph_module": "_assign_attr",
        "torch.fx.immutable_collections": "immutable_dict",
        "torch.fx.node": "map_aggregate",
        "torch.fx.operator_schemas": "normalize_function",
        "torch.fx.passes.shape_prop": "_extract_tensor_metadata",
        "torch.multiprocessing.reductions": "StorageWeakRef",
        "torch.nn": "Module",
        "torch.overrides": "TorchFunctionMode",
        "torch.types": "BoolLikeType FloatLikeType IntLikeType py_sym_types",
        "torch.utils._mode_utils": "no_dispatch",
        "torch.utils._ordered_set": "OrderedSet",
        "torch.utils._python_dispatch": "TorchDispatchMode TraceableWrapperSubclass _disable_infra_mode _push_mode "
        "_unset_infra_mode autograd_would_have_decomposed is_traceable_wrapper_subclass",
        "torch.utils._pytree": "TreeSpec keystr tree_map tree_map_",
        "torch.utils._stats": "count",
        "torch.utils._sympy.functions": "CeilToInt CleanDiv FloorDiv FloorToInt IntTrueDiv "
        "IsNonOverlappingAndDenseIndicator Max Mod PythonMod TruncToInt",
        "torch.utils._sympy.numbers": "int_oo",
        "torch.utils._sympy.printers": "CppPrinter PythonPrinter",
        "torch.utils._sympy.singleton_int": "SingletonInt",
        "torch.utils._sympy.solve": "try_solve",
        "torch.utils._sympy.symbol": "SymT make_symbol prefix_str symbol_is_type",
        "torch.utils._sympy.value_ranges": "SymPyValueRangeAnalysis ValueRangeError ValueRanges bound_sympy",
        "torch.utils._thunk": "Thunk",
        "torch.utils._traceback": "CapturedTraceback format_frame",
        "torch.utils.weak": "WeakIdKeyDictionary WeakTensorKeyDictionary _WeakHashRef",
        "torch._dispatch.python": "enable_python_dispatcher",
    }.items()
    for name in names.split()
}
"""Name → the module of torch that defines it."""

OURS: dict[str, tuple[str, str]] = {
    "SymNode": ("understudy.shapes.node", "SymNode"),
    "FakeTensor": ("understudy.fake.tensor", "FakeTensor"),
    "FakeTensorMode": ("understudy.fake.mode", "FakeTensorMode"),
    "get_plain_tensors": ("understudy.fake.torch_api", "get_plain_tensors"),
    "is_fake": ("understudy.fake.torch_api", "is_fake"),
    "unset_fake_temporarily": ("understudy.fake.torch_api", "unset_fake_temporarily"),
    "is_sparse_any": ("understudy.fake.torch_api", "is_sparse_any"),
    "snapshot_fake": ("understudy.capture.proxy_slots", "snapshot_fake"),
}
"""Names that torch's modules import from each other: here they are understudy's."""

CACHE = (
    "Use FakeTensorMode.cache_info(), FakeTensorMode.cache_clear(), and understudy.rule to define the result of an "
    "operator."
)
HANDLERS = "Use understudy.rule, or torch.library.register_fake, to define the result of an operator."
CONVERSION = "Use mode.from_tensor(tensor), or FakeTensorConverter."
CHECKS = "Use FakeTensorMode(crosscheck=True), or compare understudy.extract_tensor_metadata of both tensors."
SYMBOL_NODES = "Use get_proxy_slot and set_proxy_slot for the proxies of tensors and symbols."
MODE_STACK = (
    "Use disable_proxy_modes_tracing(), which takes recorders out of the stack of modes and puts them back."
)
TRACER = "Use make_fx(f, ...), or dispatch_trace with a PythonKeyTracer."
EXPRESSIONS = "Use size.node.expr for a sympy expression, and env.format_guards() for text."
RANGES = "Use torch._check(condition), constrain_range(symbol, min=, max=), and env.var_to_range."
GUARDS = "Use env.guards, env.check(*inputs), env.check_source() and env.produce_guards(...)."
SUPPRESSION = "Use env.suppress_guards() and env.ignore_fresh_unbacked_symbols()."
REPLAY = "A ShapeEnv here has no log of events to replay; pickle the ShapeEnv, or run the program again."

_GROUPS: dict[str, dict[str, str]] = {
    "fake_tensor": {
        CACHE: "_DispatchCacheKey _DispatchCacheEntryOutputInfo _DispatchCacheValidEntry _DispatchCacheBypassEntry "
        "_BypassDispatchCache _validate_symbolic_output_for_caching _set_cache_key_for_shape_env _set_cache_key "
        "_CacheKeyState _PySymInputStub _SymIntOutputStub",
        HANDLERS: "_device_handler _DISPATCH_META_HANDLERS _DISPATCH_HANDLE_DIRECTLY "
        "op_implementations_checks get_fast_op_impls",
        CONVERSION: "_infer_fake_from_real_tensor MetaConverter",
        CHECKS: "assert_eq assert_metadata_eq",
        "Nested calls of the mode are not counted. To see every operator, put a TorchDispatchMode of yours inside it.": ""
        "IncrementRecursionCount RECURSION_COUNT",
        "Plans of the cache have no constants. Use FakeTensorMode.cache_info() and FakeTensorMode.cache_clear().": ""
        "SingletonConstant",
        "Keys of the cache are not accessible. Use FakeTensorMode.cache_clear(), or disable_fake_tensor_cache(mode).": ""
        "evict_fake_tensor_cache_key",
        "Use mode.from_tensor(real) for the stand-in of a result, and torch.library.register_fake or "
        "understudy.rule to define the result of the operator.": "inferred_fake_kernel_from_real_out",
        "FakeTensor(...) refuses unknown keywords.": "_FakeTensorConstructorIgnoredState "
        "_FAKE_TENSOR_CONSTRUCTOR_IGNORED_STATE_ATTRS",
    },
    "proxy_tensor": {
        SYMBOL_NODES: "_get_proxies _nary_sym_max _nary_sym_min _sympy_handlers _build_proxy_for_sym_expr _SymNodeDict "
        "_SympyExprTrackerValue _init_proxy_trackers _sym_register _compute_proxy proxy_slot _ProxyTensor "
        "no_default _NoDefault _fetch_proxies_and_all_constant_flag _PySymProxyType _OpaqueObjectProxyType",
        "Use torch.fx.experimental.proxy_tensor for graphs of torch.export; here a tensor keeps its own proxy.": ""
        "_DisableUpdateTensorTracker _disable_update_tensor_tracker_tls _FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT "
        "_is_proxy_tensor_update_tensor_tracker_disabled _proxy_tensor_disable_update_tensor_tracker",
        "Use maybe_enable_thunkify() and maybe_disable_thunkify().": "_enable_thunkify",
        MODE_STACK: "_make_temp_remove_mode_context_manager _temp_remove_metadata_torch_function_mode "
        "_temp_remove_pre_dispatch_torch_function_mode",
        "Use make_fx(pre_dispatch=True), which keeps calls that change the state of autograd.": "_side_effectful_functions "
        "_side_effectful_need_to_be_preserved_pre_dispatch _jvp_predispatch_functions",
        TRACER: "_GraphAppendingTracerEx _MakefxTracer _CURRENT_MAKE_FX_TRACER _set_make_fx_tracer _ModuleStackTracer "
        "_AttrProxy _ModuleNotInstalledAsSubmoduleError",
        "Use decompose(table), or make_fx(decomposition_table=...).": "_SelectiveDecomposeInterpreter",
        "Use understudy.compute_unbacked_bindings(env, value).": "_set_unbacked_bindings",
        "Recorded nodes have no such metadata here; read node.meta['val'].": "_maybe_record_pointwise_barrier "
        "_should_save_eager_input_vals _HasMeta ORIGINAL_ATEN _AnyScriptObject",
        "Use make_fx(f)(*inputs), which flattens the inputs itself.": "_pytree_subclasses_that_lose_info",
        "Use tensor.detach(); the recorder handles it.": "fast_detach",
        "torch's FunctionalTensor requires torch's own modes; use torch.func.functionalize.": "FunctionalTensor",
    },
    "symbolic_shapes": {
        EXPRESSIONS: "_nested_int_aware_sort _sympy_from_args _canonicalize_bool_expr_impl _reduce_to_lowest_terms "
        "_iterate_exprs _iterate_nodes _expandsums _fast_expand _SymbolInfo _maybe_evaluate_static_worker "
        "_sympy_cast_symbool_to_symint_guardless _eval_is_non_overlapping_and_dense "
        "_eval_is_non_overlapping_and_dense_flat _lru_cache _has_uninterpretable_sympy_function "
        "_is_supported_equivalence _get_placeholder_expr IndicatorTypes _PythonMsgPrinter SympyBoolean",
        "Use free_unbacked_symbols(value) and compute_unbacked_bindings(env, value).": "_free_non_source_unbacked_symbols "
        "_free_unbacked_symbols_with_path _remove_effect_token_unbacked_bindings",
        "Use guard_or_false, guard_or_true, statically_known_true.": "_guard_or _static_eval_sym_bool "
        "_sym_node_hint_disproves",
        RANGES: "_advise_is_size _advise_is_bounded ",
        "Use StatelessSymbolicContext, StatefulSymbolicContext or dims(...).": "_assert_symbol_context _is_dim_dynamic "
        "_is_int",
        "A ShapeEnv solves conditions when they come up. Read env.guards, env.specialisations and env.var_to_range.": ""
        "DimConstraints",
        'Give equal dimensions one name: symbolic_context=dims("batch", "seq") for each input.': "EqualityConstraint",
        "One graph holds for all sizes that its guards admit. Read env.specialisations for sizes that became numbers.": ""
        "Specialization",
        "A guard has the line that made it: guard.line for each guard of env.guards.": "ValueRangesSLoc",
        "Use str(size), or str(size.node.expr) for sympy's form.": "SymExprPrinter",
        "Use env.produce_guards(...) for Python code, env.format_guards() for text, and env.check_source() for a function "
        "that checks inputs.": "ShapeGuardPythonPrinter ShapeGuardPrinter",
        "Use env.format_guards(verbose=True) for text with the lines that made the guards.": "LoggingShapeGuardPrinter",
        "Use env.format_guards(), and env.check(*inputs) for the guards that inputs do not meet.": ""
        "DynamicDimConstraintPrinter",
        "Use functools.lru_cache and its cache_info().": "lru_cache log_lru_cache_stats",
        GUARDS: "_ShapeGuardPrinter _ShapeGuardCppPrinter _ShapeGuardsHelper _CppShapeGuardsHelper",
        SUPPRESSION: "_ignore_fresh_unbacked_symbols_tls _ignore_fresh_unbacked_symbols_set "
        "_ignore_fresh_unbacked_symbols_tls_context _suppress_guards",
        "Errors name the line of your program and the torch._check(...) to add.": "_FrameLocalResult _find_user_code_frame "
        "_blame_user_code _suggest_torch_checks _suggest_fixes_for_data_dependent_error_non_strict",
        REPLAY: "FakeTensorMeta ShapeEnvEvent record_shapeenv_event replay_shape_env_events shape_env_check_state_equal "
        "SHAPEENV_EVENT_KEY CURRENT_NODE_KEY",
        "Use size.node.hint, guarding_hint_or_throw and optimization_hint.": "_guarding_hint_or_throw_base "
        "_optimization_hint_base",
    },
}
INSTEAD: dict[str, dict[str, str]] = {
    module: {name: advice for advice, names in groups.items() for name in names.split()}
    for module, groups in _GROUPS.items()
}
"""Module → name → what to use instead."""


def module_getattr(
    module: str,
    constants: dict[str, object] | None = None,
    computed: dict[str, Callable[[], object]] | None = None,
) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has the name of one of torch's. `computed`: values that are found when they are
    named."""
    short = module.rpartition(".")[2]

    def __getattr__(name: str) -> Any:
        if constants is not None and name in constants:
            return constants[name]
        if computed is not None and name in computed:
            return computed[name]()
        if name in OURS:
            home, attribute = OURS[name]
            return getattr(importlib.import_module(home), attribute)
        if name in IMPORTED:
            return getattr(importlib.import_module(IMPORTED[name]), name)
        advice = INSTEAD.get(short, {}).get(name)
        if advice is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return NotProvided(name, (), {"__doc__": advice, "__module__": module})

    return __getattr__


# --- attributes -----------------------------------------------------------------------------------------------------------

MODES = "Use `with mode:`, and mode.stack for where the mode was made."
PROVE = (
    "Use torch._check(condition) to state a condition, and statically_known_true(condition) to ask for one."
)
VALIDATION = (
    "Conditions are not translated for Z3. Use env.check(*inputs) for the guards that inputs do not meet."
)
LINES = "Use env.guards: each guard has the line that made it, guard.line. Errors name that line, too."
CONSTRAINTS = "Use env.guards, env.specialisations, and produce_guards(..., input_contexts=...) for violated constraints."
NEW_SYMBOLS = "Use env.create_symbol, create_symint, create_unbacked_symint and their kind, or mode.from_tensor(x, source=)."
VALUES = "Use env.var_to_val for the values in the example, and FakeTensorMode(propagate_real_tensors=True) for real ones."
EQUAL = "Use env.replacements, and env.simplify(expression)."
ATTRIBUTES: dict[str, dict[str, str]] = {
    "ShapeEnv": {
        PROVE: "axioms get_axioms get_implications divisible _add_divisible _update_divisible _is_nonneg_sum "
        "_is_nonneg_term _resimplify_floor_div_axioms _maybe_fast_eval_comparison _maybe_evaluate_range_only "
        "_maybe_guard_rel _should_skip_static_eval _equality_graph",
        VALIDATION: "_add_assertion _add_target_expr _add_z3var _check_translation_validate "
        "_create_fx_placeholder_and_z3var _add_fx_node_metadata _remove_fx_node fx_node_cache _expr_sym_node_id",
        REPLAY: "events is_recording _recording check_recorded_events _last_event_index _snapshot_tracked_fakes check_equal",
        RANGES: "_constrain_range _default_value_range _refine_ranges _update_var_to_range var_to_range_sloc",
        EQUAL: "_find _set_replacement _unbacked_replacements replacements_slocs _eliminate_unbacked _constrain_unify",
        LINES: "var_to_stack specialization_stacks symbol_guard_counter counter log _log_guard _get_sloc _get_stack_summary "
        "_find_frame_locals _log_create_unbacked_symbol _log_real_tensor_propagation _log_suppressed_dde "
        "_make_data_dependent_error _is_python_assert _get_user_frame",
        CONSTRAINTS: "dim_constraints exclusion_constraints _record_exclusion_constraint "
        "_render_range_for_constraint_violation patch_source_specialization",
        NEW_SYMBOLS: "unique_ids unbacked_inputs unbacked_alloc_order unbacked_symint_counter unbacked_symfloat_counter "
        "transfer_symbols_from_foreign_shape_env _create_symbol_for_source _create_symbolic_sizes_strides_storage_offset "
        "_compute_symbolic_stride _produce_dyn_sizes _produce_dyn_sizes_from_int_tuple _generate_unique_id _init "
        "_shape_id_to_unbacked_symbol _add_shape_id_eq_check _shape_spec_pending_assumptions "
        "_spec_symbol_to_compile_symbol",
        VALUES: "add_var_to_val add_backed_var_to_val real_tensor_prop_unbacked_vals "
        "set_real_tensor_prop_unbacked_vals set_unbacked_var_to_val unbacked_var_to_val",
        "Use env.source_to_var and env.var_to_sources.": "source_to_symbol source_name_to_debug_name _debug_name",
        "Use env.evaluate_expr(expression).": "_evaluate_expr _inner_evaluate_expr",
        SUPPRESSION: "_suppress_guards_enter _suppress_guards_exit _suppress_guards_tls _ignore_fresh_unbacked_symbols_tls "
        "_ignore_fresh_unbacked_symbols_set",
        "Use env.freeze(), env.freeze_runtime_asserts() and env.error_on_new_guards().": ""
        "_check_frozen _error_on_new_guards",
        "Use FakeTensorMode.cache_info() and FakeTensorMode.cache_clear().": ""
        "fake_tensor_cache _prev_cache_key _get_key _version_counter",
    },
    "FakeTensorMode": {
        MODES: "enter_stack old_dispatch_mode_flags old_non_infra_dispatch_mode_flags "
        "old_without_ignore_compile_internals_dispatch_mode_flags _stack _stack_trace",
        CACHE: "cache _cache_key _cached_dispatch_impl _crosscheck_cache_output _get_output_info_for_cache_entry "
        "_get_output_tensor_from_cache_entry _make_cache_entry _output_from_cache_entry _prep_args_for_hash "
        "_validate_cache_key _validate_output_for_cache_entry",
        HANDLERS: "_cpp_meta_supports_symint cpp_meta_supports_symint _unbacked_special_fake_handling_ops _maybe_infer_fake "
        "_maybe_infer_fake_kernel_from_pytree_out",
        "Use FakeTensorMode(allow_fallback_kernels=), and mode.allow_fallback_kernels.": "can_run_unsafe_fallback "
        "_can_run_unsafe_fallback_allowed_namespaces",
        "Use mode.from_tensor(jagged) with a ShapeEnv; the symbol of the ragged size is jagged.shape[1].": ""
        "create_symbolic_nested_int nt_tensor_id_counter nt_tensor_id_initial_count",
        "Read x.constant, or x.item(): the values of constants are followed through views and writes.": "may_turn_const "
        "lift_fns invalidate_written_to_constants",
        "Use mode.from_tensor(tensor), or FakeTensorConverter().from_meta_and_device(mode, tensor, device).": ""
        "validate_and_convert_non_fake_tensors wrap_meta_outputs_with_default_device_logic",
    },
    "FakeTensor": {
        "Use x.device, and understudy.rule for the device of an operator's result.": "_find_common_device "
        "_normalize_fake_device",
        "Use x.fake_mode.": "_mode_key",
        "Use x.nonzero_memo and its kind: they are None after a write, and in a new epoch of the mode.": " ".join(
            f"_{kind}_memo_{part}"
            for kind in ("nonzero", "item", "unique", "unique_consecutive", "nested_int")
            for part in ("vc", "epoch")
        ),
    },
    "SymNode": {
        "Use node.expr.": "_expr_cache _expr_ver",
        "Use the method of the same name without the underscore.": "_abs _add _and_ _bitwise_and _bitwise_or _bitwise_xor "
        "_ceil _eq _float_pow _float_truediv _floor _ge _gt _int_floordiv _int_truediv _is_channels_last_contiguous_2d "
        "_is_channels_last_contiguous_3d _is_channels_last_strides_2d _is_channels_last_strides_3d _is_contiguous "
        "_is_integer _is_non_overlapping_and_dense_indicator _le _lshift _lt _mod _mul _ne _neg _or_ _pos "
        "_pow_by_natural _round _rshift _sub _sym_float _sym_ite _sym_max _sym_min _sym_not _trunc",
    },
    "FakeTensorProp": {
        "The values of all nodes are kept: read node.meta['val'], or spec_of(node).": "user_to_last_uses"
    },
    "PythonKeyTracer": {
        SYMBOL_NODES: "sympy_expr_tracker",
        "Use tracer.script_object_tracker for script objects; opaque objects are not traced.": ""
        "opaque_tracker _opaque_real_obj_proxy _try_reconstruct_opaque",
    },
    "ProxyTorchDispatchMode": {
        MODES: "enter_stack old_dispatch_mode_flags old_non_infra_dispatch_mode_flags "
        "old_without_ignore_compile_internals_dispatch_mode_flags",
        "Use decompose(table), or mode.enable_decompositions(table).": "decomp_layers _decomposition_table_stack",
        "It is a setting of torch's compiler; a recorder here records the casts that run.": "emulate_precision_casts",
        "A subgraph is traced at each call.": "_invoke_subgraph_cache _invoke_subgraph_names",
    },
}
"""Class → what to use instead → attributes of torch's class of this name, public and private."""


DECISIONS = "Read env.guards, each with the line that made it; env.error_on_new_guards() refuses new ones."
UNCALLED: dict[str, dict[str, str]] = {
    "ShapeEnv": {
        DECISIONS: "evaluate_expr evaluate_sym_node guard_or_defer_runtime_assert _maybe_evaluate_static",
        EQUAL: "replace simplify",
        "Override create_symbol, which is called for each new symbol.": "create_symintnode create_symfloatnode "
        "create_symboolnode",
    },
    "FakeTensorMode": {"Override dispatch, which is called for each operator.": "is_our_fake"},
    "FakeTensorConverter": {
        "Override from_real_tensor and set_tensor_memo; results of operators are not converted.": "from_meta_and_device "
        "_get_memo add_constant_storage_mapping",
    },
}
"""Class → what to override or use instead → methods that can be called, but that the class itself never calls."""


class MissingAttribute:
    """A descriptor: reading or setting the attribute is an AttributeError that names the alternative."""

    def __init__(self, name: str, advice: str) -> None:
        self._name, self._advice = name, advice

    def __get__(self, value: object, kind: type) -> NoReturn:
        raise AttributeError(f"understudy's {kind.__name__} has no {self._name}. {self._advice}")

    def __set__(self, value: object, new: object) -> NoReturn:
        self.__get__(value, type(value))


def advise(*classes: type) -> None:
    """Give these classes an error with advice for each attribute that they do not have, and for overrides of it."""
    for kind in classes:
        for advice, names in ATTRIBUTES.get(kind.__name__, {}).items():
            for name in names.split():
                setattr(kind, name, MissingAttribute(name, advice))
        _refuse_overrides(kind)


def _refuse_overrides(kind: Any) -> None:
    """An override that would never be called is an error when the subclass is made."""
    tables = (ATTRIBUTES.get(kind.__name__, {}), UNCALLED.get(kind.__name__, {}))
    advice_for = {
        name: advice for table in tables for advice, names in table.items() for name in names.split()
    }

    def __init_subclass__(cls: Any, /, **options: Any) -> None:
        super(kind, cls).__init_subclass__(**options)
        for name in advice_for.keys() & vars(cls).keys():
            if isinstance(vars(cls)[name], OVERRIDES):
                raise NotProvidedError(
                    f"{cls.__name__} overrides {name}, which understudy's {kind.__name__} never calls. {advice_for[name]}"
                )

    kind.__init_subclass__ = classmethod(__init_subclass__)


OVERRIDES = (FunctionType, classmethod, staticmethod, property)


SWITCHES: dict[str, str] = {
    "fake_tensor_propagate_real_tensors": "as in torch; also FakeTensorMode(propagate_real_tensors=True)",
    "fake_tensor_allow_meta": "as in torch",
    "fake_tensor_allow_unsafe_data_ptr_access": "no effect: data_ptr() of a stand-in always raises, with what to do",
    "fake_tensor_crossref": "read by torch's AOTAutograd, not by a mode",
    "fake_tensor_prefer_device_type": "as in torch",
    "fake_tensor_cache_enabled": "as in torch",
    "fake_tensor_cache_crosscheck_enabled": "as FakeTensorMode(crosscheck=True)",
    "fake_tensor_disable_inference_mode": "read by torch's compiler, not by a mode",
    "generate_fake_kernels_from_real_mismatches": "as in torch",
}
"""The flags of `torch._functorch.config` and `torch._dynamo.config` about fake tensors, and what they do here. They are
read when a mode is made."""


GRAPHS: dict[str, str] = {
    "symbolic mode, dropout that drops nothing (`training=False`, `p=0`)": "no node, because eager returns its input; "
    "torch's graph has a `clone`, so that a later write no longer reaches the input",
    "symbolic mode, `matmul` inside `linear` and inside transforms of torch.func": "as eager: `_unsafe_view` and "
    "`squeeze_`, where torch's has `view` and `squeeze`",
    "symbolic mode, a slice of everything (`x[:]`)": "not recorded, as in eager; torch's has the slice",
    "symbolic mode, recurrent layers": "`nn.LSTM` as eager, with the results that its backward pass reads; torch's "
    "graphs are for inference",
    "symbolic mode, sizes in gradients": "may be computed from the sizes of the inputs; torch's reads them from the result",
    "`pre_dispatch=True`, gradients inside the function": "the inner operators of a composite that its backward pass reads "
    "are recorded as well",
    "`pre_dispatch=True`, transforms inside the function (`torch.vmap`, `torch.func.grad`)": "the operators that run; "
    "torch's graph is empty",
}
"""Where graphs have other operators than those of torch's `make_fx`, after dead code is removed."""


BEHAVIOUR: dict[str, str] = {
    "text of stand-ins: `repr(x)`, `str(x.untyped_storage())`": "`FakeTensor((2, 2), dtype=float32, device='cpu')`, with "
    "the device that the tensor stands for",
    "names of symbols": "of the input and the dimension, `x_0`; torch's number (`s97`) for a symbol that a program makes "
    "with a source of torch's",
    "text of guards, and order of their sides": "`a.size(0) <= 19`, in the words of the program; "
    "`produce_guards(placeholders, sources)` has torch's `L['a'].size()[0] <= 19`. Comparisons of integers are normalised, "
    "so `n > 3` is `n >= 4`, and quotients are integer ones",
    "storage offsets of inputs": "numbers, with a guard; torch makes symbols of offsets that are not 0",
    "jagged tensors given to `from_tensor`": "sizes of the example, with a number of their own for the ragged dimension",
    "`sym_size` nodes": "stand where a size is used first; their order may differ from torch's",
    "a parameter or buffer whose value a program reads and to which it writes later, in `make_fx`": "an error that names "
    "it; torch's graph has the number of the example. A value that is read after the write is a symbol (in real mode an "
    "error), where torch may have a number of the example",
    "`torch.tensor(size)` with a symbolic size, in graphs": "computed when the graph runs; torch's graph has the number of "
    "the example",
    "constants: `torch.tensor([800, 1216])` in a list of sizes, a write through an expanded view": "values of literals are "
    "followed; torch raises `DataDependentOutputException`, or forgets the value",
    "real tensors beside stand-ins, without a `ShapeEnv`": "sizes that depend on data are numbers; torch raises "
    "`DynamicOutputShapeException`",
    "`type(parameter)(value, **vars(parameter))`": "on the device of the value; torch keeps that of the parameter",
    "counts of `cache_info()`": "plans are shared between modes, and between calls inside and outside of inference mode; "
    "reasons of bypasses are understudy's own",
    "`mode.avoid_device_init`": "always True: no device is initialised, also if there is one",
    "more is proved": "`statically_known_true` also follows chains of comparisons, and merges unbacked symbols that "
    "`torch._check` makes equal",
    "`torch.export.export(strict=True)` inside a mode": "an error with a remedy: TorchDynamo supports only "
    "torch's own fakes",
    "`symbolic_trace`: values in the traced program": "stand-ins that carry their node, so that `isinstance(x, "
    "torch.Tensor)` holds; a tracer that overrides `proxy` or `create_proxy` gets `MetaProxy` objects",
}
"""Where the same call gives another value or text, or an error, on purpose."""


def write_page() -> str:
    """The tables of `INSTEAD`, `GRAPHS`, `BEHAVIOUR` and `SWITCHES`, as the page docs/differences.md."""
    lines = [
        "# What differs from torch's modules",
        "",
        "`understudy.fake_tensor`, `.proxy_tensor`, `.symbolic_shapes`, `.fake_tensor_prop` and `.meta_tracer` have the",
        "names of torch's modules. A name below belongs to a mechanism that understudy does not have. It can be",
        "imported and used in `isinstance` and annotations; calling or subclassing it raises `NotProvidedError` with",
        "the text of the table.",
        "",
        "This page is written by `python -m understudy.torch_names`.",
    ]
    for module, groups in _GROUPS.items():
        lines += ["", f"## understudy.{module}", *_table("names of torch's module", groups)]
    lines += [
        "",
        "## Attributes",
        "",
        "Reading or setting one of these is an `AttributeError` with the text of the table. A subclass that overrides one",
        "with a method is a `NotProvidedError`.",
    ]
    for kind, by_advice in ATTRIBUTES.items():
        lines += ["", f"### {kind}", *_table("attributes of torch's class", by_advice)]
    lines += [
        "",
        "## Overrides",
        "",
        "These methods can be called. The class itself never calls them, so a subclass that overrides one is a",
        "`NotProvidedError`.",
    ]
    for kind, by_advice in UNCALLED.items():
        lines += ["", f"### Overrides of {kind}", *_table("methods", by_advice)]
    lines += ["", "## Operators in graphs", "", "| where | what `make_fx` records here |", "|---|---|"]
    lines += [f"| {where} | {what} |" for where, what in GRAPHS.items()]
    lines += ["", "## Behaviour", "", "On purpose:", "", "| what | here |", "|---|---|"]
    lines += [f"| {where} | {what} |" for where, what in BEHAVIOUR.items()]
    lines += [
        "",
        "## Switches",
        "",
        "Flags of `torch._functorch.config` and `torch._dynamo.config`. They are read when a mode",
    ]
    lines += ["is made, as are the environment variables that set them, and `TORCH_FAKE_TENSOR_DEBUG`.", ""]
    lines += [
        "| switch | here |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in SWITCHES.items()),
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, groups: dict[str, str]) -> list[str]:
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split())} | {advice} |"
        for advice, names in groups.items()
    ]
    return ["", f"| {title} | instead |", "|---|---|", *rows]


if __name__ == "__main__":
    print(write_page(), end="")
