"""Operators that combine elements along dimensions.

reductions  sum, mean, max, any, …
along_dim   cumulative sums, softmax, sorting, numerical gradients
statistics  histograms
"""
