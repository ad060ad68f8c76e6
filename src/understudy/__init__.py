"""understudy: stand-in tensors for PyTorch. Shape, dtype, strides, device and aliasing, but no data."""

from understudy import rules as _rules  # noqa: F401  (registers the rules)
from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    MetadataMismatchError,
    MixedTensorsError,
    NoDataError,
    OperatorError,
    UnderstudyError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
from understudy.fake.convert import FakeTensorConverter
from understudy.fake.helpers import (
    FakeCopyMode,
    TensorMetadata,
    extract_tensor_metadata,
    get_plain_tensors,
    is_fake,
    maybe_get_fake_mode,
    unset_fake_temporarily,
)
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.infer.cache import DispatchCacheInfo
from understudy.infer.engine import mark_pure, rule
from understudy.spec import New, Same, TensorSpec, Value, View

__version__ = "0.1.0"

__all__ = [
    "DataDependentOutputException",
    "DispatchCacheInfo",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorDeviceMismatchError",
    "FakeTensorMode",
    "MetadataMismatchError",
    "MixedTensorsError",
    "New",
    "NoDataError",
    "OperatorError",
    "Same",
    "TensorMetadata",
    "TensorSpec",
    "UnderstudyError",
    "UnsupportedFakeTensorException",
    "UnsupportedMutationAliasingException",
    "UnsupportedOperatorException",
    "Value",
    "View",
    "extract_tensor_metadata",
    "get_plain_tensors",
    "is_fake",
    "mark_pure",
    "maybe_get_fake_mode",
    "rule",
    "unset_fake_temporarily",
]
