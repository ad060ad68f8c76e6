"""Operators that read and write elements by index.

advanced   x[i, :, j], index_put, one_hot
along_dim  index_select, gather, scatter and their relatives
searching  searchsorted, isin, one_hot, …
"""
