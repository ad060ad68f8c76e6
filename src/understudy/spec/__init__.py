"""spec: immutable values that describe tensors and operator calls.

    tensor_spec    TensorSpec
    call           Call and its outcomes: New, View, Same, Changed, Value
    strides        strides of new results
    elementwise    promotion of dtypes, broadcasting, and the result of an elementwise operator
    alternatives   the weakest guard for an answer about layouts
    sparse         sparse layouts
    error_context  adds context to errors
    device_facts   facts about devices on which answers depend (imported by its own name: it needs no torch)
"""

from understudy.spec.call import Changed, New, Outcome, Outcomes, Same, Value, View, normal
from understudy.spec.elementwise import (
    broadcast_shapes,
    broadcast_without_choice,
    check_broadcastable,
    check_expandable,
    common_device,
    complex_type,
    default_complex_dtype,
    default_dtype,
    elementwise,
    float_type,
    is_integral,
    number_dtype,
    preserved_copy,
    promote,
    real_type,
    result_type,
)
from understudy.spec.strides import (
    channels_last_strides,
    elementwise_strides,
    is_channels_last_contiguous,
    is_dense,
    packed_strides,
    preserved_strides,
)
from understudy.spec.tensor_spec import (
    TensorSpec,
    contiguous_strides,
    is_contiguous,
    product,
    same_shape,
    spec_of,
)

__all__ = [
    "Changed",
    "New",
    "Outcome",
    "Outcomes",
    "Same",
    "TensorSpec",
    "Value",
    "View",
    "broadcast_shapes",
    "broadcast_without_choice",
    "channels_last_strides",
    "check_broadcastable",
    "check_expandable",
    "common_device",
    "complex_type",
    "contiguous_strides",
    "default_complex_dtype",
    "default_dtype",
    "elementwise",
    "elementwise_strides",
    "float_type",
    "is_channels_last_contiguous",
    "is_contiguous",
    "is_dense",
    "is_integral",
    "normal",
    "number_dtype",
    "packed_strides",
    "preserved_copy",
    "preserved_strides",
    "product",
    "promote",
    "real_type",
    "result_type",
    "same_shape",
    "spec_of",
]
