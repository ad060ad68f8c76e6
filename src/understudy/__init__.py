"""understudy: stand-in tensors for PyTorch. Shape, dtype, strides, device and aliasing, but no data.

    errors, lines    the exceptions; the lines of the user's program
    patching         the patch engine: functions of torch that are replaced, when and why
    _torch/          private torch API
    shapes/          symbolic sizes
    spec/            metadata of tensors
    ops/             facts about each operator
    infer/           one call in, one plan out
    fake/            FakeTensor, FakeTensorMode
    graph/           shared by capture, prop and meta
    capture/         make_fx, capture_step
    prop/            FakeTensorProp
    meta/            MetaTracer, symbolic_trace
    exporting/       captured graphs for the tools of torch
    simulation/      simulated hardware: simulate, the allocator, the catalogue of cards
    timing/          how long a step takes: clocks of host, streams and communicators
    cluster/         ranks of a program as processes, their broker, launchers, faults
    report/          rehearse: measurement of a program, tables and pages
    plans/           searches for the best way to train a script: candidates, bounds, the answer
    cli/, __main__   the command `understudy`
    pytest_plugin    the marker and the fixture `rehearse`
    fake_tensor, proxy_tensor, symbolic_shapes, fake_tensor_prop, meta_tracer
                     the names of torch's modules: a user changes one import line
    torch_names      names of those modules that are not defined here: torch's own, or an alternative

Names are loaded when they are first used: `import understudy` does not import torch. What type checkers and editors see is
`__init__.pyi`; a test keeps the two alike.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_HOMES: dict[str, tuple[str, ...]] = {
    # tensors without data
    "understudy.fake.mode": ("FakeTensorMode",),
    "understudy.fake.tensor": ("FakeTensor",),
    "understudy.fake.convert": ("FakeTensorConverter",),
    "understudy.fake.copying": ("FakeCopyMode",),
    "understudy.fake.torch_api": (
        "TensorMetadata",
        "extract_tensor_metadata",
        "get_plain_tensors",
        "is_fake",
        "maybe_get_fake_mode",
        "unset_fake_temporarily",
    ),
    "understudy.infer.cache": ("DispatchCacheInfo",),
    # specs of tensors, rules of operators
    "understudy.spec.tensor_spec": ("TensorSpec",),
    "understudy.spec.call": ("New", "Same", "Value", "View"),
    "understudy.infer.engine": ("mark_pure", "rule"),
    # graphs of operators
    "understudy.capture.make_fx": ("make_fx",),
    "understudy.capture.step": ("capture_step",),
    "understudy.capture.deprecated": ("run_every_layer",),
    "understudy.graph.show": ("show",),
    "understudy.capture.decompositions": (
        "DecompositionInterpreter",
        "decompose",
        "disable_autocast_cache",
        "maybe_handle_decomp",
        "set_original_aten_op",
    ),
    "understudy.capture.manual_tracing": (
        "ProxySymDispatchMode",
        "disable_proxy_modes_tracing",
        "dispatch_trace",
        "fake_signature",
        "get_innermost_proxy_mode",
        "get_isolated_graphmodule",
        "get_proxy_mode",
        "get_torch_dispatch_modes",
        "maybe_disable_fake_tensor_mode",
        "wrap_key",
        "wrapper_and_args_for_make_fx",
    ),
    "understudy.capture.recorder": ("ProxyTorchDispatchMode",),
    "understudy.capture.tracer": ("PythonKeyTracer",),
    "understudy.capture.proxy_slots": (
        "extract_val",
        "get_proxy_slot",
        "has_proxy_slot",
        "is_sym_node",
        "py_sym_types",
        "set_meta",
        "set_proxy_slot",
        "snapshot_fake",
        "thunkify",
        "track_tensor",
        "track_tensor_tree",
    ),
    "understudy.capture.graph_passes": ("insert_deferred_runtime_asserts",),
    # fake values for the nodes of a graph
    "understudy.prop.propagation": ("FakeTensorProp", "PropagateUnbackedSymInts"),
    # torch-level traces
    "understudy.meta.tracer": ("MetaTracer", "symbolic_trace"),
    "understudy.meta.overrides": ("manual_meta_overrides",),
    # symbolic sizes
    "understudy.shapes.env": ("Settings", "ShapeEnv"),
    "understudy.shapes.input_dims": ("Dim", "dims"),
    "understudy.shapes.torch_api.names": (
        "Constraint",
        "DimDynamic",
        "RelaxedUnspecConstraint",
        "StatefulSymbolicContext",
        "StatelessSymbolicContext",
        "StrictMinMaxConstraint",
        "SubclassSymbolicContext",
        "SymIntEqByExpr",
        "SymIntSymbolicContext",
        "SymbolicContext",
        "canonicalize_bool_expr",
        "cast_symbool_to_symint_guardless",
        "check_consistent",
        "constrain_range",
        "constrain_unify",
        "create_contiguous",
        "expect_true",
        "guard_bool",
        "guard_float",
        "guard_int",
        "guard_scalar",
        "guard_size_oblivious",
        "guarding_hint_or_throw",
        "has_guarding_hint",
        "has_static_value",
        "has_symbolic_sizes_strides",
        "is_accessor_node",
        "is_concrete_bool",
        "is_concrete_float",
        "is_concrete_int",
        "is_nested_int",
        "is_symbolic",
        "optimization_hint",
        "sym_and",
        "sym_eq",
        "sym_or",
    ),
    "understudy.shapes.bindings": (
        "KeyPath",
        "bind_symbols",
        "compute_unbacked_bindings",
        "eval_guards",
        "find_symbol_binding_fx_nodes",
        "free_symbols",
        "free_unbacked_symbols",
        "fx_placeholder_targets",
        "fx_placeholder_vals",
        "guard_or_false",
        "guard_or_true",
        "has_free_symbols",
        "has_free_unbacked_symbols",
        "is_symbol_binding_fx_node",
        "rebind_unbacked",
        "resolve_unbacked_bindings",
        "statically_known_false",
        "statically_known_true",
    ),
    # devices that are not here
    "understudy.simulation.simulator": ("simulate",),
    # rehearsals
    "understudy.report.runs": ("RehearsalOptions", "rehearse"),
    "understudy.report.rehearsal": ("Rehearsal",),
    "understudy.report.cluster_runs": ("ClusterOptions", "rehearse_cluster"),
    "understudy.report.cluster_rehearsal": ("ClusterRehearsal",),
    # torch's own tools
    "understudy.exporting.program": ("export", "AccelerationWarning", "accelerate_export"),
    "understudy.exporting.inputs": ("check_inputs", "guards_of"),
    "understudy.exporting.interop": ("to_torch",),
    # errors
    "understudy.errors": (
        "ConstraintViolationError",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "FakeTensorDeviceMismatchError",
        "GuardOnDataDependentSymNode",
        "MetadataMismatchError",
        "MixedTensorsError",
        "NoDataError",
        "OperatorError",
        "PendingUnbackedSymbolNotFound",
        "UnderstudyError",
        "UnsupportedFakeTensorException",
        "UnsupportedMutationAliasingException",
        "UnsupportedOperatorException",
    ),
    "understudy.graph.node_origins": ("PropagationError",),
    "understudy.meta.errors": ("MetaTraceError",),
}
"""By module. The order is that of the groups in the documentation."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_ALIASES = {"ShapeEnvSettings": "Settings"}

__all__ = [*_HOME_OF, *_ALIASES]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(_ALIASES.get(name, name))
    if module is None:
        raise AttributeError(f"module 'understudy' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), _ALIASES.get(name, name))
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
