"""Torch-level traces, under the names of `torch.fx.experimental.meta_tracer`.

A program that imports from there changes one line.
"""

from __future__ import annotations

from understudy.meta.derivation import (
    embedding_override,
    functional_relu_override,
    manual_meta_overrides,
    nn_layernorm_override,
    proxys_to_metas,
    torch_abs_override,
    torch_nn_relu_override,
    torch_relu_override,
    torch_where_override,
)
from understudy.meta.patches import gen_constructor_wrapper
from understudy.meta.proxies import DeviceOf as MetaDeviceAttribute
from understudy.meta.proxies import MetaAttribute, MetaProxy
from understudy.meta.tracer import MetaTracer, symbolic_trace

__all__ = [
    "MetaAttribute",
    "MetaDeviceAttribute",
    "MetaProxy",
    "MetaTracer",
    "embedding_override",
    "functional_relu_override",
    "gen_constructor_wrapper",
    "manual_meta_overrides",
    "nn_layernorm_override",
    "proxys_to_metas",
    "symbolic_trace",
    "torch_abs_override",
    "torch_nn_relu_override",
    "torch_relu_override",
    "torch_where_override",
]
