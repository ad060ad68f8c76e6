"""Torch-level traces, under the names of `torch.fx.experimental.meta_tracer`.

A program that imports from there changes one line.
"""

from understudy.meta.derivation import (
    embedding_override as embedding_override,
    functional_relu_override as functional_relu_override,
    manual_meta_overrides as manual_meta_overrides,
    nn_layernorm_override as nn_layernorm_override,
    proxys_to_metas as proxys_to_metas,
    torch_abs_override as torch_abs_override,
    torch_nn_relu_override as torch_nn_relu_override,
    torch_relu_override as torch_relu_override,
    torch_where_override as torch_where_override,
)
from understudy.meta.patches import gen_constructor_wrapper as gen_constructor_wrapper
from understudy.meta.proxies import DeviceOf as _DeviceOf, MetaAttribute as MetaAttribute, MetaProxy as MetaProxy
from understudy.meta.tracer import MetaTracer as MetaTracer, symbolic_trace as symbolic_trace

MetaDeviceAttribute = _DeviceOf
__all__ = [name for name in dir() if not name.startswith("_")]
