"""spec: immutable values that describe tensors and operator calls.

tensor_spec    TensorSpec
call           Call and its outcomes: New, View, Same, Changed, Value
strides        strides of new results
elementwise    promotion of dtypes, broadcasting, and the result of an elementwise operator
sparse         sparse layouts
error_context  adds context to errors
device_facts   facts about devices on which answers depend (imported by its own name: it needs no torch)
"""

from understudy.spec.call import (
    Changed as Changed,
    New as New,
    Outcome as Outcome,
    Outcomes as Outcomes,
    Same as Same,
    Value as Value,
    View as View,
    normal as normal,
)
from understudy.spec.elementwise import (
    broadcast_shapes as broadcast_shapes,
    broadcast_without_choice as broadcast_without_choice,
    check_broadcastable as check_broadcastable,
    check_expandable as check_expandable,
    common_device as common_device,
    complex_type as complex_type,
    default_complex_dtype as default_complex_dtype,
    default_dtype as default_dtype,
    elementwise as elementwise,
    float_type as float_type,
    is_integral as is_integral,
    number_dtype as number_dtype,
    preserved_copy as preserved_copy,
    promote as promote,
    real_type as real_type,
    result_type as result_type,
)
from understudy.spec.strides import (
    channels_last_strides as channels_last_strides,
    elementwise_strides as elementwise_strides,
    is_channels_last_contiguous as is_channels_last_contiguous,
    is_dense as is_dense,
    packed_strides as packed_strides,
    preserved_strides as preserved_strides,
)
from understudy.spec.tensor_spec import (
    TensorSpec as TensorSpec,
    contiguous_strides as contiguous_strides,
    is_contiguous as is_contiguous,
    product as product,
    same_shape as same_shape,
    spec_of as spec_of,
)
