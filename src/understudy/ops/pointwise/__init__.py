"""Elementwise operators.

unary               on one tensor; gradients of elementwise operators
binary_and_ternary  on two and three operands
foreach             lists of tensors: _foreach_* and fused optimizer steps
"""
