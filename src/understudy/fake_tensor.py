"""Tensors without data, under the names of `torch._subclasses.fake_tensor`.

A program that imports from there changes one line. A name for a mechanism that understudy does not have can be imported,
and says what to use instead when it is used.
"""

from __future__ import annotations

from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    MetadataMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
from understudy.fake.convert import FakeTensorConverter
from understudy.fake.copying import FakeCopyMode
from understudy.fake.inputs import FakeTensorTLS, fake_tensor_tls
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor, SymNumberMemoDescriptor
from understudy.fake.torch_api import (
    FakeTensorConfig,
    IncrementRecursionCount,
    SingletonConstant,
    TensorMetadata,
    disable_fake_tensor_cache,
    dump_cache_stats,
    evict_fake_tensor_cache_key,
    extract_tensor_metadata,
    get_plain_tensors,
    get_schema_info,
    in_kernel_invocation_manager,
    inferred_fake_kernel_from_real_out,
    init_gpu_context,
    is_fake,
    is_fake_tensor,
    maybe_get_fake_constant,
    maybe_get_fake_device,
    maybe_get_fake_mode,
    maybe_get_real_tensor,
    ordered_set,
    run_fallback_kernel,
    should_allow_numbers_as_tensors,
    torch_decomp_decompositions,
    tree_flatten_only,
    unset_fake_temporarily,
)
from understudy.infer.cache import DispatchCacheInfo

__all__ = [
    "DataDependentOutputException",
    "DispatchCacheInfo",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorConfig",
    "FakeTensorConverter",
    "FakeTensorDeviceMismatchError",
    "FakeTensorMode",
    "FakeTensorTLS",
    "IncrementRecursionCount",
    "MetadataMismatchError",
    "SingletonConstant",
    "SymNumberMemoDescriptor",
    "TensorMetadata",
    "UnsupportedFakeTensorException",
    "UnsupportedMutationAliasingException",
    "UnsupportedOperatorException",
    "disable_fake_tensor_cache",
    "dump_cache_stats",
    "evict_fake_tensor_cache_key",
    "extract_tensor_metadata",
    "fake_tensor_tls",
    "get_plain_tensors",
    "get_schema_info",
    "in_kernel_invocation_manager",
    "inferred_fake_kernel_from_real_out",
    "init_gpu_context",
    "is_fake",
    "is_fake_tensor",
    "maybe_get_fake_constant",
    "maybe_get_fake_device",
    "maybe_get_fake_mode",
    "maybe_get_real_tensor",
    "ordered_set",
    "run_fallback_kernel",
    "should_allow_numbers_as_tensors",
    "torch_decomp_decompositions",
    "tree_flatten_only",
    "unset_fake_temporarily",
]
