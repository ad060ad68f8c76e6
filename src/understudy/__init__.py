"""understudy: stand-in tensors for PyTorch. Shape, dtype, strides, device and aliasing, but no data."""

from understudy import rules as _rules  # noqa: F401  (registers the rules)
from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    GuardOnDataDependentSymNode,
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
from understudy.shapes.bindings import (
    KeyPath,
    bind_symbols,
    compute_unbacked_bindings,
    eval_guards,
    free_symbols,
    free_unbacked_symbols,
    guard_or_false,
    guard_or_true,
    has_free_symbols,
    has_free_unbacked_symbols,
    rebind_unbacked,
    resolve_unbacked_bindings,
    statically_known_false,
    statically_known_true,
)
from understudy.shapes.contexts import Dim, dims
from understudy.shapes.env import Settings, ShapeEnv
from understudy.spec import New, Same, TensorSpec, Value, View
from understudy.trace.capture import make_fx
from understudy.trace.prop import FakeTensorProp
from understudy.trace.prop_errors import PropagationError

__version__ = "0.1.0"

__all__ = [
    "DataDependentOutputException",
    "Dim",
    "DispatchCacheInfo",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorDeviceMismatchError",
    "FakeTensorMode",
    "FakeTensorProp",
    "GuardOnDataDependentSymNode",
    "KeyPath",
    "MetadataMismatchError",
    "MixedTensorsError",
    "New",
    "NoDataError",
    "OperatorError",
    "PropagationError",
    "Same",
    "Settings",
    "ShapeEnv",
    "TensorMetadata",
    "TensorSpec",
    "UnderstudyError",
    "UnsupportedFakeTensorException",
    "UnsupportedMutationAliasingException",
    "UnsupportedOperatorException",
    "Value",
    "View",
    "bind_symbols",
    "compute_unbacked_bindings",
    "dims",
    "eval_guards",
    "extract_tensor_metadata",
    "free_symbols",
    "free_unbacked_symbols",
    "get_plain_tensors",
    "guard_or_false",
    "guard_or_true",
    "has_free_symbols",
    "has_free_unbacked_symbols",
    "is_fake",
    "make_fx",
    "mark_pure",
    "maybe_get_fake_mode",
    "rebind_unbacked",
    "resolve_unbacked_bindings",
    "rule",
    "statically_known_false",
    "statically_known_true",
    "unset_fake_temporarily",
]
