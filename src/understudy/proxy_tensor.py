"""Graphs of operators, under the names of `torch.fx.experimental.proxy_tensor`.

A program that imports from there changes one line.
"""

from __future__ import annotations

from understudy.capture.decompositions import (
    DecompositionInterpreter,
    decompose,
    disable_autocast_cache,
    maybe_handle_decomp,
    selective_decompose,
    set_original_aten_op,
)
from understudy.capture.make_fx import make_fx
from understudy.capture.manual_tracing import (
    ProxySymDispatchMode,
    disable_proxy_modes_tracing,
    dispatch_trace,
    fake_signature,
    get_innermost_proxy_mode,
    get_isolated_graphmodule,
    get_proxy_mode,
    get_torch_dispatch_modes,
    handle_sym_dispatch,
    maybe_disable_fake_tensor_mode,
    maybe_disable_thunkify,
    maybe_enable_thunkify,
    proxy_call,
    wrap_key,
    wrapper_and_args_for_make_fx,
)
from understudy.capture.predispatch import PreDispatchTorchFunctionMode
from understudy.capture.proxy_slots import (
    PySymType,
    extract_val,
    fetch_object_proxy,
    fetch_sym_proxy,
    get_proxy_slot,
    has_proxy_slot,
    is_sym_node,
    py_sym_types,
    set_meta,
    set_proxy_slot,
    snapshot_fake,
    thunkify,
    track_tensor,
    track_tensor_tree,
)
from understudy.capture.recorder import ProxyTorchDispatchMode
from understudy.capture.tracer import PythonKeyTracer
from understudy.capture.unrecorded_effects.torch_functions import TorchFunctionMetadataMode

__all__ = [
    "DecompositionInterpreter",
    "PreDispatchTorchFunctionMode",
    "ProxySymDispatchMode",
    "ProxyTorchDispatchMode",
    "PySymType",
    "PythonKeyTracer",
    "TorchFunctionMetadataMode",
    "decompose",
    "disable_autocast_cache",
    "disable_proxy_modes_tracing",
    "dispatch_trace",
    "extract_val",
    "fake_signature",
    "fetch_object_proxy",
    "fetch_sym_proxy",
    "get_innermost_proxy_mode",
    "get_isolated_graphmodule",
    "get_proxy_mode",
    "get_proxy_slot",
    "get_torch_dispatch_modes",
    "handle_sym_dispatch",
    "has_proxy_slot",
    "is_sym_node",
    "make_fx",
    "maybe_disable_fake_tensor_mode",
    "maybe_disable_thunkify",
    "maybe_enable_thunkify",
    "maybe_handle_decomp",
    "proxy_call",
    "py_sym_types",
    "selective_decompose",
    "set_meta",
    "set_original_aten_op",
    "set_proxy_slot",
    "snapshot_fake",
    "thunkify",
    "track_tensor",
    "track_tensor_tree",
    "wrap_key",
    "wrapper_and_args_for_make_fx",
]
