"""What type checkers see of the names that `__init__.py` loads when they are first used."""

# tensors without data
from understudy.capture.decompositions import DecompositionInterpreter as DecompositionInterpreter
from understudy.capture.decompositions import decompose as decompose
from understudy.capture.decompositions import disable_autocast_cache as disable_autocast_cache
from understudy.capture.decompositions import maybe_handle_decomp as maybe_handle_decomp
from understudy.capture.decompositions import set_original_aten_op as set_original_aten_op
from understudy.capture.deprecated import run_every_layer as run_every_layer
from understudy.capture.graph_passes import insert_deferred_runtime_asserts as insert_deferred_runtime_asserts

# graphs of operators
from understudy.capture.make_fx import make_fx as make_fx
from understudy.capture.manual_tracing import ProxySymDispatchMode as ProxySymDispatchMode
from understudy.capture.manual_tracing import disable_proxy_modes_tracing as disable_proxy_modes_tracing
from understudy.capture.manual_tracing import dispatch_trace as dispatch_trace
from understudy.capture.manual_tracing import fake_signature as fake_signature
from understudy.capture.manual_tracing import get_innermost_proxy_mode as get_innermost_proxy_mode
from understudy.capture.manual_tracing import get_isolated_graphmodule as get_isolated_graphmodule
from understudy.capture.manual_tracing import get_proxy_mode as get_proxy_mode
from understudy.capture.manual_tracing import get_torch_dispatch_modes as get_torch_dispatch_modes
from understudy.capture.manual_tracing import maybe_disable_fake_tensor_mode as maybe_disable_fake_tensor_mode
from understudy.capture.manual_tracing import wrap_key as wrap_key
from understudy.capture.manual_tracing import wrapper_and_args_for_make_fx as wrapper_and_args_for_make_fx
from understudy.capture.proxy_slots import extract_val as extract_val
from understudy.capture.proxy_slots import get_proxy_slot as get_proxy_slot
from understudy.capture.proxy_slots import has_proxy_slot as has_proxy_slot
from understudy.capture.proxy_slots import is_sym_node as is_sym_node
from understudy.capture.proxy_slots import py_sym_types as py_sym_types
from understudy.capture.proxy_slots import set_meta as set_meta
from understudy.capture.proxy_slots import set_proxy_slot as set_proxy_slot
from understudy.capture.proxy_slots import snapshot_fake as snapshot_fake
from understudy.capture.proxy_slots import thunkify as thunkify
from understudy.capture.proxy_slots import track_tensor as track_tensor
from understudy.capture.proxy_slots import track_tensor_tree as track_tensor_tree
from understudy.capture.recorder import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from understudy.capture.step import capture_step as capture_step
from understudy.capture.tracer import PythonKeyTracer as PythonKeyTracer

# errors
from understudy.errors import ConstraintViolationError as ConstraintViolationError
from understudy.errors import DataDependentOutputException as DataDependentOutputException
from understudy.errors import DynamicOutputShapeException as DynamicOutputShapeException
from understudy.errors import FakeTensorDeviceMismatchError as FakeTensorDeviceMismatchError
from understudy.errors import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from understudy.errors import MetadataMismatchError as MetadataMismatchError
from understudy.errors import MixedTensorsError as MixedTensorsError
from understudy.errors import NoDataError as NoDataError
from understudy.errors import OperatorError as OperatorError
from understudy.errors import PendingUnbackedSymbolNotFound as PendingUnbackedSymbolNotFound
from understudy.errors import UnderstudyError as UnderstudyError
from understudy.errors import UnsupportedFakeTensorException as UnsupportedFakeTensorException
from understudy.errors import UnsupportedMutationAliasingException as UnsupportedMutationAliasingException
from understudy.errors import UnsupportedOperatorException as UnsupportedOperatorException
from understudy.exporting.inputs import check_inputs as check_inputs
from understudy.exporting.inputs import guards_of as guards_of
from understudy.exporting.interop import to_torch as to_torch

# torch's own tools
from understudy.exporting.program import AccelerationWarning as AccelerationWarning
from understudy.exporting.program import accelerate_export as accelerate_export
from understudy.exporting.program import export as export
from understudy.fake.convert import FakeTensorConverter as FakeTensorConverter
from understudy.fake.copying import FakeCopyMode as FakeCopyMode
from understudy.fake.mode import FakeTensorMode as FakeTensorMode
from understudy.fake.tensor import FakeTensor as FakeTensor
from understudy.fake.torch_api import TensorMetadata as TensorMetadata
from understudy.fake.torch_api import extract_tensor_metadata as extract_tensor_metadata
from understudy.fake.torch_api import get_plain_tensors as get_plain_tensors
from understudy.fake.torch_api import is_fake as is_fake
from understudy.fake.torch_api import maybe_get_fake_mode as maybe_get_fake_mode
from understudy.fake.torch_api import unset_fake_temporarily as unset_fake_temporarily
from understudy.graph.node_origins import PropagationError as PropagationError
from understudy.graph.show import show as show
from understudy.infer.cache import DispatchCacheInfo as DispatchCacheInfo
from understudy.infer.engine import mark_pure as mark_pure
from understudy.infer.engine import rule as rule
from understudy.meta.errors import MetaTraceError as MetaTraceError
from understudy.meta.overrides import manual_meta_overrides as manual_meta_overrides

# torch-level traces
from understudy.meta.tracer import MetaTracer as MetaTracer
from understudy.meta.tracer import symbolic_trace as symbolic_trace

# fake values for the nodes of a graph
from understudy.prop.propagation import FakeTensorProp as FakeTensorProp
from understudy.prop.propagation import PropagateUnbackedSymInts as PropagateUnbackedSymInts
from understudy.report.cluster_rehearsal import ClusterRehearsal as ClusterRehearsal
from understudy.report.cluster_runs import ClusterOptions as ClusterOptions
from understudy.report.cluster_runs import rehearse_cluster as rehearse_cluster
from understudy.report.rehearsal import Rehearsal as Rehearsal
from understudy.report.runs import RehearsalOptions as RehearsalOptions
from understudy.report.runs import rehearse as rehearse
from understudy.shapes.bindings import KeyPath as KeyPath
from understudy.shapes.bindings import bind_symbols as bind_symbols
from understudy.shapes.bindings import compute_unbacked_bindings as compute_unbacked_bindings
from understudy.shapes.bindings import eval_guards as eval_guards
from understudy.shapes.bindings import find_symbol_binding_fx_nodes as find_symbol_binding_fx_nodes
from understudy.shapes.bindings import free_symbols as free_symbols
from understudy.shapes.bindings import free_unbacked_symbols as free_unbacked_symbols
from understudy.shapes.bindings import fx_placeholder_targets as fx_placeholder_targets
from understudy.shapes.bindings import fx_placeholder_vals as fx_placeholder_vals
from understudy.shapes.bindings import guard_or_false as guard_or_false
from understudy.shapes.bindings import guard_or_true as guard_or_true
from understudy.shapes.bindings import has_free_symbols as has_free_symbols
from understudy.shapes.bindings import has_free_unbacked_symbols as has_free_unbacked_symbols
from understudy.shapes.bindings import is_symbol_binding_fx_node as is_symbol_binding_fx_node
from understudy.shapes.bindings import rebind_unbacked as rebind_unbacked
from understudy.shapes.bindings import resolve_unbacked_bindings as resolve_unbacked_bindings
from understudy.shapes.bindings import statically_known_false as statically_known_false
from understudy.shapes.bindings import statically_known_true as statically_known_true

# symbolic sizes
from understudy.shapes.env import Settings as Settings
from understudy.shapes.env import ShapeEnv as ShapeEnv
from understudy.shapes.input_dims import Dim as Dim
from understudy.shapes.input_dims import dims as dims
from understudy.shapes.torch_api.names import Constraint as Constraint
from understudy.shapes.torch_api.names import DimDynamic as DimDynamic
from understudy.shapes.torch_api.names import RelaxedUnspecConstraint as RelaxedUnspecConstraint
from understudy.shapes.torch_api.names import StatefulSymbolicContext as StatefulSymbolicContext
from understudy.shapes.torch_api.names import StatelessSymbolicContext as StatelessSymbolicContext
from understudy.shapes.torch_api.names import StrictMinMaxConstraint as StrictMinMaxConstraint
from understudy.shapes.torch_api.names import SubclassSymbolicContext as SubclassSymbolicContext
from understudy.shapes.torch_api.names import SymbolicContext as SymbolicContext
from understudy.shapes.torch_api.names import SymIntEqByExpr as SymIntEqByExpr
from understudy.shapes.torch_api.names import SymIntSymbolicContext as SymIntSymbolicContext
from understudy.shapes.torch_api.names import canonicalize_bool_expr as canonicalize_bool_expr
from understudy.shapes.torch_api.names import (
    cast_symbool_to_symint_guardless as cast_symbool_to_symint_guardless,
)
from understudy.shapes.torch_api.names import check_consistent as check_consistent
from understudy.shapes.torch_api.names import constrain_range as constrain_range
from understudy.shapes.torch_api.names import constrain_unify as constrain_unify
from understudy.shapes.torch_api.names import create_contiguous as create_contiguous
from understudy.shapes.torch_api.names import expect_true as expect_true
from understudy.shapes.torch_api.names import guard_bool as guard_bool
from understudy.shapes.torch_api.names import guard_float as guard_float
from understudy.shapes.torch_api.names import guard_int as guard_int
from understudy.shapes.torch_api.names import guard_scalar as guard_scalar
from understudy.shapes.torch_api.names import guard_size_oblivious as guard_size_oblivious
from understudy.shapes.torch_api.names import guarding_hint_or_throw as guarding_hint_or_throw
from understudy.shapes.torch_api.names import has_guarding_hint as has_guarding_hint
from understudy.shapes.torch_api.names import has_static_value as has_static_value
from understudy.shapes.torch_api.names import has_symbolic_sizes_strides as has_symbolic_sizes_strides
from understudy.shapes.torch_api.names import is_accessor_node as is_accessor_node
from understudy.shapes.torch_api.names import is_concrete_bool as is_concrete_bool
from understudy.shapes.torch_api.names import is_concrete_float as is_concrete_float
from understudy.shapes.torch_api.names import is_concrete_int as is_concrete_int
from understudy.shapes.torch_api.names import is_nested_int as is_nested_int
from understudy.shapes.torch_api.names import is_symbolic as is_symbolic
from understudy.shapes.torch_api.names import optimization_hint as optimization_hint
from understudy.shapes.torch_api.names import sym_and as sym_and
from understudy.shapes.torch_api.names import sym_eq as sym_eq
from understudy.shapes.torch_api.names import sym_or as sym_or
from understudy.simulation.simulator import simulate as simulate
from understudy.spec.call import New as New
from understudy.spec.call import Same as Same
from understudy.spec.call import Value as Value
from understudy.spec.call import View as View

# what is known of tensors and operators
from understudy.spec.tensor_spec import TensorSpec as TensorSpec

ShapeEnvSettings = Settings
__version__: str
__all__ = [
    "FakeTensorMode",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeCopyMode",
    "TensorMetadata",
    "extract_tensor_metadata",
    "get_plain_tensors",
    "is_fake",
    "maybe_get_fake_mode",
    "unset_fake_temporarily",
    "DispatchCacheInfo",
    "TensorSpec",
    "New",
    "Same",
    "Value",
    "View",
    "mark_pure",
    "rule",
    "make_fx",
    "capture_step",
    "run_every_layer",
    "show",
    "DecompositionInterpreter",
    "decompose",
    "disable_autocast_cache",
    "maybe_handle_decomp",
    "set_original_aten_op",
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
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
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
    "insert_deferred_runtime_asserts",
    "FakeTensorProp",
    "PropagateUnbackedSymInts",
    "MetaTracer",
    "symbolic_trace",
    "manual_meta_overrides",
    "Settings",
    "ShapeEnv",
    "Dim",
    "dims",
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
    "simulate",
    "RehearsalOptions",
    "rehearse",
    "Rehearsal",
    "ClusterOptions",
    "rehearse_cluster",
    "ClusterRehearsal",
    "export",
    "AccelerationWarning",
    "accelerate_export",
    "check_inputs",
    "guards_of",
    "to_torch",
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
    "PropagationError",
    "MetaTraceError",
    "ShapeEnvSettings",
]
