"""Graphs of operators, under the names of `torch.fx.experimental.proxy_tensor`.

A program that imports from there changes one line.
"""

from torch import Tensor as _Tensor
from torch.nn import Parameter as _Parameter

from understudy.capture.decompositions import (
    DecompositionInterpreter as DecompositionInterpreter,
    decompose as decompose,
    disable_autocast_cache as disable_autocast_cache,
    maybe_handle_decomp as maybe_handle_decomp,
    selective_decompose as selective_decompose,
    set_original_aten_op as set_original_aten_op,
)
from understudy.capture.make_fx import make_fx as make_fx
from understudy.capture.manual_tracing import (
    ProxySymDispatchMode as ProxySymDispatchMode,
    disable_proxy_modes_tracing as disable_proxy_modes_tracing,
    dispatch_trace as dispatch_trace,
    fake_signature as fake_signature,
    get_innermost_proxy_mode as get_innermost_proxy_mode,
    get_isolated_graphmodule as get_isolated_graphmodule,
    get_proxy_mode as get_proxy_mode,
    get_torch_dispatch_modes as get_torch_dispatch_modes,
    handle_sym_dispatch as handle_sym_dispatch,
    maybe_disable_fake_tensor_mode as maybe_disable_fake_tensor_mode,
    maybe_disable_thunkify as maybe_disable_thunkify,
    maybe_enable_thunkify as maybe_enable_thunkify,
    proxy_call as proxy_call,
    wrap_key as wrap_key,
    wrapper_and_args_for_make_fx as wrapper_and_args_for_make_fx,
)
from understudy.capture.predispatch import PreDispatchTorchFunctionMode as PreDispatchTorchFunctionMode
from understudy.capture.proxy_slots import (
    PySymType as PySymType,
    extract_val as extract_val,
    fetch_object_proxy as fetch_object_proxy,
    fetch_sym_proxy as fetch_sym_proxy,
    get_proxy_slot as get_proxy_slot,
    has_proxy_slot as has_proxy_slot,
    is_sym_node as is_sym_node,
    py_sym_types as py_sym_types,
    set_meta as set_meta,
    set_proxy_slot as set_proxy_slot,
    snapshot_fake as snapshot_fake,
    thunkify as thunkify,
    track_tensor as track_tensor,
    track_tensor_tree as track_tensor_tree,
)
from understudy.capture.recorder import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from understudy.capture.tracer import PythonKeyTracer as PythonKeyTracer
from understudy.capture.unrecorded_effects.torch_functions import (
    TorchFunctionMetadataMode as TorchFunctionMetadataMode,
)
from understudy.fake.tensor import FakeTensor as _FakeTensor
from understudy.torch_names import advise as _advise, module_getattr as _module_getattr

_advise(PythonKeyTracer, ProxyTorchDispatchMode)
__getattr__ = _module_getattr(
    __name__, {"CONSTANT_NUMEL_LIMIT": 1, "HANDLED_TYPES": (_Tensor, _Parameter, _FakeTensor)}
)
__all__ = [name for name in dir() if not name.startswith("_")]
