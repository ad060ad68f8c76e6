"""Values: what is known of tensors, and what operators do to them."""

from understudy.spec.outcomes import New, Outcome, Outcomes, Same, Value, View, normal
from understudy.spec.tensor_spec import TensorSpec, contiguous_strides, is_contiguous, product

__all__ = [
    "New",
    "Outcome",
    "Outcomes",
    "Same",
    "TensorSpec",
    "Value",
    "View",
    "contiguous_strides",
    "is_contiguous",
    "normal",
    "product",
]
