"""Tensors without data, under the names of `torch._subclasses.fake_tensor`.

A program that imports from there changes one line. A name for a mechanism that understudy does not have can be imported,
and says what to use instead when it is used.
"""

from understudy._torch.modes import FakeTensorConfig as FakeTensorConfig
from understudy.errors import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensorDeviceMismatchError as FakeTensorDeviceMismatchError,
    MetadataMismatchError as MetadataMismatchError,
    UnsupportedFakeTensorException as UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException as UnsupportedMutationAliasingException,
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from understudy.fake.convert import FakeTensorConverter as FakeTensorConverter
from understudy.fake.copying import FakeCopyMode as FakeCopyMode
from understudy.fake.inputs import FakeTensorTLS as FakeTensorTLS, fake_tensor_tls as fake_tensor_tls
from understudy.fake.mode import FakeTensorMode as FakeTensorMode
from understudy.fake.tensor import (
    FakeTensor as FakeTensor,
    SymNumberMemoDescriptor as SymNumberMemoDescriptor,
)
from understudy.fake.torch_api import (
    _check_for_subclass as _check_for_subclass,
    _check_for_subclass_arg as _check_for_subclass_arg,
    _find_like_constructors,
    _find_operators_with_positional_device,
    _is_indexed_device_type as _is_indexed_device_type,
    _is_plain_tensor as _is_plain_tensor,
    _is_tensor_constructor as _is_tensor_constructor,
    contains_tensor_types as contains_tensor_types,
    has_meta as has_meta,
    is_sparse_any as is_sparse_any,
    is_sparse_compressed as is_sparse_compressed,
    stride_incorrect_op as stride_incorrect_op,
    TensorMetadata as TensorMetadata,
    disable_fake_tensor_cache as disable_fake_tensor_cache,
    dump_cache_stats as dump_cache_stats,
    extract_tensor_metadata as extract_tensor_metadata,
    get_plain_tensors as get_plain_tensors,
    get_schema_info as get_schema_info,
    in_kernel_invocation_manager as in_kernel_invocation_manager,
    init_gpu_context as init_gpu_context,
    is_fake as is_fake,
    is_fake_tensor as is_fake_tensor,
    maybe_get_fake_constant as maybe_get_fake_constant,
    maybe_get_fake_device as maybe_get_fake_device,
    maybe_get_fake_mode as maybe_get_fake_mode,
    maybe_get_real_tensor as maybe_get_real_tensor,
    ordered_set as ordered_set,
    run_fallback_kernel as run_fallback_kernel,
    should_allow_numbers_as_tensors as should_allow_numbers_as_tensors,
    torch_decomp_decompositions as torch_decomp_decompositions,
    tree_flatten_only as tree_flatten_only,
    unset_fake_temporarily as unset_fake_temporarily,
)
from understudy.infer.cache import DispatchCacheInfo as DispatchCacheInfo
from understudy.torch_names import INSTEAD as _INSTEAD, advise as _advise, module_getattr as _module_getattr

_advise(FakeTensorMode, FakeTensor, FakeTensorConverter)
__getattr__ = _module_getattr(
    __name__,
    {"CONSTANT_NUMEL_LIMIT": 1},
    {
        "_like_tensor_constructors": _find_like_constructors,
        "_device_not_kwarg_ops": _find_operators_with_positional_device,
    },
)
__all__ = [name for name in dir() if not name.startswith("_")]
__all__ += [name for name in _INSTEAD["fake_tensor"] if not name.startswith("_")]
