"""Torch-level traces, under the names of `torch.fx.experimental.meta_tracer`.

A program that imports from there changes one line.
"""

from understudy.meta.overrides import (
    embedding_override as embedding_override,
    functional_relu_override as functional_relu_override,
    manual_meta_overrides as manual_meta_overrides,
    nn_layernorm_override as nn_layernorm_override,
    torch_abs_override as torch_abs_override,
    torch_nn_relu_override as torch_nn_relu_override,
    torch_relu_override as torch_relu_override,
    torch_where_override as torch_where_override,
)
from understudy.meta.patches import gen_constructor_wrapper as gen_constructor_wrapper
from understudy.meta.proxies import (
    MetaAttribute as MetaAttribute,
    MetaDeviceAttribute as MetaDeviceAttribute,
    MetaProxy as MetaProxy,
    proxys_to_metas as proxys_to_metas,
)
from understudy.meta.tracer import MetaTracer as MetaTracer, symbolic_trace as symbolic_trace
from understudy.torch_names import module_getattr as _module_getattr

__getattr__ = _module_getattr(__name__)
__all__ = [name for name in dir() if not name.startswith("_")]
