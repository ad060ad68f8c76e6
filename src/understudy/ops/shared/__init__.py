"""Helpers of several families.

dims            dimension arguments and shapes after reductions
dtypes          sets of dtypes, checks of dtypes, numbers that a dtype can represent
layouts         memory formats, writes in place, strides of views
decompositions  the decorator for decompositions with symbolic sizes
"""
