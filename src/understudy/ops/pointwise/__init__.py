"""Elementwise operators.

    unary               on one tensor
    binary_and_ternary  on two and three operands
    gradients           gradients of elementwise operators
    foreach             lists of tensors: _foreach_* and fused optimizer steps
"""
